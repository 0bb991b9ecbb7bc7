"""The values that an option may have, and checks: each returns the value, or says what to give."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar

from .option_names import other_value, suggestion

_E = TypeVar("_E", bound=StrEnum)


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
    UNTIL_EXPIRED = "until_expired"


class OnDuplicate(StrEnum):
    RETURN_EXISTING = "return_existing"
    REPLACE = "replace"
    SKIP = "skip"
    RAISE = "raise"


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
        raise ValueError(f"{name}={value!r}: give seconds, not negative and below 1e9")
    return float(value)


def require(
    is_valid: object, name: str, value: Any, advice: str, error: type[Exception] = ValueError
) -> None:
    """Raise ``error`` with the ``advice`` unless the value of the option ``name`` is valid."""
    if not is_valid:
        raise error(f"{name}={value!r}: {advice}")


def one_of(name: str, value: Any, known: Iterable[str]) -> None:
    """Raise ValueError with a suggestion unless ``value`` is one of the ``known`` words."""
    words = [str(word) for word in known]
    if value not in words:
        meant = other_value(str(value), words)
        hint = f" (did you mean {meant!r}?)" if meant else suggestion(str(value), words)
        raise ValueError(f"{name}={value!r}{hint}")


def choice(name: str, value: Any, kind: type[_E]) -> _E:
    """The member of ``kind`` that ``value`` names; else ValueError with a suggestion."""
    one_of(name, value, kind)
    return kind(value)


def flag(name: str, value: Any) -> bool:
    require(isinstance(value, bool), name, value, "give True or False", TypeError)
    return bool(value)


def at_least(name: str, value: Any, least: float, reason: str) -> float:
    duration = seconds(name, value)
    require(duration >= least, name, value, f"at least {least} seconds{reason}")
    return duration


def positive(name: str, value: Any, otherwise: str) -> float:
    duration = seconds(name, value)
    require(duration, name, value, f"more than 0 seconds, or {otherwise}")
    return duration


def whole(name: str, value: Any, least: int, most: int) -> int:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    require(is_whole, name, value, "give a whole number", TypeError)
    require(least <= value <= most, name, value, f"from {least} to {most}")
    return int(value)
