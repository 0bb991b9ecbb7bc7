"""Calls that wait in a worker: how a wait ends, in every pool, and what it leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError

from celery_singleton_lock import OnConflict
from celery_singleton_lock.core.keyspace import Keyspace
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, wait_until


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=3)


def blocked(stage: Stage) -> int:
    """How many calls are in a wait queue of this database; kombu blocks, too, but in BRPOP."""
    db = str(stage.redis.connection_pool.connection_kwargs["db"])
    return sum(
        client["cmd"] == "blpop" and "b" in client["flags"] and client["db"] == db
        for client in stage.redis.client_list()
    )


def start_waiting(stage: Stage, name: str, **options: Any) -> Any:
    """A call that waits when this returns; no other does."""
    result = stage.app.work.apply_async(
        (name,), singleton={"on_conflict": OnConflict.wait(timeout=300)}, **options
    )
    wait_until(lambda: blocked(stage) == 1, f"{result.id} waits")
    return result


def wait_queue_of(stage: Stage, name: str) -> list[str]:
    queue = Keyspace.wait_queue(stage.key(name))
    return [key for key in (queue, f"{queue}!") if stage.redis.exists(key)]


def test_a_soft_time_limit_ends_a_wait(stage: Stage, worker: CeleryWorker, name: str) -> None:
    running = stage.occupy(name)
    result = start_waiting(stage, name, soft_time_limit=2)
    with pytest.raises(SoftTimeLimitExceeded):
        result.get(timeout=30)
    assert blocked(stage) == 0
    assert wait_queue_of(stage, name) == []
    stage.open(name)
    assert running.get(timeout=30) == name
    wait_until(lambda: stage.kind(name) is None, "the key is reserved for no waiter")


@pytest.mark.slow
def test_terminate_ends_a_wait(stage: Stage, worker: CeleryWorker, name: str) -> None:
    running = stage.occupy(name)
    result = start_waiting(stage, name)
    result.revoke(terminate=True)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=30)
    wait_until(lambda: blocked(stage) == 0, "the server has forgotten it")
    wait_until(lambda: wait_queue_of(stage, name) == [], "what it was counted for has expired")
    stage.open(name)
    assert running.get(timeout=30) == name
    assert len(stage.starts(name)) == 1


@pytest.mark.slow
def test_a_waiter_that_was_killed_holds_up_no_other(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    running = stage.occupy(name)
    result = start_waiting(stage, name)
    result.revoke(terminate=True, signal="SIGKILL")
    second = stage.app.work.apply_async(
        (name,), singleton={"on_conflict": OnConflict.wait(timeout=300)}
    )
    stage.open(name)
    assert second.get(timeout=30) == name
    assert running.get(timeout=30) == name
    assert len(stage.starts(name)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_a_wait_stops_no_other_task_of_its_process(stage: Stage, name: str, pool: str) -> None:
    queue = f"{pool}-{name}"
    process = stage.worker(concurrency=3, pool=pool, queues=[queue])
    running = stage.app.work.apply_async((name,), {"gate": name}, queue=queue)
    stage.journal.wait_for_starts(1, key=name)
    waiting = start_waiting(stage, name, queue=queue)
    other = stage.app.work.apply_async((f"{name}-other",), queue=queue)
    assert other.get(timeout=30) == f"{name}-other"
    assert not waiting.ready()
    stage.open(name)
    assert [one.get(timeout=30) for one in (running, waiting)] == [name, name]
    assert stage.journal.overlaps() == []
    process.kill_group()
