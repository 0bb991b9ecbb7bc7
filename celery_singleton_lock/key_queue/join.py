"""``on_conflict="queue"`` at publish: a call takes its place in the queue of its key.

Overview
    The message is captured as Celery would publish it, and joins the queue in one request. It is
    published only if the call is to run next. Otherwise the end of the call before it publishes it
    (`key_queue.feature`), or a sweep does (`key_queue.sweep`).

Guarantees
    A call whose ``apply_async`` has returned is in the queue. A call whose ``apply_async`` has
    raised never begins, unless the error says that this is unknown.

Non-guarantees
    A place for a call with ``countdown`` or ``eta``, before it is delivered.

Failure handling
    No reply to the join: it is repeated once, and then the error is raised. The next attempt of a
    call, which keeps its place, is published instead. The broker refuses the message: the call is
    withdrawn, and the broker's error is raised. If Celery would repeat the publish, because the
    call follows a task that has ended, it keeps its place, and a sweep publishes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from celery.result import AsyncResult

from ..celery_compat import library_errors, repeats_publish
from ..core.call_queue import CallQueue, Hint, Join, Place, Removal, Remove
from ..core.events import EventName
from ..core.heartbeat import MAX_TIMEOUT
from ..core.keyspace import Keyspace
from ..core.store import Store
from ..errors import QueueFull, SettingsError, StoreError, StoreUnavailable
from ..message.claim import claim_in
from ..message.header import Delivery
from ..message.request_data import RequestData
from ..message.stored_message import Capture, StoredMessage
from ..message.times import seconds_until
from ..on_conflict import Queue
from ..policy import Policy
from ..runtime import Runtime
from .hint import emit, publish_hint, publish_later

logger = logging.getLogger("celery_singleton_lock")

_WEEK = 604_800.0
#: A function that publishes a task id and options, as Celery's ``apply_async`` does.
Send = Callable[[str, dict[str, Any]], "AsyncResult[Any]"]
_UNKNOWN = "it is unknown whether the call is in the queue of its key, and will run"


def require_call_queue(task: str, store: Store) -> CallQueue:
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
    most = None if is_started else Queue.in_force(policy.on_conflict).max_waiting

    def join_and_send(task_id: str, options: dict[str, Any]) -> AsyncResult[Any]:
        queue = require_call_queue(task.name, runtime.store)
        with _producer(task.app, options) as producer:
            capture = Capture(producer, task_id, at=runtime.clock.wall())
            result = send(task_id, {**options, "producer": capture})
            if (message := capture.message) is None:
                return result  # another class has not published it, or not with this producer
            claim, claim_ttl = claim_of(runtime, key, message)
            request = Join(
                key=key,
                token=Delivery.of(message.headers).token,
                message=message.to_bytes(),
                late=bool(task.acks_late),
                limit=policy.limit,
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
                RequestData.of(attempt).joined = key
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


def key_of_queue(attempt: Any, key: str) -> str:
    """The key in whose queue a call has its place, or will have it.

    Args:
        attempt: The running request that its message continues; None: it is a new call.
        key: The key of its arguments. The place is in another queue if the task's key template has
            changed since the call was made.
    """
    run = None if attempt is None else RequestData.of(attempt).run
    return run.key if run is not None and run.computed_key == key else key


def claim_of(runtime: Runtime, key: str, message: StoredMessage) -> tuple[str, float]:
    """The claim of a call that joins the queue of ``key``, and the seconds until it expires there.

    ``unique_for`` bounds the claim of a message that was lost. The store does not lose this one,
    and the claim ends when its body begins, or when it leaves.

    Returns:
        An empty key: it has none.
    """
    _, claim = claim_in(message.headers, runtime.keyspace)
    # The key template may have changed, and with it the shard.
    if claim is None or not Keyspace.same_shard(claim.key, key):
        return "", 0.0
    expires = message.headers.get("expires")
    if expires is None:
        return claim.key, _WEEK
    return claim.key, min(_WEEK, seconds_until(expires, runtime.app) or 0.0)


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
            publish_later(queue, hint, exc)
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
        # A sweep has published it meanwhile, and it has begun.


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
