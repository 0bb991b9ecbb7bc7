"""Leases by majority in several independent Redis masters: Redlock.

The algorithm is that of redis.io, "Distributed Locks with Redis"; on each node runs what a
RedisStore runs there.

Promises
    A lease is granted by a majority of the nodes or not at all, within the validity left: every
    attempt has ttl less what it took, and less the allowance for clock drift. While a majority
    answers, everything goes on; a minority may be down, slow or partitioned. Nothing ever writes a
    lost key back, on no node. An attempt that fails is given back on all nodes, also on those that
    did not answer, by the link that the attempt went by.

Does not promise
    Fences. Each node has a counter of its own, and a grant needs no more than three of five: the
    next grant may come from another three whose counters are lower. To agree on one number takes
    consensus, which this is not. So a process that stalls between ``check()`` and its write is not
    caught by anybody; see docs/redlock.md.
    Exclusion when a node forgets what it acknowledged: a lease on nodes 1, 2, 3, node 3 restarted
    empty, and 3, 4, 5 grant the key again. So a server has no vote until it has been up for
    the ttl of the lease that is asked for (``quarantine``; its age comes with the login, where an
    ACL allows INFO). The same holds for clocks of nodes that step.
    That markers and claims survive such a restart for longer than that: a redelivery that comes
    late may run once more, a duplicate may be published. So for Beat's last runs: one that no node
    of the majority that answers has any more may be sent again.

Sequence of an acquire
    See candidate.py.

Failure handling
    A node is down: its vote is missing, nobody waits for it. A node says nothing: once a majority
    has answered it has 50 ms, and not even those where the majority decides.
    A majority is down: StoreUnavailable, as if one server were; the heartbeat goes on trying until
    the lease's own deadline.
    An exception (a soft time limit, SIGTERM) while nodes are asked: all links of the call are
    closed, and the locker releases by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.core.lease import Lease, Record, Token
from celery_singleton_lock.core.store import (
    Acquire,
    Admit,
    Authorization,
    AuthorizeTick,
    Capabilities,
    ClaimChange,
    Granted,
    MarkerState,
    Refused,
    Release,
    Released,
    Renewal,
    Trace,
)
from celery_singleton_lock.errors import SettingsError, StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.stores.redlock import votes
from celery_singleton_lock.stores.redlock.acquirer import Candidate
from celery_singleton_lock.stores.redlock.fanout import Poll, Quorum
from celery_singleton_lock.stores.redlock.url import read_nodes

__all__ = ["RedlockStore"]

_OPERATOR_TIMEOUT: Final = 2.0


class RedlockStore:
    """A majority of the nodes that a ``redlock://`` URL names.

    Raises:
        SettingsError: The URL can't be read, or names a number of nodes that is no quorum.
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        nodes = read_nodes(url)
        clock = clock or SystemClock()
        self._quorum = Quorum(nodes.members, clock)
        self._candidate = Candidate(self._quorum, clock, nodes.quarantine)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(fence=False, name="redlock", renews_for_others=True)

    def acquire(self, call: Acquire, *, timeout: float) -> Granted | Refused:
        """As of the contract; may take several attempts within ``timeout``.

        The caller's clock reading lies before the first attempt, so what it makes of the ttl is
        less than what the attempt that won has.
        """
        return self._candidate.acquire(call, timeout)

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[Renewal]:
        """Each lease by itself: renewed where a majority has it still."""
        if not leases:
            return []
        poll = self._quorum.ask(
            lambda store: store.renew(leases, timeout=timeout),
            timeout=timeout,
            enough=lambda poll: (
                poll.has_majority and Renewal.SILENT not in _by_lease(poll, len(leases))
            ),
        )
        poll.check()
        return _by_lease(poll, len(leases))

    def release(self, call: Release, *, timeout: float) -> Released:
        """Released where a majority had it; sent to all, whoever decides."""
        poll = self._candidate.release(call, timeout)
        reply = votes.released(poll)
        if reply is None:
            raise poll.error()
        return reply

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
        """Written by a majority, of which every later majority has a node."""
        self._quorum.ask(
            lambda store: store.mark(
                key, token, state, sequence, ttl, timeout=timeout, claim=claim
            ),
            timeout=timeout,
            enough=_has_majority,
            task=token.task,
        ).check()

    def admit(self, call: Admit, *, timeout: float) -> Record | None:
        """Claimed where a majority did; a split vote is tried again, as a lease's."""
        return self._candidate.admit(call, timeout)

    def settle_claim(self, token: Token, change: ClaimChange, *, timeout: float) -> None:
        """Settled by a majority."""
        self._quorum.ask(
            lambda store: store.settle_claim(token, change, timeout=timeout),
            timeout=timeout,
            enough=_has_majority,
            task=token.task,
        ).check()

    def authorize_tick(self, call: AuthorizeTick, *, timeout: float) -> Authorization:
        """Permitted where a majority swapped the last run under the leader's token.

        A node that was away has an older last run, and refuses. While the token stands on a
        majority nobody else can have been permitted since this leader's election, so if what counts
        is what the leader expects, such nodes are brought up to date, each under the token still.
        """
        poll = self._ask_permission(
            lambda store: store.authorize_tick(call, timeout=timeout), call, timeout
        )
        verdict = votes.authorized(poll)
        if verdict is not None:
            return verdict
        if poll.count - poll.heard.count(Authorization.DEPOSED) < poll.majority:
            raise poll.error()
        if self.last_runs([call.entry], timeout=timeout)[0] not in (call.expected, call.new):
            return Authorization.CHANGED

        def swap_whatever_stands(store: RedisStore) -> Authorization:
            [stands] = store.last_runs([call.entry], timeout=timeout)
            return store.authorize_tick(replace(call, expected=stands), timeout=timeout)

        poll = self._ask_permission(swap_whatever_stands, call, timeout)
        verdict = votes.authorized(poll)
        if verdict is None:
            raise poll.error()
        return verdict

    def _ask_permission(
        self, operation: Callable[[RedisStore], Authorization], call: AuthorizeTick, timeout: float
    ) -> Poll[Authorization]:
        poll = self._quorum.ask(
            operation, timeout=timeout, enough=votes.authorized, task=call.token.task
        )
        poll.check()
        return poll

    def last_runs(self, keys: Sequence[str], *, timeout: float) -> list[str | None]:
        """Of each, the one that counts among those of a majority at least."""
        if not keys:
            return []
        poll = self._quorum.ask(
            lambda store: store.last_runs(keys, timeout=timeout), timeout=timeout, enough=_all
        )
        poll.check()
        return [votes.last_run(texts, poll.majority) for texts in zip(*poll.heard, strict=True)]

    def trace(self, key: str, *, timeout: float) -> Trace:
        return Trace(record=self.inspect(key))  # no fences, and a clock per node

    def inspect(self, key: str) -> Record | None:
        """What a majority has, or may have as far as the silent nodes are concerned."""
        poll = self._quorum.ask(
            lambda store: store.inspect(key), timeout=_OPERATOR_TIMEOUT, enough=_all
        )
        poll.check()
        return votes.standing(poll)

    def scan(self, pattern: str) -> Iterator[Record]:
        """As :meth:`inspect`, of all keys; the nodes are read one after the other."""
        found: list[dict[str, Record] | StoreError] = []
        for store in self._quorum.stores:
            try:
                found.append({record.key: record for record in store.scan(pattern)})
            except StoreError as exc:
                found.append(exc)
        majority = self._quorum.majority
        whole = Poll(tuple(found), (), majority)
        whole.check()
        for key in sorted(set().union(*whole.heard)):
            answers = tuple(f if isinstance(f, StoreError) else f.get(key) for f in found)
            record = votes.standing(Poll(answers, (), majority))
            if record is not None:
                yield record

    def strays(self, pattern: str) -> Iterator[tuple[str, str]]:
        """As of a RedisStore, on any node that answers; one is enough to take away its vote."""
        seen: set[tuple[str, str]] = set()
        for store in self._quorum.stores:
            try:
                found = list(store.strays(pattern))
            except StoreUnavailable:
                continue  # a minority may be away
            yield from (stray for stray in found if stray not in seen)
            seen.update(found)

    def free(self, key: str, token: str | None) -> bool:
        """Whether any node had it; a majority must have answered, so that no majority has it."""
        poll = self._quorum.ask(
            lambda store: store.free(key, token), timeout=_OPERATOR_TIMEOUT, enough=_all
        )
        poll.check()
        return any(poll.heard)

    def info(self, section: str) -> dict[str, str]:
        """One section of INFO, of a node that may throw leases away if there is one.

        Raises:
            SettingsError: Two addresses lead to one server, which would have two votes.
        """
        poll = self._quorum.ask(
            lambda store: store.info(section), timeout=_OPERATOR_TIMEOUT, enough=_all
        )
        poll.check()
        self._check_identities()
        return max(poll.heard, key=_may_evict)

    def close(self) -> None:
        self._quorum.close()

    def _check_identities(self) -> None:
        ids = self._quorum.run_ids()
        nodes = self._quorum.nodes
        for index, run_id in enumerate(ids):
            if run_id and run_id in ids[:index]:
                raise SettingsError(
                    f"{nodes[ids.index(run_id)]} and {nodes[index]} of the redlock:// URL are one "
                    "server: its vote would count twice. Name servers that fail independently"
                )


def _by_lease(poll: Poll[list[Renewal]], count: int) -> list[Renewal]:
    heard, nodes = poll.heard, len(poll.answers)
    return [votes.renewed([replies[i] for replies in heard], nodes) for i in range(count)]


def _has_majority(poll: Poll[None]) -> bool:
    return poll.has_majority


def _all(poll: object) -> bool:
    """Nothing is enough: wait for whoever answers."""
    return False


def _may_evict(memory: dict[str, str]) -> bool:
    policy = memory.get("maxmemory_policy", "noeviction")
    return policy != "noeviction" and memory.get("maxmemory", "0") != "0"
