"""The heartbeat, swept by hand on a manual clock; and once as the thread that it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from celery_singleton_lock.core import native_threads
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.clock_drift import drift
from celery_singleton_lock.core.events import Event, EventName, Events
from celery_singleton_lock.core.heartbeat import Heartbeat, retry_pause, timeout_for
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Holder, Kind, Lease, LossReason, OperatorRelease
from celery_singleton_lock.core.store_requests import Acquire, Granted, NewestCall, Release
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.testing import ManualClock
from celery_singleton_lock.testing.contract import new_token
from tests.harness.deliveries import wait_until
from tests.harness.events import Recorded
from tests.unit.flaky_store import BatchingFlakyStore, FlakyStore

KEYSPACE = Keyspace("unit")
HOLDER = Holder(task="app.sync", task_id="t")


class Bench:
    """A heartbeat whose thread never starts: the test sweeps."""

    def __init__(self, kind: type[FlakyStore] = FlakyStore) -> None:
        self.clock = ManualClock()
        self.store = kind(self.clock)
        self._events = Recorded()
        self.heartbeat = Heartbeat(self.store, self.clock, Events([self._events]))
        self.lost: list[Lease] = []

    @property
    def events(self) -> list[Event]:
        return self._events.all()

    def hold(self, name: str = "a", ttl: float = 60.0, max_hold: float | None = None) -> Lease:
        return hold(self.store, self.clock, self.heartbeat, name, ttl, max_hold, self.lost.append)

    def advance(self, seconds: float) -> None:
        """As the thread does: sweep whenever the heartbeat is needed, for ``seconds``."""
        end = self.clock.now() + seconds
        while True:
            pause = self.heartbeat.sweep()
            left = end - self.clock.now()
            if pause is None or pause >= left:
                self.clock.advance(max(left, 0))  # a slow reply may have taken longer
                self.heartbeat.sweep()
                return
            self.clock.advance(max(pause, 1e-6))


def hold(
    store: Any,
    clock: Any,
    heartbeat: Heartbeat,
    name: str,
    ttl: float,
    max_hold: float | None,
    on_lost: Callable[[Lease], None],
) -> Lease:
    request = Acquire(
        slots=(KEYSPACE.lock("s", name),),
        token=new_token(),
        holder=HOLDER,
        ttl=ttl,
    )
    sent = clock.now()
    reply = store.leases.acquire(request)
    assert isinstance(reply, Granted)
    lease = Lease(
        key=reply.key,
        token=request.token,
        ttl=ttl,
        holder=request.holder,
        valid_until=sent + ttl - drift(ttl),
        acquired_at=sent,
        clock=clock,
        hold_until=float("inf") if max_hold is None else sent + max_hold,
    )
    heartbeat.add(lease, on_lost)
    return lease


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(native_threads, "start_new_thread", lambda function, name: None)
    return Bench()


# --- renewing ------------------------------------------------------------------------------------


def test_a_lease_is_renewed_at_a_third_of_its_ttl_and_never_later(bench: Bench) -> None:
    lease = bench.hold(ttl=60)
    bench.clock.advance(17.9)  # jitter makes it a tenth earlier at most
    bench.heartbeat.sweep()
    assert bench.store.batches == []
    bench.clock.advance(2.1)
    bench.heartbeat.sweep()
    assert len(bench.store.batches) == 1
    assert lease.valid_until == bench.clock.now() + 60 - drift(60)


def test_a_lease_lives_as_long_as_it_is_renewed(bench: Bench) -> None:
    lease = bench.hold(ttl=3)
    bench.advance(3600)
    assert not lease.lost
    assert bench.store.leases.inspect(lease.key) is not None
    assert 3600 <= len(bench.store.batches) <= 4001
    assert bench.lost == []


def test_the_deadline_counts_from_before_the_sending(bench: Bench) -> None:
    lease = bench.hold(ttl=60)
    bench.clock.advance(20)
    sent = bench.clock.now()
    bench.store.before_reply = lambda: bench.clock.advance(5)
    bench.heartbeat.sweep()
    assert lease.valid_until == sent + 60 - drift(60)


def test_a_sweep_says_when_it_is_needed_again(bench: Bench) -> None:
    assert bench.heartbeat.sweep() is None
    lease = bench.hold(ttl=60)
    pause = bench.heartbeat.sweep()
    assert pause is not None
    assert 18 <= pause <= 20
    bench.heartbeat.stop(lease)
    assert bench.heartbeat.sweep() is None


def test_after_a_body_the_heartbeat_sweeps_once_more_and_then_rests(bench: Bench) -> None:
    bench.heartbeat.stop(bench.hold(ttl=60))
    assert bench.heartbeat.sweep() == pytest.approx(18)  # a third of it, less the jitter
    bench.clock.advance(18)
    assert bench.heartbeat.sweep() is None
    assert bench.store.batches == []


# --- asynchronous releases -----------------------------------------------------------------------


class Collected:
    """Notes when the store was drained, and for how long it may wait."""

    def __init__(self, bench: Bench) -> None:
        bench.store.async_releases = SimpleNamespace(drain=self)
        self.clock = bench.clock
        self.calls: list[tuple[float, float]] = []

    def __call__(self, *, timeout: float) -> None:
        self.calls.append((self.clock.now(), timeout))


def test_what_was_let_go_is_asked_for_once_within_a_third_of_its_ttl(bench: Bench) -> None:
    collected, begin = Collected(bench), bench.clock.now()
    assert bench.heartbeat.let_go(bench.hold(ttl=60))
    assert len(bench.heartbeat) == 0
    bench.advance(600)
    ((at, timeout),) = collected.calls
    assert 18 <= at - begin <= 20
    assert timeout == timeout_for(60)
    assert bench.heartbeat.sweep() is None


def test_what_was_confirmed_is_asked_for_no_more(bench: Bench) -> None:
    collected = Collected(bench)
    lease = bench.hold(ttl=60)
    bench.heartbeat.let_go(lease)
    bench.heartbeat.confirmed(lease)
    bench.advance(600)
    assert collected.calls == []


def test_what_is_not_renewed_has_no_turn_to_be_asked_for(bench: Bench) -> None:
    lease = bench.hold(ttl=60)
    bench.heartbeat.stop(lease)
    assert not bench.heartbeat.let_go(lease)


def test_a_long_lease_does_not_delay_the_question_for_a_short_one(bench: Bench) -> None:
    collected, begin = Collected(bench), bench.clock.now()
    bench.hold("long", ttl=6000)
    bench.heartbeat.let_go(bench.hold("short", ttl=60))
    bench.advance(30)
    ((at, _),) = collected.calls
    assert at - begin <= 20


def test_the_question_waits_no_longer_than_a_body_that_runs_can_wait(bench: Bench) -> None:
    collected = Collected(bench)
    bench.heartbeat.let_go(bench.hold("gone", ttl=60))
    bench.clock.advance(18)
    bench.hold("runs", ttl=0.6)
    bench.heartbeat.sweep()
    ((_, timeout),) = collected.calls
    assert timeout == timeout_for(0.6)


@pytest.mark.parametrize("later", [2.0, 2.7, 3.0, 3.6])
def test_no_question_to_an_unresponsive_store_delays_the_news_of_a_loss(
    bench: Bench, later: float
) -> None:
    late: list[float] = []
    lease = hold(
        *(bench.store, bench.clock, bench.heartbeat, "runs", 12, None),
        lambda lease: late.append(bench.clock.now() - lease.valid_until),
    )
    asked: list[float] = []

    def drain(*, timeout: float) -> None:
        asked.append(timeout)
        for _ in range(3):  # the reply itself, and two tries to make a release again
            bench.clock.advance(timeout)

    bench.store.async_releases = SimpleNamespace(drain=drain)
    bench.clock.advance(later)
    bench.heartbeat.let_go(bench.hold("gone", ttl=24))
    bench.store.away = True
    bench.advance(15)
    assert lease.loss is not None
    assert lease.loss.reason is LossReason.UNREACHABLE
    assert len(asked) == len(late) == 1
    assert late[0] < 0.05


def test_a_question_that_fails_is_not_asked_again_and_ends_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[float] = []

    def drain(*, timeout: float) -> None:
        calls.append(timeout)
        raise ZeroDivisionError

    bench.store.async_releases = SimpleNamespace(drain=drain)
    bench.heartbeat.let_go(bench.hold("gone", ttl=60))
    lease = bench.hold("runs", ttl=60)
    bench.advance(120)
    assert len(calls) == 1
    assert "draining asynchronous releases failed" in caplog.text
    assert not lease.lost


# --- many leases ---------------------------------------------------------------------------------


def test_leases_that_are_due_together_share_one_pipeline(bench: Bench) -> None:
    for number in range(100):
        bench.hold(str(number), ttl=60)
        bench.clock.advance(0.01)
    bench.advance(600)
    assert 30 <= len(bench.store.batches) <= 34  # 600 s / 20 s, up to a tenth more
    assert all(len(batch) == 100 for batch in bench.store.batches)


def test_a_short_lease_does_not_have_the_long_ones_renewed_with_it(bench: Bench) -> None:
    bench.hold("long", ttl=600)
    bench.hold("short", ttl=3)
    bench.advance(60)
    keys = [key for batch in bench.store.batches for key in batch]
    assert sum(key.endswith(":long") for key in keys) == 0
    assert sum(key.endswith(":short") for key in keys) >= 60


def test_a_reply_is_awaited_for_a_sixth_of_the_shortest_ttl(bench: Bench) -> None:
    assert (timeout_for(6), timeout_for(600)) == (1.0, 2.0)
    bench.hold("long", ttl=6)
    bench.hold("short", ttl=3)
    bench.clock.advance(2)
    bench.heartbeat.sweep()
    assert bench.store.timeouts == [0.5]


def test_a_discarded_lease_is_renewed_no_more(bench: Bench) -> None:
    lease = bench.hold(ttl=3)
    bench.heartbeat.stop(lease)
    assert len(bench.heartbeat) == 0
    bench.advance(10)
    assert bench.store.batches == []
    assert bench.lost == []


# --- losing --------------------------------------------------------------------------------------


def test_a_store_that_is_back_in_time_costs_nothing(bench: Bench) -> None:
    lease = bench.hold(ttl=60)
    bench.advance(20)
    bench.store.away = True
    bench.advance(30)
    assert not lease.lost
    bench.store.away = False
    bench.advance(300)
    assert not lease.lost
    assert bench.lost == []


def test_an_unresponsive_store_is_asked_again_but_not_stormed(bench: Bench) -> None:
    bench.hold(ttl=60)
    bench.store.away = True
    bench.advance(59)
    assert 35 <= len(bench.store.batches) <= 50  # from the 20th second on, every 0.9 s


# --- connections that end ------------------------------------------------------------------------


def test_all_leases_are_renewed_soon_after_a_connection_has_ended(bench: Bench) -> None:
    leases = [bench.hold(name, ttl) for name, ttl in (("a", 60), ("b", 600), ("c", 3600))]
    bench.heartbeat.sweep()
    bench.heartbeat.hasten()
    bench.advance(0.3)
    assert [len(batch) for batch in bench.store.batches] == [3]
    assert not any(lease.lost for lease in leases)


def test_processes_that_notice_one_restart_ask_at_different_times() -> None:
    pauses = []
    for _ in range(200):
        bench = Bench()
        bench.heartbeat._running = True  # it needs no thread
        bench.hold(ttl=60)
        bench.heartbeat.hasten()
        pauses.append(bench.heartbeat.sweep())
    assert all(pause is not None and 0 <= pause <= 0.3 for pause in pauses)
    tenths = [sum(low <= (pause or 0) < low + 0.1 for pause in pauses) for low in (0, 0.1, 0.2)]
    assert min(tenths) > 20, tenths


def test_tries_after_a_failed_renewal_do_not_stay_in_step() -> None:
    assert len({retry_pause(60.0, 60.0) for _ in range(100)}) > 50
    assert all(0.85 < retry_pause(60.0, 60.0) <= 0.95 for _ in range(100))


def test_connections_that_end_one_after_the_other_cause_a_renewal_a_second(bench: Bench) -> None:
    lease = bench.hold(ttl=60)
    for _ in range(100):
        bench.heartbeat.hasten()
        bench.advance(0.1)
    assert 9 <= len(bench.store.batches) <= 11
    assert not lease.lost


def test_the_end_of_a_connection_does_not_hasten_a_renewal_that_is_repeated_anyway(
    bench: Bench,
) -> None:
    lease = bench.hold(ttl=60)
    bench.clock.advance(20)
    bench.store.away = True
    bench.heartbeat.sweep()
    due = lease.due
    bench.heartbeat.hasten()
    assert lease.due == due


def test_the_end_of_a_connection_does_not_delay_a_renewal(bench: Bench) -> None:
    lease = bench.hold(ttl=0.3)
    bench.heartbeat.hasten()  # the first one sets the time of the next
    due = lease.due
    bench.heartbeat.hasten()
    assert lease.due <= due


def test_without_leases_the_end_of_a_connection_asks_nothing(bench: Bench) -> None:
    bench.heartbeat.hasten()
    bench.advance(60)
    assert bench.store.batches == []


def test_a_lease_on_an_unresponsive_store_is_lost_at_its_deadline_and_for_good(
    bench: Bench,
) -> None:
    lease = bench.hold(ttl=60)
    bench.store.away = True
    deadline = lease.valid_until
    bench.advance(59)
    assert bench.lost == []
    bench.advance(0.5)
    assert bench.lost == [lease]
    assert lease.loss is not None
    assert lease.loss.reason is LossReason.UNREACHABLE
    assert lease.loss.at == deadline
    assert "renewals failed: connection refused" in lease.loss.detail
    bench.store.away = False
    bench.advance(60)
    assert lease.lost
    assert bench.store.leases.inspect(lease.key) is None
    assert len(bench.lost) == 1


def test_an_unresponsive_part_of_the_store_takes_its_own_leases_only(bench: Bench) -> None:
    silent, other = bench.hold("silent", ttl=60), bench.hold("other", ttl=60)
    bench.store.silent = frozenset({silent.key})
    bench.advance(59)
    assert bench.lost == []
    bench.advance(0.5)
    assert bench.lost == [silent]
    assert silent.loss is not None
    assert silent.loss.reason is LossReason.UNREACHABLE
    assert "its part of the store" in silent.loss.detail
    bench.advance(300)
    assert not other.lost


def test_a_part_of_the_store_that_is_back_in_time_costs_nothing(bench: Bench) -> None:
    lease = bench.hold(ttl=60)
    bench.store.silent = frozenset({lease.key})
    bench.advance(50)
    bench.store.silent = frozenset()
    bench.advance(300)
    assert not lease.lost


@pytest.fixture
def batching(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(native_threads, "start_new_thread", lambda function, name: None)
    return Bench(BatchingFlakyStore)


def test_what_was_answered_before_the_store_became_unresponsive_is_renewed(batching: Bench) -> None:
    leases = [batching.hold(name, ttl=60) for name in "abc"]
    batching.clock.advance(20)
    sent = batching.clock.now()
    batching.store.answers = 1
    batching.heartbeat.sweep()
    first, *others = [lease.valid_until for lease in leases]
    assert first == sent + 60 - drift(60)
    assert others == [sent + 40 - drift(60)] * 2
    failures = [lease.failures for lease in leases]
    assert failures == [0, 1, 1]


def test_a_store_that_is_slow_with_each_batch_delays_no_report_of_a_loss(batching: Bench) -> None:
    for name in "abcdefgh":
        batching.hold(name, ttl=12)
    slowness = 0.95 * timeout_for(12)

    def before_renewal() -> None:
        waited = min(slowness, batching.store.timeouts[-1])
        batching.clock.advance(waited)
        if waited < slowness:
            raise StoreUnavailable("no reply in time")

    delays = []
    for one in batching.heartbeat._leases:
        batching.heartbeat._leases[one] = lambda lease: delays.append(
            batching.clock.now() - lease.valid_until
        )
    batching.store.before_renewal = before_renewal
    batching.advance(12)
    assert delays, "it is too slow for so many leases"
    assert max(delays) < 0.1


def test_no_renewal_waits_for_the_observers_of_a_loss(batching: Bench) -> None:
    leases = [batching.hold(name, ttl=60) for name in "abc"]
    batching.store.operators.free(leases[0].key, None)
    batching.clock.advance(20)
    observed = []
    for one in leases:
        batching.heartbeat._leases[one] = lambda lease: observed.append(len(batching.store.batches))
    batching.heartbeat.sweep()
    assert observed == [3]


def test_a_loss_is_reported_though_the_store_became_unresponsive_behind_it(batching: Bench) -> None:
    leases = [batching.hold(name, ttl=60) for name in "abc"]
    batching.store.operators.free(leases[0].key, None)
    batching.clock.advance(20)
    batching.store.answers = 1
    batching.heartbeat.sweep()
    assert batching.lost == leases[:1]


def test_a_replaced_lease_is_lost_at_the_next_heartbeat(bench: Bench) -> None:
    lease = bench.hold(ttl=60)
    bench.store.operators.free(lease.key, None)
    bench.store.leases.acquire(
        Acquire(slots=(lease.key,), token=new_token(), holder=HOLDER, ttl=60), timeout=1
    )
    bench.advance(20)
    assert bench.lost == [lease]
    assert lease.loss is not None
    assert lease.loss.reason is LossReason.REPLACED
    assert lease.remaining() == 0


def test_a_lease_whose_process_is_being_killed_is_left_to_its_parent(bench: Bench) -> None:
    lease = bench.hold(ttl=60)
    request = Release(keys=(lease.key,), token=lease.token, become=Kind.DYING, become_ttl=60)
    bench.store.leases.release(request, timeout=1)
    bench.advance(120)
    assert bench.lost == []
    assert len(bench.heartbeat) == 0
    assert len(bench.store.batches) == 1


BY = OperatorRelease(user="ann", host="ops-1", reason="stuck since noon")


def test_a_lease_that_an_operator_released_is_lost_with_author_and_reason(bench: Bench) -> None:
    lease, other = bench.hold(ttl=60), bench.hold("b", ttl=60)
    assert bench.store.operators.free(lease.key, str(lease.token), BY)
    bench.advance(20)
    assert lease.loss is not None
    detail = "released by ann on ops-1: stuck since noon"
    assert (lease.loss.reason, lease.loss.detail) == (LossReason.OPERATOR, detail)
    assert detail in str(lease.lost_error())
    data = {"reason": "operator", "detail": detail, "store": "", "action": "none"}
    assert bench.events[-1].data == data
    assert not other.lost


def test_the_note_on_an_earlier_holder_of_a_key_explains_no_later_loss(bench: Bench) -> None:
    earlier = bench.hold(ttl=60)
    assert bench.store.operators.free(earlier.key, None, BY)
    bench.heartbeat.stop(earlier)
    lease = bench.hold(ttl=60)
    bench.store.operators.free(lease.key, None)
    bench.advance(20)
    assert lease.loss is not None
    assert lease.loss.reason is LossReason.GONE


def test_a_loss_is_reported_though_the_note_on_it_cannot_be_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = bench.hold(ttl=60)
    bench.store.operators.free(lease.key, None, BY)
    monkeypatch.setattr(
        bench.store.operators, "release_notes", lambda keys, timeout: keys[len(keys)]
    )
    bench.advance(20)
    assert lease.loss is not None
    assert lease.loss.reason is LossReason.GONE
    assert bench.lost == [lease]


def test_a_freed_lease_is_lost_as_gone(bench: Bench) -> None:
    lease = bench.hold(ttl=60)
    bench.store.operators.free(lease.key, None)
    bench.advance(20)
    assert lease.loss is not None
    assert lease.loss.reason is LossReason.GONE
    assert "released by an operator" in lease.loss.detail


def test_a_lease_whose_ttl_was_over_before_its_renewal_is_lost_as_expired(bench: Bench) -> None:
    lease = bench.hold(ttl=60)
    bench.clock.advance(61)
    bench.heartbeat.ask(lease)
    assert lease.loss is not None
    assert lease.loss.reason is LossReason.EXPIRED


def test_a_loss_leaves_the_other_leases_alone(bench: Bench) -> None:
    gone, stays = bench.hold("gone"), bench.hold("stays")
    bench.store.operators.free(gone.key, None)
    bench.advance(120)
    assert bench.lost == [gone]
    assert not stays.lost


def test_renewal_stops_at_max_hold_and_the_lease_ends(bench: Bench) -> None:
    lease = bench.hold(ttl=6, max_hold=30)
    bench.advance(30)
    assert not lease.lost
    bench.advance(6)
    assert bench.lost == [lease]
    assert lease.loss is not None
    assert lease.loss.detail == "max_hold of 30.0 s reached"
    assert bench.store.leases.inspect(lease.key) is None


def test_renewal_stops_at_max_hold_though_other_leases_are_renewed(bench: Bench) -> None:
    hung, other = bench.hold("hung", ttl=6, max_hold=30), bench.hold("other", ttl=6)
    bench.advance(36)
    assert bench.lost == [hung]
    assert bench.store.leases.inspect(hung.key) is None
    assert not other.lost


def test_the_loss_names_a_long_max_hold_in_full(bench: Bench) -> None:
    lease = bench.hold(ttl=6, max_hold=1_234_567.5)
    bench.clock.advance(1_234_568)
    bench.heartbeat.sweep()
    assert lease.loss is not None
    assert lease.loss.detail == "max_hold of 1234567.5 s reached"


def test_a_renewal_that_came_too_late_for_max_hold_wakes_the_heartbeat_no_more(
    bench: Bench,
) -> None:
    lease = bench.hold(ttl=60, max_hold=20.5)
    bench.clock.advance(21)  # starved: it was due by 20, and now may not be renewed
    pause = bench.heartbeat.sweep()
    assert bench.store.batches == []
    assert pause == pytest.approx(lease.deadline - bench.clock.now())


class _Vouched:
    """A worker parent that has renewed the lease until a moment."""

    def __init__(self, until: float) -> None:
        self.until = until

    def parents(self) -> float:
        return self.until

    def write(self, valid_until: float) -> None: ...

    def close(self) -> None: ...

    def announce(self, acquired_at: float) -> None: ...

    def conclude(self) -> bool:
        return True


def test_a_deadline_that_the_parent_put_off_is_waited_for(bench: Bench) -> None:
    lease = bench.hold(ttl=6, max_hold=1)
    bench.heartbeat.sweep()
    lease.shared = _Vouched(bench.clock.now() + 8)
    bench.clock.advance(7)
    assert bench.heartbeat.sweep() == pytest.approx(1)
    assert bench.lost == []
    bench.clock.advance(1)
    bench.heartbeat.sweep()
    assert bench.lost == [lease]


def test_a_reply_is_not_awaited_beyond_the_deadline_of_a_lease_that_is_not_in_the_request(
    bench: Bench,
) -> None:
    ending = bench.hold("ending", ttl=6, max_hold=1)
    bench.clock.advance(5.2)
    new = bench.hold("new", ttl=6)
    bench.clock.advance(0.3)
    bench.heartbeat.ask(new)
    assert bench.store.batches == [[new.key]]
    left = ending.deadline - bench.clock.now()
    assert 0 < bench.store.timeouts[0] <= left < timeout_for(6)


def test_renewals_that_failed_once_are_not_reported_with_a_later_loss(bench: Bench) -> None:
    lease = bench.hold(ttl=6)
    bench.store.away = True
    bench.advance(2.1)
    bench.store.away = False
    bench.advance(2)
    bench.clock.advance(30)
    bench.heartbeat.sweep()
    assert lease.loss is not None
    assert lease.loss.reason is LossReason.EXPIRED
    assert "stopped or starved" in lease.loss.detail


def test_a_process_that_was_stopped_learns_of_it_before_it_renews(bench: Bench) -> None:
    lease = bench.hold(ttl=6)
    bench.clock.advance(60)
    bench.heartbeat.sweep()
    assert bench.lost == [lease]
    assert bench.store.batches == []
    assert lease.loss is not None
    assert "stopped or starved" in lease.loss.detail


def test_a_reply_after_the_deadline_is_a_loss_for_good(bench: Bench) -> None:
    lease = bench.hold(ttl=6)
    bench.clock.advance(2)
    bench.store.before_reply = lambda: bench.clock.advance(10)
    bench.heartbeat.sweep()
    assert bench.lost == [lease]
    assert lease.lost
    assert len(bench.heartbeat) == 0


def test_a_renewal_that_the_store_made_in_time_is_a_loss_if_its_reply_was_late(
    bench: Bench,
) -> None:
    # From its deadline on the loss may have been reported to the body: there is no way back.
    lease = bench.hold(ttl=6)
    bench.store.away = True
    bench.advance(5.5)
    bench.store.away = False
    bench.store.before_reply = lambda: bench.clock.advance(0.5)
    bench.advance(0.4)  # the next try is 0.3 s away at most
    record = bench.store.leases.inspect(lease.key)
    assert record is not None
    assert record.ttl > 5, "the store prolonged it"
    assert bench.lost == [lease]
    assert lease.lost


def test_the_reply_for_a_lease_released_meanwhile_is_ignored(bench: Bench) -> None:
    lease = bench.hold(ttl=6)
    bench.clock.advance(2)

    def release() -> None:
        bench.heartbeat.stop(lease)
        bench.store.leases.release(Release(keys=(lease.key,), token=lease.token), timeout=1)

    before = lease.valid_until
    bench.store.before_reply = release
    bench.heartbeat.sweep()
    bench.advance(10)
    assert bench.lost == []
    assert lease.loss is None
    assert lease.valid_until == before


def test_a_loss_for_a_lease_released_meanwhile_is_ignored(bench: Bench) -> None:
    lease = bench.hold(ttl=6)
    bench.store.operators.free(lease.key, None)
    bench.clock.advance(2)
    bench.store.before_reply = lambda: bench.heartbeat.stop(lease)
    bench.heartbeat.sweep()
    assert bench.lost == []
    assert lease.loss is None


def test_a_loss_is_reported_to_the_body_first_and_then_to_the_sinks_once(bench: Bench) -> None:
    order: list[str] = []
    bench.heartbeat._events.sinks.append(lambda event: order.append(str(event.name)))
    lease = hold(
        bench.store, bench.clock, bench.heartbeat, "a", 6, None, lambda lease: order.append("body")
    )
    bench.store.operators.free(lease.key, None)
    bench.advance(60)
    assert order == ["body", EventName.LEASE_LOST]
    (event,) = bench.events
    assert event.name is EventName.LEASE_LOST
    assert (event.key, event.task, event.task_id) == (lease.key, "app.sync", "t")
    assert event.data["reason"] == "gone"


def test_a_listener_that_raises_keeps_no_other_loss_from_being_reported(bench: Bench) -> None:
    def broken(lease: Lease) -> None:
        raise RuntimeError("broken")

    first = hold(bench.store, bench.clock, bench.heartbeat, "first", 6, None, broken)
    second = bench.hold("second", ttl=6)
    bench.clock.advance(6)
    bench.heartbeat.sweep()
    assert first.lost
    assert bench.lost == [second]
    assert [event.key for event in bench.events] == [first.key, second.key]


# --- the thread ----------------------------------------------------------------------------------


def test_a_heartbeat_whose_thread_could_not_start_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Else every later lease of the process would be neither renewed nor declared lost.
    started: list[str] = []

    def no_threads(function: Callable[[], None], name: str) -> None:
        raise RuntimeError("can't start new thread")

    bench = Bench()
    monkeypatch.setattr(native_threads, "start_new_thread", no_threads)
    with pytest.raises(RuntimeError, match="can't start"):
        bench.hold("first")
    monkeypatch.setattr(
        native_threads, "start_new_thread", lambda function, name: started.append(name)
    )
    bench.hold("second")
    assert started == ["singleton-heartbeat"]


def heartbeat_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "singleton-heartbeat"}


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_lease_that_is_added_while_a_sweep_reads_the_others_is_renewed_in_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    heartbeat, snapshots, rings = bench.heartbeat, [0], [0]
    read = heartbeat._snapshot

    def snapshot() -> list[Lease]:
        found = read()
        snapshots[0] += 1
        if snapshots[0] == nth:
            bench.hold("late", ttl=6)
        return found

    monkeypatch.setattr(heartbeat, "_snapshot", snapshot)
    monkeypatch.setattr(heartbeat, "_running", True)
    monkeypatch.setattr(heartbeat._alarm, "ring", lambda: rings.append(1))
    pause = heartbeat.sweep()
    assert snapshots[0] >= nth
    assert sum(rings) or (pause is not None and pause <= 2)


@pytest.mark.slow
def test_one_thread_renews_all_leases_and_rests_when_there_are_none() -> None:
    clock = SystemClock()
    store = FlakyStore(clock)
    ttl = 1.2
    others = heartbeat_threads()  # of tests before, which may end meanwhile
    heartbeat = Heartbeat(store, clock, Events())
    assert heartbeat_threads() <= others, "none before the first lease"
    lost = threading.Event()
    guard = threading.Barrier(10)
    leases: list[Lease] = []

    def body(number: int) -> None:
        guard.wait()
        for lap in range(10):
            name = f"{number}.{lap}"
            leases.append(hold(store, clock, heartbeat, name, ttl, None, lambda lease: lost.set()))

    threads = [threading.Thread(target=body, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(heartbeat_threads() - others) <= 1
    assert not lost.wait(2.5 * ttl)
    assert len(heartbeat_threads() - others) == 1
    assert all(not lease.lost for lease in leases)
    # Two and a half ttl: a pipeline each ttl/3, and one at most for each thread at the start.
    assert len(store.batches) <= 20
    for lease in leases:
        heartbeat.stop(lease)
    count = len(store.batches)
    assert not lost.wait(ttl)
    assert len(store.batches) <= count + 1
    heartbeat.close()


@pytest.mark.parametrize("waits", [True, False])
def test_bodies_that_are_short_do_not_wake_the_thread_one_by_one(waits: bool) -> None:
    sweeps: list[float | None] = []
    collected: list[float] = []

    def drain(*, timeout: float) -> None:
        collected.append(timeout)

    class Counting(Heartbeat):
        def sweep(self) -> float | None:
            sweeps.append(super().sweep())
            return sweeps[-1]

    clock = SystemClock()
    store = MemoryStore(clock)
    store.async_releases = SimpleNamespace(drain=drain)
    heartbeat = Counting(store, clock, Events())
    try:
        for number in range(300):
            lease = hold(store, clock, heartbeat, f"short {number}", 60.0, None, lambda lease: None)
            # Only what would be due sooner than all before it wakes the thread: of 300 random
            # times that is so for six, and for 30 about never.
            if waits:
                heartbeat.stop(lease)
            else:
                assert heartbeat.let_go(lease)
            if number % 2:
                heartbeat.confirmed(lease)
            store.leases.release(Release(keys=(lease.key,), token=lease.token))
        assert len(sweeps) < 30
        assert collected == []
        # A lease that needs the thread sooner than that does wake it.
        urgent = hold(store, clock, heartbeat, "urgent", 0.3, None, lambda lease: None)
        was_valid_until = urgent.valid_until
        wait_until(lambda: urgent.valid_until > was_valid_until, "it is renewed")
        heartbeat.stop(urgent)
    finally:
        heartbeat.close()


def test_the_thread_reports_a_loss_within_a_heartbeat() -> None:
    clock = SystemClock()
    store = FlakyStore(clock)
    heartbeat = Heartbeat(store, clock, Events())
    lost = threading.Event()
    long = hold(store, clock, heartbeat, "long", 60, None, lambda lease: None)
    lease = hold(store, clock, heartbeat, "short", 0.6, None, lambda lease: lost.set())
    store.operators.free(lease.key, None)
    assert lost.wait(6), "the thread slept for the long lease"
    assert lease.lost
    heartbeat.stop(long)
    heartbeat.close()


def test_the_thread_survives_an_unforeseen_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = SystemClock()
    store = FlakyStore(clock)
    broken = iter([True])

    def fail_once() -> None:
        if next(broken, False):
            raise ZeroDivisionError

    store.before_reply = fail_once
    heartbeat = Heartbeat(store, clock, Events())
    lost = threading.Event()
    lease = hold(store, clock, heartbeat, "a", 0.9, None, lambda lease: lost.set())
    assert not lost.wait(2.0)
    assert not lease.lost
    assert "unexpected error of the store" in caplog.text
    heartbeat.stop(lease)
    heartbeat.close()


def test_the_thread_survives_a_failure_of_the_sweep_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SystemClock()
    store = FlakyStore(clock)
    heartbeat = Heartbeat(store, clock, Events())
    sweep, broken, again = heartbeat.sweep, iter([True]), threading.Event()

    def fail_once() -> float | None:
        if next(broken, False):
            raise ZeroDivisionError
        again.set()
        return sweep()

    monkeypatch.setattr(heartbeat, "sweep", fail_once)
    lease = hold(store, clock, heartbeat, "a", 60, None, lambda lease: None)
    assert again.wait(10), "no lease of this process would be renewed any more"
    assert "the heartbeat failed; it goes on" in caplog.text
    heartbeat.stop(lease)
    heartbeat.close()


class _Discards(float):
    """A moment that discards a lease whenever the heartbeat compares it: another thread's
    release."""

    def __new__(cls, value: float, discard: Callable[[], None]) -> _Discards:
        moment = super().__new__(cls, value)
        moment.discard = discard  # type: ignore[attr-defined]
        return moment

    def _compared(self, name: str, other: float) -> Any:
        self.discard()  # type: ignore[attr-defined]
        return getattr(float(self), name)(other)

    def __le__(self, other: float) -> Any:
        return self._compared("__le__", other)

    def __gt__(self, other: float) -> Any:
        return self._compared("__gt__", other)


def test_leases_that_are_released_during_a_sweep_do_not_end_it(bench: Bench) -> None:
    """A release takes no guard, so it may come between any two entries that the sweep looks at."""
    kept, others = bench.hold("kept", ttl=6), [bench.hold(f"n{n}", ttl=6) for n in range(50)]
    waiting = list(others)

    def discard() -> None:
        if waiting:
            bench.heartbeat.stop(waiting.pop())

    kept.valid_until = _Discards(kept.valid_until, discard)
    bench.clock.advance(2)  # a lease that is not due isn't looked at
    bench.heartbeat.sweep()
    assert len(waiting) < len(others)
    assert kept.loss is None
    assert kept.valid_until > bench.clock.now() + 5


class NewerCalls(FlakyStore):
    """A store whose keys all have the same newest call."""

    looks: list[list[str]]

    def __init__(self, clock: Any) -> None:
        super().__init__(clock)
        self.newest_calls: Any = self

    def of(self, keys: Sequence[str], /, *, timeout: float) -> list[NewestCall | None]:
        self.looks.append(list(keys))
        return [NewestCall(call_id="newer", called_at=5.0)] * len(keys)


def test_one_look_serves_all_watched_leases_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_threads, "start_new_thread", lambda function, name: None)
    NewerCalls.looks = []
    bench, found = Bench(NewerCalls), list[NewestCall]()
    bench.hold("unwatched")
    watched = [bench.hold(name) for name in "ab"]
    for lease in watched:
        bench.heartbeat.watch(lease, 1.0, found.append)
    bench.advance(3.5)
    assert NewerCalls.looks == [[lease.key for lease in watched]] * 3
    assert found == [NewestCall(call_id="newer", called_at=5.0)] * 6
    bench.heartbeat.stop(watched[0])
    bench.advance(1.0)
    assert NewerCalls.looks[3:] == [[watched[1].key]]
    bench.heartbeat.stop(watched[1])
    bench.advance(5.0)
    assert len(NewerCalls.looks) == 4


def test_a_look_that_fails_is_repeated_and_ends_no_renewal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_threads, "start_new_thread", lambda function, name: None)
    bench, looks = Bench(), list[str]()

    def fail(keys: Sequence[str], *, timeout: float) -> list[NewestCall | None]:
        looks.append("look")
        raise StoreUnavailable("no reply")

    monkeypatch.setattr(bench.store, "newest_calls", SimpleNamespace(of=fail))
    lease = bench.hold(ttl=6.0)
    bench.heartbeat.watch(lease, 1.0, lambda newest: None)
    bench.advance(20.0)
    assert len(looks) == 20
    assert not lease.lost


def test_a_store_without_newest_calls_keeps_the_heartbeat_asleep(bench: Bench) -> None:
    """An eager call of a task with ``on_conflict="cancel_running"`` has such a store."""
    assert bench.store.newest_calls is None
    bench.heartbeat.watch(bench.hold(), 1.0, lambda newest: None)
    bench.clock.advance(1.0)
    assert bench.heartbeat.sweep() == pytest.approx(1.0)


def test_a_closed_heartbeat_renews_what_is_held_and_what_is_added_later_then_ends() -> None:
    clock = SystemClock()
    store = FlakyStore(clock)
    heartbeat = Heartbeat(store, clock, Events())
    for key in ("held while it is closed", "added after its end"):
        lease = hold(store, clock, heartbeat, key, 0.3, None, lambda lease: None)
        heartbeat.close()
        until = lease.valid_until
        wait_until(lambda: lease.valid_until > until + 0.3, "it is renewed")  # noqa: B023
        heartbeat.stop(lease)
        wait_until(lambda: not heartbeat._running, "the thread has ended")
