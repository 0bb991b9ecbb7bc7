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
    """

    def __init__(self, app: Celery, clock: Clock, sink: Sink) -> None:
        self.error = "not connected yet"
        self.received = 0
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
            if event is not None:
                self.received += 1
                self._sink(event)
        except Exception:
            logger.exception("singleton serve: can't read the worker event %.200r", fields)


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
