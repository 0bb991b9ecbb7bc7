"""What a user may have meant by a name that no option has, or by a value that no option takes.

Celery makes every unknown keyword of a decorator an attribute of the task. So an option that is
misspelt, or that only another lock has, would have no effect, and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Final

#: Options of other locks, and what to write instead.
OTHER_OPTIONS: Final[dict[str, str]] = {
    # The life of a lock: redis-py, Django's cache, python-redis-lock, celery-once, celery-heimdall.
    "timeout": "elsewhere it is how long a lock lasts: write ttl=..., which is renewed while the "
    "task runs. To end a task that runs too long, write time_limit=...; to wait for the key, "
    "on_conflict=OnConflict.wait(timeout=...)",
    **dict.fromkeys(
        (
            *("ex", "px", "expire", "expiry", "expiration", "expire_in", "expires_in"),
            *("lock_timeout", "lock_ttl", "lock_expire", "lock_expires", "lease_time", "lease_ttl"),
        ),
        "write ttl=..., the seconds for which a dead worker's lock stays; it is renewed while the "
        "task runs. expires=... is Celery's, for a message that waits too long",
    ),
    "auto_renewal": "leave it out: a lease is always renewed while its task runs",
    # Waiting for a lock.
    **dict.fromkeys(("wait", "block", "blocking"), 'write on_conflict="wait"'),
    **dict.fromkeys(
        ("blocking_timeout", "wait_timeout", "acquire_timeout", "lock_wait"),
        "write on_conflict=OnConflict.wait(timeout=...)",
    ),
    "sleep": 'leave it out: with on_conflict="wait", a call is woken when the key is free',
    "thread_local": "leave it out: each run has a lease of its own",
    # What is locked.
    **dict.fromkeys(
        ("lock_key", "lock_name", "lock_id", "lock_args", "unique_key", "unique_by", "unique_args"),
        'write key="account:{account_id}" or the like',
    ),
    "keys": 'write key=("account_id",): the names of arguments',
    "lock": 'leave it out: every singleton task is locked. What it locks is key="account:'
    '{account_id}" or the like; unique="until_done" answers duplicates before they are published',
    **dict.fromkeys(
        ("concurrency", "concurrency_limit", "max_concurrency", "max_running", "max_instances"),
        "write limit=..., and key=PER_TASK for a limit of the whole task",
    ),
    # Duplicates.
    "graceful": 'write unique="until_done", on_duplicate="skip"',
    "unlock_before_run": 'write unique="until_start"',
    **dict.fromkeys(
        ("unique_until", "lock_until"), 'write unique="until_start" or unique="until_done"'
    ),
    **dict.fromkeys(
        ("unique_timeout", "unique_ttl", "unique_lock_timeout", "unique_period"),
        "write unique_for=... with unique=...",
    ),
    "unique_raises": 'write on_duplicate="raise" with unique=...',
    "unique_wait_for_expiry": 'write unique="until_expired", unique_for=...',
    "coalesce": 'write unique="until_start"',
    "cooldown": "write min_hold=..., the seconds for which the key stays taken",
    "throttle": 'write unique="until_expired", unique_for=...',
    # Celery's.
    **dict.fromkeys(
        ("countdown", "eta", "link_error"), "give it to apply_async(): it is for a call"
    ),
    "retry_delay": "write default_retry_delay=...",
    **dict.fromkeys(("retry_for", "retry_on", "autoretry"), "write autoretry_for=(...,)"),
    **dict.fromkeys(("hard_time_limit", "hard_timeout", "task_timeout"), "write time_limit=..."),
    **dict.fromkeys(("soft_timeout", "soft_limit"), "write soft_time_limit=..."),
}
# Words that only options of a lock begin with.
_WORDS: Final = frozenset({"debounce", "lease", "lock", "singleton", "unique"})

# Values of other locks, or everyday words, each with the values here that mean the same.
_OTHER_VALUES: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        (
            *("until_executed", "until_finished", "until_complete", "until_completed"),
            *("until_end", "until_ended", "until_success", "until_succeeded"),
        ),
        ("until_done",),
    ),
    **dict.fromkeys(
        ("until_started", "until_executing", "until_and_while_executing", "until_running"),
        ("until_start",),
    ),
    "until_timeout": ("until_expired",),
    **dict.fromkeys(("drop", "discard", "ignore"), ("skip",)),
    **dict.fromkeys(("error", "fail"), ("raise", "fail")),
    "abort": ("fail",),
    **dict.fromkeys(("block", "blocking"), ("wait",)),
    **dict.fromkeys(("requeue", "reschedule"), ("retry",)),
    **dict.fromkeys(("cancel", "replace"), ("cancel_running",)),
    **dict.fromkeys(("fifo", "in_order", "enqueue"), ("queue",)),
    **dict.fromkeys(("fail_open", "allow"), ("run",)),
    **dict.fromkeys(("return", "existing"), ("return_existing",)),
    **dict.fromkeys(("update", "overwrite", "override"), ("replace",)),
}


def suggestion(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for a name that is close to known names, else the known names."""
    known = sorted(known)
    if meant := close_to(name, known):
        return f" (did you mean {' or '.join(map(repr, meant))}?)"
    return f" (known: {', '.join(known)})"


