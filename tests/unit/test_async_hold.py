"""``async with hold()`` in memory: the end of the block, of the lease, of the task, of the loop."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import (
    LeaseLost,
    LockConflict,
    NoLease,
    aclaim_and_send,
    current_lease,
    hold,
    runtime,
    singleton_task,
)
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.executor import Executor
from celery_singleton_lock.core.lease import Lease, LossReason
from celery_singleton_lock.core.store_requests import Acquire, Granted, Refused, Release
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.testing import SingletonStore, lose_lease
from tests.harness.deliveries import wait_until, wait_until_collected
from tests.harness.flat_store import FlatStore
from tests.harness.keys import EVERY_NAME

UNREACHABLE = "redis://127.0.0.1:1/0"
_REASON = (LossReason.GONE, "for the test")


class GatedStore(FlatStore):
    """Carries out each acquire and release when its gate is open."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.acquires, self.releases = threading.Event(), threading.Event()
        self.acquires.set()
        self.releases.set()
        self.asked, self.answered = threading.Event(), threading.Event()
        self.released_on: list[int] = []  # threads

    def acquire(self, request: Acquire, /, *, timeout: float = 0) -> Granted | Refused:
        self.asked.set()
        assert self.acquires.wait(20)
        reply = super().acquire(request, timeout=timeout)
        self.answered.set()
        return reply

    def release(self, request: Release, /, *, timeout: float = 0) -> Any:
        self.released_on.append(threading.get_ident())
        assert self.releases.wait(20)
        return super().release(request, timeout=timeout)

    def held(self) -> list[str]:
        return [record.key for record in self.operators.scan(EVERY_NAME)]


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("unit-async", broker=UNREACHABLE, backend=UNREACHABLE, set_as_current=False)
    yield app
    app.close()


@pytest.fixture
def store(app: Celery) -> Iterator[GatedStore]:
    store = GatedStore()
    Runtime.install(app, Runtime(app, store=store))
    yield store
    store.acquires.set()
    store.releases.set()
    Runtime.of(app).close()


def lose(lease: Lease, app: Celery) -> Awaitable[Lease]:
    """The store loses ``lease``, and the heartbeat, which is on another thread, observes it."""
    return asyncio.to_thread(lose_lease, lease, app=app)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


# Both protocols.


def test_the_lease_is_the_current_one_inside_the_block_and_nowhere_else(
    app: Celery, store: GatedStore
) -> None:
    async def main() -> None:
        sibling = asyncio.create_task(asyncio.sleep(0, "not inside"))
        async with hold("k", scope="s", app=app) as lease:
            assert current_lease() is lease
            assert store.held() == [lease.key]
            async with hold("other", scope="s", app=app) as inner:
                assert current_lease() is inner
            assert current_lease() is lease
            assert await sibling == "not inside"
        with pytest.raises(NoLease):
            current_lease()
        assert lease.lost
        assert store.held() == []

    run(main())


def test_the_same_key_is_re_entered_and_released_by_the_outer_block(
    app: Celery, store: GatedStore
) -> None:
    async def main() -> None:
        async with hold("k", scope="s", app=app) as lease:
            async with hold("k", scope="s", app=app) as again:
                assert again is lease
            with hold("k", scope="s", app=app) as again:
                assert again is lease
            assert store.held() == [lease.key]
        assert store.held() == []
        with hold("k", scope="s", app=app) as lease:
            async with hold("k", scope="s", app=app) as again:
                assert again is lease

    run(main())


def test_two_tasks_exclude_each_other_and_the_second_gets_the_key_after_the_first(
    app: Celery, store: GatedStore
) -> None:
    order: list[str] = []

    async def second() -> None:
        with pytest.raises(LockConflict):
            async with hold("k", scope="s", app=app):
                order.append("beside the first")
        with pytest.raises(LockConflict, match=r"waited 0\.2 s"):
            async with hold("k", scope="s", wait=0.2, app=app):
                order.append("beside the first")
        order.append("asks")
        async with hold("k", scope="s", wait=20, app=app):
            order.append("second")

    async def main() -> None:
        started = asyncio.Event()

        async def first() -> None:
            async with hold("k", scope="s", app=app):
                started.set()
                await until(lambda: "asks" in order)
                order.append("first")

        holder = asyncio.create_task(first())
        await started.wait()
        await asyncio.gather(holder, second())

    run(main())
    assert order == ["asks", "first", "second"]


def test_an_error_of_the_body_is_its_own_and_the_key_is_free(
    app: Celery, store: GatedStore
) -> None:
    async def main() -> None:
        with pytest.raises(ArithmeticError):
            async with hold("k", scope="s", app=app):
                raise ArithmeticError
        assert store.held() == []

    run(main())


