"""Publishing a call by the task's name, with a claim, where the task's code isn't at hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from celery import Celery
from celery.result import AsyncResult
from celery.utils import uuid
from kombu.utils.json import dumps as kombu_dumps

from celery_singleton_lock.core.key import PER_TASK, digest
from celery_singleton_lock.errors import LockKeyError
from celery_singleton_lock.policy import CallOptions, Policy, check_call, merge, suggestion
from celery_singleton_lock.publish.header import HEADER, call_header, count_published
from celery_singleton_lock.publish.unique import Publication, publish
from celery_singleton_lock.runtime import Runtime

__all__ = ["claim_and_send"]


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
    """``app.send_task``, with a claim: for publishers that don't have the task's code.

    Where the app knows the task, this is its ``apply_async``.

    Args:
        app: The publisher's.
        name: Of the task, which has to be a singleton task at its worker.
        args: Positional arguments.
        kwargs: Keyword arguments.
        singleton: As of ``apply_async``; ``unique`` is what this is for.
        key: What stands behind the scope, as for :func:`hold`: for a task with
            ``key="account:{account_id}"``, ``"account:42"``; then publishers with the code find the
            claim too. By default all arguments as they are given, which makes one claim only of
            calls that are spelled alike.
        scope: The task's ``scope``, if it has one.
        **options: Celery's.

    Raises:
        DuplicateTask: An equal call is queued or running, and ``on_duplicate`` is ``"raise"``.
        LockKeyError: There is no ``key``, and the arguments make none; or it is no text.
        TypeError, ValueError: One of these is wrong, or the task holds no locks. A keyword that is
            close to one of ours is refused.
    """
    where = f"claim_and_send({name!r})"
    _check(where, name, args, kwargs, key)
    _refuse_typos(where, options)
    task: Any = app.tasks.get(name)
    if task is not None and key is None and scope is None:
        if not hasattr(task, "singleton_policy"):
            raise TypeError(f"{where}: it is no singleton task, so nothing would free its claim")
        return task.apply_async(args, kwargs, singleton=singleton, **options)  # type: ignore[no-any-return]
    if scope is not None:
        merge(Policy(key=key or PER_TASK), {"scope": scope}, where=where)
    runtime = Runtime.of(app)
    given = check_call(lambda: runtime.settings.policy, singleton, where=where)
    policy = merge(runtime.settings.policy, given or {}, where=where)
    if policy.unique is None:
        raise TypeError(f'{where}: give singleton={{"unique": "until_done"}}, or "until_start"')
    task_id = str(options.pop("task_id", None) or uuid())
    options["headers"] = headers = dict(options.get("headers") or {})
    running = app.current_worker_task
    header = call_header(options, task_id=task_id, options=given, running=running)
    headers[HEADER] = header

    def send() -> AsyncResult[Any]:
        result = app.send_task(
            name, list(args or ()), dict(kwargs or {}), task_id=task_id, **options
        )
        if running is not None:
            count_published(running, task_id)
        return result

    return publish(
        Publication(
            app=app,
            task=name,
            task_id=task_id,
            key=runtime.keyspace.lock(scope or name, key or _digest(args or (), kwargs or {})),
            policy=policy,
            header=header,
            options=options,
            expires=options.get("expires"),
            swallows_in_canvas="on_duplicate" in (given or {}),
        ),
        runtime,
        send,
    )


def _check(where: str, name: Any, args: Any, kwargs: Any, key: Any) -> None:
    """What would be taken for something else: of a text each letter is an argument."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"{where}: give the name of a task as str")
    if args is not None and (isinstance(args, (str, bytes)) or not isinstance(args, Sequence)):
        raise TypeError(f"{where}: args is a {type(args).__name__}; give a list or tuple")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"{where}: kwargs is a {type(kwargs).__name__}; give a dict")
    if key is not None and not (isinstance(key, str) and key):
        raise LockKeyError(f"{where}: key={key!r}: give a non-empty str")


def _refuse_typos(where: str, options: Mapping[str, Any]) -> None:
    """Celery makes any unknown keyword a message property, so a mistyped option would be lost."""
    for name in options:
        if "did you mean" in (hint := suggestion(name, ("key", "scope", "singleton"))):
            raise TypeError(f"{where}: unknown option {name!r}{hint}")


def _digest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(json.loads(kombu_dumps([list(args), dict(kwargs)])), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as exc:
        raise LockKeyError(f"the arguments make no key: {exc}. Give key=...") from exc
    return f"~{digest(text)}"
