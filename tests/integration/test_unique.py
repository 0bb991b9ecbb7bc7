"""Calls that claim, on real servers and workers: what is published, answered and run."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from types import ModuleType
from typing import Any
from uuid import UUID, uuid4

import pytest
import redis
from celery import Celery, Task, chain
from celery.result import GroupResult
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_singleton_lock import (
    DuplicateTask,
    LockKeyError,
    StoreUnavailable,
    hold,
    is_skipped,
    singleton_task,
)
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.publish import publication
from celery_singleton_lock.runtime import Runtime
from example_project.private_server import PrivateServer
from tests.harness.deliveries import RedisBroker
from tests.harness.journal import most_at_once
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


def publish_again(stage: Stage, task_id: str) -> None:
    """Send a copy of an idle message to the worker."""
    for text in stage.redis.lrange(IDLE, 0, -1):
        message = json.loads(text)
        if message["headers"]["id"] == task_id:
            message["properties"]["delivery_info"]["routing_key"] = "celery"
            message["properties"]["delivery_tag"] = str(uuid4())
            stage.redis.lpush("celery", json.dumps(message))
            return
    raise AssertionError(f"{task_id} is not queued")


def ids_of(stage: Stage, name: str) -> list[str]:
    """The ids of the queued messages for ``name``."""
    return [headers["id"] for headers in queued(stage) if name in headers["argsrepr"]]


def claim_key(task: Any, *args: Any, **kwargs: Any) -> str:
    runtime = Runtime.of(task.app)
    return runtime.keyspace.claim(task.name, task.lock_key(*args, **kwargs))


def claim(stage: Stage, task: Any, *args: Any, **kwargs: Any) -> Any:
    """The record of the claim that such a call has, None if it is free."""
    return Runtime.of(stage.app.app).store.inspect(claim_key(task, *args, **kwargs))


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


def publishers(stage: Stage, task: Any, name: str, count: int) -> list[Process]:
    """Four processes that begin together, with ``count`` calls each."""
    begin = time.time() + 1.5
    options = [task.name, name, str(count), str(begin)]
    command = [sys.executable, "-c", CALLS, *options]
    return [Process(command, env=stage.environment).start() for _ in range(4)]


def finished(processes: list[Process]) -> None:
    for process in processes:
        assert process.wait(60) == 0, process.log


@pytest.mark.parametrize(
    ("task", "count"),
    [
        ("once", 50),
        pytest.param("once", 250, marks=pytest.mark.slow),
        pytest.param("latest", 250, marks=pytest.mark.slow),
    ],
)
def test_of_many_equal_calls_from_4_processes_one_is_queued_and_runs(
    stage: Stage, worker: CeleryWorker, name: str, task: str, count: int
) -> None:
    # No worker consumes them yet: the slowest one of all.
    one = getattr(stage.app, task)
    processes = publishers(stage, one, name, count)
    finished(processes)
    assert [process.lines[-1] for process in processes] == ["1"] * 4, "all got one id"
    [message] = queued(stage, name)
    also_consume(stage, worker, name)
    stage.journal.wait_for_ends(1, key=name)
    freed(stage, one, name)
    assert queued(stage, name) == []
    assert ran(stage, name) == [message["id"]]


@pytest.mark.parametrize("without", [None, pytest.param("free-at-grant", marks=pytest.mark.slow)])
def test_the_last_call_is_followed_by_a_run_unless_the_claim_stays_through_the_body(
    stage: Stage,
    worker: CeleryWorker,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    without: str | None,
) -> None:
    if without:
        # The publisher would see that the claim is that of a running task, and not count it.
        monkeypatch.setattr(publication, "does_the_work_of", lambda existing, claim: True)
    soon = stage.app.soon.s(name, gate=name)
    if without:
        soon.set(queue=name)
        stage.worker(concurrency=2, queues=[name], env={"WITHOUT": without})
    first = soon.delay()
    started(stage, name, first)
    second = soon.delay()
    third = soon.delay()
    assert second.id == third.id
    stage.open(name)
    if without:
        assert second.id == first.id, "it was answered with the one that runs"
        first.get(timeout=20)
        freed(stage, stage.app.soon, name)
        assert queued(stage, name) == []
        assert ran(stage, name) == [first.id]
    else:
        assert second.get(timeout=20) == name
        assert ran(stage, name) == [first.id, second.id]


def waiting(stage: Stage, task: Any, name: str) -> set[str]:
    """The task ids for ``name`` that are queued, delivered or delayed, and were not granted yet.

    The messages are read first: one that is granted meanwhile is not counted, and none twice.
    """
    texts = [json.loads(text) for text in stage.redis.lrange("celery", 0, -1)]
    texts += [json.loads(entry)[0] for entry in stage.redis.hvals("unacked")]
    found = {m["headers"]["id"] for m in texts if f"'{name}'" in m["headers"]["argsrepr"]}
    holder = Runtime.of(stage.app.app).store.inspect(task.lock_key(name))
    return found - {holder and holder.holder.task_id} - set(ran(stage, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "singleton"),
    [("latest", None), ("soon", None), ("soon_late", None), ("soon", False)],
    ids=["latest", "soon", "soon_late", "without claims"],
)
def test_under_200_calls_a_second_one_runs_and_one_waits(
    stage: Stage, worker: CeleryWorker, name: str, task: str, singleton: Any
) -> None:
    one = getattr(stage.app, task)
    seen: list[set[str]] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            seen.append(waiting(stage, one, name))

    watcher = threading.Thread(target=look)
    watcher.start()
    asked: list[tuple[float, str]] = []
    begin = time.monotonic()
    for n in range(1000 if singleton is None else 10):
        # The pace of the calls, not a wait for anything.
        time.sleep(max(0.0, begin + n / 200 - time.monotonic()))
        at = time.monotonic()
        asked.append((at, one.apply_async((name,), {"seconds": 0.3}, singleton=singleton).id))
    took = time.monotonic() - begin
    ids = {task_id for _, task_id in asked}
    stage.journal.wait_for(
        lambda records: {r.task_id for r in records if r.event == "end" and r.key == name} >= ids,
        timeout=100,
        what="every answer was a call that ran",
    )
    over.set()
    watcher.join()
    assert most_at_once(stage.journal.records(), name) == 1
    runs = stage.journal.runs(name)
    assert {run.task_id for run in runs} == ids
    starts = {run.task_id: run.begin for run in runs}
    assert all(starts[task_id] > at for at, task_id in asked), "each call is followed by a run"
    if singleton is None:
        assert max(map(len, seen)) == 1
        assert len(runs) <= took / 0.3 + 3
    else:
        assert max(map(len, seen)) > 1


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


@pytest.mark.parametrize("task", ["once", "once_late", "soon"])
def test_a_failed_call_leaves_no_claim(
    stage: Stage, worker: CeleryWorker, name: str, task: str
) -> None:
    one = getattr(stage.app, task)
    first = one.delay(name, fail=True) if task != "soon_late" else None
    with pytest.raises(ArithmeticError):
        first.get(timeout=20)
    freed(stage, one, name)
    assert one.delay(name).get(timeout=20) == name


@pytest.mark.slow
@pytest.mark.parametrize("task", ["once", "soon"])
def test_a_revoked_call_frees_its_claim_when_it_is_discarded(
    stage: Stage, worker: CeleryWorker, name: str, task: str
) -> None:
    one = getattr(stage.app, task)
    first = one.apply_async((name,), countdown=3)
    worker.wait_for_log(rf"Task \S+\[{first.id}\] received")
    first.revoke()
    worker.wait_for_log(rf"Tasks flagged as revoked: {first.id}")
    freed(stage, one, name)
    wait_until(lambda: first.state == "REVOKED", "its end is stored")
    assert one.delay(name).get(timeout=20) == name
    assert first.id not in ran(stage, name)


def test_an_expired_call_frees_its_claim(stage: Stage, worker: CeleryWorker, name: str) -> None:
    first = stage.app.once.apply_async((name,), countdown=0.5, expires=0.2)
    freed(stage, stage.app.once, name)
    second = stage.app.once.delay(name)
    assert second.get(timeout=20) == name
    worker.wait_for_log(rf"Discarding revoked task: \S+\[{first.id}\]")
    assert ran(stage, name) == [second.id]


@pytest.mark.parametrize("how", ["success", "failure"])
def test_a_claim_that_outlived_its_task_is_taken_over(
    stage: Stage, worker: CeleryWorker, name: str, how: str
) -> None:
    first = occupy(stage, stage.app.once, name)
    key = claim_key(stage.app.once, name)
    value = stage.redis.get(key)
    stage.open(name)
    first.get(timeout=20)
    freed(stage, stage.app.once, name)
    # As its worker would have left it, killed between the result and the release.
    stage.redis.set(key, value, ex=3600)
    second = stage.app.once.delay(name)
    assert second.id != first.id
    assert second.get(timeout=20) == name
    freed(stage, stage.app.once, name)
    assert ran(stage, name) == [first.id, second.id]


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


def test_a_call_that_is_known_to_run_keeps_its_claim(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    first = occupy(stage, stage.app.once, name)
    stage.app.app.backend.store_result(first.id, {}, "STARTED")
    assert stage.app.once.delay(name).id == first.id
    assert phase(stage, stage.app.once, name) == "running"
    stage.open(name)
    assert first.get(timeout=20) == name


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


# A task and its own claim.


@pytest.mark.parametrize("task", ["flaky", "flaky_start"])
@pytest.mark.parametrize(("countdown", "attempts"), [(0, 4), (1, 2)])
def test_a_retry_runs_under_its_own_claim_and_equal_calls_are_answered_with_it(
    stage: Stage, worker: CeleryWorker, name: str, task: str, countdown: float, attempts: int
) -> None:
    one = getattr(stage.app, task)
    first = one.delay(name, attempts=attempts, countdown=countdown)
    if countdown:
        wait_until(lambda: phase(stage, one, name) == "retrying", "it waits for its retry")
        assert one.delay(name).id == first.id
    assert first.get(timeout=20) == attempts - 1
    freed(stage, one, name)
    assert ran(stage, name) == [first.id] * attempts


def test_a_retry_with_other_arguments_frees_the_claim_of_the_first(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    moving, other = stage.app.moving, f"{name}-other"
    first = moving.delay(name, other, countdown=1)
    freed(stage, moving, name, other)
    assert first.get(timeout=20) == other
    freed(stage, moving, other, other)
    assert (ran(stage, name), ran(stage, other)) == ([first.id], [first.id])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"expires": 60}], ids=str)
@pytest.mark.parametrize("task", ["once", "soon"])
def test_a_call_for_later_keeps_its_claim_until_then(
    stage: Stage, worker: CeleryWorker, name: str, task: str, options: dict[str, Any]
) -> None:
    one = getattr(stage.app, task)
    first = one.apply_async((name,), countdown=2, **options)
    assert one.apply_async((name,), **options).id == first.id
    assert first.get(timeout=20) == name
    freed(stage, one, name)
    assert ran(stage, name) == [first.id]


@pytest.mark.parametrize("task", ["once_late", "soon_late"])
def test_a_message_delivered_again_is_no_duplicate_of_itself(
    stage: Stage, worker: CeleryWorker, name: str, task: str
) -> None:
    one = getattr(stage.app, task)
    first = occupy(stage, one, name)
    RedisBroker(stage.redis).deliver_again(first.id)
    worker.wait_for_event(EventName.REQUEUED, task_id=first.id, sequence=1)
    stage.open(name)
    assert first.get(timeout=20) == name
    freed(stage, one, name)
    worker.wait_for_event(EventName.DROPPED, task_id=first.id)
    assert claim(stage, one, name) is None
    assert ran(stage, name) == [first.id]


@pytest.mark.parametrize("by", ["itself", "another"])
def test_a_task_that_replaces_itself_goes_on_under_its_claim(
    stage: Stage, worker: CeleryWorker, name: str, by: str
) -> None:
    for n in range(5):
        one = f"{name}-{n}"
        first = stage.app.replaced.delay(one, by)
        assert first.get(timeout=20) == one
        freed(stage, stage.app.replaced, one, by)
        freed(stage, stage.app.once, one)
        assert ran(stage, one) == [first.id] * 2


@pytest.mark.parametrize("task", ["patient", "slowly"])
def test_a_message_that_is_requeued_keeps_its_claim(
    stage: Stage, worker: CeleryWorker, name: str, task: str
) -> None:
    one = getattr(stage.app, task)
    occupy(stage, stage.app.blocker, name)
    first = one.delay(name)
    worker.wait_for_event(EventName.REQUEUED, task_id=first.id, sequence=1)
    assert one.delay(name).id == first.id
    record = claim(stage, one, name)
    assert str(record.phase) == "queued"
    assert record.ttl > 3500
    stage.open(name)
    assert first.get(timeout=20) == name
    freed(stage, one, name)
    assert ran(stage, name)[1:] == [first.id]


@pytest.mark.slow
def test_options_of_the_call_survive_retry_requeue_and_redelivery(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    late = stage.app.once_late
    with hold(name, scope=late.name, app=stage.app.app):
        options = {"on_conflict": "retry", "unique_for": 777, "ttl": 33}
        first = late.apply_async((name,), singleton=options, queue="celery")
        worker.wait_for_event(EventName.REQUEUED, task_id=first.id, sequence=1)
        record = claim(stage, late, name)
        assert 700 < record.ttl < 780
    assert first.get(timeout=20) == name
    freed(stage, late, name)
    retried = stage.app.flaky.apply_async((name,), {"countdown": 2}, singleton={"unique_for": 777})
    wait_until(lambda: phase(stage, stage.app.flaky, name) == "retrying", "it retries")
    assert 777 < claim(stage, stage.app.flaky, name).ttl <= 779
    assert retried.get(timeout=20) == 1


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
    ["error", *(pytest.param(other, marks=pytest.mark.slow) for other in ("-other", "none"))],
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
def test_a_requeued_that_is_reported_late_leaves_no_claim(stage: Stage, name: str) -> None:
    # Its child stood still after publishing the copy, which has run meanwhile.
    worker = stage.worker(concurrency=3, queues=[name], env={"LATE_MARKS": "1"})
    soon = stage.app.soon.s(name, gate=name).set(queue=name)
    first = soon.delay()
    started(stage, name, first)
    second = soon.delay()
    worker.wait_for_log(rf"\[{second.id}\] received")
    wait_until(lambda: worker.log.count(f"[{second.id}] received") > 1, "its copy is there")
    stage.open(name)
    assert second.get(timeout=20) == name
    freed(stage, stage.app.soon, name)
    stage.open(f"mark-{second.id}")
    worker.wait_for_event(EventName.REQUEUED, task_id=second.id, sequence=1)
    assert claim(stage, stage.app.soon, name) is None
    worker.kill_group()


def test_a_link_published_twice_leaves_no_claim(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    # Its parent ran twice: its worker was killed before the acknowledgement. The second copy of the
    # link comes when the first has run, and is dropped.
    first = stage.app.once_late.apply_async((name,), queue=IDLE)
    publish_again(stage, first.id)
    worker.wait_for_log(rf"\[{first.id}\] succeeded")
    freed(stage, stage.app.once_late, name)
    publish_again(stage, first.id)
    worker.wait_for_event(EventName.DROPPED, task_id=first.id)
    freed(stage, stage.app.once_late, name)
    assert ran(stage, name) == [first.id]


@pytest.mark.slow
def test_a_late_copy_of_an_attempt_leaves_the_claim_to_the_retry(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    flaky = stage.app.flaky_late
    first = flaky.apply_async((name,), {"countdown": 5}, queue=IDLE)
    for _ in range(2):
        publish_again(stage, first.id)
        wait_until(lambda: phase(stage, flaky, name) == "retrying", "it waits for its retry")
    worker.wait_for_event(EventName.DROPPED, task_id=first.id)
    assert phase(stage, flaky, name) == "retrying"
    assert flaky.delay(name).id == first.id
    assert first.get(timeout=20) == 1
    freed(stage, flaky, name)
    assert ran(stage, name) == [first.id] * 2


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
    assert store.inspect(key) is not None
    stage.open(name)
    wait_until(lambda: store.inspect(key) is None, "the claim is free")
    worker.kill_group()


# Keys.


class Opaque:
    """Has the default repr."""


class Lettered:
    """Has a text of its own."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


