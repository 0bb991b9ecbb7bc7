"""The interface of a store: requests, replies, its parts, and the base class Store.

Expected outcomes are return values. Every operation may raise StoreUnavailable (no reply: the
operation may or may not have taken effect) and StoreError (the store refused it). Every operation
is idempotent for its token, so a client may repeat it after a lost reply.

Requests and replies that tasks create (`Acquire`, `Granted`, `Refused`, `Release`, `ClaimRequest`)
are never changed once they are sent, but they are not frozen: creating a frozen dataclass costs
three times as much.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, StrEnum, auto
from typing import Any, ClassVar, Final, Protocol, TypeAlias

from ..errors import StoreError
from .call_queue import CallQueue, Hint
from .lease import Holder, Kind, Lease, LossReason, OperatorRelease, Phase, Record, Token
from .pauses import Pause, Pauses
from .rate import Rate


class Relation(StrEnum):
    """How the token of a refused acquire relates to what the store has; the scripts send the value.

    It is no reply to a release: see `ReleaseReply`.
    """

    DONE = "done"  # this attempt has ended, according to its completion record
    SUPERSEDED = "superseded"  # a newer copy of this message was published
    DUPLICATE = "duplicate"  # another delivery of the same attempt holds the key
    EARLIER = "earlier"  # an earlier attempt of the same task holds it
    LATER = "later"  # a later attempt of the same task holds it, or it is reserved for one
    NOT_DUE = "not_due"  # the message may not start yet
    PAUSED = "paused"  # the key, or its scope
    RATE = "rate"  # the rate of the key lets no call start yet
    OTHER = "other"  # another task, or another call of this one
    QUEUED = "queued"  # the call has a place in the queue of the key, and the store has its message
    UNQUEUED = "unqueued"  # the call must wait, and the store does not have its message
    LOST = "lost"  # the call had begun, was acknowledged early, and its lease has ended


class ReleaseReply(StrEnum):
    """The reply to a release; the scripts send the value."""

    OURS = "released"  # the token held the key, and the release was carried out
    NOT_OURS = "not_ours"  # the token did not hold the key
    DUPLICATE = "duplicate"  # another delivery of the same attempt holds it
    DONE = "done"  # another delivery has ended this attempt, according to its completion record


#: The reply to the renewal of one lease. None means renewed, UNREACHABLE that the store can't
#: answer for the lease now, and DYING that the worker parent has announced this process's end.
Renewal: TypeAlias = LossReason | None
RENEWED: Final = None

#: Called with the reply to an asynchronous release or the error of the last try, and with whether
#: an earlier try without a reply may have been carried out.
OnReply: TypeAlias = Callable[[ReleaseReply | StoreError, bool], None]

# The relations of a refusal by a pause or by the rate. The key may be free.
_WITHOUT_HOLDER: Final = (Relation.PAUSED, Relation.RATE)
#: What a login lacks that may not use keys of our names.
NO_KEYS: Final = "keys"
#: Seconds for which an operator's note on a release stays next to the key.
RELEASE_NOTE_TTL: Final = 3600.0
#: Seconds for which the arguments of a message are kept after a call or a delivery, because the
#: message may wait in its queue, or be delivered again after a kill. Brokers wait less for an
#: acknowledgement.
ARGUMENTS_FOR: Final = 7 * 86400.0


class Authorization(StrEnum):
    """The reply to a leader that asks to send a scheduled run; the script's reply is the value."""

    AUTHORIZED = "permitted"
    DEPOSED = "deposed"  # its token does not lead any more
    CHANGED = "changed"  # the entry's last run is not the expected one


class CompletionState(StrEnum):
    """The state of an attempt in its completion record; the store holds the letter."""

    WAITING = "-"  # requeued; only the newest copy counts
    FINISHING = "f"  # the task has ended, its callbacks are being sent
    DONE = "d"  # the outcome is final and stored


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimChange:
    """A change of the claim that a task holds under its name (``Token.call_id``).

    The claim of another task is never changed. An expired claim is created again only together with
    a lease: by a grant or a release.

    Attributes:
        key: The claim's key, in the shard of the lease's key.
        phase: The new phase; None: the claim is freed.
        ttl: Seconds.
        arguments: The key of the message's newest arguments, empty: none. A grant returns them. Any
            other request deletes them together with the change, because the message has ended.
    """

    key: str
    phase: Phase | None
    ttl: float = 0.0
    arguments: str = ""


