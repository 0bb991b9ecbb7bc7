"""Putting a message back: published again, same id, later, before this copy is given up.

Promises
    The copy keeps id, arguments, queue, priority, expiry, time limits, headers, parent, root,
    group, chord, links and the user's retry count. The function returns once the broker has it.

Does not promise
    That there is only one copy: a crash between publishing and marking leaves two. Each carries a
    sequence number, and the store drops the older.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from celery_singleton_lock.core.events import Event, EventName
from celery_singleton_lock.core.keeper import MAX_TIMEOUT
from celery_singleton_lock.core.store import MarkerState
from celery_singleton_lock.delivery import HEADER, NONCE_KEY, Delivery
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.runtime import Runtime

__all__ = ["backoff", "put_back"]

# Celery's native delayed delivery (quorum queues) prefixes the routing key with 28 bits of delay;
# what arrives still has them, and a second prefix would lead nowhere.
_DELAY_BITS: Final = re.compile(r"^(?:[01]\.){28}")
_MAX_DOUBLINGS: Final = 30


def backoff(delay: float, max_delay: float, tries: int) -> float:
    """Seconds: ``delay`` doubled ``tries`` times, at most ``max_delay``, half of it jitter.

    "Equal jitter": waiters that met at one release don't meet again at the next, and none comes
    back at once (M. Brooker, "Exponential Backoff And Jitter", 2015).
    """
    top: float = min(max_delay, delay * 2 ** min(tries, _MAX_DOUBLINGS))
    return top * (0.5 + 0.5 * random.random())


def put_back(
    task: Any,
    request: Any,
    delivery: Delivery,
    key: str,
    *,
    runtime: Runtime,
    delay: float,
    reason: str,
) -> None:
    """Publish the running message again, to arrive in ``delay`` seconds.

    Args:
        task: The running task.
        request: Its request.
        delivery: What the copy's header shall say; its sequence is raised here.
        key: The lock key, for the marker and the log.
        runtime: Of the task's app.
        delay: Seconds, cut to a third of the visibility timeout.
        reason: For the log.

    Raises:
        Exception: Whatever publishing raises; nothing was given up then.
    """
    longest = runtime.settings.longest_countdown
    delay = delay if longest is None else min(delay, longest)
    copy = replace(delivery, sequence=delivery.sequence + 1)
    _publish(task, request, copy.header(), delay)
    try:
        runtime.store.mark(
            key,
            delivery.token,
            MarkerState.WAITING,
            copy.sequence,
            runtime.settings.marker_ttl + delay,
            timeout=MAX_TIMEOUT,
        )
    except StoreError:
        pass  # the price is a copy more than needed, should the broker deliver this one again
    runtime.events.emit(
        Event(
            name=EventName.PUT_BACK,
            key=key,
            task=task.name,
            task_id=delivery.token.task_id,
            data={"delay": round(delay, 3), "reason": reason, "sequence": copy.sequence},
        )
    )


def _publish(task: Any, request: Any, header: Mapping[str, Any], delay: float) -> None:
    headers = dict(request.as_execution_options().get("headers") or {})
    headers.pop(NONCE_KEY, None)
    headers[HEADER] = header
    signature = task.signature_from_request(
        request, countdown=delay, retries=request.retries, headers=headers
    )
    routing_key = signature.options.get("routing_key")
    if isinstance(routing_key, str) and _DELAY_BITS.match(routing_key):
        signature.options["queue"] = _DELAY_BITS.sub("", routing_key)
        for name in ("routing_key", "exchange"):
            signature.options.pop(name, None)
    # Celery makes what is published inside a task its child: a top-level message put back would
    # come out with its own id as its parent. A request called directly has no children.
    request.called_directly = True
    try:
        signature.apply_async(add_to_parent=False)
    finally:
        request.called_directly = False
