"""The combinations of options that are refused where they are written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .core.rate import Rate
from .errors import LockConflict, SingletonLockError, StoreError
from .on_conflict import CancelRunning, Retry
from .option_values import OnDuplicate, OnStoreError, Unique, require

if TYPE_CHECKING:
    from .policy import Policy


def check_together(policy: Policy) -> None:
    """Refuse options that contradict each other.

    Raises:
        ValueError: It names both options, and what to write.
    """
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
    policy.on_conflict.check(policy)
    if policy.rate is not None:
        _check_rate(policy, policy.rate)
    if policy.max_hold is not None and policy.max_hold < policy.min_hold:
        raise ValueError(f"max_hold={policy.max_hold} is shorter than min_hold={policy.min_hold}")
    if policy.debounce is not None or policy.debounce_max is not None:
        _check_debounce(policy)
    if policy.on_duplicate is OnDuplicate.REPLACE:
        _check_replace(policy)


def _check_rate(policy: Policy, rate: Rate) -> None:
    if "on_conflict" not in policy.given:
        raise ValueError(
            f'rate="{rate}" without on_conflict: its default, "skip", would drop each call above '
            'the rate. Write on_conflict="queue", with which they wait in order, or "skip"'
        )
    rule = policy.on_conflict
    if isinstance(rule, (Retry, CancelRunning)):
        raise ValueError(
            f'rate="{rate}" with on_conflict="{rule.action}": use "queue", with which calls wait '
            "in order, each until the rate lets it start"
        )
    if policy.on_store_error is OnStoreError.RUN:
        raise ValueError(
            f'rate="{rate}" with on_store_error="run": the store counts the starts, so the task '
            'can\'t run without it. Use on_store_error="retry" or "raise"'
        )


def _check_replace(policy: Policy) -> None:
    if policy.unique not in (None, Unique.UNTIL_START):
        raise ValueError(
            f'on_duplicate="replace" with unique="{policy.unique}": a task that runs can\'t get '
            'other arguments. Use unique="until_start", or another on_duplicate'
        )
    if policy.unique and policy.on_store_error is OnStoreError.RUN:
        debounce = policy.debounce
        cause = 'on_duplicate="replace"' if debounce is None else f"debounce={debounce:g}"
        raise ValueError(
            f'{cause} with on_store_error="run": the newest arguments are in the store, so the '
            'task can\'t run without it. Use on_store_error="retry" or "raise"'
        )


def _check_debounce(policy: Policy) -> None:
    debounce, most, unique = policy.debounce, policy.debounce_max, policy.unique
    if debounce is None:
        raise ValueError(
            f"debounce_max={most:g} has no effect without debounce: add it, or drop it"
        )
    if most is not None and most < debounce:
        raise ValueError(f"debounce_max={most:g} is shorter than debounce={debounce:g}")
    if unique not in (None, Unique.UNTIL_START):
        raise ValueError(
            f'debounce={debounce:g} with unique="{unique}": only a message that has not started '
            'can wait for later calls. Use unique="until_start", which debounce sets by itself'
        )
    if unique is not None and policy.on_duplicate is not OnDuplicate.REPLACE:
        raise ValueError(
            f'debounce={debounce:g} with on_duplicate="{policy.on_duplicate}": a debounced call '
            'runs with the newest arguments. Leave on_duplicate out; debounce sets "replace"'
        )


def check_claim_options(policy: Policy, given: Mapping[str, Any], *, where: str) -> None:
    """Refuse options of a claim if no layer sets ``unique``.

    Args:
        policy: The merged policy, because a lower layer may set ``unique``.
        given: The options of the layer that is checked.
        where: The name of that layer in errors.

    Raises:
        ValueError: One of the options would have no effect.
    """
    fitting = 'unique="until_start"'
    if policy.on_duplicate is not OnDuplicate.REPLACE:
        fitting = f'unique="until_done" or {fitting}'
    for name in ("on_duplicate", "unique_for"):
        if policy.unique is None and name in given:
            raise ValueError(
                f"{where}: {name}={given[name]!r} has no effect without unique: add {fitting}, or "
                "drop it"
            )


def check_autoretry(
    policy: Policy, autoretry_for: Any, dont_autoretry_for: Any, *, where: str
) -> None:
    """Refuse an ``autoretry_for`` that names an error which no body raises.

    Celery's ``autoretry_for`` wraps the body, and these errors end a call that has no body. They
    can't be passed through it, as a lost lease is: the attempt after it would count as started
    work, which is requeued without a limit.

    Raises:
        TypeError: An option is no tuple, but a single class or the like.
        ValueError: The option would have no effect on the errors that ``policy`` raises.
    """
    rule, given = policy.on_conflict, (autoretry_for, dont_autoretry_for)
    for name, errors in zip(("autoretry_for", "dont_autoretry_for"), given, strict=True):
        is_several = not isinstance(errors, str) and isinstance(errors, (Iterable, type(None)))
        advice = "give a tuple of exception classes, such as (ConnectionError,)"
        require(is_several, f"{where}: {name}", errors, advice, TypeError)
    cause = ""
    if _names(*given, LockConflict):
        if isinstance(rule, Retry) and rule.max_wait is not None:
            cause = f"OnConflict.retry(max_wait={rule.max_wait:g})"
            remedy = "Give a longer max_wait"
        elif rule.raises:
            cause = f'on_conflict="{rule.action}"'
            remedy = 'Use on_conflict="retry", which requeues the call until it has run'
    if not cause and policy.on_store_error is OnStoreError.RAISE and _names(*given, StoreError):
        cause = 'on_store_error="raise"'
        remedy = 'Use on_store_error="retry", which requeues the call until the store answers'
    if cause:
        raise ValueError(
            f"{where}: {cause} with an autoretry_for that names its error: Celery retries errors"
            f" of the task's code, and such a call ends before it begins. {remedy}. If the task "
            "itself "
            "raises that error, by a hold(), call self.retry() there"
        )


def _names(errors: Any, excepted: Any, error: type[Exception]) -> bool:
    """Whether ``errors`` names ``error`` or this library's errors, and ``excepted`` does not.

    ``autoretry_for=(Exception,)`` is meant for the body.
    """
    if issubclass(error, tuple(excepted or ())):
        return False
    return any(
        issubclass(each, SingletonLockError)
        and (issubclass(error, each) or issubclass(each, error))
        for each in errors or ()
    )