#: Logged if a ClaimChange gets no reply, with the key, the error and the key again.
CLAIM_NOT_CHANGED: Final = (
    "singleton: could not change the claim %s (%s). Until it expires, equal calls count as "
    "duplicates; free it with: celery -A ... singleton release '%s'"
)


@dataclass(slots=True, kw_only=True)
class ClaimRequest:
    """A request to publish: a claim for a message that is about to be sent.

    Attributes:
        key: The claim's key.
        token: The token of the message's first delivery; only its task counts.
        holder: The caller.
        ttl: Seconds until the claim expires if the message is never processed.
        instead_of: The name of the task whose stale claim is taken over; empty: none.
        prolongs: Whether the message's own, existing claim gets ``ttl`` again.
        wants_ttl: Whether the reply must contain the ttl of an existing claim; else it may be nan.
        arguments: The key at which later calls may replace the message's arguments; empty: they
            can't be replaced. It expires with the claim, unless a call replaces them or the message
            arrives: then it is kept for `ARGUMENTS_FOR`.
        due_in: Seconds until the message may start, by the store's clock; only with ``arguments``.
    """

    key: str
    token: Token
    holder: Holder
    ttl: float
    instead_of: str = ""
    prolongs: bool = True
    wants_ttl: bool = True
    arguments: str = ""
    due_in: float = 0.0


class Replaced(Enum):
    """The reply to a call that replaces the arguments of a queued message."""

    YES = auto()
    NOT_QUEUED = auto()  # the claim is gone, or another task's, or its task runs
    FIXED = auto()  # the arguments of this message can't be replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceArguments:
    """A request to replace the arguments of the queued message that has a claim.

    Attributes:
        claim: The claim's key.
        call_id: The call that must have the claim (``Token.call_id``).
        key: The key of the message's arguments.
        arguments: The new arguments.
        ttl: Seconds.
        due_in: Seconds from now until the message may start.
        due_max: Seconds from the claim of the message until it may start in any case; None:
            there is no bound.
    """

    claim: str
    call_id: str
    key: str
    arguments: bytes
    ttl: float
    due_in: float = 0.0
    due_max: float | None = None


@dataclass(slots=True, kw_only=True)
class Acquire:
    """A request for a lease.

    Attributes:
        slots: The keys to choose from: one, unless the policy has ``limit`` above 1.
        token: The token of the delivery.
        holder: The holder's description for people.
        ttl: Seconds.
        sequence: How often this attempt was requeued. Copies older than the newest are refused.
        claim: The change of the message's claim after a grant. The claim is renewed with the lease.
        frees_claim: Whether a refusal by another task ends the message, and so frees its claim.
        refused_if_claimed: Whether the message was published next to another task's claim. While
            that claim exists, the lease is refused as if that task held it, unless the token holds
            the lease already or the lease is reserved for it.
        keeps_claim: Whether a grant leaves the claim unchanged. The grant of one of several nodes
            does not decide yet who gets the lease.
        wait_ttl: Seconds that the caller counts as waiting if another token holds the key; 0: the
            caller leaves the wait queue; None: it never joined.
        handoff: The handoff token that woke the caller. The key is reserved for it. Empty: none.
    """

    #: Whether the call has a place in the queue of its key (`core.call_queue`).
    queued: ClassVar[bool] = False
    #: Whether the request is one of the subclasses below.
    is_extended: ClassVar[bool] = False

    slots: tuple[str, ...]
    token: Token
    holder: Holder
    ttl: float
    sequence: int = 0
    claim: ClaimChange | None = None
    frees_claim: bool = False
    refused_if_claimed: bool = False
    keeps_claim: bool = False
    wait_ttl: float | None = None
    handoff: str = ""

    def undo(self, claim: ClaimChange | None = None) -> Release:
        """The release of what this request may have been granted; no run has begun."""
        return Release(keys=self.slots, token=self.token, claim=claim)

    def again(self, nonce: str) -> Acquire:
        """The request under another nonce, because a released token is never used again."""
        return replace(self, token=replace(self.token, nonce=nonce))


@dataclass(slots=True, kw_only=True)
class RatedAcquire(Acquire):
    """A request for the lease of a key that has a rate. A grant counts as a start.

    A repeated request for a lease that the token holds already counts once.
    """

    is_extended: ClassVar = True

    rate: Rate