def test_a_wait_on_a_manual_clock_ends(app: Celery, singleton_store: SingletonStore) -> None:
    async def main() -> None:
        async with hold("k", scope="s", app=app):
            task = asyncio.get_running_loop().create_task(waiting(), context=None)
            await task

    async def waiting() -> None:
        from celery_singleton_lock.task.context import held_lease

        held_lease.set(None)  # as another request
        with pytest.raises(LockConflict):
            async with hold("k", scope="s", wait=30, app=app):
                raise AssertionError("it ran beside the holder")

    singleton_store.install(app)
    run(main())


def test_an_object_is_good_for_one_block(app: Celery, store: GatedStore) -> None:
    async def again(block: hold) -> None:
        async with block:
            raise AssertionError("entered twice")

    async def main() -> None:
        block = hold("k", scope="s", app=app)
        async with block as lease:
            with pytest.raises(RuntimeError, match="good for one block"):
                await asyncio.create_task(again(block))
            await asyncio.sleep(0.05)  # the refused block has nothing to release
            lease.check()
        with pytest.raises(RuntimeError, match="good for one block"):
            async with block:
                raise AssertionError("entered twice")

    run(main())
    block = hold("k", scope="s", app=app)
    with block, pytest.raises(RuntimeError, match="good for one block"), block:
        raise AssertionError("entered twice")
    assert store.held() == []


def test_a_block_that_is_abandoned_is_released_and_the_collector_waits_for_no_store(
    app: Celery, store: GatedStore
) -> None:
    """The garbage collector may run on the heartbeat's thread."""
    block = hold("k", scope="s", app=app)
    lease = block.__enter__()
    store.releases.clear()
    del block
    wait_until_collected(lambda: lease.lost, "the lease is renewed no more")
    assert store.held()
    store.releases.set()
    wait_until(lambda: not store.held(), "the lease is released")
    assert threading.get_ident() not in store.released_on


def test_a_coroutine_whose_stack_is_never_closed_leaves_no_lease(
    app: Celery, store: GatedStore
) -> None:
    async def main() -> None:
        await AsyncExitStack().enter_async_context(hold("k", scope="s", app=app))
        wait_until_collected(lambda: not store.held(), "the lease is released")

    run(main())
    assert len(Runtime.of(app).locker.heartbeat) == 0


def test_a_task_that_its_loop_never_resumes_leaves_no_lease(app: Celery, store: GatedStore) -> None:
    async def block() -> None:
        async with hold("k", scope="s", app=app):
            await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(block())]
    while not store.held():
        loop.run_until_complete(asyncio.sleep(0.005))
    loop.run_until_complete(asyncio.sleep(0.05))
    loop.close()
    tasks.clear()
    deadline = SystemClock().now() + 20
    while store.held() and SystemClock().now() < deadline:
        gc.collect()
        SystemClock().sleep(0.005)  # the release runs on a thread
    assert store.held() == []


@pytest.mark.parametrize("kind", ["generator", "async generator", "hidden coroutine"])
def test_a_function_whose_body_would_run_after_the_release_is_refused(
    kind: str, app: Celery, store: GatedStore
) -> None:
    def generator() -> Iterator[list[str]]:
        yield store.held()

    async def async_generator() -> AsyncIterator[list[str]]:
        yield store.held()

    async def coroutine() -> list[str]:
        return store.held()

    functions: dict[str, Callable[[], Any]] = {
        "generator": generator,
        "async generator": async_generator,
        "hidden coroutine": lambda: hidden,
    }
    hidden = coroutine()
    call = hold("k", scope="s", app=app)(functions[kind])
    with pytest.raises(TypeError, match=r"@hold\('k'\) covers a call, .* after the release"):
        call()
    assert store.held() == []
    hidden.close()


def test_a_decorated_function_holds_the_key_during_each_call(
    app: Celery, store: GatedStore
) -> None:
    @hold("k", scope="s", app=app)
    def work(depth: int) -> str:
        """What it is."""
        assert store.held() == [current_lease().key]
        return "done" if not depth else work(depth - 1)

    @hold("k", scope="s", wait=20, app=app)
    async def work_async(name: str) -> str:
        async with asyncio.timeout(20):
            assert store.held() == [current_lease().key]
            running.append(name)
            await asyncio.sleep(0)
            assert running == [name]
            running.remove(name)
            return name

    async def main() -> list[str]:
        return await asyncio.gather(*(work_async(name) for name in "abc"))

    running: list[str] = []
    assert work.__doc__ == "What it is."
    assert [work(2), work(0)] == ["done", "done"]
    assert run(main()) == ["a", "b", "c"]
    assert store.held() == []


