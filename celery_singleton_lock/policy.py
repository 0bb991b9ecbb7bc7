"""The options of tasks and calls: validation and merging.

Precedence: call, task, app, default. A call may set only some options (``CallOptions``). It may not
set key, scope and limit, because they decide which calls exclude each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final, Literal, TypedDict, TypeVar

from celery_singleton_lock.core.key import KeySpec

_E = TypeVar("_E", bound=StrEnum)
#: Returns the checked value of an option; called with the option's name and its given value.
_Check = Callable[[str, Any], Any]

#: Seconds that ``on_conflict="retry"`` waits by default.
DEFAULT_MAX_WAIT: Final = 3600.0


class ConflictAction(StrEnum):
    SKIP = "skip"
    REVOKE = "revoke"
    RETRY = "retry"
    WAIT = "wait"
    RAISE = "raise"


class OnLost(StrEnum):
    RETRY = "retry"
    FAIL = "fail"
    CONTINUE = "continue"


class OnStoreError(StrEnum):
    RETRY = "retry"
    RAISE = "raise"
    RUN = "run"


class Unique(StrEnum):
    """The time for which a published message keeps equal calls from being published."""

    UNTIL_START = "until_start"
    UNTIL_DONE = "until_done"


class OnDuplicate(StrEnum):
    RETURN_EXISTING = "return_existing"
    SKIP = "skip"
    RAISE = "raise"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnConflict:
    """The handling of a call that has not started yet and whose key is held.

    A plain string is the action with these defaults.

    Attributes:
        delay: Seconds until the first put-back message is delivered; doubles, with jitter.
        max_delay: The longest pause between two tries, in seconds.
        max_wait: Seconds after the first conflict until FAILURE with LockConflict; None: never.
        timeout: Seconds for which ``wait`` blocks the worker before FAILURE with LockConflict.
    """

    action: ConflictAction
    delay: float = 1.0
    max_delay: float = 60.0
    max_wait: float | None = DEFAULT_MAX_WAIT
    timeout: float = 5.0

    def __post_init__(self) -> None:
        # A user may give the action as a plain str, which is not identical to a member.
        action = choice("OnConflict(action)", ConflictAction, self.action)
        object.__setattr__(self, "action", action)
        for name in ("delay", "max_delay", "max_wait", "timeout"):
            value = getattr(self, name)
            if value is not None or name != "max_wait":
                object.__setattr__(self, name, seconds(f"OnConflict({name})", value))
        if not (self.delay and self.max_delay):
            raise ValueError(
                f"OnConflict.retry(delay={self.delay:g}, max_delay={self.max_delay:g}): give more "
                "than 0 seconds, or the message goes round as fast as the broker can"
            )

    @classmethod
    def retry(
        cls,
        delay: float | timedelta = 1,
        max_delay: float | timedelta = 60,
        max_wait: float | timedelta | None = DEFAULT_MAX_WAIT,
    ) -> OnConflict:
        """Put the message back with increasing delays and jitter (all in seconds)."""
        return cls(
            action=ConflictAction.RETRY,
            delay=seconds("OnConflict.retry(delay)", delay),
            max_delay=seconds("OnConflict.retry(max_delay)", max_delay),
            max_wait=None if max_wait is None else seconds("OnConflict.retry(max_wait)", max_wait),
        )

    @classmethod
    def wait(cls, timeout: float | timedelta = 5) -> OnConflict:
        """Block in the worker for at most ``timeout`` seconds."""
        return cls(action=ConflictAction.WAIT, timeout=seconds("OnConflict.wait(timeout)", timeout))

    @classmethod
    def of(cls, value: OnConflict | str) -> OnConflict:
        if isinstance(value, OnConflict):
            return value
        return cls(action=choice("on_conflict", ConflictAction, value))

    def to_header(self) -> str | dict[str, Any]:
        """The form in a message; :meth:`from_header` reads it."""
        if self == OnConflict(action=self.action):
            return str(self.action)
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __json__(self) -> str | dict[str, Any]:
        # Called by kombu's encoder: other messages may contain the options of a signature.
        return self.to_header()

    @classmethod
    def from_header(cls, value: Any) -> OnConflict:
        """Raise TypeError or ValueError for a value that :meth:`to_header` didn't write."""
        if not isinstance(value, Mapping):
            return cls.of(value)
        action = choice("on_conflict", ConflictAction, value.get("action"))
        if action is ConflictAction.RETRY:
            return cls.retry(value["delay"], value["max_delay"], value["max_wait"])
        if action is ConflictAction.WAIT:
            return cls.wait(value["timeout"])
        return cls(action=action)


