"""The parent heartbeat, swept by hand; child and parent are one process, unless one dies."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from billiard.process import current_process

from celery_singleton_lock.core import fork_locks, native_threads
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.events import Events
from celery_singleton_lock.core.heartbeat import Heartbeat
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Holder, Kind, Lease, LossReason, Phase, trust_of
from celery_singleton_lock.core.locker import Locker
from celery_singleton_lock.core.process import lives, start_time_of
from celery_singleton_lock.core.store_requests import Acquire, ClaimChange, ClaimRequest, Release
from celery_singleton_lock.errors import LeaseLost
from celery_singleton_lock.testing import ManualClock
from celery_singleton_lock.testing.contract import new_token
from celery_singleton_lock.worker import shared_memory
from celery_singleton_lock.worker.parent_heartbeat import ParentHeartbeat
from celery_singleton_lock.worker.shared_memory import (
    NOTES,
    RunningLease,
    SharedMemory,
)
from tests.harness.deliveries import wait_until_collected
from tests.unit.flaky_store import FlakyStore
from tests.unit.pool_child import Child, notes_of_dead, open_pipe
from tests.unit.stall import Stall, assert_a_fork_waits_for

pytestmark = [
    pytest.mark.skipif(
        not start_time_of(os.getpid()), reason="the parent heartbeat needs Linux's /proc"
    ),
    # The children touch nothing but the record.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

KEYSPACE = Keyspace("unit")
TTL = 6.0
# The child's heartbeat renews at ttl/3, the parent heartbeat a tenth of that later.
LATE = TTL / 3 * 1.1 + 0.001


class Bench:
    """A pool child and its parent, over one store and on one clock that stands still."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = FlakyStore(self.clock)
        self.record = SharedMemory()
        events = Events([])
        # Never swept but where a test says so: the GIL is kept.
        self.heartbeat = Heartbeat(self.store, self.clock, events)
        self.locker = Locker(self.store, self.clock, self.heartbeat, events, self.record)
        self.parent_heartbeat = ParentHeartbeat(self.record, self.store, self.clock)
        self.lost: list[Lease] = []

    def hold(self, name: str = "a", **options: Any) -> Lease:
        max_hold = options.pop("max_hold", None)
        request = Acquire(
            slots=(KEYSPACE.lock("s", name),),
            token=new_token(),
            holder=Holder(task="app.sync", task_id="t"),
            **{"ttl": TTL, **options},
        )
        lease = self.locker.acquire(request, max_hold=max_hold, on_lost=self.lost.append)
        assert isinstance(lease, Lease)
        return lease

    def release(self, lease: Lease, **options: Any) -> None:
        self.locker.release(lease, Release(keys=(lease.key,), token=lease.token, **options))

    def beat(self, seconds: float) -> None:
        """As the parent heartbeat's thread does, for ``seconds``."""
        end = self.clock.now() + seconds
        while (pause := self.parent_heartbeat.sweep()) < (left := end - self.clock.now()):
            self.clock.advance(max(pause, 1e-6))
        self.clock.advance(left)
        self.parent_heartbeat.sweep()

    def seen(self) -> RunningLease:
        [one] = self.record.of_living()
        return one


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(native_threads, "start_new_thread", lambda function, name: None)
    monkeypatch.setattr(current_process(), "index", 0, raising=False)
    return Bench()


# --- renewing for a child that starves -----------------------------------------------------------


def test_a_starving_childs_lease_is_renewed_and_the_child_trusts_it_as_long(bench: Bench) -> None:
    lease = bench.hold()
    own = lease.valid_until
    bench.clock.advance(LATE)
    sent = bench.clock.now()
    bench.parent_heartbeat.sweep()
    assert bench.store.batches == [[lease.key]]
    assert lease.deadline == sent + trust_of(TTL, 1.0)
    assert lease.valid_until == own
    bench.clock.advance(own - bench.clock.now() + 0.5)
    assert not lease.lost
    lease.check()
    assert lease.remaining() == lease.deadline - bench.clock.now()


