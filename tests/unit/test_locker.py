"""Acquire and release around a store that fails on cue."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import pytest

from celery_singleton_lock.core import native_threads
from celery_singleton_lock.core.call_queue import Hint, Join, Place
from celery_singleton_lock.core.clock_drift import drift
from celery_singleton_lock.core.events import Event, EventName, Events
from celery_singleton_lock.core.heartbeat import Heartbeat
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Holder, Kind, Lease, OperatorRelease, Record, Token
from celery_singleton_lock.core.lease_end import was_lost
from celery_singleton_lock.core.locker import Locker
from celery_singleton_lock.core.process import identity_of_this_process
from celery_singleton_lock.core.store_requests import (
    Acquire,
    CompletionState,
    Granted,
    QueuedAcquire,
    QueuedRelease,
    Refused,
    Relation,
    Release,
    ReleaseReply,
    Trace,
)
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.testing import ManualClock
from celery_singleton_lock.testing.contract import new_token
from tests.harness.events import Recorded
from tests.harness.flat_store import FlatStore

KEY = Keyspace("unit").lock("s", "k")


class CuedStore(FlatStore):
    """The memory store; each call takes the next cue: do it or not, then what is raised."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.cues: dict[str, list[tuple[bool, BaseException | Callable[[], Any]]]] = {}
        self.calls: list[tuple[str, Any, float]] = []

    def acquire(self, request: Acquire, *, timeout: float = 0) -> Granted | Refused:
        reply: Granted | Refused = self._perform("acquire", request, timeout)
        return reply

    def release(self, request: Release, *, timeout: float = 0) -> ReleaseReply:
        reply: ReleaseReply = self._perform("release", request, timeout)
        return reply

    def release_queued(
        self, request: QueuedRelease, *, timeout: float = 0
    ) -> tuple[ReleaseReply, Hint | None]:
        reply: tuple[ReleaseReply, Hint | None] = self._perform("release_queued", request, timeout)
        return reply

    def _perform(self, name: str, request: Any, timeout: float) -> Any:
        method = getattr(super(), name)
        name = name.removesuffix("_queued")
        self.calls.append((name, request, timeout))
        cues = self.cues.get(name)
        if not cues:
            return method(request)
        carried_out, then = cues.pop(0)
        reply = method(request) if carried_out else None
        if isinstance(then, BaseException):
            raise then
        then()
        return reply


class LeaseNotes:
    def __init__(self) -> None:
        self.held: dict[str, tuple[str, ...]] = {}

    def note(self, keys: Sequence[str], token: str, ttl: float, claim: str) -> None:
        self.held[token] = tuple(keys)

    def share(self, lease: Lease) -> None:
        return None

    def freeing(self, token: str) -> None: ...

    def erase(self, token: str) -> None:
        self.held.pop(token, None)


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = CuedStore(self.clock)
        self._events = Recorded()
        events = Events([self._events])
        self.heartbeat = Heartbeat(self.store, self.clock, events)
        self.notes = LeaseNotes()
        self.locker = Locker(self.store, self.clock, self.heartbeat, events, self.notes)

    @property
    def events(self) -> list[Event]:
        return self._events.all()

    def names(self) -> list[str]:
        return [name for name, _, _ in self.store.calls]

    def nothing_is_held(self) -> bool:
        return (
            self.store.leases.inspect(KEY) is None
            and not len(self.heartbeat)
            and not self.notes.held
        )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(native_threads, "start_new_thread", lambda function, name: None)
    return Bench()


def request(ttl: float = 6, slots: tuple[str, ...] = (KEY,)) -> Acquire:
    return Acquire(
        slots=slots, token=new_token(), holder=Holder(task="a", task_id="t", worker="w"), ttl=ttl
    )


def give(lease: Lease) -> Release:
    return Release(keys=(lease.key,), token=lease.token)


TOKEN = new_token()


def another(granted: float) -> Record:
    """A lease of another, granted at these seconds of the store's clock."""
    fence = int(granted * 1e6)
    return record(Kind.LEASE, str(new_token()), fence)