def rated(request: Acquire, rate: Rate) -> RatedAcquire:
    """``request``, for a key that has this rate."""
    given = {one.name: getattr(request, one.name) for one in fields(request)}
    return RatedAcquire(**given, rate=rate)


@dataclass(slots=True, kw_only=True)
class QueuedAcquire(Acquire):
    """A request for the lease of a call of a queue.

    A refusal has one of three more relations: QUEUED, UNQUEUED or LOST. A ``claim`` has no
    ``arguments``: the message of a call that waits is in the store.

    Attributes:
        late: Whether the call's messages are acknowledged late.
        most_begins: How often a run may begin by one message. None means without a limit.
        asked: The nonces of earlier requests that had no reply. This delivery sent them, or one
            that was requeued as this one. No run began under a grant to them.
        rate: The rate of the key; None: it has none.
        limit: How many calls may run at a time; None: as many as there are ``slots``.
    """

    queued: ClassVar = True
    is_extended: ClassVar = True

    rate: Rate | None = None
    late: bool = False
    most_begins: int | None = None
    asked: tuple[str, ...] = ()
    limit: int | None = None

    def undo(self, claim: ClaimChange | None = None) -> Release:
        """As that of `Acquire`; the call keeps its place."""
        return QueuedRelease(keys=self.slots, token=self.token, claim=claim, has_begun=False)

    def again(self, nonce: str) -> Acquire:
        """As that of `Acquire`; the request names the former nonce."""
        token = replace(self.token, nonce=nonce)
        return replace(self, token=token, asked=(*self.asked, self.token.nonce))


def rate_of(request: Acquire) -> Rate | None:
    """The rate of the key that is asked for; None: it has none."""
    return request.rate if isinstance(request, (RatedAcquire, QueuedAcquire)) else None


@dataclass(slots=True, kw_only=True)
class Granted:
    """The reply to an acquire: a lease.

    Attributes:
        key: The chosen slot.
        fence: The fencing token; None if the store, or a ``limit`` above 1, gives none.
        ttl: Seconds, if the store keeps the lease shorter than requested; else None.
    """

    key: str
    fence: int | None
    ttl: float | None = None


@dataclass(slots=True, kw_only=True)
class GrantedArguments(Granted):
    """The reply to an acquire whose claim names ``arguments``.

    Attributes:
        arguments: The newest arguments; empty: no call has replaced those of the message; None: the
            store does not have them.
    """

    arguments: bytes | None


@dataclass(slots=True, kw_only=True)
class GrantedInTurn(Granted):
    """The reply to the acquire of a call of a queue, if another call may begin now.

    Attributes:
        following: That call. Its message is to be published.
    """

    following: Hint


@dataclass(slots=True, kw_only=True)
class Refused:
    """The reply to an acquire that was not granted.

    Attributes:
        relation: How the token relates to what the store has.
        record: The record of the key, if the store could read it.
        others: The records of the other slots, if the request named several and other tasks hold
            all.
            With more than eight slots a store may leave out all but the leases that expire first:
            the lease of a dead process is not renewed, so it becomes one of them.
        due_in: Seconds until the message may start; set only if the relation is NOT_DUE or RATE.
        hint: The message of this call, which has a place in the queue of the key: it is to be
            published for that time. None: the call has no place. Set only if the relation is RATE.
        pause: What keeps the call from starting; set only if the relation is PAUSED.
    """

    relation: Relation
    record: Record | None = None
    others: tuple[Record, ...] = ()
    due_in: float = field(init=False, repr=False, compare=False)
    hint: Hint | None = field(init=False, repr=False, compare=False)
    pause: Pause = field(init=False, repr=False, compare=False)

    @property
    def retry_after(self) -> float | None:
        """Seconds until the key's pause ends, or its rate lets a call start. None if unknown."""
        if self.relation is Relation.RATE:
            return self.due_in
        return self.pause.left if self.relation is Relation.PAUSED else None

    @property
    def holder(self) -> Holder:
        """The holder, as far as the store could read it."""
        return self.record.holder if self.record else Holder(task_id="an unknown holder")

    @property
    def known_holder(self) -> Holder:
        """As :attr:`holder`; empty if no holder has refused the call."""
        return Holder() if self.relation in _WITHOUT_HOLDER else self.holder

    def holder_for_error(self) -> dict[str, Any]:
        """The :attr:`known_holder` as plain data; an empty dict if there is none."""
        return {} if self.relation in _WITHOUT_HOLDER else self.holder.for_error()

    def explain(self, key: str, limit: int) -> str:
        """Why ``key`` was refused, for an error: a clause.

        Args:
            key: The lock key.
            limit: The number of its slots.
        """
        if self.relation is Relation.PAUSED:
            return f"{key!r} is {self.pause}"
        if self.relation is Relation.RATE:
            return f"the rate of {key!r} lets its next call start in {self.due_in:.3g} s"
        is_claim = self.record is not None and self.record.kind is Kind.CLAIM
        if limit == 1 or is_claim or self.relation is not Relation.OTHER:
            return f"{key!r} is held by {self.holder}"
        return f"all {limit} slots of {key!r} are held, one of them by {self.holder}"