def test_a_deadline_that_the_parent_is_writing_is_read_again(bench: Bench) -> None:
    """A loss that the child declares is final, and the parent's renewal would come to nothing."""

    class TornOnce:
        def __init__(self, memory: Any) -> None:
            self._memory, self._torn = memory, False

        def __getitem__(self, where: slice) -> bytes:
            data = bytes(self._memory[where])
            if self._torn:
                return data
            self._torn = True
            return data[:10] + bytes(len(data) - 10)

        def __setitem__(self, where: slice, data: bytes) -> None:
            self._memory[where] = data

    lease = bench.hold()
    bench.clock.advance(LATE)
    bench.parent_heartbeat.sweep()
    shared: Any = lease.shared
    shared._memory = TornOnce(shared._memory)
    bench.clock.advance(lease.valid_until - bench.clock.now() + 0.5)
    assert not lease.lost


def test_without_the_parent_heartbeat_the_same_child_has_lost_its_lease(bench: Bench) -> None:
    lease = bench.hold()
    bench.clock.advance(TTL)
    with pytest.raises(LeaseLost):
        lease.check()


def test_a_lease_lives_as_long_as_its_child_starves(bench: Bench) -> None:
    lease = bench.hold()
    bench.beat(600)
    assert not lease.lost
    assert bench.store.leases.inspect(lease.key) is not None
    assert 600 / 2 - 1 <= len(bench.store.batches) <= 600 / 2 + 1, "every ttl/3"


def test_what_is_younger_than_a_third_of_its_ttl_costs_no_round_trip(bench: Bench) -> None:
    for number in range(50):
        lease = bench.hold(str(number % 3))
        bench.beat(TTL / 3)
        bench.release(lease)
    assert bench.store.batches == []


def test_a_child_whose_heartbeat_is_on_time_costs_no_round_trip_more(bench: Bench) -> None:
    lease = bench.hold()
    for _ in range(300):
        pause = bench.heartbeat.sweep()
        assert pause is not None
        bench.beat(pause)
    assert not lease.lost
    assert bench.clock.now() > lease.acquired_at + 90 * TTL
    renewals = len(bench.store.batches)
    assert renewals <= (bench.clock.now() - lease.acquired_at) / (TTL / 3) + 1


def test_a_childs_heartbeat_that_is_back_takes_over(bench: Bench) -> None:
    lease = bench.hold()
    bench.beat(5 * TTL)
    bench.heartbeat.sweep()
    assert not lease.lost
    assert bench.lost == []
    assert lease.valid_until == bench.clock.now() + trust_of(lease.ttl, 1.0)
    before = len(bench.store.batches)
    bench.beat(TTL / 3)
    assert len(bench.store.batches) == before


def test_leases_of_a_child_are_renewed_in_one_round_trip_and_the_next_one_by_none(
    bench: Bench,
) -> None:
    leases = [bench.hold(str(number)) for number in range(NOTES + 1)]
    bench.clock.advance(LATE)
    bench.parent_heartbeat.sweep()
    [batch] = bench.store.batches
    assert sorted(batch) == sorted(lease.key for lease in leases[:NOTES])
    bench.release(leases[0])
    tenth = bench.hold("tenth")
    bench.beat(TTL)
    assert not tenth.lost
    assert leases[NOTES].lost


def test_leases_that_starve_since_different_moments_come_to_share_one_round_trip(
    bench: Bench,
) -> None:
    leases = []
    for number in range(4):
        leases.append(bench.hold(str(number)))
        bench.beat(0.3)
    bench.beat(TTL)
    before = len(bench.store.batches)
    bench.beat(10 * TTL)
    assert len(bench.store.batches) - before <= 10 * 3 + 1
    assert not any(lease.lost for lease in leases)


