"""The requests to a store, its replies, and the values in them.

The requests and replies that tasks create (`Acquire`, `Granted`, `Refused`, `Release`,
`ClaimRequest`) are never changed once they are sent. They aren't frozen, because creating a frozen
dataclass costs three times as much.
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
    """How the token of a refused acquire relates to what the store has.

    The Redis scripts send the value. A release has its own replies (see `ReleaseReply`).
    """

    DONE = "done"  #: This attempt has ended, according to its completion record.
    SUPERSEDED = "superseded"  #: A newer copy of this message was published.
    DUPLICATE = "duplicate"  #: Another delivery of the same attempt holds the key.
    EARLIER = "earlier"  #: An earlier attempt of the same task holds the key.
    LATER = "later"  #: A later attempt of the same task holds the key, or it's reserved for one.
    NOT_DUE = "not_due"  #: The message may not start yet.
    PAUSED = "paused"  #: The key or its scope is paused.
    RATE = "rate"  #: The rate of the key doesn't let a call start yet.
    OTHER = "other"  #: Another task, or another call of this task, holds the key or the claim.
    QUEUED = "queued"  #: The call is in the queue of the key, and the store has its message.
    UNQUEUED = "unqueued"  #: The call must wait, and the store doesn't have its message.
    LOST = "lost"  #: The call had begun, its lease has ended, and it may not begin again.


class ReleaseReply(StrEnum):
    """The reply to a release. The Redis scripts send the value."""

    OURS = "released"  #: The token held the key, and the release was carried out.
    NOT_OURS = "not_ours"  #: The token didn't hold the key.
    DUPLICATE = "duplicate"  #: Another delivery of the same attempt holds the key.
    DONE = "done"  #: Another delivery has ended this attempt, according to its completion record.


#: The reply to the renewal of one lease. None means that the lease was renewed. UNREACHABLE means
#: that the store can't answer for the lease now. DYING means that the worker parent has announced
#: the end of this process.
Renewal: TypeAlias = LossReason | None
RENEWED: Final = None

# The relations of a refusal by a pause or by the rate. The key may be free.
_WITHOUT_HOLDER: Final = (Relation.PAUSED, Relation.RATE)
#: Seconds for which the arguments of a message are kept after a call or a delivery, because the
#: message may wait in its queue, or be delivered again after a kill. Brokers wait less for an
#: acknowledgement.
ARGUMENTS_FOR: Final = 7 * 86400.0


class Authorization(StrEnum):
    """The reply to a leader that asks to send a scheduled run.

    The Redis script sends the value.
    """

    AUTHORIZED = "permitted"  #: The leader sends the run.
    DEPOSED = "deposed"  #: The token isn't the leader's any more.
    CHANGED = "changed"  #: The entry's last run isn't the expected one.


class CompletionState(StrEnum):
    """The state of an attempt in its completion record. The store keeps the letter."""

    WAITING = "-"  #: The attempt was requeued. Only its newest copy counts.
    FINISHING = "f"  #: The task has ended, and its callbacks are being sent.
    DONE = "d"  #: The outcome is final and stored.


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimChange:
    """A change of the claim that a task holds under its name (``Token.call_id``).

    The claim of another task is never changed. Only the grant or the release of a lease creates an
    expired claim again.

    Attributes:
        key: The claim's key, in the shard of the lease's key.
        phase: The new phase. None frees the claim.
        ttl: The new ttl in seconds.
        arguments: The key of the message's newest arguments. It's empty if there are none. A grant
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
    """A request to claim a key for a message that is about to be sent.

    Attributes:
        key: The claim's key.
        token: The token of the message's first delivery. Only the task in it counts.
        holder: The caller.
        ttl: Seconds until the claim expires if the message is never processed.
        instead_of: The name of the task whose stale claim this request takes over. It's empty if
            there is none.
        prolongs: Whether the message's own, existing claim gets ``ttl`` again.
        wants_ttl: Whether the reply must contain the ttl of an existing claim. If False, the ttl
            may be nan.
        arguments: The key at which later calls may replace the message's arguments. It's empty if
            they can't be replaced. The key expires with the claim. If a call replaces the arguments
            or the message arrives, the key is kept for `ARGUMENTS_FOR` seconds instead.
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

    YES = auto()  #: The arguments were replaced.
    NOT_QUEUED = auto()  #: The claim is gone, another task has it, or its task runs.
    FIXED = auto()  #: The arguments of this message can't be replaced.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceArguments:
    """A request to replace the arguments of the queued message that has a claim.

    Attributes:
        claim: The claim's key.
        call_id: The call that must have the claim (``Token.call_id``).
        key: The key of the message's arguments.
        arguments: The new arguments.
        ttl: How long the store keeps the arguments, in seconds.
        due_in: Seconds from now until the message may start.
        due_max: Seconds from the claim of the message until it may start in any case. None means
            that there is no maximum.
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
        slots: The keys to choose from. There is one, unless the task has a ``limit`` above 1.
        token: The token of the delivery.
        holder: The holder's description for people.
        ttl: The ttl of the lease in seconds.
        sequence: How often this attempt was requeued. Copies older than the newest are refused.
        claim: The change of the message's claim after a grant. The claim is renewed with the lease.
        frees_claim: Whether the message ends if another task's lease or claim refuses this request.
            Its claim is then freed.
        refused_if_claimed: Whether the message was published next to another task's claim. While
            that claim exists, the lease is refused as if that task held it. It isn't refused if the
            token already holds the lease, or if the lease is reserved for it.
        keeps_claim: Whether a grant leaves the claim unchanged. With several nodes, the grant of
            one node doesn't decide yet who gets the lease.
        wait_ttl: How long the caller counts as waiting if another token holds the key, in seconds.
            0 means that it leaves the wait queue. None means that it never joined.
        handoff: The handoff token that woke the caller. The key is reserved for this token. It's
            empty if none woke the caller.
    """

    #: Whether the call belongs to the queue of its key (`core.call_queue`).
    queued: ClassVar[bool] = False
    #: Whether the request is a `RatedAcquire` or a `QueuedAcquire`.
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
        """Return a release of what this request may have been granted. No run has begun."""
        return Release(keys=self.slots, token=self.token, claim=claim)

    def again(self, nonce: str) -> Acquire:
        """Return the request under another nonce. A released token is never used again."""
        return replace(self, token=replace(self.token, nonce=nonce))


@dataclass(slots=True, kw_only=True)
class RatedAcquire(Acquire):
    """A request for the lease of a key that has a rate. A grant counts as a start.

    A repeated request for a lease that the token already holds doesn't count again.
    """

    is_extended: ClassVar = True

    rate: Rate


def rated(request: Acquire, rate: Rate) -> RatedAcquire:
    """Return ``request`` for a key that has this rate."""
    given = {one.name: getattr(request, one.name) for one in fields(request)}
    return RatedAcquire(**given, rate=rate)


@dataclass(slots=True, kw_only=True)
class QueuedAcquire(Acquire):
    """A request for the lease of a call that belongs to a queue.

    A refusal may also have the relation QUEUED, UNQUEUED or LOST. A ``claim`` has no ``arguments``,
    because the store has the message of a call that waits.

    Attributes:
        late: Whether the call's messages are acknowledged late.
        most_begins: How many runs one message may begin. None means that there is no limit.
        asked: The nonces of earlier requests that got no reply. They come from this delivery, or
            from one that was requeued as this one. No run began under a grant to these nonces.
        rate: The rate of the key. None if it has none.
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
        """Return a release, as `Acquire.undo` does. The call stays in the queue."""
        return QueuedRelease(keys=self.slots, token=self.token, claim=claim, has_begun=False)

    def again(self, nonce: str) -> Acquire:
        """Return the request under another nonce, as `Acquire.again` does.

        The new request has the former nonce in ``asked``.
        """
        token = replace(self.token, nonce=nonce)
        return replace(self, token=token, asked=(*self.asked, self.token.nonce))


