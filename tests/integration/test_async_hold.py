"""Coroutines that hold keys of real stores: exclusion, waits and ends, and their event loop."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import Context
from types import ModuleType
from typing import Any, Final
from uuid import uuid4

import pytest
import redis
from celery import Celery

from celery_singleton_lock import (
    DuplicateTask,
    LeaseLost,
    StoreUnavailable,
    aclaim_and_send,
    hold,
    runtime,
    singleton_task,
)
from celery_singleton_lock.core import waiter
from celery_singleton_lock.runtime import Runtime
from example_project.private_server import PrivateServer
from tests.harness.keys import EVERY_NAME
from tests.harness.processes import ROOT
from tests.harness.redlock_nodes import RedlockNodes
from tests.harness.worker import CeleryWorker
from tests.integration.stage import PATIENCE, wait_until

SCOPE: Final = "coroutines"
# Seconds. A request that gets no reply is sent twice and takes a third of this, and all that time
# the loop runs.
TTL: Final = 6
# Rounds of a coroutine that sleeps for 10 ms, while a request to a stopped server takes 2 s: on a
# machine of which a tenth is left, 20. A loop that waits for the request itself has one or two.
BEATS: Final = 15


@contextmanager
def new_app(url: str) -> Iterator[Celery]:
    server = url if url.startswith("redis://") else None
    app = Celery(f"coroutines-{uuid4().hex[:8]}", broker=server, backend=server)
    app.conf.singleton_lock_url = url
    yield app
    Runtime.of(app).close()
    app.close()


@pytest.fixture
def app(private_redis: PrivateServer) -> Iterator[Celery]:
    """An app of a server that this test may stop."""
    with new_app(private_redis.url()) as app:
        yield app


@pytest.fixture
def raw(private_redis: PrivateServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(private_redis.url(), decode_responses=True) as client:
        yield client


def left(raw: redis.Redis) -> list[str]:
    """The keys of locks, wait queues and handoffs; what belongs to a shard stays."""
    return sorted(key for key in raw.scan_iter(EVERY_NAME) if SCOPE in key)


def blocked(raw: redis.Redis) -> int:
    return int(raw.info("clients")["blocked_clients"])


async def until(condition: Callable[[], Any], what: str) -> None:
    """Ask on a thread, for a question to a server blocks the loop that a test looks at."""
    async with asyncio.timeout(PATIENCE):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.01)


def run(body: Awaitable[Any]) -> Any:
    async def main() -> Any:
        async with asyncio.timeout(2 * PATIENCE):
            return await body

    return asyncio.run(main())


@asynccontextmanager
async def waiting(block: Callable[[], Any], number: int = 1) -> AsyncIterator[list[Any]]:
    """That many tasks of ``block``, which are cancelled at the end.

    As those of other requests they inherit no lease, which they would re-enter.
    """
    tasks = [asyncio.create_task(block(), context=Context()) for _ in range(number)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# Exclusion.


class Inside:
    """Which blocks are entered, in any loop of this process."""

    def __init__(self) -> None:
        self.inside: list[object] = []
        self.most = 0
        self.fences: list[int | None] = []

    async def take(self, block: Any) -> None:
        async with block as lease:
            self.inside.append(block)
            self.most = max(self.most, len(self.inside))
            self.fences.append(lease.fence_number)
            await asyncio.sleep(0.001)
            self.inside.remove(block)


@pytest.fixture(
    params=["redis", "sentinel", "cluster", "redlock", "etcd", "zookeeper"], scope="module"
)
def any_url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "redlock":
        request.getfixturevalue("redis_server")  # where there is none, no test
        with RedlockNodes(3) as nodes:
            yield nodes.url()
        return
    name = {"redis": "redis_server", "sentinel": "sentinels"}.get(request.param, request.param)
    url = request.getfixturevalue(name).url
    yield url() if callable(url) else url


def test_coroutines_of_two_loops_hold_a_key_one_after_the_other(any_url: str) -> None:
    name, inside = uuid4().hex, Inside()
    number = 25 if any_url.startswith("redis") else 6

    def one_loop() -> None:
        with new_app(any_url) as app:

            async def main() -> None:
                # The time limit of a request follows from the ttl. A ZooKeeper that has just
                # started next to other tests may need more than that of a short one.
                options = {"scope": SCOPE, "ttl": 60, "wait": PATIENCE, "app": app}
                await asyncio.gather(*(inside.take(hold(name, **options)) for _ in range(number)))

            run(main())

    with ThreadPoolExecutor(2) as loops:
        for done in [loops.submit(one_loop) for _ in range(2)]:
            done.result(4 * PATIENCE)
    assert inside.most == 1
    assert len(inside.fences) == 2 * number
    if None not in inside.fences:
        assert inside.fences == sorted(inside.fences)  # type: ignore[type-var]


# Waiting.


def test_200_waiting_coroutines_occupy_no_thread_and_delay_no_other_block(
    app: Celery, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is one thread: the first client that waited in it would keep the others from joining the
    # queue. And none of them looks by itself: each that gets the key was woken.
    monkeypatch.setattr(runtime, "_MOST_COMMANDS", 1)
    monkeypatch.setattr(waiter, "_LONGEST_POLL", 20 * PATIENCE)
    monkeypatch.setattr(waiter, "_COUNTED", 60 * PATIENCE)

    async def wait_for_it() -> None:
        async with hold("k", scope=SCOPE, wait=PATIENCE, app=app) as lease:
            fences.append(lease.fence)

    async def main() -> None:
        async with AsyncExitStack() as first:
            lease = await first.enter_async_context(hold("k", scope=SCOPE, app=app))
            fences.append(lease.fence)
            async with waiting(wait_for_it, 200) as tasks:
                await until(lambda: blocked(raw) == 200, "all of them wait")
                async with hold("other", scope=SCOPE, app=app):
                    assert fences == [lease.fence]
                await first.aclose()
                await asyncio.gather(*tasks)

    fences: list[int] = []
    run(main())
    assert len(fences) == 201
    assert fences == sorted(fences)
    assert left(raw) == []


def test_a_cancelled_wait_leaves_nothing_behind(app: Celery, raw: redis.Redis) -> None:
    async def wait_for_it() -> None:
        try:
            async with hold("k", scope=SCOPE, wait=PATIENCE, app=app):
                raise AssertionError("two at once")
        except asyncio.CancelledError as exc:
            kept.append(exc)  # with all objects of the wait
            raise

    kept: list[BaseException] = []

    async def main() -> None:
        async with hold("k", scope=SCOPE, app=app) as lease, waiting(wait_for_it) as [task]:
            await until(lambda: blocked(raw) == 1, "it waits")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: left(raw) == [lease.key], "it has left the queue")
            await until(lambda: blocked(raw) == 0, "its connection is closed")
        assert left(raw) == []  # nothing is kept for a client that is not there

    run(main())


@pytest.mark.parametrize("seed", range(3))
def test_cancellations_at_any_moment_leave_nothing_behind(
    seed: int, app: Celery, raw: redis.Redis
) -> None:
    moment = random.Random(seed)
    inside = 0

    async def block(wait: float) -> None:
        nonlocal inside
        async with hold("k", scope=SCOPE, wait=wait, app=app):
            inside += 1
            assert inside == 1
            try:
                await asyncio.sleep(moment.random() * 0.01)
            finally:
                inside -= 1

    async def cancelled_at_some_time() -> str:
        try:
            async with asyncio.timeout(moment.random() * 0.3):
                await block(wait=moment.choice((5.0, 20.0)))
        except TimeoutError:
            return "cancelled"
        return "ran"

    async def main() -> list[str]:
        async with hold("warm", scope=SCOPE, app=app):
            pass  # the first block imports what it needs
        ends = await asyncio.gather(*(cancelled_at_some_time() for _ in range(60)))
        await until(lambda: blocked(raw) == 0, "all have left")
        await until(lambda: left(raw) == [], "nothing is left")
        assert len(Runtime.of(app).locker.heartbeat) == 0
        async with hold("k", scope=SCOPE, app=app):
            return ends

    assert "cancelled" in run(main())


def test_an_interrupted_program_leaves_no_key(private_redis: PrivateServer, raw: Any) -> None:
    """Coroutines inside, waiting, and asking; then Ctrl-C, and the interpreter exits at once."""
    script = f"""
        import asyncio
        from celery import Celery
        from celery_singleton_lock import hold
        app = Celery(broker={private_redis.url()!r}, backend={private_redis.url()!r})
        async def block(key, wait=0):
            async with hold(key, scope={SCOPE!r}, wait=wait, ttl=300, app=app):
                await asyncio.sleep(300)
        async def ask():
            while True:
                async with hold("often", scope={SCOPE!r}, ttl=300, app=app): pass
        async def main():
            await asyncio.gather(block("a", 300), block("b"), block("a", 300), ask())
        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, stderr=subprocess.PIPE
    ) as process:
        try:
            run(until(lambda: blocked(raw) == 1 and len(left(raw)) >= 3, "one waits"))
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
    assert errors.rstrip().endswith(b"KeyboardInterrupt")
    assert b"Exception ignored" not in errors
    # The ttl is 300 s; a key may be kept for half a second for the client that waited.
    run(until(lambda: left(raw) == [], "the keys are free"))