def test_every_lease_gets_a_slot_however_many_came_before(bench: Bench) -> None:
    for number in range(5 * NOTES):
        bench.release(bench.hold(str(number)))
    leases = [bench.hold(str(number)) for number in range(NOTES)]
    bench.beat(2 * TTL)
    assert not any(lease.lost for lease in leases)


def test_a_running_claim_is_renewed_with_its_lease(bench: Bench) -> None:
    key = KEYSPACE.claim("app.sync", KEYSPACE.lock("s", "a"))
    lease = bench.hold(claim=ClaimChange(key=key, phase=Phase.RUNNING, ttl=TTL))
    bench.beat(3 * TTL)
    assert not lease.lost
    assert bench.store.leases.inspect(key) is not None


def test_a_claim_that_the_grant_freed_is_not_renewed_with_its_lease(bench: Bench) -> None:
    key = KEYSPACE.claim("app.sync", KEYSPACE.lock("s", "a"))
    lease = bench.hold(claim=ClaimChange(key=key, phase=None))
    # The same task again, for its next attempt: that claim has a time of its own.
    request = ClaimRequest(key=key, token=lease.token, holder=lease.holder, ttl=TTL)
    assert bench.store.claims.take(request, timeout=1.0) is None
    bench.beat(3 * TTL)
    assert not lease.lost
    assert bench.store.leases.inspect(key) is None


# --- what it must not do -------------------------------------------------------------------------


def test_a_released_lease_is_renewed_no_more_though_the_release_never_arrived(
    bench: Bench,
) -> None:
    lease = bench.hold()
    bench.clock.advance(LATE)
    bench.store.away = True
    bench.release(lease)
    bench.store.away = False
    assert bench.store.leases.inspect(lease.key) is not None
    bench.beat(2 * TTL)
    assert bench.store.leases.inspect(lease.key) is None
    assert bench.store.batches == []


@pytest.mark.parametrize("kind", [Kind.RESERVED, Kind.COOLING, Kind.DYING])
def test_a_renewal_that_is_under_way_touches_nothing_that_the_release_left(
    bench: Bench, kind: Kind
) -> None:
    lease = bench.hold()
    bench.clock.advance(LATE)
    bench.store.before_renewal = lambda: bench.release(
        lease, become=kind, become_ttl=1000.0, next_token=lease.token
    )
    bench.parent_heartbeat.sweep()
    assert bench.store.batches == [[lease.key]]
    record = bench.store.leases.inspect(lease.key)
    assert record is not None
    assert (record.kind, record.ttl) == (kind, 1000.0)
    assert lease.lost


def test_a_note_about_a_released_lease_does_not_count_for_it(bench: Bench) -> None:
    lease = bench.hold()
    bench.clock.advance(LATE)
    bench.store.before_reply = lambda: bench.release(lease)
    bench.parent_heartbeat.sweep()
    assert lease.deadline == lease.valid_until


def test_a_note_that_comes_late_does_not_count_for_the_slots_next_lease(bench: Bench) -> None:
    first = bench.hold("first")
    seen = bench.seen()
    bench.release(first)
    others = [bench.hold(f"other{number}") for number in range(NOTES)]
    bench.record.advance(seen, float("inf"))
    assert seen.note in {one.note for one in bench.record.of_living()}
    assert [other.deadline for other in others] == [other.valid_until for other in others]
    assert all(one.parents < 0 for one in bench.record.of_living())


def test_a_lease_that_its_child_has_declared_lost_is_renewed_no_more(bench: Bench) -> None:
    lease = bench.hold()
    bench.store.away = True
    while not bench.lost:
        bench.clock.advance(bench.heartbeat.sweep() or 0.0)
    bench.store.away = False
    asked = len(bench.store.batches)
    bench.beat(2 * TTL)
    assert len(bench.store.batches) == asked
    assert lease.loss is not None
    assert lease.loss.reason is LossReason.UNREACHABLE