# Without asyncio.


def test_without_a_task_of_asyncio_the_error_says_so(app: Celery, store: GatedStore) -> None:
    async def block() -> None:
        async with hold("k", scope="s", app=app):
            raise AssertionError("it holds something")

    for awaited in (block(), aclaim_and_send(app, "t", singleton={"unique": "until_done"})):
        with pytest.raises(RuntimeError, match=r"needs a running task of asyncio.*trio"):
            awaited.send(None)
    assert store.held() == []


# A lost lease.


def test_a_loss_cancels_the_body_and_surfaces_as_lease_lost(app: Celery, store: GatedStore) -> None:
    ended: list[str] = []

    async def block() -> None:
        async with hold("k", scope="s", app=app) as lease:
            try:
                await lose(lease, app)
                await asyncio.sleep(20)
            except asyncio.CancelledError:
                ended.append("cancelled")
                assert lease.lost
                raise

    async def main() -> None:
        with pytest.raises(LeaseLost, match="gone") as raised:
            await block()
        assert isinstance(raised.value.__cause__, asyncio.CancelledError)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0.01)  # nothing is left of the cancellation
        with pytest.raises(NoLease):
            current_lease()

    run(main())
    assert ended == ["cancelled"]


def test_a_loss_surfaces_although_the_body_never_awaits(app: Celery, store: GatedStore) -> None:
    async def block() -> None:
        async with hold("k", scope="s", app=app) as lease:
            thread = threading.Thread(target=lose_lease, args=(lease,), kwargs={"app": app})
            thread.start()
            thread.join()

    async def main() -> None:
        with pytest.raises(LeaseLost, match="gone"):
            await block()
        await asyncio.sleep(0.01)

    run(main())


def test_a_loss_surfaces_although_the_body_swallows_a_cancellation_by_others_too(
    app: Celery, store: GatedStore
) -> None:
    async def main() -> None:
        async with hold("k", scope="s", app=app) as lease:
            with suppress(asyncio.CancelledError):
                await lose(lease, app)
                await asyncio.sleep(20)
            asyncio.current_task().cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(20)

    with pytest.raises(LeaseLost, match="gone"):
        run(main())


def test_a_task_that_outlives_the_block_loses_the_lease_that_it_re_entered(
    app: Celery, store: GatedStore
) -> None:
    async def guest() -> None:
        async with hold("k", scope="s", app=app):
            entered.set()
            await asyncio.sleep(20)

    async def host() -> asyncio.Task[None]:
        async with hold("k", scope="s", app=app):
            task = asyncio.create_task(guest())
            await entered.wait()
        return task

    async def main() -> None:
        with pytest.raises(LeaseLost, match="outlived"):
            await (await host())
        await asyncio.sleep(0.01)

    entered = asyncio.Event()
    run(main())


def test_a_loss_interrupts_the_tasks_that_re_entered_the_lease(
    app: Celery, store: GatedStore
) -> None:
    async def guest(began: asyncio.Event) -> None:
        async with hold("k", scope="s", app=app):
            began.set()
            await asyncio.sleep(20)

    async def main() -> list[object]:
        events = [asyncio.Event(), asyncio.Event()]
        tasks: list[asyncio.Task[None]] = []
        with suppress(LeaseLost):
            async with hold("k", scope="s", app=app) as lease:
                tasks += [asyncio.create_task(guest(event)) for event in events]
                for event in events:
                    await event.wait()
                await lose(lease, app)
                await asyncio.sleep(20)
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(outcome) for outcome in run(main())] == [LeaseLost, LeaseLost]


def test_a_loss_before_the_first_instruction_of_the_body_keeps_it_from_running(
    app: Celery, store: GatedStore
) -> None:
    async def main() -> None:
        async def block() -> None:
            async with hold("k", scope="s", app=app):
                ran.append("the body")

        ran: list[str] = []
        store.acquires.clear()
        task = asyncio.create_task(block())
        await until(store.asked.is_set)
        store.acquires.set()
        # The loop does not run until the lease was granted and lost.
        while not (leases := Runtime.of(app).locker.heartbeat._snapshot()):
            SystemClock().sleep(0.001)
        lose_lease(leases[0], app=app)
        with pytest.raises(LeaseLost):
            await task
        assert ran == []
        with pytest.raises(NoLease):
            current_lease()

    run(main())