def own(kind: Kind) -> Record:
    """What a release of TOKEN's lease turns the key into."""
    token = TOKEN.next_attempt() if kind is Kind.RESERVED else TOKEN
    return record(kind, str(token), 7)


def record(kind: Kind, token: str, fence: int) -> Record:
    return Record(key=KEY, kind=kind, token=token, fence=fence, holder=Holder(), ttl=60)


# --- acquire -------------------------------------------------------------------------------------


def test_a_grant_is_a_lease_that_is_renewed_noted_and_reported(bench: Bench) -> None:
    asked = request()
    lease = bench.locker.acquire(asked, max_hold=30)
    assert isinstance(lease, Lease)
    assert (lease.key, lease.token, lease.ttl) == (KEY, asked.token, 6)
    assert lease.valid_until == bench.clock.now() + 6 - drift(6)
    assert lease.fence > 0
    assert len(bench.heartbeat) == 1
    assert bench.notes.held == {str(asked.token): (KEY,)}
    assert [event.name for event in bench.events] == [EventName.ACQUIRED]
    assert [timeout for _, _, timeout in bench.store.calls] == [1.0]


@pytest.mark.parametrize(("max_hold", "lasts"), [(30, 30), (None, float("inf"))])
def test_renewal_stops_max_hold_after_the_acquisition(
    bench: Bench, max_hold: float | None, lasts: float
) -> None:
    lease = bench.locker.acquire(request(), max_hold=max_hold)
    assert isinstance(lease, Lease)
    assert lease.hold_until == bench.clock.now() + lasts


def test_a_refusal_is_a_value_and_leaves_nothing_behind(bench: Bench) -> None:
    bench.locker.acquire(request())
    events, held = list(bench.events), dict(bench.notes.held)
    reply = bench.locker.acquire(request())
    assert isinstance(reply, Refused)
    assert reply.relation is Relation.OTHER
    assert (bench.events, bench.notes.held) == (events, held)
    assert len(bench.heartbeat) == 1


def test_an_acquire_whose_reply_was_lost_is_sent_again_with_the_same_token(bench: Bench) -> None:
    bench.store.cues["acquire"] = [(True, StoreUnavailable("lost"))]
    asked = request()
    lease = bench.locker.acquire(asked)
    assert isinstance(lease, Lease)
    assert bench.names() == ["acquire", "acquire"]
    assert bench.store.calls[0][1].token == bench.store.calls[1][1].token


def test_the_deadline_counts_from_the_try_that_was_answered(bench: Bench) -> None:
    def late() -> None:
        bench.clock.advance(0.9)
        raise StoreUnavailable("timeout")

    bench.store.cues["acquire"] = [(False, late)]
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    assert lease.valid_until == bench.clock.now() + 6 - drift(6)


@pytest.mark.parametrize("carried_out", [True, False])
def test_an_acquire_never_answered_is_released_by_token(bench: Bench, carried_out: bool) -> None:
    bench.store.cues["acquire"] = [(carried_out, StoreUnavailable("lost"))] * 2
    with pytest.raises(StoreUnavailable):
        bench.locker.acquire(request())
    assert bench.names() == ["acquire", "acquire", "release"]
    assert bench.nothing_is_held()
    assert bench.events == []


def test_a_refusing_store_is_not_asked_twice(bench: Bench) -> None:
    bench.store.cues["acquire"] = [(False, StoreError("read-only"))]
    with pytest.raises(StoreError, match="read-only"):
        bench.locker.acquire(request())
    assert bench.names() == ["acquire", "release"]
    assert bench.nothing_is_held()


def test_a_failing_release_of_an_unknown_acquire_keeps_the_first_error(bench: Bench) -> None:
    bench.store.cues["acquire"] = [(True, StoreUnavailable("first"))] * 2
    bench.store.cues["release"] = [(False, StoreUnavailable("second"))]
    with pytest.raises(StoreUnavailable, match="first"):
        bench.locker.acquire(request())


