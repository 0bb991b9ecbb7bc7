"""Requests to the store that no caller waits for, sent until the store carries them out.

Overview
    What ends must be known to the store: a release, the completion record of an attempt that is
    done, a claim of a message that will not run. The thread that ends it sends such a request
    itself, and waits for one reply. If none arrives, or a refusal, the request is passed to the
    queue of the process, whose thread repeats it. The main thread of a worker, which must not wait
    at all, passes its requests at once. The thread runs only while the queue has requests.

Guarantees
    A request is sent until the store answers it, for as long as what it ends may exist there. One
    that the store refuses is sent again for ten minutes: a password is changed in that time, rights
    are given back, or memory is freed, and a claim that is left would last for its ``unique_for``.
    A part of the store (a shard, a node) that does not answer holds up no request to another part
    for longer than one timeout.

Non-guarantees
    Requests beyond `_MOST_WAITING` are not taken, nor are those after `close`. The end of the
    process waits for the requests for a second (`end`), and leaves the rest to the ttl.

State model of a request::

    waiting --reply--------------------------------------> (answered)
       |  ^----no reply or refused: after the others, a second later
       +--its time is over, the process ends-------------> (given up)

Failure handling
    A request without a reply, or that was refused, goes to the end of the queue. After one without
    a reply none is sent for a second; a refusal delays no other request. If no thread can be
    started, the next request tries again. A forked child has a queue of its own, which is empty.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Final, Protocol, runtime_checkable
from weakref import WeakSet

from ..errors import StoreError, StoreUnavailable
from . import native_threads, observers
from .clock import Clock
from .store import Store

logger = logging.getLogger("celery_singleton_lock")

# Seconds from a request that the store did not carry out to the next one.
_PAUSE: Final = 1.0
# Seconds for which a request is repeated that the store refuses.
_REFUSED_FOR: Final = 600.0
_MOST_WAITING: Final = 1000
# Seconds that the end of the process waits for the requests.
_LAST_REQUESTS: Final = 1.0
_POLL_EVERY: Final = 0.02

#: Seconds that the main thread of a worker waits for a reply: it serves all of its children.
MAIN_THREAD_TIMEOUT: Final = 1.0

_TOO_MANY: Final = "too many others wait for the store"
_CLOSED: Final = "the app was closed"
_NOT_SENT: Final = "others wait for the store"


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request.

    Attributes:
        send: Sends it to its argument.
        until: The time until which it is repeated.
        give_up: Called with the reason if it will not be answered.
        why: Why it is not answered yet.
    """

    send: Callable[[Store], object]
    until: float
    give_up: Callable[[object], None]
    why: object = _NOT_SENT

    def failed(self, error: StoreError, now: float) -> None:
        """Note that the last try has failed. The first refusal limits the time of the request."""
        if not isinstance(error, StoreUnavailable):
            self.until = min(self.until, now + _REFUSED_FOR)
        self.why = error


@runtime_checkable
class SendsBeside(Protocol):
    """A store that carries out some requests as two, the second of which may get no reply alone."""

    def repeat_by(self, put: Callable[..., str]) -> None:
        """Pass such second requests to ``put``, a :meth:`RetryQueue.put`, from now on."""


