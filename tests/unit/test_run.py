"""Task runs in Celery's own tracer, as a worker's child has it; the store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
from celery import Celery, Task, current_task, uuid
from celery.app.trace import build_tracer
from celery.exceptions import Reject, SoftTimeLimitExceeded

from celery_singleton_lock import (
    PER_TASK,
    LeaseLost,
    LockConflict,
    OnConflict,
    SingletonTask,
    current_lease,
    singleton_task,
)
from celery_singleton_lock.celery_compat import may_reject_when_done
from celery_singleton_lock.core import native_threads
from celery_singleton_lock.core.events import EventName, Events
from celery_singleton_lock.core.lease import Holder, Phase, Token
from celery_singleton_lock.core.locker import Locker
from celery_singleton_lock.core.store_requests import (
    Acquire,
    Granted,
    NewestCall,
    Refused,
    Release,
    ReleaseReply,
)
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.message.header import HEADER, VERSION
from celery_singleton_lock.message.request_data import ATTRIBUTE, Arrival
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.task import acquire as acquire_module
from celery_singleton_lock.task import requeue as requeue_module
from celery_singleton_lock.task import run as run_module
from celery_singleton_lock.task.interrupt import LeaseInterrupt, is_loss
from celery_singleton_lock.task.run import TaskRun
from celery_singleton_lock.task.run_state import Asking
from celery_singleton_lock.testing import ManualClock, SingletonStore, hold_lock, lose_lease
from tests.harness.deliveries import wait_until
from tests.harness.events import Recorded
from tests.harness.flat_store import FlatStore
from tests.harness.keys import EVERY_NAME

UNREACHABLE = "redis://127.0.0.1:1/0"


class LateStore(FlatStore):
    """The memory store; while it is silent, releases arrive when a test lets them."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.silent = True
        self.on_their_way: list[Release] = []

    def acquire(self, request: Acquire, *, timeout: float = 0) -> Granted | Refused:
        if self.silent:
            raise StoreUnavailable("timed out")
        return super().acquire(request, timeout=timeout)

    def release(self, request: Release, *, timeout: float = 0) -> ReleaseReply:
        if self.silent:
            self.on_their_way.append(request)
            raise StoreUnavailable("timed out")
        return super().release(request, timeout=timeout)

    def arrive(self) -> None:
        """What was given up by its sender reaches the server all the same."""
        while self.on_their_way:
            super().release(self.on_their_way.pop())


class OutageEndsClock(ManualClock):
    """A sleep on it lasts until the store answers again."""

    store: LateStore

    def sleep(self, seconds: float) -> None:
        self.store.silent = False
        super().sleep(seconds)


def test_a_release_of_an_unanswered_acquire_that_comes_late_frees_no_later_grant() -> None:
    clock = OutageEndsClock()
    clock.store = store = LateStore(clock)
    # Neither the store nor the broker answers: the message is retained and the store asked again.
    app = Celery("late", broker=UNREACHABLE, set_as_current=False)
    app.conf.task_publish_retry = False
    app.conf.broker_transport_options = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
    Runtime.install(app, Runtime(app, store=store, clock=clock))
    held: list[Any] = []

    @singleton_task(app=app, name="work", shared=False, key="{name}")
    def work(name: str) -> None:
        assert store.on_their_way
        store.arrive()
        held.append(store.leases.inspect(current_lease().key))

    trace = build_tracer("work", app.tasks["work"], app=app)
    message = {"id": "t", "task": "work", "delivery_info": {}, ATTRIBUTE: Arrival(nonce="a1")}
    trace("t", ["k"], {}, message)
    app.close()
    assert len(held) == 1, "it has not run"
    assert held[0] is not None, "its key was free while it ran"
    assert [*store.operators.scan(EVERY_NAME)] == []


def test_the_retry_of_a_run_without_lease_and_claim_computes_no_key_again() -> None:
    app = Celery("unlocked", broker="memory://", set_as_current=False)
    Runtime.install(app, Runtime(app, store=MemoryStore(ManualClock()), clock=ManualClock()))
    asked: list[str] = []

    def key(name: str) -> None:
        asked.append(name)

    @singleton_task(app=app, name="work", shared=False, bind=True, key=key)
    def work(self: Any, name: str) -> None:
        raise self.retry(countdown=1)

    trace = build_tracer("work", app.tasks["work"], app=app)
    trace(
        "t",
        ["k"],
        {},
        {"id": "t", "task": "work", "delivery_info": {}, ATTRIBUTE: Arrival(nonce="a1")},
    )
    app.close()
    assert asked == ["k"]


