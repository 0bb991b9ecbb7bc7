"""What a store of leases must do: expected outcomes are values, surprises are exceptions.

Every method may raise StoreUnavailable (no answer: what was asked may have happened or not) and
StoreError (an answer, but a refusal). Every method may be sent again with the same token after a
lost reply; doing it twice is doing it once.

What each task asks and hears (`Acquire`, `Granted`, `Release`, `Admit`) isn't changed once it is
made, but not frozen either: a frozen dataclass costs three times as much to make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from celery_singleton_lock.core.lease import Holder, Kind, Lease, Phase, Record, Token
from celery_singleton_lock.errors import StoreError

__all__ = [
    "Acquire",
    "Admit",
    "Authorization",
    "AuthorizeTick",
    "Capabilities",
    "ClaimChange",
    "Granted",
    "MarkerState",
    "PostingStore",
    "Refused",
    "Relation",
    "Release",
    "Released",
    "Renewal",
    "Store",
    "StreamingStore",
    "Trace",
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
    GONE = "gone"  # the key is free: expired, deleted, or forgotten by the store
    REPLACED = "replaced"
    DYING = "dying"  # the worker parent has announced this process's end
    SILENT = "silent"  # its part of the store, or too much of it, doesn't answer


class Released(StrEnum):
    """What a release found."""

    RELEASED = "released"
    NOT_OURS = "not_ours"
    TWIN = "twin"  # another delivery of the same attempt has it
    DONE = "done"  # another delivery of the same attempt finished


class Authorization(StrEnum):
    """What a leader that wants to send hears; the words the script answers with."""

    AUTHORIZED = "permitted"
    DEPOSED = "deposed"  # its token leads no more
    CHANGED = "changed"  # the entry's last run is another one than it believes


class MarkerState(StrEnum):
    """What is known of one attempt beyond its lease; the letter is what the store holds."""

    WAITING = "-"  # put back; only the newest copy counts
    FINISHING = "f"  # the body ended, its callbacks are being sent
    DONE = "d"  # the outcome is final and stored


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimChange:
    """What becomes of the claim of a task, which holds it under its name (``Token.task``).

    Another task's claim is never touched. One that has expired is made anew under a lease (by a
    grant or a release), and nowhere else.

    Attributes:
        key: The claim's, in the shard of the lease's key.
        phase: What the task does from now on; None: the claim is freed.
        ttl: Seconds that it stays.
    """

    key: str
    phase: Phase | None
    ttl: float = 0.0


@dataclass(slots=True, kw_only=True)
class Admit:
    """One request to publish: a claim for a message that is about to be sent.

    Attributes:
        key: The claim's.
        token: Of the message's first delivery; only its task counts.
        holder: Who publishes it, and since when.
        ttl: Seconds that the claim stays, should nothing ever be heard of the message.
        instead_of: The name of a task whose claim is stale, and taken over; empty: none.
        tells_ttl: Whether the ttl of a claim that is found is wanted; else it may be nan.
    """

    key: str
    token: Token
    holder: Holder
    ttl: float
    instead_of: str = ""
    tells_ttl: bool = True


@dataclass(slots=True, kw_only=True)
class Acquire:
    """One request for a lease.

    Attributes:
        slots: The keys to choose from, one unless the policy has ``limit`` above 1.
        ttl: Seconds.
        sequence: How often this attempt was put back: older copies than the newest are refused.
        claim: What a grant makes of the message's claim; it stays as long as the lease.
        frees_claim: Whether a refusal by another task ends the message, and its claim with it.
        yields: Whether the message was published beside another's claim: while that stands, the
            lease is refused as if its task had it, but for one that is its own already or is
            reserved for it.
        keeps_claim: Whether a grant leaves the claim as it is: where one of several nodes grants,
            nothing is decided yet.
        wait_ttl: Seconds that the caller counts as waiting if another token holds the key; 0: the
            caller leaves the wait queue; None: it never joined.
        handoff: The handoff token that woke the caller. The key is reserved for it. Empty: none.
    """

    slots: tuple[str, ...]
    token: Token
    holder: Holder
    ttl: float
    sequence: int = 0
    claim: ClaimChange | None = None
    frees_claim: bool = False
    yields: bool = False
    keeps_claim: bool = False
    wait_ttl: float | None = None
    handoff: str = ""


@dataclass(slots=True, kw_only=True)
class Granted:
    """A lease.

    Attributes:
        key: The slot that was chosen.
        fence: None where the store, or a limit above 1, gives none.
        ttl: Seconds, where the store can't keep it as long as was asked for; None: it can.
    """

    key: str
    fence: int | None
    ttl: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    relation: Relation
    record: Record | None = None  # what holds the key, where it could be read

    @property
    def holder(self) -> Holder:
        """Who has it, as far as it could be read."""
        return self.record.holder if self.record else Holder(task_id="somebody unknown")


@dataclass(slots=True, kw_only=True)
class Release:
    """Compare by token and give back, or turn into another kind.

    Attributes:
        keys: The key of the lease; all slots, when an acquire's outcome is unknown.
        become: What the key turns into; None: it is deleted.
        become_ttl: Seconds that the new kind stays.
        next_token: Whom a reserved key is for.
        marker: Written for the token's attempt, unless a twin has it or finished it.
        marker_ttl: Seconds.
        claim: What becomes of the message's claim, unless a twin has the key; where the key was
            lost, a claim is only freed.
    """

    keys: tuple[str, ...]
    token: Token
    become: Kind | None = None
    become_ttl: float = 0.0
    next_token: Token | None = None
    marker: MarkerState | None = None
    marker_ttl: float = 0.0
    claim: ClaimChange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorizeTick:
    """Ask, as the leader, to send one entry; swaps the entry's last run in the same step.

    Attributes:
        leader: The key of the leader's lease.
        token: The leader's.
        entry: The key of the entry's last run, in the same shard.
        expected: The last run that must stand; None: there must be none.
        new: The last run to store. It is unique, so that a repeated request is recognized.
        ttl: Seconds that the new one stays.
    """

    leader: str
    token: Token
    entry: str
    expected: str | None
    new: str
    ttl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Checked against each task's policy when the worker starts.

    Attributes:
        fence: Whether grants have fencing tokens.
        name: For errors.
        trusted: The share of a ttl, from the sending of a request, that its answer vouches for.
            Below 1 where the store's expiry may count from an earlier heartbeat.
        min_ttl: Seconds; a shorter ttl is refused.
        max_limit: The most slots that one decision can look through; None: any number.
        renews_for_others: Whether a process can renew what another one of its host was granted, by
            key and token alone; not where a lease lives with its holder's connection. The worker
            parent heartbeat needs it.
    """

    fence: bool
    name: str
    trusted: float = 1.0
    min_ttl: float = 0.0
    max_limit: int | None = None
    renews_for_others: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a store has left of a lease after the lease has ended there.

    Attributes:
        record: The readable content of the lease's key now; None: there is none.
        fence: The last fence granted in the key's shard, 0 if the store has none; None if
            the fences of this store can't prove a loss.
        now: Seconds since the epoch, on the clock whose microseconds are the fences.
    """

    record: Record | None
    fence: int | None = None
    now: float = float("nan")


class Store(Protocol):
    """Where leases live."""

    @property
    def capabilities(self) -> Capabilities: ...

    def acquire(self, call: Acquire, *, timeout: float) -> Granted | Refused:
        """Take a free slot, or say who has them. Idempotent for its own token."""
        ...

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[Renewal]:
        """Prolong each lease to its ttl if its token still stands, in the order given.

        A lease's claim (``claim_key``) is prolonged with it, if its task still has it, and never
        shortened; not where the lease wasn't: what ended the lease gave the claim a ttl of its own.
        """
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
        claim: ClaimChange | None = None,
    ) -> None:
        """Raise the marker of the token's attempt: neither state nor sequence ever goes back.

        Args:
            key: The lock key.
            token: Of the delivery.
            state: The new state, unless a higher one stands.
            sequence: How often the attempt was put back.
            ttl: Seconds.
            timeout: Seconds to wait for the reply.
            claim: What becomes of the message's claim, if it stands and the attempt isn't done.
        """
        ...

    def admit(self, call: Admit, *, timeout: float) -> Record | None:
        """Claim ``call.key`` for a message, or say which one has it: None if it is claimed.

        A task's own claim is no obstacle: its phase is left as it is, its ttl never shortened.

        Raises:
            StoreError: Something that is no record stands in the key.
        """
        ...

    def settle_claim(self, token: Token, change: ClaimChange, *, timeout: float) -> None:
        """Change a claim where no lease is at hand; a running task's is left to its lease.

        That is so unless ``change`` names the phase RUNNING itself. A claim that is gone is not
        made anew: it may have been freed, and then nobody would free it again.
        """
        ...

    def authorize_tick(self, call: AuthorizeTick, *, timeout: float) -> Authorization:
        """Swap an entry's last run, if the leader's token and the expected last run stand."""
        ...

    def last_runs(self, keys: Sequence[str], *, timeout: float) -> list[str | None]:
        """The last run stored at each of ``keys``, None where there is none; in one round trip."""
        ...

    def trace(self, key: str, *, timeout: float) -> Trace:
        """The remains of a lease on ``key`` that a release did not find."""
        ...

    def inspect(self, key: str) -> Record | None:
        """The record of one key, None if it is free."""
        ...

    def scan(self, pattern: str) -> Iterator[Record]:
        """All records whose keys match the glob ``pattern``, in their order; not a snapshot."""
        ...

    def free(self, key: str, token: str | None) -> bool:
        """For operators: delete ``key``, of any kind, if ``token`` stands (None: whatever stands).

        Lifts the shard's fence, so that a later grant is above whatever the old holder writes.
        """
        ...

    def close(self) -> None:
        """Close this process's connections."""
        ...


