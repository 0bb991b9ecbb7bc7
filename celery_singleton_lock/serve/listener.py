"""Receives the worker events of this library, and passes them on as the events that they were."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from celery import Celery
from celery.events.receiver import EventReceiver

from ..core.clock import Clock
from ..core.events import Event, EventName
from ..instrumentation.counts import COUNTED, COUNTS

logger = logging.getLogger("celery_singleton_lock")

_TYPE: Final = "singleton-"
# The type of the event in which a worker reports the number of events that it could not send.
_DROPPED: Final = f"{_TYPE}events-dropped"
# The number of workers whose last event is remembered. Containers get a new name at each start.
_MOST_WORKERS: Final = 1000
# The routing key of a worker event is its type with dots, that of a list ``singleton.multi``.
_ROUTING_KEY: Final = "singleton.#"
_NOT_YET: Final = "not connected yet"
# Seconds between two tries to reach the broker.
_PAUSE: Final = 1.0


class Listener:
    """Receives worker events on a thread of its own, and connects again after each failure.

    Args:
        app: The app, whose broker is asked.
        clock: The clock.
        sink: Called with each event, and how often it happened.

    Attributes:
        error: Why the broker is not connected; empty: it is.
        received: The number of events received.
        dropped: The number of events that workers could not send.
    """

    def __init__(self, app: Celery, clock: Clock, sink: Callable[[Event, int], None]) -> None:
        self.error = _NOT_YET
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
            _Receiver(self, self._app, connection).capture(limit=None, timeout=None, wakeup=False)

    def ready(self) -> None:
        """Note that the connection to the broker stands; workers without ``-E`` send nothing."""
        if self.error:
            logger.info("singleton serve: is connected to the broker of the worker events")
        self.error = ""

    def _fail(self, error: str) -> None:
        if self.error in ("", _NOT_YET):  # the first failure of an outage
            logger.warning("singleton serve: the broker is unreachable: %s", error)
        self.error = error

    def receive(self, body: Any, message: Any = None) -> None:
        """Take the body of one message: a worker event, or a list of them."""
        events = body if isinstance(body, list) else [body]
        try:
            if not events or events[0].get("type") != COUNTS:
                counts = None
            elif self._is_resent(counts := events[0]):
                return
            else:
                self._take_counts(counts)
                events = events[1:]
        except Exception:
            logger.exception("singleton serve: can't read the worker events %.200r", body)
            return
        for fields in events:
            self._take(fields, in_list=counts is not None)

    def _take_counts(self, fields: Mapping[str, Any]) -> None:
        for name, task, seconds, times in fields["counts"]:
            if (event := event_of({"type": f"{_TYPE}{name}", "name": task})) is None:
                continue  # of a newer version
            data = {COUNTED[event.name]: seconds} if event.name in COUNTED else {}
            self.received += int(times)
            self._sink(replace(event, data=data), int(times))

    def _take(self, fields: Mapping[str, Any], *, in_list: bool) -> None:
        try:
            event = event_of(fields)
            if fields.get("type") == _DROPPED:
                self.dropped += int(fields["count"])
            elif event is not None and (in_list or not self._is_resent(fields)):
                self.received += 1
                self._sink(event, 1)
        except Exception:
            logger.exception("singleton serve: can't read the worker event %.200r", fields)

    def _is_resent(self, fields: Mapping[str, Any]) -> bool:
        """Whether the worker has sent this event before, because it got no reply of the broker."""
        worker = fields.get("hostname")
        event = tuple(map(fields.get, ("type", "uuid", "key", "timestamp")))
        was = self._last.pop(worker, None)
        self._last[worker] = event  # at the end: the first is that of the longest silent worker
        if len(self._last) > _MOST_WORKERS:
            del self._last[next(iter(self._last))]
        return was == event and event[-1] is not None


class _Receiver(EventReceiver):
    """Celery's receiver of worker events, which passes the body of each message to a listener.

    Celery's own callback would adjust clock and time of each event, which costs more than a count.
    """

    queue: Any
    accept: Any

    def __init__(self, listener: Listener, app: Celery, connection: Any) -> None:
        super().__init__(connection, routing_key=_ROUTING_KEY, app=app)
        self._listener = listener

    def get_consumers(self, Consumer: Any, channel: Any) -> list[Any]:
        options = {"no_ack": True, "accept": self.accept}
        return [Consumer(queues=[self.queue], callbacks=[self._listener.receive], **options)]

    def on_consume_ready(self, *args: Any, **options: Any) -> None:
        super().on_consume_ready(*args, **options)
        self._listener.ready()


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
