"""Members of a consensus store on this machine: real processes, ended by their ids."""

from __future__ import annotations

import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from example_project.private_server import free_port
from tests.harness.addresses import LOCAL
from tests.harness.processes import POLL, Process


class Ensemble(ABC):
    """Members with own ports and data. Three survive the loss of one.

    Args:
        name: The program's name, for logs and the directory of the data.
        members: The number of members.
        boot_timeout: Seconds until there is a leader.
        address: Where they listen for clients.
    """

    def __init__(self, name: str, members: int, boot_timeout: float, address: str = LOCAL) -> None:
        self._address = address
        self._name = name
        self._boot_timeout = boot_timeout
        self._directory = Path(tempfile.mkdtemp(prefix=f"csl-{name}-"))
        self._commands: list[list[str]] = []
        self._members: list[Process] = []
        #: The clients' ports.
        self.ports = [free_port() for _ in range(members)]

    @abstractmethod
    def _leader(self) -> int | None:
        """The number of the leader, if all living members agree about it."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Start the members and wait until they have a leader."""
        for member in self._members:
            member.start()
        self.leader()
        return self

    def stop(self) -> None:
        """Kill the members and remove their data."""
        for member in self._members:
            if member.alive:
                member.kill_group()
        shutil.rmtree(self._directory, ignore_errors=True)

    def leader(self) -> int:
        """The number of the leader; waits until all living members agree about it."""
        deadline = time.monotonic() + self._boot_timeout
        while time.monotonic() < deadline:
            leader = self._leader()
            if leader is not None:
                return leader
            time.sleep(POLL * 5)  # between two questions; the answer is what counts
        raise AssertionError("no leader:\n" + "\n".join(m.tail() for m in self._members))

    def kill(self, number: int) -> None:
        """SIGKILL a member."""
        self._members[number].kill_group()

    def pause(self, number: int) -> None:
        """SIGSTOP a member: its connections stay open, and nothing answers, as in a partition."""
        self._members[number].stop()

    def resume(self, number: int) -> None:
        """SIGCONT: undo `pause`; the member then reads what was sent meanwhile."""
        self._members[number].cont()

    @contextmanager
    def paused(self, numbers: Iterable[int]) -> Iterator[None]:
        """Some of them stand still; after that there is a leader."""
        chosen = list(numbers)
        for number in chosen:
            self.pause(number)
        try:
            yield
        finally:
            for number in chosen:
                self.resume(number)
            self.leader()

    def alive(self, number: int) -> bool:
        """Whether a member's process exists."""
        return self._members[number].alive

    def start_member(self, number: int) -> None:
        """Start a killed member again, with its data; there may be no leader yet."""
        self._members[number] = self._process(number).start()

    def revive(self, number: int) -> None:
        """As `start_member`, and wait until there is a leader."""
        self.start_member(number)
        self.leader()

    def _define(self, commands: Iterable[list[str]]) -> None:
        """Set the command of each member."""
        self._commands = list(commands)
        self._members = [self._process(number) for number in range(len(self._commands))]

    def _living(self) -> list[int]:
        return [number for number, member in enumerate(self._members) if member.alive]

    def _process(self, number: int) -> Process:
        return Process(self._commands[number], name=f"{self._name}{number}")


def hosts(ports: Sequence[int], members: Sequence[int] | None, address: str = LOCAL) -> str:
    """The hosts of a URL: of all members, or of those that are named."""
    chosen = ports if members is None else [ports[number] for number in members]
    return ",".join(f"{address}:{port}" for port in chosen)
