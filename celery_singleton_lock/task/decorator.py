"""``@singleton_task``: make a function a task, and check every option at the declaration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

from celery import Celery, Task, shared_task
from celery.app.task import Task as BaseTask
from celery.local import Proxy

from ..policy import ACTIONS, OPTIONS, is_mistyped
from .base import EachAppsTask, SingletonTask, singleton_base, validate

if TYPE_CHECKING:
    from .option_types import TaskOptions

P = ParamSpec("P")
R = TypeVar("R")

#: Celery's own decorator options that are not attributes of its Task.
_DECORATOR_OPTIONS = frozenset(
    {
        *("autoretry_for", "dont_autoretry_for", "retry_kwargs", "retry_jitter"),
        *("retry_backoff", "retry_backoff_max"),
        *("base", "bind", "filter", "lazy", "name", "shared"),
        *("pydantic", "pydantic_context", "pydantic_dump_kwargs", "pydantic_strict"),
        *("delivery_mode", "exchange", "exchange_type", "queue", "routing_key"),
    }
)


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
    _refuse_mistakes(options, given, base, f"@singleton_task on {fun.__qualname__}")
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


def _refuse_mistakes(
    options: Mapping[str, Any], given: Mapping[str, Any], base: Any, where: str
) -> None:
    """Refuse mistyped options, because Celery makes every unknown keyword an attribute.

    Raises:
        TypeError: A keyword is close to the name of an option, is one of `OnConflict` that the
            ``given`` action or no other uses, names an attribute that every singleton task has, or
            would replace a method of Celery's Task.
    """
    action = given.get("on_conflict")
    for name, value in options.items():
        # An attribute with the name of a method would replace it, such as ``delay`` by a number.
        is_method = callable(getattr(BaseTask, name, None)) and not callable(value)
        if name in _DECORATOR_OPTIONS or (hasattr(BaseTask, name) and not is_method):
            continue
        if hasattr(SingletonTask, name) and not is_method:
            raise TypeError(
                f"{where}: every singleton task has an attribute {name!r}. Give the lock's options "
                "by their own names, such as ttl=60, and another name to an attribute of yours"
            )
        if hasattr(base, name) and not is_method:
            continue
        uses = isinstance(action, str) and action in ACTIONS and name in ACTIONS[action].options
        if rule := action if uses else _OF_ONE_RULE.get(name):
            raise TypeError(
                f"{where}: {name!r} is an option of the rule, not of the task: write "
                f"on_conflict=OnConflict.{rule}({name}={value!r})"
            )
        if is_method:
            raise TypeError(
                f"{where}: {name}={value!r} would replace the method {name}() of the task"
            )
        if name in _OF_OTHER_LOCKS:
            package, drop_in, same = _OF_OTHER_LOCKS[name]
            raise TypeError(
                f"{where}: {name!r} is an option of {package}. Here the same is {same}. To keep "
                f"the old options, take base=celery_singleton_lock.migration.{drop_in}"
            )
        if (known := _meant(name)) is not None:
            raise TypeError(
                f"{where}: there is no option {name!r} (did you mean {known!r}?). For an attribute "
                "of that name, declare it in a class of your own, given as base="
            )


# Options of one rule for conflicts, whose names say so: an attribute would have no effect.
_OF_ONE_RULE = {"delay": "retry", "max_delay": "retry", "max_wait": "retry", "max_waiting": "queue"}
# Options of other locks: the package, its drop-in base in `migration`, and the same option here. As
# attributes they would be ignored silently, and with them the key.
_OF_OTHER_LOCKS = {
    "lock_expiry": (
        "celery-singleton",
        "Singleton",
        "unique_for (seconds of a claim) and ttl (seconds of a dead holder's lease)",
    ),
    "raise_on_duplicate": (
        "celery-singleton",
        "Singleton",
        'unique="until_done", on_duplicate="raise"',
    ),
    "unique_on": (
        "celery-singleton",
        "Singleton",
        'key=("name of an argument", ...)',
    ),
    "once": (
        "celery-once",
        "QueueOnce",
        'unique="until_done", on_duplicate="raise", key=("name of an argument", ...)',
    ),
    "heimdall": (
        "celery-heimdall",
        "HeimdallTask",
        'unique="until_done", key=("name of an argument", ...)',
    ),
}
# Prefixes of hooks. Other methods of Celery's Task are not options.
_HOOKS = ("after_", "before_", "on_", "shadow_")


def _meant(name: str) -> str | None:
    """The option of which ``name`` is a misspelling, or the setting for all tasks."""
    celery_options = {
        known
        for known in dir(BaseTask)
        if not known.startswith("_")
        and (known.startswith(_HOOKS) or not callable(getattr_static(BaseTask, known)))
    }
    name = name.removeprefix("singleton_lock_")
    known_names = sorted({*OPTIONS, *_DECORATOR_OPTIONS, *celery_options})
    return next((known for known in known_names if is_mistyped(name, known)), None)
