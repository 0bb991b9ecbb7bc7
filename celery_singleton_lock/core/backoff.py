"""The delays between tries: exponential backoff with jitter."""

from __future__ import annotations

from random import random
from typing import Final

#: The delay of a requeue in seconds. It doubles at each try, up to the second number, and half of
#: it is jitter.
Pace = tuple[float, float]
#: For an earlier attempt of the same task, which releases within milliseconds: it published its
#: retry from inside its body.
SHORTLY: Final[Pace] = (0.05, 1.0)
#: For started work with another holder, for duplicates, for a lost lease, and for an unreachable
#: store.
AGAIN: Final[Pace] = (1.0, 30.0)
#: For a call whose key is paused, where the store keeps no queue for it.
PAUSED: Final[Pace] = (5.0, 60.0)

_MAX_DOUBLINGS: Final = 30


def backoff(delay: float, max_delay: float, tries: int) -> float:
    """Seconds: ``delay`` doubled ``tries`` times, at most ``max_delay``, half of it jitter.

    This is "equal jitter": clients that contended once don't contend again at the same time, and no
    client returns at once (M. Brooker, "Exponential Backoff And Jitter", 2015).

    It delays requeues (`Pace`), tries during an outage, and the polls of a client
    that waits for another holder.
    """
    top: float = min(max_delay, delay * 2 ** min(tries, _MAX_DOUBLINGS))
    return top * (0.5 + 0.5 * random())
