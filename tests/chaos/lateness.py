"""How late this machine is: the time for which it kept a thread waiting that was ready to run.

A promise in seconds is one of the lock. What another program's load adds to it is measured, by a
thread that wakes often, and is not the lock's: a rule with such a bound adds it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from tests.chaos.history import History
from tests.chaos.site import now
from tests.harness.journal import Record, events
from tests.harness.waited import scheduling

#: Seconds between two measurements, and what is worth a record.
_PAUSE = 0.02
_NOTED = 0.005


@contextmanager
def noting_lateness(history: History) -> Iterator[None]:
    """Write the records while the block runs."""
    over = threading.Event()
    thread = threading.Thread(target=_note, args=(history, over), name="lateness", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _note(history: History, over: threading.Event) -> None:
    at, (_, before) = now(), scheduling()
    while not over.wait(_PAUSE):
        since, at = at, now()
        _, ready = scheduling()
        if ready - before > _NOTED:
            history.write("late", at=since, until=at, seconds=ready - before)
        before = ready


def deadline(records: Iterable[Record], begin: float, seconds: float) -> float:
    """When ``seconds`` after ``begin`` are over, without those for which the machine was late."""
    found = begin + seconds
    for record in events(records, "late"):  # by time
        if record.data["until"] > begin and record.at < found:
            found += record.data["seconds"]
    return found
