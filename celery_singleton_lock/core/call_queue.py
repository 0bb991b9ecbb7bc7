"""The queue of a key, whose calls begin in order, and a limit on how many of them run at a time.

Overview
    The queue is in the store. A call is in it from its join until it has ended, even while it runs.

    The broker carries only hints. A hint is the message of the call whose turn it is. It isn't
    binding, because the step that grants the lease decides whether it's the call's turn. So a
    lost hint only delays the call until a sweep, and a second copy only costs a request.

    It's a call's turn if fewer calls than the limit are before it in the queue, and all of them
    have begun. Only one call that hasn't begun is hinted at a time. It's hinted when the call
    before it gets its lease, or when another call ends.

Guarantees
    Each operation is one atomic step. A call stays in the queue, in order, until it ends or is
    removed. Its message is the message of its newest attempt. A queue that isn't empty is due for a
    sweep when a lease of its calls ends, or at the deadline of a hint.

State model of a call::

    (absent) --join--> waits --hint--> hinted --acquire--> begun --release--> (absent, ended)
                         ^                ^                  |
                         |                +--release, sweep--+
                         +--join of its next message---------+

Lost calls
    If a call has begun and its lease has ended, a sweep hints the call again. If its messages are
    acknowledged early and no newer message has joined, it becomes overdue instead. The next sweep,
    five seconds later, treats it as lost, so the call leaves the queue and never begins again.
    Within these five seconds, a client whose acquire got no reply may still release the call. It
    can do so safely, because it knows that it began no run. If one message has begun as many runs
    as it may, the call leaves at the next acquire, and a sweep ends it as lost.

Failure handling
    A client repeats an operation that got no reply. The repeated operation has the same reply.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from .lease import Token

if TYPE_CHECKING:
    from .store_requests import QueuedRelease, ReleaseReply


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A call in the queue, with its message.

    Attributes:
        key: The lock key.
        call_id: The call (``Token.call_id``).
        copies: How often its message was published.
        begins: How many runs this message has begun.
        message: The call's message. It's empty if the store has none.
        countdown: Seconds until the call may start, because the key is in cooldown (``min_hold``)
            or has a rate.
    """

    key: str
    call_id: str
    copies: int
    begins: int
    message: bytes
    countdown: float = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether this message has begun a run."""
        return self.begins > 0


class CallState(StrEnum):
    """The state of a call in a queue. The store keeps the letter."""

    WAITS = "w"  #: The call waits for its turn.
    HINTED = "h"  #: The call's message is in the broker.
    BEGUN = "b"  #: A run has begun.
    OVERDUE = "o"  #: The call has begun, was acknowledged early, and its lease has ended.
    LEAVES = "x"  #: The call never begins again.


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedCall(Hint):
    """A call in the queue, for operators.

    Attributes:
        position: How many calls are before it.
        joined_at: When the call joined the queue, in seconds since the epoch.
        state: The state of the call.
    """

    position: int
    joined_at: float
    state: CallState


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """How many calls wait in the queue of a key.

    Attributes:
        waiting: How many calls wait. A call that has begun doesn't count.
        oldest_at: When the first of them joined, in seconds since the epoch. None if no call waits.
    """

    waiting: int
    oldest_at: float | None


class Place(StrEnum):
    """The reply to a join. The Redis script sends the value."""

    WAITING = "waiting"  #: The call waits for its turn.
    HINTED = "hinted"  #: It's the call's turn, and the caller publishes the message.
    ENDED = "ended"  #: The call has ended.
    FULL = "full"  #: The queue already has ``max_waiting`` calls.


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A request to join the queue. A call that is already in the queue doesn't move.

    Attributes:
        key: The lock key.
        token: The token of the attempt that the message belongs to.
        message: The message. It replaces an older one.
        sequence: How often this attempt was requeued.
        asked: The nonces with which the deliveries of this message have asked for the lease. If the
            attempt has begun under another nonce, this message doesn't let it begin again.
        late: Whether the call's messages are acknowledged late.
        limit: How many calls of the key may run at a time.
        max_waiting: How many calls may be in the queue. None means any number.
        claim: The key of the call's claim, in the shard of ``key``. It's empty if there is none. If
            the call is new in the queue, has the claim and doesn't run, the claim lasts for
            ``claim_ttl`` seconds.
        claim_ttl: The new ttl of the claim, in seconds.
    """

    key: str
    token: Token
    message: bytes
    late: bool
    sequence: int = 0
    asked: tuple[str, ...] = ()
    limit: int = 1
    max_waiting: int | None = None
    claim: str = ""
    claim_ttl: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """A request to remove a call that leaves the queue, or that has ended with this attempt.

    Attributes:
        key: The lock key.
        token: The token of the attempt.
        ended_ttl: How long the store remembers that the call has ended, in seconds.
        sequence: How often the message that has ended was requeued. If a later copy has joined, the
            call stays in the queue. None means that no copy of this attempt keeps the call there.
        may_return_from: The retry count of the earliest attempt that may still arrive at this key.
            None means that no attempt may.
        only_unbegun: Whether the call stays in the queue if one of its attempts has begun.
    """

    key: str
    token: Token
    ended_ttl: float
    sequence: int | None = None
    may_return_from: int | None = None
    only_unbegun: bool = False