def test_a_loss_after_the_body_cancels_nothing(app: Celery, store: GatedStore) -> None:
    async def main() -> str:
        async def block() -> str:
            async with hold("k", scope="s", app=app) as lease:
                leases.append(lease)
                store.releases.clear()
            await asyncio.sleep(0.01)
            return "not cancelled"

        leases: list[Lease] = []
        task = asyncio.create_task(block())
        await until(lambda: not store.releases.is_set())
        Runtime.of(app).locker.heartbeat._lose(leases[0], *_REASON)
        await asyncio.sleep(0.01)
        store.releases.set()
        return await task

    assert run(main()) == "not cancelled"


def test_an_error_of_the_cleanup_is_the_cause_of_the_loss(app: Celery, store: GatedStore) -> None:
    async def block() -> None:
        async with hold("k", scope="s", app=app) as lease:
            try:
                await lose(lease, app)
                await asyncio.sleep(20)
            finally:
                raise ArithmeticError

    async def main() -> None:
        with pytest.raises(LeaseLost) as raised:
            await block()
        assert isinstance(raised.value.__cause__, ArithmeticError)

    run(main())


def test_a_loss_ends_the_tasks_of_a_task_group_in_the_body(app: Celery, store: GatedStore) -> None:
    ended: list[str] = []

    async def child() -> None:
        try:
            await asyncio.sleep(20)
        finally:
            ended.append("child")

    async def block() -> None:
        async with hold("k", scope="s", app=app) as lease, asyncio.TaskGroup() as group:
            group.create_task(child())
            group.create_task(child())
            await lose(lease, app)

    async def main() -> None:
        with pytest.raises(LeaseLost):
            await block()
        await asyncio.sleep(0.01)

    run(main())
    assert ended == ["child", "child"]


def test_of_two_nested_blocks_the_outermost_that_lost_its_lease_raises(
    app: Celery, store: GatedStore
) -> None:
    async def block(*lost: int) -> None:
        async with hold("outer", scope="s", app=app) as outer:
            try:
                async with hold("inner", scope="s", app=app) as inner:
                    for number in lost:
                        lose_lease((outer, inner)[number], app=app)
                    await asyncio.sleep(20)
            finally:
                outcomes.append(outer.lost)

    async def main() -> None:
        with pytest.raises(LeaseLost, match="outer"):
            await block(1, 0)
        await asyncio.sleep(0.01)
        with pytest.raises(LeaseLost, match="outer"):
            await block(0)
        await asyncio.sleep(0.01)
        with pytest.raises(LeaseLost, match="inner"):
            await block(1)
        assert store.held() == []

    outcomes: list[bool] = []
    run(main())
    assert outcomes == [True, True, False]


# A cancellation by others.


@pytest.mark.parametrize("loses", [False, True])
def test_a_cancellation_by_others_stays_one_and_releases(
    loses: bool, app: Celery, store: GatedStore
) -> None:
    async def main() -> None:
        started = asyncio.Event()
        leases: list[Lease] = []

        async def block() -> None:
            async with hold("k", scope="s", app=app) as lease:
                leases.append(lease)
                started.set()
                await asyncio.sleep(20)

        task = asyncio.create_task(block())
        await started.wait()
        if loses:
            lose_lease(leases[0], app=app)  # the callback is called in the next round of the loop
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert store.held() == []

    run(main())


def test_a_timeout_around_the_block_is_a_timeout_and_releases(
    app: Celery, store: GatedStore
) -> None:
    async def block() -> None:
        async with asyncio.timeout(None) as timeout, hold("k", scope="s", app=app):
            # From here on: a timeout that ends the acquire releases on another thread.
            timeout.reschedule(asyncio.get_running_loop().time() + 0.05)
            await asyncio.sleep(20)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await block()
        assert store.held() == []

    run(main())


