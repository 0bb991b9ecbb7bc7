"""What stands in a key, as values and as text: one form for every store."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from celery_singleton_lock.core.lease import Holder, Kind, Phase, Record, Token
from celery_singleton_lock.core.store import MarkerState

__all__ = [
    "Claim",
    "Entry",
    "Foreign",
    "Held",
    "LastRun",
    "Marker",
    "Value",
    "format_value",
    "parse_value",
]

# Two blanks; a lease's or a claim's text has three, and a token where this has its number.
_MARKER: Final = re.compile(r"([-fd]) ([0-9]+) (\S*)")
# Stands where a lease's text has its fence: the number that the store gave to the write itself.
_OWN_NUMBER: Final = "="
# Goes before the text of a last run, which in Redis stands alone; no kind of lease, nor a marker.
_LAST_RUN: Final = "t "


@dataclass(frozen=True, slots=True)
class Held:
    """A lease, or what it turned into.

    Attributes:
        kind: Which.
        token: Whose it is.
        fence: 0: it has none; None: the number that the store will give to the write.
        holder: For people.
    """

    kind: Kind
    token: Token
    fence: int | None
    holder: Holder


@dataclass(frozen=True, slots=True)
class Claim:
    """A message's claim; ``task`` is what names it (``Token.task``)."""

    task: str
    phase: Phase
    holder: Holder


@dataclass(frozen=True, slots=True)
class Marker:
    """What is known of one attempt beyond its lease."""

    state: MarkerState
    sequence: int
    nonce: str


@dataclass(frozen=True, slots=True)
class LastRun:
    """What a leader of beats wrote down of one entry: the text of its last run."""

    text: str


@dataclass(frozen=True, slots=True)
class Foreign:
    """Something else: written by somebody else, or by a newer version. Never touched."""


Value = Held | Claim | Marker | LastRun | Foreign


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value and the time that it has.

    Attributes:
        value: What stands there.
        ttl: Seconds left; of a new entry, seconds that it gets.
        kept: Whether it lives with its holder's heartbeat, rather than for ``ttl`` from now.
    """

    value: Value
    ttl: float
    kept: bool = False

    @property
    def name(self) -> str:
        """What tells whose it is: a lease's token, a claim's task; empty where neither stands."""
        if isinstance(self.value, Held):
            return str(self.value.token)
        return self.value.task if isinstance(self.value, Claim) else ""

    def record(self, key: str) -> Record | None:
        """For people; None where no lease and no claim stands."""
        value = self.value
        if isinstance(value, Held):
            return Record(
                key=key,
                kind=value.kind,
                token=str(value.token),
                fence=value.fence or None,
                holder=value.holder,
                ttl=self.ttl,
            )
        if isinstance(value, Claim):
            return Record(
                key=key,
                kind=Kind.CLAIM,
                token=value.task,
                fence=None,
                holder=value.holder,
                ttl=self.ttl,
                phase=value.phase,
            )
        return None


def format_value(value: Value) -> str:
    """The text of ``value``: that of the Lua scripts, but for a fence that is the write's number,
    and for the letter before a last run.

    Raises:
        TypeError: It is foreign.
    """
    if isinstance(value, Held):
        fence = _OWN_NUMBER if value.fence is None else value.fence
        return f"{value.kind} {value.token} {fence} {value.holder.to_json(value.token.task_id)}"
    if isinstance(value, Claim):
        holder = value.holder.to_json(Token.task_id_of(value.task))
        return f"{Kind.CLAIM} {value.task} {value.phase} {holder}"
    if isinstance(value, Marker):
        return f"{value.state} {value.sequence} {value.nonce}"
    if isinstance(value, LastRun):
        return f"{_LAST_RUN}{value.text}"
    raise TypeError("what is foreign is never written")


def parse_value(text: str, number: int) -> Value:
    """The value of ``text``, which the store wrote under ``number``."""
    if text.startswith(_LAST_RUN):
        return LastRun(text.removeprefix(_LAST_RUN))
    if match := _MARKER.fullmatch(text):
        return Marker(MarkerState(match[1]), int(match[2]), match[3])
    try:
        kind, token, third, holder = text.split(" ", 3)
        if kind == Kind.CLAIM:
            publisher = Holder.from_json(holder, Token.task_id_of(token))
            return Claim(token, Phase(third), publisher)
        fence = number if third == _OWN_NUMBER else int(third)
        named = Token.parse(token)
        return Held(Kind(kind), named, fence, Holder.from_json(holder, named.task_id))
    except ValueError:
        return Foreign()
