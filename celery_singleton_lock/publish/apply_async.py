"""Publishing of calls of singleton tasks: header, key, and claim if the call needs one.

Every call of a singleton task uses ``publish_call``, so the work that only few calls need is done
last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from celery import Celery, signals
from celery.utils import uuid
from kombu.utils.json import dumps as kombu_dumps

from ..celery_compat import dump_models, in_current_task
from ..core.key import PER_TASK, digest
from ..errors import LockKeyError
from ..key_queue.join import Send, joining, queue_of
from ..known_keys import refuse_foreign_key
from ..message.arguments import pack_arguments, stable_key_suffix
from ..message.header import HEADER, PUBLISHED, add_header, without_header
from ..on_conflict import CancelRunning, Queue
from ..option_names import suggestion
from ..policy import (
    CallOptions,
    OnDuplicate,
    Policy,
    check_call,
    merge,
)
from ..runtime import Runtime
from .continuation import carry_claim, continues
from .debounce import check_debounce, first_countdown
from .publication import Publication
from .replace import Replacement, check_replaceable

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
    if running is not None:
        send = _counting(running, send)
    policy = task.singleton_policy(header.get("options"))
    if policy.is_plain:
        return send(task_id, options)
    if isinstance(policy.on_conflict, CancelRunning):
        header.setdefault("called_at", Runtime.of(app).clock.wall())  # see cancel_running.py
    if policy.unique is None and not isinstance(policy.on_conflict, Queue):
        return send(task_id, options)
    result: AsyncResult[Any] = _publish_with_key(
        _Call(task, args or (), kwargs or {}, options, task_id, policy, header, running, given),
        send,
        sending,
    )
    return result


@dataclass(slots=True)
class _Call:
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

    @property
    def is_next_attempt(self) -> bool:
        """Whether the running task publishes its own next attempt."""
        return self.running is not None and continues(self.running, self.task_id)

    @property
    def is_retry_of_lost_child(self) -> bool:
        """Whether the worker parent retries the task of a lost child: that is no newer call."""
        return bool(self.options.get("retries"))


def _publish_with_key(call: _Call, send: Send, sending: _Sending | None) -> AsyncResult[Any]:
    task, policy, options = call.task, call.policy, call.options
    # The configuration is read last, because that costs as much as all steps before.
    eager = bool(task.app.conf.task_always_eager)
    runtime = Runtime.of(task.app, eager=eager)
    key = _key_of(task, runtime, call.args, call.kwargs, options)
    if key is None:
        return send(call.task_id, options)
    is_next_attempt = call.is_next_attempt
    joins = False
    if isinstance(policy.on_conflict, Queue) and not eager:
        send, joins = _joining(call, runtime, key, send, is_next_attempt)
    if policy.unique is None:
        return send(call.task_id, options)
    if is_next_attempt:
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
        _replace_arguments(publication, args, kwargs, serializer, through_others=through_others)
    result = publication.publish(send)
    if sending is not None and sending.is_published is False:
        publication.await_message()
    return result


def _joining(
    call: _Call, runtime: Runtime, key: str, send: Send, is_next_attempt: bool
) -> tuple[Send, bool]:
    """``send`` for a call of the queue of ``key``, and whether it takes a new place there.

    A call with a countdown or an eta takes it when it is delivered.
    """
    is_started = is_next_attempt or call.is_retry_of_lost_child
    if not is_started and (call.options.get("countdown") or call.options.get("eta")):
        return send, False
    attempt = call.running.request if is_next_attempt else None
    named = None if is_next_attempt else call.header.get("queue")
    queue = call.header["queue"] = named or queue_of(attempt, key)
    call.header["broker"] = runtime.broker
    joined = joining(
        call.task, runtime, queue, call.policy, send, attempt=attempt, is_started=is_started
    )
    return joined, queue == key and not is_started


def claim_and_send(
    app: Celery,
    name: str,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    singleton: CallOptions,
    key: str | None = None,
    scope: str | None = None,
    **options: Any,
) -> AsyncResult[Any]:
    """Send a unique call by the task's name, without the task's code.

    Like ``app.send_task``, but equal calls are deduplicated. If the task is registered in the app,
    this calls its ``apply_async``.

    Args:
        app: The caller's app.
        name: The name of the task. It must be a singleton task in its worker.
        args: Positional arguments.
        kwargs: Keyword arguments.
        singleton: Options of this call, as for ``apply_async``. They must set ``unique``.
        key: The key without the scope, as for :func:`hold`: ``"account:42"`` for a task with
            ``key="account:{account_id}"``. Callers that have the task's code then find the call
            too. By default the key is made of all arguments as you write them, so only calls
            that are written alike are equal.
        scope: The task's ``scope``, if it has one and isn't registered in the app.
        **options: Celery's options of ``send_task``.

    Raises:
        DuplicateTask: An equal call is queued or running, and ``on_duplicate`` is ``"raise"``.
        LockKeyError: You gave no ``key`` and none can be made of the arguments, or ``key`` isn't
            a string.
        TypeError, ValueError: An argument is wrong or looks misspelt, or the task has no lock.
    """
    where = f"claim_and_send({name!r})"
    _check(where, name, args, kwargs, key, options)
    task: Any = app.tasks.get(name)
    if task is not None and not hasattr(task, "singleton_policy"):
        raise TypeError(f"{where}: it is no singleton task, so nothing would free its claim")
    if task is not None and key is None and scope is None:
        return task.apply_async(args, kwargs, singleton=singleton, **options)  # type: ignore[no-any-return]
    if scope is not None:
        merge(Policy(key=key or PER_TASK), {"scope": scope}, where=where)
    runtime = Runtime.of(app)
    own_scope = scope or str(getattr(task, "singleton_scope", name))
    if key is not None:
        refuse_foreign_key(runtime, key, own_scope, where=f"{where}: key={key!r}", is_claim=True)
    given = check_call(lambda: runtime.settings.policy, singleton, where=where) or {}
    policy = merge(runtime.settings.policy, given, where=where)
    if policy.unique is None:
        modes = '"until_done"}, or "until_start", or "until_expired" with "unique_for"'
        raise TypeError(f'{where}: give singleton={{"unique": {modes}')
    task_id = str(options.pop("task_id", None) or uuid())
    if not (policy.enabled and (task is None or task.singleton_policy().enabled)):
        return app.send_task(name, list(args or ()), dict(kwargs or {}), task_id=task_id, **options)
    running = app.current_worker_task
    header = add_header(options, task_id=task_id, options=given, running=running)

    def send(task_id: str, options: dict[str, Any]) -> AsyncResult[Any]:
        return app.send_task(name, list(args or ()), dict(kwargs or {}), task_id=task_id, **options)

    suffix = key or _digest(args or (), kwargs or {})
    if task is not None:
        # As in a call of the task. Celery 5.7 does the same; 5.5 and 5.6 leave it out.
        options.setdefault("expires", task.expires)
    publication = Publication(
        runtime=runtime,
        task=name,
        task_id=task_id,
        key=runtime.keyspace.lock(own_scope, suffix),
        policy=policy,
        header=header,
        options=options,
        expires=options.get("expires"),
        drops_in_canvas="on_duplicate" in given,
    )
    if policy.on_duplicate is OnDuplicate.REPLACE:
        serializer = options.get("serializer") or app.conf.task_serializer
        _replace_arguments(publication, args, kwargs, serializer)
    return publication.publish(send if running is None else _counting(running, send))


async def aclaim_and_send(
    app: Celery,
    name: str,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    singleton: CallOptions,
    key: str | None = None,
    scope: str | None = None,
    **options: Any,
) -> AsyncResult[Any]:
    """Send a unique call from an asyncio coroutine, without blocking the event loop.

    It takes the arguments of :func:`claim_and_send`. If the caller is cancelled after sending has
    begun, the message is sent all the same. Methods of the result, such as ``get()``, block.

    Raises:
        RuntimeError: The caller isn't an asyncio task.
    """
    from ..core.executor import running_task  # imports asyncio

    running_task(f"aclaim_and_send({name!r})")
    options |= {"singleton": singleton, "key": key, "scope": scope}
    publish = partial(claim_and_send, app, name, args, kwargs, **options)
    return await Runtime.of(app).publishers.run(in_current_task(app, publish))


def _replace_arguments(
    publication: Publication,
    args: Any,
    kwargs: Any,
    serializer: str,
    *,
    through_others: bool = False,
) -> None:
    """Let the queued message that has the claim get the arguments of this call.

    Args:
        publication: The publication; its options get the countdown of a debounced message.
        args, kwargs: The arguments of the call.
        serializer: kombu's name of the call's serializer.
        through_others: Whether a base class overrides the task's ``apply_async``.

    Raises:
        SettingsError: See :func:`check_replaceable`.
        ValueError: The arguments are too large, or an option contradicts ``debounce``.
    """
    task, policy, options = publication.task, publication.policy, publication.options
    runtime = publication.runtime
    check_replaceable(task, runtime.store, through_others=through_others)
    packed = pack_arguments(publication.header["call"], args, kwargs, serializer, options)
    if policy.debounce is not None:
        check_debounce(task, policy, options, publication.expires, runtime.app)
        options["countdown"] = first_countdown(policy.debounce, runtime.settings.longest_countdown)
    publication.newest = Replacement(policy, packed)


def _counting(running: Any, send: Send) -> Send:
    """``send``, which also counts the messages that the ``running`` task sends, by their id.

    A message is counted after the broker has accepted it. So a body that repeats a failed send
    makes no second call, and lease and claim keep the name of the first.
    """

    def send_and_count(task_id: str, options: dict[str, Any]) -> AsyncResult[Any]:
        result = send(task_id, options)
        published = running.request.__dict__.setdefault(PUBLISHED, {})
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


def _check(where: str, name: Any, args: Any, kwargs: Any, key: Any, options: Any) -> None:
    """Refuse arguments of a wrong type, and mistyped options.

    Each letter of a string would become an argument of the task. Celery makes any unknown keyword a
    property of the message.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"{where}: give the name of a task as str")
    if args is not None and (isinstance(args, (str, bytes)) or not isinstance(args, Sequence)):
        raise TypeError(f"{where}: args is a {type(args).__name__}; give a list or tuple")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"{where}: kwargs is a {type(kwargs).__name__}; give a dict")
    if key is not None and not (isinstance(key, str) and key):
        raise LockKeyError(f"{where}: key={key!r}: give a non-empty str")
    for option in options:
        if "did you mean" in (hint := suggestion(option, ("key", "scope", "singleton"))):
            raise TypeError(f"{where}: unknown option {option!r}{hint}")


def _digest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(json.loads(kombu_dumps([list(args), dict(kwargs)])), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as exc:
        raise LockKeyError(f"the arguments make no key: {exc}. Give key=...") from exc
    return f"~{digest(text)}"
