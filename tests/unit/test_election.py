"""Candidates on one store and one manual clock: which one leads, and which may send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock.beat.election import Election
from celery_singleton_lock.core import native_threads
from celery_singleton_lock.core.events import Event, EventName, Events
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Token
from celery_singleton_lock.core.store import Capabilities
from celery_singleton_lock.core.store_requests import (
    Acquire,
    Authorization,
    AuthorizeRun,
    Granted,
    Refused,
)
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.transitions import Entry
from celery_singleton_lock.testing import ManualClock
from tests.harness.events import Recorded
from tests.harness.flat_store import FlatStore

KEY = Keyspace("unit").leader("beats")
TTL, POLL = 15.0, 1.0
OF_LEADERS = {
    EventName.LEADING,
    EventName.STANDING_BY,
    EventName.RESIGNED,
    EventName.LEASE_LOST,
    EventName.STORE_UNREACHABLE,
    EventName.STORE_BACK,
}


class CuedStore(FlatStore):
    """The memory store, whose answers get lost on cue."""

    away = False
    #: How many of the next authorizations are carried out without a reply.
    lost_replies = 0
    #: How many of the next releases are carried out without a reply.
    lost_releases = 0
    #: What happens while an authorization is on its way.
    before_authorization: Callable[[], object] = staticmethod(lambda: None)
    #: The share of a ttl that a reply guarantees.
    trusted = 1.0

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return replace(MemoryStore.capabilities, trusted=self.trusted)

    def acquire(self, request: Acquire, *, timeout: float = 0) -> Granted | Refused:
        self._check()
        return super().acquire(request, timeout=timeout)

    def renew_leases(self, leases: Any, *, timeout: float = 0) -> Any:
        self._check()
        return super().renew_leases(leases, timeout=timeout)

    def release(self, request: Any, *, timeout: float = 0) -> Any:
        self._check()
        reply = super().release(request, timeout=timeout)
        if self.lost_releases:
            self.lost_releases -= 1
            raise StoreUnavailable("no reply")
        return reply

    def authorize_run(self, request: AuthorizeRun, *, timeout: float = 0) -> Authorization:
        self._check()
        self.before_authorization()
        reply = super().authorize_run(request, timeout=timeout)
        if self.lost_replies:
            self.lost_replies -= 1
            raise StoreUnavailable("no reply")
        return reply

    def last_runs(self, keys: Sequence[str], *, timeout: float = 0) -> list[str | None]:
        self._check()
        return super().last_runs(keys, timeout=timeout)

    def _check(self) -> None:
        if self.away:
            raise StoreUnavailable("connection refused")


class Candidate:
    """A process: an election with a runtime of its own."""

    def __init__(self, store: CuedStore, clock: ManualClock, pid: int) -> None:
        app = Celery("beats", broker="memory://", set_as_current=False)
        app.conf.update(
            singleton_lock_prefix="unit",
            singleton_lock_beat_ttl=TTL,
            singleton_lock_beat_poll=POLL,
        )
        runtime = Runtime(app, store=store, clock=clock)
        self._said = Recorded()
        runtime.events = Events([self._said])
        self.heartbeat = runtime.locker.heartbeat
        self.election = Election(runtime)
        self.election._holder = replace(self.election._holder, pid=pid, process="")

    @property
    def said(self) -> list[Event]:
        return self._said.all()

    def names(self) -> list[EventName]:
        return [event.name for event in self.said if event.name in OF_LEADERS]


class Bench:
    def __init__(self, trusted: float = 1.0) -> None:
        self.clock = ManualClock()
        self.store = CuedStore(self.clock)
        self.store.trusted = trusted
        self.a, self.b = (Candidate(self.store, self.clock, pid) for pid in (1, 2))

    def advance(self, seconds: float, *running: Candidate) -> None:
        """Let time pass; the heartbeats of ``running`` renew, the others' processes stand still."""
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            pauses = [candidate.heartbeat.sweep() for candidate in running]
            steps = [pause for pause in pauses if pause is not None]
            self.clock.advance(min([end - self.clock.now(), *steps, 1.0]) or 1e-6)
        for candidate in running:
            candidate.heartbeat.sweep()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(native_threads, "start_new_thread", lambda function, name: None)
    return Bench()


# --- which one leads -----------------------------------------------------------------------------


def test_one_candidate_leads_and_the_others_learn_which(bench: Bench) -> None:
    a, b = bench.a.election, bench.b.election
    assert a.campaign()
    assert not b.campaign()
    assert (a.leading, b.leading) == (True, False)
    assert bench.a.names() == [EventName.LEADING]
    assert bench.b.names() == [EventName.STANDING_BY]
    assert bench.b.said[-1].holder.pid == 1


