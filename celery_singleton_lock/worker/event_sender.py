"""The thread of the worker's parent that sends the worker events of all its processes.

It is a native thread also under gevent and eventlet, with a broker connection of its own, so a
broker that does not answer delays no greenlet. Until it answers, the pipe buffers (see
``instrumentation.worker_events``). An event whose sending failed is sent again, so a monitor may
receive it twice.
"""

from __future__ import annotations

import atexit
import json
import logging
from collections.abc import Iterator
from typing import Any, Final

from celery import Celery, signals

from ..core import native
from ..instrumentation import EventPipe
from .fork_locks import FORK_LOCKS

logger = logging.getLogger("celery_singleton_lock")

_CHUNK: Final = 65536
# Seconds between two tries while the broker does not answer.
_PAUSE: Final = 1.0
# Seconds that the end of the worker waits for the events that are in the pipe.
_LAST_EVENTS: Final = 2.0


class EventSender:
    """Sends what is written to ``pipe`` as worker events of the worker ``hostname``."""

    def __init__(self, app: Celery, pipe: EventPipe, hostname: str) -> None:
        self._app, self._pipe, self._hostname = app, pipe, hostname
        self._read = native.original("read", "os")
        self._connection: Any = None
        self._dispatcher: Any = None
        self._started = self._ending = self._is_silent = False
        self._running = native.allocate_lock()  # held until the thread has ended
        self._pause = native.allocate_lock()  # released to end a pause
        self._pause.acquire()

    def start(self) -> None:
        """Start the thread, once. Called after the first fork of a prefork pool."""
        if self._started:
            return
        self._started = True
        self._running.acquire()
        native.start_new_thread(self._run, "singleton-events")
        # A cold shutdown does not send the signal.
        signals.worker_shutdown.connect(self.end, weak=False)
        atexit.register(self.end)

    def end(self, **_: Any) -> None:
        """Send what was written before, for a moment; idempotent."""
        if not self._ending:
            self._ending = True
            self._pipe.end()
            self._pause.release()
            signals.worker_shutdown.disconnect(self.end)
            atexit.unregister(self.end)
            if self._running.acquire(timeout=_LAST_EVENTS):
                self._running.release()

    def _run(self) -> None:
        try:
            for line in self._lines():
                try:
                    self._send(*json.loads(line))
                except Exception:
                    logger.exception("singleton: a worker event could not be sent; it is dropped")
        finally:
            self._close()
            self._running.release()

    def _lines(self) -> Iterator[bytes]:
        rest = b""
        while True:
            *lines, rest = (rest + self._read(self._pipe.reader, _CHUNK)).split(b"\n")
            for line in lines:
                if not line:
                    return  # END
                yield line

    def _send(self, kind: str, fields: dict[str, Any]) -> None:
        """Send one event; try until the broker takes it."""
        while True:
            try:
                with FORK_LOCKS["events"]:
                    self._open().send(kind, **fields)
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

    def _open(self) -> Any:
        if self._dispatcher is None:
            # One try: kombu's default is to try for ever, without a sign of it.
            options = {"max_retries": 1}
            self._connection = self._app.connection_for_write(transport_options=options)
            # Celery's buffer for the time without a broker would have no limit.
            self._dispatcher = self._app.events.Dispatcher(
                self._connection, hostname=self._hostname, buffer_while_offline=False
            )
        return self._dispatcher

    def _close(self) -> None:
        connection, self._connection, self._dispatcher = self._connection, None, None
        try:
            if connection is not None:
                connection.collapse()
        except Exception:
            pass  # it is broken
