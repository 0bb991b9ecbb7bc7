"""Unique calls by the task's name, for callers that do not have the task's code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import Celery
from celery.utils import uuid
from kombu.utils.json import dumps as kombu_dumps

from ..celery_compat import in_current_task
from ..core.key import PER_TASK
from ..core.keyspace import digest
from ..errors import LockKeyError
from ..known_keys import CLAIM, refuse_foreign_key
from ..message.header import add_header
from ..option_names import suggestion
from ..option_values import OnDuplicate
from ..policy import CallOptions, Policy, check_call, merge
from ..runtime import Runtime
from .apply_async import counting
from .publication import Publication

if TYPE_CHECKING:
    from celery.result import AsyncResult


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
            ``key="account:{account_id}"``. It makes this call equal to calls from code that has
            the task. By default the key is made of all arguments as you write them, so two calls
            are equal only if you write them in the same way.
        scope: The task's ``scope``, if it has one and isn't registered in the app.
        **options: Celery's options of ``send_task``.

    Raises:
        DuplicateTask: An equal call is queued or running, and ``on_duplicate`` is ``"raise"``.
        LockKeyError: You gave no ``key`` and none can be made of the arguments, or ``key`` isn't
            a string.
        TypeError, ValueError: An argument is wrong or looks misspelt, or the task has no lock.
    """
    where = f"claim_and_send({name!r})"
    arguments = _checked(where, name, args, kwargs, key, options)
    task: Any = app.tasks.get(name)
    if task is None:
        known = _Known(name)
    elif not hasattr(task, "singleton_policy"):
        raise TypeError(f"{where}: it isn't a singleton task, so nothing would free its claim")
    elif key is None and scope is None:
        return task.apply_async(args, kwargs, singleton=singleton, **options)  # type: ignore[no-any-return]
    else:
        known = _Known(task.singleton_scope, task.expires, task.singleton_policy().enabled)
    if scope is None:
        scope = known.scope
    else:
        merge(Policy(key=PER_TASK), {"scope": scope}, where=where)  # refuses a wrong one
    runtime = Runtime.of(app)
    if key is not None:
        refuse_foreign_key(runtime, key, scope, where=f"{where}: key={key!r}", instead=CLAIM)
    given = check_call(lambda: runtime.settings.policy, singleton, where=where) or {}
    policy = merge(runtime.settings.policy, given, where=where)
    if policy.unique is None:
        modes = '"until_done"}, or "until_start", or "until_expired" with "unique_for"'
        raise TypeError(f'{where}: give singleton={{"unique": {modes}')

    def send(task_id: str, options: dict[str, Any]) -> AsyncResult[Any]:
        return app.send_task(name, *arguments, task_id=task_id, **options)

    task_id = str(options.pop("task_id", None) or uuid())
    if not (policy.enabled and known.enabled):
        return send(task_id, options)
    running = app.current_worker_task
    header = add_header(options, task_id=task_id, options=given, running=running)
    # As in a call of the task. Celery 5.7 does the same; 5.5 and 5.6 leave it out.
    options.setdefault("expires", known.expires)
    publication = Publication(
        runtime=runtime,
        task=name,
        task_id=task_id,
        key=runtime.keyspace.lock(scope, key or _digest(*arguments)),
        policy=policy,
        header=header,
        options=options,
        expires=options["expires"],
        drops_in_canvas="on_duplicate" in given,
    )
    if policy.on_duplicate is OnDuplicate.REPLACE:
        publication.replace_arguments(
            *arguments, options.get("serializer") or app.conf.task_serializer
        )
    return publication.publish(counting(running, send))


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


@dataclass(frozen=True, slots=True)
class _Known:
    """What the caller's app knows of the task. The defaults are those of an unregistered one.

    Attributes:
        scope: The scope of its keys.
        expires: Its ``expires``.
        enabled: Whether it takes locks.
    """

    scope: str
    expires: Any = None
    enabled: bool = True


def _checked(
    where: str, name: Any, args: Any, kwargs: Any, key: Any, options: Any
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the task. Refuses those of a wrong type, and mistyped options.

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
    return list(args or ()), dict(kwargs or {})


def _digest(args: list[Any], kwargs: dict[str, Any]) -> str:
    try:
        text = json.dumps(json.loads(kombu_dumps([args, kwargs])), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as exc:
        raise LockKeyError(f"the arguments make no key: {exc}. Give key=...") from exc
    return f"~{digest(text)}"
