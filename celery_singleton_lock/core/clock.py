"""The only module that reads time. Deadlines need a clock that an operator cannot set."""

from __future__ import annotations

import time
from functools import partial
from typing import Protocol

# CLOCK_BOOTTIME counts the time while the machine is suspended, as the store's clock does.
# CLOCK_MONOTONIC does not: a laptop that wakes after an hour would trust an hour-old lease. All
# processes of a host share the clock, so a worker parent can compare the times that its children
# wrote. macOS lacks CLOCK_BOOTTIME; there CLOCK_MONOTONIC_RAW counts suspended time too.
_CLOCK_ID: int = getattr(
    time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC_RAW", time.CLOCK_MONOTONIC)
)


class Clock(Protocol):
    """A source of time: `SystemClock`, or ``testing.ManualClock`` in tests."""

    def now(self) -> float:
        """Seconds on a clock that is never set; comparable within one host only."""

    def wall(self) -> float:
        """Seconds since the epoch; for records and messages that cross hosts."""

    def sleep(self, seconds: float) -> None:
        """Block this thread (or greenlet) for ``seconds``."""

    async def pause(self, seconds: float) -> None:
        """Suspend this coroutine of asyncio for ``seconds``."""


class SystemClock:
    """The clocks of the operating system."""

    __slots__ = ()

    # No Python frame per call: each task reads this clock several times.
    now = staticmethod(partial(time.clock_gettime, _CLOCK_ID))

    # These functions are looked up at each call: tests replace time.time (freezegun), and gevent
    # and eventlet replace time.sleep.
    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def pause(self, seconds: float) -> None:
        import asyncio  # only processes with coroutines pay for it

        await asyncio.sleep(seconds)
