"""The options of tasks and calls: validation and merging.

Precedence: call, task, app, default. A call may set only some options (``CallOptions``). It may not
set key, scope and limit, because they decide which calls exclude each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final, Literal, TypedDict

from .core.key import KeySpec
from .core.rate import Rate
from .on_conflict import CancelRunning, OnConflict, Queue, Retry, Skip
from .option_conflicts import check_claim_options, check_together
from .option_names import unknown_option
from .option_values import (
    OnDuplicate,
    OnLost,
    OnStoreError,
    Unique,
    at_least,
    choice,
    flag,
    positive,
    require,
    seconds,
    whole,
)

# Seconds. A lease is renewed every ttl/3 with a timeout of ttl/6, so one slow reply would lose a
# shorter lease.
MIN_TTL: Final = 0.3
# One script examines all slots of a key.
_MAX_LIMIT: Final = 1000


def _limit(name: str, value: Any) -> Any:
    return whole(name, value, 1, _MAX_LIMIT)


def _scope(name: str, value: Any) -> Any:
    require(isinstance(value, str), name, value, "give a name as str", TypeError)
    require(1 <= len(value) <= 200, name, value, "give a name of 1 to 200 characters")
    return value


def option(default: Any, check: Callable[..., Any] = lambda _, value: value, *args: Any) -> Any:
    """A field of a dataclass whose value a user may give.

    Args:
        default: The value if none is given. If it is None, None may be given too.
        check: Called with the option's name, the given value and ``args``. Returns the value,
            possibly converted, or raises TypeError or ValueError.
        args: Further arguments of ``check``.
    """
    return field(default=default, metadata={"check": (check, args)})


def check_option(kind: Any, name: str, value: Any, prefix: str = "") -> Any:
    """The checked value of the option ``name`` of ``kind``, which errors call ``prefix + name``."""
    found = kind.__dataclass_fields__[name]
    if value is None and found.default is None:
        return None
    check, args = found.metadata["check"]
    return check(prefix + name, value, *args)


def _on_conflict(name: str, value: Any) -> OnConflict:
    is_rule = isinstance(value, (str, Mapping, OnConflict))
    advice = "give a str, or OnConflict.retry(...), .wait(...), .cancel_running(...) or .queue(...)"
    require(is_rule, name, value, advice, TypeError)
    return OnConflict.of(value)


_SKIP: Final = Skip()

# Seconds. If a message is lost (a purged queue), its claim answers equal calls for so long.
_UNIQUE_FOR: Final = 3600.0
# With debounce, each of these calls would be a lost edit. So the claim ends after this number of
# periods, but not before a minute: while the message waits for a free worker or for the run before
# it, a second message would be published next to it.
_DEBOUNCE_PERIODS: Final = 10
_MIN_UNIQUE_FOR: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The complete options of one task. The documentation describes each.

    Attributes:
        on_conflict: The rule that applies: the user's, unless ``unique="until_start"`` replaces it.
        given: Not an option: what users gave, in all layers. ``on_conflict`` and ``unique_for``
            depend on other options, so :func:`merge` derives both from it again for each layer.
        is_plain: Not an option: whether a call needs no further step, because neither ``unique``
            nor ``rate`` is set, nor a rule with a feature. One field costs less than three
            comparisons.
    """

    enabled: bool = option(True, flag)
    key: KeySpec = option(None)  # KeyMaker checks it, because it knows the signature.
    scope: str | None = option(None, _scope)
    limit: int = option(1, _limit)
    rate: Rate | None = option(None, Rate.of)
    ttl: float = option(60.0, at_least, MIN_TTL, "; the lease is renewed every ttl/3")
    max_hold: float | None = option(None, positive, "None for no bound")
    min_hold: float = option(0.0, seconds)
    on_conflict: OnConflict = option(_SKIP, _on_conflict)
    needs_fence: bool = option(False, flag)
    hold_on_retry: bool = option(True, flag)
    on_lost: OnLost | None = option(None, choice, OnLost)  # None: RETRY if acks_late, else FAIL
    on_store_error: OnStoreError = option(OnStoreError.RETRY, choice, OnStoreError)
    unique: Unique | None = option(None, choice, Unique)
    unique_for: float = option(_UNIQUE_FOR, positive, "the claim ends at once")
    on_duplicate: OnDuplicate = option(OnDuplicate.RETURN_EXISTING, choice, OnDuplicate)
    debounce: float | None = option(None, positive, "None to run as soon as possible")
    debounce_max: float | None = option(None, positive, "None for no bound")
    given: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    is_plain: bool = True


