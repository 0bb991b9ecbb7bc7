"""The values of keys, their text in every store, and the draft that a transition changes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, TypeVar

from celery_singleton_lock.core.lease import Holder, Kind, Phase, Record, Token
from celery_singleton_lock.core.store import ClaimChange, MarkerState

# The text of a marker has two blanks. The text of a lease or a claim has three, and a token in the
# place of the number.
_MARKER: Final = re.compile(r"([-fd]) ([0-9]+) (\S*)")
# Written in the place of a lease's fence: the fence is the number that the store gave to the write.
_OWN_NUMBER: Final = "="
# The word in front of the text in etcd and ZooKeeper: `k` for an entry that is renewed, `p` for one
# that expires, and a number of seconds.
_WORD: Final = re.compile(r"([kp])([0-9]+(?:\.[0-9]+)?(?:e\+[0-9]+)?) ")
# Prefix of the text of a last run. No kind of lease and no marker begins with it. In Redis a last
# run has no prefix.
_LAST_RUN: Final = "t "


@dataclass(frozen=True, slots=True)
class Held:
    """A lease, or the reservation or cooling key that a release left.

    Attributes:
        kind: Any kind except CLAIM.
        token: The token of the holder, or of the attempt that a reservation is for.
        fence: The fence; 0: none; None: the number that the store will give to the write.
        holder: The description of the holder for people.
    """

    kind: Kind
    token: Token
    fence: int | None
    holder: Holder
    phase: ClassVar[None] = None

    @property
    def owner(self) -> str:
        return str(self.token)


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of a published message. ``owner`` is the name of its task (``Token.task``)."""

    owner: str
    phase: Phase
    holder: Holder
    kind: ClassVar[Kind] = Kind.CLAIM
    fence: ClassVar[None] = None


@dataclass(frozen=True, slots=True)
class Marker:
    """The state of one attempt, kept beside its lease."""

    state: MarkerState
    sequence: int
    nonce: str


#: A text is the last run of a schedule entry, written by the elected beat. None is a value that
#: this version can't read. It is never changed.
Value = Held | Claim | Marker | str | None
SomeValue = TypeVar("SomeValue", Held, Claim, Marker, str)


@dataclass(frozen=True, slots=True)
class Entry:
    """The value of a key and its lifetime.

    Attributes:
        value: The content.
        ttl: Seconds left; for a new entry, the seconds that it gets.
        renewed: Whether the entry lives as long as its holder's heartbeat. Otherwise it expires
            ``ttl`` seconds from now.
    """

    value: Value
    ttl: float
    renewed: bool = False

    @property
    def owner(self) -> str:
        """The token of a lease or the task of a claim; empty for other values."""
        return self.value.owner if isinstance(self.value, (Held, Claim)) else ""

    def record(self, key: str) -> Record | None:
        """The readable form of a lease or a claim; None for other values."""
        value = self.value
        if not isinstance(value, (Held, Claim)):
            return None
        return Record(
            key=key,
            kind=value.kind,
            token=value.owner,
            fence=value.fence or None,
            holder=value.holder,
            ttl=self.ttl,
            phase=value.phase,
        )

    def numbered(self, number: int) -> Entry:
        """The entry as it is read after the store has given ``number`` to the write."""
        if isinstance(self.value, Held) and self.value.fence is None:
            return replace(self, value=replace(self.value, fence=number))
        return self

    def has_ttl(self, ttl: float) -> bool:
        """Whether the entry's ttl equals ``ttl``, apart from rounding in the text."""
        return math.isclose(self.ttl, ttl, rel_tol=1e-3)


@dataclass(slots=True)
class Draft:
    """The entries that a transition reads, and the changes that it decides on.

    Attributes:
        entries: The entries that were read; a key without an entry is free.
        changes: The entry to write for each changed key; None: delete the key.
        read: The keys that the decision depends on.
    """

    entries: Mapping[str, Entry]
    changes: dict[str, Entry | None] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def get(self, key: str) -> Entry | None:
        self.read.add(key)
        return self.changes[key] if key in self.changes else self.entries.get(key)

    def value(self, key: str, kind: type[SomeValue]) -> SomeValue | None:
        """The value of ``key`` if it is of ``kind``."""
        entry = self.get(key)
        return entry.value if entry and isinstance(entry.value, kind) else None

    def record(self, key: str) -> Record | None:
        entry = self.get(key)
        return entry.record(key) if entry else None

    def change_claim(
        self, change: ClaimChange, task: str, *, holder: Holder | None = None, renewed: bool = False
    ) -> None:
        """Change the claim of ``task``, or write it if the key is free. Keep any other entry.

        Args:
            change: The change.
            task: The owner of the claim.
            holder: The holder in a claim that is written to a free key.
            renewed: Whether the claim is renewed with a lease.
        """
        claim = self.value(change.key, Claim)
        is_own = claim is not None and claim.owner == task
        if not is_own and self.get(change.key) is not None:
            return
        if change.phase is None:
            if is_own:
                self.changes[change.key] = None
            return
        publisher = claim.holder if claim else holder or Holder()
        self.changes[change.key] = Entry(Claim(task, change.phase, publisher), change.ttl, renewed)


#: The entry to write for each changed key; None: delete the key.
Changes = Mapping[str, Entry | None]


def format_value(value: Value) -> str:
    """The text of ``value``, as the Lua scripts write it, except for `=` and the last run's prefix.

    Raises:
        TypeError: ``value`` is None.
    """
    match value:
        case Held(kind, token, fence, holder):
            number = _OWN_NUMBER if fence is None else fence
            return f"{kind} {token} {number} {holder.to_json(token.task_id)}"
        case Claim(owner, phase, holder):
            return f"{Kind.CLAIM} {owner} {phase} {holder.to_json(Token.task_id_of(owner))}"
        case Marker(state, sequence, nonce):
            return f"{state} {sequence} {nonce}"
        case str():
            return f"{_LAST_RUN}{value}"
    raise TypeError("a value that could not be read can't be written")


def parse_value(text: str, number: int) -> Value:
    """The value of ``text``, which the store wrote under ``number``."""
    if text.startswith(_LAST_RUN):
        return text.removeprefix(_LAST_RUN)
    if match := _MARKER.fullmatch(text):
        return Marker(MarkerState(match[1]), int(match[2]), match[3])
    try:
        kind, owner, third, holder = text.split(" ", 3)
        if kind == Kind.CLAIM:
            return Claim(owner, Phase(third), Holder.from_json(holder, Token.task_id_of(owner)))
        token = Token.parse(owner)
        fence = number if third == _OWN_NUMBER else int(third)
        return Held(Kind(kind), token, fence, Holder.from_json(holder, token.task_id))
    except ValueError:
        return None


def parse_entry(text: str, number: int) -> Entry:
    """The entry of ``text`` behind a word like ``k60``, whose number of seconds becomes its ttl.

    A text without such a word was not written by this library. It never expires.
    """
    match = _WORD.match(text)
    if match is None:
        return Entry(None, math.inf)
    value = parse_value(text[match.end() :], number)
    return Entry(value, float(match[2]), renewed=match[1] == "k")
