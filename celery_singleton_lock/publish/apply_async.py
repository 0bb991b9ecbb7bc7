"""One call of a singleton task on its way out: its header, its key, and whether it needs a claim.

Every call of every singleton task comes through here, so what most calls don't need is asked last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from celery import signals
from celery.utils import uuid

from celery_singleton_lock.celery_compat import dump_models
from celery_singleton_lock.publish.arguments import stable_rest
from celery_singleton_lock.publish.header import HEADER, call_header, count_published
from celery_singleton_lock.publish.unique import Publication, carry_claim, continues, publish
from celery_singleton_lock.runtime import Runtime

if TYPE_CHECKING:
    from celery.result import AsyncResult

__all__ = ["publish_call"]

#: Celery's ``apply_async`` of a task id and options.
Send = Callable[[str, dict[str, Any]], "AsyncResult[Any]"]

# Our header of the message that a base class is publishing.
_header: Final[ContextVar[Mapping[str, Any] | None]] = ContextVar("singleton_header", default=None)


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
    """Send the call with our header, and a claim if it needs one; or answer it with another.

    Args:
        task: Whose call it is.
        args, kwargs: Of the call, as Celery takes them.
        send: Publishes it.
        options: Celery's, which get the header.
        task_id: The message's; None: a new one.
        given: The policy's options that the call sets (validated before).

    Raises:
        DuplicateTask, LockKeyError: As of ``SingletonTask.apply_async``.
    """
    task_id = str(task_id) if task_id else uuid()
    app = task.app  # asked for once: Celery looks it up each time
    running: Any = app.current_worker_task
    options["headers"] = headers = dict(options.get("headers") or {})
    header = call_header(options, task_id=task_id, options=given, running=running)
    headers[HEADER] = header
    if task.publishes_through_others:
        send = _keeping(header, send)
    if running is not None:
        send = _counting(running, send)
    policy = task.singleton_policy(header.get("options"))
    # Asked after that: to look up Celery's configuration costs as much as all else in here.
    if policy.unique is None or app.conf.task_always_eager:
        return send(task_id, options)  # it needs no claim; or there is no message
    runtime = Runtime.of(app)
    key = _key_of(task, runtime, args or (), kwargs or {}, options)
    if key is None:
        return send(task_id, options)
    if continues(running, task_id):
        carry_claim(app, running.request, header, task.name, key, policy)
        return send(task_id, options)
    publication = Publication(
        app=app,
        task=task.name,
        task_id=task_id,
        key=key,
        policy=policy,
        header=header,
        options=options,
        expires=options.get("expires", task.expires),
        swallows_in_canvas=given is not None and "on_duplicate" in given,
    )
    return publish(publication, runtime, lambda: send(task_id, options))


def _counting(running: Any, send: Send) -> Send:
    """``send``, which notes what the ``running`` task has sent."""

    def send_and_count(task_id: str, options: dict[str, Any]) -> AsyncResult[Any]:
        result = send(task_id, options)
        count_published(running, task_id)
        return result

    return send_and_count


def _keeping(header: Mapping[str, Any], send: Send) -> Send:
    """``send`` through base classes that may replace ``options["headers"]``."""
    # Connected only when needed: every message that this process publishes pays for a receiver.
    signals.before_task_publish.connect(_restore_header)

    def send_with_header(task_id: str, options: dict[str, Any]) -> AsyncResult[Any]:
        reset = _header.set(header)
        try:
            return send(task_id, options)
        finally:
            _header.reset(reset)

    return send_with_header


def _restore_header(headers: Any = None, **_: Any) -> None:
    header = _header.get()
    # A base class may publish other messages too. (Task protocol 1 has no id among its headers.)
    if header is not None and headers.get("id", header["id"]) == header["id"]:
        headers[HEADER] = header


def _key_of(
    task: Any, runtime: Runtime, args: Any, kwargs: Any, options: Mapping[str, Any]
) -> str | None:
    """The lock key that the call will need; None where a callable key says "no lock"."""
    serializer = options.get("serializer") or task.serializer
    args, kwargs = dump_models(task, args, kwargs, serializer)
    rest = stable_rest(task.singleton_key_maker, args, kwargs, serializer)
    return None if rest is None else runtime.keyspace.lock(task.singleton_scope, rest)