def test_a_lease_that_its_child_knows_is_not_its_own_is_renewed_no_more(bench: Bench) -> None:
    lease = bench.hold()
    bench.store.operators.free(lease.key, None)
    bench.clock.advance(TTL / 3)
    bench.heartbeat.sweep()
    assert bench.lost == [lease]
    assert bench.clock.now() < lease.valid_until
    asked = len(bench.store.batches)
    bench.beat(TTL)
    assert len(bench.store.batches) == asked


def test_a_lease_whose_deadline_has_passed_is_renewed_no_more(bench: Bench) -> None:
    lease = bench.hold()
    bench.store.away = True
    bench.beat(TTL)
    assert lease.lost
    bench.store.away = False
    asked = len(bench.store.batches)
    bench.beat(TTL)
    assert len(bench.store.batches) == asked
    assert lease.lost


def test_an_answer_that_comes_after_the_deadline_does_not_count(bench: Bench) -> None:
    lease = bench.hold()
    bench.clock.advance(LATE)
    # The store has renewed it; its reply is late.
    bench.store.before_reply = lambda: bench.clock.advance(TTL)
    bench.parent_heartbeat.sweep()
    assert lease.deadline == lease.valid_until
    assert lease.lost


def test_a_lease_that_was_seen_as_lost_stays_lost_whatever_is_noted_later(bench: Bench) -> None:
    lease = bench.hold()
    seen = bench.seen()
    bench.clock.advance(TTL)
    assert lease.lost
    # The parent was stopped between its look at the clock and this.
    bench.record.advance(seen, bench.clock.now() + TTL)
    assert lease.lost
    assert lease.remaining() == 0
    bench.heartbeat.sweep()
    assert bench.lost == [lease]


def test_a_replaced_lease_is_not_decided_about_and_not_asked_for_in_a_storm(bench: Bench) -> None:
    lease = bench.hold()
    bench.store.operators.free(lease.key, None)
    other = bench.hold()
    bench.beat(TTL)
    assert lease.loss is None, "that is the child's to say"
    assert lease.deadline == lease.valid_until
    assert not other.lost
    assert len(bench.store.batches) <= 6
    record = bench.store.leases.inspect(lease.key)
    assert record is not None
    assert record.token == str(other.token)


def test_a_lease_that_expired_in_the_store_is_not_made_again(bench: Bench) -> None:
    lease = bench.hold()
    bench.store.operators.free(lease.key, None)
    bench.beat(TTL)
    assert bench.store.leases.inspect(lease.key) is None


def test_no_lease_is_renewed_beyond_its_max_hold(bench: Bench) -> None:
    lease = bench.hold(max_hold=3 * TTL)
    bench.beat(3 * TTL)
    assert not lease.lost
    bench.beat(TTL)
    assert lease.lost
    assert bench.store.leases.inspect(lease.key) is None


# --- whose child lives ---------------------------------------------------------------------------


def in_a_child(bench: Bench) -> tuple[Child, str]:
    """A child that holds a lease, and its key; the store is this process's."""
    lease = bench.hold()
    lease.end()  # in this process: its renewals are the child's affair

    def life() -> None:
        bench.record.note((lease.key,), str(lease.token), TTL)
        bench.record.share(replace(lease, shared=None))

    return Child(1, life), lease.key


def test_a_dead_childs_lease_is_not_renewed_though_its_death_is_not_reported_yet(
    bench: Bench,
) -> None:
    child, key = in_a_child(bench)
    bench.beat(2 * TTL)
    assert bench.store.leases.inspect(key) is not None
    os.kill(child.pid, signal.SIGKILL)
    # Dead, and not reaped: its id is taken still, and signal 0 finds it.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    os.kill(child.pid, 0)
    asked = len(bench.store.batches)
    bench.beat(2 * TTL)
    assert len(bench.store.batches) == asked
    assert bench.store.leases.inspect(key) is None
    os.waitpid(child.pid, 0)


def test_another_process_with_a_dead_childs_id_does_not_keep_its_lease(bench: Bench) -> None:
    child, _ = in_a_child(bench)
    start_time = start_time_of(child.pid)
    assert lives(child.pid, start_time)
    assert not lives(child.pid, start_time - 1), "the same id, started at another time"
    child.kill()
    assert not lives(child.pid, start_time)


