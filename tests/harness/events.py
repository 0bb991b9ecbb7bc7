"""The events of a locker or a heartbeat that a test has made."""

from __future__ import annotations

from celery_singleton_lock.core.events import Event
from celery_singleton_lock.core.observers import observers

# Starts the observers' thread. Later a test may have replaced the function that starts threads.
with observers.elsewhere():
    observers.run(int)


class Recorded:
    """A sink that keeps the events that it gets.

    While the observers of an earlier test's events run, such as those of a heartbeat that has not
    ended yet, those of all other threads wait for them. So a reader of the events waits too.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self._events.append(event)

    def all(self) -> list[Event]:
        """The events so far."""
        observers.flush(30)
        return self._events
