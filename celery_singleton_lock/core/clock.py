"""The only module that reads time. Deadlines need a clock that an operator cannot set."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any, Protocol

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
        """Return the seconds on a clock that is never set. Compare them within one host only."""

    def wall(self) -> float:
        """Return the seconds since the epoch, for records and messages that cross hosts."""

    def sleep(self, seconds: float) -> None:
        """Block this thread (or greenlet) for ``seconds``."""

    async def pause(self, seconds: float) -> None:
        """Suspend this asyncio coroutine for ``seconds``."""


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


class Timer:
    """A descriptor that becomes readable after some seconds; the time of a suspension counts.

    The timeout of a wait counts only the time in which the machine runs: a thread that has slept
    for one of its 20 seconds when a laptop is closed sleeps for 19 more when it is opened again.
    """

    __slots__ = ("_fileno", "_set_time")

    def __init__(self, fileno: int, set_time: Any) -> None:
        self._fileno, self._set_time = fileno, set_time

    def __del__(self) -> None:
        os.close(self._fileno)

    @classmethod
    def open(cls) -> Timer | None:
        """A new timer; None if this system has none."""
        # Only processes that hold leases need it, and tasks have loaded it already. The module os
        # has these functions since Python 3.13.
        import ctypes

        try:
            system = ctypes.CDLL(None)
            fileno = system.timerfd_create(_CLOCK_ID, os.O_NONBLOCK | os.O_CLOEXEC)
            set_time = system.timerfd_settime
        except (AttributeError, OSError, TypeError):
            return None  # not Linux
        return cls(fileno, set_time) if fileno >= 0 else None

    def fileno(self) -> int:
        """The descriptor, to wait on."""
        return self._fileno

    def set(self, seconds: float | None) -> None:
        """Count ``seconds`` from now; None: stop counting."""
        import ctypes

        # 0 would stop it.
        nanoseconds = 0 if seconds is None else max(int(seconds * 1e9), 1)
        # struct itimerspec: the interval, and the time until the first expiry.
        times = (ctypes.c_long * 4)(0, 0, *divmod(nanoseconds, 1_000_000_000))
        self._set_time(self._fileno, 0, times, None)
