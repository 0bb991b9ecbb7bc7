"""A private ZooKeeper ensemble: own ports and data, real processes, ended by their ids."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from example_project.private_server import free_port
from tests.harness.addresses import LOCAL
from tests.harness.certificates import Certificates
from tests.harness.ensemble import Ensemble, hosts

#: Where Debian's package has the server.
JAR = Path("/usr/share/java/zookeeper.jar")

#: What its TLS needs, and its manifest doesn't name.
CODEC = JAR.with_name("netty-codec.jar")

#: Seconds until an ensemble has a leader: three virtual machines start, on two busy cores.
BOOT_TIMEOUT = 90.0


def find_zookeeper() -> str | None:
    """The path of Java, or None where it or ZooKeeper is not installed."""
    return shutil.which("java") if JAR.exists() else None


class ZooKeeperEnsemble(Ensemble):
    """Members on this machine, as many as asked for.

    Args:
        members: How many; three survive the loss of one.
        tick: Seconds; sessions last two ticks at least.
        max_session: Seconds; the server's default is 20 ticks.
        tls: A second port, on which clients speak TLS and show a certificate; `url` names it.
        durable: Whether each write waits for the disk, as ZooKeeper does by default. Not needed to
            outlive a killed process; and on a shared disk a single write may wait for seconds.
        address: Where they listen for clients.
    """

    def __init__(
        self,
        members: int = 3,
        *,
        tick: float = 0.5,
        max_session: float = 1e5,
        tls: Certificates | None = None,
        durable: bool = False,
        address: str = LOCAL,
    ) -> None:
        java = find_zookeeper()
        if java is None:
            raise RuntimeError("ZooKeeper is not installed. Debian: apt-get install zookeeper")
        super().__init__("zookeeper", members, BOOT_TIMEOUT, address)
        self._tls = tls
        self._tls_ports = [free_port() for _ in range(members)]
        peers = [(free_port(), free_port()) for _ in range(members)]
        servers = "".join(
            f"server.{n}=127.0.0.1:{quorum}:{election}\n"
            for n, (quorum, election) in enumerate(peers, 1)
        )
        for number, port in enumerate(self.ports, 1):
            home = self._directory / f"m{number}"
            home.mkdir()
            (home / "myid").write_text(str(number))
            (home / "zoo.cfg").write_text(
                f"tickTime={round(tick * 1000)}\ninitLimit=20\nsyncLimit=10\n"
                f"maxSessionTimeout={round(max_session * 1000)}\n"
                f"dataDir={home}\nclientPort={port}\nclientPortAddress={address}\n"
                "maxClientCnxns=0\nadmin.enableServer=false\n4lw.commands.whitelist=srvr,cons\n"
                + servers
                + (self._tls_config(tls, self._tls_ports[number - 1]) if tls else "")
            )
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        options = ["-Xmx128m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        options += [] if durable else ["-Dzookeeper.forceSync=no"]
        self._define(
            [
                java,
                *options,
                "-cp",
                f"{JAR}:{CODEC}",
                main,
                str(self._directory / f"m{n}" / "zoo.cfg"),
            ]
            for n in range(1, members + 1)
        )

    def url(self, path: str = "", members: tuple[int, ...] | None = None) -> str:
        """The store's URL, of all members or of those that are named."""
        if self._tls:
            return f"zks://{hosts(self._tls_ports, members)}/{path}?{self._tls.query}"
        return f"zk://{hosts(self.ports, members, self._address)}/{path}"

    def ask(self, number: int, word: str) -> str:
        """A member's answer to a four-letter word; empty if it doesn't answer."""
        try:
            with socket.create_connection((self._address, self.ports[number]), timeout=2) as link:
                link.sendall(word.encode())
                return b"".join(iter(lambda: link.recv(65536), b"")).decode()
        except OSError:
            return ""

    @staticmethod
    def _tls_config(tls: Certificates, port: int) -> str:
        return (
            f"secureClientPort={port}\nsecureClientPortAddress=127.0.0.1\n"
            "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\n"
            f"ssl.keyStore.location={tls.both}\nssl.trustStore.location={tls.ca}\n"
        )

    def _leader(self) -> int | None:
        modes = {number: self._mode(number) for number in self._living()}
        # A single member is no ensemble.
        leaders = [number for number, mode in modes.items() if mode in ("leader", "standalone")]
        followers = list(modes.values()).count("follower")
        whole = len(leaders) == 1 and len(leaders) + followers == len(modes)
        return leaders[0] if whole else None

    def _mode(self, number: int) -> str:
        for line in self.ask(number, "srvr").splitlines():
            if line.startswith("Mode: "):
                return line.removeprefix("Mode: ")
        return ""