class CallOptions(TypedDict, total=False):
    """The options that you can set for one call: ``apply_async(singleton={...})``.

    An option that you leave out keeps the task's value. The defaults below are those of a task.
    Only a task can set ``on_conflict`` to ``"queue"`` or ``"cancel_running"``. A call that does is
    refused.
    """

    ttl: float | timedelta
    """How long a dead worker's lock stays, in seconds (default 60)."""
    on_conflict: (
        OnConflict | Literal["skip", "revoke", "retry", "wait", "raise", "cancel_running", "queue"]
    )
    """What a call does if its key is taken, such as "retry" (default "skip")."""
    unique: Literal["until_start", "until_done", "until_expired"] | None
    """Deduplicate calls "until_done", "until_start" or "until_expired" (default off)."""
    unique_for: float | timedelta
    """When the claim of a unique call expires, in seconds (default 3600)."""
    on_duplicate: Literal["return_existing", "replace", "skip", "raise"]
    """For duplicates, "return_existing" (default), "replace", "skip" or "raise"."""
    debounce: float | timedelta | None
    """Run once, this many seconds after the last equal call (default off)."""
    debounce_max: float | timedelta | None
    """Run at most this many seconds after the first equal call (default no maximum)."""


OPTIONS: Final = frozenset(f.name for f in fields(Policy) if f.metadata)
CALL_OPTIONS: Final = frozenset(CallOptions.__annotations__)
#: The options that may be set for all tasks of an app, as ``singleton_lock_<name>``.
APP_OPTIONS: Final = OPTIONS - {
    *("key", "scope", "limit", "rate", "min_hold", "debounce", "debounce_max")
}


def merge(base: Policy, options: Mapping[str, Any], *, where: str) -> Policy:
    """``base`` with ``options``, which override it. Each option is checked.

    Args:
        base: The lower layer, complete.
        options: The options of the upper layer.
        where: The name of the layer in errors, such as ``@singleton_task on app.sync``.

    Raises:
        TypeError: A name or a type is wrong.
        ValueError: A value is out of range, or two options contradict each other.
    """
    unknown = sorted(set(options) - OPTIONS)
    if unknown:
        raise TypeError(f"{where}: unknown option {unknown_option(unknown[0], OPTIONS)}")
    try:
        checked = {name: check_option(Policy, name, value) for name, value in options.items()}
        given = {**base.given, **checked}
        # The one place where the switch is decided: no layer turns on what another one has off.
        checked["enabled"] = base.enabled and checked.get("enabled", True)
        if checked.get("debounce") is not None:
            checked.setdefault("on_duplicate", OnDuplicate.REPLACE)
            if base.unique is None:
                checked.setdefault("unique", Unique.UNTIL_START)
        if checked.get("unique") is Unique.UNTIL_EXPIRED and "unique_for" not in checked:
            raise ValueError(
                'unique="until_expired" without unique_for: its default, an hour, bounds a lost '
                "message, and would be a guess here. Give the period in seconds with it, such as "
                "unique_for=600: at most one call is published in it, whatever became of its run"
            )
        policy = replace(base, **checked, given=given)
        rule = _rule(base, policy, options)
        policy = replace(
            policy,
            on_conflict=rule,
            unique_for=given.get("unique_for") or _default_unique_for(policy.debounce),
            is_plain=policy.unique is None and policy.rate is None and not rule.has_feature,
        )
        check_together(policy)
    except (TypeError, ValueError) as exc:
        raise type(exc)(f"{where}: {exc}") from None
    return policy


