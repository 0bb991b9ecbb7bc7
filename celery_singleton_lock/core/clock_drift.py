"""How far the clocks of this host and of a store may run apart while a lease lasts."""

from __future__ import annotations

from typing import Final

# An allowance for clocks that run at different speeds, and for rounding to milliseconds in Redis:
# 1 % plus 2 ms, as in the Redlock specification (redis.io, "Distributed Locks with Redis").
_DRIFT_RATIO: Final = 0.01
_DRIFT_CONSTANT: Final = 0.002


def drift(ttl: float) -> float:
    """Seconds to subtract from a deadline ``ttl`` seconds away."""
    return ttl * _DRIFT_RATIO + _DRIFT_CONSTANT
