"""The names of keys as people write them: in full, shortened, quoted or as plain text."""

from __future__ import annotations

import fnmatch
import getpass
import re
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import unquote

from celery import Celery

from .core.key import PerTask
from .core.keyspace import quote_scope, stored_names
from .core.lease import Kind, Record
from .errors import SingletonLockError
from .runtime import Runtime, singleton_tasks

#: Log lines, errors and lists contain the reason that an operator gives.
MAX_REASON_CHARS: Final = 500
# The keys of the leases with which Beat processes elect a leader.
_KEYS_OF_BEAT: Final = "celery.beat:{name}"


class AmbiguousKey(SingletonLockError):
    """A short name fits several keys. Their full names are in ``keys``."""

    def __init__(self, message: str, keys: Sequence[str] = ()) -> None:
        super().__init__(message, tuple(keys))
        self.keys = tuple(keys)


def ambiguous(name: str, keys: Sequence[str]) -> AmbiguousKey:
    """The error about a short ``name`` of several ``keys``."""
    lines = "".join(f"\n  {key}" for key in keys)
    return AmbiguousKey(f"{name!r} names several keys; give one of them:{lines}", keys)


def without_prefix(key: str) -> str:
    """The part of a key after ``csl:{...}:``."""
    return key.partition("}:")[2]


def scope_of(key: str) -> str:
    """The scope of a lease's key, or of a claim's."""
    name = without_prefix(key)
    if name.startswith("claim|"):
        name = name.split("|", 2)[-1]
    return unquote(name.partition(":")[0])


def is_in_scope(key: str, scope: str) -> bool:
    """Whether ``key`` is in ``scope``, as the task's policy spells it or as it is stored."""
    found = scope_of(key)
    return found == scope or quote_scope(found) == scope


def login() -> str:
    """The login of this process, which is how an operator is named."""
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):
        return "an unknown user"  # a container's user id without a name


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a key matches ``pattern``, written as it is stored or as text.

    It is a part of the key. A pattern with ``*``, ``?`` or ``[`` may also be a glob for the whole
    key, with or without its prefix.
    """
    names = stored_names(pattern)

    def is_part(key: str) -> bool:
        return any(name in key for name in names)

    if not is_glob(pattern):
        return is_part
    return lambda key: (
        is_part(key)
        or any(
            fnmatch.fnmatchcase(spelling, name)
            for name in names
            for spelling in (key, without_prefix(key))
        )
    )


def is_glob(pattern: str) -> bool:
    return any(c in pattern for c in "*?[")


def spellings(record: Record) -> list[str]:
    """The names of a record, the most complete first."""
    name = without_prefix(record.key)
    if record.kind is Kind.CLAIM:
        return [name]
    rest = name.partition(":")[2]
    return [name, rest, *map(_without_slot, (record.key, name, rest))]


def _without_slot(key: str) -> str:
    base, _, slot = key.rpartition("#")
    return base if slot.isdecimal() else key


def can_be_a_key(app: Celery, key: str) -> bool:
    """Return whether a task of the app, or its Beat, can have this key.

    This checks only the spelling of the key, because the store has no record of free keys.
    """
    runtime = Runtime.of(app)
    forms, name = forms_of(app), key
    known = {*forms, _KEYS_OF_BEAT}
    if key.startswith(runtime.keyspace.start):
        name = without_prefix(key)
    else:
        # If the rest of a form is only a placeholder, every key without a scope would match it.
        rests = {form.partition(":")[2] for form in forms}
        known |= {rest for rest in rests if not rest.startswith("{")}
    if name.startswith("claim|"):
        name = name.split("|", 2)[-1]
    return any(_pattern_of(form).fullmatch(name) for form in known)


def forms_of(app: Any) -> list[str]:
    """Return the forms of the keys of the app's tasks, with variable parts in braces."""
    app.loader.import_default_modules()
    return sorted({_form_of(task) for task in singleton_tasks(app)})


def _form_of(task: Any) -> str:
    options = task.singleton or {}
    spec = options.get("key")
    if isinstance(spec, PerTask):
        spec = "*"
    elif callable(spec):
        spec = f"{{what {getattr(spec, '__name__', 'its key function')} returns}}"
    elif not isinstance(spec, str):
        spec = f"{{digest of {', '.join(spec) if spec else 'all arguments'}}}"
    return f"{options.get('scope') or task.name}:{spec}"


def _pattern_of(form: str) -> re.Pattern[str]:
    pieces = re.split(r"\{[^}]*\}", form)
    return re.compile(f"(?s:{'.*'.join(map(re.escape, pieces))}(#\\d+)?)")
