"""One operation of RedisStore, asked of all nodes at once.

A RedisStore asks its connections and waits; nothing here may wait for one node while others have
answered. So it is given a transcript instead of connections, which knows the replies heard so far:
at the first question that has none, the operation is broken off, the question is sent to the node,
and with its reply the operation is run again from the start. The operations are functions of their
arguments and the replies alone, so what was asked before is asked again, and each node goes its own
way (one has forgotten the script, another has not) at its own speed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lease import Record
from celery_singleton_lock.core.store import Admit
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.admission import admitted_by_script
from celery_singleton_lock.stores.redis.exchange import Exchange
from celery_singleton_lock.stores.redis.replies import ScriptForgotten
from celery_singleton_lock.stores.redis.resp import ErrorReply, pack
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.stores.redlock.link_sets import LinkSets
from celery_singleton_lock.stores.redlock.links import Link
from celery_singleton_lock.stores.redlock.url import Node
from celery_singleton_lock.stores.redlock.waiting import wait

__all__ = ["PENDING", "Pending", "Poll", "Quorum"]

T = TypeVar("T")

# Once a majority has answered, and it isn't enough to decide, the others have this long: what they
# would say is no reason to wait for a node that says nothing.
_STRAGGLERS: Final = 0.05
# Refusals that end by themselves, as of a single server.
_PASSING: Final = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS")


class Pending(Enum):
    """The type of :data:`PENDING`."""

    PENDING = "pending"


#: A node that has not answered yet.
PENDING: Final = Pending.PENDING


@dataclass(frozen=True, slots=True)
class Poll(Generic[T]):
    """What the nodes have answered so far, in the order of the nodes.

    Attributes:
        answers: Of each: its answer, the error that took its place, or PENDING.
        started: When each server was started at the latest (on the clock), where that is known.
        majority: How many nodes are one.
        exchanges: Of each node, the last: whoever didn't wait can see later what was heard.
    """

    answers: tuple[T | StoreError | Pending, ...]
    started: tuple[float | None, ...]
    majority: int
    exchanges: tuple[Exchange | None, ...] = ()

    @property
    def heard(self) -> list[T]:
        """The answers that have come."""
        return [a for a in self.answers if not isinstance(a, (StoreError, Pending))]

    @property
    def has_majority(self) -> bool:
        """Whether as many have answered as a decision takes."""
        return len(self.heard) >= self.majority

    @property
    def silent(self) -> int:
        """How many have not answered, or with an error: nobody knows what they have."""
        return len(self.answers) - len(self.heard)

    @property
    def count(self) -> int:
        """How many have answered."""
        return len(self.heard)

    @property
    def pending(self) -> int:
        """How many may answer still."""
        return sum(answer is PENDING for answer in self.answers)

    def check(self) -> None:
        """Raises StoreUnavailable or StoreError unless a majority has answered."""
        if not self.has_majority:
            raise self.error()

    def error(self) -> StoreError:
        """Why there is no decision."""
        errors = [answer for answer in self.answers if isinstance(answer, StoreError)]
        reasons = [str(error) for error in errors]
        if self.pending:
            reasons.append(f"{self.pending} said nothing in time")
        text = (
            f"{self.count} of {len(self.answers)} nodes answered, and a decision takes "
            f"{self.majority}: {'; '.join(reasons)}"
        )
        refusals = sum(not isinstance(error, StoreUnavailable) for error in errors)
        # Refusals by so many won't go away by asking again.
        return StoreError(text) if refusals >= self.majority else StoreUnavailable(text)


class _Asks(Exception):
    """The operation goes on when these commands are answered."""

    def __init__(self, commands: Sequence[tuple[Any, ...]]) -> None:
        super().__init__()
        self.commands = commands


class _Transcript:
    """In the place of a RedisStore's connections."""

    def __init__(self) -> None:
        self._heard: list[list[Any]] = []
        self._position = 0

    def hear(self, replies: list[Any]) -> None:
        self._heard.append(replies)
        self._position = 0

    def run(self, commands: Sequence[tuple[Any, ...]], timeout: float) -> list[Any]:
        if self._position == len(self._heard):
            raise _Asks(commands)
        replies = self._heard[self._position]
        self._position += 1
        for reply in replies:
            if isinstance(reply, ErrorReply):
                raise _error_of(reply)
        return replies


def _error_of(reply: ErrorReply) -> Exception:
    if reply.startswith("NOSCRIPT"):
        return ScriptForgotten()
    if reply.startswith("READONLY"):
        return StoreUnavailable(f"a node is a replica: {reply}")
    if reply.startswith(_PASSING):
        return StoreUnavailable(f"a node can't answer now: {reply}")
    return StoreError(f"a node refuses: {reply}")


class _NodeStore(RedisStore):
    """As a single server's, but for the note of its shards: who knows the nodes has one shard."""

    def _check_shards(self, key: str, timeout: float) -> None:
        """Nothing: the note would be a question of its own, to each node, before the first vote."""

    def _admit(self, call: Admit, timeout: float) -> Record | None:
        # What a server takes instead of the script is learned by asking it, and what was learned
        # would change what an operation asks when it is run again.
        return admitted_by_script(self._ask, call, timeout)


