"""The events of a locker or a heartbeat that a test has made."""

from __future__ import annotations

from celery_singleton_lock.core.events import DATA, Event


class Recorded:
    """A sink that keeps the events that it gets. It never blocks, so it is no `Observer`."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self._events.append(event)

    def all(self) -> list[Event]:
        """The events so far."""
        for event in self._events:
            assert event.data.keys() <= {*DATA[event.name]}, event
        return self._events
