"""``debounce``: one run after the last call, with its arguments."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from celery_singleton_lock.core.events import EventName
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, open_stage, wait_until
from tests.integration.test_newest import kept, publish_1000, values

APP = "tests.apps.newest"
# Seconds, of the tasks of the app.
DEBOUNCE, MOST = 1.0, 3.0
# Seconds that a run may come late on a busy machine. None is early.
LATE = 1.5


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=4)


def messages(stage: Stage, name: str) -> int:
    """The messages for ``name`` in the broker, delivered or not."""
    texts = [*stage.redis.lrange("celery", 0, -1), *stage.redis.hvals("unacked")]
    return sum(name in text for text in texts)


def test_a_call_runs_after_the_last_one_with_its_arguments(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    # Longer than that of the app: a call that comes later than this would be another message.
    debounce = 4.0
    task, results = stage.app.debounced, []
    for value in range(4):
        called = time.monotonic()
        options: Any = {"debounce": debounce, "debounce_max": 60}
        results.append(task.apply_async((name, value), singleton=options))
        time.sleep(0.3)  # the pause between the calls is the subject
    assert len({result.id for result in results}) == 1
    # It was due before, and waits again for what is left.
    worker.wait_for_event(EventName.REQUEUED, task_id=results[0].id)
    assert results[0].get(timeout=20) == 3
    [start] = stage.starts(name)
    assert debounce <= start.at - called <= debounce + LATE
    assert start.data["value"] == 3
    wait_until(lambda: not kept(stage, name), "the arguments are deleted")


@pytest.mark.slow
def test_calls_that_never_pause_run_after_debounce_max(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task, first = stage.app.debounced, time.monotonic()
    seen = []
    while not stage.starts(name):
        last = task.delay(name, time.monotonic() - first)
        seen.append(messages(stage, name))
        time.sleep(0.05)  # the pause between the calls is the subject
    [start] = stage.starts(name)[:1]
    assert MOST - 0.1 <= start.at - first <= MOST + LATE
    assert start.data["value"] > MOST - 0.5, "the newest arguments"
    assert max(seen) <= 2, "one message, and its copy for a moment while it is requeued"
    last.get(timeout=20)


def test_a_single_call_runs_after_debounce(stage: Stage, worker: CeleryWorker, name: str) -> None:
    called = time.monotonic()
    assert stage.app.debounced.delay(name, 1).get(timeout=20) == 1
    assert DEBOUNCE <= stage.starts(name)[0].at - called <= DEBOUNCE + LATE


@pytest.mark.slow
def test_of_1000_calls_from_4_processes_one_runs_after_the_last(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    publish_1000(stage, stage.app.debounced, name)
    called = time.monotonic()
    last = stage.app.debounced.delay(name, "last")
    assert last.get(timeout=60) == "last"
    wait_until(lambda: not kept(stage, name), "all is done")
    after = [start.data["value"] for start in stage.starts(name) if start.at > called]
    assert after == ["last"]
    assert values(stage, name)[-1] == "last"
    assert len(stage.starts(name)) <= 4, "at most one in three seconds"


@pytest.mark.slow
def test_a_debounced_call_survives_the_kills_of_its_workers(
    redis_url: str, tmp_path: Path, name: str
) -> None:
    with open_stage(redis_url, tmp_path, APP, {"VISIBILITY_TIMEOUT": "2"}) as stage:
        later: Any = {"debounce": 5, "debounce_max": 60}
        for value in range(3):
            result = stage.app.debounced_late.apply_async(
                (name, value), {"gate": name}, singleton=later
            )
        called = time.monotonic()
        doomed = stage.worker(concurrency=1)
        doomed.wait_for_log(rf"{result.id}\] received")
        doomed.kill_group()
        worker = stage.worker(concurrency=1)
        wait_until(lambda: stage.starts(name), "it runs")
        worker.kill_group()  # in its body
        assert stage.starts(name)[0].at - called > 4
        stage.worker(concurrency=1)
        wait_until(lambda: len(stage.starts(name)) == 2, "it runs again")
        stage.open(name)
        assert result.get(timeout=30) == 2
        assert values(stage, name) == [2, 2]
        wait_until(lambda: not kept(stage, name), "the arguments are deleted")
        wait_until(lambda: not messages(stage, name), "the message is acknowledged")


@pytest.mark.slow
@pytest.mark.parametrize("edits", [0, 2], ids=["one call", "edits"])
def test_a_debounce_that_is_longer_than_the_visibility_timeout_runs_once_and_in_time(
    redis_url: str, tmp_path: Path, name: str, edits: int
) -> None:
    with open_stage(redis_url, tmp_path, APP, {"VISIBILITY_TIMEOUT": "2"}) as stage:
        workers = [stage.worker(concurrency=1) for _ in range(2)]
        later: Any = {"debounce": 6, "debounce_max": 60}
        for value in range(edits + 1):
            time.sleep(3 if value else 0)  # the pause between the calls is the subject
            called = time.monotonic()
            stage.app.debounced.apply_async((name, value), singleton=later)
        wait_until(lambda: stage.starts(name), "it runs")
        assert 6 <= stage.starts(name)[0].at - called <= 6 + LATE
        wait_until(lambda: not messages(stage, name), "the message is acknowledged")
        assert values(stage, name) == [edits]
        # No countdown may reach the visibility timeout: the broker would deliver the message again.
        requeue = [event for worker in workers for event in worker.events(EventName.REQUEUED)]
        delays = [float(event.fields["delay"]) for event in requeue]
        assert max(delays) <= 2 / 3 + 0.001
        assert len(delays) >= 8


def test_arguments_of_a_message_that_is_due_late_are_kept_until_then(
    stage: Stage, name: str
) -> None:
    month = 30 * 86400
    for value in (1, 2):
        # In a queue that no worker reads.
        stage.app.debounced.apply_async(
            (name, value), queue=name, singleton={"debounce": month, "debounce_max": None}
        )
        [key] = kept(stage, name)
        assert stage.redis.ttl(key) > month


def test_a_call_without_debounce_runs_at_once(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    called = time.monotonic()
    off: Any = {"debounce": None, "debounce_max": None}
    stage.app.debounced.apply_async((name, 1), singleton=off).get(timeout=20)
    stage.app.debounced.apply_async((name, 2), singleton=False).get(timeout=20)
    assert time.monotonic() - called < DEBOUNCE
    stage.app.newest.apply_async((name, 3), singleton={"debounce": 1}).get(timeout=20)
    assert time.monotonic() - called > DEBOUNCE


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"countdown": 3}, "Leave countdown out"),
        ({"eta": datetime.now(UTC) + timedelta(hours=1)}, "Leave eta out"),
        ({"expires": 2}, "Give a later expires, or none"),
        (
            {"expires": 60, "singleton": {"debounce_max": None}},
            "Give a debounce_max, or no expires",
        ),
    ],
)
def test_another_time_for_a_debounced_call_is_refused(
    stage: Stage, name: str, options: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ValueError, match=remedy):
        stage.app.debounced.apply_async((name,), **options)
    assert messages(stage, name) == 0
