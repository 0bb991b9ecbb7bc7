"""A clock that is advanced by hand."""

from __future__ import annotations

__all__ = ["ManualClock"]


class ManualClock:
    """A :class:`~celery_singleton_lock.core.clock.Clock` for tests; ``sleep`` returns at once.

    Args:
        now: The start of the clock for deadlines, in seconds.
        wall: The start of the wall clock, in seconds since the epoch.
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
        """Advance both clocks by ``seconds``.

        Raises:
            ValueError: ``seconds`` is negative: the clock for deadlines never steps back.
        """
        if seconds < 0:
            raise ValueError(f"advance({seconds!r}): time doesn't run backwards")
        self._now += seconds
        self._wall += seconds
