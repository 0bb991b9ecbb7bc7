"""Leases by majority in several independent Redis masters (Redlock).

Overview
    The algorithm is that of redis.io, "Distributed Locks with Redis". Each node runs the same
    scripts as for a single RedisStore. A request goes to all nodes at once, and the client waits
    until the answers decide. ``acquirer`` has the sequence of an acquire, ``votes`` the decisions,
    ``fanout`` the threads and queues.

Guarantees
    A lease is granted by a majority of the nodes or not at all. Its validity is the ttl less the
    duration of the attempt and less the allowance for clock drift.
    While a majority answers, all operations go on. A minority may be down, slow or partitioned.
    A lost key is never written back on any node.
    A failed attempt is given back on all nodes, also on those that did not answer. Requests reach
    each node in the order in which they were made, so a release never overtakes its acquire, as
    long as the node answers within ``NODE_TIMEOUT`` seconds.

Non-guarantees
    Fencing tokens. Each node has its own counter, and a grant needs three of five nodes: the next
    grant may come from three others with lower counters. One number for all takes consensus. A
    process that stalls between ``check()`` and its write is not detected; see docs/redlock.md.
    Exclusion when a node forgets an acknowledged write. If a lease is on nodes 1, 2, 3 and node 3
    restarts empty, nodes 3, 4, 5 would grant the key again. So a server has no vote until it has
    been up for the ttl of the requested lease (``quarantine``; its uptime is read with INFO after
    each login, if an ACL allows it). A node whose clock is set forward forgets leases too.
    Markers, claims and Beat's last runs may be lost by such a restart after the quarantine: a late
    redelivery may run again, a duplicate may be published, a tick may be sent again.

State model
    A vote on one node is absent, granted, or granted without counting (the server is too young, or
    an earlier release of the same token may still arrive there). A lease exists while a majority
    has it. Votes on a minority are given back, or expire.

Failure handling
    A node is down: its vote is missing. No request waits for it.
    A node does not answer: if a majority decides, no request waits for it. Otherwise a request
    waits 50 ms after a majority has answered. The node's queue is bounded, and requests older than
    ``NODE_TIMEOUT`` are dropped unsent.
    Releases that got no reply are sent again before the node's next acquire or release.
    A release without a reply: the node has no vote for the same token during the next minute,
    because the release may arrive after the grant.
    A majority is down: StoreUnavailable, as with one server. The heartbeat retries until the
    lease's deadline.
    An exception in the calling thread (a soft time limit, SIGTERM): the nodes that the request has
    reached carry it out. The locker releases by token, and that release follows the request in each
    node's queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.core.lease import Lease, LossReason, Record, Token
from celery_singleton_lock.core.store import (
    Acquire,
    Admit,
    Authorization,
    AuthorizeTick,
    Capabilities,
    ClaimChange,
    Granted,
    Mark,
    Refused,
    Relation,
    Release,
    Renewal,
    Store,
    Trace,
)
from celery_singleton_lock.errors import SettingsError, StoreError, StoreUnavailable
from celery_singleton_lock.stores.redlock import votes
from celery_singleton_lock.stores.redlock.acquirer import Acquirer
from celery_singleton_lock.stores.redlock.fanout import NODE_TIMEOUT, Fanout, Node
from celery_singleton_lock.stores.redlock.url import read_nodes
from celery_singleton_lock.stores.redlock.votes import Poll

T = TypeVar("T")


class RedlockStore(Store):
    """A store on the nodes that a ``redlock://`` URL names. A majority of them decides.

    Raises:
        SettingsError: The URL cannot be read, or names an even number of nodes or fewer than three.
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        nodes = read_nodes(url)
        clock = clock or SystemClock()
        self._fanout = Fanout(nodes.members, clock)
        self._acquirer = Acquirer(self._fanout, clock, nodes.quarantine)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            fence=False, name="redlock", renews_for_others=True, usable_before_fork=True
        )

    def acquire(self, request: Acquire, *, timeout: float) -> Granted | Refused:
        """See `Store.acquire`. May make several attempts within ``timeout``.

        The caller reads its clock before the first attempt, so its deadline is earlier than the ttl
        of the attempt that won.
        """
        return self._acquirer.acquire(request, timeout)

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[Renewal]:
        """See `Store.renew`. A lease is renewed if a majority of the nodes still has it."""
        if not leases:
            return []

        poll = self._ask_majority(
            lambda node: node.store.renew(leases, timeout=NODE_TIMEOUT),
            timeout,
            lambda poll: (
                poll.has_majority and LossReason.UNREACHABLE not in votes.renewed(poll, len(leases))
            ),
        )
        return votes.renewed(poll, len(leases))

    def release(self, request: Release, *, timeout: float) -> Relation:
        """See `Store.release`. OURS if a majority had the lease; sent to all nodes in any case."""
        poll = self._acquirer.release(request, timeout)
        reply = votes.released(poll)
        if reply is None:
            raise poll.error()
        return reply

    def mark(self, request: Mark, *, timeout: float) -> None:
        """See `Store.mark`. A majority must write it. Any later majority includes such a node."""

        def mark(node: Node) -> None:
            node.store.mark(request, timeout=NODE_TIMEOUT)

        self._ask_majority(mark, timeout, _has_majority)

    def admit(self, request: Admit, *, timeout: float) -> Record | None:
        """See `Store.admit`. A majority must claim the key; a split vote is repeated."""
        return self._acquirer.admit(request, timeout)

    def settle_claim(self, token: Token, change: ClaimChange, *, timeout: float) -> None:
        """See `Store.settle_claim`. A majority must answer."""
        self._ask_majority(
            lambda node: node.store.settle_claim(token, change, timeout=NODE_TIMEOUT),
            timeout,
            _has_majority,
        )

    def authorize_tick(self, request: AuthorizeTick, *, timeout: float) -> Authorization:
        """See `Store.authorize_tick`. A majority must replace the last run.

        A node that was unreachable has an older last run, and refuses. While a majority has the
        leader's token, no other leader can have been authorized since this leader's election. So if
        the last run that counts is the one that the leader expects, the last run is also replaced
        on such nodes, on each only while it has the token.
        """
        poll = self._ask_majority(
            lambda node: node.store.authorize_tick(request, timeout=NODE_TIMEOUT),
            timeout,
            votes.authorized,
        )
        verdict = votes.authorized(poll)
        if verdict is not None:
            return verdict
        deposed = poll.answers.count(Authorization.DEPOSED)
        if len(poll.answers) - deposed < poll.majority:
            raise poll.error()
        [last_run] = self.last_runs([request.entry], timeout=timeout)
        if last_run not in (request.expected, request.new):
            return Authorization.CHANGED

        def swap_whatever_stands(node: Node) -> Authorization:
            [stands] = node.store.last_runs([request.entry], timeout=NODE_TIMEOUT)
            current = replace(request, expected=stands)
            return node.store.authorize_tick(current, timeout=NODE_TIMEOUT)

        poll = self._ask_majority(swap_whatever_stands, timeout, votes.authorized)
        verdict = votes.authorized(poll)
        if verdict is None:
            raise poll.error()
        return verdict

    def last_runs(self, keys: Sequence[str], *, timeout: float) -> list[str | None]:
        """See `Store.last_runs`. For each key, the last run that counts among a majority's."""
        if not keys:
            return []
        poll = self._ask_majority(
            lambda node: node.store.last_runs(keys, timeout=NODE_TIMEOUT), timeout
        )
        return [votes.last_run(texts, poll.majority) for texts in zip(*poll.answers, strict=True)]

    def trace(self, key: str, *, timeout: float) -> Trace:
        return Trace(record=self.inspect(key))  # there are no fences, and each node has a clock

    def inspect(self, key: str) -> Record | None:
        """The record that a majority has, or may have if the silent nodes also have it."""
        return votes.standing(self._ask_majority(lambda node: node.store.inspect(key)))

    def scan(self, pattern: str) -> Iterator[Record]:
        """See `Store.scan`; the records are those of :meth:`inspect`. Reads node after node."""
        nodes = self._fanout.nodes
        found: Poll[dict[str, Record]] = Poll(len(nodes), self._fanout.majority)
        for node in nodes:
            try:
                found.add({record.key: record for record in node.store.scan(pattern)})
            except StoreError as exc:
                found.add(exc)
        found.check()
        for key in sorted(set().union(*found.answers)):
            answers = [records.get(key) for records in found.answers]
            record = votes.standing(Poll(found.nodes, found.majority, answers, found.errors))
            if record is not None:
                yield record

    def foreign_keys(self, pattern: str) -> Iterator[tuple[str, str]]:
        """See `Store.foreign_keys`. Reads all nodes: a foreign key on one node blocks its vote."""
        seen: set[tuple[str, str]] = set()
        for node in self._fanout.nodes:
            try:
                found = list(node.store.foreign_keys(pattern))
            except StoreUnavailable:
                continue  # a minority may be unreachable
            yield from (stray for stray in found if stray not in seen)
            seen.update(found)

    def free(self, key: str, token: str | None) -> bool:
        """See `Store.free`. True if any node had the key. A majority must answer."""
        return any(self._ask_majority(lambda node: node.store.free(key, token)).answers)

    def info(self, section: str) -> dict[str, str]:
        """One section of INFO, from a node that may evict leases if there is one.

        Raises:
            SettingsError: Two addresses lead to one server, which would have two votes.
        """
        poll = self._ask_majority(lambda node: node.store.info(section))
        self._check_identities()
        return max(poll.answers, key=_may_evict)

    def close(self) -> None:
        self._fanout.close()

    def _ask_majority(
        self,
        operation: Callable[[Node], T],
        timeout: float = NODE_TIMEOUT,
        enough: Callable[[Poll[T]], object] = lambda poll: False,
    ) -> Poll[T]:
        """The answers that arrive until they are ``enough`` or the timeout ends.

        Raises:
            StoreUnavailable, StoreError: A majority did not answer.
        """
        poll = self._fanout.ask(operation, timeout=timeout, enough=enough)
        poll.check()
        return poll

    def _check_identities(self) -> None:
        seen: dict[str, Node] = {}
        for node in self._fanout.nodes:
            first = seen.setdefault(node.run_id, node)
            if node.run_id and first is not node:
                raise SettingsError(
                    f"{first.url} and {node.url} of the redlock:// URL are one server: its vote "
                    "would count twice. Name servers that fail independently"
                )


def _has_majority(poll: Poll[None]) -> bool:
    return poll.has_majority


def _may_evict(memory: dict[str, str]) -> bool:
    policy = memory.get("maxmemory_policy", "noeviction")
    return policy != "noeviction" and memory.get("maxmemory", "0") != "0"
