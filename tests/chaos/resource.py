"""The guarded resource: a file per key that refuses writes with a fence below the highest seen.

The file is its own history: its lines stand in the order in which the resource took its decisions.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

#: Bytes that hold at least the last line.
_TAIL = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One decision.

    Attributes:
        run: The body that wrote.
        fence: What it showed; None: its lock has none.
        accepted: Whether the write was taken.
        highest: The highest fence seen, this one included.
    """

    run: str
    fence: int | None
    accepted: bool
    highest: int


class Resource:
    """What the bodies of one key write to.

    Args:
        directory: Where its file is.
        key: Whose it is.
        compares: Whether it refuses anything. Without, it is a resource as most are.
    """

    def __init__(self, directory: Path, key: str, *, compares: bool = True) -> None:
        self.path = directory / f"resource-{key}.log"
        self._compares = compares

    def write(self, run: str, fence: int | None) -> bool:
        """Write once; whether it was accepted. Waits for another writer that is in the midst."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            # The kernel takes it off a process that is killed.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            highest = self._highest(descriptor)
            accepted = fence is None or fence >= highest or not self._compares
            line = Write(
                run=run, fence=fence, accepted=accepted, highest=max(highest, fence or highest)
            )
            os.write(descriptor, json.dumps(asdict(line)).encode() + b"\n")
        finally:
            os.close(descriptor)
        return accepted

    def writes(self) -> list[Write]:
        """All decisions so far, in their order."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().splitlines(keepends=True)
        return [Write(**json.loads(line)) for line in lines if line.endswith("\n")]

    @staticmethod
    def _highest(descriptor: int) -> int:
        size = os.fstat(descriptor).st_size
        if not size:
            return 0
        tail = os.pread(descriptor, _TAIL, max(0, size - _TAIL))
        return int(json.loads(tail.splitlines()[-1])["highest"])


def resources(directory: Path) -> dict[str, list[Write]]:
    """The decisions of all resources of a campaign, by key."""
    names = [path.name.removeprefix("resource-") for path in directory.glob("resource-*.log")]
    return {
        key: Resource(directory, key).writes() for key in (n.removesuffix(".log") for n in names)
    }
