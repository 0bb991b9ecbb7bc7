"""on_conflict="cancel_running": of the calls for one key, the newest runs."""

from __future__ import annotations

import re
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import pytest
from celery import chain
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import LockConflict
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.keyspace import Keyspace
from tests.harness.listener import listening
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, open_stage, wait_until

pytestmark = pytest.mark.slow

APP = "tests.apps.latest"


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=4)


def begin(stage: Stage, task: Any, name: str, **options: Any) -> Any:
    """A call whose body runs when this returns."""
    return began(stage, task.delay(name, **options))


def began(stage: Stage, result: Any) -> Any:
    stage.journal.wait_for(
        lambda records: [r for r in records if r.event == "start" and r.task_id == result.id],
        what=f"{result.id} runs",
    )
    return result


def is_cancelled_by(newer: Any, older: Any) -> bool:
    why = rf"cancelled by the newer call {newer.id}, made \d+\.\d+ s later"
    with pytest.raises(TaskRevokedError, match=why):
        older.get(timeout=30)
    return bool(older.state == "REVOKED")


def overlaps(stage: Stage, name: str) -> list[Any]:
    return [pair for pair in stage.journal.overlaps() if pair[0].key == name]


def runs(stage: Stage, name: str) -> list[str]:
    return [run.task_id for run in stage.journal.runs(name)]


@pytest.mark.parametrize("task", ["build", "early", "unique", "hasty"])
def test_a_newer_call_ends_the_running_one_and_runs_after_it(
    stage: Stage, worker: CeleryWorker, name: str, task: str
) -> None:
    kind = getattr(stage.app, task)
    older = begin(stage, kind, name)
    with stage.redis.monitor() as monitor:
        newer = kind.delay(name, number=2, seconds=0)
        assert newer.get(timeout=30) == 2
        end = f"ECHO {newer.id}"
        stage.redis.echo(newer.id)
        seen = list(takewhile(lambda one: one["command"] != end, iter(monitor.next_command, None)))
    assert is_cancelled_by(newer, older)
    assert runs(stage, name) == [older.id, newer.id]
    assert overlaps(stage, name) == []
    first, _ = stage.journal.runs(name)
    assert first.error == "LeaseInterrupt"  # else it would last a minute
    # It is woken by the release, unless min_hold delays it.
    queue = Keyspace.wait_queue(kind.lock_key(name))
    wakes = [one["command"] for one in seen if one["command"].startswith(f"RPUSH {queue}! ")]
    assert len(wakes) == (0 if task == "early" else 1)
    cancelled = worker.wait_for_event(
        EventName.CANCELLED, task_id=older.id, by=newer.id, started=True
    )
    assert re.fullmatch(r"\d+\.\d+", cancelled.fields["later"])
    worker.wait_for_event(
        EventName.CONFLICT, task_id=newer.id, outcome="wait", reason="the holder is asked"
    )
    wait_until(lambda: stage.redis.exists(kind.lock_key(name)) == 0, "the key is free")


