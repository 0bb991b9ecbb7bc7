"""A lease outside of tasks, in memory: which code leaves the block, where, and what is left."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from contextvars import Context, copy_context
from itertools import permutations
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import (
    PER_TASK,
    LeaseLost,
    LockConflict,
    NoLease,
    current_lease,
    hold,
    singleton_task,
)
from celery_singleton_lock.core import native_threads
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.events import Events
from celery_singleton_lock.core.heartbeat import Heartbeat
from celery_singleton_lock.core.lease import Lease
from celery_singleton_lock.core.locker import Locker
from celery_singleton_lock.core.store_requests import Release, ReleaseReply, Renewal
from celery_singleton_lock.core.waiter import Waiter
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.task import ending as ending_module
from celery_singleton_lock.testing import ManualClock, SingletonStore, hold_lock
from celery_singleton_lock.worker.shared_memory import LeaseNote, SharedMemory
from tests.harness.deliveries import wait_until_collected
from tests.harness.flat_store import FlatStore
from tests.unit.pool_child import notes_of_dead
from tests.unit.test_heartbeat import hold as keep

UNREACHABLE = "redis://127.0.0.1:1/0"


def make_app(name: str = "unit-hold") -> Celery:
    return Celery(name, broker=UNREACHABLE, backend=UNREACHABLE, set_as_current=False)


@pytest.fixture
def celery_app() -> Iterator[Celery]:
    app = make_app()
    yield app
    app.close()


@pytest.fixture
def work(celery_app: Celery) -> Any:
    """A task of the same keys, for taking them as another client."""

    @singleton_task(app=celery_app, name="work", key="{name}", scope="s", shared=False)
    def work(name: str) -> None: ...

    return work


def test_a_hold_without_a_scope_names_what_is_missing(celery_app: Celery) -> None:
    scope: Any = None
    with pytest.raises(TypeError, match="give a name"), hold("k", scope=scope, app=celery_app):
        raise AssertionError("it holds something")


# Inside a running event loop.


def test_a_wait_inside_a_running_event_loop_is_refused_at_once(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    async def wait_for_a_free_key() -> None:
        # Also where the key is free: an error that came with a conflict alone would come too late.
        with hold("k", scope="s", wait=1, app=celery_app):
            raise AssertionError("it holds something")

    with pytest.raises(RuntimeError, match=r"async with hold\('k', wait=.*asyncio\.to_thread"):
        asyncio.run(wait_for_a_free_key())
    assert singleton_store.held() == []


def test_both_cures_of_such_a_wait_let_the_holder_finish(celery_app: Celery) -> None:
    Runtime.install(celery_app, Runtime(celery_app, store=MemoryStore(SystemClock())))
    order: list[str] = []

    async def holder(held: asyncio.Event, others: int) -> None:
        with hold("k", scope="s", app=celery_app):
            held.set()
            while len(order) < others:  # needs the loop, as a holder with an await inside does
                await asyncio.sleep(0)
            order.append("holder")

    def wait_in_a_thread() -> None:
        order.append("thread asks")
        with hold("k", scope="s", wait=20, app=celery_app):
            order.append("thread")

    async def try_again() -> None:
        order.append("coroutine asks")
        while True:
            try:
                with hold("k", scope="s", app=celery_app):
                    order.append("coroutine")
                    return
            except LockConflict:
                await asyncio.sleep(0.01)

    async def main() -> None:
        held = asyncio.Event()
        first = asyncio.create_task(holder(held, 2))
        await held.wait()
        await asyncio.gather(first, asyncio.to_thread(wait_in_a_thread), try_again())

    asyncio.run(main())
    assert order.index("holder") == 2
    assert set(order[3:]) == {"thread", "coroutine"}


# Leaving the block.


def enter(context: Context, block: Any) -> Lease:
    lease: Lease = context.run(block.__enter__)
    return lease


def test_a_hold_left_in_another_context_is_released_and_renewed_no_more(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    # As web frameworks do with a generator that is a dependency, and pytest with an async fixture.
    block = hold("k", scope="s", app=celery_app)
    lease = enter(copy_context(), block)
    assert [record.key for record in singleton_store.held()] == [lease.key]
    copy_context().run(block.__exit__, None, None, None)
    assert singleton_store.held() == []
    assert len(Runtime.of(celery_app).locker.heartbeat) == 0
    assert lease.lost


def test_an_error_of_a_block_left_in_another_context_is_the_blocks_own(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    block = hold("k", scope="s", app=celery_app)
    enter(copy_context(), block)
    error = ArithmeticError("the block's own")
    # False: the `with` statement raises the error on.
    assert not copy_context().run(block.__exit__, ArithmeticError, error, None)
    assert singleton_store.held() == []
    assert len(Runtime.of(celery_app).locker.heartbeat) == 0


def suspended(app: Celery, key: str) -> Generator[Lease, None, None]:
    with hold(key, scope="s", app=app) as lease:
        yield lease


def test_generators_that_end_in_any_order_leave_the_leases_of_the_others(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    for order in permutations(("a", "b", "c")):
        generators = {key: suspended(celery_app, key) for key in "abc"}
        leases = {key: next(generator) for key, generator in generators.items()}
        for key in order:
            generators.pop(key).close()
            for other in generators:
                with hold(other, scope="s", app=celery_app) as lease:  # it is re-entered
                    assert lease is leases[other]
            if generators:
                assert current_lease() is leases[max(generators)]
        with pytest.raises(NoLease):
            current_lease()
    assert singleton_store.held() == []


def test_blocks_that_overlap_for_ever_keep_no_released_lease(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    last = suspended(celery_app, "0")
    next(last)
    for number in range(1, 4):
        following = suspended(celery_app, str(number))
        lease = next(following)
        last.close()
        last = following
        assert lease.outer is None
    last.close()


def test_a_block_that_ends_inside_a_task_called_from_it_is_not_held_after_the_task(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    block = suspended(celery_app, "k")

    @singleton_task(app=celery_app, name="ends", key=PER_TASK, shared=False)
    def ends() -> None:
        block.close()

    next(block)
    ends.apply().get()
    with pytest.raises(NoLease):
        current_lease()


# What strikes while the block is left.


class Struck(BaseException):
    """What a signal's handler raises: a soft time limit, SIGTERM."""


