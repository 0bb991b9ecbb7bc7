"""Random lives of leases: the store against a model of a few lines, and processes that share it.

Time is turned by hand, threads never start: each step is a rule, each promise an invariant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from celery_singleton_lock.core import native_threads
from celery_singleton_lock.core.events import Events
from celery_singleton_lock.core.heartbeat import Heartbeat
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Holder, Kind, Lease, LossReason, Token
from celery_singleton_lock.core.locker import Locker
from celery_singleton_lock.core.store_requests import (
    RENEWED,
    Acquire,
    Granted,
    Refused,
    Relation,
    Release,
    ReleaseReply,
)
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.testing import ManualClock
from celery_singleton_lock.testing.contract import lease_of, new_token
from tests.harness.flat_store import FlatStore
from tests.harness.machines import play

KEY = Keyspace("unit").lock("s", "k")
HOLDER = Holder(task="app.sync", task_id="t")
TOKENS = st.builds(
    Token, st.sampled_from(("a", "b")), st.just(0), st.integers(0, 2), st.sampled_from(("x", "y"))
)
TTLS = st.sampled_from((3.0, 6.0, 12.0))
NUMBERS = st.integers(0, 2)


AMOUNTS = [
    pytest.param(100, id="some"),
    pytest.param(1500, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
]


# The store against what a lease may do, written once more and otherwise: one key, no completion
# records.


@dataclass
class Expected:
    """What stands in the key."""

    kind: Kind
    token: Token
    until: float


class StoreLife(RuleBasedStateMachine):
    """The memory store, and beside it one value with an end."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.there: Expected | None = None
        self.fence = 0

    def stands(self) -> Expected | None:
        if self.there is not None and self.clock.now() >= self.there.until:
            self.there = None
        return self.there

    @initialize(token=TOKENS, other=TOKENS)
    def deliveries_arrive(self, token: Token, other: Token) -> None:
        self.tokens = [token, replace(token, nonce="duplicate"), other]

    def token(self, number: int) -> Token:
        """One of few, so that they meet often."""
        return self.tokens[number]

    @rule(number=NUMBERS, ttl=TTLS)
    def acquire(self, number: int, ttl: float) -> None:
        token = self.token(number)
        reply = self.store.leases.acquire(
            Acquire(slots=(KEY,), token=token, holder=HOLDER, ttl=ttl)
        )
        expected = self.refusal(token)
        if expected is not None:
            assert isinstance(reply, Refused)
            assert reply.relation is expected
            return
        assert isinstance(reply, Granted)
        assert reply.fence is not None
        assert reply.fence > self.fence, "a grant's fence is above that of every earlier one"
        self.fence = reply.fence
        self.there = Expected(Kind.LEASE, token, self.clock.now() + ttl)

    def refusal(self, token: Token) -> Relation | None:
        there = self.stands()
        if there is None or (there.kind is Kind.LEASE and there.token == token):
            return None
        if there.token.task_id != token.task_id:
            return Relation.OTHER
        if there.token.retries > token.retries:
            return Relation.LATER
        if there.kind is Kind.COOLING:
            return Relation.OTHER
        if there.token.retries < token.retries:
            return Relation.EARLIER
        return None if there.kind is Kind.RESERVED else Relation.DUPLICATE

    @rule(number=NUMBERS, ttl=TTLS)
    def renew(self, number: int, ttl: float) -> None:
        token = self.token(number)
        [reply] = self.store.leases.renew([lease_of(KEY, token, ttl)])
        there = self.stands()
        if there is None:
            assert reply is LossReason.GONE
        elif there.token != token or there.kind in (Kind.RESERVED, Kind.COOLING):
            assert reply is LossReason.REPLACED
        elif there.kind is Kind.DYING:
            assert reply is LossReason.DYING
        else:
            assert reply is RENEWED
            there.until = self.clock.now() + ttl

    @rule(
        number=NUMBERS,
        ttl=TTLS,
        become=st.sampled_from((None, None, Kind.RESERVED, Kind.COOLING, Kind.DYING)),
    )
    def release(self, number: int, ttl: float, become: Kind | None) -> None:
        token = self.token(number)
        following = token.next_attempt() if become is Kind.RESERVED else None
        request = Release(
            keys=(KEY,), token=token, become=become, become_ttl=ttl, next_token=following
        )
        reply = self.store.leases.release(request)
        there = self.stands()
        if there is None or there.token.attempt != token.attempt:
            assert reply is ReleaseReply.NOT_OURS
        elif there.token != token:
            assert reply is ReleaseReply.DUPLICATE
        else:
            assert reply is ReleaseReply.OURS
            if there.kind in (Kind.LEASE, Kind.DYING):
                end = self.clock.now() + ttl
                self.there = Expected(become, following or token, end) if become else None

    @rule(named=st.booleans(), number=NUMBERS)
    def free(self, named: bool, number: int) -> None:
        token = self.token(number)
        there = self.stands()
        matches = there is not None and (not named or there.token == token)
        assert self.store.operators.free(KEY, str(token) if named else None) is matches
        if matches:
            self.there = None

    @rule(seconds=st.sampled_from((0.5, 2.0, 5.0)))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def the_same_stands_there(self) -> None:
        record, there = self.store.leases.inspect(KEY), self.stands()
        assert (record is None) == (there is None)
        if record is not None and there is not None:
            assert (record.kind, record.token) == (there.kind, str(there.token))
            assert record.ttl == pytest.approx(there.until - self.clock.now())


