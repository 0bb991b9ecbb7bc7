"""The keywords of a task's decorator that are no options: mistakes, or a user's attributes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from inspect import getattr_static
from typing import Any, Final

from celery import __version__ as celery_version
from celery.app.task import Task as BaseTask

from ..celery_compat import NEWER_OPTIONS
from ..on_conflict import ACTIONS
from ..option_names import OTHER_OPTIONS, close_to, is_of_locks
from ..policy import OPTIONS

#: Celery's own decorator options that are not attributes of its Task.
DECORATOR_OPTIONS = frozenset(
    {
        *("autoretry_for", "dont_autoretry_for", "retry_kwargs", "retry_jitter"),
        *("retry_backoff", "retry_backoff_max"),
        *("base", "bind", "filter", "lazy", "name", "shared"),
        *("pydantic", "pydantic_context", "pydantic_dump_kwargs", "pydantic_strict"),
        *("delivery_mode", "exchange", "exchange_type", "queue", "routing_key"),
    }
)
# The rule of each option that only one rule of on_conflict has: an attribute would have no effect.
_RULES_OF: Final = {
    name: [rule for rule, kind in ACTIONS.items() if name in kind.options()]
    for kind in ACTIONS.values()
    for name in kind.options()
}
_OF_ONE_RULE: Final = {name: rules[0] for name, rules in _RULES_OF.items() if len(rules) == 1}
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
# What Celery's settings for all tasks begin with.
_SETTINGS: Final = ("CELERY_", "celery_", "TASK_", "task_", "default_", "DEFAULT_")
# What this library's settings begin with.
_OUR_SETTINGS: Final = "singleton_lock_"


def refuse_mistakes(
    options: Mapping[str, Any], base: Any, own: type, *, where: str, rule: Any = None
) -> None:
    """Refuse mistyped options, because Celery makes every unknown keyword an attribute.

    Args:
        options: The keywords, without the options of the lock.
        base: The user's base class; its attributes may be set.
        own: `SingletonTask`.
        where: The decorator in errors.
        rule: The task's ``on_conflict``.

    Raises:
        TypeError: A keyword is close to the name of an option, is an option of another lock or one
            of `OnConflict`, names an attribute that every singleton task has, or would replace a
            method of Celery's Task.
    """
    for name, value in options.items():
        # An attribute with the name of a method would replace it, such as ``delay`` by a number.
        is_method = callable(getattr(BaseTask, name, None)) and not callable(value)
        if name in DECORATOR_OPTIONS or (hasattr(BaseTask, name) and not is_method):
            continue
        if hasattr(own, name) and not is_method:
            raise TypeError(
                f"{where}: every singleton task has an attribute {name!r}. Give the lock's options "
                "by their own names, such as ttl=60, and another name to an attribute of yours"
            )
        if hasattr(base, name) and not is_method:
            continue
        uses = isinstance(rule, str) and rule in ACTIONS and name in ACTIONS[rule].options()
        if of_rule := rule if uses else _OF_ONE_RULE.get(name):
            raise TypeError(
                f"{where}: {name!r} is an option of the rule, not of the task: write "
                f"on_conflict=OnConflict.{of_rule}({name}={value!r})"
            )
        if is_method:
            raise TypeError(
                f"{where}: {name}={value!r} would replace the method {name}() of the task"
            )
        if (mistake := _mistaken(name)) is not None:
            raise TypeError(f"{where}: {mistake}")


def _mistaken(name: str) -> str | None:
    """Why ``name`` is a mistake; None: it resembles no option, and is an attribute."""
    if name in _OF_OTHER_LOCKS:
        package, drop_in, same = _OF_OTHER_LOCKS[name]
        return (
            f"{name!r} is an option of {package}. Here the same is {same}. To keep the old "
            f"options, take base=celery_singleton_lock.migration.{drop_in}"
        )
    if (remedy := _remedy(name)) is None:
        return None
    return (
        f"there is no option {name!r}{remedy}. For an attribute of that name, declare it in a "
        "class of your own, given as base="
    )


def _remedy(name: str) -> str | None:
    """What to write instead of ``name``; None: it resembles no option, and is an attribute."""
    if advice := OTHER_OPTIONS.get(name):
        return f": {advice}"
    if older := NEWER_OPTIONS.get(name):
        return f" in Celery {celery_version}: it is new in 5.7. Use {older}, or a newer Celery"
    known = _known()
    setting = name.removeprefix(_OUR_SETTINGS)
    for prefix in _SETTINGS:
        setting = setting.removeprefix(prefix)
    meant = [setting.lower()] if setting.lower() in known else close_to(setting, known)
    if meant:
        return f" (did you mean {' or '.join(map(repr, meant))}?)"
    if is_of_locks(name):
        return f". The options of the lock are {', '.join(sorted(OPTIONS))}"
    return None


@cache
def _known() -> frozenset[str]:
    """The names of all options: the lock's, and Celery's."""
    of_class = {
        known
        for known in dir(BaseTask)
        if not known.startswith("_")
        and (known.startswith(_HOOKS) or not callable(getattr_static(BaseTask, known)))
    }
    return frozenset({*OPTIONS, *DECORATOR_OPTIONS, *of_class})