class _Conversation(Generic[T]):
    """One operation with one node."""

    def __init__(self, store: RedisStore, operation: Callable[[RedisStore], T], link: Link) -> None:
        self._transcript = _Transcript()
        self._store = copy.copy(store)
        self._store._connections = self._transcript  # type: ignore[assignment]
        self._operation = operation
        self.link = link
        self.exchange: Exchange | None = None
        self.answer: T | StoreError | Pending = PENDING

    def begin(self) -> Sequence[tuple[Any, ...]]:
        """What the operation asks first; the same for all nodes."""
        try:
            self._operation(self._store)
        except _Asks as asks:
            return asks.commands
        raise AssertionError("it did not ask its transcript: it would wait for node after node")

    def send(self, exchange: Exchange) -> None:
        self.exchange = exchange
        if exchange.sha and exchange.sha not in self.link.taught:
            # Its first use on this connection, to a server that may have been restarted: as if it
            # had said so. A node that is not waited for must not need to be asked twice.
            exchange.replies = [ErrorReply("NOSCRIPT")] * exchange.count
        else:
            self.link.send(exchange)
        self.advance()

    def advance(self) -> None:
        """Go on with what the node has replied."""
        while self.answer is PENDING and self.exchange is not None and self.exchange.done:
            if self.exchange.error is not None:
                self.answer = self.exchange.error
                return
            self._transcript.hear(self.exchange.replies)
            try:
                self.answer = self._operation(self._store)
            except _Asks as asks:
                self.exchange = Exchange(asks.commands, sha=self.exchange.sha)
                self.link.send(self.exchange)
            except StoreError as exc:
                self.answer = exc


class Quorum:
    """All nodes, and the idle links to them."""

    def __init__(self, nodes: Sequence[Node], clock: Clock) -> None:
        self.nodes = tuple(nodes)
        self.majority = len(self.nodes) // 2 + 1
        self._clock = clock
        self._stores: list[RedisStore] = [_NodeStore(node.url) for node in self.nodes]
        self._links = LinkSets(self.nodes, clock)

    @property
    def stores(self) -> list[RedisStore]:
        """A store for each node, to be asked one after the other: for operators."""
        return self._stores

    def ask(
        self,
        operation: Callable[[RedisStore], T],
        *,
        timeout: float,
        enough: Callable[[Poll[T]], object],
        task: str = "",
    ) -> Poll[T]:
        """Ask all nodes, and return when what was heard is ``enough``, or nothing more comes.

        Args:
            operation: Calls one method of the store it is given.
            timeout: Seconds to wait for all of them; errors of single nodes are answers.
            enough: Whether the answers so far decide. Whoever has not answered then is not waited
                for, though it was asked.
            task: On whose behalf; what one task asks arrives in this order at each node.
        """
        links = self._links.take(task)
        in_step = False
        try:
            poll = self._ask(links, operation, self._clock.now() + timeout, enough)
            in_step = True
        finally:
            # An exception thrown into this thread (a soft time limit, SIGTERM) may have come
            # between sending and noting what was sent.
            if in_step:
                self._links.give(task, links)
            else:
                for link in links:
                    link.close()
        return poll

    def run_ids(self) -> list[str]:
        """Of the servers that the idle links lead to; empty where one doesn't tell."""
        return [link.run_id for link in self._links.any_idle()]

    def close(self) -> None:
        """Close what is not in use."""
        self._links.close()
        for store in self._stores:
            store.close()

    def _ask(
        self,
        links: Sequence[Link],
        operation: Callable[[RedisStore], T],
        deadline: float,
        enough: Callable[[Poll[T]], object],
    ) -> Poll[T]:
        talks = [_Conversation(s, operation, k) for s, k in zip(self._stores, links, strict=True)]
        commands = talks[0].begin()
        packed = pack(commands)
        sha = str(commands[0][1]) if commands and commands[0][0] == "EVALSHA" else ""
        for talk in talks:
            talk.send(Exchange(commands, packed, sha))
        heard_a_majority = False
        while True:
            poll = self._poll(talks)
            if poll.has_majority and not heard_a_majority:
                heard_a_majority = True
                deadline = min(deadline, self._clock.now() + _STRAGGLERS)
            left = deadline - self._clock.now()
            if enough(poll) or not poll.pending or left <= 0:
                break
            wait([talk.link for talk in talks if talk.answer is PENDING], left)
            for talk in talks:
                talk.advance()
        for talk in talks:
            if talk.exchange is not None:
                talk.exchange.awaited = False
        return poll

    def _poll(self, talks: Sequence[_Conversation[T]]) -> Poll[T]:
        return Poll(
            tuple(talk.answer for talk in talks),
            tuple(talk.link.started_at for talk in talks),
            self.majority,
            tuple(talk.exchange for talk in talks),
        )