@pytest.mark.parametrize("examples", AMOUNTS)
def test_the_store_does_what_a_lease_may_do(examples: int) -> None:
    play(StoreLife, examples, 30)


# Processes that share a store which fails, forgets and answers late.

TTL = 6.0
ANSWERED = ("answered", "request late", "reply late", "stopped")


class FaultyStore(FlatStore):
    """The memory store; what `fates` says happens to the next requests."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.fates: list[str] = []
        self.away = False
        self.answered = True  # the latest request

    def lose_everything(self) -> None:
        with self._guard:
            self._entries.clear()
            self._fence = 0

    def _apply(self, rule: Any, timeout: float) -> tuple[Any, int]:
        fate = self.fates.pop(0) if self.fates else "answered"
        self.answered = not self.away and fate in ANSWERED
        if self.away or fate == "request lost":
            raise StoreUnavailable("connection refused")
        if fate == "request late":
            self._clock.advance(timeout / 2)
        outcome = super()._apply(rule, timeout)
        if fate == "reply late":
            self._clock.advance(timeout / 2)
        if fate == "reply lost":
            self._clock.advance(timeout)
            raise StoreUnavailable("timed out")
        if fate == "stopped":  # SIGSTOP before the reply is read
            self._clock.advance(TTL)
        return outcome

    def inspect(self, key: str) -> Any:
        fates, away, self.fates, self.away = self.fates, self.away, [], False
        try:
            return super().inspect(key)
        finally:
            self.fates, self.away = fates, away


FATES = st.lists(st.sampled_from((*ANSWERED, "request lost", "reply lost")), max_size=3)


class Process:
    """One process: a locker and a heartbeat, and what it believes to hold."""

    def __init__(self, store: FaultyStore, clock: ManualClock) -> None:
        events = Events([])
        self.heartbeat = Heartbeat(store, clock, events)
        self.locker = Locker(store, clock, self.heartbeat, events)
        self.held: list[Lease] = []

    def lose(self, lease: Lease) -> None:
        self.held.remove(lease)


class SharedStore(RuleBasedStateMachine):
    """Three processes and one key."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.store = FaultyStore(self.clock)
        self.processes = [Process(self.store, self.clock) for _ in range(3)]
        self.ended: list[Lease] = []  # seen to be lost or released
        self.leases: list[Lease] = []
        self.fence = 0
        self.excused_until = 0.0

    @initialize()
    def one_holds_it(self) -> None:
        self.acquire(0, [])

    @rule(which=st.integers(0, 2), fates=FATES)
    def acquire(self, which: int, fates: list[str]) -> None:
        process = self.processes[which]
        self.store.fates = list(fates)
        request = Acquire(slots=(KEY,), token=new_token(), holder=HOLDER, ttl=TTL)
        try:
            reply = process.locker.acquire(request, on_lost=process.lose)
        except StoreError:
            # The last that was sent is a release by token.
            answered, record = self.store.answered, self.store.leases.inspect(KEY)
            assert not answered or record is None or record.token != str(request.token)
            return
        finally:
            self.store.fates = []
        if isinstance(reply, Lease):
            assert not reply.lost, "a grant that comes after its deadline is none"
            process.held.append(reply)
            self.leases.append(reply)
            assert reply.fence > self.fence, "a fence rises, also over a loss of the store's data"
            self.fence = reply.fence

    @precondition(lambda self: any(process.held for process in self.processes))
    @rule(data=st.data(), fates=FATES)
    def release(self, data: Any, fates: list[str]) -> None:
        process = data.draw(st.sampled_from([each for each in self.processes if each.held]))
        lease = process.held.pop(0)
        self.store.fates = list(fates)
        before = self.store.leases.inspect(KEY)
        process.locker.release(lease, Release(keys=(KEY,), token=lease.token))
        self.store.fates = []
        if before is not None and before.token != str(lease.token):
            after = self.store.leases.inspect(KEY)
            expired = self.clock.now() >= before.ttl  # a reply may have taken that long
            assert expired or (after is not None and after.token == before.token)

    @rule(which=st.integers(0, 2), fates=FATES)
    def the_heartbeat_sweeps(self, which: int, fates: list[str]) -> None:
        self.store.fates = list(fates)
        process = self.processes[which]
        process.heartbeat.sweep()
        self.store.fates = []
        assert not any(lease.lost for lease in process.held), "a sweep declares what is lost"

    @rule(seconds=st.sampled_from((0.3, 1.0, 2.0, 5.7, 7.0)))
    def time_passes_and_keepers_starve(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(seconds=st.sampled_from((1.0, 3.0, 10.0)))
    def time_passes(self, seconds: float) -> None:
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.clock.advance(min(0.25, end - self.clock.now()))
            for process in self.processes:
                process.heartbeat.sweep()

    @rule(seconds=st.sampled_from((1.0, 3.0, 10.0)))
    def the_store_is_away(self, seconds: float) -> None:
        self.store.away = True
        self.time_passes(seconds)
        self.store.away = False

    @rule(which=st.integers(0, 2), fate=st.sampled_from(("reply late", "reply lost")))
    def a_renewal_is_answered_late(self, which: int, fate: str) -> None:
        self.clock.advance(TTL / 3)
        self.the_heartbeat_sweeps(which, [fate])

    @rule()
    def the_store_loses_everything(self) -> None:
        self.clock.advance(0.01)  # a restart takes longer than a microsecond
        self.store.lose_everything()
        self.excused_until = self.clock.now() + TTL

    @invariant()
    def at_most_one_lease_is_valid(self) -> None:
        valid = [lease for lease in self.leases if not lease.lost]
        assert len(valid) <= 1 or self.clock.now() < self.excused_until

    @invariant()
    def a_valid_lease_has_the_key(self) -> None:
        if self.clock.now() >= self.excused_until:
            for lease in self.leases:
                record = self.store.leases.inspect(KEY)
                assert lease.lost or (record is not None and record.token == str(lease.token))

    @invariant()
    def what_is_lost_is_never_valid_again(self) -> None:
        assert all(lease.lost and not lease.remaining() for lease in self.ended)
        self.ended += [lease for lease in self.leases if lease.lost and lease not in self.ended]

    @invariant()
    def the_heartbeat_has_what_the_process_holds(self) -> None:
        for process in self.processes:
            registered = list(process.heartbeat._leases)
            assert registered == process.held


@pytest.mark.parametrize("examples", AMOUNTS)
def test_processes_that_share_a_store_never_hold_one_key_at_once(
    monkeypatch: pytest.MonkeyPatch, examples: int
) -> None:
    def no_thread(function: Callable[[], None], name: str) -> None:
        pass

    monkeypatch.setattr(native_threads, "start_new_thread", no_thread)
    play(SharedStore, examples, 30)
