"""The processor time of another process."""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["other_threads_seconds", "processor_seconds"]


def processor_seconds(pid: int) -> float:
    """The processor time of all threads of ``pid`` since its start."""
    # The clock of another process's processor time: clock_getcpuclockid(3), as Linux makes it.
    return time.clock_gettime((~pid << 3) | 2)


def other_threads_seconds(pid: int) -> float:
    """The same of all threads but the main one. Linux gives this in nanoseconds."""
    threads = Path(f"/proc/{pid}/task").glob("[0-9]*")
    times = [(one / "schedstat").read_text().split()[0] for one in threads if one.name != str(pid)]
    return sum(map(int, times)) / 1e9
