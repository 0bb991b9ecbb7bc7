"""Times without a time zone, in workers on both sides of UTC: what the worker does is right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from celery_singleton_lock.runtime import Runtime
from tests.integration.stage import Stage, open_stage, wait_until

APP = "tests.apps.zones"
TTL, UNIQUE_FOR = 3, 100


@pytest.fixture(
    scope="module",
    params=["Asia/Tokyo", pytest.param("America/Los_Angeles", marks=pytest.mark.slow)],
)
def stage(
    request: pytest.FixtureRequest,
    redis_server: Any,
    _databases: Iterator[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    url, directory = redis_server.url(next(_databases)), tmp_path_factory.mktemp("zones")
    with open_stage(url, directory, APP, {"ZONE": request.param}) as stage:
        stage.worker(concurrency=1)
        yield stage


def due_in(stage: Stage, task_id: str) -> float:
    """Seconds until the worker will start the message that waits in it."""
    etas: list[str] = []

    def is_scheduled() -> bool:
        replies = stage.app.app.control.inspect(timeout=1).scheduled() or {}
        entries = [entry for scheduled in replies.values() for entry in scheduled]
        etas.extend(e["eta"] for e in entries if e["request"]["id"] == task_id)
        return bool(etas)

    wait_until(is_scheduled, f"{task_id} is scheduled")
    return datetime.fromisoformat(etas[0]).timestamp() - time.time()


def ttls(stage: Stage, name: str) -> tuple[float, float]:
    """The seconds that key and claim of a call still have; 0: it has none."""
    task: Any = stage.app.work
    runtime, key = Runtime.of(stage.app.app), task.lock_key(name)
    found = [
        runtime.store.leases.inspect(each) for each in (key, runtime.keyspace.claim(task.name, key))
    ]
    return tuple(record.ttl if record else 0.0 for record in found)  # type: ignore[return-value]


def test_a_claim_lasts_from_the_eta_at_which_the_worker_starts_its_message(
    stage: Stage, name: str
) -> None:
    result = stage.app.work.apply_async((name,), eta=stage.app.naive_in(600))
    due = due_in(stage, result.id)
    assert due == pytest.approx(600, abs=20)
    assert ttls(stage, name) == (0, pytest.approx(due + UNIQUE_FOR, abs=5))


def test_a_retry_has_its_key_until_the_worker_starts_it(stage: Stage, name: str) -> None:
    result = stage.app.work.delay(name, retry_in=600)
    due = due_in(stage, result.id)
    wait_until(lambda: ttls(stage, name)[0] > TTL, "the key is reserved")
    expected = (pytest.approx(due + TTL, abs=5), pytest.approx(due + UNIQUE_FOR, abs=5))
    assert ttls(stage, name) == expected


def test_equal_calls_that_expire_later_are_one_message(stage: Stage, name: str) -> None:
    ends = stage.app.naive_in(60)
    calls = [
        stage.app.work.apply_async((name,), queue="idle", expires=ends, countdown=1)
        for _ in range(5)
    ]
    assert len({call.id for call in calls}) == 1
    assert ttls(stage, name)[1] == pytest.approx(60, abs=5)
    assert stage.redis.llen("idle") == 1


def test_a_call_that_has_expired_is_discarded_and_has_no_claim(stage: Stage, name: str) -> None:
    result = stage.app.work.apply_async((name,), expires=stage.app.naive_in(-5))
    wait_until(lambda: result.state == "REVOKED", "the worker has discarded it")
    assert ttls(stage, name) == (0, 0)
