"""Several at a time, keys shared between tasks and with `hold`, leases within leases."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_singleton_lock import (
    FenceUnavailable,
    LockConflict,
    NoLease,
    current_lease,
    hold,
    is_skipped,
)
from celery_singleton_lock.core.events import EventName
from tests.harness.app_module import fresh_module
from tests.harness.deliveries import RedisBroker
from tests.harness.journal import VARIABLE, most_at_once
from tests.harness.keys import EVERY_NAME
from tests.harness.worker import CeleryWorker
from tests.integration.stage import APP, Stage, wait_until


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=6)


def holding(stage: Stage, name: str, **options: Any) -> Any:
    """`hold` in this process, of the key of most tasks."""
    return hold(name, scope=stage.app.NAMES, app=stage.app.app, **options)


def taken_slots(stage: Stage, name: str) -> list[str]:
    """The slots of `trio` that are held."""
    return sorted(stage.redis.scan_iter(f"{stage.app.trio.lock_key(name)}*"))


# hold().


def test_a_task_is_skipped_while_hold_has_its_key(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    with holding(stage, name) as lease:
        assert lease.key == stage.key(name)
        value = stage.app.work.delay(name).get(timeout=20)
        assert is_skipped(value)
        assert value["holder"]["task_id"] == lease.token.task_id
    assert stage.app.work.delay(name).get(timeout=20) == name
    assert len(stage.starts(name)) == 1


def test_hold_is_refused_while_a_task_has_its_key(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    running = stage.occupy(name)
    with pytest.raises(LockConflict) as raised, holding(stage, name):
        pytest.fail("the block ran beside the task")
    assert raised.value.holder["task_id"] == running.id
    stage.open(name)
    assert running.get(timeout=20) == name
    # The result comes before the release.
    with holding(stage, name, wait=20) as lease:
        lease.check()


@pytest.mark.slow
def test_hold_waits_for_a_task_to_end(stage: Stage, worker: CeleryWorker, name: str) -> None:
    running = stage.occupy(name)
    with pytest.raises(LockConflict), holding(stage, name, wait=0.3):
        pytest.fail("the block ran beside the task")
    stage.open(name)
    with holding(stage, name, wait=20) as lease, stage.journal.run(name, fence=lease.fence):
        pass
    assert running.get(timeout=20) == name
    first, second = stage.journal.runs(name)
    assert first.end <= second.begin
    assert first.fence < second.fence


def test_two_holds_of_one_key_exclude_each_other(stage: Stage, name: str) -> None:
    # In the same thread the second would re-enter the first; another thread has no leases.
    with ThreadPoolExecutor(1) as thread:
        with holding(stage, name), pytest.raises(LockConflict):
            thread.submit(hold_once, stage, name).result(20)
        with holding(stage, name):
            thread.submit(hold_once, stage, f"{name}-other").result(20)
        thread.submit(hold_once, stage, name).result(20)


def hold_once(stage: Stage, name: str) -> None:
    with holding(stage, name) as lease:
        lease.check()


def test_a_call_requeued_for_a_hold_runs_after_it(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    with holding(stage, name):
        result = stage.app.patient.delay(name)
        worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=2)
        assert stage.starts(name) == []
    assert result.get(timeout=20) == 0


# Scopes.


@pytest.mark.parametrize("task", ["based", "patient", "refusing", "work_late"])
def test_tasks_of_one_scope_share_their_keys(
    stage: Stage, worker: CeleryWorker, name: str, task: str
) -> None:
    assert getattr(stage.app, task).lock_key(name) == stage.key(name)
    running = stage.occupy(name)
    result = getattr(stage.app, task).apply_async((name,), singleton={"on_conflict": "skip"})
    value = result.get(timeout=20)
    assert is_skipped(value)
    assert value["holder"]["task"] == stage.app.work.name
    assert value["task"] == getattr(stage.app, task).name
    stage.open(name)
    assert running.get(timeout=20) == name


# Programs that enter a block and end without leaving it.
ENDS = """
import asyncio, os, sys, threading, time
from celery import Celery
from celery_singleton_lock import hold

app = Celery("ends", broker=sys.argv[1], set_as_current=False)
block = hold("k", scope="s", app=app)

def suspended():
    with block:
        yield

async def in_coroutine():
    await block.__aenter__()

def in_thread():
    with block:
        entered.set()
        time.sleep(600)
"""


@pytest.mark.parametrize(
    "program",
    [
        "block.__enter__()",
        "generator = suspended()\nnext(generator)",
        "asyncio.run(in_coroutine())",
        "block.__enter__()\nsys.exit(0)",
    ],
    ids=["by hand", "generator", "coroutine", "exit"],
)
def test_a_block_that_was_never_left_is_released_when_its_program_ends(
    redis_url: str, redis_client: redis.Redis, program: str
) -> None:
    assert output_of(program, redis_url) == ""
    assert not list(redis_client.scan_iter(f"{EVERY_NAME}:s:k"))


def test_a_block_of_a_daemon_thread_is_not_released_while_its_code_runs(
    redis_url: str, redis_client: redis.Redis
) -> None:
    program = """
