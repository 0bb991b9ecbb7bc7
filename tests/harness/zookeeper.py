"""A private ZooKeeper ensemble: own ports and data, real processes, ended by their ids."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from example_project.private_server import free_port
from tests.harness.certificates import Certificates
from tests.harness.processes import POLL, Process

#: Where Debian's package has the server.
JAR = Path("/usr/share/java/zookeeper.jar")

#: What its TLS needs, and its manifest doesn't name.
CODEC = JAR.with_name("netty-codec.jar")

#: Seconds until an ensemble has a leader: three virtual machines start, on two busy cores.
BOOT_TIMEOUT = 90.0


def find_zookeeper() -> str | None:
    """The path of Java, or None where it or ZooKeeper is not installed."""
    return shutil.which("java") if JAR.exists() else None


class ZooKeeperEnsemble:
    """Members on this machine, as many as asked for.

    Args:
        members: How many; three survive the loss of one.
        tick: Seconds; sessions last two ticks at least.
        max_session: Seconds; the server's default is 20 ticks.
        tls: A second port, on which clients speak TLS and show a certificate; `url` names it.
        durable: Whether each write waits for the disk, as ZooKeeper does by default. Not needed to
            outlive a killed process; and on a shared disk a single write may wait for seconds.
    """

    def __init__(
        self,
        members: int = 3,
        *,
        tick: float = 0.5,
        max_session: float = 1e5,
        tls: Certificates | None = None,
        durable: bool = False,
    ) -> None:
        java = find_zookeeper()
        if java is None:
            raise RuntimeError("ZooKeeper is not installed. Debian: apt-get install zookeeper")
        self._directory = Path(tempfile.mkdtemp(prefix="csl-zookeeper-"))
        self.ports = [free_port() for _ in range(members)]
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
                f"dataDir={home}\nclientPort={port}\nclientPortAddress=127.0.0.1\n"
                "maxClientCnxns=0\nadmin.enableServer=false\n4lw.commands.whitelist=srvr,cons\n"
                + servers
                + (self._tls_config(tls, self._tls_ports[number - 1]) if tls else "")
            )
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        options = ["-Xmx128m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        options += [] if durable else ["-Dzookeeper.forceSync=no"]
        self._commands = [
            [
                java,
                *options,
                "-cp",
                f"{JAR}:{CODEC}",
                main,
                str(self._directory / f"m{n}" / "zoo.cfg"),
            ]
            for n in range(1, members + 1)
        ]
        self._members = [Process(c, name=f"zookeeper{n}") for n, c in enumerate(self._commands)]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> Self:
        """Start the members and wait until all of them follow one."""
        for member in self._members:
            member.start()
        self.leader()
        return self

    def stop(self) -> None:
        """Kill the members: their data are of no use to anybody."""
        for member in self._members:
            if member.alive:
                member.kill_group()
        shutil.rmtree(self._directory, ignore_errors=True)

    def url(self, path: str = "", members: tuple[int, ...] | None = None) -> str:
        """The store's URL, of all members or of those that are named."""
        all_ports = self._tls_ports if self._tls else self.ports
        ports = [all_ports[n] for n in members] if members is not None else all_ports
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        return f"zks://{hosts}/{path}?{self._tls.query}" if self._tls else f"zk://{hosts}/{path}"

    def leader(self) -> int:
        """The number of the member that leads; waits until every living one has its part."""
        deadline = time.monotonic() + BOOT_TIMEOUT
        while time.monotonic() < deadline:
            modes = {n: self._mode(n) for n, member in enumerate(self._members) if member.alive}
            # One alone is no ensemble.
            leaders = [n for n, mode in modes.items() if mode in ("leader", "standalone")]
            followers = list(modes.values()).count("follower")
            if len(leaders) == 1 and len(leaders) + followers == len(modes):
                return leaders[0]
            time.sleep(POLL * 5)  # between two questions; the answer is what counts
        raise AssertionError("no leader:\n" + "\n".join(m.tail() for m in self._members))

    def kill(self, number: int) -> None:
        """SIGKILL a member."""
        self._members[number].kill_group()

    def pause(self, number: int) -> None:
        """SIGSTOP a member: its connections stay open, and nothing answers, as in a partition."""
        self._members[number].stop()

    def resume(self, number: int) -> None:
        """SIGCONT: undo `pause`; what was sent meanwhile is read now."""
        self._members[number].cont()

    def alive(self, number: int) -> bool:
        """Whether a member's process is there."""
        return self._members[number].alive

    def start_member(self, number: int) -> None:
        """Start a killed member again, with its data; it may find nobody to follow yet."""
        self._members[number] = Process(self._commands[number], name=f"zookeeper{number}").start()

    def revive(self, number: int) -> None:
        """As `start_member`, and wait until there is a leader."""
        self.start_member(number)
        self.leader()

    def ask(self, number: int, word: str) -> str:
        """A member's answer to a four-letter word; empty if it doesn't answer."""
        try:
            with socket.create_connection(("127.0.0.1", self.ports[number]), timeout=2) as link:
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

    def _mode(self, number: int) -> str:
        for line in self.ask(number, "srvr").splitlines():
            if line.startswith("Mode: "):
                return line.removeprefix("Mode: ")
        return ""
