"""Whether a key that a user writes by hand can be a key of the app's tasks.

A key with a typo locks nothing that a task uses, and nothing would say so. What this process can
know, it refuses: the tasks of a scope may be registered in other processes only.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from .core.key import PER_TASK, can_be_key_suffix
from .errors import LockKeyError
from .option_names import is_mistyped
from .runtime import Runtime

logger = logging.getLogger("celery_singleton_lock")


def refuse_foreign_key(
    runtime: Runtime, key: str, scope: str, *, where: str, is_claim: bool = False
) -> None:
    """Refuse a key that no task of ``scope`` can have.

    If no task of ``scope`` is registered, but its name is close to that of a known scope, a warning
    is logged.

    Args:
        runtime: The runtime of the app.
        key: The part after the scope.
        scope: The scope.
        where: The call in errors.
        is_claim: Whether the key is that of a call, which is published.

    Raises:
        LockKeyError: See above, or ``key`` is the whole name of a key.
    """
    if key.startswith("csl:{") or runtime.keyspace.is_full(key):
        raise LockKeyError(
            f"{where}: this is the whole name of a key, as task.lock_key() returns it. Give the "
            'part after the scope, such as "account:42"'
            + ("" if is_claim else ", or write task.hold(...) with the arguments of a call")
        )
    tasks = runtime.scopes.get(scope)
    if tasks is None:
        _look_for_typo(runtime, scope, where, is_claim)
    elif not any(can_be_key_suffix(spec, key) for spec in map(_spec_of, tasks)):
        task = tasks[0]
        raise LockKeyError(
            f"{where}: no call of {task.name} has this key: {_form_of(_spec_of(task))}. "
            f"{_remedy(task, is_claim)}"
        )


def _look_for_typo(runtime: Runtime, scope: str, where: str, is_claim: bool) -> None:
    task: Any = runtime.app.tasks.get(scope)
    own = (getattr(task, "singleton", None) or {}).get("scope")
    if own:
        raise LockKeyError(
            f"{where}: no call of {scope} has this key: its scope is {own!r}. "
            f"{_remedy(task, is_claim)}"
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


def _remedy(task: Any, is_claim: bool) -> str:
    if is_claim:
        return "Leave key and scope out: they follow from the arguments"
    variable = str(task.name).rpartition(".")[2]
    return f"Write {variable}.hold(...) with the arguments of a call, which can't be wrong"