def test_a_stopped_childs_lease_is_kept_for_it_will_wake_up_believing_in_it(bench: Bench) -> None:
    child, key = in_a_child(bench)
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    bench.beat(3 * TTL)
    assert bench.store.leases.inspect(key) is not None
    child.kill()


def test_an_emptied_childs_lease_is_not_renewed(bench: Bench) -> None:
    child, key = in_a_child(bench)
    bench.record.empty(child.pid)
    bench.beat(2 * TTL)
    assert bench.store.batches == []
    assert bench.store.leases.inspect(key) is None
    child.kill()


def test_a_successor_that_takes_a_dead_childs_block_inherits_none_of_its_deadlines(
    bench: Bench,
) -> None:
    lease = bench.hold()
    lease.end()

    def killed_while_it_gave_back() -> None:
        bench.record.note((lease.key,), str(lease.token), TTL)
        shared = bench.record.share(replace(lease, shared=None))
        assert shared is not None
        text, nothing = shared.note + shared_memory._TEXT, shared_memory._NOTHING
        bench.record._memory[text : text + len(nothing)] = nothing

    dead = Child(1, killed_while_it_gave_back).kill()
    assert [one.pid for one in bench.record.of_living()] == [dead]
    successor = Child(1, lambda: bench.record.note(("new",), "t|0.0|n", TTL))
    assert bench.record.of_living() == []
    successor.kill()


# --- what is read while it is written ------------------------------------------------------------


def test_a_half_that_is_not_whole_counts_for_nothing(bench: Bench) -> None:
    lease = bench.hold()
    seen = bench.seen()
    bench.record.advance(seen, 5000.0)
    whole = bench.seen()
    memory = bench.record._memory
    shared, read = [], []
    offsets: list[int] = []
    for start in (seen.note, seen.note + shared_memory._CHILDS_BYTES):
        length, _ = shared_memory._HEAD.unpack_from(memory, start)
        offsets += range(start, start + shared_memory._HEAD.size + length)
    for offset in offsets:
        byte = memory[offset]
        memory[offset] = byte ^ 0x40
        shared.append(lease.deadline)
        read.append(bench.record.of_living())
        memory[offset] = byte
    assert bench.seen() == whole
    # Each byte belongs to one half, and that one was not believed.
    assert set(shared) == {5000.0, lease.valid_until}
    for deadline, living in zip(shared, read, strict=True):
        if deadline == 5000.0:
            assert living == []
        else:
            assert living == [seen]


def test_what_one_process_writes_another_never_reads_in_part(bench: Bench) -> None:
    record, clock = bench.record, SystemClock()
    tokens = [new_token(), new_token()]

    def lease_of(number: int) -> Lease:
        return Lease(
            key=f"key-{number}",
            token=tokens[number],
            ttl=float(number + 1),
            holder=Holder(),
            valid_until=float(number + 1),
            acquired_at=0.0,
            clock=clock,
            hold_until=float(number + 1),
        )

    def life() -> None:
        if os.fork() == 0:
            leases = [lease_of(0), lease_of(1)]
            for lease in leases:
                record.note((lease.key,), str(lease.token), 1.0)
                lease.shared = record.share(lease)
            slots = [lease.shared for lease in leases]
            slots[1].note = slots[0].note  # type: ignore[union-attr]
            os.write(pid_pipe[1], os.getpid().to_bytes(8, "little"))
            while True:
                for lease, slot in zip(leases, slots, strict=True):
                    slot.write(lease.ttl)  # type: ignore[union-attr]

    with open_pipe() as pid_pipe:
        child = Child(1, life)
        writer = int.from_bytes(os.read(pid_pipe[0], 8), "little")
        try:
            read = 0
            deadline = time.monotonic() + 0.4
            # On a busy machine this process may not have run by then.
            while time.monotonic() < deadline or (read <= 100 and time.monotonic() < deadline + 30):
                for one in record.of_living():
                    assert one.childs == one.ttl == one.hold_until, one
                    read += 1
        finally:
            os.kill(writer, signal.SIGKILL)
            child.kill()
    assert read > 100


