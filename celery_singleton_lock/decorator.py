"""``@singleton_task``: from a function to a task, every option checked where it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast, overload

from celery import Celery, Task, _state
from celery.app.task import Task as BaseTask
from celery.local import Proxy

from celery_singleton_lock.arguments import signature_without_self, validate
from celery_singleton_lock.core.key import KeySpec
from celery_singleton_lock.core.options import suggestion
from celery_singleton_lock.core.policy import OPTIONS
from celery_singleton_lock.task import SingletonTask

__all__ = ["singleton_task"]

P = ParamSpec("P")
R = TypeVar("R")

#: Celery's own decorator options that are no attributes of its Task.
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
    *, bind: Literal[True], app: Celery | None = None, key: KeySpec = None, **options: Any
) -> Callable[[Callable[Concatenate[Any, P], R]], SingletonTask[P, R]]: ...
@overload
def singleton_task(
    *, bind: Literal[False] = False, app: Celery | None = None, key: KeySpec = None, **options: Any
) -> Callable[[Callable[P, R]], SingletonTask[P, R]]: ...
def singleton_task(*args: Any, app: Celery | None = None, **options: Any) -> Any:
    """Make a function a task of which at most one body per key runs at a time.

    ``@singleton_task``, ``@singleton_task(key=..., ttl=...)`` or ``@singleton_task(app=app, ...)``;
    without ``app`` it is registered with every app, like Celery's ``shared_task``.

    Args:
        *args: The function, where no options are given.
        app: The Celery app.
        **options: The policy's (``key``, ``scope``, ``limit``, ``ttl`` ...) and Celery's (``bind``,
            ``name``, ``acks_late``, ``autoretry_for``, ``base`` ...).

    Raises:
        TypeError: An option is neither ours nor Celery's, or of a wrong type.
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
    _refuse_unknown(options, base, where)
    signature = signature_without_self(fun, bool(options.get("bind")))
    validate(_policy(base, given), signature, fun.__qualname__)

    def options_for(app: Any) -> dict[str, Any]:
        real_base = base or app.Task
        policy = _policy(real_base, given)
        return {**options, "base": _singleton_base(real_base), "singleton": policy}

    if app is not None:
        return app.task(fun, **options_for(app))
    return _create_shared(fun, options_for, options.get("name"))


def _policy(base: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    return {**(getattr(base, "singleton", None) or {}), **given}


def _create_shared(
    fun: Callable[..., Any], options_for: Callable[[Any], dict[str, Any]], given_name: str | None
) -> Any:
    """As Celery's shared_task, but with each app's own Task as the base."""

    def create(app: Any) -> Any:
        return app._task_from_fun(fun, **options_for(app))

    state: Any = _state
    state.connect_on_app_finalize(create)
    for app in state._get_active_apps():
        if app.finalized:
            with app._finalize_mutex:
                create(app)

    def task() -> Any:
        app = state.get_current_app()
        name = given_name or app.gen_task_name(fun.__name__, fun.__module__)
        return app.tasks[name]

    return Proxy(task)


def _singleton_base(base: Any) -> type:
    """``base`` (an app's own Task, Django's, a user's) with ours mixed in before it."""
    if issubclass(base, SingletonTask):
        return cast(type, base)
    attributes: dict[str, Any] = {"abstract": True, "__module__": base.__module__}
    return type(f"Singleton{base.__name__}", (SingletonTask, base), attributes)


def _refuse_unknown(options: Mapping[str, Any], base: Any, where: str) -> None:
    """An unknown decorator keyword would silently become an attribute of the task."""
    for name in options:
        if name in _DECORATOR_OPTIONS or hasattr(BaseTask, name) or hasattr(base, name):
            continue
        celery_options = [n for n in dir(BaseTask) if not n.startswith("_")]
        known = {*OPTIONS, *_DECORATOR_OPTIONS, *celery_options}
        hint = suggestion(name, known) if _is_close(name, known) else ""
        raise TypeError(
            f"{where}: {name!r} is neither an option of singleton_task nor of Celery{hint}"
        )


def _is_close(name: str, known: set[str]) -> bool:
    return "did you mean" in suggestion(name, known)