def test_a_leader_that_renews_leads_on_and_nothing_is_said_twice(bench: Bench) -> None:
    a, b = bench.a, bench.b
    for _ in range(100):
        assert a.election.campaign()
        assert not b.election.campaign()
        bench.advance(1, a, b)
    assert (a.names(), b.names()) == ([EventName.LEADING], [EventName.STANDING_BY])
    assert a.election.term == 1


def test_a_standby_asks_once_per_poll(bench: Bench) -> None:
    bench.a.election.campaign()
    assert not bench.b.election.campaign()
    assert bench.b.election.pause() == pytest.approx(POLL)
    bench.a.election.resign("stopped")
    assert not bench.b.election.campaign()  # it is too early to ask
    bench.clock.advance(POLL)
    assert bench.b.election.campaign()


def test_a_standby_comes_just_after_a_dead_leaders_lease(bench: Bench) -> None:
    a, b = bench.a.election, bench.b.election
    a.campaign()
    bench.clock.advance(TTL - 0.3)
    assert not b.campaign()
    assert b.pause() == pytest.approx(0.305, abs=1e-6)
    bench.clock.advance(b.pause())
    assert b.campaign()


@pytest.mark.parametrize("trusted", [1.0, 0.5])
def test_a_leader_looks_at_its_lease_as_often_as_it_is_renewed(
    bench: Bench, trusted: float
) -> None:
    leader = Bench(trusted).a.election
    assert leader.campaign()
    assert leader.pause() == pytest.approx(TTL * trusted / 3)


def test_a_leader_that_was_stopped_knows_by_the_clock_that_it_leads_no_more(bench: Bench) -> None:
    a, b = bench.a.election, bench.b.election
    a.campaign()
    bench.clock.advance(TTL)
    assert not a.leading
    assert b.campaign()
    assert not a.campaign()
    assert bench.a.names() == [EventName.LEADING, EventName.STANDING_BY]


def test_a_leader_that_was_stopped_and_finds_no_other_leads_again_and_says_so(bench: Bench) -> None:
    a = bench.a
    a.election.campaign()
    bench.clock.advance(TTL + 1)
    bench.advance(0.1, a)
    assert a.election.campaign()
    assert a.names() == [EventName.LEADING, EventName.LEASE_LOST, EventName.LEADING]
    assert a.election.term == 2


def test_a_leader_deposed_while_its_heartbeat_finds_out_says_that_it_leads_again(
    bench: Bench,
) -> None:
    # The store came back empty, and both ask it at once.
    a = bench.a
    a.election.campaign()
    assert bench.store.operators.free(KEY, None)
    bench.clock.advance(TTL / 3)
    bench.store.before_authorization = a.heartbeat.sweep
    assert not a.election.authorize_run("e", 1.0)
    assert a.election.campaign()
    assert a.names() == [EventName.LEADING, EventName.LEASE_LOST, EventName.LEADING]


def test_a_leader_whose_lease_is_near_its_end_leads_no_more(bench: Bench) -> None:
    # The store would still authorize it; its own deadline comes first.
    bench.a.election.campaign()
    bench.clock.advance(TTL - 0.1)
    assert not bench.b.election.campaign()
    assert not bench.a.election.leading
    assert not bench.a.election.authorize_run("e", 1.0)


def test_a_leader_that_resigns_lets_the_others_come_first(bench: Bench) -> None:
    a, b = bench.a.election, bench.b.election
    a.campaign()
    a.resign("it was stopped")
    assert bench.store.leases.inspect(KEY) is None
    assert not a.campaign()
    assert b.campaign()
    assert bench.a.names() == [EventName.LEADING, EventName.RESIGNED]
    a.resign("again")
    assert bench.a.names() == [EventName.LEADING, EventName.RESIGNED]


