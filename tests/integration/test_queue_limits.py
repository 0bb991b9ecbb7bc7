"""Calls of one key that begin in order, three at a time, with real workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from celery.exceptions import WorkerLostError

from celery_singleton_lock import inspection
from celery_singleton_lock.core.keyspace import CallQueueNames
from celery_singleton_lock.key_queue.inspection import calls_in_queue
from tests.harness.bodies import power_cut
from tests.harness.processes import kill_process
from tests.harness.worker import CeleryWorker
from tests.integration.conftest import Consume
from tests.integration.key_queue import APP as APP
from tests.integration.key_queue import also_consume, begun, ended, numbers
from tests.integration.stage import Stage, wait_until


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=5)


@pytest.fixture(params=["three_early", "three_late"])
def task(stage: Stage, request: pytest.FixtureRequest) -> Any:
    return getattr(stage.app, request.param)


def in_queue(stage: Stage, task: Any, name: str) -> int:
    return int(stage.redis.zcard(CallQueueNames.of(task.lock_key(name, 0)).queue))


def gated(stage: Stage, task: Any, name: str, some: Sequence[int]) -> list[Any]:
    """Calls whose bodies end when the gate of their number is opened."""
    return [task.delay(name, number, gate=f"{name}-{number}") for number in some]


def all_begun(stage: Stage, name: str, count: int) -> list[int]:
    """Calls whose bodies have begun. Those granted within milliseconds may begin in any order."""
    wait_until(lambda: len(numbers(stage, name)) >= count, f"{count} bodies have begun")
    return sorted(numbers(stage, name))


def most_at_once(stage: Stage, name: str) -> int:
    runs = stage.journal.runs(name)
    return max(sum(other.begin <= run.begin < other.end for other in runs) for run in runs)


def test_three_calls_of_a_key_run_at_a_time_and_begin_in_order(
    stage: Stage, worker: CeleryWorker, task: Any, name: str
) -> None:
    results = gated(stage, task, name, range(6))
    assert all_begun(stage, name, 3) == [0, 1, 2]
    assert task.delay(f"{name}-other", 0).get(timeout=30) == 0, "two processes are free"
    for ends, begins in ((1, 3), (0, 4), (3, 5)):
        stage.open(f"{name}-{ends}")
        begun(stage, name, begins)
    assert numbers(stage, name)[3:] == [3, 4, 5]
    for number in (2, 4, 5):
        stage.open(f"{name}-{number}")
    assert ended(results) == [*range(6)]
    wait_until(lambda: not in_queue(stage, task, name), "the queue is empty")


def test_many_short_calls_all_run_and_never_four_at_once(
    stage: Stage, worker: CeleryWorker, task: Any, name: str
) -> None:
    results = [task.delay(name, number) for number in range(60)]
    assert ended(results) == [*range(60)]
    assert sorted(numbers(stage, name)) == [*range(60)]
    assert most_at_once(stage, name) <= 3
    wait_until(lambda: not in_queue(stage, task, name), "the queue is empty")


def test_a_retry_keeps_its_slot_and_the_calls_beside_it_go_on(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task = stage.app.three_late
    first = task.delay(name, 0, again=True)
    others = [task.delay(name, number) for number in range(1, 5)]
    assert [first.get(timeout=30), *ended(others)] == [*range(5)]
    assert sorted(numbers(stage, name)) == [0, 0, 1, 2, 3, 4]


def test_calls_go_on_when_the_process_of_one_dies(
    stage: Stage, worker: CeleryWorker, task: Any, name: str
) -> None:
    results = gated(stage, task, name, range(4))
    assert all_begun(stage, name, 3) == [0, 1, 2]
    pid = begun(stage, name, 1)
    stage.journal.death(pid, kill_process(pid))
    if task is stage.app.three_early:
        begun(stage, name, 3)
        with pytest.raises(WorkerLostError):
            results.pop(1).get(timeout=30)
    else:
        wait_until(lambda: numbers(stage, name).count(1) == 2, "it runs again")
        assert numbers(stage, name)[3:] == [1]
    for number in range(4):
        stage.open(f"{name}-{number}")
    assert len(ended(results)) == len(results)


def test_no_call_is_lost_with_a_whole_worker(
    stage: Stage, worker: CeleryWorker, name: str, consume: Consume
) -> None:
    task, other = stage.app.three_late, consume(name, concurrency=3)
    results = [
        task.apply_async((name, number, f"{name}-{number}"), queue=name) for number in range(5)
    ]
    assert all_begun(stage, name, 3) == [0, 1, 2]
    power_cut(other, stage.journal)
    for number in range(5):
        stage.open(f"{name}-{number}")
    also_consume(stage, worker, name)
    assert ended(results) == [*range(5)]
    assert sorted(numbers(stage, name)) == [0, 0, 1, 1, 2, 2, 3, 4]


def test_the_list_of_a_queue_says_which_calls_run(
    stage: Stage, worker: CeleryWorker, task: Any, name: str
) -> None:
    results = gated(stage, task, name, range(5))
    assert all_begun(stage, name, 3) == [0, 1, 2]
    found = [*calls_in_queue(stage.app.app, task.lock_key(name, 0))]
    assert [call.state for call in found] == ["running"] * 3 + ["waiting"] * 2
    text = str(inspection.explain(stage.app.app, results[3].id))
    assert "It waits in the queue of" in text
    assert "as fourth" in text
    assert inspection.cancel(stage.app.app, found[3])
    for number in range(5):
        stage.open(f"{name}-{number}")
    assert [results[number].get(timeout=30) for number in (0, 1, 2, 4)] == [0, 1, 2, 4]