@dataclass(slots=True, kw_only=True)
class Release:
    """A request to delete the key that a token holds, or to turn it into another kind.

    Attributes:
        keys: The lease's key; all slots of a call in a queue, or if the outcome of the acquire is
            unknown.
        token: The token that must hold the key.
        become: The new kind of the key; None: the key is deleted.
        become_ttl: Seconds that the new kind stays.
        next_token: The token that a reservation is for.
        completion: The new completion record of the token's attempt, unless a duplicate delivery
            holds the key or has finished.
        completion_ttl: Seconds.
        claim: The change of the message's claim, unless a duplicate delivery has the key. If the
            key was lost or is dying, the claim can only be freed.
    """

    #: Whether the call has a place in the queue of its key (`core.call_queue`).
    queued: ClassVar[bool] = False

    keys: tuple[str, ...]
    token: Token
    become: Kind | None = None
    become_ttl: float = 0.0
    next_token: Token | None = None
    completion: CompletionState | None = None
    completion_ttl: float = 0.0
    claim: ClaimChange | None = None

    @classmethod
    def of(
        cls, lease: Lease, claim: ClaimChange | None = None, *, min_hold: float = 0.0
    ) -> Release:
        """Free the key, or keep it in cooldown until ``min_hold`` seconds after its acquisition."""
        release = cls(keys=(lease.key,), token=lease.token, claim=claim)
        if min_hold and (left := min_hold - (lease.clock.now() - lease.acquired_at)) > 0:
            release.become, release.become_ttl = Kind.COOLING, left
        return release

    def reserve(self, seconds: float) -> None:
        """Reserve the key for the next attempt instead, but not shorter than its cooldown."""
        self.become, self.become_ttl = Kind.RESERVED, max(seconds, self.become_ttl)
        self.next_token = self.token.next_attempt()