def unknown_option(name: object, known: Iterable[str]) -> str:
    """``name`` as a repr, and what to write instead."""
    advice = OTHER_OPTIONS.get(str(name))
    return f"{name!r}: {advice}" if advice else f"{name!r}{suggestion(str(name), known)}"


def other_value(value: str, known: Iterable[str]) -> str | None:
    """The known value that another lock calls ``value``."""
    meant = _OTHER_VALUES.get(value, ())
    return next((one for one in meant if one in known), None)


def is_of_locks(name: str) -> bool:
    """Whether ``name`` begins as an option of a lock, so that it is hardly a user's attribute."""
    return name.split("_")[0] in _WORDS


def close_to(name: str, known: Iterable[str]) -> list[str]:
    """The known names that ``name`` probably misspells.

    A wrong suggestion is worse than none: names are compared letter by letter, and then word by
    word, without a prefix that all known names have.
    """
    known = sorted(known)
    shared = zip(*known, strict=False) if len(known) > 1 else ()
    prefix = len(list(takewhile(lambda letters: len(set(letters)) == 1, shared)))
    for is_close in (is_mistyped, _has_other_words):
        if found := [one for one in known if is_close(name[prefix:], one[prefix:])]:
            return found[:2]
    return []


def is_mistyped(name: str, known: str) -> bool:
    """Whether ``name`` is probably ``known`` with a letter or two wrong, swapped or missing."""
    return name != known and _differs_by(name, known, 2 if len(name) > 7 else 1)


def _differs_by(name: str, known: str, most: int) -> bool:
    """Whether ``name`` is ``known`` with at most ``most`` letters changed or swapped."""
    if not name or not known:
        return len(name) + len(known) <= most
    if name[0] == known[0]:
        return _differs_by(name[1:], known[1:], most)
    return most > 0 and (
        _differs_by(name[1:], known, most - 1)
        or _differs_by(name, known[1:], most - 1)
        or _differs_by(name[1:], known[1:], most - 1)
        or (name[:2] == known[1::-1] and _differs_by(name[2:], known[2:], most - 1))
    )


def _has_other_words(name: str, known: str) -> bool:
    """Whether ``name`` has the words of ``known`` in another order, or one of many is another."""
    words, wanted = name.split("_"), known.split("_")
    if len(words) > 1 and sorted(words) == sorted(wanted):
        return True
    differing = sum(word != other for word, other in zip(words, wanted, strict=False))
    return len(words) == len(wanted) > 3 and differing == 1
