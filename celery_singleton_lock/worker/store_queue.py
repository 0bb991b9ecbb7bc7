"""Requests to the store that the worker's main thread does not wait for.

Overview
    The main thread runs Celery's event loop or consumes messages, and serves all bodies. A claim of
    a message that was discarded (revoked, expired) is freed by a thread of this module, in every
    pool. The release of a dead child's lease is sent by the main thread, because the key must be
    free before Celery requeues the message; if the store does not answer, it is retried here, and
    so are the following ones.

Guarantees
    A request is sent until the store answers it, for as long as the lease or claim may exist there.
    A part of the store (a shard, a node) that does not answer holds up no request to another part
    for longer than one timeout.

Non-guarantees
    Requests beyond `_MOST_WAITING` are not taken. The worker's end waits for the requests for a
    second (`flush`), and leaves the rest to the ttl.

Failure handling
    A request without a reply goes to the end of the queue, and no further one is sent for a second.
    A fork waits until the thread is outside of the store's client, as for `parent_heartbeat`. If no
    thread can be started, the next request tries again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import ClassVar, Final

from ..core import native, observers
from ..core.clock import Clock
from ..core.store import Store
from ..errors import StoreError, StoreUnavailable
from .fork_locks import FORK_LOCKS

logger = logging.getLogger("celery_singleton_lock")

#: Seconds to wait for a reply. The parent serves all of its children and must not wait longer.
TIMEOUT: Final = 1.0
# Seconds from a request that the store did not answer to the next one.
_PAUSE_AFTER_SILENCE: Final = 1.0
_MOST_WAITING: Final = 1000
# Seconds that the end of the worker waits for the requests.
_LAST_REQUESTS: Final = 1.0
_LOOK_EVERY: Final = 0.02

#: A function that sends a request to the store, and the time until which it is retried.
_Waiting = tuple[Callable[[Store], object], float]


class StoreQueue:
    """Sends the requests of one worker, and retries them until the store answers.

    Args:
        open_store: Opens the store of the thread, when it is first needed.
        clock: The clock.
        is_over: Whether the worker has ended.
    """

    #: The queue of this worker; set after the pool's first fork.
    running: ClassVar[StoreQueue | None] = None

    def __init__(
        self,
        open_store: Callable[[], Store],
        clock: Clock,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._open_store, self._clock, self._is_over = open_store, clock, is_over
        self._store: Store | None = None
        # Requests that were not sent yet, which come first, and those without a reply.
        self._unsent: deque[_Waiting] = deque()
        self._unanswered: deque[_Waiting] = deque()
        self._retry_at = 0.0
        #: Whether the store has left a request without a reply, and not caught up since.
        self.is_silent = False
        self._start = native.allocate_lock()  # held by the thread that runs

    @property
    def is_empty(self) -> bool:
        """Whether the store has answered all requests."""
        # The thread takes a request out of its queue while it sends it.
        return not (self._start.locked() or self._unsent or self._unanswered)

    def put(self, ask: Callable[[Store], object], ttl: float, *, unanswered: bool = False) -> bool:
        """Send ``ask``, and retry it until the store answers, for ``ttl`` seconds at most.

        Args:
            ask: A function that sends the request.
            ttl: Seconds.
            unanswered: Whether the caller has sent it before, and got no reply.

        Returns:
            False if too many requests wait already; then ``ask`` is dropped.
        """
        if len(self._unsent) + len(self._unanswered) >= _MOST_WAITING:
            return False
        self._unsent.append((ask, self._clock.now() + ttl))
        self.is_silent |= unanswered
        if not self._start.locked():
            try:
                native.start_new_thread(self._run, "singleton-store-queue")
            except RuntimeError:  # no thread can be started now
                pass
        return True

    def flush(self) -> None:
        """Wait for the requests, for a moment. The worker ends."""
        until = self._clock.now() + _LAST_REQUESTS
        while not self.is_empty and self._clock.now() < until:
            self._clock.sleep(_LOOK_EVERY)

    def catch_up(self) -> None:
        """Send requests until one gets no reply. Called by the thread."""
        while (queue := self._unsent or self._unanswered) and self._clock.now() >= self._retry_at:
            ask, until = queue.popleft()
            now = self._clock.now()
            if now >= until:
                continue
            try:
                with FORK_LOCKS["retry"]:
                    if self._store is None:
                        self._store = self._open_store()
                    ask(self._store)
            except StoreUnavailable:
                self._unanswered.append((ask, until))
                self._retry_at, self.is_silent = now + _PAUSE_AFTER_SILENCE, True
                return
            except StoreError as exc:
                logger.warning(
                    "singleton: the store refuses to free the key or claim of a message that has "
                    "ended: %s. It expires after its ttl; celery -A ... singleton doctor checks "
                    "the store",
                    exc,
                )
            except Exception:
                logger.exception(
                    "singleton: freeing the key or claim of a message that has ended failed; its "
                    "ttl frees it"
                )
        if self.is_silent and not (self._unsent or self._unanswered):
            self.is_silent = False

    def _run(self) -> None:
        # A request that comes between the last look and the release of the lock has started no
        # thread, so this one looks again.
        while (self._unsent or self._unanswered) and not self._is_over():
            if not self._start.acquire(blocking=False):
                return  # two requests came at once, and each started a thread
            try:
                with observers.elsewhere():
                    while (self._unsent or self._unanswered) and not self._is_over():
                        self.catch_up()
                        self._clock.sleep(max(0.0, self._retry_at - self._clock.now()))
            finally:
                self._start.release()


def ask(
    store: Store,
    what: str,
    ttl: float,
    request: Callable[[Store], object],
    on_error: Callable[[object], None] = lambda why: None,
) -> None:
    """Send ``request``, or pass it to the `StoreQueue` if the store does not answer. Never raises.

    If the store does not answer, the parent waits for it once, not for each lease of each dead
    child.

    Args:
        store: The store for this thread.
        what: Text for the log.
        ttl: Seconds until the lease or claim expires in the store.
        request: Sends it to its argument, a store.
        on_error: Called if there is no reply now, with the reason.
    """
    queue = StoreQueue.running
    why: object = "too many others wait for the store"
    if queue is None or not queue.is_silent:
        try:
            request(store)
            return
        except StoreError as exc:
            if queue is not None and isinstance(exc, StoreUnavailable):
                logger.warning("singleton: %s; freed when the store answers again (%s)", what, exc)
                on_error(exc)
                queue.put(request, ttl, unanswered=True)
                return
            why = exc
    elif queue.put(request, ttl):
        on_error("others wait for the store")
        return
    on_error(why)
    logger.warning(
        "singleton: %s; it could not be freed (%s), and expires in %g s. To free it at once: "
        "celery -A ... singleton release",
        *(what, why, ttl),
    )


def ask_later(store: Store, what: str, ttl: float, request: Callable[[Store], object]) -> None:
    """Pass ``request`` to the `StoreQueue`: nothing waits for its reply. See `ask`."""
    queue = StoreQueue.running
    if queue is None or not queue.put(request, ttl):
        ask(store, what, ttl, request)
