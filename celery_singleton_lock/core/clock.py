"""The only place that reads time: a deadline needs a clock that no operator can step."""

from __future__ import annotations

import time
from functools import partial
from typing import Protocol

# CLOCK_BOOTTIME goes on while the machine is suspended, as the store's clock does; CLOCK_MONOTONIC
# doesn't, and a laptop that wakes after an hour would trust an hour-old lease. It is one clock for
# all processes of a host, so a worker parent can compare what its children wrote. macOS lacks it;
# there CLOCK_MONOTONIC_RAW counts suspended time too.
_CLOCK_ID: int = getattr(
    time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC_RAW", time.CLOCK_MONOTONIC)
)


class Clock(Protocol):
    """A source of time; ``testing.ManualClock`` is the other one."""

    def now(self) -> float:
        """Seconds on a clock that never steps; comparable within one host only."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch; for records and messages that cross hosts."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block this thread (or greenlet) for ``seconds``."""
        ...


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    # Without a step of Python's: each task asks several times.
    now = staticmethod(partial(time.clock_gettime, _CLOCK_ID))

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        # Looked up at each call: gevent and eventlet replace time.sleep.
        time.sleep(seconds)
