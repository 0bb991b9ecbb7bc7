"""Leases by majority in several independent Redis masters (Redlock).

Overview
    The algorithm is that of redis.io, "Distributed Locks with Redis". Each node runs the same
    scripts as for a single RedisStore. A request goes to all nodes at once, and the client waits
    until the answers decide. ``votes`` has the decisions, ``fanout`` the threads and queues.
    Sequence of an acquire::

        t0 -> send to all --majority--> in time? -> change the claim on all -> Granted
               |   |   |                  +-- no --> give back on all -> StoreUnavailable
               |   |   +-- another holder has a majority, or a node knows (done, duplicate ...)
               |   |                    -> give back on all -> Refused
               |   +-- no majority answers -> give back on all -> StoreUnavailable
               +-- split vote -> give back on all -> random pause -> t0 again, until the timeout:
                     then Refused if another holder may have a majority, else StoreUnavailable

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
    process that stalls between ``check()`` and its write is not detected.
    Exclusion when a node forgets an acknowledged write. If a lease is on nodes 1, 2, 3 and node 3
    restarts empty, nodes 3, 4, 5 would grant the key again. So a server has no vote until it has
    been up for the ttl of the requested lease (``quarantine``; its uptime is read with INFO after
    each login, if an ACL allows it). A node whose clock is set forward forgets leases too.
    Completion records, claims and Beat's last runs may be lost by such a restart after the
    quarantine: a late redelivery may run again, a duplicate may be published, a tick may be sent
    again.

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

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from ...core.clock import Clock, SystemClock
from ...core.lease import Lease, LossReason, OperatorRelease, Record, Token
from ...core.store import Capabilities, Claims, ConnectionWatch, Leases, Operators, Schedule, Store
from ...core.store_requests import (
    Acquire,
    Authorization,
    AuthorizeRun,
    ClaimChange,
    ClaimRequest,
    Granted,
    Mark,
    Refused,
    Release,
    ReleaseReply,
    Renewal,
    Trace,
)
from ...errors import SettingsError, StoreError, StoreUnavailable
from ..eviction import risk
from . import votes
from .contest import Contest
from .fanout import NODE_TIMEOUT, Fanout, Node
from .node_urls import read_nodes
from .votes import Poll

# A vote on a lease that stays split for more attempts may be split by holders, not by contenders.
_ATTEMPTS: Final = 3


class RedlockLeases(Leases):
    """See `Leases`."""

    def __init__(self, contest: Contest) -> None:
        self._contest = contest

    def acquire(self, request: Acquire, *, timeout: float) -> Granted | Refused:
        """See `Leases.acquire`. May make several attempts within ``timeout``, and one give-back.

        The caller reads its clock before the first attempt, so its deadline is earlier than the ttl
        of the attempt that won.
        """
        poll, verdict, asked_at = self._contest.contend(request, request.slots, timeout, _ATTEMPTS)
        if isinstance(verdict, Granted):
            self._contest.keep(request, verdict, poll, asked_at, timeout)
        return verdict

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[Renewal]:
        """See `Leases.renew`. A lease is renewed if a majority of the nodes still has it."""

        def decide(poll: Poll[list[Renewal]]) -> bool:
            replies = votes.renewed(poll, len(leases))
            return poll.has_majority() and LossReason.UNREACHABLE not in replies

        poll = self._contest.ask_majority(
            lambda node: node.store.leases.renew(leases, timeout=NODE_TIMEOUT), timeout, decide
        )
        return votes.renewed(poll, len(leases))

    def release(self, request: Release, *, timeout: float) -> ReleaseReply:
        """See `Leases.release`. OURS if a majority had the lease; sent to all nodes in any case."""
        poll, reply = self._contest.release(request, timeout, votes.released)
        if reply is None:
            raise poll.error()
        return reply

    def mark(self, request: Mark, *, timeout: float) -> None:
        """See `Leases.mark`. A majority must write it. Any later majority includes such a node."""
        self._contest.ask_majority(
            lambda node: node.store.leases.mark(request, timeout=NODE_TIMEOUT),
            timeout,
            Poll.has_majority,
        )

    def trace(self, key: str, *, timeout: float) -> Trace:
        return Trace(record=self.inspect(key))  # there are no fences, and each node has a clock

    def inspect(self, key: str) -> Record | None:
        """The record that a majority has, or may have if the silent nodes also have it."""
        poll = self._contest.inspect(key, NODE_TIMEOUT)
        poll.check()
        return votes.standing(poll)


class RedlockClaims(Claims):
    """See `Claims`."""

    def __init__(self, contest: Contest) -> None:
        self._contest = contest

    def take(self, request: ClaimRequest, *, timeout: float) -> Record | None:
        """See `Claims.take`. A majority must claim the key; a split vote is repeated.

        At the end of the timeout, a message that may have a majority counts as published. A
        withdrawal may take back an earlier claim of the same message, which is then published
        again. That claim had no majority, so it refused no other message.
        """

        _, verdict, _ = self._contest.contend(request, (request.key,), timeout, math.inf)
        return verdict.record if isinstance(verdict, Refused) else None

    def change(self, token: Token, change: ClaimChange, *, timeout: float) -> None:
        """See `Claims.change`. A majority must answer."""
        self._contest.ask_majority(
            lambda node: node.store.claims.change(token, change, timeout=NODE_TIMEOUT),
            timeout,
            Poll.has_majority,
        )


class RedlockSchedule(Schedule):
    """See `Schedule`."""

    def __init__(self, contest: Contest) -> None:
        self._contest = contest

    def authorize(self, request: AuthorizeRun, *, timeout: float) -> Authorization:
        """See `Schedule.authorize`. A majority must replace the last run.

        A node that was unreachable has an older last run, and refuses. While a majority has the
        leader's token, no other leader can have been authorized since this leader's election. So if
        the last run that counts is the one that the leader expects, the last run is also replaced
        on such nodes, on each only while it has the token.
        """
        poll = self._contest.ask_majority(
            lambda node: node.store.schedule.authorize(request, timeout=NODE_TIMEOUT),
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
            [stands] = node.store.schedule.last_runs([request.entry], timeout=NODE_TIMEOUT)
            current = replace(request, expected=stands)
            return node.store.schedule.authorize(current, timeout=NODE_TIMEOUT)

        poll = self._contest.ask_majority(swap_whatever_stands, timeout, votes.authorized)
        verdict = votes.authorized(poll)
        if verdict is None:
            raise poll.error()
        return verdict

    def last_runs(self, keys: Sequence[str], *, timeout: float) -> list[str | None]:
        """See `Schedule.last_runs`. For each key, the last run that counts among a majority's."""
        return self._contest.texts(keys, timeout)


