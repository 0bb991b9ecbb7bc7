"""The threads of the worker's parent that send the worker events of all its processes.

Overview
    The reader moves events from the pipe to an `Outbox`, and never waits for the broker.
    The sender sends the outbox's messages once a second, on a broker connection of its own. Both
    are native threads also under gevent and eventlet, so a broker that does not answer delays no
    greenlet. While there are no events, both threads sleep.

Guarantees
    A message whose sending failed is sent again, as it was, until the broker takes it. A monitor
    may receive it twice: the ``uuid`` of its counts is the same then. A broker that does not answer
    is named in the log after `_TIMEOUT`; a fork of the worker waits for the sender for 0.2 s.

Non-guarantees
    Events after the end of the parent: a warm shutdown waits two seconds for the sender, and a
    SIGKILL not at all.
"""

from __future__ import annotations

import atexit
import logging
import os
from typing import Any, Final

from celery import signals
from celery.events import Event
from celery.utils.time import utcoffset

from ..celery_compat import limit_broker_timeouts
from ..core import native_threads, observers
from ..core.fork_locks import FORK_LOCKS
from ..instrumentation import EventPipe
from .outbox import Outbox

logger = logging.getLogger("celery_singleton_lock")

_CHUNK: Final = 65536
# Seconds for which events gather in the pipe before it is read: a read for each event would cost
# the worker's own loop, which shares the interpreter lock, more than the event. A pipe of 64 KiB
# takes some 1400 events meanwhile.
_GATHER: Final = 0.02
# Seconds for which events gather in the outbox before it is sent.
_INTERVAL: Final = 1.0
# Seconds to wait for a reply of the broker.
_TIMEOUT: Final = 2.0
# Seconds between two tries while the broker does not answer.
_PAUSE: Final = 1.0
# Seconds that the end of the worker waits for the events that are in the pipe.
_LAST_EVENTS: Final = 2.0


class EventSender:
    """Sends the events in ``pipe`` as worker events of the worker ``hostname``."""

    def __init__(self, app: Any, pipe: EventPipe, hostname: str) -> None:
        self._app, self._pipe, self._hostname = app, pipe, hostname
        self._pid = os.getpid()
        self._read = native_threads.original("read", "os")
        self._sleep = native_threads.original("sleep", "time")
        self._connection: Any = None
        self._dispatcher: Any = None
        self._started = self._ending = self._is_silent = self._is_read = False
        self._outbox = Outbox()
        self._guard = native_threads.allocate_lock()  # of the outbox
        self._news = native_threads.allocate_lock()  # released when the outbox is no longer empty
        self._news.acquire()
        self._running = native_threads.allocate_lock()  # held until the sender has ended
        self._pause = native_threads.allocate_lock()  # released to end a pause
        self._pause.acquire()

    def start(self) -> None:
        """Start the threads, once. Called after the first fork of a prefork pool."""
        if self._started:
            return
        self._started = True
        self._running.acquire()
        native_threads.start_new_thread(self._collect, "singleton-events-reader")
        native_threads.start_new_thread(self._run, "singleton-events")
        # A cold shutdown does not send the signal.
        signals.worker_shutdown.connect(self.end, weak=False)
        atexit.register(self.end)

    def end(self, **_: Any) -> None:
        """Wait a moment until the events so far are sent, and end the threads; idempotent."""
        if not self._ending:
            self._ending = True
            self._pipe.end()
            self._pause.release()
            signals.worker_shutdown.disconnect(self.end)
            atexit.unregister(self.end)
            if self._running.acquire(timeout=_LAST_EVENTS):
                self._running.release()

    @observers.elsewhere()  # while a log handler runs, children would fill the pipe
    def _collect(self) -> None:
        """Move events from the pipe to the outbox. The reader's thread."""
        rest = b""
        while not self._is_read:
            data = self._read(self._pipe.reader, _CHUNK)
            *lines, rest = (rest + data).split(b"\n")
            with self._guard:
                was_empty = not self._outbox
                if b"" in lines:  # END
                    del lines[lines.index(b"") :]
                    self._is_read = True
                self._outbox.add(lines)
                if was_empty and (self._outbox or self._is_read):
                    self._news.release()
            if len(data) < _CHUNK and not self._ending:
                self._sleep(_GATHER)

    @observers.elsewhere()  # where threads are patched, a log handler can't run here
    def _run(self) -> None:
        """Send the outbox's messages until the reader has ended. The sender's thread."""
        try:
            is_last = False
            while not is_last:
                self._news.acquire()
                if not self._ending:
                    self._pause.acquire(timeout=_INTERVAL)
                with self._guard:
                    outbox, self._outbox, is_last = self._outbox, Outbox(), self._is_read
                if outbox:
                    self._send(outbox)
        finally:
            self._close()
            self._running.release()

    def _send(self, outbox: Outbox) -> None:
        try:
            with FORK_LOCKS["events"]:
                messages = list(outbox.messages(self._stamp))
            for routing_key, body in messages:
                self._publish(routing_key, body)
        except Exception:
            logger.exception("singleton: worker events could not be sent; they are dropped")

    def _publish(self, routing_key: str, body: str) -> None:
        """Send one message; try until the broker takes it."""
        while True:
            try:
                with FORK_LOCKS["events"]:
                    dispatcher = self._open()
                    if not dispatcher.enabled:
                        return  # its transport has no events
                    dispatcher.producer.publish(
                        body,
                        routing_key=routing_key,
                        exchange=dispatcher.exchange.name,
                        declare=[dispatcher.exchange],
                        content_type="application/json",
                        content_encoding="utf-8",
                        # Most of a long message is copies that differ in their timestamps.
                        compression="gzip",
                        headers=dict(dispatcher.headers),
                        delivery_mode=dispatcher.delivery_mode,
                        retry=False,
                    )
                if self._is_silent:
                    self._is_silent = False
                    logger.warning("singleton: worker events are sent again")
                return
            except Exception as exc:
                self._close()
                if not self._is_silent:
                    self._is_silent = True
                    what = "worker events wait in the worker until the broker answers"
                    logger.warning("singleton: %s: %s", what, exc)
            if self._ending:
                return
            self._pause.acquire(timeout=_PAUSE)

    def _stamp(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The event as Celery's dispatcher would send it."""
        return Event(
            kind,
            {**fields, "hostname": self._hostname, "utcoffset": utcoffset(), "pid": self._pid},
            clock=self._app.clock.forward(),
        )

    def _open(self) -> Any:
        if self._dispatcher is None:
            # One try: kombu's default is to try for ever, without a sign of it.
            options = {"max_retries": 1}
            self._connection = self._app.connection_for_write(transport_options=options)
            # A broker that is stopped refuses nothing. Without a timeout the thread would stay in
            # the client with the fork lock, and nothing would be logged.
            limit_broker_timeouts(self._connection, _TIMEOUT)
            # Celery's dispatcher knows exchange and headers.
            self._dispatcher = self._app.events.Dispatcher(
                self._connection, hostname=self._hostname
            )
        return self._dispatcher

    def _close(self) -> None:
        connection, self._connection, self._dispatcher = self._connection, None, None
        try:
            if connection is not None:
                connection.collapse()
        except Exception:
            pass  # it is broken
