"""Whether a key that a user writes by hand can be a key of the app's tasks.

A key with a typo locks nothing that a task uses, and nothing would say so. What this process can
know, it refuses: the tasks of a scope may be registered in other processes only.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Final

from .core.key import PER_TASK, can_be_key_suffix
from .core.keyspace import quote_scope
from .errors import LockKeyError
from .option_names import close_to, is_mistyped
from .runtime import Runtime

logger = logging.getLogger("celery_singleton_lock")

#: What to write instead of a key that no task can have.
HOLD: Final = "write {}.hold(...) with the arguments of a call, which can't be wrong"
CLAIM: Final = "leave key and scope out: they follow from the arguments"
PAUSE: Final = "give {}.lock_key(...) alone, with the arguments of a call, which can't be wrong"


def refuse_foreign_key(
    runtime: Runtime, key: str, scope: str, *, where: str, instead: str = HOLD
) -> None:
    """Refuse a key that no task of ``scope`` can have.

    If no task of ``scope`` is registered, but its name is close to that of a known scope, a warning
    is logged.

    Args:
        runtime: The runtime of the app.
        key: The part after the scope.
        scope: The scope.
        where: The call in errors.
        instead: What to write instead, with braces for the task's variable.

    Raises:
        LockKeyError: See above, or ``key`` is the whole name of a key.
    """
    if key.startswith("csl:{") or runtime.keyspace.is_full(key):
        raise LockKeyError(
            f"{where}: this is the whole name of a key, as task.lock_key() returns it. Give the "
            f'part after the scope, such as "account:42", or {instead.format("task")}'
        )
    tasks = runtime.scopes.get(scope)
    if tasks is None:
        _look_for_typo(runtime, scope, where, instead)
    elif not any(can_be_key_suffix(spec, key) for spec in map(_spec_of, tasks)):
        task = tasks[0]
        raise LockKeyError(
            f"{where}: no call of {task.name} has this key: {_form_of(_spec_of(task))}. "
            f"{_for(task, instead)}"
        )


def refuse_foreign_scope(runtime: Runtime, scope: str, *, where: str) -> None:
    """Refuse the name of a task that has another scope; warn of a scope that no task here has.

    Tasks in other processes may have it.

    Raises:
        LockKeyError: See above.
        TypeError: ``scope`` is not a string.
    """
    quote_scope(scope)
    if scope in runtime.scopes:
        return
    if own := _other_scope_of(runtime, scope):
        raise LockKeyError(f"{where}: the scope of {scope} is {own!r}. Give that")
    meant = " or ".join(map(repr, close_to(scope, runtime.scopes)))
    logger.warning(
        "singleton: the scope %r is that of no task that this process knows%s",
        *(scope, f" (did you mean {meant}?)" if meant else ""),
    )


def _other_scope_of(runtime: Runtime, name: str) -> str | None:
    """The scope of the task ``name``, if it is another; None: there is no such task."""
    options = getattr(runtime.app.tasks.get(name), "singleton", None) or {}
    return options.get("scope")


def _look_for_typo(runtime: Runtime, scope: str, where: str, instead: str) -> None:
    if own := _other_scope_of(runtime, scope):
        task = runtime.app.tasks[scope]
        raise LockKeyError(
            f"{where}: no call of {scope} has this key: its scope is {own!r}. {_for(task, instead)}"
        )
    for known in runtime.scopes:
        if known.endswith(f".{scope}") or is_mistyped(scope, known):
            _warn(scope, known)


@lru_cache(maxsize=256)  # each once
def _warn(scope: str, known: str) -> None:
    logger.warning(
        "singleton: the scope %r is that of no task that this process knows, so a key in it "
        "excludes none of them: did you mean %r?",
        *(scope, known),
    )


def _spec_of(task: Any) -> Any:
    return (task.singleton or {}).get("key")


def _form_of(spec: Any) -> str:
    if isinstance(spec, str):
        return f"its key is {spec!r}"
    if spec is PER_TASK:
        return 'its key is PER_TASK, written "*"'
    return f"its key is a digest of {', '.join(spec) if spec else 'all its arguments'}"


def _for(task: Any, instead: str) -> str:
    text = instead.format(str(task.name).rpartition(".")[2])
    return text[0].upper() + text[1:]