# A lost lease.


@pytest.mark.parametrize("how", ["deleted", "replaced", "stopped"])
def test_a_lost_lease_cancels_the_body(
    how: str, app: Celery, raw: redis.Redis, private_redis: PrivateServer
) -> None:
    reasons = {"deleted": "gone", "replaced": "replaced", "stopped": "unreachable"}

    async def body() -> None:
        async with hold("k", scope=SCOPE, ttl=1, app=app) as lease:
            if how == "stopped":
                private_redis.pause()
            elif how == "deleted":
                raw.delete(lease.key)
            else:
                raw.set(lease.key, raw.get(lease.key).replace("hold-", "other-"))  # type: ignore[union-attr]
            await asyncio.sleep(PATIENCE)

    async def main() -> None:
        with pytest.raises(LeaseLost) as raised:
            await body()
        assert raised.value.reason == reasons[how]
        assert isinstance(raised.value.__cause__, asyncio.CancelledError)
        await asyncio.sleep(0.01)  # the cancellation is over

    run(main())
    if how == "stopped":
        private_redis.resume()
    if how == "replaced":
        assert left(raw) != [], "the key belongs to another"


# The loop.


@asynccontextmanager
async def beating() -> AsyncIterator[list[None]]:
    """A coroutine counts while the block runs."""
    beats: list[None] = []

    async def beat() -> None:
        while True:
            await asyncio.sleep(0.01)
            beats.append(None)

    async with waiting(beat):
        yield beats


