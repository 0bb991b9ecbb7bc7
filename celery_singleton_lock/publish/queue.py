"""``on_conflict="queue"`` at publish: a call takes its place in the queue of its key.

Overview
    The message is captured as Celery would publish it, and joins the queue in one request. It is
    published only if the call is to run next. Otherwise the end of the call before it publishes it
    (`task.queue`), or a look does (`worker.queue_look`).

Guarantees
    A call whose ``apply_async`` has returned is in the queue. A call whose ``apply_async`` has
    raised never begins, unless the error says that this is unknown.

Non-guarantees
    A place for a call with ``countdown`` or ``eta``, before it is delivered.

Failure handling
    No reply to the join: it is repeated once, and then the error is raised. The next attempt of a
    call, which keeps its place, is published instead. The broker refuses the message: the call is
    withdrawn, and the broker's error is raised. If Celery would repeat the publish, because the
    call follows a task that has ended, it keeps its place, and a look publishes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from celery.result import AsyncResult
from kombu import pools

from ..celery_compat import library_errors, limit_broker_timeouts, repeats_publish
from ..core.call_queue import CallQueue, Hint, Join, Place, Removal, Remove
from ..core.events import Event, EventName
from ..core.heartbeat import MAX_TIMEOUT
from ..core.key import Keyspace
from ..core.lease import Token
from ..core.store import Store
from ..errors import QueueFull, SettingsError, StoreError, StoreUnavailable
from ..message.claim import JOINED, TASK_RUN, Claim
from ..message.header import Delivery, header_of
from ..message.stored_message import Capture, StoredMessage
from ..message.times import seconds_until
from ..policy import Policy
from ..runtime import Runtime
from .call import Send

logger = logging.getLogger("celery_singleton_lock")

# Seconds until the next look at a key whose call could not be published.
_AGAIN = 1.0
# Seconds. A message that arrives before its key is free, because the worker's clock is ahead, is
# dropped, and the call waits for a look.
_CLOCKS_DIFFER = 0.02
_WEEK = 604_800.0
# The number of publications of a message without a run that is reported: after five minutes.
STALLED_AFTER = 3
_UNKNOWN = "it is unknown whether the call is in the queue of its key, and will run"


def call_queue(task: str, store: Store) -> CallQueue:
    """The queues in ``store``.

    Raises:
        SettingsError: It keeps none.
    """
    if store.call_queue is None:
        raise SettingsError(
            f'{task} has on_conflict="queue", but the store ({store.capabilities.name}) keeps no '
            'queues: use Redis, Valkey, Sentinel or Cluster, or on_conflict="wait" or "retry"'
        )
    return store.call_queue


def joining(
    task: Any,
    runtime: Runtime,
    key: str,
    policy: Policy,
    send: Send,
    *,
    attempt: Any = None,
    is_started: bool = False,
) -> Send:
    """As ``send``, for a call that takes a place in the queue of ``key``.

    Args:
        task: The task that is called.
        runtime: The runtime of its app.
        key: The lock key.
        policy: The task's policy.
        send: Publishes the message.
        attempt: The running request that this message continues; None: none.
        is_started: Whether it is the next attempt of a call, which has its place.

    Raises (the returned function):
        SettingsError: The store keeps no queues.
        QueueFull: As many calls wait as may.
        StoreError: The store refuses the call, or does not answer.
        Exception: The broker refuses the message; the call never begins.
    """
    most = None if is_started else policy.on_conflict.max_waiting

    def join_and_send(task_id: str, options: dict[str, Any]) -> AsyncResult[Any]:
        queue = call_queue(task.name, runtime.store)
        with _producer(task.app, options) as producer:
            capture = Capture(producer, task_id, at=runtime.clock.wall())
            result = send(task_id, {**options, "producer": capture})
            if (message := capture.message) is None:
                return result  # another class has not published it, or not with this producer
            claim, claim_ttl = claim_of(runtime, key, message)
            request = Join(
                key=key,
                token=token_of(message.headers),
                message=message.to_bytes(),
                late=bool(task.acks_late),
                max_waiting=most,
                claim=claim,
                claim_ttl=claim_ttl,
            )
            publish = partial(message.publish, producer, **capture.options)
            try:
                place, depth = _join(queue, request)
            except StoreError:
                if not is_started:
                    raise
                # Its call is the next one in any case, and would end if this were raised.
                with library_errors(producer):
                    publish()
                return result
            except BaseException:
                # A soft time limit. The store may have carried out the request.
                with suppress(StoreError):
                    _withdraw(runtime, queue, request)
                raise
            if attempt is not None:
                attempt.__dict__[JOINED] = key
            if place is Place.FULL:
                raise QueueFull(
                    f"{depth} calls are in the queue of {key!r}, as many as may "
                    "(OnConflict.queue(max_waiting=...)); the call was not made",
                    depth,
                )
            if place is Place.WAITING and depth:
                call = key, request.token.task_id, str(task.name)
                emit(runtime, EventName.JOINED, *call, position=depth)
            if place is Place.HINTED:
                with library_errors(producer):
                    _publish_first(task.name, runtime, queue, request, publish)
            return result

    return join_and_send


def queue_of(attempt: Any, key: str) -> str:
    """The key in whose queue a call has its place, or will have it.

    Args:
        attempt: The running request that its message continues; None: it is a new call.
        key: The key of its arguments. The place is in another queue if the task's key template has
            changed since the call was made.
    """
    run = None if attempt is None else attempt.__dict__.get(TASK_RUN)
    return str(run.key) if run is not None and run.computed_key == key else key


def token_of(headers: Mapping[str, Any]) -> Token:
    """The token of the first delivery of a message with these headers."""
    return delivery_of(headers).token


def delivery_of(headers: Mapping[str, Any]) -> Delivery:
    """The first delivery of a message with these headers."""
    from types import SimpleNamespace

    fields = {"replaced_task_nesting": 0, "retries": 0, "delivery_info": None, **headers}
    return Delivery.of(SimpleNamespace(**fields))


def publish_hint(app: Any, queue: CallQueue, hint: Hint, producer: Any = None) -> bool:
    """Publish the message of the call that is to run next; never raises.

    If the broker does not take it, the key is due for a look in a second. A call of another broker
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
            # Due at once: no look of the workers there must miss it.
            queue.defer(hint.key, seconds=0.0, timeout=MAX_TIMEOUT, unpublished=hint)
            return True
        eta = None
        if hint.countdown:
            eta = Runtime.of(app).clock.wall() + hint.countdown + _CLOCKS_DIFFER
        options = {"eta": eta, "queues": app.amqp.queues, "retry": False}
        if producer is not None:
            message.publish(producer, **options)
        else:
            with _hint_producers(app).acquire(block=True) as publisher:
                message.publish(publisher, **options)
    except Exception as exc:
        _publish_later(queue, hint, exc)
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


