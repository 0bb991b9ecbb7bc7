"""Publishing of calls of singleton tasks: header, key, and claim if the call needs one.

Every call of a singleton task uses ``publish_call``, so the work that only few calls need is done
last. A ``send`` publishes a message; each part wraps the one before. Outermost first: `counting`,
the join of a queue (`key_queue.join`), `_keeping`, and Celery's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from celery import signals
from celery.utils import uuid

from ..celery_compat import dump_models
from ..key_queue.join import Send, joining, key_of_queue
from ..message.arguments import stable_key_suffix
from ..message.header import HEADER, add_header, without_header
from ..message.request_data import RequestData
from ..on_conflict import CancelRunning, Queue
from ..option_values import OnDuplicate
from ..policy import Policy
from ..runtime import Runtime
from .continuation import carry_claim, continues
from .publication import Publication

if TYPE_CHECKING:
    from celery.result import AsyncResult


@dataclass(slots=True)
class _Sending:
    """A message that a base class publishes.

    Attributes:
        header: This library's header of the message.
        is_published: Whether the base class has published it; None: it was not called.
    """

    header: Mapping[str, Any]
    is_published: bool | None = None


_sending: Final[ContextVar[_Sending | None]] = ContextVar("singleton_sending", default=None)


def publish_call(
    task: Any,
    args: Any,
    kwargs: Any,
    send: Send,
    options: dict[str, Any],
    *,
    task_id: str | None,
    given: Mapping[str, Any] | None,
) -> AsyncResult[Any]:
    """Publish a call with this library's header, and with a claim if the call needs one.

    A duplicate is not published; the result is that of the earlier call.

    Args:
        task: The task that is called.
        args, kwargs: The arguments of the call, in Celery's form.
        send: Publishes the message.
        options: Celery's options, to which the header is added.
        task_id: The id of the message; None: a new one.
        given: The policy's options that the call sets (validated before).

    Raises:
        DuplicateTask, LockKeyError: See ``SingletonTask.apply_async``.
    """
    task_id = str(task_id) if task_id else uuid()
    if not task.singleton_policy().enabled:
        return send(task_id, without_header(options))
    app = task.app  # read once: Celery looks it up each time
    running: Any = app.current_worker_task
    header = add_header(options, task_id=task_id, options=given, running=running)
    sending = _Sending(header) if task.singleton_publishes_through_others else None
    if sending is not None:
        send = _keeping(sending, send)
    policy = task.singleton_policy(header.get("options"))
    if policy.is_plain and running is None:  # most calls
        return send(task_id, options)
    if isinstance(policy.on_conflict, CancelRunning):
        # See task/cancel_running.py.
        header.setdefault("called_at", Runtime.of(app).clock.wall())
    is_queued = _is_queued(policy, running, task_id)
    if policy.unique is None and not is_queued:
        return counting(running, send)(task_id, options)
    call = _KeyedCall(
        task, args or (), kwargs or {}, options, task_id, policy, header, running, given, is_queued
    )
    result: AsyncResult[Any] = _publish_with_key(call, send, sending)
    return result


@dataclass(slots=True)
class _KeyedCall:
    """A call whose key is needed before it is published: ``unique`` or ``on_conflict="queue"``."""

    task: Any
    args: Any
    kwargs: Any
    options: dict[str, Any]
    task_id: str
    policy: Policy
    header: dict[str, Any]
    running: Any
    given: Mapping[str, Any] | None
    is_queued: bool

    @property
    def is_next_attempt(self) -> bool:
        """Whether the running task publishes its own next attempt."""
        return self.running is not None and continues(self.running, self.task_id)

    @property
    def is_retry_of_lost_child(self) -> bool:
        """Whether the worker parent retries the task of a lost child. It isn't a newer call."""
        return bool(self.options.get("retries"))


