"""A clock for tests, which they advance by hand."""

from __future__ import annotations

import math
from collections.abc import Callable


class ManualClock:
    """A clock for tests, which you advance by hand. ``sleep`` returns at once.

    While a call sleeps on this clock, other leases are renewed, as in production. :meth:`advance`
    renews none, so leases can expire.

    Args:
        now: The start of the clock for deadlines, in seconds.
        wall: The start of the wall clock, in seconds since the epoch.
    """

    def __init__(self, now: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._now = now
        self._wall = wall
        #: Called after each second of a sleep.
        self.meanwhile: Callable[[], None] = lambda: None

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._wall

    def sleep(self, seconds: float) -> None:
        end = self._now + seconds
        if seconds > 0:
            # A remainder that rounding has left would never pass, and its client would wait on.
            end = max(end, math.nextafter(self._now, math.inf))
        while self._now < end:
            self.advance(min(1.0, end - self._now))
            self.meanwhile()

    async def pause(self, seconds: float) -> None:
        self.sleep(seconds)

    def advance(self, seconds: float) -> None:
        """Advance both clocks by ``seconds``.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"advance({seconds!r}): time doesn't run backwards")
        self._now += seconds
        self._wall += seconds
