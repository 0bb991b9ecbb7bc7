"""Retries: every attempt runs, the key stays reserved, conflicts don't count as retries."""

from __future__ import annotations

from typing import Any

import pytest

from celery_singleton_lock import is_skipped
from celery_singleton_lock.core.events import EventName
from tests.harness.journal import runs
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, wait_until


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=4)


def attempts(stage: Stage, name: str) -> list[int]:
    """The user's retry counts that the bodies of ``name`` saw, in the order of their starts."""
    return [start.data["retries"] for start in stage.starts(name)]


def reserved(stage: Stage, name: str) -> None:
    wait_until(lambda: stage.kind(name) == "r", f"{name} is reserved")


def freed(stage: Stage, name: str) -> None:
    wait_until(lambda: stage.kind(name) is None, f"{name} is free")


def overlaps_of(stage: Stage, name: str) -> int:
    return sum(first.key == name for first, _ in stage.journal.overlaps())


@pytest.mark.parametrize("task", ["flaky", "flaky_late"])
def test_all_attempts_run_and_the_key_is_free_after_the_last(
    stage: Stage, worker: CeleryWorker, name: str, task: str
) -> None:
    result = getattr(stage.app, task).delay(name, attempts=4)
    assert result.get(timeout=20) == 3
    assert attempts(stage, name) == [0, 1, 2, 3]
    assert {start.task_id for start in stage.starts(name)} == {result.id}
    freed(stage, name)


def test_autoretry_runs_all_attempts(stage: Stage, worker: CeleryWorker, name: str) -> None:
    assert stage.app.stubborn.delay(name, failures=2).get(timeout=20) == 2
    assert attempts(stage, name) == [0, 1, 2]
    freed(stage, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "options"),
    [("flaky", {"attempts": 2, "countdown": 2}), ("slowly_stubborn", {})],
    ids=["retry", "autoretry"],
)
def test_duplicates_are_skipped_while_a_retry_is_due(
    stage: Stage, worker: CeleryWorker, name: str, task: str, options: dict[str, Any]
) -> None:
    result = getattr(stage.app, task).delay(name, **options)
    reserved(stage, name)
    # The reservation outlives the countdown by the time the message may spend in the queue.
    assert stage.redis.pttl(stage.key(name)) > 2_000
    duplicates = [task.delay(name) for task in (stage.app.work, stage.app.flaky) for _ in range(3)]
    values = [duplicate.get(timeout=20) for duplicate in duplicates]
    assert all(map(is_skipped, values))
    assert {value["holder"]["task_id"] for value in values} == {result.id}
    assert stage.kind(name) == "r", "the next attempt began before the duplicates came: no proof"
    assert result.get(timeout=20) == 1
    assert attempts(stage, name) == [0, 1]
    freed(stage, name)


def test_a_due_retry_that_meets_a_duplicate_runs_after_it_with_its_own_retry_count(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    result = stage.app.generous.delay(name, countdown=1)
    stage.journal.wait_for_ends(1, key=name)
    freed(stage, name)
    duplicate = stage.occupy(name)
    # max_retries is 1: a conflict that counted as a retry would end the task.
    worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=1)
    stage.open(name)
    assert duplicate.get(timeout=20) == name
    assert result.get(timeout=20) == 1
    assert attempts(stage, name) == [0, 0, 1]
    assert [run.error for run in runs(stage.journal.records(), key=name)] == ["Retry", None, None]
    assert overlaps_of(stage, name) == 0


def test_conflicts_before_the_first_attempt_leave_the_users_retries_alone(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    blocker = stage.occupy(name)
    result = stage.app.patient.delay(name, retry_once=True)
    for sequence in (1, 2, 3):
        worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=sequence)
    stage.open(name)
    assert blocker.get(timeout=20) == name
    # Its max_retries is 1, and both attempts run.
    assert result.get(timeout=20) == 1
    assert attempts(stage, name) == [0, 0, 1]


@pytest.mark.parametrize("task", ["flaky", pytest.param("flaky_late", marks=pytest.mark.slow)])
def test_sixty_of_sixty_retries_without_countdown_run(
    stage: Stage, worker: CeleryWorker, name: str, task: str
) -> None:
    # Published from inside the body, and taken by an idle process while that body still runs.
    # One after the other: in a queue of sixty, each retry would come long after that.
    names = [f"{name}-{n}" for n in range(60)]
    values = [getattr(stage.app, task).delay(one).get(timeout=20) for one in names]
    assert values == [1] * 60
    for one in names:
        assert attempts(stage, one) == [0, 1]
        assert overlaps_of(stage, one) == 0
    requeue = worker.events(EventName.REQUEUED)
    early = [event for event in requeue if f":{name}-" in event.fields["key"]]
    assert early, "no retry came before its predecessor's end: no proof"


def test_a_retry_with_other_arguments_takes_the_key_of_those(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    other = f"{name}-next"
    result = stage.app.moving.delay(name, other, 2, gate=name)
    stage.journal.wait_for_ends(1, key=name)
    freed(stage, name)  # no run will release it
    assert stage.app.work.delay(name).get(timeout=20) == name
    assert stage.app.work.delay(other).get(timeout=20) == other
    assert stage.starts(other)[-1].task_id != result.id, "the retry came first: no proof"
    start = stage.journal.wait_for_starts(2, key=other)[-1]
    assert (start.task_id, start.data["held"]) == (result.id, stage.key(other))
    assert is_skipped(stage.app.work.delay(other).get(timeout=20))
    stage.open(name)
    assert result.get(timeout=20) == other
    freed(stage, other)


def test_a_retry_with_other_arguments_of_the_same_key_keeps_it(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    result = stage.app.moving.delay(name, name, 2)
    reserved(stage, name)
    assert is_skipped(stage.app.work.delay(name).get(timeout=20))
    assert stage.kind(name) == "r", "the next attempt began before the duplicate came: no proof"
    assert result.get(timeout=20) == name
    assert attempts(stage, name) == [0, 1]


def test_a_calls_own_options_hold_for_its_retries(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    result = stage.app.flaky.apply_async((name,), {"attempts": 3}, singleton={"ttl": 17})
    assert result.get(timeout=20) == 2
    assert [start.data["ttl"] for start in stage.starts(name)] == [17, 17, 17]
