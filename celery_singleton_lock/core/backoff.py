"""The delays between tries: exponential backoff with jitter."""

from __future__ import annotations

from random import random
from typing import Final

_MAX_DOUBLINGS: Final = 30


def backoff(delay: float, max_delay: float, tries: int) -> float:
    """Seconds: ``delay`` doubled ``tries`` times, at most ``max_delay``, half of it jitter.

    This is "equal jitter": clients that contended once don't contend again at the same time, and no
    client returns at once (M. Brooker, "Exponential Backoff And Jitter", 2015).

    It delays requeues (`message.copy.Pace`), tries during an outage, and the polls of a client
    that waits for another holder.
    """
    top: float = min(max_delay, delay * 2 ** min(tries, _MAX_DOUBLINGS))
    return top * (0.5 + 0.5 * random())
