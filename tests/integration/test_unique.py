"""Calls that claim, on real servers and workers: what is published, answered and run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import redis
from celery import Celery
from celery.result import GroupResult
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_singleton_lock import (
    is_skipped,
    singleton_task,
)
from celery_singleton_lock.runtime import Runtime
from example_project.private_server import PrivateServer
from tests.harness.processes import Process
from tests.harness.waited import waited
from tests.harness.worker import CeleryWorker
from tests.integration.key_queue import also_consume
from tests.integration.stage import Stage, wait_until

APP = "tests.apps.unique"
# No worker consumes it.
IDLE = "idle"


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=4)


def queued(stage: Stage, queue: str = IDLE) -> list[dict[str, Any]]:
    """The headers of the messages in a queue without a consumer, the oldest first."""
    messages = [json.loads(text) for text in stage.redis.lrange(queue, 0, -1)]
    return [message["headers"] for message in reversed(messages)]


def ids_of(stage: Stage, name: str) -> list[str]:
    """The ids of the queued messages for ``name``."""
    return [headers["id"] for headers in queued(stage) if name in headers["argsrepr"]]


def claim_key(task: Any, *args: Any, **kwargs: Any) -> str:
    runtime = Runtime.of(task.app)
    return runtime.keyspace.claim(task.name, task.lock_key(*args, **kwargs))


def claim(stage: Stage, task: Any, *args: Any, **kwargs: Any) -> Any:
    """The record of the claim that such a call has, None if it is free."""
    return Runtime.of(stage.app.app).store.leases.inspect(claim_key(task, *args, **kwargs))


def phase(stage: Stage, task: Any, *args: Any) -> str | None:
    record = claim(stage, task, *args)
    return record and str(record.phase)


def freed(stage: Stage, task: Any, *args: Any) -> None:
    wait_until(lambda: claim(stage, task, *args) is None, "the claim is free")


def occupy(stage: Stage, task: Any, name: str) -> Any:
    """Have a body of ``task`` wait at the gate ``name``."""
    result = task.delay(name, gate=name)
    started(stage, name, result)
    return result


def started(stage: Stage, name: str, result: Any) -> None:
    stage.journal.wait_for(
        lambda records: [r for r in records if r.event == "start" and r.task_id == result.id],
        what=f"the body of {result.id} started",
    )


def ran(stage: Stage, name: str) -> list[str]:
    """The ids of the tasks whose bodies ran."""
    return [start.task_id for start in stage.starts(name)]


# The acceptance.

CALLS = """\
import sys, time
from tests.apps.unique import app
task, name, count, begin = app.tasks[sys.argv[1]], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
task.apply_async((name + "-warm",), queue=name + "-warm")
time.sleep(max(0, begin - time.time()))
print(len({task.apply_async((name,), queue=name).id for _ in range(count)}))
"""


def test_of_many_equal_calls_from_4_processes_one_is_queued_and_runs(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    # No worker consumes them yet: the slowest one of all.
    one = stage.app.once
    begin = time.time() + 1.5
    command = [sys.executable, "-c", CALLS, one.name, name, "50", str(begin)]
    processes = [Process(command, env=stage.environment).start() for _ in range(4)]
    for process in processes:
        assert process.wait(60) == 0, process.log
    assert [process.lines[-1] for process in processes] == ["1"] * 4, "all got one id"
    [message] = queued(stage, name)
    also_consume(stage, worker, name)
    stage.journal.wait_for_ends(1, key=name)
    freed(stage, one, name)
    assert queued(stage, name) == []
    assert ran(stage, name) == [message["id"]]


def test_the_last_call_is_followed_by_a_run(stage: Stage, worker: CeleryWorker, name: str) -> None:
    first = stage.app.soon.delay(name, gate=name)
    started(stage, name, first)
    second = stage.app.soon.delay(name, gate=name)
    third = stage.app.soon.delay(name, gate=name)
    assert second.id == third.id
    stage.open(name)
    assert second.get(timeout=20) == name
    assert ran(stage, name) == [first.id, second.id]


# What a duplicate is answered with, on a real result backend.


def test_the_existing_result_is_the_callers_too(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    first = occupy(stage, stage.app.once, name)
    second = stage.app.once.delay(name, gate="none")
    assert second.id == first.id
    stage.open(name)
    assert second.get(timeout=20) == name
    freed(stage, stage.app.once, name)
    third = stage.app.once.delay(name)
    assert third.get(timeout=20) == name
    assert ran(stage, name) == [first.id, third.id]


@pytest.mark.timeout(30)  # Celery waits minutes for a backend that does not answer, or for ever
@pytest.mark.parametrize("fault", ["pause", "kill"])
@pytest.mark.parametrize("always_retry", [False, True])
def test_a_duplicate_is_answered_though_the_result_backend_is_away(
    redis_url: str, private_redis: PrivateServer, fault: str, always_retry: bool
) -> None:
    app = Celery("away", broker="memory://", backend=private_redis.url(), set_as_current=False)
    app.conf.update(singleton_lock_url=redis_url, result_backend_always_retry=always_retry)

    @singleton_task(app=app, name="away", shared=False, unique="until_done")
    def away(name: str) -> None: ...

    first = away.delay("k")
    assert away.delay("k").id == first.id, "the backend is there"
    getattr(private_redis, fault)()
    assert away.delay("k").id == first.id
    app.close()


def test_a_claim_is_taken_over_after_a_restart_of_the_result_backend(
    redis_url: str, private_redis: PrivateServer
) -> None:
    app = Celery("away", broker="memory://", backend=private_redis.url(), set_as_current=False)
    app.conf.singleton_lock_url = redis_url

    @singleton_task(app=app, name="away", shared=False, unique="until_done")
    def away(name: str) -> None: ...

    first = away.delay("k")
    assert away.delay("k").id == first.id, "the backend is asked"
    app.backend.store_result(first.id, None, "SUCCESS")
    private_redis.restart(keep_data=True)  # every connection to it is broken
    assert away.delay("k").id != first.id
    app.close()


def test_skipped_and_published_results_are_got_together(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    # Redis's own way to get many results, which asks the server for those that aren't ready.
    results = [stage.app.skipping.delay(name, gate=name) for _ in range(3)]
    stage.open(name)
    values = GroupResult("g", results).get(timeout=20)
    assert values[0] == name
    assert [is_skipped(value) for value in values] == [False, True, True]
    assert ran(stage, name) == [results[0].id]


def test_singleton_false_runs_beside_a_claim_but_not_beside_a_body(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    first = occupy(stage, stage.app.once, name)
    free = stage.app.once.apply_async((name,), singleton=False)
    assert is_skipped(free.get(timeout=20))
    assert phase(stage, stage.app.once, name) == "running", "it left the other's claim alone"
    stage.open(name)
    assert first.get(timeout=20) == name
    freed(stage, stage.app.once, name)
    own = stage.app.once.apply_async((name,), {"gate": f"{name}-2"}, singleton=False)
    started(stage, name, own)
    assert claim(stage, stage.app.once, name) is None
    stage.open(f"{name}-2")
    assert own.get(timeout=20) == name


# Where publisher and worker disagree, no claim is left behind: no result would show it.


@pytest.mark.parametrize(
    "other",
    ["error", pytest.param("-other", marks=pytest.mark.slow)],
)
def test_a_worker_that_computes_another_key_frees_the_claim_of_the_message(
    stage: Stage, name: str, other: str
) -> None:
    worker = stage.worker(concurrency=1, queues=[name], env={"OTHER_KEY": other})
    first = stage.app.keyed.apply_async((name,), queue=name)
    worker.wait_for_log(rf"Task \S+\[{first.id}\] (succeeded|raised)")
    freed(stage, stage.app.keyed, name)
    worker.kill_group()


@pytest.mark.slow
def test_a_body_that_ran_without_the_store_leaves_no_claim(
    stage: Stage, private_redis: PrivateServer, load_app: Callable[..., ModuleType], name: str
) -> None:
    own = {**stage.environment, "LOCK_URL": private_redis.url()}
    unique = load_app(APP, **own)
    first = unique.regardless.apply_async((name, name), queue=name)
    private_redis.kill()
    worker = stage.worker(concurrency=1, queues=[name], env=own)
    started(stage, name, first)
    private_redis.start()
    store, key = Runtime.of(load_app(APP, **own).app).store, claim_key(unique.regardless, name)
    assert store.leases.inspect(key) is not None
    stage.open(name)
    wait_until(lambda: store.leases.inspect(key) is None, "the claim is free")
    worker.kill_group()


# Publishers.


FORKED = """\
import os
from tests.apps.unique import once
first = once.apply_async((NAME,), queue="idle")
pid = os.fork()
second = once.apply_async((NAME,), queue="idle")
other = once.apply_async((NAME + "-" + str(bool(pid)),), queue="idle")
assert second.id == first.id
if pid:
    assert os.waitpid(pid, 0)[1] == 0
    assert once.apply_async((NAME,), queue="idle").id == first.id
    assert once.apply_async((NAME + "-False",), queue="idle").id != other.id
