"""The copy of a requeued message, with its id, published before this delivery is given up.

The message of a killed pool child is not requeued here; Celery or the broker requeues it (see
`worker.dead_child`).

Guarantees
    The copy keeps id, arguments, serializer, compression, queue, priority, expiry, time limits,
    headers, parent, root, group, chord, links, the user's retry count, and every property that the
    caller gave the broker, except `stored_message.ONCE`. The function returns once the broker has
    the copy.

Non-guarantees
    Exactly one copy: a crash between publishing and marking leaves two. Each has a sequence number,
    and the store refuses the older copy.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Final

from celery import Celery
from celery.app.amqp import AMQP
from celery.app.task import Task as BaseTask
from kombu import Exchange, Producer, Queue

from ..celery_compat import delays_natively, driver_of
from ..core.backoff import Pace
from .header import HEADER
from .origin import reached_with_delay, without_delay
from .request_data import RequestData
from .stored_message import ONCE

#: For a message of a newer version: another worker of its queue, which can read it, should get it.
FOR_ANOTHER_WORKER: Final[Pace] = (4.0, 4.0)
# Properties of a delivery that the transport or Celery writes again.
_WRITTEN_AGAIN: Final = frozenset(
    ("application_headers", "body_encoding", "delivery_info", "delivery_tag")
)
# What Celery and kombu take as options of a publication. Another publisher may have given such a
# name to a property.
_OPTIONS: Final = frozenset(
    name
    for function in (BaseTask.apply_async, Celery.send_task, AMQP.as_task_v2, Producer.publish)
    for name in inspect.signature(function).parameters
) | {"event_dispatcher", "exchange_type", "queue"}


def publish_copy(
    task: Any, request: Any, header: Mapping[str, Any], delay: float, producer: Any = None
) -> float:
    """Publish the running message again.

    Args:
        task: The running task.
        request: Its request.
        header: This library's header of the copy.
        delay: Seconds until the copy may run.
        producer: Publishes the copy; None: one of the app's.

    Returns:
        The delay, in whole seconds if the broker delays the copy.

    Raises:
        Exception: Publishing failed; this delivery is not given up.
    """
    if delays_natively(task.app):
        delay = math.ceil(delay)
    headers = {**(request.as_execution_options().get("headers") or {}), HEADER: header}
    signature = task.signature_from_request(
        request, countdown=delay, retries=request.retries, headers=headers, **_kept(request)
    )
    signature.options.update(_properties(request))
    _send_to_its_queue(task.app, request, signature.options)
    # Celery treats a message that is published inside a task as a child of the task, so the copy of
    # a top-level message would get its own id as its parent. A request that is called directly has
    # no children.
    request.called_directly = True
    try:
        # Celery's own apply_async, because this is not a new call. The apply_async of a base class
        # may replace the headers, or encrypt the arguments a second time.
        BaseTask.apply_async(
            task,
            signature.args,
            signature.kwargs,
            add_to_parent=False,
            producer=producer,
            **signature.options,
        )
    finally:
        request.called_directly = False
    return delay


def why_not(task: Any, request: Any) -> str | None:
    """Why the message of ``request`` can't be requeued; None: it can.

    A message from a fanout exchange must return to the queue of this worker only. RabbitMQ supports
    that. With the other transports, workers subscribe to the exchange and don't read the queue.
    """
    if request.is_eager:
        return "this call is eager, so it can't be requeued"
    name = RequestData.of(request).arrival.queue
    queue = None if name is None else task.app.amqp.queues.get(name)
    if (
        queue is None
        or queue.exchange.type != "fanout"
        or (driver := driver_of(task.app)) == "amqp"
    ):
        return None
    return (
        f"it came by the fanout exchange {queue.exchange.name!r}, on which {driver} can't put a "
        "message back for one worker"
    )


def _kept(request: Any) -> dict[str, Any]:
    """Options of the call that Celery's own retry does not keep.

    The representation of the arguments may keep a password out of the log. The app's default
    serializer may be unable to write pickled arguments; then the message could never be requeued.
    """
    names = ("argsrepr", "kwargsrepr", "compression")
    options = {name: getattr(request, name, None) for name in names}
    options["serializer"] = RequestData.of(request).arrival.serializer
    # Celery keeps this since 5.7. The message's value is kept, including False, but not the default
    # of the class.
    options["ignore_result"] = vars(request).get("ignore_result")
    return {option: value for option, value in options.items() if value is not None}


def _properties(request: Any) -> dict[str, Any]:
    """The properties that the caller gave the broker, such as ``MessageGroupId`` of SQS."""
    found = request.properties or {}
    left_out = ONCE | _WRITTEN_AGAIN | _OPTIONS - {"delivery_mode"}
    return {name: value for name, value in found.items() if name not in left_out}


def _send_to_its_queue(app: Any, request: Any, options: dict[str, Any]) -> None:
    """Address a copy to the one queue that its message came from.

    A copy that is published to the exchange again would reach every queue bound there: each worker
    would get a copy of every copy of a broadcast. With a virtual transport (Redis) a pool child
    also does not know the types of exchanges, treats the exchange as direct, and finds no queue.
    """
    info = request.delivery_info or {}
    exchange, arrived = info.get("exchange"), info.get("routing_key")
    name = arrived if exchange == "" else RequestData.of(request).arrival.queue
    if not isinstance(name, str) or not isinstance(arrived, str):
        return  # the queue is not in the app's configuration: sent as Celery's own retry
    queue = app.amqp.queues.get(name)  # not [name], which creates a missing queue
    # The options are set instead of removed: Celery fills in missing options from task_routes and
    # from the attributes of the task class, which lead to another exchange. Only None counts as
    # missing.
    options["exchange"], options["routing_key"] = "", name
    if queue is not None and queue.exchange.type == "direct":
        options["queue"] = name  # Celery's way to send to the queue itself
        return
    key = without_delay(arrived)
    if exchange and delays_natively(app) and reached_with_delay(app, key) == [name]:
        # Celery takes exchange type and routing key from a Queue, and does not declare it. Before
        # Celery 5.7 a routing key that was delayed before would get a second prefix.
        options["queue"] = Queue(name, Exchange(str(exchange), "topic"), routing_key=key)
        return
    # The default exchange routes to the queue that the routing key names; the worker waits for the
    # delay. The queue is not declared, because its arguments here may differ from the broker's.
    options["queue"], options["declare"] = Queue(name, Exchange("", "direct")), []