def rate_of(request: Acquire) -> Rate | None:
    """Return the rate of the requested key, or None if it has none."""
    return request.rate if isinstance(request, (RatedAcquire, QueuedAcquire)) else None


@dataclass(slots=True, kw_only=True)
class Granted:
    """The reply to an acquire that was granted.

    Attributes:
        key: The chosen slot.
        fence: The fencing token. None if the store gives none, or if ``limit`` is above 1.
        ttl: The ttl in seconds if the store keeps the lease shorter than requested. Otherwise None.
    """

    key: str
    fence: int | None
    ttl: float | None = None


@dataclass(slots=True, kw_only=True)
class GrantedArguments(Granted):
    """The reply to an acquire whose claim names ``arguments``.

    Attributes:
        arguments: The newest arguments. They're empty if no call has replaced the arguments of the
            message. None if the store doesn't have them.
    """

    arguments: bytes | None


@dataclass(slots=True, kw_only=True)
class GrantedInTurn(Granted):
    """The reply to the acquire of a call in a queue, if another call may begin now.

    Attributes:
        following: The other call. The client publishes its message.
    """

    following: Hint


@dataclass(slots=True, kw_only=True)
class Refused:
    """The reply to an acquire that was not granted.

    Attributes:
        relation: How the token relates to what the store has.
        record: The record of the key, if the store could read it.
        others: The records of the other slots, if the request named several slots and other tasks
            hold them all. With more than eight slots, a store may return only the leases that
            expire first. The lease of a dead process is soon among them, because nobody renews
            it.
        due_in: Seconds until the message may start. It's set only if the relation is NOT_DUE or
            RATE.
        hint: The message of this call, which the client publishes with a delay of ``due_in``
            seconds. None if the call isn't in the queue of the key. It's set only if the relation
            is RATE.
        pause: The pause that keeps the call from starting. It's set only if the relation is PAUSED.
    """

    relation: Relation
    record: Record | None = None
    others: tuple[Record, ...] = ()
    due_in: float = field(init=False, repr=False, compare=False)
    hint: Hint | None = field(init=False, repr=False, compare=False)
    pause: Pause = field(init=False, repr=False, compare=False)

    @property
    def retry_after(self) -> float | None:
        """Seconds until the key's pause ends, or until its rate lets a call start.

        None if the time is unknown.
        """
        if self.relation is Relation.RATE:
            return self.due_in
        return self.pause.left if self.relation is Relation.PAUSED else None

    @property
    def holder(self) -> Holder:
        """The holder, as far as the store could read it."""
        return self.record.holder if self.record else Holder(task_id="an unknown holder")

    @property
    def known_holder(self) -> Holder:
        """The :attr:`holder`. It's empty if no holder has refused the call."""
        return Holder() if self.relation in _WITHOUT_HOLDER else self.holder

    def holder_for_error(self) -> dict[str, Any]:
        """Return the :attr:`known_holder` as plain data.

        The dict is empty if no holder has refused the call.
        """
        return {} if self.relation in _WITHOUT_HOLDER else self.holder.for_error()

    def explain(self, key: str, limit: int) -> str:
        """Return a clause for an error that says why ``key`` was refused.

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
        keys: The lease's key. If the call is in a queue, or if the outcome of the acquire is
            unknown, these are all slots.
        token: The token that must hold the key.
        become: The new kind of the key. None deletes the key.
        become_ttl: How long the new kind stays, in seconds.
        next_token: The token that a reservation is for.
        completion: The new state in the completion record of the token's attempt. It isn't stored
            if a duplicate delivery has finished. If a duplicate delivery holds the key, only DONE
            is stored.
        completion_ttl: How long the store keeps the completion record, in seconds.
        claim: The change of the message's claim, unless a duplicate delivery has the key. If the
            key was lost or is dying, the claim can only be freed.
    """

    #: Whether the call belongs to the queue of its key (`core.call_queue`).
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
        """Return a release that frees the key, or that keeps it in cooldown.

        The cooldown ends ``min_hold`` seconds after the lease was acquired.
        """
        release = cls(keys=(lease.key,), token=lease.token, claim=claim)
        if min_hold and (left := min_hold - (lease.clock.now() - lease.acquired_at)) > 0:
            release.become, release.become_ttl = Kind.COOLING, left
        return release

    def reserve(self, seconds: float) -> None:
        """Turn this release into a reservation of the key for the next attempt.

        The reservation lasts ``seconds`` seconds, or as long as the cooldown if that is longer.
        """
        self.become, self.become_ttl = Kind.RESERVED, max(seconds, self.become_ttl)
        self.next_token = self.token.next_attempt()