def test_a_third_call_takes_the_place_of_a_second_that_has_not_started(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    holder = begin(stage, stage.app.steady, name, how="told")
    second = stage.app.build.delay(name, number=2)
    worker.wait_for_event(EventName.CONFLICT, task_id=second.id)
    third = stage.app.build.delay(name, number=3, seconds=0)
    assert is_cancelled_by(third, second)
    stage.journal.note("end", key=name)  # the holder had not ended: the second call was woken
    assert third.get(timeout=30) == 3
    assert holder.get(timeout=30) == 0
    assert runs(stage, name) == [holder.id, third.id]


def test_an_older_call_that_arrives_late_does_not_run(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    older = stage.app.build.apply_async((name, 1), countdown=2)
    newer = stage.app.build.delay(name, number=2, seconds=0)
    assert newer.get(timeout=30) == 2
    assert is_cancelled_by(newer, older)
    assert runs(stage, name) == [newer.id]


def test_a_retrys_reservation_is_replaced(stage: Stage, worker: CeleryWorker, name: str) -> None:
    countdown = 8.0  # the time that the machine has for the newer call
    retrying = begin(stage, stage.app.build, name, how="retry", seconds=countdown)
    key = stage.app.build.lock_key(name)
    wait_until(lambda: (stage.redis.get(key) or "?")[0] == "r", "the key is reserved")
    newer = stage.app.build.delay(name, number=2, seconds=0)
    assert newer.get(timeout=30) == 2
    assert is_cancelled_by(newer, retrying)
    assert runs(stage, name) == [retrying.id, newer.id]
    reserved, second = stage.journal.runs(name)
    assert second.begin - reserved.end < countdown, "it did not wait for the retry"


def test_the_reservation_for_a_retry_without_the_option_is_kept(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    retrying = begin(stage, stage.app.steady, name, how="retry", seconds=1)
    newer = stage.app.build.delay(name, number=2, seconds=0)
    assert newer.get(timeout=30) == 2
    assert retrying.get(timeout=30) == 0
    assert runs(stage, name) == [retrying.id, retrying.id, newer.id]


def test_a_body_that_swallows_the_interruption_is_waited_for_and_ends_revoked(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    stubborn = begin(stage, stage.app.build, name, how="swallow", seconds=3)
    hasty = stage.app.hasty.delay(name)
    with pytest.raises(LockConflict, match=r"waiting for 1\.5 s was not enough"):
        hasty.get(timeout=30)
    newer = stage.app.build.delay(name, number=2, seconds=0)
    assert newer.get(timeout=30) == 2
    with pytest.raises(TaskRevokedError, match=rf"cancelled by the newer call {hasty.id}"):
        stubborn.get(timeout=30)
    assert runs(stage, name) == [stubborn.id, newer.id]
    assert overlaps(stage, name) == []


def test_a_holder_without_the_option_is_not_cancelled(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    holder = begin(stage, stage.app.steady, name, number=1, seconds=3)
    with pytest.raises(LockConflict, match="waiting for"):
        stage.app.hasty.delay(name).get(timeout=30)
    assert holder.get(timeout=30) == 1


def test_a_duplicate_within_a_period_cancels_nothing(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    first = begin(stage, stage.app.periodic, name, number=1, seconds=3)
    # In a canvas a duplicate is published, and refused when it runs.
    chained = chain(stage.app.periodic.si(name, 2), stage.app.after.s()).apply_async()
    with pytest.raises(LockConflict):
        chained.get(timeout=30)
    assert first.get(timeout=30) == 1
    assert runs(stage, name) == [first.id]


def test_a_chain_stops_at_a_cancelled_link(stage: Stage, worker: CeleryWorker, name: str) -> None:
    chained = chain(stage.app.build.si(name, 1), stage.app.after.s()).apply_async()
    began(stage, chained.parent)
    newer = stage.app.build.delay(name, number=2, seconds=0)
    assert newer.get(timeout=30) == 2
    with pytest.raises(TaskRevokedError):
        chained.get(timeout=30)
    assert [r for r in stage.journal.records() if r.data.get("text") == "after"] == []


def test_the_store_is_asked_once_per_within_and_only_for_such_leases(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    names = [f"{name}-steady", f"{name}-0", f"{name}-1"]
    tasks = [stage.app.steady, stage.app.build, stage.app.build]
    results = [
        begin(stage, task, each, how="told") for task, each in zip(tasks, names, strict=True)
    ]
    steady, *newest = [Keyspace.newest_call(stage.app.build.lock_key(each)) for each in names]
    looks: dict[str, list[float]] = {key: [] for key in newest}
    with stage.redis.monitor() as monitor:
        while min(map(len, looks.values())) < 11:
            one = monitor.next_command()
            assert steady not in one["command"]
            for key in newest:
                if key in one["command"]:
                    assert one["command"] == f"GET {key}"
                    looks[key].append(one["time"])
    # Each child process looks for its own lease. A look that is late is followed by an early one,
    # so most pauses count, not each.
    for times in looks.values():
        assert median(b - a for a, b in pairwise(times)) > 0.9 * stage.app.WITHIN
    for each in names:
        stage.journal.note("end", key=each)
    assert [one.get(timeout=30) for one in results] == [0, 0, 0]


@pytest.mark.parametrize("pool", ["solo", "threads", "gevent", "eventlet"])
def test_a_newer_call_ends_the_running_one_in_every_pool(
    stage: Stage, pool: str, name: str
) -> None:
    if pool == "eventlet":
        pytest.importorskip("eventlet")
    queue = f"q-{name}"
    for _ in range(2 if pool == "solo" else 1):
        stage.worker(pool=pool, concurrency=1 if pool == "solo" else 3, queues=[queue])
    older = stage.app.build.apply_async((name, 1), queue=queue)
    began(stage, older)
    newer = stage.app.build.apply_async((name, 2, "wait", 0), queue=queue)
    assert newer.get(timeout=30) == 2
    assert is_cancelled_by(newer, older)
    assert runs(stage, name) == [older.id, newer.id]
    assert overlaps(stage, name) == []


@pytest.mark.parametrize("servers", ["sentinels", "cluster"])
def test_a_newer_call_ends_the_running_one_on_other_stores(
    servers: str,
    request: pytest.FixtureRequest,
    redis_url: str,
    tmp_path: Path,
) -> None:
    env = {"LOCK_URL": request.getfixturevalue(servers).url}
    with open_stage(redis_url, tmp_path, APP, env) as stage:
        stage.worker(concurrency=6)
        names = [uuid4().hex[:12] for _ in range(3)]  # in several shards of the cluster
        older = [begin(stage, stage.app.build, name) for name in names]
        newer = [stage.app.build.delay(name, number=2, seconds=0) for name in names]
        assert [one.get(timeout=30) for one in newer] == [2, 2, 2]
        assert all(map(is_cancelled_by, newer, older))
        assert stage.journal.overlaps() == []


def test_a_cancelled_call_is_a_worker_event(stage: Stage, name: str) -> None:
    queue = f"q-{name}"
    options = {"concurrency": 2, "queues": [queue]}
    with listening(stage.app.app, stage.worker, **options) as (listener, worker):
        older = began(stage, stage.app.build.apply_async((name, 1), queue=queue))
        stage.app.build.apply_async((name, 2, "wait", 0), queue=queue).get(timeout=30)
        event = listener.wait_for("task-revoked", uuid=older.id)
        assert (event["hostname"], event["expired"]) == (worker.hostname, False)


def test_a_cancelled_call_that_is_delivered_again_after_a_kill_does_not_run(
    stage: Stage, name: str
) -> None:
    queue = f"q-{name}"
    first = stage.worker(concurrency=1, queues=[queue])
    older = stage.app.build.apply_async((name, 1), queue=queue)
    began(stage, older)
    first.kill_group()  # it has not looked yet, or has just begun to end
    second = stage.worker(concurrency=2, queues=[queue])
    newer = stage.app.build.apply_async((name, 2, "wait", 0), queue=queue)
    assert newer.get(timeout=30) == 2
    assert is_cancelled_by(newer, older)  # Redis delivers it again after visibility_timeout
    assert runs(stage, name) == [older.id, newer.id]
    second.wait_for_event(EventName.CANCELLED, task_id=older.id, started=False)
