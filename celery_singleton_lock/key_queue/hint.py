"""The hint: the message of the call of a queue that is to run next, published to the broker.

A hint is no evidence of anything (`core.call_queue`). If the broker does not take one, the key is
due for a sweep in a second.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import cache
from typing import Any, Final

from kombu import pools

from ..celery_compat import limit_broker_timeouts
from ..core.call_queue import CallQueue, Hint
from ..core.events import Event, EventName
from ..core.heartbeat import MAX_TIMEOUT
from ..core.lease import Token
from ..errors import StoreError
from ..message.claim import claim_in
from ..message.stored_message import StoredMessage
from ..runtime import Runtime

logger = logging.getLogger("celery_singleton_lock")

# Seconds until the next sweep of a key whose call could not be published.
_AGAIN: Final = 1.0
#: The number of publications of a message without a run that is reported: after five minutes.
STALLED_AFTER: Final = 3


def publish_hint(app: Any, queue: CallQueue, hint: Hint, producer: Any = None) -> bool:
    """Publish the message of the call that is to run next; never raises.

    If the broker does not take it, the key is due for a sweep in a second. A call of another broker
    is left to the workers there.

    Args:
        app: The app.
        queue: The queues of the store.
        hint: The call.
        producer: Publishes the message; None: one of this process.

    Returns:
        Whether the broker has taken it, or was not asked.
    """
    try:
        message = StoredMessage.from_bytes(hint.message)
        if is_of_another_broker(app, message):
            # Due at once: no sweep of the workers there must miss it.
            queue.defer(hint.key, seconds=0.0, timeout=MAX_TIMEOUT, unpublished=hint)
            return True
        eta = None
        if hint.countdown:
            eta = Runtime.of(app).clock.wall() + hint.countdown
        options = {"eta": eta, "queues": app.amqp.queues, "retry": False}
        if producer is not None:
            message.publish(producer, **options)
        else:
            with _hint_producers(app).acquire(block=True) as publisher:
                message.publish(publisher, **options)
    except Exception as exc:
        publish_later(queue, hint, exc)
        return False
    _report(Runtime.of(app), hint, message)
    return True


def is_of_another_broker(app: Any, message: StoredMessage) -> bool:
    """Whether an app made the call that shares the store with this one, but not the broker.

    It may be another project, or another deployment of this one. The workers here may lack the task
    and discard the message, or run it in the wrong place.
    """
    runtime = Runtime.of(app)
    if not message.broker or message.broker in runtime.brokers:
        return False
    _warn_of_broker(message.broker, runtime.broker)
    return True


@cache
def _warn_of_broker(broker: str, own: str) -> None:
    logger.warning(
        "singleton: calls of apps with the broker %s are in queues of keys here; they are left to "
        "the workers there, because the broker of this app is %s. If the two are one, spell its "
        "URL in one way; if not, give each project a singleton_lock_prefix",
        *(broker, own),
    )


def free_claim(runtime: Runtime, message: StoredMessage, *, timeout: float) -> None:
    """End the claim of a call that leaves its queue without a body.

    Raises:
        StoreError: The store refuses the request, or does not answer.
    """
    token, claim = claim_in(message.headers, runtime.keyspace)
    if claim is not None:
        runtime.store.claims.change(token, claim.freed(), timeout=timeout)


def emit(runtime: Runtime, name: EventName, key: str, task_id: str, task: str, **data: Any) -> None:
    """Emit an event of a call in the queue of ``key``."""
    if runtime.events.observes(name):
        runtime.events.emit(Event(name=name, key=key, task=task, task_id=task_id, data=data))


def _report(runtime: Runtime, hint: Hint, message: StoredMessage) -> None:
    call = hint.key, Token.task_id_of(hint.call_id), str(message.headers.get("task") or "")
    emit(runtime, EventName.PUBLISHED, *call, copies=hint.copies)
    if hint.copies >= STALLED_AFTER and not hint.has_begun:
        emit(
            runtime,
            EventName.STALLED,
            *call,
            copies=hint.copies,
            routing_key=message.properties.get("routing_key"),
            advice="does a worker consume its queue?",
        )


def hint_connection(app: Any) -> Any:
    """A new connection to the broker that gives up soon: the end of a task must not wait for it.

    The app's own producers wait for a Redis broker without a limit.
    """
    connection = app.connection_for_write(transport_options={"max_retries": 1})
    limit_broker_timeouts(connection, MAX_TIMEOUT)
    return connection


def _hint_producers(app: Any) -> Any:
    runtime = Runtime.of(app)
    if runtime.hint_producers is None:
        runtime.hint_producers = pools.producers[hint_connection(app)]
    return runtime.hint_producers


def publish_later(queue: CallQueue, hint: Hint, exc: BaseException) -> None:
    logger.warning(
        "singleton: could not publish %s, the next call of %s (%s); tried again in %g s",
        *(hint.call_id, hint.key, exc, _AGAIN),
    )
    with suppress(StoreError):  # else at the hint's own deadline, after a minute
        queue.defer(hint.key, seconds=_AGAIN, timeout=MAX_TIMEOUT, unpublished=hint, perhaps=True)
