"""The processor time of another process."""

from __future__ import annotations

import time

__all__ = ["processor_seconds"]


def processor_seconds(pid: int) -> float:
    """Of all its threads, since it was started."""
    # The clock of another process's processor time: clock_getcpuclockid(3), as Linux makes it.
    return time.clock_gettime((~pid << 3) | 2)