def test_a_loss_that_is_handled_when_its_run_has_just_been_settled_found_the_body_ended() -> None:
    """The heartbeat's thread may stop between its finding and the handler."""
    app = Celery("settled", broker="memory://", set_as_current=False)
    Runtime.install(app, Runtime(app, store=MemoryStore(ManualClock()), clock=ManualClock()))
    kept: list[Any] = []

    @singleton_task(app=app, name="work", shared=False, bind=True, acks_late=True)
    def work(self: Any, name: str) -> None:
        kept.extend((TaskRun.of(self.request), current_lease()))

    trace = build_tracer("work", app.tasks["work"], app=app)
    trace(
        "t",
        ["k"],
        {},
        {"id": "t", "task": "work", "delivery_info": {}, ATTRIBUTE: Arrival(nonce="a1")},
    )
    app.close()
    run, lease = kept
    assert run.on_lost(lease) == "task-ended"


class OrdersCalls(FlatStore):
    """A store that knows newest calls: each call is the newest, and none is cancelled."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.newest_calls: Any = self

    def register(self, key: str, call: NewestCall, **options: Any) -> NewestCall:
        return call

    def of(self, keys: Sequence[str], **options: Any) -> list[NewestCall | None]:
        return [None] * len(keys)


class KeepsReservations(OrdersCalls):
    """A store in which the newest call does not delete the reservation of an older one."""

    asked = 0

    def acquire(self, request: Acquire, *, timeout: float) -> Granted | Refused:
        self.asked += 1
        assert self.asked < 1000, "the key is asked for without a pause"
        return super().acquire(request, timeout=timeout)


def test_a_reservation_that_stays_is_waited_for_as_any_holder() -> None:
    clock = ManualClock()
    store = KeepsReservations(clock)
    app = Celery("reserved", broker="memory://", set_as_current=False)
    Runtime.install(app, Runtime(app, store=store, clock=clock))
    rule = OnConflict.cancel_running(within=1, timeout=5)

    @singleton_task(app=app, name="work", shared=False, on_conflict=rule)
    def work() -> None: ...

    key = app.tasks["work"].lock_key()
    assert key is not None
    token = Token("earlier", 0, 0, "n0")
    holder = Holder(task="work", task_id="earlier")
    store.leases.acquire(Acquire(slots=(key,), token=token, holder=holder, ttl=600), timeout=1)
    release = Release(keys=(key,), token=token)
    release.reserve(600)
    store.leases.release(release, timeout=1)
    trace = build_tracer("work", app.tasks["work"], app=app)
    request = {"id": "t", "task": "work", "delivery_info": {}, ATTRIBUTE: Arrival(nonce="a1")}
    found = trace("t", [], {}, request)
    app.close()
    assert "waiting for 5 s was not enough" in str(found.info.retval)


class FailsOnce(OrdersCalls):
    """A store that has no reply to the first note of a call, after its grant."""

    failed = False

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.asking: list[bool] = []

    def acquire(self, request: Acquire, *, timeout: float) -> Granted | Refused:
        run = TaskRun.of(current_task.request)
        assert run is not None
        assert isinstance(run.state, Asking)
        self.asking.append(run.state.request is request and run.state.waiter is not None)
        return super().acquire(request, timeout=timeout)

    def register(self, key: str, call: NewestCall, **options: Any) -> NewestCall:
        if not self.failed:
            self.failed = True
            raise StoreUnavailable("no reply")
        return call


def test_a_run_knows_the_request_that_is_on_its_way_after_a_grant_that_was_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever interrupts the second try, the end of the run finds its request and its waiter."""
    clock = ManualClock()
    store = FailsOnce(clock)
    app = Celery("noted", broker="memory://", set_as_current=False)
    Runtime.install(app, Runtime(app, store=store, clock=clock))
    # Without the message, which the broker does not take either, the run tries again.
    monkeypatch.setattr(acquire_module, "requeue", lambda *_, **__: None)

    @singleton_task(app=app, name="work", shared=False, on_conflict="cancel_running")
    def work() -> str:
        return "ran"

    trace = build_tracer("work", app.tasks["work"], app=app)
    found = trace(
        "t",
        [],
        {},
        {"id": "t", "task": "work", "delivery_info": {}, ATTRIBUTE: Arrival(nonce="a1")},
    )
    app.close()
    assert found.retval == "ran"
    assert store.asking == [True, True]