@dataclass(slots=True, kw_only=True)
class QueuedRelease(Release):
    """A release of the lease of a call of a queue.

    Attributes:
        ended_ttl: Seconds for which the store remembers that the call has ended; None: it goes on.
        due_in: If it goes on, seconds until its next message is due.
        has_begun: Whether a run has begun under the lease.
        may_return_from: The retries of the first attempt that may still come to this key though the
            call does not go on; None: none may, the call has ended.
    """

    queued: ClassVar = True

    ended_ttl: float | None = None
    due_in: float = 0.0
    has_begun: bool = True
    may_return_from: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A request to raise the completion record of an attempt.

    Attributes:
        key: The lock key.
        token: The token of the delivery.
        state: The new state, unless a higher one is stored.
        sequence: How often the attempt was requeued.
        ttl: Seconds.
        claim: The change of the message's claim, if the claim stands and the attempt isn't done.
    """

    key: str
    token: Token
    state: CompletionState
    ttl: float
    sequence: int = 0
    claim: ClaimChange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestCall:
    """A call in the order in which the calls for one key were made.

    Attributes:
        call_id: The call (``Token.call_id``).
        called_at: Seconds since the epoch, on the caller's clock; None: to be set to the time at
            which the call is noted.
    """

    call_id: str
    called_at: float | None

    @property
    def task_id(self) -> str:
        """The id of the call's task."""
        return Token.task_id_of(self.call_id)

    def is_newer_than(self, other: NewestCall) -> bool:
        """Whether this is another call, made later. Of two at the same time, one is the newer."""
        if self.call_id == other.call_id or self.called_at is None or other.called_at is None:
            return False
        return (self.called_at, self.call_id) > (other.called_at, other.call_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorizeRun:
    """A leader's request to send one entry. The same step replaces the entry's last run.

    Attributes:
        leader: The key of the leader's lease.
        token: The leader's token.
        entry: The key of the entry's last run, in the same shard.
        expected: The last run that must be stored; None: none must be stored.
        new: The last run to store. It is unique, so that a repeated request is recognized.
        ttl: Seconds.
    """

    leader: str
    token: Token
    entry: str
    expected: str | None
    new: str
    ttl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of a store. A worker checks them against each task's policy when it starts.

    Attributes:
        fence: Whether grants have fencing tokens.
        name: The store's name in messages.
        trusted: The share of a ttl that a reply guarantees, counted from the sending of the
            request. Below 1 if the store's expiry may count from an earlier heartbeat.
        min_ttl: Seconds; a shorter ttl is refused.
        max_limit: The largest ``limit`` that one decision can examine; None: any.
        renewal_batch: How many leases the heartbeat passes to one call of `Leases.renew`;
            None: all. The replies of one call take effect before the next call.
        renews_for_others: Whether a process can renew, by key and token alone, a lease that was
            granted to another process of its host. The parent heartbeat needs this. It is not
            possible if a lease ends with its holder's connection.
        rates: Whether an acquire can count the starts of a key (``rate``).
        usable_before_fork: Whether a process may use the store and fork later. It may not if the
            client starts threads.
    """

    fence: bool
    name: str
    trusted: float = 1.0
    min_ttl: float = 0.0
    max_limit: int | None = None
    renewal_batch: int | None = None
    renews_for_others: bool = False
    rates: bool = False
    usable_before_fork: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The remains of a lease in the store after its end.

    Attributes:
        record: The content of the lease's key now; None: the key does not exist.
        fence: The last fence granted in the key's shard, 0 if there is none; None if the fences of
            this store can't prove a loss.
        now: Seconds since the epoch, on the clock whose microseconds are the fences.
    """

    record: Record | None
    fence: int | None = None
    now: float = float("nan")


class Ticket(Protocol):
    """The ticket of one client in the wait queue for a key. Used by one thread at a time."""

    def wait(self, seconds: float) -> str | None:
        """Block until woken, at most ``seconds``.

        Returns:
            The handoff token for the next acquire. It's empty if the client was not woken, and None
            if the store does not wake this client any more and the ticket is of no further use.
        """

    def fileno(self) -> int | None:
        """The descriptor that becomes readable when the client is woken, for coroutines.

        ``wait(0)`` opens it, and reads the reply. None: there is none at present.
        """

    def leave(self, *, counted: bool) -> None:
        """Leave the wait queue; never raises.

        Args:
            counted: Whether the store still counts the client as waiting.
        """


class ConnectionWatch(Protocol):
    """Notices that a connection to the store ends. Any thread may call the methods."""

    def opened(self, sock: Any, /) -> None:
        """A connection has got its first reply. ``sock``: its socket, with the method fileno()."""

    def closing(self, sock: Any, /) -> None:
        """This process is about to close a connection."""

    def ended(self) -> None:
        """A connection without a socket has ended, or a reply came from another server."""


class Leases(ABC):
    """The leases of a store, and the completion records of their attempts."""

    @abstractmethod
    def acquire(self, request: Acquire, /, *, timeout: float) -> Granted | Refused:
        """Take a free slot, or return a record that holds one. Idempotent for its own token."""

    @abstractmethod
    def renew(self, leases: Sequence[Lease], /, *, timeout: float) -> list[Renewal]:
        """Prolong each lease to its ttl if its token still holds the key.

        The claim of a lease (``claim_key``) is prolonged too, if the lease's task still holds it.
        Its ttl is never shortened. The claim of a lease that was not renewed is not changed: the
        operation that ended the lease has set the claim's ttl.

        Returns:
            One reply per lease, in the same order.
        """

    @abstractmethod
    def release(self, request: Release, /, *, timeout: float) -> ReleaseReply:
        """Release the key that the token holds; never change the key of another token."""

    @abstractmethod
    def mark(self, request: Mark, /, *, timeout: float) -> None:
        """Raise the completion record of the token's attempt.

        Neither its state nor its sequence goes back.
        """

    @abstractmethod
    def trace(self, key: str, /, *, timeout: float) -> Trace:
        """The remains of a lease on ``key`` that a release did not find."""

    @abstractmethod
    def inspect(self, key: str, /) -> Record | None:
        """The record of one key, also of a claim; None if the key is free."""

    def missing_rights(self, key: str, /) -> list[str]:
        """The commands that each lease needs and the login lacks; for the doctor.

        Args:
            key: A key that does not exist.

        Returns:
            The commands; ``NO_KEYS`` among them if the login may not use keys of such a name.
        """
        return []


class Claims(ABC):
    """The claims of messages that were published, in a store."""

    @abstractmethod
    def take(self, request: ClaimRequest, /, *, timeout: float) -> Record | None:
        """Claim ``request.key`` for a message; return the record of the claim that prevents it.

        The task's own claim does not prevent it: the phase stays, the ttl is never shortened, and
        is prolonged only if ``request.prolongs``.

        Raises:
            StoreError: The key holds something that is no record.
        """

    @abstractmethod
    def change(self, token: Token, change: ClaimChange, /, *, timeout: float) -> None:
        """Change a claim without a lease. The claim of a running task is left to its lease.

        The exception is a ``change`` to the phase RUNNING. A missing claim is not created: it may
        have been freed, and no later operation would free it again.
        """


class AsyncReleases(ABC):
    """Releases without waiting for the reply."""

    @abstractmethod
    def send(self, request: Release, /, *, timeout: float, on_reply: OnReply) -> bool:
        """Send a release. A later request of the same process finds it carried out.

        Args:
            request: See `Leases.release`.
            timeout: Seconds to wait for each reply if the release has to be sent again.
            on_reply: Called on any thread, unless this method returns False: once, or with the
                error of the last try, and again if a later request sends the release with success.

        Returns:
            Whether the release was sent. If not, the caller uses `Leases.release`.
        """

    @abstractmethod
    def drain(self, *, timeout: float) -> None:
        """Read the replies to pending releases; send again each release that got no reply.

        Args:
            timeout: Seconds to wait for each reply. The method gives up after three missing
                replies, because it runs on the heartbeat's thread and delays renewals.
        """


class WaitQueue(ABC):
    """The clients that wait for each key. A release wakes the one that has waited longest."""

    @abstractmethod
    def ticket(self, key: str, nonce: str, /, *, timeout: float) -> Ticket | None:
        """A ticket in the wait queue for ``key``; None if the store wakes no clients now.

        Sends nothing. The store wakes the client that has waited longest when the key is released,
        and reserves the key for it for a moment. A wake-up may be lost at any time, so a waiting
        client still polls, though less often.

        Args:
            key: The first of the slots that are requested.
            nonce: The nonce of the requesting token.
            timeout: Seconds to wait for a connection, when one is needed.
        """

    @abstractmethod
    def lengths(self, keys: Sequence[str], /) -> list[int]:
        """For operators: the number of clients that wait for each of ``keys``."""

    def missing_rights(self, key: str, /) -> list[str]:
        """The commands that this part needs and the login lacks. ``key`` is not held."""
        return []


class NewestCalls(ABC):
    """The newest call for each key, for ``on_conflict="cancel_running"``."""

    @abstractmethod
    def register(
        self, key: str, call: NewestCall, /, *, ttl: float, timeout: float, reservation: str = ""
    ) -> NewestCall:
        """Register ``call`` as the newest of ``key`` for ``ttl`` seconds; return the newest call.

        A newer call that is registered stays. A time of the call in the future becomes now. For the
        newest call, the reservation of ``key`` with the token ``reservation`` is deleted, and a
        client that waits for ``key`` is woken.
        """

    @abstractmethod
    def of(self, keys: Sequence[str], /, *, timeout: float) -> list[NewestCall | None]:
        """The newest call for each of ``keys``, or None; read in one round trip."""


class QueuedArguments(ABC):
    """The arguments of queued messages, which later calls may replace (``debounce``)."""

    @abstractmethod
    def replace(self, request: ReplaceArguments, /, *, timeout: float) -> Replaced:
        """Replace the arguments of a queued message; the grant of its lease returns the last ones.

        In one step with the check of the claim: after that grant, the reply is NOT_QUEUED.
        """


class Schedule(ABC):
    """The last runs of schedule entries, which the elected Beat replaces."""

    @abstractmethod
    def authorize(self, request: AuthorizeRun, /, *, timeout: float) -> Authorization:
        """Replace an entry's last run if the leader's token and ``expected`` are stored."""

    @abstractmethod
    def last_runs(self, keys: Sequence[str], /, *, timeout: float) -> list[str | None]:
        """The last run at each of ``keys``, or None; read in one round trip."""


class Operators(ABC):
    """What people see and do: the command line, the dashboard and the doctor.

    Attributes:
        progress: Called with what a long search has done so far, in words, unless it's None.
    """

    progress: Callable[[str], None] | None = None

    @abstractmethod
    def scan(self, pattern: str, /) -> Iterator[Record]:
        """All records whose keys match the glob ``pattern``, sorted by key; not a snapshot."""

    @abstractmethod
    def free(self, key: str, token: str | None, /, by: OperatorRelease | None = None) -> bool:
        """Delete ``key``, of any kind, if ``token`` holds it (None: any token).

        Raises the shard's fence, so that a later grant is above the writes of the old holder.
        With ``by``, the text ``<token> <by as JSON>`` is stored at `Keyspace.release_note` for
        `RELEASE_NOTE_TTL`.
        """

    @abstractmethod
    def release_notes(self, keys: Sequence[str], /, *, timeout: float) -> list[str | None]:
        """The notes of :meth:`free` at each of ``keys``, or None; read in one round trip."""

    @abstractmethod
    def texts(self, pattern: str, /) -> Iterator[tuple[str, str, float]]:
        """List the keys that match the glob ``pattern``, sorted: completion records and notes.

        Each key comes with its text and its ttl in seconds. A record is ``<state> <sequence>
        <nonce>``.
        """

    def problems(self, key: str, /) -> list[str]:
        """Reasons why apps would not see each other's locks with ``key``'s prefix; may be empty."""
        return []

    def info(self, section: str, /) -> dict[str, str]:
        """One section of the server's INFO; empty if there is none or if the server denies it."""
        return {}

    def size(self) -> int | None:
        """The number of keys that a search passes, of all programs; None: unknown, or only ours."""
        return None

    def foreign_keys(self, pattern: str, /) -> Iterator[tuple[str, str]]:
        """Keys that match ``pattern`` but were not written by this library, each with a reason."""
        return iter(())

    def survey(
        self,
        pattern: str,
        report: Callable[[str, str], None],
        /,
        texts: Callable[[str, str], None] | None = None,
    ) -> Iterator[Record]:
        """As :meth:`scan`, with all else that is found on the way: one search instead of three.

        Args:
            pattern: As for :meth:`scan`.
            report: Called with each of the :meth:`foreign_keys`.
            texts: Called with the key and the text of each record and note (see :meth:`texts`), and
                perhaps of other keys.
        """
        for key, reason in self.foreign_keys(pattern):
            report(key, reason)
        yield from self.scan(pattern)
        if texts is not None:
            for key, text, _ in self.texts(pattern):
                texts(key, text)


class Store:
    """A store: leases and claims, and the parts that not every store has.

    Subclass it to add a store. A worker refuses the options whose part is missing.

    Attributes:
        capabilities: What the leases of this store can do.
        leases: Required.
        claims: Required.
        operators: None: the command line, the dashboard and `explain` can't show the locks.
        schedule: None: Beat can't be elected.
        wait_queue: None: clients that wait for a key poll.
        call_queue: None: no task can have ``on_conflict="queue"``.
        newest_calls: None: no task can have ``on_conflict="cancel_running"``.
        arguments: None: no task can have ``on_duplicate="replace"``.
        async_releases: None: each release waits for its reply.
        pauses: None: no key and no scope can be paused.
    """

    capabilities: Capabilities
    leases: Leases
    claims: Claims
    operators: Operators | None = None
    schedule: Schedule | None = None
    wait_queue: WaitQueue | None = None
    call_queue: CallQueue | None = None
    newest_calls: NewestCalls | None = None
    arguments: QueuedArguments | None = None
    async_releases: AsyncReleases | None = None
    pauses: Pauses | None = None

    def watch_connections(self, watch: ConnectionWatch, /) -> None:
        """Report each connection of this process to ``watch``, from now on.

        A server that has lost its data has also lost its connections, so the heartbeat renews all
        leases soon when a connection has ended. Without reports, it finds the loss of a lease at
        the next renewal.
        """

    def close(self) -> None:
        """Close this process's connections."""


def operators_of(store: Store) -> Operators:
    """The part for operators.

    Raises:
        StoreError: The store has none.
    """
    if store.operators is None:
        raise StoreError(f"the store {store.capabilities.name!r} can't list or free its keys")
    return store.operators
