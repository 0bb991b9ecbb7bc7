"""Messages that a worker discards: they never become tasks, were revoked or have expired.

Overview
    Celery's consumer rejects a message whose task it does not know, that is invalid, or whose
    content type it does not accept. It acknowledges one that it can't decode. No request exists
    then, so the claim is found in the message's headers: no body is needed for that.
    A request that was revoked or has expired ends in `worker.request`, which asks for its claim and
    its call here.

Guarantees
    The claim of such a message is freed, its newest arguments are deleted, and its call leaves the
    queue of its key. Also if the result backend does not answer: Celery stores the failure of an
    unknown task after it has rejected the message, and sends ``task_unknown`` last. So Celery's
    methods are wrapped, and no signal is used.

Non-guarantees
    A message that crashes the worker is not discarded: the broker delivers it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..core.retry_queue import MAIN_THREAD_TIMEOUT
from ..core.store import Store
from ..key_queue import ends as queue_ends
from ..message.claim import claim_in
from ..runtime import Runtime
from .dead_child import claim_change
from .main_thread import ask_later

logger = logging.getLogger("celery_singleton_lock")

# The methods of Celery's consumer that end a message, and why. kombu calls the last one too.
_REASONS: Final = {
    "on_unknown_task": "unknown",
    "on_unknown_message": "invalid",
    "on_invalid_task": "invalid",
    "on_decode_error": "undecodable",
}


def watch_discards(consumer: Any) -> None:
    """End the claims and calls of the messages that ``consumer`` discards.

    Called before the consumer has a connection, because kombu keeps ``on_decode_error``.
    """
    for name, reason in _REASONS.items():
        setattr(consumer, name, _watched(consumer.app, getattr(consumer, name), reason))


def _watched(app: Any, method: Callable[..., Any], reason: str) -> Callable[..., Any]:
    def discard(*args: Any) -> Any:
        try:
            return method(*args)
        finally:
            # on_decode_error has the message first, the others have it after the body.
            _discard(app, args[0 if reason == "undecodable" else 1], reason)

    return discard


def _discard(app: Any, message: Any, reason: str) -> None:
    try:
        # In protocol 1, the headers have no id.
        task_id = message.headers.get("id") or message.properties.get("correlation_id")
        headers = {**message.headers, "id": task_id}
        take_out(app, headers, reason)
        _free_claim(app, headers, reason)
    except Exception:
        # The headers may have any form. They must not end the consumer.
        logger.exception("singleton: a message that is no task has kept its claim or place")


def _free_claim(app: Any, headers: Mapping[str, Any], reason: str) -> None:
    runtime = Runtime.of(app)
    token, claim = claim_in(headers, runtime.keyspace)
    if claim is None:
        return
    change = claim.freed("" if claim.arguments is None else token.call_id)
    task = f"{headers.get('task') or ''}[{token.task_id}]"

    def send(store: Store) -> None:
        store.claims.change(token, change, timeout=MAIN_THREAD_TIMEOUT)
        _report(task, reason)

    what = f"{task} has ended with the claim {claim.key}"
    ask_later(runtime, what, claim.unique_for, send)


def discard_claim(request: Any, reason: str = "") -> None:
    """Free the claim of a request that is discarded, or that reaches several workers.

    The main thread does not wait for it: no event of the message depends on it, and there may be
    thousands at once.

    Args:
        request: The worker's request of the message.
        reason: Why it is discarded; empty: it runs, without its claim.
    """
    if change := claim_change(request, comes_back=False):
        what, ttl, send = change

        def free(store: Store) -> None:
            send(store)
            if reason:
                _report(f"{request.task.name}[{request.id}]", reason)

        ask_later(Runtime.of(request.app), what, ttl, free)


def take_out(app: Any, headers: Mapping[str, Any], reason: str) -> None:
    """Take the call of a message that nothing runs out of its queue, without waiting for it."""
    if (end := queue_ends.of_discarded(app, headers, reason)) is not None:
        ask_later(Runtime.of(app), *end)


def _report(task: str, reason: str) -> None:
    """Log that a message never runs, and that it has no claim any more."""
    logger.info("singleton: %s was discarded (%s), and its claim is freed", task, reason)
