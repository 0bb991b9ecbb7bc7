"""`singleton_lock_enabled=False`: tasks run as plain ones, also while other workers lock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_singleton_lock import claim_and_send, inspection, is_skipped
from celery_singleton_lock.message.header import HEADER
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.settings import SWITCH
from tests.harness.app_module import fresh_module
from tests.integration.doctor_apps import found
from tests.integration.stage import Stage, open_stage, wait_until

APP = "tests.apps.switch"
OFF = {SWITCH: "0"}
NO_STORE = "redis://127.0.0.1:1/0"


@pytest.fixture
def stage(redis_url: str, tmp_path: Path) -> Iterator[Stage]:
    with open_stage(redis_url, tmp_path, APP, {"LOCK_URL": redis_url}) as stage:
        yield stage


def numbers(stage: Stage, key: str) -> list[int]:
    """The calls of ``key`` whose bodies have begun, in that order."""
    return [start.data["number"] for start in stage.starts(key)]


def begun(stage: Stage, key: str, count: int) -> None:
    wait_until(lambda: len(stage.starts(key)) == count, f"{count} bodies of {key} have begun")


def calls_in_store(stage: Stage) -> int:
    """The number of calls that are in the queues of keys."""
    return sum(map(stage.redis.zcard, stage.redis.keys("csl:{*}:queue|*")))


@pytest.mark.slow
@pytest.mark.parametrize("env", [{"ENABLED": "0"}, OFF], ids=["setting", "environment"])
def test_a_worker_that_is_off_starts_without_a_store_and_runs_its_tasks_as_plain_ones(
    stage: Stage, env: dict[str, str]
) -> None:
    """Also those that need a store: on_conflict="queue" and debounce."""
    # With the locks on, this setting stops the worker, since the order would be in no store.
    without = {**env, "LOCK_URL": NO_STORE}
    worker = stage.worker(concurrency=3, env=without)
    assert "the locks are off" in worker.log
    with fresh_module(APP, {**stage.environment, **without}) as app:
        first = [app.locked.delay("a", number, gate="a") for number in range(2)]
        begun(stage, "a", 2)
        stage.open("a")
        assert [result.get(timeout=30) for result in first] == [0, 1]
        for task in (app.queued, app.once, app.debounced):
            results = [task.delay(task.name, number) for number in range(2)]
            assert [result.get(timeout=30) for result in results] == [0, 1]
        assert app.retrying.delay("r", 7).get(timeout=30) == 7
    assert sorted(numbers(stage, "r")) == [0, 1, 2]
    assert "unreachable" not in worker.log
    assert stage.redis.keys("csl:*") == []


def test_a_producer_that_is_off_publishes_plain_messages(stage: Stage) -> None:
    with fresh_module(APP, {**stage.environment, **OFF, "LOCK_URL": NO_STORE}) as app:
        tasks = (app.locked, app.queued, app.once, app.debounced)
        sent = [task.delay("p", number) for task in tasks for number in range(2)]
        sent.append(claim_and_send(app.app, "other", singleton={"unique": "until_done"}))
        once = {"args": ["p"], "key": "p", "singleton": {"unique": "until_done"}}
        sent.append(claim_and_send(app.app, app.once.name, **once))
    messages = stage.redis.lrange("celery", 0, -1)
    assert len(messages) == len(sent)
    assert [text for text in messages if HEADER in text] == []
    assert stage.redis.keys("csl:*") == []


def test_a_task_alone_is_off(stage: Stage) -> None:
    stage.worker(concurrency=3)
    app = stage.app
    results = [app.off.delay("a", number, gate="a") for number in range(2)]
    begun(stage, "a", 2)
    stage.open("a")
    assert [result.get(timeout=30) for result in results] == [0, 1]
    app.locked.delay("b", 0, gate="b")
    begun(stage, "b", 1)
    assert is_skipped(app.locked.delay("b", 1).get(timeout=30))
    stage.open("b")


@pytest.mark.slow
def test_a_queue_goes_on_in_order_at_workers_that_are_off(stage: Stage) -> None:
    """Each call from before the switch runs as a plain one, and makes room for the next."""
    on = stage.worker(concurrency=1)
    results = [stage.app.queued.delay("q", number, gate="q") for number in range(4)]
    begun(stage, "q", 1)
    on.kill_group()
    assert calls_in_store(stage) == 4
    stage.worker(concurrency=2, env=OFF)
    stage.open("q")
    # It ends the dead worker's call as lost, and publishes the next.
    stage.worker(concurrency=1, args=["-Q", "of no call"])
    for result in results[1:]:
        result.get(timeout=60)
    assert numbers(stage, "q") == [0, 1, 2, 3]
    wait_until(lambda: calls_in_store(stage) == 0, "the queue is empty")


def test_the_queue_and_the_claim_of_a_call_end_with_its_run_at_a_worker_that_is_off(
    stage: Stage,
) -> None:
    """Also those of a call that is retried: its retry is a plain message."""
    results = [stage.app.retrying.delay(key, 5) for key in ("a", "b")]
    queued = [stage.app.queued.delay("q", number) for number in range(3)]
    assert calls_in_store(stage) == 5
    stage.worker(concurrency=1, env=OFF)
    assert [result.get(timeout=60) for result in results] == [5, 5]
    assert [result.get(timeout=60) for result in queued] == [0, 1, 2]
    assert numbers(stage, "q") == [0, 1, 2]
    assert numbers(stage, "a") == [0, 1, 2]
    wait_until(lambda: calls_in_store(stage) == 0, "the queues are empty")
    wait_until(lambda: not list(inspection.held_keys(stage.app.app)), "the claims are free")


@pytest.mark.slow
def test_workers_that_are_on_keep_the_order_beside_one_that_is_off(stage: Stage) -> None:
    results = [stage.app.queued.delay("q", number) for number in range(20)]
    stage.worker(concurrency=2, env=OFF)
    stage.worker(concurrency=2)
    assert [result.get(timeout=60) for result in results] == list(range(20))
    assert numbers(stage, "q") == list(range(20))
    wait_until(lambda: calls_in_store(stage) == 0, "the queue is empty")


@pytest.mark.slow
def test_without_the_package_a_plain_worker_runs_only_the_calls_whose_message_is_in_the_broker(
    stage: Stage,
) -> None:
    """The others wait in the store, for a worker with the package, or to be cancelled."""
    results = [stage.app.queued.delay("q", number) for number in range(3)]
    once = stage.app.once.delay("o", 1)
    latest = [stage.app.debounced.delay("d", number) for number in range(2)]
    removed = stage.worker(concurrency=1, env={"REMOVED": "1"})
    assert [results[0].get(timeout=30), once.get(timeout=30)] == [0, 1]
    # Its newest arguments are in the store: the plain task runs with its first ones.
    assert latest[-1].get(timeout=30) == 0
    assert [result.state for result in results[1:]] == ["PENDING", "PENDING"]
    removed.kill_group()
    stage.worker(concurrency=1, env=OFF)
    stage.worker(concurrency=1, args=["-Q", "of no call"])
    # Not before the deadline of the first message.
    key, queue = stage.app.queued.lock_key("q"), Runtime.of(stage.app.app).store.call_queue
    assert queue is not None
    queue.defer(key, seconds=0.0, timeout=5.0)
    assert [result.get(timeout=60) for result in results[1:]] == [1, 2]


def test_the_doctor_says_that_the_locks_are_off(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    [finding] = found(stage.app.app, "switch")
    assert "enabled=False): switch.off" in finding.text
    monkeypatch.setenv(SWITCH, "off")
    [finding] = found(stage.app.app, "switch")
    assert f"({SWITCH} in the environment)" in finding.text