@dataclass(slots=True, kw_only=True)
class QueuedRelease(Release):
    """A release of the lease of a call in a queue.

    Attributes:
        ended_ttl: How long the store remembers that the call has ended, in seconds. None means that
            the call goes on.
        due_in: Seconds until the call's next message is due, if the call goes on.
        has_begun: Whether a run has begun under the lease.
        may_return_from: Set if the call doesn't go on, but one of its attempts may still arrive at
            this key. It's the retry count of the earliest such attempt. None means that the call
            has ended.
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
        ttl: How long the store keeps the record, in seconds.
        claim: The change of the message's claim, if the claim exists and the attempt isn't done.
    """

    key: str
    token: Token
    state: CompletionState
    ttl: float
    sequence: int = 0
    claim: ClaimChange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestCall:
    """A call and its time, which puts the calls for one key in order.

    Attributes:
        call_id: The call (``Token.call_id``).
        called_at: The time of the call on the caller's clock, in seconds since the epoch. None
            means that the store uses the time at which the call is registered.
    """

    call_id: str
    called_at: float | None

    @property
    def task_id(self) -> str:
        """The id of the call's task."""
        return Token.task_id_of(self.call_id)

    def is_newer_than(self, other: NewestCall) -> bool:
        """Return whether this is another call that was made later.

        If two calls were made at the same time, one of them counts as newer.
        """
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
        expected: The last run that must be stored. None means that none may be stored.
        new: The last run to store. It's unique, so that the store recognizes a repeated request.
        ttl: How long the store keeps the last run, in seconds.
    """

    leader: str
    token: Token
    entry: str
    expected: str | None
    new: str
    ttl: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What the store still has of a lease after its end.

    Attributes:
        record: The record at the lease's key now. None if the key doesn't exist.
        fence: The last fence granted in the key's shard. It's 0 if there is none. None if the
            fences of this store can't prove a loss.
        now: The current time in seconds since the epoch. The fence is a time in microseconds on the
            same clock.
    """

    record: Record | None
    fence: int | None = None
    now: float = float("nan")