@pytest.mark.parametrize("carried_out", [True, False])
def test_an_acquire_never_answered_is_released_until_the_store_answers(
    bench: Bench, carried_out: bool
) -> None:
    bench.store.cues["acquire"] = [(carried_out, StoreUnavailable("lost"))] * 2
    bench.store.cues["release"] = [(False, StoreUnavailable("lost"))]
    with pytest.raises(StoreUnavailable):
        bench.locker.acquire(request())
    assert bench.notes.held, "the parent may release it, should this process die"
    bench.clock.advance(1.0)
    bench.locker.retry_queue.catch_up()
    assert bench.nothing_is_held()
    assert bench.events == []


@pytest.mark.parametrize(("away", "is_undone"), [(500, True), (700, False)])
def test_an_acquire_of_a_queued_call_is_undone_after_the_end_of_its_lease(
    bench: Bench, away: float, is_undone: bool
) -> None:
    asked = request()
    queued = QueuedAcquire(slots=asked.slots, token=asked.token, holder=asked.holder, ttl=asked.ttl)
    bench.store.cues["acquire"] = [(True, StoreUnavailable("lost"))] * 2
    bench.store.cues["release"] = [(False, StoreUnavailable("lost"))] * 2
    with pytest.raises(StoreUnavailable):
        bench.locker.acquire(queued)
    assert bench.notes.held
    bench.clock.advance(queued.ttl)
    bench.locker.retry_queue.catch_up()
    assert not bench.notes.held, "a process has few notes, and the lease has ended"
    assert not bench.locker.retry_queue.is_empty
    released = bench.names().count("release")
    bench.clock.advance(away - queued.ttl)
    bench.locker.retry_queue.catch_up()
    assert bench.names().count("release") == released + is_undone
    assert bench.locker.retry_queue.is_empty


def test_a_copy_that_joined_before_the_acquire_of_its_call_was_undone_is_due_at_once(
    bench: Bench,
) -> None:
    """The message was requeued because the acquire had no reply."""
    queue, asked = bench.store.call_queue, request()
    bench.store.cues["acquire"] = [(True, StoreUnavailable("lost"))] * 2
    bench.store.cues["release"] = [(False, StoreUnavailable("lost"))]
    join = partial(Join, key=KEY, token=asked.token, message=b"m", late=False)
    queue.join(join(), timeout=1)
    with pytest.raises(StoreUnavailable):
        bench.locker.acquire(
            QueuedAcquire(slots=(KEY,), token=asked.token, holder=asked.holder, ttl=60)
        )
    copy = join(sequence=1, asked=(asked.token.nonce,))
    assert queue.join(copy, timeout=1) == (Place.WAITING, 0)
    bench.clock.advance(1.0)
    bench.locker.retry_queue.catch_up()
    assert queue.due(Keyspace.shard(KEY), limit=9, timeout=1) == [KEY]


def test_the_releases_of_bodies_find_room_beside_those_of_acquires_never_answered(
    bench: Bench,
) -> None:
    for _ in range(1000):
        bench.store.cues["acquire"] = [(False, StoreUnavailable("lost"))] * 2
        bench.store.cues["release"] = [(False, StoreUnavailable("lost"))]
        with pytest.raises(StoreUnavailable):
            bench.locker.acquire(request())
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    bench.store.cues["release"] = [(False, StoreUnavailable("away"))] * 2
    bench.locker.release(lease, give(lease))
    bench.clock.advance(1.0)
    bench.locker.retry_queue.catch_up()
    assert bench.store.leases.inspect(KEY) is None
    assert bench.events[-1].name is EventName.RELEASED


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("carried_out", [True, False])
def test_an_exception_thrown_into_an_acquire_leaves_nothing_held(
    bench: Bench, error: type[BaseException], carried_out: bool
) -> None:
    bench.store.cues["acquire"] = [(carried_out, error("soft limit"))]
    with pytest.raises(error):
        bench.locker.acquire(request())
    assert bench.nothing_is_held()


