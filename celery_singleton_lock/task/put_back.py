"""Put a message back: publish it again, same id, later, before this copy is given up.

Guarantees
    The copy keeps id, arguments, serializer, queue, priority, expiry, time limits, headers, parent,
    root, group, chord, links and the user's retry count. The function returns once the broker has
    the copy.

Non-guarantees
    Exactly one copy: a crash between publishing and marking leaves two. Each carries a sequence
    number, and the store drops the older.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any, Final

from celery.app.task import Task as BaseTask
from kombu import Exchange, Queue

from celery_singleton_lock.celery_compat import delays_natively, driver_of
from celery_singleton_lock.core.heartbeat import MAX_TIMEOUT
from celery_singleton_lock.core.store import MarkerState
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.publish.claim import Claim
from celery_singleton_lock.publish.header import HEADER, QUEUE_KEY, SERIALIZER_KEY, Delivery
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.worker.origin import reached_with_delay, without_delay

_MAX_DOUBLINGS: Final = 30


def backoff(delay: float, max_delay: float, tries: int) -> float:
    """Seconds: ``delay`` doubled ``tries`` times, at most ``max_delay``, half of it jitter.

    "Equal jitter": clients that met at one release don't meet again at the next, and none of them
    comes back at once (M. Brooker, "Exponential Backoff And Jitter", 2015).
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
    claim: Claim | None = None,
) -> tuple[float, int]:
    """Publish the running message again, to arrive in ``delay`` seconds.

    Args:
        task: The running task.
        request: Its request.
        delivery: What the header of the copy says; its sequence is raised here.
        key: The lock key, for the marker.
        runtime: Of the task's app.
        delay: Seconds, cut to a third of the visibility timeout.
        claim: The message's, if it is queued with the copy.

    Returns:
        The seconds until the copy arrives, and its sequence.

    Raises:
        Exception: What publishing raises; nothing was given up then.
    """
    longest = runtime.settings.longest_countdown
    delay = delay if longest is None else min(delay, longest)
    if delays_natively(task.app):
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
        pass  # if the broker delivers this message again, there is one copy too many
    return delay, copy.sequence


def why_not(app: Any, request: Any) -> str | None:
    """Why the message of ``request`` can't be put back; None: it can.

    A message from a fanout exchange has to go back to the queue of this worker only. RabbitMQ can
    do that. With the other transports, workers subscribe to the exchange and don't read the queue.
    """
    name = getattr(request, QUEUE_KEY, None)
    queue = None if name is None else app.amqp.queues.get(name)
    if queue is None or queue.exchange.type != "fanout" or (driver := driver_of(app)) == "amqp":
        return None
    return (
        f"it came by the fanout exchange {queue.exchange.name!r}, on which {driver} can't put a "
        "message back for one worker"
    )


def _publish(task: Any, request: Any, header: Mapping[str, Any], delay: float) -> None:
    headers = {**(request.as_execution_options().get("headers") or {}), HEADER: header}
    signature = task.signature_from_request(
        request, countdown=delay, retries=request.retries, headers=headers, **_kept(request)
    )
    _send_to_its_queue(task.app, request, signature.options)
    # Celery makes what is published inside a task its child: a top-level message that is put back
    # would get its own id as its parent. A request that is called directly has no children.
    request.called_directly = True
    try:
        # Celery's own apply_async, because this is no new call: a base class's may replace the
        # headers, or encrypt the arguments a second time.
        BaseTask.apply_async(
            task, signature.args, signature.kwargs, add_to_parent=False, **signature.options
        )
    finally:
        request.called_directly = False


def _kept(request: Any) -> dict[str, Any]:
    """Options of the call that Celery's own retry forgets.

    The representation of its arguments may keep a password out of the log. The app's own serializer
    may be unable to write pickled arguments, and then the message could never go back.
    """
    names = {"serializer": SERIALIZER_KEY, "argsrepr": "argsrepr", "kwargsrepr": "kwargsrepr"}
    options = {option: getattr(request, name, None) for option, name in names.items()}
    # Kept by Celery since 5.7. The message's value, a False too; not the default of the class.
    options["ignore_result"] = vars(request).get("ignore_result")
    return {option: value for option, value in options.items() if value is not None}


def _send_to_its_queue(app: Any, request: Any, options: dict[str, Any]) -> None:
    """Address a copy to the one queue that its message came from.

    Published to the exchange again, it would reach every queue bound there: each worker would get a
    copy of every copy of a broadcast. With a virtual transport (Redis) a pool child also does not
    know the types of exchanges, treats the exchange as direct, and finds no queue.
    """
    info = request.delivery_info or {}
    exchange, arrived = info.get("exchange"), info.get("routing_key")
    name = arrived if exchange == "" else getattr(request, QUEUE_KEY, None)
    if not isinstance(name, str) or not isinstance(arrived, str):
        return  # no queue of the app's configuration: sent as Celery's own retry sends it
    queue = app.amqp.queues.get(name)  # not [name], which creates a missing queue
    # Set, not removed: Celery fills in what is missing from task_routes and from the attributes of
    # the task class, and those lead to their own exchange. Only None counts as missing.
    options["exchange"], options["routing_key"] = "", name
    if queue is not None and queue.exchange.type == "direct":
        options["queue"] = name  # Celery's way to send to the queue itself
        return
    key = without_delay(arrived)
    if exchange and delays_natively(app) and reached_with_delay(app, key) == [name]:
        # Celery takes exchange type and routing key from a Queue, and declares nothing of it then.
        # Before Celery 5.7 a key that was delayed before would get a second prefix.
        options["queue"] = Queue(name, Exchange(str(exchange), "topic"), routing_key=key)
        return
    # The default exchange routes to the queue that the routing key names; the worker waits for the
    # delay. The queue is not declared, because its arguments here may differ from the broker's.
    options["queue"], options["declare"] = Queue(name, Exchange("", "direct")), []