@runtime_checkable
class PostingStore(Store, Protocol):
    """One that can take a release without anybody waiting for its reply. Not every store can."""

    def post(
        self,
        call: Release,
        *,
        timeout: float,
        heard: Callable[[Released | StoreError, bool], None],
    ) -> bool:
        """Send a release; whatever the same process asks for afterwards finds it carried out.

        Args:
            call: As of :meth:`release`.
            timeout: Seconds to wait for each reply, should it have to be made again.
            heard: Called once, on any thread, unless this returns False. Its arguments: the store's
                reply, or the error of the last try; and whether an earlier try that got no reply
                may have been carried out.

        Returns:
            Whether it was sent. If not, it can only be waited for.
        """
        ...

    def collect(self, *, timeout: float) -> None:
        """Hear of each posted release that was sent before; make those again of which nothing is
        heard.

        Args:
            timeout: Seconds to wait for each reply. After three of them in vain a silent store is
                given up: who renews leases waits for this.
        """
        ...


@runtime_checkable
class StreamingStore(Store, Protocol):
    """One that tells of some renewals while it makes others. Not every store can."""

    def renewals(self, leases: Sequence[Lease], *, timeout: float) -> Iterator[Sequence[Renewal]]:
        """As :meth:`Store.renew`, some answers at a time, in the order given.

        What it raises is about those that are left.
        """
        ...