def claim_in(headers: Mapping[str, Any], runtime: Runtime) -> tuple[Token, Claim | None]:
    """The token of a message with these headers, and the claim that they name."""
    token = token_of(headers)
    header = header_of(headers, token.task_id)
    return token, Claim.from_header(header.get("claim"), runtime.keyspace)


def claim_of(runtime: Runtime, key: str, message: StoredMessage) -> tuple[str, float]:
    """The claim of a call that joins the queue of ``key``, and the seconds until it expires there.

    ``unique_for`` bounds the claim of a message that was lost. The store does not lose this one,
    and the claim ends when its body begins, or when it leaves.

    Returns:
        An empty key: it has none.
    """
    _, claim = claim_in(message.headers, runtime)
    # The key template may have changed, and with it the shard.
    if claim is None or not Keyspace.same_shard(claim.key, key):
        return "", 0.0
    expires = message.headers.get("expires")
    if expires is None:
        return claim.key, _WEEK
    return claim.key, min(_WEEK, seconds_until(expires, runtime.app) or 0.0)


def free_claim(runtime: Runtime, message: StoredMessage, *, timeout: float) -> None:
    """End the claim of a call that leaves its queue without a body.

    Raises:
        StoreError: The store refuses the request, or does not answer.
    """
    token, claim = claim_in(message.headers, runtime)
    if claim is not None:
        runtime.store.change_claim(token, claim.freed(), timeout=timeout)


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


def _publish_later(queue: CallQueue, hint: Hint, exc: BaseException) -> None:
    logger.warning(
        "singleton: could not publish %s, the next call of %s (%s); tried again in %g s",
        *(hint.call_id, hint.key, exc, _AGAIN),
    )
    with suppress(StoreError):  # else at the hint's own deadline, after a minute
        queue.defer(hint.key, seconds=_AGAIN, timeout=MAX_TIMEOUT, unpublished=hint, perhaps=True)


def _join(queue: CallQueue, request: Join) -> tuple[Place, int]:
    try:
        return queue.join(request, timeout=MAX_TIMEOUT)
    except StoreUnavailable as exc:
        if not exc.was_sent:
            raise
        # Repeated, because a call that has joined must not be reported as one that has not.
        try:
            return queue.join(request, timeout=MAX_TIMEOUT)
        except StoreUnavailable as again:
            raise StoreUnavailable(f"{again}; {_UNKNOWN}") from again


def _publish_first(
    task: str, runtime: Runtime, queue: CallQueue, request: Join, publish: Callable[[], None]
) -> None:
    try:
        publish()
    except BaseException as exc:
        is_refusal = isinstance(exc, Exception) and not isinstance(exc, SoftTimeLimitExceeded)
        if is_refusal and repeats_publish():
            # Celery has told kombu not to. Raised here, the error would be the result of the task
            # that has ended.
            key, call = request.key, request.token.call_id
            hint = Hint(key=key, call_id=call, copies=1, begins=0, message=b"")
            _publish_later(queue, hint, exc)
            return
        try:
            removal = _withdraw(runtime, queue, request)
        except StoreError as silent:
            text = f"the broker refused the message ({exc}), and the store did not answer"
            raise StoreUnavailable(f"{text} ({silent}); {_UNKNOWN}") from exc
        if removal is Removal.REMOVED:
            emit(
                runtime,
                EventName.REMOVED,
                *(request.key, request.token.task_id, task),
                reason="withdrawn",
            )
        if removal is Removal.REMOVED or not is_refusal:
            raise
        # A look has published it meanwhile, and it has begun.


def _withdraw(runtime: Runtime, queue: CallQueue, request: Join) -> Removal:
    """Take out a call that has not begun.

    Raises:
        StoreError: The store does not answer.
    """
    remove = Remove(
        key=request.key,
        token=request.token,
        # The broker may have taken the message, though its reply says otherwise, or is missing.
        ended_ttl=max(runtime.settings.completion_ttl, _WEEK),
        sequence=request.sequence,
        only_unbegun=True,
    )
    removal, hint = queue.remove(remove, timeout=MAX_TIMEOUT)
    if hint is not None:
        publish_hint(runtime.app, queue, hint)
    return removal


@contextmanager
def _producer(app: Any, options: dict[str, Any]) -> Any:
    """The producer that the caller gives, or one of its connection or of the app."""
    given, connection = options.pop("producer", None), options.pop("connection", None)
    if given is not None:
        yield given
    elif connection is not None:
        yield app.amqp.Producer(connection, auto_declare=False)
    else:
        with app.producer_pool.acquire(block=True) as producer:
            yield producer