def _publish_with_key(call: _KeyedCall, send: Send, sending: _Sending | None) -> AsyncResult[Any]:
    task, policy, options = call.task, call.policy, call.options
    # The configuration is read last, because that costs as much as all steps before.
    eager = bool(task.app.conf.task_always_eager)
    runtime = Runtime.of(task.app, eager=eager)
    key = _key_of(task, runtime, call.args, call.kwargs, options)
    joins = False
    if call.is_queued and key is not None and not eager:
        send, joins = _joining(call, runtime, key, send)
    send = counting(call.running, send)  # last: a call that could not join was not sent
    if key is None or policy.unique is None:
        return send(call.task_id, options)
    if call.is_next_attempt:
        carry_claim(runtime, call.running.request, call.header, task.name, key, policy)
        return send(call.task_id, options)
    publication = Publication(
        runtime=runtime,
        task=task.name,
        task_id=call.task_id,
        key=key,
        policy=policy,
        header=call.header,
        options=options,
        expires=options.get("expires", task.expires),
        drops_in_canvas=call.given is not None and "on_duplicate" in call.given,
        joins=joins,
    )
    if eager:
        return publication.run(send)
    if policy.on_duplicate is OnDuplicate.REPLACE and not call.is_retry_of_lost_child:
        serializer = options.get("serializer") or task.serializer
        args, kwargs = dump_models(task, call.args, call.kwargs, serializer)
        through_others = sending is not None
        publication.replace_arguments(args, kwargs, serializer, through_others=through_others)
    result = publication.publish(send)
    if sending is not None and sending.is_published is False:
        publication.await_message()
    return result


def _is_queued(policy: Policy, running: Any, task_id: str) -> bool:
    """Whether a call joins a queue: by its rule, or as the next attempt of one with a place."""
    if isinstance(policy.on_conflict, Queue):
        return True
    if running is None or not continues(running, task_id):
        return False
    run = RequestData.of(running.request).run
    return run is not None and any(feature.keeps_place for feature in run.features)


def _joining(call: _KeyedCall, runtime: Runtime, key: str, send: Send) -> tuple[Send, bool]:
    """``send`` for a call of the queue of ``key``, and whether it takes a new place there.

    A call with a countdown or an eta takes it when it is delivered.
    """
    is_next_attempt = call.is_next_attempt
    is_started = is_next_attempt or call.is_retry_of_lost_child
    if not is_started and (call.options.get("countdown") or call.options.get("eta")):
        return send, False
    attempt = call.running.request if is_next_attempt else None
    named = None if is_next_attempt else call.header.get("queue")
    queue = call.header["queue"] = named or key_of_queue(attempt, key)
    call.header["broker"] = runtime.broker
    joined = joining(
        call.task, runtime, queue, call.policy, send, attempt=attempt, is_started=is_started
    )
    return joined, queue == key and not is_started


def counting(running: Any, send: Send) -> Send:
    """``send``, which also counts the messages that the ``running`` task sends, by their id.

    A message is counted after the broker, or the queue of its key, has accepted it. So a body that
    repeats a failed send makes no second call, and lease and claim keep the name of the first.
    """
    if running is None:
        return send

    def send_and_count(task_id: str, options: dict[str, Any]) -> AsyncResult[Any]:
        result = send(task_id, options)
        published = RequestData.of(running.request).published
        published[task_id] = published.get(task_id, 0) + 1
        return result

    return send_and_count


def _keeping(sending: _Sending, send: Send) -> Send:
    """``send``, with the header kept if a base class replaces ``options["headers"]``."""
    # The receiver is connected only when it is needed, because every message that this process
    # publishes calls it.
    signals.before_task_publish.connect(_restore_header)

    def send_with_header(task_id: str, options: dict[str, Any]) -> AsyncResult[Any]:
        sending.is_published = False
        reset = _sending.set(sending)
        try:
            return send(task_id, options)
        finally:
            _sending.reset(reset)

    return send_with_header


def _restore_header(headers: Any = None, **_: Any) -> None:
    sending = _sending.get()
    if sending is None:
        return
    header = sending.header
    # A base class may publish other messages too. (Headers of task protocol 1 contain no id.)
    if headers.get("id", header["id"]) == header["id"]:
        headers[HEADER] = header
        sending.is_published = True


def _key_of(
    task: Any, runtime: Runtime, args: Any, kwargs: Any, options: Mapping[str, Any]
) -> str | None:
    """The lock key that the call will need; None if a callable key returns None (no lock)."""
    serializer = options.get("serializer") or task.serializer
    args, kwargs = dump_models(task, args, kwargs, serializer)
    suffix = stable_key_suffix(task.singleton_key_maker, args, kwargs, serializer)
    return None if suffix is None else runtime.keyspace.lock(task.singleton_scope, suffix)