def check_call(policy: Callable[[], Policy], options: Any, *, where: str) -> dict[str, Any] | None:
    """The checked options of one call; None if it sets none.

    Args:
        policy: Returns the task's policy; called only if there are options to check.
        options: The options as given; False means no claim.
        where: The name of the call in errors.

    Raises:
        TypeError, ValueError: A call can't set one of the options, or its value is wrong.
    """
    if options is None:
        return None
    if options is False:
        return {"unique": None}
    _check_names(options, where)
    merged = merge(policy(), options, where=where)
    check_claim_options(merged, options, where=where)
    rules = (policy().on_conflict, merged.on_conflict)
    if "on_conflict" in options and any(isinstance(rule, Queue) for rule in rules):
        raise ValueError(
            f'{where}: a call can\'t set on_conflict for a task with "queue", or "queue" for '
            "another task: the order of a key is that of all its calls"
        )
    if "on_conflict" in options and isinstance(merged.on_conflict, CancelRunning):
        raise ValueError(
            f'{where}: on_conflict="cancel_running" belongs to the task: a holder checks for newer '
            "calls only if its own policy says so. Give it to the decorator; a call of such a task "
            "may set another on_conflict"
        )
    return dict(options)


def plain_call(options: Any, *, where: str) -> dict[str, Any]:
    """The options of one call in types that every serializer has, for a signature or an entry.

    Each option is checked by itself. When the call is published, :func:`check_call` checks them
    together with the task's policy, which depends on settings that a module may still change.

    Raises:
        TypeError, ValueError: See :func:`check_call`.
    """
    _check_names(options, where)
    try:
        return plain({name: check_option(Policy, name, options[name]) for name in options})
    except (TypeError, ValueError) as exc:
        raise type(exc)(f"{where}: {exc}") from None


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Checked ``options`` of a call in types that every serializer has."""
    return {name: _plain_value(name, value) for name, value in options.items()}


def _plain_value(name: str, value: Any) -> Any:
    if name == "on_conflict":
        return OnConflict.of(value).to_header()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value) if isinstance(value, StrEnum) else value


def _check_names(options: Any, where: str) -> None:
    if not isinstance(options, Mapping):
        raise TypeError(f"{where}: give a dict, such as {{'ttl': 120}}, or False, not {options!r}")
    for name in options:
        if name not in CALL_OPTIONS:
            raise TypeError(
                f"{where}: a call can't set {unknown_option(name, CALL_OPTIONS)}; key, scope "
                "and limit decide which calls exclude each other, and belong to the task"
            )


def _default_unique_for(debounce: float | None) -> float:
    if debounce is None:
        return _UNIQUE_FOR
    return min(max(_DEBOUNCE_PERIODS * debounce, _MIN_UNIQUE_FOR), _UNIQUE_FOR)


def _rule(base: Policy, policy: Policy, options: Mapping[str, Any]) -> OnConflict:
    """The ``on_conflict`` that applies.

    With ``unique="until_start"`` it waits without a limit: the waiting call represents all calls
    that were answered with it, so it must not be dropped.

    Args:
        base: The lower layer.
        policy: The layers together.
        options: The options of the upper layer. If only a lower layer sets ``on_conflict``, it is
            meant for other tasks.

    Raises:
        ValueError: The upper layer itself sets a rule that drops the call.
    """
    given: OnConflict = policy.given.get("on_conflict", _SKIP)
    if policy.unique is not Unique.UNTIL_START:
        return given
    named = "on_conflict" in options
    debounce = None if "unique" in options else policy.debounce
    cause = 'unique="until_start"' if debounce is None else f"debounce={debounce:g}"
    if not named and base.unique is Unique.UNTIL_START:
        return base.on_conflict
    if isinstance(given, Retry):
        if named and given.max_wait is not None:
            raise ValueError(
                f"{cause} with max_wait={given.max_wait:g}: the one waiting call "
                "represents all others, so it waits as long as it takes. Drop max_wait"
            )
        return replace(given, max_wait=None)
    if not named:
        return Retry()
    if given.never_runs:
        raise ValueError(
            f'{cause} with on_conflict="{given.action}": the one waiting call stands '
            'for all others, and would be dropped. Use on_conflict="retry", which is its default'
            + (', or unique="until_done"' if debounce is None else "")
        )
    return given
