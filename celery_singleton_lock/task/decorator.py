"""``@singleton_task``: make a function a task, and check every option at the declaration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

from celery import Celery, Task, shared_task
from celery.local import Proxy

from ..policy import OPTIONS
from .base import EachAppsTask, SingletonTask, singleton_base, validate
from .keywords import refuse_mistakes

if TYPE_CHECKING:
    from .option_types import TaskOptions

P = ParamSpec("P")
R = TypeVar("R")


@overload
def singleton_task(fun: Callable[P, R], /) -> SingletonTask[P, R]: ...
@overload
def singleton_task(
    *, bind: Literal[True], app: Celery | None = None, **options: Unpack[TaskOptions]
) -> Callable[[Callable[Concatenate[Any, P], R]], SingletonTask[P, R]]: ...
@overload
def singleton_task(
    *, bind: Literal[False] = False, app: Celery | None = None, **options: Unpack[TaskOptions]
) -> Callable[[Callable[P, R]], SingletonTask[P, R]]: ...
def singleton_task(*args: Any, app: Celery | None = None, **options: Any) -> Any:
    """Register a Celery task that runs one call per key at a time.

    A second call of the same key is skipped by default. ``on_conflict`` can be ``"skip"``,
    ``"revoke"``, ``"retry"``, ``"wait"``, ``"raise"``, ``"queue"`` or ``"cancel_running"``. Calls
    with other keys run in parallel.

    Example::

        @singleton_task(app=app, key="account:{account_id}", ttl=30)
        def sync(account_id: int) -> None: ...

    Without ``app`` the task belongs to every app, like Celery's ``shared_task``.

    Args:
        *args: The function, if you give no options.
        app: The Celery app.
        **options: Options of the lock (below) and of Celery (``bind``, ``name``, ``autoretry_for``
            and so on). As with Celery's decorator, any other keyword becomes an attribute of the
            task. If the job must run again after its worker was killed, give
            ``acks_late=True, reject_on_worker_lost=True``.

    Options of the lock::

        enabled: False runs the task without a lock, as a plain Celery task (default True).
        key: What must not run twice at once, such as "account:{id}" (default all arguments).
        scope: Namespace of the key, which tasks may share (default the task's name).
        limit: How many calls of a key may run at the same time (default 1).
        ttl: How long a dead worker's lock stays, in seconds (default 60).
        rate: How many calls of a key may start in a period, such as "10/m" (default no limit).
        max_hold: How long the lock is renewed, in seconds (default hard time limit + ttl, or none).
        min_hold: How long a key stays taken from the start of a run, in seconds (default 0).
        on_conflict: What a call does if its key is taken, such as "retry" (default "skip").
        on_lost: If the lock is lost, "retry" (default if acks_late), "fail" (else) or "continue".
        on_store_error: If the store is unreachable, "retry" (default), "raise" or "run".
        hold_on_retry: Keep the key reserved until the task's next retry (default True).
        needs_fence: Refuse to start a worker whose store has no fencing tokens (default False).
        unique: Deduplicate calls "until_done", "until_start" or "until_expired" (default off).
        unique_for: When the claim of a unique call expires, in seconds (default 3600).
        on_duplicate: For duplicates, "return_existing" (default), "replace", "skip" or "raise".
        debounce: Run once, this many seconds after the last equal call (default off).
        debounce_max: Run at most this many seconds after the first equal call (default no maximum).

    Raises:
        TypeError: An option has the wrong type, or looks misspelt.
        ValueError: An option has a wrong value, or contradicts another one.
    """
    if len(args) > 1 or (args and not callable(args[0])):
        raise TypeError("@singleton_task takes one function, and options by keyword")

    def decorate(fun: Callable[..., Any]) -> Any:
        if isinstance(fun, (Proxy, Task)):
            raise TypeError(f"{fun!r} is a task already: remove one of the decorators")
        return _create(fun, app, dict(options))

    return decorate(args[0]) if args else decorate


def _create(fun: Callable[..., Any], app: Any, options: dict[str, Any]) -> Any:
    base = options.pop("base", None)
    given = {name: options.pop(name) for name in OPTIONS & set(options)}
    where = f"@singleton_task on {fun.__qualname__}"
    refuse_mistakes(options, base, SingletonTask, where=where, rule=given.get("on_conflict"))
    policy = {**(getattr(base, "singleton", None) or {}), **given}
    names = ("autoretry_for", "dont_autoretry_for")
    errors, excepted = (options.get(name, getattr(base, name, ())) for name in names)
    validate(
        policy,
        *(fun.__qualname__, fun),
        is_bound=bool(options.get("bind")),
        autoretry=(errors, excepted),
    )
    # Celery keeps the options of a shared task for the life of the process, and makes the task in
    # each app. An object of one app among them would keep that app alive.
    options |= {"base": singleton_base(base) if base else EachAppsTask, "singleton": policy}

    return (shared_task if app is None else app.task)(fun, **options)