"""


def test_a_forked_publisher_has_connections_of_its_own(stage: Stage, name: str) -> None:
    script = f"NAME = {name!r}\n{FORKED}"
    process = Process([sys.executable, "-c", script], env=stage.environment).start()
    assert process.wait(30) == 0, process.log
    assert len(ids_of(stage, name)) == 3


def test_a_call_by_name_has_no_claim_but_runs_under_one(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    named = stage.app.app.send_task(stage.app.once.name, (name, name))
    started(stage, name, named)
    assert phase(stage, stage.app.once, name) == "running"
    assert stage.app.once.delay(name).id == named.id
    stage.open(name)
    assert named.get(timeout=20) == name


# The store is away.


@pytest.fixture
def unique(
    load_app: Callable[..., ModuleType], private_redis: PrivateServer
) -> Iterator[ModuleType]:
    """The app, with a lock store of its own."""
    module = load_app(APP, LOCK_URL=private_redis.url())
    yield module
    if private_redis.alive:
        private_redis.resume()


def away(server: PrivateServer, how: str) -> None:
    server.kill() if how == "killed" else server.pause()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "silent"])
def test_with_the_store_away_a_call_goes_out_within_a_second(
    unique: ModuleType,
    private_redis: PrivateServer,
    redis_client: Any,
    caplog: pytest.LogCaptureFixture,
    name: str,
    how: str,
) -> None:
    unique.once.apply_async((f"{name}-warm",), queue=IDLE)
    private_redis.kill() if how == "killed" else private_redis.pause()
    with waited() as seconds:
        results = [unique.once.apply_async((name,), queue=IDLE) for _ in range(2)]
    assert seconds[0] < 2, "a second for each"
    found = [json.loads(m)["headers"]["id"] for m in redis_client.lrange(IDLE, 0, -1)]
    assert [result.id for result in results] == found[:2][::-1]
    assert results[0].id != results[1].id
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert sum("published-without-claim" in warning for warning in warnings) == 2


def test_a_publish_that_fails_after_an_unresponsive_store_frees_the_claim_that_it_sets_later(
    unique: ModuleType, private_redis: PrivateServer, name: str
) -> None:
    """Else the next calls, of any process, are answered with a message that was never published."""
    unique.once.apply_async((f"{name}-warm",), queue=IDLE)
    once = {"max_retries": 0, "interval_start": 0}
    with (
        redis.Redis.from_url(private_redis.url()) as client,
        Connection("redis://127.0.0.1:1", transport_options=once) as nowhere,
    ):
        claims_set = lambda: client.info("commandstats")["cmdstat_set"]["calls"]  # noqa: E731
        before = claims_set()
        private_redis.pause()
        with pytest.raises(OperationalError):
            unique.once.apply_async((name,), connection=nowhere)
        private_redis.resume()
        wait_until(lambda: claims_set() > before, "the server has done what it was asked")
    runtime = Runtime.of(unique.app)
    wait_until(lambda: runtime.locker.retry_queue.is_empty, "nothing waits for the store")
    assert runtime.store.leases.inspect(claim_key(unique.once, name)) is None


def test_a_body_that_publishes_its_own_successor_is_not_answered_with_itself(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    stage.app.again.delay(name)
    stage.journal.wait_for_ends(3, key=name)
    assert len(set(ran(stage, name))) == 3
    freed(stage, stage.app.again, name)