def test_a_renewal_that_is_recorded_while_its_lease_is_released_does_not_reopen_the_note(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = bench.hold()
    write = shared_memory.sealed

    def release_meanwhile(values: tuple[Any, ...]) -> bytes:
        lease.end()  # the body's thread, while the heartbeat's is about to write
        return write(values)

    monkeypatch.setattr(shared_memory, "sealed", release_meanwhile)
    lease.renewed(bench.clock.now() + trust_of(lease.ttl, 1.0))
    assert bench.record.of_living() == []


def test_of_two_threads_that_write_at_once_the_slower_one_loses_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = shared_memory._free_note
    meanwhile = [lambda: bench.record.note(("k2",), "t2|0.0|n", TTL)]

    def slowly(notes: Any, free: Any) -> int | None:
        note = take(notes, free)
        if meanwhile:
            meanwhile.pop()()
        return note

    monkeypatch.setattr(shared_memory, "_free_note", slowly)
    bench.record.note(("k1",), "t1|0.0|n", TTL)
    assert [held.keys for held in notes_of_dead(bench.record, os.getpid())] == [("k1",), ("k2",)]


def test_a_fork_of_the_body_does_not_write_where_its_parent_does(bench: Bench) -> None:
    first = bench.hold("a")
    bench.release(first)
    child = Child(0, lambda: bench.record.note(("forks",), "t|0.0|n", TTL))
    lease = bench.hold("b")
    assert [held.keys for held in notes_of_dead(bench.record, child.pid)] == [("forks",)]
    bench.beat(2 * TTL)
    assert not lease.lost
    child.kill()


def test_a_fork_of_the_body_can_not_end_what_its_parent_holds(bench: Bench) -> None:
    lease = bench.hold()
    bench.clock.advance(TTL)

    def life() -> None:
        assert lease.lost  # as far as the fork can know: it declares nothing
        lease.end()

    Child(0, life).kill()
    assert bench.seen().childs == lease.valid_until


# --- an outage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("begins_at", [0.0, 0.3, 0.6, 0.7, 1.0, 1.5])
def test_an_outage_of_a_second_costs_no_lease_of_two(bench: Bench, begins_at: float) -> None:
    lease = bench.hold(ttl=2.0)
    bench.beat(begins_at)
    bench.store.away = True
    bench.beat(1.0)
    bench.store.away = False
    bench.beat(4.0)
    assert not lease.lost
    assert bench.store.leases.inspect(lease.key) is not None


def test_a_store_that_does_not_answer_is_asked_at_the_pace_of_a_heartbeat(bench: Bench) -> None:
    bench.hold(ttl=60)
    bench.store.away = True
    bench.beat(60)
    # From 22 s on, every second; at last, more and more often.
    assert 30 < len(bench.store.batches) < 60
    assert max(bench.store.timeouts) == 2.0


def test_a_store_that_fails_as_it_should_not_ends_nothing(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    lease = bench.hold()
    bench.clock.advance(LATE)

    def fail() -> None:
        raise RuntimeError("a defect")

    bench.store.before_renewal = fail
    bench.parent_heartbeat.sweep()
    assert "a defect" in caplog.text
    bench.store.before_renewal = None
    bench.beat(TTL)
    assert not lease.lost


def test_one_that_the_store_does_not_answer_does_not_keep_the_others_from_being_renewed(
    bench: Bench,
) -> None:
    answered, unanswered = bench.hold("answered"), bench.hold("unanswered")
    bench.store.silent = frozenset({unanswered.key})
    bench.beat(TTL)
    assert not answered.lost
    assert unanswered.lost


# --- thread and forks ----------------------------------------------------------------------------


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Bench], ParentHeartbeat]]:
    """Starts a parent heartbeat's thread on the machine's clock; ends it with the test."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def start_new_thread(function: Callable[[], None], name: str) -> None:
        threads.append(threading.Thread(target=function, name=name))
        threads[-1].start()

    def start(bench: Bench) -> ParentHeartbeat:
        monkeypatch.setattr(native_threads, "start_new_thread", start_new_thread)
        heartbeat = ParentHeartbeat(bench.record, bench.store, SystemClock())
        heartbeat.start(over.is_set)
        return heartbeat

    yield start
    over.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive(), "the thread has noticed the end"


def live_bench(ttl: float) -> tuple[Bench, Lease]:
    bench = Bench()
    clock: Any = SystemClock()
    bench.clock = clock
    bench.store = FlakyStore(clock)
    bench.heartbeat = Heartbeat(bench.store, clock, Events([]))
    bench.locker = Locker(bench.store, clock, bench.heartbeat, Events([]), bench.record)
    return bench, bench.hold(ttl=ttl)


def test_the_thread_goes_on_until_the_pool_is_over(
    bench: Bench, running: Callable[[Bench], ParentHeartbeat]
) -> None:
    live, lease = live_bench(ttl=1.5)
    running(live)
    deadline = time.monotonic() + 30
    while len(live.store.batches) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(live.store.batches) >= 4
    assert not lease.lost
    lease.end()


def test_a_child_is_forked_when_the_parent_heartbeat_is_out_of_the_stores_client(
    bench: Bench, running: Callable[[Bench], ParentHeartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_singleton_lock.core.fork_locks._FORK_PATIENCE", 30.0)
    live, lease = live_bench(ttl=0.6)
    live.store.before_renewal = stall = Stall()
    running(live)
    assert_a_fork_waits_for(stall)
    lease.end()


def test_a_store_that_hangs_does_not_keep_the_worker_from_forking(
    bench: Bench,
    running: Callable[[Bench], ParentHeartbeat],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live, lease = live_bench(ttl=0.6)
    live.store.before_renewal = stall = Stall()
    heartbeat = running(live)
    assert stall.entered.wait(30)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not stall.left.is_set()
    # And what the fork did not get, it does not give back.
    stall.leave.set()
    assert stall.left.wait(30)
    lease.end()
    for _ in range(2):
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    monkeypatch.setattr(heartbeat, "_is_over", lambda: True)
    for thread in threading.enumerate():
        if thread.name == "singleton-parent-heartbeat":
            thread.join(30)
    assert "failed" not in caplog.text


def test_a_childs_own_forks_wait_for_no_parent_heartbeat(
    running: Callable[[Bench], ParentHeartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child's copy of the parent's lock stays locked for ever after the fork."""
    monkeypatch.setattr("celery_singleton_lock.core.fork_locks._FORK_PATIENCE", 600.0)
    live, lease = live_bench(ttl=60.0)
    running(live)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        if (grandchild := os.fork()) == 0:
            os._exit(0)
        os.waitpid(grandchild, 0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    live.heartbeat.stop(lease)
    live.heartbeat.close()


def test_of_two_forks_at_once_neither_leaves_a_lock_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_locks, "_FORK_PATIENCE", 0.01)
    for step in (fork_locks._before_fork, fork_locks._after_fork):
        step()
        step()
    assert not any(lock.locked() for lock in fork_locks.FORK_LOCKS.values())


def test_a_parent_heartbeat_that_has_ended_is_forgotten_with_the_memory_that_it_read() -> None:
    """Python unregisters no hook of forks, and each embedded worker has one of its own."""
    record = SharedMemory()
    heartbeat = ParentHeartbeat(record, FlakyStore(SystemClock()), SystemClock())
    heartbeat.start(lambda: True)
    found, memory = weakref.ref(heartbeat), weakref.ref(record._memory)
    del heartbeat, record
    wait_until_collected(lambda: found() is None, "it is collected")
    assert memory() is None