def test_what_becomes_of_a_lost_body_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat's thread says it in the event, and the body's thread does it."""
    app = Celery("lost", broker="memory://", set_as_current=False)
    Runtime.install(app, Runtime(app, store=MemoryStore(ManualClock()), clock=ManualClock()))
    seen: list[bool] = []

    @singleton_task(app=app, name="work", shared=False, bind=True, on_lost="retry", key="{name}")
    def work(self: Any, name: str) -> None:
        run = TaskRun.of(self.request)
        assert run is not None
        seen.append(run._goes_back(self.request))
        # The queues of the app change between the two.
        monkeypatch.setattr(run_module, "why_not", lambda *_: "it has no queue any more")
        seen.append(run._goes_back(self.request))

    trace = build_tracer("work", app.tasks["work"], app=app)
    trace(
        "t",
        ["k"],
        {},
        {"id": "t", "task": "work", "delivery_info": {}, ATTRIBUTE: Arrival(nonce="a1")},
    )
    app.close()
    assert seen == [True, True]


def test_a_newer_message_that_cannot_be_requeued_fails_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requeue_module, "why_not", lambda *_: "it came by a fanout exchange")
    app = Celery("newer", broker="memory://", set_as_current=False)
    Runtime.install(app, Runtime(app, store=MemoryStore(ManualClock()), clock=ManualClock()))

    @singleton_task(app=app, name="work", shared=False)
    def work() -> None: ...

    trace = build_tracer("work", app.tasks["work"], app=app)
    header = {"version": VERSION + 1, "id": "t", "call": "c"}
    request = {
        "id": "t",
        "task": "work",
        "delivery_info": {},
        ATTRIBUTE: Arrival(nonce="a1"),
        HEADER: header,
    }
    found = trace("t", [], {}, request).info
    app.close()
    assert found.state == "FAILURE"
    assert f"version {VERSION + 1}" in str(found.retval)
    assert f"up to version {VERSION}" in str(found.retval)
    assert "it came by a fanout exchange" in str(found.retval)


def test_a_message_that_is_requeued_for_an_unresponsive_store_releases_its_token_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The locker has done that; once more at the end, the child would wait for the store again.

    The thread of the queue, for which no child waits, does not run here.
    """
    monkeypatch.setattr(native_threads, "start_new_thread", lambda function, name: None)
    clock = ManualClock()
    store = LateStore(clock)
    app = Celery("silent", broker="memory://", set_as_current=False)
    app.conf.task_default_queue = "silenced"  # all apps of this process share one broker in memory
    Runtime.install(app, Runtime(app, store=store, clock=clock))

    @singleton_task(app=app, name="silenced", shared=False, key="{name}")
    def silenced(name: str) -> None: ...

    trace = build_tracer("silenced", app.tasks["silenced"], app=app)
    message = {"id": "t", "task": "silenced", "delivery_info": {}, ATTRIBUTE: Arrival(nonce="a1")}
    state = trace("t", ["k"], {}, message).info
    with app.connection_for_write() as connection:
        queued = connection.default_channel.queue_purge("silenced")
    app.close()
    assert (state.state, queued) == ("IGNORED", 1), "it was not requeued"
    assert [str(request.token) for request in store.on_their_way] == ["t|0.0|a1"]