class RedlockOperators(Operators):
    """See `Operators`."""

    def __init__(self, contest: Contest) -> None:
        self._contest = contest

    def scan(self, pattern: str) -> Iterator[Record]:
        """See `Operators.scan`; the records are those of :meth:`inspect`. Reads node after node."""
        nodes = self._contest.fanout.nodes
        found: Poll[dict[str, Record]] = Poll(len(nodes), self._contest.fanout.majority)
        for node in nodes:
            try:
                found.add({record.key: record for record in node.store.operators.scan(pattern)})
            except StoreError as exc:
                found.add(exc)
        found.check()
        for key in sorted(set().union(*found.answers)):
            answers = [votes.answer(key, records.get(key)) for records in found.answers]
            record = votes.standing(Poll(found.nodes, found.majority, answers, found.errors))
            if record is not None:
                yield record

    def texts(self, pattern: str) -> Iterator[tuple[str, str, float]]:
        """See `Operators.texts`. Of several texts of one key, the last by the alphabet."""
        found: dict[str, tuple[str, float]] = {}
        for node in self._contest.fanout.nodes:
            with suppress(StoreUnavailable):  # a minority may be unreachable
                for key, text, ttl in node.store.operators.texts(pattern):
                    found[key] = max(found.get(key, ("", 0.0)), (text, ttl))
        yield from ((key, *found[key]) for key in sorted(found))

    def foreign_keys(self, pattern: str) -> Iterator[tuple[str, str]]:
        """See `Operators.foreign_keys`. A foreign key on one node blocks its vote."""
        found: set[tuple[str, str]] = set()
        for node in self._contest.fanout.nodes:
            with suppress(StoreUnavailable):  # a minority may be unreachable
                found.update(node.store.operators.foreign_keys(pattern))
        yield from sorted(found)

    def free(self, key: str, token: str | None, by: OperatorRelease | None = None) -> bool:
        """See `Operators.free`. True if any node had the key. A majority must answer."""
        return any(
            self._contest.ask_majority(
                lambda node: node.store.operators.free(key, token, by)
            ).answers
        )

    def info(self, section: str) -> dict[str, str]:
        """One section of INFO, of the node that endangers leases most by evicting keys.

        Raises:
            SettingsError: Two addresses lead to one server, which would have two votes.
        """
        poll = self._contest.ask_majority(lambda node: node.store.operators.info(section))
        seen: dict[str, Node] = {}
        for node in self._contest.fanout.nodes:
            first = seen.setdefault(node.run_id, node)
            if node.run_id and first is not node:
                raise SettingsError(
                    f"{first.url} and {node.url} of the redlock:// URL are one server: its vote "
                    "would count twice. Name servers that fail independently"
                )
        return max(poll.answers, key=risk)

    def release_notes(self, keys: Sequence[str], *, timeout: float) -> list[str | None]:
        """See `Operators.release_notes`. For each key, the note that counts among a majority's."""
        return self._contest.texts(keys, timeout)


class RedlockStore(Store):
    """A store on the nodes that a ``redlock://`` URL names. A majority of them decides.

    Raises:
        SettingsError: The URL cannot be read, or names an even number of nodes or fewer than three.
    """

    capabilities = Capabilities(
        fence=False, name="redlock", renews_for_others=True, usable_before_fork=True
    )

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        nodes, quarantine = read_nodes(url)
        clock = clock or SystemClock()
        self._fanout = Fanout(nodes, clock)
        contest = Contest(self._fanout, clock, quarantine)
        self.leases = RedlockLeases(contest)
        self.claims = RedlockClaims(contest)
        self.schedule = RedlockSchedule(contest)
        self.operators = RedlockOperators(contest)

    def watch_connections(self, watch: ConnectionWatch) -> None:
        self._fanout.report_to(watch)

    def close(self) -> None:
        self._fanout.close()
