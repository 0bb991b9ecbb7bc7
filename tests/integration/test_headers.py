"""Messages whose headers other code has changed: receivers, base classes, another task protocol.

Whatever they do to the headers, no call is lost, and its options and claim are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_singleton_lock import LockConflict, hold
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.runtime import Runtime
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, open_stage

APP = "tests.apps.headers"
SLOW = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[
        "nested",
        pytest.param("copied", marks=SLOW),
        pytest.param("all", marks=SLOW),
        pytest.param("before", marks=SLOW),
        "behind",
        pytest.param("protocol 1", marks=SLOW),
    ],
)
def foreign(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def stage(
    foreign: str,
    redis_server: Any,
    _databases: Iterator[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    url, directory = redis_server.url(next(_databases)), tmp_path_factory.mktemp("headers")
    env = {"PROTOCOL": "1"} if foreign == "protocol 1" else {"FOREIGN": foreign}
    with open_stage(url, Path(directory), APP, env) as stage:
        yield stage


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=4)


def occupy(stage: Stage, name: str) -> Any:
    """Have a body hold ``name`` until the gate ``name`` is opened."""
    result = stage.app.patient.delay(name, gate=name)
    stage.journal.wait_for(
        lambda records: [r for r in records if r.task_id == result.id], what=f"{name} is occupied"
    )
    return result


def test_a_call_that_is_requeued_on_a_conflict_runs(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    occupy(stage, name)
    result = stage.app.patient.delay(name)
    worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=1)
    worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=2)
    stage.open(name)
    assert result.get(timeout=20) == name
    assert len(stage.starts(name)) == 2
    assert stage.starts(name)[-1].data["eta"], "the copy says when it is due"


@pytest.mark.slow
def test_work_that_is_requeued_after_a_lost_lease_runs_again(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    result = stage.app.late.apply_async((name, name), singleton={"ttl": 1})
    stage.journal.wait_for_starts(1, key=name)
    Runtime.of(stage.app.app).store.operators.free(stage.app.late.lock_key(name), None)
    with hold(name, scope=stage.app.NAMES, app=stage.app.app):
        worker.wait_for_event(EventName.REQUEUED, task_id=result.id, reason="lease-lost")
        worker.wait_for_event(EventName.REQUEUED, task_id=result.id, reason="started")
    stage.open(name)
    assert result.get(timeout=60) == name
    assert [start.task_id for start in stage.starts(name)] == [result.id] * 2


def test_a_claim_until_start_is_free_once_its_task_has_started(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    runtime = Runtime.of(stage.app.app)
    claim = runtime.keyspace.claim("claimed", stage.app.claimed.lock_key(name))
    result = stage.app.claimed.delay(name, gate=name)
    stage.journal.wait_for_starts(1, key=name)
    assert runtime.store.leases.inspect(claim) is None
    stage.open(name)
    assert result.get(timeout=20) == name


def test_what_a_call_has_set_holds_for_its_retry_too(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    result = stage.app.patient.apply_async((name, None, True), singleton={"ttl": 17})
    assert result.get(timeout=20) == name
    assert [start.data["ttl"] for start in stage.starts(name)] == [17, 17]


def test_a_call_waits_no_longer_than_max_wait(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    occupy(stage, name)
    result = stage.app.impatient.delay(name)
    with pytest.raises(LockConflict):
        result.get(timeout=20)
    stage.open(name)


def test_a_copy_has_all_headers_of_its_message_and_a_body_sees_none_of_ours(
    foreign: str, stage: Stage, worker: CeleryWorker, name: str
) -> None:
    if foreign in ("before", "behind"):
        pytest.skip("there the caller's headers are gone from the start")
    occupy(stage, name)
    result = stage.app.patient.apply_async((name,), headers={"tenant": "t"})
    worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=2)
    stage.open(name)
    assert result.get(timeout=20) == name
    start = stage.starts(name)[-1]
    trace = None if foreign == "protocol 1" else "abc"
    assert start.data["tenant"] == ["t", "t", trace]
    assert start.data["ours"] == []
