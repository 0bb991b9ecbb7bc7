"""A private etcd cluster: own ports and data, real processes, ended by their ids."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests

from example_project.private_server import free_port
from tests.harness.certificates import Certificates
from tests.harness.processes import POLL, Process

#: Seconds until a cluster has a leader: one alone on the machine, more beside other tests.
BOOT_TIMEOUT = 60.0


def find_etcd() -> str | None:
    """The path of the program, or None where it is not installed."""
    return shutil.which("etcd")


class EtcdCluster:
    """Members on this machine, as many as asked for.

    Args:
        members: How many; three survive the loss of one.
        tls: Clients have to speak TLS, and to show a certificate.
        options: More arguments of each.
    """

    def __init__(
        self, members: int = 3, *, tls: Certificates | None = None, options: Sequence[str] = ()
    ) -> None:
        binary = find_etcd()
        if binary is None:
            raise RuntimeError("etcd is not installed. Debian: apt-get install etcd-server")
        self._directory = Path(tempfile.mkdtemp(prefix="csl-etcd-"))
        self.ports = [free_port() for _ in range(members)]
        self._tls = tls
        scheme, arguments = "http", list(options)
        if tls is not None:
            scheme = "https"
            arguments += ["--cert-file", str(tls.cert), "--key-file", str(tls.key)]
            arguments += ["--trusted-ca-file", str(tls.ca), "--client-cert-auth"]
        peers = [free_port() for _ in range(members)]
        cluster = ",".join(f"m{n}=http://127.0.0.1:{port}" for n, port in enumerate(peers))
        self._commands = [
            [
                binary,
                *("--name", f"m{number}"),
                *("--data-dir", str(self._directory / f"m{number}")),
                *("--listen-client-urls", f"{scheme}://127.0.0.1:{client}"),
                *("--advertise-client-urls", f"{scheme}://127.0.0.1:{client}"),
                *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
                *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
                *("--initial-cluster", cluster),
                *("--initial-cluster-token", self._directory.name),
                *arguments,
            ]
            for number, (client, peer) in enumerate(zip(self.ports, peers, strict=True))
        ]
        self._members = [Process(command, name=f"etcd{n}") for n, command in self._named()]

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
        """Start the members and wait until they have a leader."""
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
        ports = [self.ports[n] for n in members] if members is not None else self.ports
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        return (
            f"etcds://{hosts}/{path}?{self._tls.query}" if self._tls else f"etcd://{hosts}/{path}"
        )

    def leader(self) -> int:
        """The number of the member that leads, as those that live agree; waits for one."""
        deadline = time.monotonic() + BOOT_TIMEOUT
        while time.monotonic() < deadline:
            states = [self._status(n) for n, member in enumerate(self._members) if member.alive]
            leading = {state.get("leader", "0") for state in states}
            leaders = [
                n
                for n, member in enumerate(self._members)
                if member.alive and self._leads(self._status(n))
            ]
            if len(leading) == 1 and "0" not in leading and len(leaders) == 1:
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
        self._members[number] = Process(self._commands[number], name=f"etcd{number}").start()

    def revive(self, number: int) -> None:
        """As `start_member`, and wait until there is a leader."""
        self.start_member(number)
        self.leader()

    def post(self, path: str, body: dict[str, Any], number: int = 0) -> dict[str, Any]:
        """Ask a member, around the store."""
        tls = self._tls
        options: dict[str, Any] = {"verify": tls.ca, "cert": (tls.cert, tls.key)} if tls else {}
        url = f"{'https' if tls else 'http'}://127.0.0.1:{self.ports[number]}/v3/{path}"
        reply: dict[str, Any] = requests.post(url, json=body, timeout=5, **options).json()
        return reply

    def lease_count(self) -> int:
        """How many etcd leases there are."""
        return len(self.post("lease/leases", {}).get("leases", []))

    def _named(self) -> list[tuple[int, list[str]]]:
        return list(enumerate(self._commands))

    def _status(self, number: int) -> dict[str, Any]:
        try:
            return self.post("maintenance/status", {}, number)
        except (requests.RequestException, ValueError):
            return {}

    @staticmethod
    def _leads(status: dict[str, Any]) -> bool:
        return bool(status) and status.get("leader") == status["header"].get("member_id")
