"""Putting a message back: published again, same id, later, before this copy is given up.

Promises
    The copy keeps id, arguments, serializer, queue, priority, expiry, time limits, headers, parent,
    root, group, chord, links and the user's retry count. The function returns once the broker has
    it.

Does not promise
    That there is only one copy: a crash between publishing and marking leaves two. Each carries a
    sequence number, and the store drops the older.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from typing import Any, Final

from celery.utils.quorum_queues import detect_quorum_queues
from kombu import Exchange, Queue

from celery_singleton_lock.claim import Claim
from celery_singleton_lock.core.events import Event, EventName
from celery_singleton_lock.core.keeper import MAX_TIMEOUT
from celery_singleton_lock.core.store import MarkerState
from celery_singleton_lock.delivery import HEADER, NONCE_KEY, SERIALIZER_KEY, Delivery
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.runtime import Runtime

__all__ = ["backoff", "put_back"]

# Celery's native delayed delivery (quorum queues) prefixes the routing key with 28 bits of delay;
# what arrives still has them, and before Celery 5.7 a second prefix would lead nowhere.
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
    claim: Claim | None = None,
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
        claim: The message's, if it is to be in the queue again.

    Raises:
        Exception: Whatever publishing raises; nothing was given up then.
    """
    longest = runtime.settings.longest_countdown
    delay = delay if longest is None else min(delay, longest)
    if _delays_natively(task.app):
        delay = math.ceil(delay)
    copy = delivery.copied()
    _publish(task, request, copy.header(), delay)
    try:
        runtime.store.mark(
            key,
            delivery.token,
            MarkerState.WAITING,
            copy.sequence,
            runtime.settings.marker_ttl + delay,
            timeout=MAX_TIMEOUT,
            claim=claim.queued(delay) if claim else None,
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


def _delays_natively(app: Any) -> bool:
    """Whether Celery has the broker wait for a countdown (quorum queues of RabbitMQ).

    Such a countdown is a routing key of whole seconds, cut off; at less than one second publishing
    raises ValueError.
    """
    driver = app.producer_pool.connections.connection.transport.driver_type
    return bool(detect_quorum_queues(app, driver)[0])


def _publish(task: Any, request: Any, header: Mapping[str, Any], delay: float) -> None:
    headers = dict(request.as_execution_options().get("headers") or {})
    headers.pop(NONCE_KEY, None)
    headers.pop(SERIALIZER_KEY, None)
    headers[HEADER] = header
    signature = task.signature_from_request(
        request, countdown=delay, retries=request.retries, headers=headers, **_kept(request)
    )
    if _delays_natively(task.app):
        _name_queue(task.app, signature.options)
    # Celery makes what is published inside a task its child: a top-level message put back would
    # come out with its own id as its parent. A request called directly has no children.
    request.called_directly = True
    try:
        signature.apply_async(add_to_parent=False)
    finally:
        request.called_directly = False


def _kept(request: Any) -> dict[str, Any]:
    """Options of the call that Celery's own retry forgets.

    Its arguments' representation may be there to keep a password out of the log; and what was
    pickled, the app's own serializer may not be able to write: such a message could never go back.
    """
    names = {"serializer": SERIALIZER_KEY, "argsrepr": "argsrepr", "kwargsrepr": "kwargsrepr"}
    options = {option: getattr(request, name, None) for option, name in names.items()}
    # Kept by Celery itself since 5.7. What the message says, a False too; not the class's False.
    options["ignore_result"] = vars(request).get("ignore_result")
    return {option: value for option, value in options.items() if value is not None}


def _name_queue(app: Any, options: dict[str, Any]) -> None:
    """Make native delayed delivery lead back to where this message came from.

    It asks a Queue for the routing key before which it puts the delay, and that is the default one
    unless the options name another: what came by exchange and routing key would go astray.
    """
    exchange_name, arrived = options.get("exchange"), options.get("routing_key")
    if not isinstance(arrived, str):
        return  # sent to a queue directly: signature_from_request named it
    key = _DELAY_BITS.sub("", arrived)
    was_delayed = key != arrived
    queues = app.amqp.queues.values()
    exchanges = {queue.exchange.name: queue.exchange for queue in queues}
    names = [
        queue.name
        for queue in queues
        if queue.routing_key == key and (was_delayed or queue.exchange.name == exchange_name)
    ]
    if names:
        options["queue"] = names[0]
    else:
        # Bound by a pattern. Only the key and the type of the exchange matter; none is declared.
        passed = Exchange(str(exchange_name), "topic")
        exchange = passed if was_delayed else exchanges.get(exchange_name)
        if exchange is None or exchange.type == "direct":
            return  # not delayed natively: Celery publishes it there as it is
        options["queue"] = Queue(key, exchange, routing_key=key)
    del options["exchange"], options["routing_key"]