@pytest.mark.parametrize(
    ("rule", "state", "bodies"),
    [("raise", "FAILURE", 0), ("retry", "IGNORED", 0), ("run", "SUCCESS", 1)],
)
def test_without_a_reply_of_the_store_no_body_runs_unless_the_task_says_so(
    rule: Any, state: str, bodies: int
) -> None:
    clock = ManualClock()
    app = Celery("unanswered", broker="memory://", set_as_current=False)
    app.conf.task_default_queue = "unanswered"
    Runtime.install(app, Runtime(app, store=LateStore(clock), clock=clock))
    ran: list[str] = []

    @singleton_task(app=app, name="work", shared=False, key="{name}", on_store_error=rule)
    def work(name: str) -> None:
        ran.append(name)

    trace = build_tracer("work", app.tasks["work"], app=app)
    message = {"id": "t", "task": "work", "delivery_info": {}, ATTRIBUTE: Arrival(nonce="a1")}
    ended = trace("t", ["k"], {}, message).info
    with app.connection_for_write() as connection:
        connection.default_channel.queue_purge("unanswered")
    app.close()
    assert ((ended.state if ended else "SUCCESS"), len(ran)) == (state, bodies)


def test_a_message_that_the_broker_refuses_is_retained_until_it_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    app = Celery("retained", broker="memory://", set_as_current=False)
    app.conf.task_default_queue = "retained"
    Runtime.install(app, Runtime(app, store=store, clock=clock))
    refusals = [ConnectionRefusedError("no broker")] * 3
    publish_copy = requeue_module.publish_copy

    def publish(*args: Any) -> float:
        if refusals:
            raise refusals.pop()
        return publish_copy(*args)

    monkeypatch.setattr(requeue_module, "publish_copy", publish)

    @singleton_task(app=app, name="work", shared=False, key="{name}", on_conflict="retry")
    def work(name: str) -> None: ...

    key = work.lock_key("k")
    assert key is not None
    other = Acquire(slots=(key,), token=Token("u", 0, 0, "b1"), holder=Holder(), ttl=600)
    assert isinstance(store.leases.acquire(other), Granted)
    trace = build_tracer("work", app.tasks["work"], app=app)
    trace(
        "t",
        ["k"],
        {},
        {"id": "t", "task": "work", "delivery_info": {}, ATTRIBUTE: Arrival(nonce="a1")},
    )
    with app.connection_for_write() as connection:
        queued = connection.default_channel.queue_purge("retained")
    app.close()
    assert queued == 1, "it was given up"


@pytest.mark.parametrize("acks_late", [False, True])
def test_a_lease_is_held_until_the_result_is_stored(
    monkeypatch: pytest.MonkeyPatch, acks_late: bool
) -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    app = Celery("stored", broker="memory://", backend="cache+memory://", set_as_current=False)
    Runtime.install(app, Runtime(app, store=store, clock=clock))

    @singleton_task(app=app, name="work", shared=False, key="{name}", acks_late=acks_late)
    def work(name: str) -> None: ...

    kinds: list[str] = []
    store_result = app.backend.store_result

    def keep(*args: Any, **options: Any) -> Any:
        kinds.extend(record.kind for record in store.operators.scan(EVERY_NAME))
        return store_result(*args, **options)

    monkeypatch.setattr(app.backend, "store_result", keep)
    trace = build_tracer("work", app.tasks["work"], app=app)
    trace(
        "t",
        ["k"],
        {},
        {"id": "t", "task": "work", "delivery_info": {}, ATTRIBUTE: Arrival(nonce="a1")},
    )
    app.close()
    assert kinds == ["l"], "the next call may run before the caller of this one has its result"


def test_a_dropped_message_is_reported() -> None:
    clock = ManualClock()
    app = Celery("dropped", broker="memory://", set_as_current=False)
    runtime = Runtime(app, store=MemoryStore(clock), clock=clock)
    Runtime.install(app, runtime)
    recorded = Recorded()
    runtime.events = Events([recorded])

    @singleton_task(app=app, name="work", shared=False, key="{name}", acks_late=True)
    def work(name: str) -> None: ...

    trace = build_tracer("work", app.tasks["work"], app=app)
    for nonce in ("a1", "a2"):
        trace(
            "t",
            ["k"],
            {},
            {"id": "t", "task": "work", "delivery_info": {}, ATTRIBUTE: Arrival(nonce=nonce)},
        )
    app.close()
    [dropped] = [event for event in recorded.all() if event.name is EventName.DROPPED]
    assert (dropped.task_id, dropped.data) == ("t", {"reason": "done"})