@pytest.mark.slow
@pytest.mark.parametrize("when", ["acquire", "wait", "release", "claim"])
def test_the_loop_runs_while_a_stopped_store_is_asked(
    when: str, app: Celery, raw: redis.Redis, private_redis: PrivateServer
) -> None:
    async def acquire() -> None:
        private_redis.pause()
        async with beating() as beats:
            with pytest.raises(StoreUnavailable):
                async with hold("k", scope=SCOPE, ttl=TTL, app=app):
                    raise AssertionError("it holds something")
            assert len(beats) >= BEATS

    async def wait() -> None:
        async def wait_for_it() -> None:
            async with hold("k", scope=SCOPE, wait=PATIENCE, ttl=TTL, app=app):
                raise AssertionError("two at once")

        raw.set(Runtime.of(app).keyspace.lock(SCOPE, "k"), 'l x|0.0|y 1 {"task":"t"}', ex=300)
        async with waiting(wait_for_it) as [task]:
            await until(lambda: blocked(raw) == 1, "it waits")
            private_redis.pause()
            async with beating() as beats:
                with pytest.raises(StoreUnavailable):
                    await task
                assert len(beats) >= BEATS

    async def release() -> None:
        async with beating() as beats:
            async with hold("k", scope=SCOPE, ttl=TTL, app=app):
                private_redis.pause()
                before = len(beats)
            assert len(beats) >= before + BEATS

    async def claim() -> None:
        private_redis.pause()
        async with beating() as beats:
            unique: Any = {"unique": "until_done", "on_duplicate": "raise"}
            with pytest.raises(StoreUnavailable):
                await aclaim_and_send(app, "t", key="k", singleton=unique)
            assert len(beats) >= BEATS

    async def main() -> None:
        async with hold("warm", scope=SCOPE, app=app):
            pass  # the first block imports what it needs
        await {"acquire": acquire, "wait": wait, "release": release, "claim": claim}[when]()

    try:
        run(main())
    finally:
        private_redis.resume()


