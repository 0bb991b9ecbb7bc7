"""A clock that stands still until it is told to go on."""

from __future__ import annotations

__all__ = ["ManualClock"]


class ManualClock:
    """Seconds that pass by :meth:`advance` and by :meth:`sleep`, and not otherwise."""

    def __init__(self, now: float = 1000.0, wall: float = 1_750_000_000.0) -> None:
        self._now = now
        self._wall = wall

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._wall

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self._now += seconds
        self._wall += seconds
