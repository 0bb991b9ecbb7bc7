"""The interface of the queue of a key: its calls begin in order, and a limit says how many run.

Overview
    The store is the queue: every call is in it from its join until it has ended, the running one
    too. The broker carries hints: the message of the call at the head, normally one per key. A hint
    is no evidence of anything. A lost one costs a deadline, and a copied one costs a request,
    because the step that grants the lease decides whether it is the call's turn: it is one of the
    first calls of the queue, as many as the limit, and all before it have begun. One call that has
    not begun is hinted at a time: the next one, by the grant of the one before it or the end of
    another.

Guarantees
    Each operation is one atomic step. A call keeps its place until it ends or is removed, and its
    message is that of its newest attempt. A queue that is not empty is due for a sweep: at the end
    of a lease of its calls, or at the deadline of a hint.

State model of a call::

    (absent) --join--> waits --hint--> hinted --acquire--> begun --release--> (absent, ended)
                         ^                ^                  |
                         |                +--release, sweep--+
                         +--join of its next message---------+

    A call that has begun, and whose lease has ended, is hinted again by a sweep. If its messages
    are acknowledged early and no newer one has joined, it is overdue instead, and the next sweep,
    five seconds later, takes it for lost: it leaves, and never begins again. In these seconds a
    client whose acquire got no reply may still release the call, because it knows that it began no
    run. A call that has begun by one message as often as it may leaves at the next acquire, and a
    sweep ends it as lost.

Failure handling
    An operation without a reply is repeated, and has the same reply.
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
        message: Its message. It's empty if the store has none.
        countdown: Seconds for which the key is still in cooldown (``min_hold``).
    """

    key: str
    call_id: str
    copies: int
    begins: int
    message: bytes
    countdown: float = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether a run has begun by this message."""
        return self.begins > 0


class CallState(StrEnum):
    """The state of a call in a queue, as the scripts store it."""

    WAITS = "w"  #: it waits for its turn
    HINTED = "h"  #: its message is in the broker
    BEGUN = "b"  #: a run has begun
    OVERDUE = "o"  #: begun, acknowledged early, and its lease has ended
    LEAVES = "x"  #: it never begins again


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedCall(Hint):
    """A call in the queue, for operators.

    Attributes:
        position: The number of calls before it.
        joined_at: When it joined, in seconds since the epoch.
        state: Its state.
    """

    position: int
    joined_at: float
    state: CallState


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """What waits in the queue of a key.

    Attributes:
        waiting: How many calls wait. A call that has begun doesn't count.
        oldest_at: When the first of them joined, in seconds since the epoch. None if no call waits.
    """

    waiting: int
    oldest_at: float | None


class Place(StrEnum):
    """The reply to a join; the script replies with the value."""

    WAITING = "waiting"  #: the call waits for its turn
    HINTED = "hinted"  #: it's the call's turn, and the caller publishes the message
    ENDED = "ended"  #: the call has ended
    FULL = "full"  #: the queue has ``max_waiting`` calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A request to join the queue. A call that is in the queue keeps its place.

    Attributes:
        key: The lock key.
        token: The token of the attempt whose message it is.
        message: The message. It replaces an older one.
        sequence: How often this attempt was requeued.
        asked: The nonces with which the deliveries of this message have asked for the lease. If the
            attempt has begun under another nonce, this message doesn't let it begin again.
        late: Whether the call's messages are acknowledged late.
        limit: How many calls of the key may run at a time.
        max_waiting: How many calls may be in the queue. None means any number.
        claim: The key of the call's claim, in the shard of ``key``. It's empty if there is none. If
            the call is new in the queue, has the claim and doesn't run, the claim lasts for
            ``claim_ttl``.
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
    """A request to take a call out of the queue that leaves it, or has ended with this attempt.

    Attributes:
        key: The lock key.
        token: The token of the attempt.
        ended_ttl: Seconds for which the store remembers that the call has ended.
        sequence: How often the message that has ended was requeued. If a later copy has joined, the
            call keeps its place. None means that no copy of this attempt keeps it.
        may_return_from: The retry count of the earliest attempt that may still arrive at this key.
            None means that no attempt may.
        only_unbegun: Whether the call keeps its place if one of its attempts has begun.
    """

    key: str
    token: Token
    ended_ttl: float
    sequence: int | None = None
    may_return_from: int | None = None
    only_unbegun: bool = False


class Removal(StrEnum):
    """The reply to a removal; the script replies with the value."""

    REMOVED = "removed"  #: the call was taken out
    ABSENT = "absent"  #: the call isn't in the queue
    RUNNING = "running"  #: it runs, has a newer attempt, or has begun where that is not allowed


class CallQueue(ABC):
    """The queues of the calls of all keys in a store."""

    @abstractmethod
    def join(self, request: Join, /, *, timeout: float) -> tuple[Place, int]:
        """Put a call into the queue.

        Returns:
            The reply, and how many calls are in the queue. The number is 0 if the call was in the
            queue before, or has ended.
        """

    @abstractmethod
    def release(
        self, request: QueuedRelease, /, *, timeout: float
    ) -> tuple[ReleaseReply, Hint | None]:
        """Release the lease of a call in a queue. See `Leases.release`.

        Returns:
            The reply and the call to publish next, or None if there is none.
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
        """Return what waits in the queue of each of ``keys``, which are in one shard."""

    @abstractmethod
    def calls(
        self, key: str, /, *, first: int = 0, most: int, messages: bool = True, timeout: float
    ) -> list[QueuedCall]:
        """Return at most ``most`` calls in the queue of ``key``, in order, from ``first`` on.

        Args:
            key: The lock key.
            first: The position of the first call.
            most: The number of calls.
            messages: Whether to read their messages, which may be large.
            timeout: How long to wait for the reply, in seconds.
        """

    @abstractmethod
    def due(self, shard: str, /, *, limit: int, timeout: float) -> list[str]:
        """Return at most ``limit`` keys of a shard that are due for a sweep.

        If more are due, repeated requests return each of them eventually. A key whose sweep
        fails must not keep the other keys from theirs.
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
        """Let a sweep check the calls of ``key`` that may run, or one call, in ``seconds`` at most.

        The result of a call that is lost or cancelled isn't delayed.

        Args:
            key: The lock key.
            seconds: The time until that sweep.
            timeout: How long to wait for the reply, in seconds.
            unpublished: A hint of the key that was not published. Its call is checked in
                ``seconds``. The hint doesn't count as a copy, or the deadline of the next one would
                grow with each second of an outage of the broker.
            perhaps: Whether the broker may have the hint nevertheless, because no reply came.
            returns: A call whose message the broker delivers again (``Token.call_id``). It isn't
                checked before ``seconds`` have passed.
        """

    @abstractmethod
    def leave(self, key: str, call_id: str, /, *, timeout: float) -> Removal | Hint:
        """Make a call that isn't running leave the queue, so that it never begins.

        The calls behind it wait until it's removed.

        Returns:
            The call, so that the client can store its result and then remove it. A repeated request
            has the same reply.
        """

    @abstractmethod
    def remove(self, request: Remove, /, *, timeout: float) -> tuple[Removal, Hint | None]:
        """Take a call out of the queue.

        Returns:
            The reply and the call to publish next, or None if there is none.
        """

    def missing_rights(self, key: str, /) -> list[str]:
        """The commands that this part needs and the login lacks. ``key`` is not held."""
        return []