def test_a_cancelled_acquire_ends_at_once_and_what_was_granted_is_released(
    app: Celery, store: GatedStore
) -> None:
    async def main() -> None:
        async def block() -> None:
            try:
                async with hold("k", scope="s", app=app):
                    raise AssertionError("the body ran")
            except asyncio.CancelledError as exc:
                kept.append(exc)  # with all objects of the acquire
                raise

        kept: list[BaseException] = []
        store.acquires.clear()
        task = asyncio.create_task(block())
        await until(store.asked.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task  # although the store has not answered
        store.acquires.set()
        await until(store.answered.is_set)  # until then, nothing is held either
        await until(lambda: len(Runtime.of(app).locker.heartbeat) == 0 and not store.held())

    run(main())
    assert Runtime.of(app).commands._executor._work_queue.empty()


def test_a_cancelled_release_is_carried_out(app: Celery, store: GatedStore) -> None:
    async def main() -> None:
        async def block() -> None:
            async with hold("k", scope="s", app=app):
                store.releases.clear()

        task = asyncio.create_task(block())
        await until(lambda: not store.releases.is_set())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert store.held()
        store.releases.set()
        await until(lambda: not store.held())

    run(main())


def test_a_release_that_has_to_wait_for_a_thread_is_carried_out_though_it_is_cancelled(
    app: Celery, store: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async def block() -> None:
            async with hold("k", scope="s", app=app):
                Runtime.of(app).commands.submit(busy.wait, 20)

        busy = threading.Event()
        task = asyncio.create_task(block())
        await until(lambda: bool(store.held()))
        await asyncio.sleep(0.05)  # the release is behind the busy thread
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert store.held()
        busy.set()
        await until(lambda: not store.held())

    monkeypatch.setattr(runtime, "_MOST_COMMANDS", 1)
    run(main())


def test_a_coroutine_that_is_closed_releases_without_awaiting(
    app: Celery, store: GatedStore
) -> None:
    async def block(inside: list[str], wait: asyncio.Event) -> None:
        async with hold("k", scope="s", app=app):
            inside.append("inside")
            await wait.wait()

    async def main() -> None:
        inside: list[str] = []
        coroutine = block(inside, asyncio.Event())
        task = asyncio.create_task(coroutine)
        await until(lambda: bool(inside))
        coroutine.close()
        await until(lambda: not store.held())
        task.cancel()

    run(main())


def test_no_coroutine_blocks_where_no_thread_can_be_started(
    app: Celery, store: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the exit of the interpreter the release is carried out on the calling thread."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    async def main() -> None:
        async with hold("k", scope="s", app=app):
            monkeypatch.setattr(Executor, "submit", refuse)
        assert store.held() == []

    run(main())


def test_a_loop_that_was_closed_inside_the_block_leaves_no_error_of_the_heartbeat(
    app: Celery, store: GatedStore, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.new_event_loop()
    leases: list[Lease] = []

    async def block() -> None:
        async with hold("k", scope="s", app=app) as lease:
            leases.append(lease)
            await asyncio.Event().wait()

    task = loop.create_task(block())
    while not leases:
        loop.run_until_complete(asyncio.sleep(0.005))
    loop.close()
    lose_lease(leases[0], app=app)
    assert [record for record in caplog.records if record.exc_info] == []
    task.get_coro().close()
    # Its loop was closed on purpose. Else asyncio logs an error when it is collected, during
    # another test.
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    del task
    gc.collect()


def test_a_forked_child_leaves_the_block_at_once_and_releases_nothing(
    app: Celery, store: GatedStore
) -> None:
    async def block() -> int:
        async with hold("k", scope="s", app=app) as lease:
            child = os.fork()
            if child:
                while os.waitpid(child, os.WNOHANG)[0] == 0:
                    await asyncio.sleep(0.005)
                lease.check()
        if not child:
            os._exit(0)
        return child

    assert run(block())
    assert store.held() == []


# Tasks.


def test_a_task_that_runs_a_loop_re_enters_its_own_lease(
    app: Celery, singleton_store: SingletonStore
) -> None:
    @singleton_task(app=app, name="work", key="{name}", scope="s", shared=False)
    def work(name: str) -> bool:
        async def body() -> bool:
            async with hold(name, scope="s", app=app) as lease:
                return lease is current_lease()

        return asyncio.run(body()) and not current_lease().lost

    singleton_store.install(app)
    assert work.apply(("k",)).get()
    assert singleton_store.held() == []


async def suspended(app: Celery, key: str) -> AsyncIterator[Lease]:
    async with hold(key, scope="s", app=app) as lease:
        yield lease


def test_generators_that_end_in_any_order_leave_the_leases_of_the_others(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    async def main() -> None:
        first, second = suspended(celery_app, "first"), suspended(celery_app, "second")
        await anext(first)
        held = await anext(second)
        assert await anext(first, None) is None
        async with hold("second", scope="s", app=celery_app) as lease:
            assert lease is held is current_lease()
        assert await anext(second, None) is None
        with pytest.raises(NoLease):
            current_lease()

    asyncio.run(main())
    assert singleton_store.held() == []


def test_a_block_that_outlives_the_one_whose_lease_it_has_says_so(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    async def main() -> None:
        first, second = suspended(celery_app, "k"), suspended(celery_app, "k")
        assert await anext(first) is await anext(second)
        assert await anext(first, None) is None
        with pytest.raises(LeaseLost, match="was released when its task ended"):
            await anext(second)

    asyncio.run(main())
