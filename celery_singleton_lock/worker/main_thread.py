"""Requests of the worker's main thread to the store, which must not wait for a store that is away.

The main thread runs Celery's event loop or consumes messages, and serves all bodies. A claim of a
message that was discarded (revoked, expired) is freed by the thread of the `RetryQueue`, in every
pool. The release of a dead child's lease is sent by the main thread, because the key must be free
before Celery requeues the message. If the store does not answer, the queue repeats it, and takes
the following ones at once.

No observer of an event runs on the main thread here. One that blocks would delay the kill of a
child whose key is marked as dying for a second, and another body could begin while it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..core import observers
from ..core.store import Store
from ..runtime import Runtime

logger = logging.getLogger("celery_singleton_lock")


@observers.elsewhere()
def ask(
    runtime: Runtime,
    what: str,
    ttl: float,
    request: Callable[[Store], object],
    give_up: Callable[[object], None] = lambda why: None,
) -> None:
    """Send ``request``, or pass it to the `RetryQueue` if the store does not answer. Never raises.

    If the store does not answer, the parent waits for it once, not for each lease of each dead
    child. A refused request is repeated, too.

    Args:
        runtime: The app's runtime.
        what: Text for the log.
        ttl: Seconds until the lease or claim expires in the store.
        request: Sends it to its argument, a store.
        give_up: Called with the reason if the store will not answer it.
    """
    queue = runtime.locker.retry_queue
    if queue.is_silent:
        ask_later(runtime, what, ttl, request, give_up)
        return
    error = queue.ask(request, ttl, _given_up(what, ttl, give_up))
    if error is not None:
        logger.warning("singleton: %s; freed when the store does it (%s)", what, error)


def ask_later(
    runtime: Runtime,
    what: str,
    ttl: float,
    request: Callable[[Store], object],
    give_up: Callable[[object], None] = lambda why: None,
) -> None:
    """Pass ``request`` to the `RetryQueue`: nothing waits for its reply. See `ask`."""
    given_up = _given_up(what, ttl, give_up)
    queue = runtime.locker.retry_queue
    if not (refusal := queue.put(request, ttl, given_up)):
        return
    if queue.is_silent:
        given_up(refusal)
    else:
        ask(runtime, what, ttl, request, give_up)


def _given_up(what: str, ttl: float, give_up: Callable[[object], None]) -> Callable[[object], None]:
    def given_up(why: object) -> None:
        give_up(why)
        logger.warning(
            "singleton: %s; it could not be freed (%s), and its ttl of %g s frees it. To free it "
            "at once: celery -A ... singleton release",
            *(what, why, ttl),
        )

    return given_up