def suggestion(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for a name that is close to a known name, else the known names."""
    known = sorted(known)
    import difflib  # imported only after a mistake

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else f" (known: {', '.join(known)})"


def seconds(name: str, value: Any) -> float:
    """``value`` (a number or timedelta) in seconds, not negative.

    Raises:
        TypeError: ``value`` is neither.
        ValueError: ``value`` is negative, infinite or NaN.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r}: give seconds as a number, or a timedelta")
    if not 0 <= value < 1e9:
        raise ValueError(f"{name}={value!r}: give seconds from 0 to 1e9")
    return float(value)


def choice(name: str, kind: type[_E], value: Any) -> _E:
    """The member of ``kind`` that ``value`` names; else ValueError with a suggestion."""
    try:
        return kind(value)
    except ValueError:
        known = [str(member) for member in kind]
        raise ValueError(f"{name}={value!r}{suggestion(str(value), known)}") from None


# Seconds. A lease is renewed every ttl/3 with a timeout of ttl/6, so one slow reply would lose a
# shorter lease.
MIN_TTL: Final = 0.3
# One script examines all slots of a key.
_MAX_LIMIT: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The complete options of one task. docs/options.md documents each option.

    Attributes:
        impatient: Not an option: the given ``on_conflict`` if ``unique="until_start"`` replaced it.
            If an upper layer resets ``unique``, this value is restored.
    """

    key: KeySpec = None
    scope: str | None = None
    limit: int = 1
    ttl: float = 60.0
    max_hold: float | None = None
    min_hold: float = 0.0
    on_conflict: OnConflict = field(default_factory=lambda: OnConflict(action=ConflictAction.SKIP))
    needs_fence: bool = False
    hold_on_retry: bool = True
    on_lost: OnLost | None = None  # None: "retry" for acks_late tasks, else "fail"
    on_store_error: OnStoreError = OnStoreError.RETRY
    unique: Unique | None = None
    unique_for: float = 3600.0
    on_duplicate: OnDuplicate = OnDuplicate.RETURN_EXISTING
    impatient: OnConflict | None = None


class CallOptions(TypedDict, total=False):
    """The options that ``apply_async(singleton={...})`` may set for one call."""

    ttl: float | timedelta
    on_conflict: OnConflict | str
    unique: Literal["until_start", "until_done"] | None
    unique_for: float | timedelta
    on_duplicate: Literal["return_existing", "skip", "raise"]


OPTIONS: Final = frozenset(f.name for f in fields(Policy)) - {"impatient"}
CALL_OPTIONS: Final = frozenset(CallOptions.__annotations__)
#: The options that may be set for all tasks of an app, as ``singleton_lock_<name>``.
APP_OPTIONS: Final = OPTIONS - {"key", "scope", "limit", "min_hold"}


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
        raise TypeError(f"{where}: unknown option {unknown[0]!r}{suggestion(unknown[0], OPTIONS)}")
    try:
        checked = {name: _CHECKS[name](name, value) for name, value in options.items()}
        policy = _with_patience(base, replace(base, **checked), named="on_conflict" in options)
        _check_together(policy)
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
    if not isinstance(options, Mapping):
        raise TypeError(f"{where}: give a dict, such as {{'ttl': 120}}, or False, not {options!r}")
    for name in options:
        if name not in CALL_OPTIONS:
            raise TypeError(
                f"{where}: a call can't set {name!r}{suggestion(str(name), CALL_OPTIONS)}; key, "
                "scope and limit decide which calls exclude each other, and belong to the task"
            )
    check_claim_options(merge(policy(), options, where=where), options, where=where)
    return dict(options)


def check_claim_options(policy: Policy, given: Mapping[str, Any], *, where: str) -> None:
    """Refuse options of a claim if no layer sets ``unique``.

    Args:
        policy: The merged policy, because a lower layer may set ``unique``.
        given: The options of the layer that is checked.
        where: The name of that layer in errors.

    Raises:
        ValueError: One of the options would have no effect.
    """
    for name in ("on_duplicate", "unique_for"):
        if policy.unique is None and name in given:
            raise ValueError(
                f"{where}: {name}={given[name]!r} has no effect without unique: add "
                'unique="until_done" or unique="until_start", or drop it'
            )


def _check_ttl(name: str, value: Any) -> float:
    ttl = seconds(name, value)
    if ttl < MIN_TTL:
        raise ValueError(
            f"{name}={value!r}: at least {MIN_TTL} seconds; the lease is renewed every ttl/3"
        )
    return ttl


def _positive(otherwise: str) -> _Check:
    def check(name: str, value: Any) -> float:
        if not seconds(name, value):
            raise ValueError(f"{name}={value!r}: more than 0 seconds, or {otherwise}")
        return seconds(name, value)

    return check


def _one_of(kind: type[StrEnum]) -> _Check:
    return lambda name, value: choice(name, kind, value)


def _or_none(check: _Check) -> _Check:
    return lambda name, value: None if value is None else check(name, value)


def _check_limit(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: give a whole number")
    if not 1 <= value <= _MAX_LIMIT:
        raise ValueError(f"{name}={value!r}: from 1 to {_MAX_LIMIT}")
    return value


def _check_scope(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}: give a name as str")
    if not value or len(value) > 200:
        raise ValueError(f"{name}={value!r}: give a name of 1 to 200 characters")
    return value


def _check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: give True or False")
    return value


def _check_on_conflict(name: str, value: Any) -> OnConflict:
    if isinstance(value, Mapping):
        try:
            return OnConflict.from_header(value)  # the value comes from a message
        except KeyError as exc:
            raise ValueError(f"{name}={value!r}: {exc} is missing") from None
    if not isinstance(value, (str, OnConflict)):
        raise TypeError(f"{name}={value!r}: give a str, or OnConflict.retry(...) or .wait(...)")
    return OnConflict.of(value)


_CHECKS: Final[dict[str, _Check]] = {
    # KeyMaker checks the key, because it knows the signature.
    "key": lambda name, value: value,
    "scope": _or_none(_check_scope),
    "limit": _check_limit,
    "ttl": _check_ttl,
    "max_hold": _or_none(_positive("None for no bound")),
    "min_hold": seconds,
    "on_conflict": _check_on_conflict,
    "needs_fence": _check_flag,
    "hold_on_retry": _check_flag,
    "on_lost": _or_none(_one_of(OnLost)),
    "on_store_error": _one_of(OnStoreError),
    "unique": _or_none(_one_of(Unique)),
    "unique_for": _positive("the claim ends at once"),
    "on_duplicate": _one_of(OnDuplicate),
}


def _with_patience(base: Policy, policy: Policy, *, named: bool) -> Policy:
    """``policy`` with the ``on_conflict`` that its ``unique`` needs.

    Args:
        base: The lower layer.
        policy: Both layers, merged.
        named: Whether the upper layer sets ``on_conflict``.
    """
    if policy.unique is not Unique.UNTIL_START:
        given = policy.on_conflict if named else base.impatient or policy.on_conflict
        return replace(policy, on_conflict=given, impatient=None)
    if base.unique is Unique.UNTIL_START and not named:
        return policy  # the lower layer is adapted already, and may have set "raise"
    given = policy.on_conflict
    rule = _patient(given, named=named)
    return replace(policy, on_conflict=rule, impatient=None if rule == given else given)


def _patient(rule: OnConflict, *, named: bool) -> OnConflict:
    """``on_conflict`` for a call with ``unique="until_start"``, which waits without a limit.

    The waiting call represents all calls that were answered with it, so it must not be dropped.

    Args:
        rule: The merged ``on_conflict``.
        named: Whether the upper layer sets it; a lower layer's value is meant for other tasks.

    Raises:
        ValueError: The layer itself sets a rule that drops the call.
    """
    if rule.action is ConflictAction.RETRY:
        if named and rule.max_wait not in (None, DEFAULT_MAX_WAIT):
            raise ValueError(
                f'unique="until_start" with max_wait={rule.max_wait:g}: the one waiting call '
                "stands for all others, so it waits as long as it takes. Drop max_wait"
            )
        return replace(rule, max_wait=None)
    if not named:
        return OnConflict.retry(max_wait=None)
    if rule.action in (ConflictAction.SKIP, ConflictAction.REVOKE):
        raise ValueError(
            f'unique="until_start" with on_conflict="{rule.action}": the one waiting call stands '
            'for all others, and would be dropped. Use on_conflict="retry", which is its default, '
            'or unique="until_done"'
        )
    return rule


def _check_together(policy: Policy) -> None:
    if policy.scope is not None and policy.key is None:
        raise ValueError(
            f"scope={policy.scope!r} needs an explicit key: tasks with different arguments can't "
            'share a key made of all of them. Write key="account:{account_id}" or the like'
        )
    if policy.needs_fence and policy.limit > 1:
        raise ValueError(
            f"needs_fence=True with limit={policy.limit}: several holders at a time have no order, "
            "so there is no fence; use limit=1"
        )
    if policy.max_hold is not None and policy.max_hold < policy.min_hold:
        raise ValueError(f"max_hold={policy.max_hold} is shorter than min_hold={policy.min_hold}")
    retry = policy.on_conflict
    if retry.action is ConflictAction.RETRY and retry.max_delay < retry.delay:
        raise ValueError(
            f"OnConflict.retry: max_delay={retry.max_delay} is shorter than delay={retry.delay}"
        )