entered = threading.Event()
threading.Thread(target=in_thread, daemon=True).start()
entered.wait(60)
"""
    assert output_of(program, redis_url) == ""
    assert len(list(redis_client.scan_iter(f"{EVERY_NAME}:s:k"))) == 1


def output_of(program: str, url: str) -> str:
    command = [sys.executable, "-c", f"{ENDS}\n{program}", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout + done.stderr


def test_tasks_of_different_scopes_run_beside_each_other(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    running = stage.occupy(name)
    other = stage.app.by_template.delay(name, account=name, gate=f"{name}-2")
    assert stage.app.by_template.lock_key(name, account=name) != stage.key(name)
    stage.journal.wait_for_starts(2, key=name)
    stage.open(f"{name}-2")
    assert other.get(timeout=20) == name
    stage.open(name)
    assert running.get(timeout=20) == name


# Limits.


def test_limit_three_never_has_four_bodies(stage: Stage, worker: CeleryWorker, name: str) -> None:
    results = [stage.app.trio.delay(name, name) for _ in range(12)]
    starts = stage.journal.wait_for_starts(3, key=name)
    running = {start.task_id for start in starts}
    assert len(taken_slots(stage, name)) == 3
    # There are six processes: each of the others has met three holders.
    for result in results:
        if result.id not in running:
            worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=1)
    assert len(stage.starts(name)) == 3
    stage.open(name)
    assert [result.get(timeout=20) for result in results] == [name] * 12
    assert len(stage.starts(name)) == 12
    assert most_at_once(stage.journal.records(), name) == 3
    wait_until(lambda: taken_slots(stage, name) == [], "all slots are free")


def test_a_duplicate_takes_no_second_slot(stage: Stage, worker: CeleryWorker, name: str) -> None:
    first = stage.app.trio_late.apply_async((name, name))
    stage.journal.wait_for_starts(1, key=name)
    # The same message once more, as a broker delivers it whose visibility_timeout is over.
    RedisBroker(stage.redis).deliver_again(first.id)
    worker.wait_for_event(EventName.REQUEUED, task_id=first.id, sequence=1)
    assert len(taken_slots(stage, name)) == 1
    assert len(stage.starts(name)) == 1
    others = [stage.app.trio_late.delay(name, name) for _ in range(2)]
    stage.journal.wait_for_starts(3, key=name)
    assert len(taken_slots(stage, name)) == 3
    stage.open(name)
    assert [result.get(timeout=20) for result in (first, *others)] == [name] * 3
    worker.wait_for_event(EventName.DROPPED, task_id=first.id)
    assert len(stage.starts(name)) == 3
    assert first.result == name


def test_a_lease_of_several_has_no_fence(stage: Stage, worker: CeleryWorker, name: str) -> None:
    assert stage.app.trio.delay(name).get(timeout=20) == name
    [start] = stage.starts(name)
    assert start.fence is None
    with hold(name, scope="slots", app=stage.app.app) as lease, pytest.raises(FenceUnavailable):
        _ = lease.fence


def test_hold_takes_one_of_three_slots(stage: Stage, worker: CeleryWorker, name: str) -> None:
    results = [stage.app.trio.delay(name, name) for _ in range(2)]
    stage.journal.wait_for_starts(2, key=name)
    with hold(name, scope="slots", app=stage.app.app):
        assert len(taken_slots(stage, name)) == 3
        waiting = stage.app.trio.delay(name)
        worker.wait_for_event(EventName.REQUEUED, task_id=waiting.id, sequence=1)
    assert waiting.get(timeout=20) == name
    stage.open(name)
    assert [result.get(timeout=20) for result in results] == [name] * 2


# A lease within a lease.


def test_apply_and_hold_inside_a_body_re_enter_its_lease(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    found = stage.app.outer.delay(name, "apply").get(timeout=20)
    assert found == {
        "hold": True,
        "skipped": False,
        "same lease": True,
        "held after": True,
    }
    assert len(stage.starts(f"{name}-inner")) == 1
    wait_until(lambda: stage.kind(name) is None, f"{name} is free")


def test_the_key_stays_held_after_a_subtask_has_ended(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    result = stage.app.outer.delay(name, "apply", gate=name)
    stage.journal.wait_for_ends(1, key=f"{name}-inner")
    stage.journal.wait_for(
        lambda records: [r for r in records if r.event == "note" and r.key == name],
        what="the subtask has returned",
    )
    assert stage.kind(name) == "l"
    assert is_skipped(stage.app.work.delay(name).get(timeout=20))
    stage.open(name)
    assert result.get(timeout=20)["held after"]


def test_hold_in_this_process_is_re_entered_by_apply(stage: Stage, name: str) -> None:
    with holding(stage, name) as lease:
        assert stage.app.inner.apply((name,)).get() == str(lease.token)
        assert current_lease() is lease
        assert stage.kind(name) == "l"
    with pytest.raises(NoLease):
        current_lease()
    assert stage.kind(name) is None


@pytest.fixture
def eager_app(stage: Stage, tmp_path: Path) -> Iterator[Any]:
    """The app with task_always_eager, and nothing that listens where its URLs point."""
    nowhere = "redis://127.0.0.1:1"
    env = {
        "BROKER_URL": nowhere,
        "RESULT_URL": nowhere,
        "EAGER": "1",
        VARIABLE: str(tmp_path / "journal.jsonl"),
    }
    with fresh_module(APP, env) as module:
        yield module


def test_an_eager_subtask_re_enters_the_lease_of_its_caller(eager_app: Any, name: str) -> None:
    assert eager_app.outer.delay(name, "delay").get() == {
        "hold": True,
        "skipped": False,
        "same lease": True,
        "held after": True,
    }


def test_an_eager_call_is_skipped_while_hold_has_its_key_in_another_thread(
    eager_app: Any, name: str
) -> None:
    with hold(name, scope=eager_app.NAMES, app=eager_app.app), ThreadPoolExecutor(1) as thread:
        assert is_skipped(thread.submit(lambda: eager_app.work.delay(name).get()).result(20))
    assert eager_app.work.delay(name).get() == name
