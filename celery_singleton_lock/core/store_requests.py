"""What a store is asked, and what it replies: the requests, the replies, and their values.

Requests and replies that tasks create (`Acquire`, `Granted`, `Refused`, `Release`, `ClaimRequest`)
are never changed once they are sent, but they are not frozen: creating a frozen dataclass costs
three times as much.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum, StrEnum, auto
from typing import Any, ClassVar, Final, TypeAlias

from .call_queue import Hint
from .lease import Holder, Kind, Lease, LossReason, Phase, Record, Token
from .pauses import Pause
from .rate import Rate


class Relation(StrEnum):
    """How the token of a refused acquire relates to what the store has; the scripts send the value.

    A release has replies of its own: see `ReleaseReply`.
    """

    DONE = "done"  #: this attempt has ended, according to its completion record
    SUPERSEDED = "superseded"  #: a newer copy of this message was published
    DUPLICATE = "duplicate"  #: another delivery of the same attempt holds the key
    EARLIER = "earlier"  #: an earlier attempt of the same task holds it
    LATER = "later"  #: a later attempt of the same task holds it, or it is reserved for one
    NOT_DUE = "not_due"  #: the message may not start yet
    PAUSED = "paused"  #: the key, or its scope
    RATE = "rate"  #: the rate of the key lets no call start yet
    OTHER = "other"  #: another task, or another call of this one
    QUEUED = "queued"  #: the call is in the queue of the key, and the store has its message
    UNQUEUED = "unqueued"  #: the call must wait, and the store does not have its message
    LOST = "lost"  #: the call had begun, was acknowledged early, and its lease has ended


class ReleaseReply(StrEnum):
    """The reply to a release; the scripts send the value."""

    OURS = "released"  #: the token held the key, and the release was carried out
    NOT_OURS = "not_ours"  #: the token did not hold the key
    DUPLICATE = "duplicate"  #: another delivery of the same attempt holds it
    DONE = "done"  #: another delivery has ended this attempt, according to its completion record


#: The reply to the renewal of one lease. None means renewed, UNREACHABLE that the store can't
#: answer for the lease now, and DYING that the worker parent has announced this process's end.
Renewal: TypeAlias = LossReason | None
RENEWED: Final = None

# The relations of a refusal by a pause or by the rate. The key may be free.
_WITHOUT_HOLDER: Final = (Relation.PAUSED, Relation.RATE)
#: Seconds for which the arguments of a message are kept after a call or a delivery, because the
#: message may wait in its queue, or be delivered again after a kill. Brokers wait less for an
#: acknowledgement.
ARGUMENTS_FOR: Final = 7 * 86400.0


class Authorization(StrEnum):
    """The reply to a leader that asks to send a scheduled run; the script's reply is the value."""

    AUTHORIZED = "permitted"  #: the leader sends the run
    DEPOSED = "deposed"  #: its token does not lead any more
    CHANGED = "changed"  #: the entry's last run is not the expected one


