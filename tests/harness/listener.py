"""What monitors receive: the worker events of a test's workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery

from celery_singleton_lock.core.events import EventName
from tests.harness.worker import CeleryWorker


def type_of(name: EventName) -> str:
    """The type of the worker event about ``name``."""
    return f"singleton-{name}"


class Listener:
    """A real `app.events.Receiver`, on a thread of its own."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._events: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._receiver: Any = None
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._receiver.should_stop = True
        self._thread.join(20)

    def _listen(self) -> None:
        with self._app.connection_for_read() as connection:
            self._receiver = self._app.events.Receiver(connection, handlers={"*": self._take})
            self._receiver.capture(limit=None, timeout=None, wakeup=False)

    def _take(self, event: dict[str, Any]) -> None:
        with self._news:
            self._events.append(event)
            self._news.notify_all()

    @property
    def events(self) -> list[dict[str, Any]]:
        """All events so far."""
        return list(self._events)

    def wait_for(self, kind: EventName | str, **fields: Any) -> dict[str, Any]:
        """The first event of this kind and with these fields, past or future."""
        found = []
        with self._news:
            assert self._news.wait_for(lambda: self.of(kind, **fields), timeout=20), self._events
            found = self.of(kind, **fields)
        return found[0]

    def of(self, kind: EventName | str, **fields: Any) -> list[dict[str, Any]]:
        """The events of this kind and with these fields so far.

        Args:
            kind: An event of this library, or the type of another worker event.
            **fields: What they have to be.
        """
        wanted = type_of(kind) if isinstance(kind, EventName) else kind
        return [
            event
            for event in self.events
            if event["type"] == wanted and fields.items() <= event.items()
        ]


@contextmanager
def listening(
    app: Celery, start: Callable[..., CeleryWorker], *name: str, **options: Any
) -> Iterator[tuple[Listener, CeleryWorker]]:
    """A listener that misses nothing of the worker that ``start(*name, **options)`` starts.

    The worker sends events (``-E``), unless the options have other ``args``.
    """
    with Listener(app) as listener:
        worker = start(*name, **{"args": ["-E"], **options})
        # Its heartbeat shows that the receiver has subscribed.
        listener.wait_for("worker-heartbeat", hostname=worker.hostname)
        yield listener, worker