def strikes_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """The first call of ``name`` is struck before it does anything."""
    real = getattr(owner, name)
    struck: list[bool] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not struck:
            struck.append(True)
            raise Struck
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


def test_an_exception_at_the_end_of_the_block_leaves_no_lease_with_the_heartbeat(
    celery_app: Celery, singleton_store: SingletonStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    strikes_once(monkeypatch, Locker, "release")
    with pytest.raises(Struck), hold("k", scope="s", app=celery_app):
        pass
    assert singleton_store.held() == []
    assert len(Runtime.of(celery_app).locker.heartbeat) == 0
    with pytest.raises(NoLease):
        current_lease()


def test_what_strikes_between_waiting_and_the_block_gives_the_lease_back(
    celery_app: Celery, singleton_store: SingletonStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    strikes_once(monkeypatch, Waiter, "leave")
    with pytest.raises(Struck), hold("k", scope="s", wait=1, app=celery_app):
        raise AssertionError("the block was not entered")
    assert singleton_store.held() == []
    assert len(Runtime.of(celery_app).locker.heartbeat) == 0, "it would be reported as lost"


def test_an_exception_while_a_task_is_settled_leaves_no_lease_with_the_heartbeat(
    celery_app: Celery,
    singleton_store: SingletonStore,
    work: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strikes_once(monkeypatch, ending_module, "is_done")
    with pytest.raises(Struck):
        work.apply(("k",))
    assert singleton_store.held() == []
    assert len(Runtime.of(celery_app).locker.heartbeat) == 0


# The ttl of the block.


def test_a_block_without_a_ttl_has_that_of_the_apps_settings(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    celery_app.conf.singleton_lock_ttl = 7
    block = {"scope": "s", "app": celery_app}

    @hold("function", **block)
    def function() -> float:
        return current_lease().ttl

    async def coroutine() -> float:
        async with hold("coroutine", **block) as lease:
            return lease.ttl

    with hold("block", **block) as lease, hold("given", ttl=5, **block) as given:
        assert (lease.ttl, function(), asyncio.run(coroutine()), given.ttl) == (7, 7, 7, 5)


# What outlives the block.


def test_a_released_lease_is_lost_and_says_why(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    with hold("k", scope="s", ttl=60, app=celery_app) as lease:
        lease.check()
        assert lease.remaining() > 0
    assert lease.lost
    assert lease.remaining() == 0
    with pytest.raises(LeaseLost, match="was released when its task ended") as raised:
        lease.check()
    assert raised.value.reason == "released"


def test_a_thread_that_outlives_the_block_does_not_re_enter_it(
    celery_app: Celery, singleton_store: SingletonStore, work: Any
) -> None:
    with hold("k", scope="s", app=celery_app):
        inherited = copy_context()

    def try_to_hold() -> None:
        try:
            with hold("k", scope="s", app=celery_app):
                outcomes.append("held beside another")
        except LockConflict:
            outcomes.append("conflict")

    outcomes: list[str] = []
    with hold_lock(work, "k"):
        thread = threading.Thread(target=lambda: inherited.run(try_to_hold))
        thread.start()
        thread.join()
    assert outcomes == ["conflict"]


def test_an_asyncio_task_that_outlives_the_block_does_not_re_enter_it(
    celery_app: Celery, singleton_store: SingletonStore, work: Any
) -> None:
    async def main() -> str:
        released = asyncio.Event()

        async def background() -> str:
            await released.wait()
            try:
                with hold("k", scope="s", app=celery_app):
                    return "held beside another"
            except LockConflict:
                return "conflict"

        with hold("k", scope="s", app=celery_app):
            task = asyncio.create_task(background())
        with hold_lock(work, "k"):
            released.set()
            return await task

    assert asyncio.run(main()) == "conflict"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_does_not_re_enter_what_its_parent_holds(singleton_store: SingletonStore) -> None:
    """No release is reported to it: it would go on for a ttl, though another may hold the key."""
    app = make_app()
    singleton_store.install(app)
    with hold("k", scope="s", app=app):
        pid = os.fork()
        if pid == 0:
            refused = 1
            try:
                singleton_store.install(app)  # of this process; the key is held there, too
                with hold("k", scope="s", app=app):
                    pass
            except LockConflict:
                refused = 0
            finally:
                os._exit(refused)
        assert os.waitpid(pid, 0)[1] == 0
    app.close()


def test_what_outlives_the_block_takes_a_lease_of_its_own_where_the_key_is_free(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    with hold("k", scope="s", app=celery_app) as first:
        inherited = copy_context()

    def again() -> None:
        with hold("k", scope="s", app=celery_app) as second:
            assert second is not first
            second.check()

    inherited.run(again)
    assert singleton_store.held() == []


# Limits that a process doesn't know of.


@pytest.fixture
def trio(celery_app: Celery) -> Any:
    @singleton_task(app=celery_app, name="trio", key="{name}", scope="s", limit=3, shared=False)
    def trio(name: str) -> None: ...

    return trio


@pytest.fixture
def script(singleton_store: SingletonStore) -> Iterator[Celery]:
    """An app on the same store that has no tasks."""
    app = make_app("unit-script")
    singleton_store.install(app)
    yield app
    app.close()


def test_a_hold_that_knows_no_limit_meets_a_holder_of_one(trio: Any, script: Celery) -> None:
    with hold_lock(trio, "k"), pytest.raises(LockConflict), hold("k", scope="s", app=script):
        raise AssertionError("it ran beside all of them")


def test_a_hold_that_knows_no_limit_takes_a_slot_of_it(trio: Any, script: Celery) -> None:
    with (
        hold("k", scope="s", app=script),
        hold_lock(trio, "k"),
        hold_lock(trio, "k"),
        pytest.raises(LockConflict),
        hold_lock(trio, "k"),
    ):
        raise AssertionError("a fourth beside the hold and two others")


# A task that no worker would start with.


def test_a_task_that_contradicts_the_settings_stops_no_hold_and_its_limit_counts(
    celery_app: Celery, singleton_store: SingletonStore, trio: Any
) -> None:
    celery_app.conf.singleton_lock_unique = "until_start"

    @singleton_task(
        app=celery_app, name="bad", key="{name}", limit=2, on_conflict="skip", shared=False
    )
    def bad(name: str) -> None: ...

    with pytest.raises(ValueError, match="would be dropped"):
        bad.singleton_policy()
    for scope, limit in (("elsewhere", 1), ("s", 3), ("bad", 2)):
        with ExitStack() as stack:
            for _ in range(limit):  # each in a context of its own, or the second would re-enter
                Context().run(stack.enter_context, hold("k", scope=scope, app=celery_app))
            assert len(singleton_store.held()) == limit
            with pytest.raises(LockConflict), hold("k", scope=scope, app=celery_app):
                raise AssertionError(f"{limit} have it already")


# What the worker parent reads, and when apps and leases end.


class DeafStore(FlatStore):
    """Loses releases while it is ``deaf``."""

    deaf = False

    def release(self, request: Release, *, timeout: float = 0) -> ReleaseReply:
        if self.deaf:
            raise StoreUnavailable("connection refused")
        return super().release(request)


def read_of_a_child(record: SharedMemory, life: Callable[[], None]) -> list[LeaseNote]:
    """What the parent reads of a pool child that lived so and was killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            from billiard.process import current_process

            current_process().index = 0
            life()
            os.write(writing, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"x", "the child failed"
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return notes_of_dead(record, pid)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_is_held_now_is_read_by_the_parent_also_after_many_failed_releases(
    celery_app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = SharedMemory()
    monkeypatch.setattr(Runtime, "lease_notes", record)
    store = DeafStore(ManualClock())
    last = hold("now", scope="s", app=celery_app)

    def life() -> None:
        # Another clock: the thread that repeats the releases would move the manual one.
        runtime = Runtime(celery_app, store=store, clock=SystemClock())
        Runtime.install(celery_app, runtime)
        store.deaf = True
        for number in range(20):
            with hold(f"project.tasks.sync:account:{number}", scope="s", app=celery_app):
                pass
        store.deaf = False
        last.__enter__()

    keys = [key for held in read_of_a_child(record, life) for key in held.keys]
    assert Runtime.of(celery_app).keyspace.lock("s", "now") in keys


def test_an_app_that_is_referenced_no_more_is_collected() -> None:
    app: Any = make_app("unit-gone")
    Runtime.of(app)
    store = SingletonStore()
    store.install(app)
    with hold("k", scope="s", app=app):
        pass
    store.uninstall()
    Runtime.of(app, eager=True)
    gone = weakref.ref(app)
    app.close()
    del app
    wait_until_collected(lambda: gone() is None, "it is collected")


def test_an_app_that_held_a_lease_and_was_not_closed_is_collected() -> None:
    app: Any = make_app("unit-left")
    app.conf.task_always_eager = True
    others = set(threading.enumerate())
    with hold("k", scope="s", app=app):
        begun = set(threading.enumerate()) - others
        [heartbeat] = (thread for thread in begun if thread.name == "singleton-heartbeat")
    gone = weakref.ref(app)
    del app
    wait_until_collected(lambda: gone() is None, "it is collected")
    heartbeat.join(10)
    assert not heartbeat.is_alive()


class SilentStore(FlatStore):
    """Answers no renewal: each takes all the time it is given."""

    clock: ManualClock

    def renew_leases(self, leases: Any, *, timeout: float = 0) -> list[Renewal]:
        self.clock.advance(timeout)
        raise StoreUnavailable("timed out")


@pytest.mark.parametrize("ttls", [(1,), (60,), (60, 1), (60, 1.3, 6), (600, 60, 6)], ids=str)
def test_a_loss_against_an_unresponsive_store_is_reported_before_the_store_gives_the_key_away(
    ttls: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_threads, "start_new_thread", lambda function, name: None)
    clock = ManualClock()
    store = SilentStore(clock)
    store.clock = clock
    heartbeat = Heartbeat(store, clock, Events([]))
    late: dict[float, float] = {}

    def on_lost(lease: Lease) -> None:
        late[lease.ttl] = clock.now() - (lease.acquired_at + lease.ttl)

    for ttl in ttls:
        keep(store, clock, heartbeat, f"k{ttl}", ttl, None, on_lost)
    while (pause := heartbeat.sweep()) is not None:
        clock.advance(max(pause, 1e-6))
    assert set(late) == set(ttls)
    assert max(late.values()) < 0, late