class CompletionState(StrEnum):
    """The state of an attempt in its completion record; the store holds the letter."""

    WAITING = "-"  #: requeued; only the newest copy counts
    FINISHING = "f"  #: the task has ended, its callbacks are being sent
    DONE = "d"  #: the outcome is final and stored


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimChange:
    """A change of the claim that a task holds under its name (``Token.call_id``).

    The claim of another task is never changed. An expired claim is created again only together with
    a lease: by a grant or a release.

    Attributes:
        key: The claim's key, in the shard of the lease's key.
        phase: The new phase. None frees the claim.
        ttl: The new ttl in seconds.
        arguments: The key of the message's newest arguments. It's empty if there is none. A grant
            returns the arguments. Any other request deletes them together with the change, because
            the message has ended.
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
        token: The token of the message's first delivery. Only the task in it counts.
        holder: The caller.
        ttl: Seconds until the claim expires if the message is never processed.
        instead_of: The name of the task whose stale claim is taken over. It's empty if none is.
        prolongs: Whether the message's own, existing claim gets ``ttl`` again.
        wants_ttl: Whether the reply must contain the ttl of an existing claim. If not, it may be
            nan.
        arguments: The key at which later calls may replace the message's arguments. It's empty if
            they can't be replaced. The key expires with the claim. If a call replaces the arguments
            or the message arrives, it's kept for `ARGUMENTS_FOR` seconds instead.
        due_in: Seconds until the message may start, by the store's clock. Set it only with
            ``arguments``.
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

    YES = auto()  #: the arguments were replaced
    NOT_QUEUED = auto()  #: the claim is gone, or another task's, or its task runs
    FIXED = auto()  #: the arguments of this message can't be replaced


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
        due_max: Seconds from the claim of the message until it may start in any case. None means
            that there is no bound.
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
        keeps_claim: Whether a grant leaves the claim unchanged, because the grant of one of several
            nodes does not decide yet who gets the lease.
        wait_ttl: For how many seconds the caller counts as waiting if another token holds the key.
            0 means that it leaves the wait queue, and None that it never joined.
        handoff: The handoff token that woke the caller, for which the key is reserved. It's empty
            if none did.
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

    A refusal may also have the relation QUEUED, UNQUEUED or LOST. A ``claim`` has no
    ``arguments``: the message of a call that waits is in the store.

    Attributes:
        late: Whether the call's messages are acknowledged late.
        most_begins: How many runs one message may begin. None means that there is no limit.
        asked: The nonces of earlier requests that had no reply, from this delivery or from one that
            was requeued as this one. No run began under a grant to these nonces.
        rate: The rate of the key, or None if it has none.
        limit: How many calls may run at a time. None means as many as there are ``slots``.
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
    """Return the rate of the requested key, or None if it has none."""
    return request.rate if isinstance(request, (RatedAcquire, QueuedAcquire)) else None


@dataclass(slots=True, kw_only=True)
class Granted:
    """The reply to an acquire: a lease.

    Attributes:
        key: The chosen slot.
        fence: The fencing token. It's None if the store, or a ``limit`` above 1, gives none.
        ttl: Seconds, if the store keeps the lease shorter than requested; else None.
    """

    key: str
    fence: int | None
    ttl: float | None = None


@dataclass(slots=True, kw_only=True)
class GrantedArguments(Granted):
    """The reply to an acquire whose claim names ``arguments``.

    Attributes:
        arguments: The newest arguments. They're empty if no call has replaced those of the message,
            and None if the store doesn't have them.
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
            them all. With more than eight slots, a store may give only the leases that expire
            first. The lease of a dead process becomes one of these, because it is not renewed.
        due_in: Seconds until the message may start; set only if the relation is NOT_DUE or RATE.
        hint: The message of this call, to be published for the time that ``due_in`` says. None if
            the call isn't in the queue of the key. Set only if the relation is RATE.
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
        """The :attr:`holder`, which is empty if no holder has refused the call."""
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
        keys: The lease's key. If the call is in a queue, or the outcome of the acquire is unknown,
            all slots.
        token: The token that must hold the key.
        become: The new kind of the key. None deletes the key.
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
        ended_ttl: For how many seconds the store remembers that the call has ended. None means that
            the call goes on.
        due_in: If it goes on, seconds until its next message is due.
        has_begun: Whether a run has begun under the lease.
        may_return_from: The retry count of the earliest attempt that may still arrive at this key
            although the call doesn't go on. None means that the call has ended.
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
        called_at: The time of the call in seconds since the epoch, on the caller's clock. None is
            replaced by the time at which the call is registered.
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
        expected: The last run that must be stored. None means that none must be stored.
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
class Trace:
    """The remains of a lease in the store after its end.

    Attributes:
        record: The content of the lease's key now, or None if the key doesn't exist.
        fence: The last fence granted in the key's shard. It's 0 if there is none, and None if the
            fences of this store can't prove a loss.
        now: Seconds since the epoch, on the clock whose time in microseconds is the fence.
    """

    record: Record | None
    fence: int | None = None
    now: float = float("nan")