def test_an_exception_thrown_while_observers_run_leaves_nothing_held(bench: Bench) -> None:
    def terminated(event: Event) -> None:
        raise SystemExit

    bench.heartbeat._events.sinks.append(terminated)
    with pytest.raises(SystemExit):
        bench.locker.acquire(request())
    assert bench.nothing_is_held()


def test_a_heartbeat_that_cannot_start_leaves_nothing_held(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_threads(function: Any, name: str) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(native_threads, "start_new_thread", no_threads)
    with pytest.raises(RuntimeError, match="new thread"):
        bench.locker.acquire(request())
    assert bench.nothing_is_held()


def test_a_grant_that_arrives_after_its_deadline_is_given_back(bench: Bench) -> None:
    bench.store.cues["acquire"] = [(True, lambda: bench.clock.advance(5.95))]
    with pytest.raises(StoreUnavailable, match="arrived after its ttl of 6 s"):
        bench.locker.acquire(request())
    assert bench.names() == ["acquire", "release"]
    assert bench.nothing_is_held()


def test_what_is_asked_for_is_written_down_before_it_is_sent(bench: Bench) -> None:
    asked = request(slots=(f"{KEY}#0", f"{KEY}#1"))
    seen: list[dict[str, tuple[str, ...]]] = []
    bench.store.cues["acquire"] = [(True, lambda: seen.append(dict(bench.notes.held)))]
    lease = bench.locker.acquire(asked)
    assert isinstance(lease, Lease)
    assert seen == [{str(asked.token): asked.slots}]
    assert bench.notes.held == {str(asked.token): (lease.key,)}


def test_an_unknown_acquire_of_slots_is_forgotten_in_all_of_them(bench: Bench) -> None:
    slots = (f"{KEY}#0", f"{KEY}#1")
    first = bench.locker.acquire(request(slots=slots))
    assert isinstance(first, Lease)
    bench.store.cues["acquire"] = [(True, SystemExit())]
    with pytest.raises(SystemExit):
        bench.locker.acquire(request(slots=slots))
    assert bench.store.leases.inspect(slots[0]) is not None
    assert bench.store.leases.inspect(slots[1]) is None


# --- release -------------------------------------------------------------------------------------


def test_a_release_frees_the_key_and_reports_how_long_it_was_held(bench: Bench) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    bench.clock.advance(1.5)
    assert bench.locker.release(lease, give(lease)) is ReleaseReply.OURS
    assert bench.nothing_is_held()
    assert bench.events[-1].name is EventName.RELEASED
    assert bench.events[-1].data == {"held": 1.5}


@pytest.mark.parametrize("carried_out", [True, False])
def test_a_release_whose_reply_was_lost_is_sent_again(bench: Bench, carried_out: bool) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    bench.store.cues["release"] = [(carried_out, StoreUnavailable("lost"))]
    bench.locker.release(lease, give(lease))
    assert bench.nothing_is_held()
    # This store keeps nothing that distinguishes a release from a loss.
    doubt = EventName.RELEASE_FAILED if carried_out else EventName.RELEASED
    assert [event.name for event in bench.events] == [EventName.ACQUIRED, doubt]


def test_a_loss_met_by_a_release_whose_first_try_was_never_sent_is_reported(bench: Bench) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    unsent = StoreUnavailable("connection refused")
    unsent.was_sent = False
    bench.store.cues["release"] = [(False, unsent)]
    bench.store.operators.free(KEY, None)
    bench.locker.release(lease, give(lease))
    assert bench.events[-1].name is EventName.LEASE_LOST


class Interrupted(BaseException):
    """A soft time limit, or SIGTERM."""


@pytest.mark.parametrize("carried_out", [True, False])
def test_a_release_made_again_after_an_interruption_is_no_loss(
    bench: Bench, carried_out: bool
) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    bench.store.cues["release"] = [(carried_out, Interrupted())]
    with pytest.raises(Interrupted):
        bench.locker.release(lease, give(lease))
    bench.locker.release(lease, give(lease))
    assert EventName.LEASE_LOST not in [event.name for event in bench.events]
    assert bench.nothing_is_held()


def test_a_loss_met_by_a_release_that_was_made_again_after_an_interruption_is_reported(
    bench: Bench,
) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    bench.store.cues["release"] = [(False, Interrupted())]
    with pytest.raises(Interrupted):
        bench.locker.release(lease, give(lease))
    bench.store.operators.free(KEY, None)
    bench.locker.release(lease, give(lease))
    # The first one may have been carried out as well.
    assert bench.events[-1].name is EventName.RELEASE_FAILED


@pytest.mark.parametrize(
    ("trace", "lost"),
    [
        (Trace(record=None), None),
        (Trace(record=None, fence=7, now=100.0), None),
        (Trace(record=None, fence=6, now=100.0), True),
        (Trace(record=None, fence=0, now=100.0), True),
        (Trace(record=another(98.9), fence=10**9, now=100.0), True),
        (Trace(record=another(99.1), fence=10**9, now=100.0), None),
        (Trace(record=another(200.0), fence=10**9, now=100.0), None),  # the clock was set back
        (Trace(record=another(98.9)), None),  # fences that are no times
        (Trace(record=own(Kind.COOLING), fence=0, now=100.0), False),
        (Trace(record=own(Kind.RESERVED), fence=0, now=100.0), False),
    ],
)
def test_the_trace_of_a_lease_distinguishes_a_loss_from_a_release_that_was_sent_twice(
    bench: Bench, trace: Trace, lost: bool | None
) -> None:
    lease = bench.locker.acquire(replace(request(), token=TOKEN))
    assert isinstance(lease, Lease)
    lease.fence_number = 7
    released = replace(give(lease), next_token=TOKEN.next_attempt())
    assert was_lost(lease, released, trace, elapsed=1.0) is lost


def away(tries: int, *, was_sent: bool = True) -> list[tuple[bool, Any]]:
    """The cues of a store that carries out none of so many requests."""
    error = StoreUnavailable("away")
    error.was_sent = was_sent
    return [(False, error)] * tries


@pytest.mark.parametrize("refuses", [False, True])
def test_a_release_is_repeated_until_the_store_carries_it_out(bench: Bench, refuses: bool) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    # Without a reply, the first request is sent twice.
    bench.store.cues["release"] = [(False, StoreError("no rights"))] * 3 if refuses else away(4)
    assert bench.locker.release(lease, give(lease)) is None
    assert len(bench.heartbeat) == 0, "a key that can't be released is renewed no more"
    for _ in range(2):
        bench.clock.advance(1.0)
        bench.locker.retry_queue.catch_up()
        assert bench.notes.held, "the parent may release it, should this process die"
    bench.clock.advance(1.0)
    bench.locker.retry_queue.catch_up()
    assert bench.nothing_is_held()
    assert [(event.name, event.data.get("action")) for event in bench.events[1:]] == [
        (EventName.STORE_UNREACHABLE, "released-later"),
        (EventName.STORE_BACK, None),
        (EventName.RELEASED, None),
    ]
    assert bench.events[1].data["error"] == ("no rights" if refuses else "away")
    assert bench.events[-1].data == {"held": 0.0}


def test_a_release_fails_when_it_is_given_up_and_not_before(bench: Bench) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    bench.store.cues["release"] = away(100)
    bench.locker.release(lease, give(lease))
    for _ in range(5):
        bench.clock.advance(1.0)
        bench.locker.retry_queue.catch_up()
        assert EventName.RELEASE_FAILED not in [event.name for event in bench.events]
    bench.clock.advance(1.0)
    bench.locker.retry_queue.catch_up()
    assert bench.events[-1].name is EventName.RELEASE_FAILED
    assert bench.events[-1].data == {"error": "away", "frees_in": 0.0}
    assert bench.locker.retry_queue.is_empty


def test_a_release_that_is_left_when_the_process_ends_fails(bench: Bench) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    bench.store.cues["release"] = away(2)
    bench.locker.release(lease, give(lease))
    bench.locker.retry_queue.end()  # waits for a second
    assert bench.events[-1].name is EventName.RELEASE_FAILED
    assert bench.events[-1].data["frees_in"] == pytest.approx(5, abs=0.1)


def test_a_release_that_the_store_refuses_for_the_whole_ttl_fails(bench: Bench) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    bench.store.cues["release"] = [(False, StoreError("read-only"))] * 100
    bench.locker.release(lease, give(lease))
    bench.clock.advance(lease.ttl)
    bench.locker.retry_queue.catch_up()
    assert bench.events[-1].name is EventName.RELEASE_FAILED
    assert bench.events[-1].data == {"error": "read-only", "frees_in": 0.0}
    assert bench.locker.retry_queue.is_empty


@pytest.mark.parametrize("refuses", [False, True])
def test_the_completion_record_of_a_release_is_written_after_an_outage_longer_than_the_lease(
    bench: Bench, refuses: bool
) -> None:
    asked = request()
    lease = bench.locker.acquire(asked)
    assert isinstance(lease, Lease)
    refusal = [(False, StoreError("full"))]
    bench.store.cues["release"] = refusal if refuses else away(2, was_sent=False)
    done = replace(give(lease), completion=CompletionState.DONE, completion_ttl=3600.0)
    bench.locker.release(lease, done)
    bench.clock.advance(60.0)
    bench.locker.retry_queue.catch_up()
    duplicate = replace(asked, token=replace(asked.token, nonce="redelivered"))
    reply = bench.locker.acquire(duplicate)
    assert isinstance(reply, Refused)
    assert reply.relation is Relation.DONE
    # Its lease has expired, after its body had ended: that is no loss.
    assert EventName.LEASE_LOST not in [event.name for event in bench.events]
    assert bench.events[-1].name is EventName.RELEASE_FAILED
    assert "before the ttl had freed the key" in bench.events[-1].data["error"]


def test_a_repeated_release_leaves_the_lease_of_the_next_holder(bench: Bench) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    bench.store.cues["release"] = away(2)
    bench.locker.release(lease, give(lease))
    bench.store.operators.free(KEY, None)
    other = bench.locker.acquire(request())
    assert isinstance(other, Lease)
    bench.clock.advance(1.0)
    bench.locker.retry_queue.catch_up()
    assert bench.locker.retry_queue.is_empty
    record = bench.store.leases.inspect(KEY)
    assert record is not None
    assert record.token == str(other.token)


@pytest.mark.parametrize(("min_hold", "left"), [(10.0, 6.0), (3.0, 0.0)])
def test_a_key_cools_down_no_longer_because_its_release_was_repeated(
    bench: Bench, min_hold: float, left: float
) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    bench.store.cues["release"] = away(2)
    bench.locker.release(lease, Release.of(lease, min_hold=min_hold))
    bench.clock.advance(4.0)
    bench.locker.retry_queue.catch_up()
    record = bench.store.leases.inspect(KEY)
    assert (record.ttl if record else 0.0) == pytest.approx(left)


def test_a_lease_that_another_has_is_not_released(bench: Bench) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    bench.store.operators.free(KEY, None)
    other = bench.locker.acquire(request())
    assert isinstance(other, Lease)
    assert bench.locker.release(lease, give(lease)) is ReleaseReply.NOT_OURS
    record = bench.store.leases.inspect(KEY)
    assert record is not None
    assert record.token == str(other.token)
    assert EventName.RELEASED not in [event.name for event in bench.events]


def test_a_loss_that_the_release_is_the_first_to_meet_is_reported(bench: Bench) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    bench.store.operators.free(KEY, None)
    bench.locker.release(lease, give(lease))
    assert [event.name for event in bench.events] == [EventName.ACQUIRED, EventName.LEASE_LOST]
    assert bench.events[-1].holder == lease.holder
    assert bench.events[-1].data["reason"] == "gone"
    bench.locker.release(lease, give(lease))
    assert len(bench.events) == 2, "once"


def test_a_loss_that_the_release_is_the_first_to_detect_names_the_operator(bench: Bench) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    bench.store.operators.free(KEY, None, OperatorRelease(user="ann", host="ops-1", reason="stuck"))
    bench.locker.release(lease, give(lease))
    detail = "released by ann on ops-1: stuck"
    data = {"reason": "operator", "detail": detail, "store": "", "action": "task-ended"}
    assert bench.events[-1].data == data


def test_the_note_of_an_operator_proves_a_loss_that_a_resent_release_meets(bench: Bench) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    bench.store.cues["release"] = [(False, StoreUnavailable("away"))]
    bench.store.operators.free(KEY, None, OperatorRelease(user="ann", host="ops-1"))
    bench.locker.release(lease, give(lease))
    data = bench.events[-1].data
    assert (data["reason"], data["detail"]) == ("operator", "released by ann on ops-1")


def test_a_loss_that_the_heartbeat_has_reported_is_not_reported_again(bench: Bench) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    bench.store.operators.free(KEY, None)
    bench.heartbeat.ask(lease)
    bench.locker.release(lease, give(lease))
    assert [event.name for event in bench.events] == [EventName.ACQUIRED, EventName.LEASE_LOST]


def test_without_asynchronous_releases_the_end_of_a_task_waits_for_the_reply(
    bench: Bench,
) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    bench.store.cues["release"] = [(False, StoreUnavailable("away"))]
    bench.locker.give_back(lease, give(lease))
    assert bench.names() == ["acquire", "release", "release"]
    assert bench.nothing_is_held()
    assert bench.events[-1].name is EventName.RELEASED


def test_an_exception_thrown_into_the_end_of_a_task_ends_the_renewing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)

    def terminated() -> float:
        raise SystemExit

    monkeypatch.setattr(bench.clock, "now", terminated)
    with pytest.raises(SystemExit):
        bench.locker.give_back(lease, give(lease))
    assert len(bench.heartbeat) == 0


