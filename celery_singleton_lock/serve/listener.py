"""Receives the worker events of this library, and passes them on as the events that they were."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, Final

from celery import Celery

from ..core.clock import Clock
from ..core.events import Event, EventName, Sink

logger = logging.getLogger("celery_singleton_lock")

_TYPE: Final = "singleton-"
# The type of the event in which a worker reports the number of events that it could not send.
_DROPPED: Final = f"{_TYPE}events-dropped"
# The routing key of a worker event is its type with dots.
_ROUTING_KEY: Final = "singleton.#"
# Seconds between two tries to reach the broker.
_PAUSE: Final = 1.0


class Listener:
    """Receives worker events on a thread of its own, and connects again after each failure.

    Args:
        app: The app, whose broker is asked.
        clock: The clock.
        sink: Called with each event.

    Attributes:
        error: Why no events are received; empty: they are.
        received: The number of events received.
        dropped: The number of events that workers could not send.
    """

    def __init__(self, app: Celery, clock: Clock, sink: Sink) -> None:
        self.error = "not connected yet"
        self.received = self.dropped = 0
        # For each worker the fields that identify its last event.
        self._last: dict[Any, tuple[Any, ...]] = {}
        self._app, self._clock, self._sink = app, clock, sink

    def start(self) -> None:
        threading.Thread(target=self._listen, name="singleton-listener", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                self._capture()
            except Exception as exc:
                # Each transport has exceptions of its own.
                self._fail(f"{type(exc).__name__}: {exc}")
            self._clock.sleep(_PAUSE)

    def _capture(self) -> None:
        conf = self._app.conf
        # One try: kombu's default is to try for ever, with pauses of up to 30 s.
        with self._app.connection_for_read(
            heartbeat=conf.broker_heartbeat, transport_options={"max_retries": 1}
        ) as connection:
            receiver = self._app.events.Receiver(
                connection, handlers={"*": self._take}, routing_key=_ROUTING_KEY
            )
            receiver.on_consume_ready = self._on_ready
            receiver.capture(limit=None, timeout=None, wakeup=False)

    def _on_ready(self, *_: Any, **__: Any) -> None:
        if self.error:
            logger.info("singleton serve: receives worker events")
        self.error = ""

    def _fail(self, error: str) -> None:
        if not self.error:
            logger.warning("singleton serve: the broker is unreachable: %s", error)
        self.error = error

    def _take(self, fields: Mapping[str, Any]) -> None:
        try:
            event = event_of(fields)
            if fields.get("type") == _DROPPED:
                self.dropped += int(fields["count"])
            elif event is not None and not self._is_resent(fields):
                self.received += 1
                self._sink(event)
        except Exception:
            logger.exception("singleton serve: can't read the worker event %.200r", fields)

    def _is_resent(self, fields: Mapping[str, Any]) -> bool:
        """Whether the worker has sent this event before, because it got no reply of the broker."""
        worker = fields.get("hostname")
        event = tuple(map(fields.get, ("type", "uuid", "key", "timestamp")))
        was, self._last[worker] = self._last.get(worker), event
        return was == event and event[-1] is not None


def event_of(fields: Mapping[str, Any]) -> Event | None:
    """The event that a worker event describes; None: it is none, or one of a newer version."""
    kind = fields.get("type")
    if not isinstance(kind, str) or not kind.startswith(_TYPE):
        return None
    try:
        name = EventName(kind.removeprefix(_TYPE))
    except ValueError:
        return None
    words = {word: str(fields.get(word) or "") for word in ("key", "name", "uuid")}
    return Event(
        name=name, key=words["key"], task=words["name"], task_id=words["uuid"], data=fields
    )