class Removal(StrEnum):
    """The reply to a removal. The Redis script sends the value."""

    REMOVED = "removed"  #: The call was removed.
    ABSENT = "absent"  #: The call isn't in the queue.
    #: The call runs, or has a newer attempt. With ``only_unbegun``, it may also have begun.
    RUNNING = "running"


class CallQueue(ABC):
    """The queues of a store. Each key has its own queue of calls."""

    @abstractmethod
    def join(self, request: Join, /, *, timeout: float) -> tuple[Place, int]:
        """Put a call into the queue.

        Returns:
            The reply, and how many calls are in the queue. The number is 0 if the call was already
            in the queue, or has ended.
        """

    @abstractmethod
    def release(
        self, request: QueuedRelease, /, *, timeout: float
    ) -> tuple[ReleaseReply, Hint | None]:
        """Release the lease of a call in a queue. See `Leases.release`.

        Returns:
            The reply, and the call to publish next. The call is None if there is none.
        """

    @abstractmethod
    def position(self, key: str, call_id: str, /, *, timeout: float) -> int | None:
        """Return how many calls are before this one in the queue of ``key``.

        None means that the call isn't in the queue.
        """

    @abstractmethod
    def keys(self, shard: str, /, *, timeout: float) -> list[str]:
        """Return the keys of a shard whose queues aren't empty."""

    @abstractmethod
    def depths(self, keys: Sequence[str], /, *, timeout: float) -> list[Depth]:
        """Return how many calls wait at each of ``keys``. All keys must be in one shard."""

    @abstractmethod
    def calls(
        self, key: str, /, *, first: int = 0, most: int, messages: bool = True, timeout: float
    ) -> list[QueuedCall]:
        """Return at most ``most`` calls in the queue of ``key``, in order, from ``first`` on.

        Args:
            key: The lock key.
            first: The position of the first call.
            most: The largest number of calls to return.
            messages: Whether to read the calls' messages, which may be large.
            timeout: How long to wait for the reply, in seconds.
        """

    @abstractmethod
    def due(self, shard: str, /, *, limit: int, timeout: float) -> list[str]:
        """Return at most ``limit`` keys of a shard that are due for a sweep.

        If more keys are due, repeated requests return each of them eventually. A key whose sweep
        fails must not prevent the sweeps of other keys.
        """

    @abstractmethod
    def sweep(self, key: str, /, *, timeout: float) -> list[tuple[bool, Hint]]:
        """Find the calls that may run but are late. Each is hinted again, or is lost.

        Returns:
            For each such call, whether it's lost, and the call. The client stores the result of a
            lost call and then removes it. It publishes the other calls. The list is empty if there
            is nothing to do, or if another client does it.
        """

    @abstractmethod
    def defer(
        self,
        key: str,
        /,
        *,
        seconds: float,
        timeout: float,
        unpublished: Hint | None = None,
        perhaps: bool = False,
        returns: str = "",
    ) -> None:
        """Schedule a sweep of ``key``. It checks one call, or all those that may run.

        The sweep comes after at most ``seconds`` seconds. This doesn't delay the result of a call
        that is lost or cancelled.

        Args:
            key: The lock key.
            seconds: The time until that sweep, in seconds.
            timeout: How long to wait for the reply, in seconds.
            unpublished: A hint of the key that was not published. A sweep checks its call in
                ``seconds`` seconds. The hint doesn't count as a copy. If it did, the deadline of
                the next hint would grow while the broker is down.
            perhaps: Whether the broker may have the hint nevertheless, because no reply came.
            returns: A call whose message the broker delivers again (``Token.call_id``). A sweep
                doesn't check it before ``seconds`` seconds have passed.
        """

    @abstractmethod
    def leave(self, key: str, call_id: str, /, *, timeout: float) -> Removal | Hint:
        """Make a call that isn't running leave the queue, so that it never begins.

        The calls behind it wait until it's removed.

        Returns:
            The call, so that the client can store its result and then remove it. If the call can't
            leave, the reason. A repeated request has the same reply.
        """

    @abstractmethod
    def remove(self, request: Remove, /, *, timeout: float) -> tuple[Removal, Hint | None]:
        """Remove a call from the queue.

        Returns:
            The reply, and the call to publish next. The call is None if there is none.
        """

    def missing_rights(self, key: str, /) -> list[str]:
        """Return the commands that this part needs and the login lacks.

        Args:
            key: A key that isn't held.
        """
        return []