@pytest.mark.slow
def test_a_blocking_hold_in_a_coroutine_is_noticed_by_the_same_count(
    app: Celery, private_redis: PrivateServer
) -> None:
    async def main() -> None:
        private_redis.pause()
        async with beating() as beats:
            with pytest.raises(StoreUnavailable), hold("k", scope=SCOPE, ttl=TTL, app=app):
                raise AssertionError("it holds something")
            assert len(beats) < BEATS

    try:
        run(main())
    finally:
        private_redis.resume()


def test_a_timeout_does_not_wait_for_a_stopped_store(
    app: Celery, raw: redis.Redis, private_redis: PrivateServer
) -> None:
    async def main() -> None:
        private_redis.pause()
        acquiring = asyncio.create_task(acquire())
        await asyncio.sleep(0.1)
        acquiring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acquiring
        private_redis.resume()
        await until(lambda: left(raw) == [], "what was granted meanwhile is released")

    async def acquire() -> None:
        async with hold("k", scope=SCOPE, ttl=300, app=app):
            raise AssertionError("it holds something")

    run(main())


# Publishing.


def test_aclaim_and_send_publishes_once(app: Celery, raw: redis.Redis) -> None:
    async def main() -> None:
        call: dict[str, Any] = {"key": "k", "singleton": {"unique": "until_done"}}
        first = await aclaim_and_send(app, "t", [1], **call)
        second = await aclaim_and_send(app, "t", [1], **call)
        assert second.id == first.id
        call["singleton"]["on_duplicate"] = "raise"
        with pytest.raises(DuplicateTask):
            await aclaim_and_send(app, "t", [1], **call)
        with pytest.raises(TypeError, match="args is a str"):
            await aclaim_and_send(app, "t", "1", **call)
        assert raw.llen("celery") == 1

    run(main())


def test_a_message_of_aclaim_and_send_has_the_publishing_task_as_its_parent(
    app: Celery, raw: redis.Redis
) -> None:
    @app.task(name="parent")
    def parent() -> None:
        call: Any = {"key": "k", "singleton": {"unique": "until_done"}}
        asyncio.run(aclaim_and_send(app, "child", **call))

    @singleton_task(app=app, name="child", key="k{n}", shared=False)
    def child(n: int) -> None: ...

    parent.apply(task_id="the-parent").get()
    [message] = raw.lrange("celery", 0, -1)
    headers = json.loads(message)["headers"]
    assert (headers["task"], headers["parent_id"]) == ("child", "the-parent")


# Workers.


def test_a_pool_child_that_is_killed_inside_a_block_is_freed_by_its_worker(
    worker: Callable[..., CeleryWorker],
    load_app: Callable[..., ModuleType],
    redis_client: redis.Redis,
) -> None:
    worker("tests.apps.coroutines", concurrency=1)
    module = load_app("tests.apps.coroutines")
    key = Runtime.of(module.app).keyspace.lock(module.SCOPE, "k")
    module.hold_for_ever.delay("k")
    record = wait_until(
        lambda: Runtime.of(module.app).store.leases.inspect(key), "the child holds it"
    )
    assert record.ttl > 2 * PATIENCE
    os.kill(record.holder.pid, signal.SIGKILL)
    wait_until(lambda: not redis_client.exists(key), "the worker has released it")
