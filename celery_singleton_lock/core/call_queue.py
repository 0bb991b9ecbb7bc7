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
        begins: How often a run has begun by this message.
        message: Its message; empty: the store has none.
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

    WAITS = "w"
    HINTED = "h"  # its message is in the broker
    BEGUN = "b"
    OVERDUE = "o"  # begun, acknowledged early, and its lease has ended
    LEAVES = "x"  # it never begins again


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

    WAITING = "waiting"
    HINTED = "hinted"  # the caller publishes the message
    ENDED = "ended"  # the call has ended
    FULL = "full"  # as many calls are in the queue as may


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A request for a place in the queue. A call that has a place keeps it.

    Attributes:
        key: The lock key.
        token: The token of the attempt whose message it is.
        message: The message. It replaces an older one.
        sequence: How often this attempt was requeued.
        asked: The nonces with which the deliveries of this message have asked for the lease. If the
            attempt has begun under another one, it is not begun again because of this message.
        late: Whether the call's messages are acknowledged late.
        limit: How many calls of the key may run at a time.
        max_waiting: How many calls may be in the queue; None: any number.
        claim: The key of the call's claim, in the shard of ``key``; empty: none. If the call is new
            in the queue, and has the claim and does not run, the claim lasts ``claim_ttl`` seconds.
        claim_ttl: Seconds.
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
    """A request to take out a call that leaves, or that has ended with the attempt of ``token``.

    Attributes:
        key: The lock key.
        token: The token of the attempt.
        ended_ttl: Seconds for which the store remembers that the call has ended.
        sequence: How often the message that has ended was requeued. A later copy that has joined
            keeps the place. None: no copy of the attempt does.
        may_return_from: The retries of the first attempt that may still come to this key; None:
            none may.
        only_unbegun: Whether the call keeps its place if an attempt of it has begun.
    """

    key: str
    token: Token
    ended_ttl: float
    sequence: int | None = None
    may_return_from: int | None = None
    only_unbegun: bool = False


class Removal(StrEnum):
    """The reply to a removal; the script replies with the value."""

    REMOVED = "removed"
    ABSENT = "absent"
    RUNNING = "running"  # it runs, has a newer attempt, or has begun where that is not allowed


class CallQueue(ABC):
    """The queues of the calls of all keys in a store."""

    @abstractmethod
    def join(self, request: Join, /, *, timeout: float) -> tuple[Place, int]:
        """Give a call a place.

        Returns:
            The reply, and how many calls are in the queue; 0 if the call had a place before, or has
            ended.
        """

    @abstractmethod
    def release(
        self, request: QueuedRelease, /, *, timeout: float
    ) -> tuple[ReleaseReply, Hint | None]:
        """Release the lease of a call of a queue, see `Leases.release`.

        Returns:
            The reply and the call to publish next, or None if there is none.
        """

    @abstractmethod
    def position(self, key: str, call_id: str, /, *, timeout: float) -> int | None:
        """How many calls are before this one in the queue of ``key``; None: it has no place."""

    @abstractmethod
    def keys(self, shard: str, /, *, timeout: float) -> list[str]:
        """The keys of a shard whose queues are not empty."""

    @abstractmethod
    def depths(self, keys: Sequence[str], /, *, timeout: float) -> list[Depth]:
        """What waits in the queue of each of ``keys``, which are of one shard."""

    @abstractmethod
    def calls(
        self, key: str, /, *, first: int = 0, most: int, messages: bool = True, timeout: float
    ) -> list[QueuedCall]:
        """At most ``most`` calls in the queue of ``key``, in order, from position ``first`` on.

        Args:
            key: The lock key.
            first: The position of the first one.
            most: The number of calls.
            messages: Whether to read their messages, which may be large.
            timeout: Seconds.
        """

    @abstractmethod
    def due(self, shard: str, /, *, limit: int, timeout: float) -> list[str]:
        """At most ``limit`` keys of a shard whose time for a sweep has come.

        If there are more, repeated requests return each of them at some time: keys that can't be
        looked at must keep none from the others.
        """

    @abstractmethod
    def sweep(self, key: str, /, *, timeout: float) -> list[tuple[bool, Hint]]:
        """Hint the calls again that may run and are late, or say that they are lost.

        Returns:
            For each such call whether it is lost, and the call. A lost one gets a result and is
            then removed, another one is published. Empty if there is nothing to do, or another
            client does it.
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
        """Look in ``seconds`` at the latest at the calls of ``key`` that may run; or at one call.

        The result of a call that is lost or cancelled is not put off.

        Args:
            key: The lock key.
            seconds: The time.
            timeout: Seconds.
            unpublished: A hint of the key that was not published, and so does not count as a copy:
                the deadline of the next one would grow with each second of an outage of the broker.
                Its call is looked at in ``seconds``.
            perhaps: Whether the broker may have it nevertheless: its reply is missing.
            returns: A call whose message the broker delivers again (``Token.call_id``). It is not
                looked at earlier than in ``seconds``.
        """

    @abstractmethod
    def leave(self, key: str, call_id: str, /, *, timeout: float) -> Removal | Hint:
        """Make a call that is not running leave. It never begins.

        The calls behind it wait until it is removed.

        Returns:
            The call, for its result. It is then removed. A repeated request has the same reply.
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
