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
    """Make a function a task of which at most one body per key runs at a time.

    ``@singleton_task``, ``@singleton_task(key=..., ttl=...)`` or ``@singleton_task(app=app, ...)``;
    without ``app`` it is registered with every app, like Celery's ``shared_task``.

    Args:
        *args: The function, if no options are given.
        app: The Celery app.
        **options: The options of the lock, below, and of Celery (``bind``, ``name``,
            ``autoretry_for``, ``base`` ...). As with Celery's decorator, other options become
            attributes of the task. For a job that must run again after the death of its worker or
            of its pool process: ``acks_late=True, reject_on_worker_lost=True``.

    Options of the lock::

        enabled: Whether the task has a lock; False runs it as a plain task; True by default.
        key: What must not run twice at once; by default all arguments.
        scope: The namespace of the key, which tasks may share; by default the task's name.
        limit: The number of bodies that may run at a time for one key; 1 by default.
        ttl: Seconds for which a dead holder can block others; renewed while the body runs; 60.
        max_hold: Seconds after which a body loses its key; by default its hard time limit and ttl.
        min_hold: Seconds for which the key stays taken, even if the body ends sooner; 0 by default.
        on_conflict: What a call does if it has not run and the key is held; "skip" by default.
        on_lost: What follows a lost lease; "retry" for acks_late tasks, "fail" for others.
        on_store_error: What a call does while the store does not answer; "retry" by default.
        hold_on_retry: Whether the key stays reserved until the task's retry; True by default.
        needs_fence: Whether a worker without fencing tokens refuses to start; False by default.
        unique: How long equal calls are not published beside this one; None: they are.
        unique_for: Seconds until a claim expires; with until_expired not before; 3600 by default.
        on_duplicate: What a call gets if it is not published; "return_existing" by default.
        debounce: Seconds after the last equal call until one call runs; None: at once.
        debounce_max: The latest run, in seconds after the first equal call; None: no bound.

    Raises:
        TypeError: An option is of a wrong type, or close to the name of an option.
        ValueError: An option has a wrong value, or two contradict each other.
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
