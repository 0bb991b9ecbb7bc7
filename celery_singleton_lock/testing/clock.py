"""A clock that stands still until it is told to move."""

from __future__ import annotations

__all__ = ["ManualClock"]


class ManualClock:
    """A :class:`~celery_singleton_lock.core.clock.Clock` for tests; ``sleep`` returns at once.

    Args:
        now: Where the clock of deadlines starts, in seconds.
        wall: Where the wall clock starts, in seconds since the epoch.
    """

    def __init__(self, now: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._now = now
        self._wall = wall

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._wall

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass on both clocks.

        Raises:
            ValueError: ``seconds`` is negative: the clock of deadlines never steps back.
        """
        if seconds < 0:
            raise ValueError(f"advance({seconds!r}): time doesn't run backwards")
        self._now += seconds
        self._wall += seconds