@pytest.mark.parametrize(
    "value",
    [
        UUID(int=7),
        datetime(2024, 2, 29, 23, 59, 59, 123456),
        datetime(2024, 2, 29, tzinfo=UTC),
        date(2024, 2, 29),
        Decimal("12345678901234567890.10"),
        ("a", ("b", 1)),
        {"b": 1, "a": [2, None]},
        0.1 + 0.2,
        "Zoë \N{SNOWMAN}",
        b"\x00\xff",
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("task", ["by_arguments", "by_template"])
def test_equal_values_are_duplicates(stage: Stage, name: str, task: str, value: Any) -> None:
    if task == "by_template" and isinstance(value, bytes):
        pytest.skip("a template renders what a message makes of an argument: bytes stay bytes")
    signature = getattr(stage.app, task).s(name, value).set(queue=IDLE)
    assert signature.delay().id == signature.delay().id
    assert len(ids_of(stage, name)) == 1


@pytest.mark.parametrize("task", ["by_arguments", "by_template"])
@pytest.mark.parametrize("serializer", ["sets", "pickle"])
def test_sets_are_duplicates_where_the_serializer_orders_them(
    stage: Stage, name: str, task: str, serializer: str
) -> None:
    if task == "by_arguments" and serializer == "pickle":
        pytest.skip("no part of a key made of all arguments: JSON has no sets")
    value = {3, 1, 2} if task == "by_template" else [1, 2]
    signature = getattr(stage.app, task).s(name, value).set(queue=IDLE, serializer=serializer)
    assert signature.delay().id == signature.delay().id


@pytest.mark.skipif(
    not hasattr(Task, "_dump_pydantic_arguments"), reason="Celery publishes no models before 5.7"
)
def test_models_are_duplicates(stage: Stage, name: str) -> None:
    account = int(name, 16)
    orders = [stage.app.Order(account=account, note=note) for note in ("a", "b")]
    by_model = stage.app.by_model
    results = [by_model.apply_async((order,), queue=IDLE) for order in orders]
    assert results[0].id == results[1].id
    assert claim(stage, by_model, orders[0]) is not None


def test_a_pickled_object_without_a_text_is_refused_and_named(stage: Stage, name: str) -> None:
    signature = stage.app.by_template.s(name, Opaque())
    with pytest.raises(LockKeyError, match=r"Argument 'value' \(Opaque\) has another text"):
        signature.set(queue=IDLE, serializer="pickle").delay()
    assert ids_of(stage, name) == []


def test_a_pickled_object_with_a_text_is_its_text(stage: Stage, name: str) -> None:
    by_template = stage.app.by_template
    results = [
        by_template.apply_async((name, Lettered("x")), queue=IDLE, serializer="pickle")
        for _ in range(2)
    ]
    assert results[0].id == results[1].id


# Publishers.


@pytest.mark.parametrize("how", ["plain", "headers"])
def test_a_child_has_a_claim_of_its_own(
    stage: Stage, worker: CeleryWorker, name: str, how: str
) -> None:
    parent = stage.app.parent.delay(name, how)
    child_id, header = parent.get(timeout=20)
    child = stage.app.app.AsyncResult(child_id)
    assert child.get(timeout=20) == name
    assert header["id"] == parent.id
    assert sorted(ran(stage, name)) == sorted([parent.id, child_id])
    freed(stage, stage.app.parent, name)
    freed(stage, stage.app.once, name)


def test_threads_that_publish_at_once_share_one_message(stage: Stage, name: str) -> None:
    barrier = threading.Barrier(8)
    found: list[str] = []

    def publish() -> None:
        barrier.wait(10)
        found.extend(stage.app.once.apply_async((name,), queue=IDLE).id for _ in range(20))

    threads = [threading.Thread(target=publish) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 160
    assert set(found) == set(ids_of(stage, name))
    assert len(ids_of(stage, name)) == 1


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


def test_beats_options_claim(stage: Stage, name: str) -> None:
    once = {"unique": "until_done", "unique_for": 55}
    results = stage.send_by_beat(stage.app.blocker, name, times=3, queue=IDLE, singleton=once)
    assert len({result.id for result in results}) == 1
    assert ids_of(stage, name) == [results[0].id]
    assert 50 < claim(stage, stage.app.blocker, name).ttl <= 55


def test_a_call_by_name_has_no_claim_but_runs_under_one(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    named = stage.app.app.send_task(stage.app.once.name, (name, name))
    started(stage, name, named)
    assert phase(stage, stage.app.once, name) == "running"
    assert stage.app.once.delay(name).id == named.id
    stage.open(name)
    assert named.get(timeout=20) == name


def test_eager_calls_need_no_server(load_app: Callable[..., ModuleType], name: str) -> None:
    nowhere = "redis://127.0.0.1:1/0"
    unique = load_app(APP, BROKER_URL=nowhere, RESULT_URL=nowhere, EAGER="1")
    for _ in range(2):
        assert unique.once.delay(name).get() == name
        assert unique.soon.delay(name).get() == name


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
@pytest.mark.parametrize("warm", [True, False], ids=["connected", "first call"])
@pytest.mark.parametrize("how", ["killed", "silent"])
def test_with_the_store_away_a_call_goes_out_within_a_second(
    unique: ModuleType,
    private_redis: PrivateServer,
    redis_client: Any,
    caplog: pytest.LogCaptureFixture,
    name: str,
    how: str,
    warm: bool,
) -> None:
    if warm:
        unique.once.apply_async((f"{name}-warm",), queue=IDLE)
    else:
        with unique.app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1)
    away(private_redis, how)
    with waited() as seconds:
        results = [unique.once.apply_async((name,), queue=IDLE) for _ in range(2)]
    assert seconds[0] < 2, "a second for each"
    found = [json.loads(m)["headers"]["id"] for m in redis_client.lrange(IDLE, 0, -1)]
    assert [result.id for result in results] == found[:2][::-1]
    assert results[0].id != results[1].id
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert sum("published-without-claim" in warning for warning in warnings) == 2


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_with_the_store_away_raise_raises_within_a_second(
    unique: ModuleType, private_redis: PrivateServer, redis_client: Any, name: str, how: str
) -> None:
    away(private_redis, how)
    with waited() as seconds, pytest.raises(StoreUnavailable):
        unique.once.apply_async((name,), queue=IDLE, singleton={"on_duplicate": "raise"})
    assert seconds[0] < 1
    assert redis_client.llen(IDLE) == 0


def test_after_raise_met_an_unresponsive_store_the_same_call_can_be_made_again(
    unique: ModuleType, private_redis: PrivateServer, name: str
) -> None:
    # What the silent server was asked, it does when it wakes up: a claim without a message.
    raising = {"on_duplicate": "raise"}  # by a script, which has to be known to the server
    signature = unique.once.s(name).set(queue=IDLE, singleton=raising)
    unique.once.apply_async((f"{name}-warm",), queue=IDLE, singleton=raising)
    private_redis.pause()
    with pytest.raises(StoreUnavailable):
        signature.delay()
    private_redis.resume()
    store, key = Runtime.of(unique.app).store, claim_key(unique.once, name)
    wait_until(lambda: store.inspect(key), "the claim stands")
    result = signature.delay()
    with pytest.raises(DuplicateTask) as raised:
        signature.delay()
    assert raised.value.task_id == result.id


def test_after_a_restart_of_the_store_the_first_call_claims(
    unique: ModuleType, private_redis: PrivateServer, name: str
) -> None:
    first = unique.once.apply_async((name,), queue=IDLE)
    private_redis.restart(keep_data=True)
    assert unique.once.apply_async((name,), queue=IDLE).id == first.id
    private_redis.restart(keep_data=True)
    other = unique.once.apply_async((f"{name}-2",), queue=IDLE)
    assert unique.once.apply_async((f"{name}-2",), queue=IDLE).id == other.id


def test_a_publish_that_fails_frees_its_claim(
    load_app: Callable[..., ModuleType], private_redis: PrivateServer, redis_url: str, name: str
) -> None:
    unique = load_app(APP, BROKER_URL=private_redis.url(), LOCK_URL=redis_url)
    unique.once.apply_async((f"{name}-warm",), queue=IDLE)
    private_redis.kill()
    with pytest.raises(Exception, match=r"refused|[Cc]onnection"):
        unique.once.apply_async((name,), queue=IDLE)
    store = Runtime.of(unique.app).store
    assert store.inspect(claim_key(unique.once, name)) is None
    private_redis.start()
    assert unique.once.apply_async((name,), queue=IDLE).id


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
    wait_until(lambda: runtime.locker.queue.is_empty, "nothing waits for the store")
    assert runtime.store.inspect(claim_key(unique.once, name)) is None


def test_chains_are_published_with_the_store_away(
    unique: ModuleType, private_redis: PrivateServer, name: str
) -> None:
    private_redis.kill()
    assert chain(unique.once.si(name), unique.once.si(name)).apply_async(queue=IDLE).id


def test_a_body_that_publishes_its_own_successor_is_not_answered_with_itself(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    stage.app.again.delay(name)
    stage.journal.wait_for_ends(3, key=name)
    assert len(set(ran(stage, name))) == 3
    freed(stage, stage.app.again, name)


def test_a_call_that_does_not_expire_is_not_answered_with_one_that_does(
    stage: Stage, name: str
) -> None:
    short = stage.app.once.apply_async((name,), expires=30, queue=IDLE)
    assert stage.app.once.apply_async((name,), expires=60, queue=IDLE).id == short.id
    lasting = stage.app.once.apply_async((name,), queue=IDLE)
    assert lasting.id != short.id
    assert stage.app.once.apply_async((name,), queue=IDLE).id == lasting.id
    assert stage.app.once.apply_async((name,), expires=5, queue=IDLE).id == lasting.id
    assert ids_of(stage, name) == [short.id, lasting.id]


def test_a_call_that_does_not_expire_is_not_answered_with_a_retry_that_does(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    """Celery keeps ``expires`` for a retry, and discards it after that."""
    flaky = stage.app.flaky
    first = flaky.apply_async((name, 2, 300), expires=600)
    wait_until(lambda: phase(stage, flaky, name) == "retrying", "it waits for its retry")
    assert flaky.apply_async((name,), expires=1200, queue=IDLE).id == first.id
    lasting = flaky.apply_async((name,), queue=IDLE)
    assert flaky.apply_async((name,), queue=IDLE).id == lasting.id
    assert ids_of(stage, name) == [lasting.id]
