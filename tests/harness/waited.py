"""How long a block of code waited, and how long a thread had to wait for a processor."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SCHEDULED = Path("/proc/thread-self/schedstat")


@contextmanager
def waited() -> Iterator[list[float]]:
    """Append the seconds for which this thread waited in the block to the list that is given.

    That is the duration without the time in which the thread computed, or could have but for other
    processes: a bound of a wait is a promise of the code, and a bound of a duration would be one of
    the machine. Where the kernel does not count it (other than Linux), it is the duration.
    """
    found: list[float] = []
    begin, scheduled = time.monotonic(), sum(scheduling())
    yield found
    busy = sum(scheduling()) - scheduled  # first: reading it takes time too
    found.append(time.monotonic() - begin - busy)


def scheduling() -> tuple[float, float]:
    """Seconds for which this thread computed, and for which it was ready and had no processor.

    Both are 0 where the kernel does not count them.
    """
    if not _SCHEDULED.exists():
        return 0.0, 0.0
    computed, ready, _ = _SCHEDULED.read_text().split()
    return int(computed) / 1e9, int(ready) / 1e9
