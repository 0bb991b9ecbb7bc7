"""The values that options take, each checked when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final, TypeVar

__all__ = [
    "DEFAULT_MAX_WAIT",
    "ConflictAction",
    "OnConflict",
    "OnDuplicate",
    "OnLost",
    "OnStoreError",
    "Unique",
    "choice",
    "seconds",
    "suggestion",
]

_E = TypeVar("_E", bound=StrEnum)

#: Seconds that ``on_conflict="retry"`` waits unless it is told otherwise.
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
    """How long a published message keeps equal calls from being published."""

    UNTIL_START = "until_start"
    UNTIL_DONE = "until_done"


class OnDuplicate(StrEnum):
    RETURN_EXISTING = "return_existing"
    SKIP = "skip"
    RAISE = "raise"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnConflict:
    """What a call that has not run yet does when somebody else holds its key.

    A plain string stands for the action with these defaults.

    Attributes:
        delay: Seconds before the first put-back returns; doubles, with jitter.
        max_delay: Seconds; the longest pause between two tries.
        max_wait: Seconds after the first conflict until FAILURE with LockConflict; None: never.
        timeout: Seconds that ``wait`` blocks the worker, then FAILURE with LockConflict.
    """

    action: ConflictAction
    delay: float = 1.0
    max_delay: float = 60.0
    max_wait: float | None = DEFAULT_MAX_WAIT
    timeout: float = 5.0

    def __post_init__(self) -> None:
        # Also where a user names the action as a plain str: it would equal no member by identity.
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
        """Put the message back with growing, jittered delays (all in seconds)."""
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
        """The form that travels in a message; :meth:`from_header` reads it."""
        if self == OnConflict(action=self.action):
            return str(self.action)
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __json__(self) -> str | dict[str, Any]:
        # For kombu's encoder: the options of a signature travel in other messages.
        return self.to_header()

    @classmethod
    def from_header(cls, value: Any) -> OnConflict:
        """Raises TypeError or ValueError for what :meth:`to_header` didn't write."""
        if not isinstance(value, Mapping):
            return cls.of(value)
        action = choice("on_conflict", ConflictAction, value.get("action"))
        if action is ConflictAction.RETRY:
            return cls.retry(value["delay"], value["max_delay"], value["max_wait"])
        if action is ConflictAction.WAIT:
            return cls.wait(value["timeout"])
        return cls(action=action)


def suggestion(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for a name that is close to a known one, else the known ones."""
    known = sorted(known)
    import difflib  # not for those who make no mistake

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else f" (known: {', '.join(known)})"


def seconds(name: str, value: Any) -> float:
    """``value`` (a number or timedelta) in seconds, not negative.

    Raises:
        TypeError: It is neither.
        ValueError: It is negative, infinite or no number.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r}: give seconds as a number, or a timedelta")
    if not 0 <= value < 1e9:
        raise ValueError(f"{name}={value!r}: give seconds from 0 to 1e9")
    return float(value)


def choice(name: str, kind: type[_E], value: Any) -> _E:
    """The member of ``kind`` that ``value`` names; ValueError with a suggestion if none."""
    try:
        return kind(value)
    except ValueError:
        known = [str(member) for member in kind]
        raise ValueError(f"{name}={value!r}{suggestion(str(value), known)}") from None