class RetryQueue:
    """Sends the requests of one process, and repeats them until the store answers.

    Args:
        store: The store.
        clock: The clock.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        # Requests that were not sent yet, which come first, and those without a reply.
        self._unsent: deque[_Waiting] = deque()
        self._unanswered: deque[_Waiting] = deque()
        self._retry_at = 0.0
        self._closed = False
        #: Whether the store has left a request without a reply, and not answered it since.
        self.is_silent = False
        #: Entered by the thread while it is inside the store's client. A fork may wait for it.
        self.guard: AbstractContextManager[object] = nullcontext()
        self._start = native_threads.allocate_lock()  # held by the thread that runs
        if isinstance(store, SendsBeside):
            store.repeat_by(self.put)

    @property
    def is_empty(self) -> bool:
        """Whether the store has answered all requests."""
        return not (self._unsent or self._unanswered)

    @property
    def is_crowded(self) -> bool:
        """Whether so many requests wait that only those should be added that matter most."""
        return len(self._unsent) + len(self._unanswered) >= _MOST_WAITING // 2

    def ask(
        self, send: Callable[[Store], object], ttl: float, give_up: Callable[[object], None]
    ) -> StoreError | None:
        """Call ``send`` now, and repeat it if the store does not carry it out.

        Never raises a StoreError.

        Args:
            send: A function that sends the request to its argument. It may be called many times.
            ttl: Seconds for which it is repeated.
            give_up: Called with the reason if the store will not carry out the request.

        Returns:
            The error, if the request will be repeated.
        """
        try:
            send(self._store)
        except StoreError as exc:
            if refusal := self.put(send, ttl, give_up, error=exc):
                give_up(refusal)
                return None
            return exc
        return None

    def put(
        self,
        send: Callable[[Store], object],
        ttl: float,
        give_up: Callable[[object], None],
        *,
        error: StoreError | None = None,
    ) -> str:
        """As :meth:`ask`, but the caller does not wait for the first reply either.

        Args:
            send, ttl, give_up: See :meth:`ask`.
            error: The error, if the caller has sent the request before.

        Returns:
            Why the request is dropped; empty: it will be sent.
        """
        if self._closed:
            return _CLOSED
        if error is not None:
            # Only the first failure: further ones must not postpone the next try again and again.
            if not (self.is_silent or self._unanswered):
                self._retry_at = self._clock.now() + _PAUSE
            # Before the test: the next caller must not wait for this store too.
            self.is_silent |= isinstance(error, StoreUnavailable)
        if len(self._unsent) + len(self._unanswered) >= _MOST_WAITING:
            return _TOO_MANY
        waiting = _Waiting(send, self._clock.now() + ttl, give_up)
        if error is None:
            self._unsent.append(waiting)
        else:
            waiting.failed(error, self._clock.now())
            self._unanswered.append(waiting)
        if not self._start.locked():
            _running.add(self)
            _register_exit()
            try:
                native_threads.start_new_thread(self._run, "singleton-store-queue")
            except RuntimeError:  # no thread can be started now
                pass
        return ""

    def flush(self, seconds: float = _LAST_REQUESTS) -> None:
        """Wait at most ``seconds`` for the requests."""
        until = self._clock.now() + seconds
        while not self.is_empty and self._clock.now() < until:
            self._clock.sleep(_POLL_EVERY)

    def end(self, seconds: float = _LAST_REQUESTS) -> None:
        """As :meth:`flush`, and give up the requests that are left: the process ends."""
        self.flush(seconds)
        for queue in (self._unsent, self._unanswered):
            for waiting in list(queue):
                self._give_up(queue, waiting, waiting.why)

    def close(self) -> None:
        """End the thread, and take no more requests."""
        self._closed = True

    def catch_up(self) -> None:
        """Send each request once, or until one gets no reply. Called by the thread."""
        self._give_up_overdue()
        refused: set[_Waiting] = set()
        while (queue := self._unsent or self._unanswered) and self._clock.now() >= self._retry_at:
            try:
                waiting = queue[0]
            except IndexError:
                continue  # end() has given it up
            if waiting in refused:  # the others were sent after it
                self._retry_at = self._clock.now() + _PAUSE
                break
            try:
                with self.guard:
                    waiting.send(self._store)
            except StoreError as exc:
                waiting.failed(exc, self._clock.now())
                self._unanswered.append(waiting)  # first: it must never be missing
                self._take(queue, waiting)
                if isinstance(exc, StoreUnavailable):
                    self._retry_at = self._clock.now() + _PAUSE
                    break
                refused.add(waiting)
            except Exception as exc:
                logger.exception("singleton: a request to the store failed; it is not repeated")
                self._give_up(queue, waiting, exc)
            else:
                self._take(queue, waiting)
        # A store that refuses a request has answered it.
        self.is_silent = any(isinstance(one.why, StoreUnavailable) for one in [*self._unanswered])

    def _give_up_overdue(self) -> None:
        now = self._clock.now()
        for queue in (self._unsent, self._unanswered):
            for waiting in list(queue):
                if now >= waiting.until:
                    self._give_up(queue, waiting, waiting.why)

    def _give_up(self, queue: deque[_Waiting], waiting: _Waiting, why: object) -> None:
        if self._take(queue, waiting):
            waiting.give_up(why)

    def _take(self, queue: deque[_Waiting], waiting: _Waiting) -> bool:
        """Remove a request, unless another thread has."""
        try:
            queue.remove(waiting)
        except ValueError:
            return False
        return True

    def _has_work(self) -> bool:
        return not (self._closed or self.is_empty)

    def _run(self) -> None:
        # A request that comes between the last look and the release of the lock has started no
        # thread, so this one looks again.
        while self._has_work():
            if not self._start.acquire(blocking=False):
                return  # two requests came at once, and each started a thread
            try:
                with observers.elsewhere():
                    while self._has_work():
                        self.catch_up()
                        self._clock.sleep(max(0.0, self._retry_at - self._clock.now()))
            finally:
                self._start.release()


# The queues that have had requests.
_running: Final[WeakSet[RetryQueue]] = WeakSet()


@cache
def _register_exit() -> None:
    # Not before there is a request: what is registered last is called first, so before the threads
    # of stores end, and before the last events are handled.
    atexit.register(_end_all)


def _end_all() -> None:
    left = _LAST_REQUESTS  # for the queues of all apps together
    for queue in list(_running):
        began = queue._clock.now()
        queue.end(max(0.0, left))
        left -= queue._clock.now() - began


# The requests of a forked child's parent are sent by the parent.
os.register_at_fork(after_in_child=_running.clear)