# --- events --------------------------------------------------------------------------------------


def test_a_sink_that_raises_breaks_no_lock_and_no_other_sink(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: Event) -> None:
        raise ZeroDivisionError

    bench.heartbeat._events.sinks.insert(0, broken)
    lease = bench.locker.acquire(request())
    assert isinstance(lease, Lease)
    assert bench.locker.release(lease, give(lease)) is ReleaseReply.OURS
    assert [event.name for event in bench.events] == [EventName.ACQUIRED, EventName.RELEASED]
    assert f"failed on the event '{EventName.ACQUIRED}'" in caplog.text


# --- a dead holder on this host ------------------------------------------------------------------

OWN: Final = identity_of_this_process()
needs_identity = pytest.mark.skipif(not OWN, reason="needs Linux's /proc, of this PID namespace")


@pytest.fixture(scope="module")
def dead() -> Holder:
    """The description of a holder whose process has ended; its identity is as if a fork's."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return Holder(task="a", task_id="dead", worker="w", pid=child, process=OWN)


def on_this_host(*slots: str) -> Acquire:
    return replace(
        request(slots=slots or (KEY,)),
        holder=Holder(task="b", task_id="new", worker="w", pid=os.getpid(), process=OWN),
    )


def hold_as(bench: Bench, holder: Holder, key: str = KEY, token: Token | None = None) -> Granted:
    """The lease of a process, of which nothing else is in this one."""
    request = Acquire(slots=(key,), token=token or new_token(), holder=holder, ttl=60)
    reply = FlatStore.acquire(bench.store, request)
    assert isinstance(reply, Granted)
    return reply


@needs_identity
def test_the_lease_of_a_dead_process_is_freed_at_once_with_a_higher_fence(
    bench: Bench, dead: Holder
) -> None:
    before = hold_as(bench, dead)
    lease = bench.locker.acquire(on_this_host())
    assert isinstance(lease, Lease)
    assert lease.fence > (before.fence or 0)
    [freed] = [event for event in bench.events if event.name is EventName.FREED]
    assert (freed.key, freed.task_id, freed.holder) == (KEY, dead.task_id, dead)
    assert "new" in freed.data["by"]
    assert "no longer exists" in freed.data["reason"]


@needs_identity
@pytest.mark.parametrize("change", [{"pid": os.getpid()}, {"process": ""}, {"process": "x" * 14}])
def test_a_lease_whose_process_is_not_proven_dead_stays_and_costs_one_request(
    bench: Bench, dead: Holder, change: dict[str, Any]
) -> None:
    hold_as(bench, replace(dead, **change))
    assert isinstance(bench.locker.acquire(on_this_host()), Refused)
    assert bench.names() == ["acquire"]


@needs_identity
def test_a_process_without_an_identity_frees_nothing(bench: Bench, dead: Holder) -> None:
    hold_as(bench, dead)
    assert isinstance(bench.locker.acquire(request()), Refused)
    assert bench.names() == ["acquire"]


@needs_identity
@pytest.mark.parametrize("kind", [Kind.RESERVED, Kind.COOLING, Kind.DYING])
def test_only_a_lease_is_freed_for_its_process_is_dead(
    bench: Bench, dead: Holder, kind: Kind
) -> None:
    token = new_token()
    hold_as(bench, dead, token=token)
    release = Release(keys=(KEY,), token=token, become=kind, become_ttl=30)
    FlatStore.release(bench.store, release)
    assert isinstance(bench.locker.acquire(on_this_host()), Refused)
    assert bench.names() == ["acquire"]


@needs_identity
def test_a_stale_attempt_does_not_take_the_key_of_a_later_one_that_died(
    bench: Bench, dead: Holder
) -> None:
    request = on_this_host()
    hold_as(bench, dead, token=replace(request.token, retries=1, nonce="n"))
    reply = bench.locker.acquire(request)
    assert isinstance(reply, Refused)
    assert reply.relation is Relation.LATER


@needs_identity
@pytest.mark.parametrize("relation", [Relation.DUPLICATE, Relation.EARLIER])
def test_a_redelivery_and_a_retry_free_the_lease_of_their_own_dead_attempt(
    bench: Bench, dead: Holder, relation: Relation
) -> None:
    request = on_this_host()
    retries = 1 if relation is Relation.EARLIER else 0
    request.token = replace(request.token, retries=retries)
    hold_as(bench, dead, token=replace(request.token, retries=0, nonce="n"))
    assert isinstance(bench.locker.acquire(request), Lease)


@needs_identity
def test_the_dead_holder_of_any_slot_is_found(bench: Bench, dead: Holder) -> None:
    slots = Keyspace("unit").slots(KEY, 3)
    living = replace(dead, pid=os.getpid())
    for slot, holder in zip(slots, (living, living, dead), strict=True):
        hold_as(bench, holder, slot)
    lease = bench.locker.acquire(on_this_host(*slots))
    assert isinstance(lease, Lease)
    assert lease.key == slots[2]


@needs_identity
def test_a_key_that_got_another_holder_meanwhile_is_left_to_it(bench: Bench, dead: Holder) -> None:
    token, other = new_token(), new_token()
    hold_as(bench, dead, token=token)

    def change_hands() -> None:
        FlatStore.release(bench.store, Release(keys=(KEY,), token=token))
        hold_as(bench, Holder(task_id="other"), token=other)

    bench.store.cues["acquire"] = [(True, change_hands)]
    reply = bench.locker.acquire(on_this_host())
    assert isinstance(reply, Refused)
    assert (reply.holder.task_id, bench.store.leases.inspect(KEY).token) == ("other", str(other))
    assert EventName.FREED not in [event.name for event in bench.events]
