"""Tasks that publish themselves again under their own id, beside the same in plain Celery."""

from __future__ import annotations

from uuid import uuid4

import pytest

from celery_singleton_lock import hold
from celery_singleton_lock.core.events import EventName
from tests.harness.deliveries import RedisBroker
from tests.harness.journal import overlaps
from tests.harness.keys import EVERY_NAME
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, wait_until

APP = "tests.apps.headers"
SLOW = pytest.mark.slow
WAYS = ["apply_async", "with headers", "signature", "send_task", "send_task with headers", "chain"]


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=4)


def runs(stage: Stage, name: str) -> list[str]:
    return [run.task_id for run in stage.journal.runs(name)]


def overlap(stage: Stage, name: str) -> bool:
    return bool(overlaps(r for r in stage.journal.records() if r.key == name))


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("task", ["plain_again", "again_late", "again_early"])
@pytest.mark.parametrize("first", ["apply_async", pytest.param("send_task", marks=SLOW)])
def test_a_task_that_requeues_itself_twice_runs_three_times(
    stage: Stage, worker: CeleryWorker, name: str, first: str, task: str, how: str
) -> None:
    if first == "apply_async":
        result = getattr(stage.app, task).apply_async((name, 2, how))
    else:
        result = stage.app.app.send_task(task, (name, 2, how))
    assert result.get(timeout=20) == 0
    assert runs(stage, name) == [result.id] * 3
    assert task == "plain_again" or not overlap(stage, name)


@pytest.mark.parametrize("task", ["plain_returning", "returning_late"])
def test_a_task_that_requeues_itself_and_returns_runs_three_times(
    stage: Stage, worker: CeleryWorker, name: str, task: str
) -> None:
    getattr(stage.app, task).delay(name, 2, "apply_async")
    wait_until(lambda: len(runs(stage, name)) == 3, "the third has run", 20)


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_what_was_requeued_can_requeue_itself_too(
    stage: Stage, worker: CeleryWorker, name: str, how: str
) -> None:
    """Its own messages must not be mistaken for copies of it."""
    with hold(name, scope=stage.app.NAMES, app=stage.app.app):
        result = stage.app.again_late.apply_async(
            (name, 2, how), singleton={"on_conflict": stage.app.SOON}
        )
        worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=2)
    assert result.get(timeout=20) == 0
    assert runs(stage, name) == [result.id] * 3


@pytest.mark.slow
@pytest.mark.parametrize("how", ["apply_async", "retry"])
def test_a_message_that_could_not_be_sent_at_first_is_the_next_attempt(
    stage: Stage, worker: CeleryWorker, name: str, how: str
) -> None:
    """Were the failure counted, it would be another call, which is skipped or has no claim."""
    result = stage.app.persistent_once.delay(name, 1, how, name)
    worker.wait_for_event(EventName.REQUEUED, task_id=result.id, reason="earlier")
    stage.open(name)
    wait_until(lambda: len(runs(stage, name)) == 2, "the second has run", 20)
    assert not overlap(stage, name)
    wait_until(lambda: not stage.redis.keys(f"{EVERY_NAME}{name}*"), "nothing of it is left")


@pytest.mark.parametrize("task", ["plain_numbered", "numbered"])
def test_all_that_a_task_publishes_under_one_id_runs(
    stage: Stage, worker: CeleryWorker, name: str, task: str
) -> None:
    result = getattr(stage.app, task).delay(name, 0, 3)
    wait_until(lambda: len(runs(stage, name)) == 4, "all four have run", 20)
    assert set(runs(stage, name)) == {result.id}


@pytest.mark.parametrize("task", ["plain_again", "again_late"])
def test_messages_sent_by_name_under_one_id_all_run(
    stage: Stage, worker: CeleryWorker, name: str, task: str
) -> None:
    """They share only the id, and none is a copy of another."""
    task_id = str(uuid4())
    for number in range(3):
        stage.app.app.send_task(task, (name, 0, ""), task_id=task_id)
        wait_until(lambda n=number: len(runs(stage, name)) == n + 1, "it has run", 20)


def test_messages_sent_by_name_under_one_id_at_once_all_run(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task_id = str(uuid4())
    for _ in range(3):
        stage.app.app.send_task("again_late", (name, 0, "", name), task_id=task_id)
    worker.wait_for_event(EventName.REQUEUED, task_id=task_id)
    stage.open(name)
    wait_until(lambda: len(runs(stage, name)) == 3, "all three have run")
    assert not overlap(stage, name)


@pytest.mark.parametrize("how", ["fixed id", "own id", "replace"])
def test_what_a_plain_task_with_a_fixed_id_publishes_runs_each_time(
    stage: Stage, worker: CeleryWorker, name: str, how: str
) -> None:
    """As a beat entry with ``options={"task_id": ...}``."""
    for number in range(3):
        stage.app.dispatch.apply_async((name, how), task_id=name)
        wait_until(lambda n=number: len(runs(stage, name)) == n + 1, "it has run", 20)


@pytest.mark.parametrize("how", ["fixed id", "own id", "replace"])
def test_what_a_redelivered_plain_task_publishes_again_is_dropped(
    stage: Stage, worker: CeleryWorker, name: str, how: str
) -> None:
    stage.app.dispatch.apply_async((name, how, name), task_id=name)
    wait_until(lambda: len(runs(stage, name)) == 1, "what it published first has run", 20)
    RedisBroker(stage.redis).deliver_again(name)

    def is_dropped() -> bool:
        dropped = worker.events(EventName.DROPPED, reason="done")
        return any(one.task == "late" and one.task_id.startswith(name) for one in dropped)

    wait_until(is_dropped, "the copy is dropped")
    assert len(runs(stage, name)) == 1
    stage.open(name)


def test_a_late_copy_of_a_message_that_requeued_itself_is_dropped(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    result = stage.app.again_late.delay(name, 1, "apply_async", name)
    stage.journal.wait_for_starts(1, key=name)
    RedisBroker(stage.redis).deliver_again(result.id)
    worker.wait_for_event(EventName.REQUEUED, task_id=result.id, reason="delivered-twice")
    stage.open(name)
    assert result.get(timeout=20) == 0
    worker.wait_for_event(EventName.DROPPED, task_id=result.id)
    assert runs(stage, name) == [result.id] * 2


def test_a_claim_stays_with_a_task_that_requeues_itself(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    result = stage.app.once_late.delay(name, 2, "apply_async")
    assert result.get(timeout=20) == 0
    assert runs(stage, name) == [result.id] * 3
    wait_until(lambda: not stage.redis.keys(f"{EVERY_NAME}{name}*"), "nothing of it is left")
