"""The pace of a heartbeat: when a lease is renewed, how long an answer is waited for, when again.

Of the heartbeat and of the parent heartbeat alike. All times in seconds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

__all__ = ["MAX_TIMEOUT", "interval_of", "patience", "retry_pause", "timeout_for"]

# Three renewals fit in a ttl: two may fail before the lease is at risk.
_RENEWALS_PER_TTL: Final = 3
# A reply that takes longer than ttl/6 leaves no time for another try; 2 s is long for any store.
# In steps, for a store keeps connections per timeout: a ttl of "the time that is left" would make
# one connection each.
_TIMEOUTS_PER_TTL: Final = 6
_TIMEOUT_STEPS: Final = (2.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
MAX_TIMEOUT: Final = _TIMEOUT_STEPS[0]
_MIN_TIMEOUT: Final = 0.05
# While the store is silent: often enough to use the first moment it is back, seldom enough not to
# storm it.
_RETRY_RATIO: Final = 0.05
_MAX_RETRY_PAUSE: Final = 1.0
_MIN_RETRY_PAUSE: Final = 0.01


@lru_cache(maxsize=64)
def interval_of(ttl: float, trusted: float) -> float:
    """From one renewal to the next; an answer vouches for the share ``trusted`` of ``ttl``."""
    return ttl * trusted / _RENEWALS_PER_TTL


@lru_cache(maxsize=64)
def timeout_for(ttl: float) -> float:
    """How long to wait for one reply about a lease of ``ttl``."""
    return max(_step(ttl / _TIMEOUTS_PER_TTL), _MIN_TIMEOUT)


def patience(ttl: float, left: float) -> float:
    """As :func:`timeout_for`, but not beyond the ``left`` time until the deadline."""
    return min(timeout_for(ttl), _step(left))


def retry_pause(ttl: float, left: float) -> float:
    """Until the silent store is asked again; the last moments before the deadline are used too."""
    return min(ttl * _RETRY_RATIO, _MAX_RETRY_PAUSE, max(left / 2, _MIN_RETRY_PAUSE))


def _step(longest: float) -> float:
    return next((step for step in _TIMEOUT_STEPS if step <= longest), _TIMEOUT_STEPS[-1])