def test_a_soft_time_limit_just_before_an_early_release_leaves_no_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The heartbeat would renew it as long as the pool child lives."""
    clock = ManualClock()
    store = MemoryStore(clock)
    app = Celery("early", broker="memory://", set_as_current=False)
    runtime = Runtime(app, store=store, clock=clock)
    Runtime.install(app, runtime)
    releases: list[str] = []
    release = Locker.release

    def struck(self: Locker, lease: Any, request: Any, *publish: Any) -> Any:
        releases.append(lease.key)
        if len(releases) == 1:
            raise SoftTimeLimitExceeded
        return release(self, lease, request)

    monkeypatch.setattr(Locker, "release", struck)

    @singleton_task(app=app, name="linked", shared=False, key="{name}")
    def linked(name: str) -> None: ...

    trace = build_tracer("linked", app.tasks["linked"], app=app)
    message = {"id": "t", "task": "linked", "delivery_info": {}, ATTRIBUTE: Arrival(nonce="a1")}
    state = trace("t", ["k"], {}, {**message, "callbacks": [linked.s()]}).info
    app.close()
    assert isinstance(state.retval, SoftTimeLimitExceeded)
    assert (len(runtime.locker.heartbeat), [*store.operators.scan(EVERY_NAME)]) == (0, [])


class StruckStore(FlatStore):
    """A soft time limit strikes while the first release is on its way, which never arrives."""

    struck = False

    def release(self, request: Release, *, timeout: float = 0) -> ReleaseReply:
        if not self.struck:
            self.struck = True
            raise SoftTimeLimitExceeded
        return super().release(request, timeout=timeout)


@pytest.mark.parametrize("acks_late", [False, True])
def test_a_soft_time_limit_during_an_early_release_leaves_no_lease(acks_late: bool) -> None:
    """Its ttl would free the key, after a minute in which every call is skipped."""
    clock = ManualClock()
    store = StruckStore(clock)
    app = Celery("during", broker="memory://", set_as_current=False)
    runtime = Runtime(app, store=store, clock=clock)
    Runtime.install(app, runtime)

    @singleton_task(app=app, name="linked", shared=False, key="{name}", acks_late=acks_late)
    def linked(name: str) -> None: ...

    trace = build_tracer("linked", app.tasks["linked"], app=app)
    message = {"id": "t", "task": "linked", "delivery_info": {}, ATTRIBUTE: Arrival(nonce="a1")}
    state = trace("t", ["k"], {}, {**message, "callbacks": [linked.s()]}).info
    app.close()
    assert isinstance(state.retval, SoftTimeLimitExceeded)
    assert (len(runtime.locker.heartbeat), [*store.operators.scan(EVERY_NAME)]) == (0, [])


@pytest.mark.parametrize("acks_late", [False, True])
@pytest.mark.parametrize(("hook", "left"), [("on_failure", []), ("on_retry", ["q retrying", "r"])])
def test_a_hook_that_fails_changes_nothing_about_the_end_of_its_call(
    hook: str, left: list[str], acks_late: bool
) -> None:
    """Celery has no state then, as after SystemExit; but no message comes back."""
    clock = ManualClock()
    store = MemoryStore(clock)
    app = Celery("hooks", broker="memory://", set_as_current=False)
    Runtime.install(app, Runtime(app, store=store, clock=clock))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(hook)

    options: dict[str, Any] = {"acks_late": acks_late, "unique": "until_done", hook: fail}

    @singleton_task(app=app, name="hooked", shared=False, bind=True, key="{name}", **options)
    def hooked(self: Any, name: str) -> None:
        if hook == "on_retry":
            raise self.retry(countdown=60)
        raise ArithmeticError

    trace = build_tracer("hooked", app.tasks["hooked"], app=app)
    message = {"id": "t", "task": "hooked", "delivery_info": {}, ATTRIBUTE: Arrival(nonce="a1")}
    with suppress(RuntimeError):
        trace("t", ["k"], {}, message)
    app.close()
    found = [f"{one.kind} {one.phase or ''}".strip() for one in store.operators.scan(EVERY_NAME)]
    assert sorted(found) == left


@pytest.fixture
def grouped(singleton_store: SingletonStore) -> Iterator[Celery]:
    app = Celery("grouped", broker=UNREACHABLE, set_as_current=False)
    app.conf.task_always_eager = True
    singleton_store.install(app)
    yield app
    app.close()


def test_an_eager_call_whose_key_is_held_says_that_it_takes_no_place_in_a_queue(
    grouped: Celery,
) -> None:
    @singleton_task(app=grouped, name="eager", shared=False, on_conflict="queue")
    def work() -> None: ...

    with hold_lock(work):
        refused = work.delay().result
    assert isinstance(refused, LockConflict)
    assert ", and an eager call takes no place in its queue. " in str(refused)


def in_group(body: Callable[[], None]) -> None:
    """Run ``body`` in a task of a group, beside another."""

    async def busy() -> None:
        body()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(busy())
            tasks.create_task(asyncio.sleep(60))

    asyncio.run(main())


def test_an_interruption_that_strikes_within_a_task_group_is_one(grouped: Celery) -> None:
    def loses() -> None:
        lose_lease(app=grouped)
        while True:
            pass

    @singleton_task(app=grouped, name="grouping", shared=False, on_lost="fail")
    def grouping() -> None:
        in_group(loses)

    error = grouping.delay().result
    assert isinstance(error, LeaseLost)
    assert error.reason == "gone"


@contextmanager
def transaction() -> Iterator[None]:
    """A transaction of a database that is as unreachable as the store."""
    try:
        yield
    finally:
        raise ConnectionError("no rollback")


def test_a_body_that_fails_to_clean_up_after_its_interruption_was_interrupted(
    grouped: Celery,
) -> None:
    @singleton_task(app=grouped, name="cleaning", shared=False, on_lost="fail")
    def cleaning() -> None:
        with transaction():
            lose_lease(app=grouped)
            while True:
                pass

    error = cleaning.delay().result
    assert isinstance(error, LeaseLost)
    assert isinstance(error.__context__, ConnectionError)


def test_a_body_that_went_on_after_its_interruption_has_its_own_error(grouped: Celery) -> None:
    @singleton_task(app=grouped, name="heedless", shared=False, on_lost="fail")
    def heedless() -> None:
        with suppress(BaseException):
            lose_lease(app=grouped)
            while True:
                pass
        raise ValueError("its own")

    assert isinstance(heedless.delay().result, ValueError)


def test_a_check_within_a_task_group_ends_the_body_as_any_other(
    grouped: Celery, singleton_store: SingletonStore
) -> None:
    def checks() -> None:
        singleton_store.clock.advance(60)
        current_lease().check()

    @singleton_task(app=grouped, name="checking", shared=False, on_lost="fail")
    def checking() -> None:
        in_group(checks)

    assert isinstance(checking.delay().result, LeaseLost)


def test_what_follows_a_group_of_errors_does_not_meet_the_lease(
    grouped: Celery, singleton_store: SingletonStore
) -> None:
    held: list[int] = []

    @singleton_task(app=grouped, name="failing", shared=False)
    def failing() -> None:
        raise ExceptionGroup("group", [ValueError()])

    @grouped.task(name="follows", shared=False)
    def follows(request: Any, exc: Any, traceback: Any) -> None:
        held.append(len(singleton_store.held()))

    result = failing.apply_async(link_error=follows.s())
    assert isinstance(result.result, ExceptionGroup)
    assert held == [0]


@pytest.mark.parametrize(
    ("errors", "interrupted", "expected"),
    [
        ([LeaseInterrupt()], True, True),
        ([LeaseInterrupt(), ValueError()], True, True),
        ([BaseExceptionGroup("inner", [LeaseInterrupt()])], True, True),
        ([LeaseLost("lost")], False, True),
        ([LeaseInterrupt()], False, False),
        ([LeaseLost("lost"), LeaseInterrupt()], False, False),
        ([LeaseInterrupt(), SystemExit()], True, False),
        ([ValueError()], True, False),
        ([KeyboardInterrupt()], True, False),
    ],
    ids=repr,
)
def test_a_group_reports_a_loss_unless_something_in_it_goes_further(
    errors: list[BaseException], interrupted: bool, expected: bool
) -> None:
    group = BaseExceptionGroup("group", errors)
    assert is_loss(group, interrupted=interrupted) is expected


@pytest.mark.parametrize("answers_in_time", [True, False])
def test_the_place_of_a_call_that_has_lost_its_lease_ends_when_the_store_answers(
    answers_in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SingletonStore()
    name = uuid()
    with Celery("queue", broker="memory://") as app:
        store.install(app)

        @singleton_task(
            app=app, name="work", key=PER_TASK, shared=False, on_conflict="queue", on_lost="fail"
        )
        def work() -> None:
            lose_lease(current_lease())
            current_lease().check()

        ids = [work.apply_async(queue=name).id for _ in range(2)]
        queue: Any = store.store.call_queue
        key, tries, remove = work.lock_key(), list[Any](), queue.remove

        def first_without_reply(request: Any, *, timeout: float) -> Any:
            tries.append(request)
            if len(tries) == 1 and not answers_in_time:
                raise StoreUnavailable("timed out")
            return remove(request, timeout=timeout)

        monkeypatch.setattr(queue, "remove", first_without_reply)
        with app.connection_for_read() as connection:
            message = connection.SimpleQueue(name).get_nowait()
        trace = build_tracer("work", work, app=app)
        trace(
            ids[0], (), {}, {**message.headers, "delivery_info": {}, ATTRIBUTE: Arrival(nonce="n")}
        )
        wait_until(
            lambda: (
                [Token.task_id_of(call.call_id) for call in queue.calls(key, most=9, timeout=1)]
                == ids[1:]
            ),
            "its place is that of the next call",
        )
        assert len(tries) == (1 if answers_in_time else 2)


@pytest.mark.parametrize("how", ["retry", "requeued"])
@pytest.mark.parametrize(("expires", "answers"), [(60, False), (900, True), (None, True)])
def test_a_message_answers_no_call_if_it_expires_before_it_comes_back(
    how: str, expires: int | None, answers: bool
) -> None:
    store, name = SingletonStore(), uuid()
    with Celery("expires", broker="memory://", set_as_current=False) as app:
        store.install(app)

        @singleton_task(
            app=app,
            name="work",
            bind=True,
            shared=False,
            key=PER_TASK,
            unique="until_done",
            on_conflict=OnConflict.retry(delay=600, max_delay=600),
        )
        def work(self: Any) -> None:
            raise self.retry(countdown=300)

        first = work.apply_async(queue=name, expires=expires)
        with app.connection_for_read() as connection:
            message = connection.SimpleQueue(name).get_nowait()
        trace = build_tracer("work", work, app=app)
        with hold_lock(work) if how == "requeued" else nullcontext():
            info = {"exchange": "", "routing_key": name}
            trace(
                first.id,
                (),
                {},
                {**message.headers, "delivery_info": info, ATTRIBUTE: Arrival(nonce="n")},
            )
        again = work.apply_async(queue=name, expires=expires)
        assert (again.id == first.id) is answers


class BackendAway(Exception):
    """The result backend does not answer."""


@pytest.mark.filterwarnings("ignore:Exception raised outside body")
@pytest.mark.parametrize("acks_late", [False, True])
@pytest.mark.parametrize(("fails", "phase"), [(True, None), (False, Phase.RETRYING)])
def test_a_result_backend_that_is_away_leaves_the_claim_to_a_retry_alone(
    monkeypatch: pytest.MonkeyPatch, acks_late: bool, fails: bool, phase: Phase | None
) -> None:
    """Celery acknowledges the message as that of a failed task, so it does not come back."""
    store, name = SingletonStore(), uuid()
    with Celery("away", broker="memory://", backend="cache+memory://", set_as_current=False) as app:
        store.install(app)

        @singleton_task(
            app=app,
            name="work",
            bind=True,
            shared=False,
            key=PER_TASK,
            unique="until_done",
            acks_late=acks_late,
        )
        def work(self: Any) -> None:
            if fails:
                raise ArithmeticError
            raise self.retry(countdown=300)

        def away(*args: Any, **options: Any) -> Any:
            raise BackendAway

        first = work.apply_async(queue=name)
        with app.connection_for_read() as connection:
            message = connection.SimpleQueue(name).get_nowait()
        monkeypatch.setattr(app.backend, "store_result", away)
        trace = build_tracer("work", work, app=app)
        info = {"exchange": "", "routing_key": name}
        with pytest.raises(BackendAway):
            trace(
                first.id,
                (),
                {},
                {**message.headers, "delivery_info": info, ATTRIBUTE: Arrival(nonce="n")},
            )
        runtime = Runtime.of(app)
        claim = runtime.store.leases.inspect(runtime.keyspace.claim("work", work.lock_key()))
        assert (claim and claim.phase) is phase


def lose_and_retry(task: Any) -> None:
    raise task.retry(countdown=300)


def lose_and_retry_with_another_key(task: Any) -> None:
    raise task.retry(args=(2,), countdown=300)


def lose_and_fail(task: Any) -> None:
    current_lease().check()


@pytest.mark.parametrize("acks_late", [False, True])
@pytest.mark.parametrize(
    ("way", "options", "phase"),
    [
        (lose_and_retry, {"on_lost": "continue"}, Phase.RETRYING),
        (lose_and_retry_with_another_key, {"on_lost": "continue"}, None),
        (lose_and_fail, {"on_lost": "fail", "max_retries": 1}, Phase.RETRYING),
        (lose_and_fail, {"on_lost": "fail", "max_retries": 0}, None),
    ],
    ids=["retry", "another key", "autoretry", "no retry left"],
)
def test_the_retry_of_a_body_that_has_lost_its_lease_keeps_the_claim(
    way: Callable[[Any], None], options: dict[str, Any], phase: Phase | None, acks_late: bool
) -> None:
    store, name = SingletonStore(), uuid()
    with Celery("loses", broker="memory://", set_as_current=False) as app:
        store.install(app)

        @singleton_task(
            app=app,
            name="work",
            bind=True,
            shared=False,
            key="{account}",
            unique="until_done",
            acks_late=acks_late,
            autoretry_for=(LeaseLost,),
            retry_kwargs={"countdown": 300},
            **options,
        )
        def work(self: Any, account: int) -> None:
            lose_lease(current_lease(), app=app)
            way(self)

        first = work.apply_async((1,), queue=name)
        with app.connection_for_read() as connection:
            message = connection.SimpleQueue(name).get_nowait()
        trace = build_tracer("work", work, app=app)
        info = {"exchange": "", "routing_key": name}
        trace(
            first.id,
            (1,),
            {},
            {**message.headers, "delivery_info": info, ATTRIBUTE: Arrival(nonce="n")},
        )
        runtime = Runtime.of(app)
        claim = runtime.store.leases.inspect(runtime.keyspace.claim("work", work.lock_key(1)))
        assert (claim and claim.phase) is phase
        assert claim is None or claim.ttl > 300


@pytest.mark.skipif(
    not may_reject_when_done(Task), reason="since Celery 5.7 on_success may reject a message"
)
@pytest.mark.parametrize("hook", ["on_success", "after_return"])
def test_a_message_that_is_rejected_after_its_body_runs_again(hook: str) -> None:
    store, ran = SingletonStore(), list[str]()

    def reject_once(task: Any, *args: Any) -> None:
        if len(ran) == 1:
            raise Reject("again", requeue=True)
        if hook == "after_return":
            SingletonTask.after_return(task, *args)

    class Rejecting(SingletonTask[..., Any]):
        abstract = True

    setattr(Rejecting, hook, reject_once)

    with Celery("rejects", broker="memory://", set_as_current=False) as app:
        store.install(app)

        @app.task(name="work", base=Rejecting, shared=False, acks_late=True)
        def work() -> None:
            ran.append("")

        trace = build_tracer("work", work, app=app)
        message = {"id": "t", "task": "work"}
        with pytest.raises(Reject):
            trace("t", (), {}, {**message, "delivery_info": {}, ATTRIBUTE: Arrival(nonce="a1")})
        again = {"redelivered": True}
        for nonce in ("a2", "a3"):
            trace("t", (), {}, {**message, "delivery_info": again, ATTRIBUTE: Arrival(nonce=nonce)})
    assert len(ran) == 2, "the third delivery is of a message that is done"
