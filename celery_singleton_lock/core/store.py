"""What a store of leases must do: expected outcomes are values, surprises are exceptions.

Every method may raise StoreUnavailable (no answer: what was asked may have happened or not) and
StoreError (an answer, but a refusal). Every method may be sent again with the same token after a
lost reply; doing it twice is doing it once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from celery_singleton_lock.core.lease import Holder, Kind, Lease, Record, Token

__all__ = [
    "Acquire",
    "Capabilities",
    "Granted",
    "MarkerState",
    "Refused",
    "Relation",
    "Release",
    "Released",
    "Renewal",
    "Store",
]


class Relation(StrEnum):
    """How a refused delivery relates to what it found; the words the scripts answer with."""

    DONE = "done"  # this attempt ended already: its marker says so
    SUPERSEDED = "superseded"  # a newer copy of this message was published
    TWIN = "twin"  # another delivery of the same attempt holds the key
    EARLIER = "earlier"  # an earlier attempt of the same task holds it
    LATER = "later"  # a later attempt of the same task holds it, or it is reserved for one
    OTHER = "other"  # another task, or another call of this one


class Renewal(StrEnum):
    RENEWED = "renewed"
    EXPIRED = "expired"
    REPLACED = "replaced"
    DYING = "dying"  # the worker parent has announced this process's end


class Released(StrEnum):
    """What a release found."""

    RELEASED = "released"
    NOT_OURS = "not_ours"
    TWIN = "twin"  # another delivery of the same attempt has it
    DONE = "done"  # another delivery of the same attempt finished


class MarkerState(StrEnum):
    """What is known of one attempt beyond its lease; the letter is what the store holds."""

    WAITING = "-"  # put back; only the newest copy counts
    FINISHING = "f"  # the body ended, its callbacks are being sent
    DONE = "d"  # the outcome is final and stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquire:
    """One request for a lease.

    Attributes:
        slots: The keys to choose from, one unless the policy has ``limit`` above 1.
        ttl: Seconds.
        sequence: How often this attempt was put back: older copies than the newest are refused.
    """

    slots: tuple[str, ...]
    token: Token
    holder: Holder
    ttl: float
    sequence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    key: str
    fence: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    relation: Relation
    record: Record | None = None  # what holds the key, where it could be read

    @property
    def holder(self) -> Holder:
        """Who has it, as far as it could be read."""
        return self.record.holder if self.record else Holder(task_id="somebody unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Compare by token and give back, or turn into another kind.

    Attributes:
        keys: The key of the lease; all slots, when an acquire's outcome is unknown.
        become: What the key turns into; None: it is deleted.
        become_ttl: Seconds that the new kind stays.
        next_token: Whom a reserved key is for.
        marker: Written for the token's attempt, unless a twin has it or finished it.
        marker_ttl: Seconds.
    """

    keys: tuple[str, ...]
    token: Token
    become: Kind | None = None
    become_ttl: float = 0.0
    next_token: Token | None = None
    marker: MarkerState | None = None
    marker_ttl: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Checked against each task's policy when the worker starts."""

    fence: bool
    name: str


class Store(Protocol):
    """Where leases live."""

    @property
    def capabilities(self) -> Capabilities: ...

    def acquire(self, call: Acquire, *, timeout: float) -> Granted | Refused:
        """Take a free slot, or say who has them. Idempotent for its own token."""
        ...

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[Renewal]:
        """Prolong each lease to its ttl if its token still stands, in the order given."""
        ...

    def release(self, call: Release, *, timeout: float) -> Released:
        """Give back what the token holds; never touches another's."""
        ...

    def mark(
        self,
        key: str,
        token: Token,
        state: MarkerState,
        sequence: int,
        ttl: float,
        *,
        timeout: float,
    ) -> None:
        """Raise the marker of the token's attempt: neither state nor sequence ever goes back."""
        ...

    def inspect(self, key: str) -> Record | None:
        """The record of one key, None if it is free."""
        ...

    def scan(self, pattern: str) -> Iterator[Record]:
        """All records whose keys match the glob ``pattern``; not a snapshot."""
        ...

    def free(self, key: str, token: str | None) -> bool:
        """For operators: delete ``key``, of any kind, if ``token`` stands (None: whatever stands).

        Lifts the shard's fence, so that a later grant is above whatever the old holder writes.
        """
        ...

    def close(self) -> None:
        """Close this process's connections."""
        ...