def test_a_grant_whose_reply_was_lost_blocks_no_candidate_for_a_ttl(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = bench.a.election

    def grant_without_a_reply(request: Acquire, *, timeout: float = 0) -> Granted | Refused:
        FlatStore.acquire(bench.store, request)
        bench.store.away = True
        raise StoreUnavailable("no reply")

    with monkeypatch.context() as patch:
        patch.setattr(bench.store.leases, "acquire", grant_without_a_reply)
        assert not a.campaign()
    assert bench.store.leases.inspect(KEY) is not None
    bench.store.away = False
    bench.clock.advance(POLL)
    a._locker.retry_queue.catch_up()
    assert a.campaign()


def test_a_leader_without_progress_for_its_ttl_resigns(bench: Bench) -> None:
    a, b = bench.a, bench.b
    a.election.campaign()
    bench.advance(TTL - 1, a)
    assert a.election.resign_if_stalled(1) == pytest.approx(1)
    a.election.progress()
    bench.advance(TTL - 1, a)
    assert a.election.resign_if_stalled(1) == pytest.approx(1)
    bench.advance(1, a)
    assert a.election.resign_if_stalled(1) is None
    assert b.election.campaign()
    assert a.names() == [EventName.LEADING, EventName.RESIGNED]
    assert a.said[-1].data["why"] == "it could send nothing for 15 s"
    # What its thread does when it comes back is refused.
    assert not a.election.authorize_run("e", 1.0)


def test_the_watch_of_an_earlier_term_does_not_end_the_present_one(bench: Bench) -> None:
    a = bench.a
    a.election.campaign()
    a.election.resign("stopped")
    assert a.election.resign_if_stalled(1) is None
    bench.clock.advance(POLL)
    assert a.election.campaign()
    bench.advance(TTL, a)
    assert a.election.resign_if_stalled(1) is None
    assert a.election.leading
    assert a.election.resign_if_stalled(2) is None
    assert not a.election.leading


# --- which may send -------------------------------------------------------------------------------


def test_only_the_leader_is_authorized(bench: Bench) -> None:
    a, b = bench.a.election, bench.b.election
    assert not a.authorize_run("e", 1.0)
    a.campaign()
    b.campaign()
    assert a.authorize_run("e", 1.0)
    assert not b.authorize_run("e", 1.0)
    assert a.last_runs["e"] == 1.0


def test_the_next_leader_sees_every_run_that_was_authorized(bench: Bench) -> None:
    a, b = bench.a.election, bench.b.election
    a.campaign()
    for entry in ("e", "f"):
        for at in (1.0, 2.000001, 1_700_000_000.123457):
            assert a.authorize_run(entry, at)
    a.resign("stopped")
    bench.clock.advance(POLL)
    b.campaign()
    assert b.recall(["e", "f", "new"]) == ["e", "f", "new"]
    assert [b.last_runs.get(entry) for entry in ("e", "f", "new")] == [
        1_700_000_000.123457,
        1_700_000_000.123457,
        None,
    ]
    assert b.recall(["e", "f", "new"]) == []
    assert b.authorize_run("new", 3.0)


def test_the_store_refuses_a_leader_that_believes_it_leads(bench: Bench) -> None:
    # It has looked at its lease, is stopped, and wakes at the authorization itself.
    a, b = bench.a.election, bench.b.election
    a.campaign()
    a.authorize_run("e", 1.0)
    lease = a._lease
    assert lease is not None
    bench.clock.advance(TTL)
    b.campaign()
    b.authorize_run("e", 2.0)
    lease.valid_until = float("inf")
    assert not a.authorize_run("e", 2.0)
    assert not a.leading
    assert bench.a.names() == [EventName.LEADING, EventName.LEASE_LOST, EventName.RESIGNED]
    assert "another leader" in str(bench.a.said[-1].data["why"])
    assert b.last_runs["e"] == 2.0
    assert b.authorize_run("e", 3.0)


def test_a_deposed_leader_reports_its_loss_even_if_its_release_gets_no_reply(bench: Bench) -> None:
    a = bench.a.election
    a.campaign()
    a.authorize_run("e", 1.0)
    assert bench.store.operators.free(KEY, None)
    bench.store.lost_releases = 1
    assert not a.authorize_run("e", 2.0)
    assert bench.a.names() == [EventName.LEADING, EventName.LEASE_LOST, EventName.RESIGNED]
    assert EventName.RELEASE_FAILED not in [event.name for event in bench.a.said]


def test_without_the_token_in_the_script_it_would_be_authorized(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = bench.a.election, bench.b.election
    a.campaign()
    lease = a._lease
    assert lease is not None
    bench.clock.advance(TTL)
    b.campaign()
    lease.valid_until = float("inf")

    def trusting(request: AuthorizeRun, *, timeout: float = 0) -> Authorization:
        record = bench.store.leases.inspect(request.leader)
        assert record is not None
        object.__setattr__(request, "token", Token.parse(record.token))
        return CuedStore.authorize_run(bench.store, request)

    monkeypatch.setattr(bench.store.schedule, "authorize", trusting)
    assert a.authorize_run("e", 1.0)


def test_a_last_run_that_another_client_changed_makes_the_leader_resign_and_read_again(
    bench: Bench,
) -> None:
    a = bench.a.election
    a.campaign()
    a.authorize_run("e", 1.0)
    del bench.store._entries[Keyspace.last_run(KEY, "e")]
    assert not a.authorize_run("e", 2.0)
    assert not a.leading
    bench.clock.advance(POLL)
    assert a.campaign()
    assert a.term == 2
    assert a.recall(["e"]) == ["e"]
    assert a.authorize_run("e", 2.0)


def test_what_cannot_be_read_is_no_last_run_and_is_overwritten(bench: Bench) -> None:
    a = bench.a.election
    a.campaign()
    for number, text in enumerate(["garbage", "nan x", "-1 x", "1e300 x", "inf"]):
        name = f"e{number}"
        entry = Entry(text, TTL)
        bench.store._entries[Keyspace.last_run(KEY, name)] = (entry, float("inf"))
        a.recall([name])
        assert name not in a.last_runs
        assert a.authorize_run(name, 5.0)


def test_a_corrected_last_run_is_overwritten_by_the_next_authorization(bench: Bench) -> None:
    a = bench.a.election
    a.campaign()
    a.authorize_run("e", 9e9)
    a.last_runs["e"] = 5.0
    assert a.recall(["e"]) == []
    assert a.last_runs["e"] == 5.0
    assert a.authorize_run("e", 6.0)
    assert a.last_runs["e"] == 6.0


# --- a store that is away ------------------------------------------------------------------------


def test_an_outage_is_reported_once_and_ended_by_whatever_comes(bench: Bench) -> None:
    a = bench.a
    bench.store.away = True
    for _ in range(5):
        assert not a.election.campaign()
        bench.advance(POLL, a)
    assert a.names() == [EventName.STORE_UNREACHABLE]
    bench.store.away = False
    assert a.election.campaign()
    assert a.names() == [EventName.STORE_UNREACHABLE, EventName.STORE_BACK, EventName.LEADING]


def test_a_leader_without_its_store_sends_nothing_and_leads_until_its_deadline(
    bench: Bench,
) -> None:
    a = bench.a
    a.election.campaign()
    bench.store.away = True
    for _ in range(3):
        with pytest.raises(StoreError):
            a.election.authorize_run("e", 1.0)
        assert a.election.campaign()
        bench.advance(1, a)
    bench.store.away = False
    assert a.election.authorize_run("e", 1.0)
    assert a.names() == [EventName.LEADING, EventName.STORE_UNREACHABLE, EventName.STORE_BACK]
    bench.store.away = True
    bench.advance(TTL, a)
    assert not a.election.campaign()
    assert a.names()[3:] == [EventName.STORE_UNREACHABLE, EventName.LEASE_LOST]
    bench.store.away = False
    bench.advance(POLL, a)
    assert a.election.campaign()
    assert a.election.term == 2


def test_an_authorization_whose_reply_was_lost_is_asked_again_and_given(bench: Bench) -> None:
    a = bench.a.election
    a.campaign()
    bench.store.lost_replies = 1
    assert a.authorize_run("e", 1.0)
    assert bench.a.names() == [EventName.LEADING]


def test_what_lost_authorizations_left_is_swapped_by_the_next_one(bench: Bench) -> None:
    a = bench.a.election
    a.campaign()
    a.authorize_run("e", 1.0)
    bench.store.lost_replies = 2
    with pytest.raises(StoreUnavailable):
        a.authorize_run("e", 2.0)
    bench.store.away = True
    with pytest.raises(StoreUnavailable):
        a.authorize_run("e", 3.0)
    bench.store.away = False
    assert a.last_runs["e"] == 1.0
    assert a.authorize_run("e", 3.0)
    assert a.leading
    assert a.last_runs["e"] == 3.0


# --- names ---------------------------------------------------------------------------------------


def test_last_runs_share_the_leaders_shard_and_run_into_no_other_key() -> None:
    keyspace = Keyspace("unit", shards=256)
    leader = keyspace.leader("my | beats: {0}")
    keys = {Keyspace.last_run(leader, entry) for entry in ("a", "b", "a b", "a|b", "x" * 500)}
    assert len(keys) == 5
    assert all(key.startswith(leader[: leader.index("}") + 1] + ":") for key in keys)
    assert max(map(len, keys)) < 200
    one, other = keyspace.leader("a"), keyspace.leader("a|b")
    assert Keyspace.last_run(one, "b|c") != Keyspace.last_run(other, "c")
