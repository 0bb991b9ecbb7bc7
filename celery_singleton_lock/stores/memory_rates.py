"""The rates in the memory of this process, by the formula of ``stores/redis/lua/rate.lua``."""

from __future__ import annotations

from typing import Final

from ..core.clock import Clock
from ..core.rate import Rate

# Number of keys at which those are removed whose rate is not used any more.
_SWEEP_AT: Final = 256


class MemoryRates:
    """When the next call of each key may start. The caller has the lock of the store.

    Args:
        clock: The clock of the store.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times: dict[str, float] = {}
        self._sweep_at = _SWEEP_AT

    def start(self, key: str, rate: Rate) -> float:
        """Count a start, and return 0; or return the seconds until a call of ``key`` may start."""
        now = self._clock.now()
        at, latest = max(self._times.get(key, 0.0), now), now + rate.burst * rate.interval
        if at > latest:
            self._times[key] = at = latest  # the rate was a lower one
        if (left := at - (rate.burst - 1) * rate.interval - now) > 0:
            return left
        self._times[key] = at + rate.interval
        if len(self._times) > self._sweep_at:
            self._times = {one: time for one, time in self._times.items() if time > now}
            self._sweep_at = max(_SWEEP_AT, 2 * len(self._times))
        return 0.0

    def left(self, key: str, rate: Rate) -> float:
        """The seconds until a call of ``key`` may start."""
        at = self._times.get(key, 0.0) - (rate.burst - 1) * rate.interval
        return max(at - self._clock.now(), 0.0)
