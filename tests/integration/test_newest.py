"""``on_duplicate="replace"``: a queued message runs with the newest call's arguments."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task

from celery_singleton_lock import SettingsError, claim_and_send, inspection, singleton_task
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.message.arguments import MAX_ARGUMENTS
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.worker.bootstep import check_tasks
from tests.apps.serializer import SETS
from tests.harness.journal import Record
from tests.harness.keys import EVERY_NAME
from tests.harness.processes import Process
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, open_stage, wait_until

pytestmark = pytest.mark.slow

APP = "tests.apps.newest"


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=4)


def values(stage: Stage, name: str) -> list[Any]:
    """What the bodies ran with, in order."""
    return [start.data["value"] for start in stage.starts(name)]


def start_of(stage: Stage, name: str, number: int = 1) -> Record:
    wait_until(lambda: len(stage.starts(name)) >= number, f"{number} bodies have started")
    return stage.starts(name)[number - 1]


def kept(stage: Stage, name: str) -> list[str]:
    """The keys of arguments that the store keeps."""
    return [key for key in stage.redis.scan_iter(f"{EVERY_NAME}:args|*") if name in key]


def freed(stage: Stage, name: str) -> None:
    wait_until(lambda: not kept(stage, name), "the arguments are deleted")


@contextmanager
def stage_worker(stage: Stage, queue: str) -> Iterator[CeleryWorker]:
    worker = stage.worker(concurrency=2, queues=[queue])
    yield worker
    worker.kill_group()


def test_a_queued_message_runs_with_the_newest_arguments(stage: Stage, name: str) -> None:
    task = stage.app.newest
    results = [
        task.apply_async((name,), {"value": value}, queue=name) for value in (1, {"a": [2]}, 3)
    ]
    assert len({result.id for result in results}) == 1
    assert stage.redis.llen(name) == 1
    worker = stage.worker(concurrency=1, queues=[name])
    assert results[0].get(timeout=20) == 3
    freed(stage, name)
    [start] = stage.starts(name)
    assert start.data["value"] == 3
    assert start.data["seen"] == repr([[name], {"value": 3}]), "the request has them, too"
    [note] = stage.journal.wait_for(
        lambda records: [r for r in records if r.event == "note" and r.key == name],
        what="the task has ended",
    )
    assert note.data["args"] == [[name], {"value": 3}], "and so have Celery's signals"
    worker.kill_group()


def test_a_call_after_the_start_is_a_call_of_its_own(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    running = stage.app.newest.delay(name, 1, gate=name)
    start_of(stage, name)
    second = stage.app.newest.delay(name, 2)
    third = stage.app.newest.delay(name, 3)
    assert running.id != second.id == third.id
    stage.open(name)
    assert third.get(timeout=20) == 3
    assert running.get(timeout=20) == 1
    assert values(stage, name) == [1, 3]


def test_a_message_that_was_requeued_takes_them_too(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    blocker = stage.app.newest.delay(name, "blocker", gate=name)
    start_of(stage, name)
    waiting = stage.app.newest.delay(name, 1)
    worker.wait_for_event(EventName.REQUEUED, task_id=waiting.id, sequence=1)
    assert stage.app.newest.delay(name, 2).id == waiting.id
    stage.open(name)
    assert waiting.get(timeout=20) == 2
    assert blocker.get(timeout=20) == "blocker"
    assert values(stage, name) == ["blocker", 2]


@pytest.mark.parametrize("own", [None, "own"])
def test_a_retry_has_the_arguments_of_its_attempt_or_its_own(
    stage: Stage, name: str, own: str | None
) -> None:
    for value in (1, 2):
        result = stage.app.flaky.apply_async((name, value), {"own": own}, queue=name)
    worker = stage.worker(concurrency=1, queues=[name])
    assert result.get(timeout=20) == (own or 2)
    freed(stage, name)
    worker.kill_group()
    assert values(stage, name) == [2, own or 2]


def test_a_retry_that_waits_takes_the_newest_arguments(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    result = stage.app.flaky.delay(name, 1, countdown=2)
    start_of(stage, name)
    # Celery stores RETRY shortly before the claim is released for the retry.
    mine = inspection.Filter(task_id=result.id)
    wait_until(
        lambda: any(k.phase == "retrying" for k in inspection.held_keys(stage.app.app, mine)),
        "it waits for its retry",
    )
    assert stage.app.flaky.delay(name, 2).id == result.id
    assert result.get(timeout=20) == 2
    assert values(stage, name) == [1, 2]


@pytest.mark.parametrize("how", ["worker", "child"])
def test_a_redelivery_after_a_kill_runs_with_the_newest_arguments_again(
    redis_url: str, tmp_path: Path, name: str, how: str
) -> None:
    with open_stage(redis_url, tmp_path, APP, {"VISIBILITY_TIMEOUT": "2"}) as stage:
        task = stage.app.newest_late if how == "worker" else stage.app.fragile
        for value in (1, 2):
            result = task.delay(name, value, gate=name)
        doomed = stage.worker(concurrency=2)
        pid = start_of(stage, name).pid
        if how == "worker":
            doomed.kill_group()
            stage.worker(concurrency=2)
        else:
            os.kill(pid, signal.SIGKILL)
        start_of(stage, name, 2)
        later = task.delay(name, 3)
        assert later.id != result.id
        stage.open(name)
        assert result.get(timeout=30) == 2
        assert later.get(timeout=30) == 3
        assert values(stage, name) == [2, 2, 3]
        freed(stage, name)


@pytest.mark.skipif(not hasattr(Task, "retry_on_worker_lost"), reason="since Celery 5.7")
@pytest.mark.parametrize("task", ["revived", "debounced_revived"])
@pytest.mark.parametrize("is_followed", [False, True])
def test_a_retry_by_the_worker_parent_is_no_newer_call(
    stage: Stage, name: str, task: str, is_followed: bool
) -> None:
    one = getattr(stage.app, task)
    # Before there is a worker, which may start the first call before the second one is made.
    for value in (1, 2):
        result = one.apply_async((name, value), {"gate": name}, queue=name)
    with stage_worker(stage, name):
        start = start_of(stage, name)
        if is_followed:
            later = one.apply_async((name, 3), {"gate": name}, queue=name)
            assert later.id != result.id
        os.kill(start.pid, signal.SIGKILL)
        start_of(stage, name, 2)
        stage.open(name)
        if is_followed:
            assert later.get(timeout=30) == 3
        else:
            assert result.get(timeout=30) == 2
        freed(stage, name)
        assert values(stage, name)[0] == 2
        assert set(values(stage, name)[1:]) <= ({2, 3} if is_followed else {2})


CALLS = """\
import sys, time
from tests.apps.newest import app
task, name, count, mine = app.tasks[sys.argv[1]], sys.argv[2], int(sys.argv[3]), sys.argv[4]
for number in range(count):
    task.delay(name, f"{mine}-{number}")
"""


def publish_1000(stage: Stage, task: Any, name: str) -> None:
    processes = [
        Process(
            [sys.executable, "-c", CALLS, task.name, name, "250", str(mine)], env=stage.environment
        ).start()
        for mine in range(4)
    ]
    for process in processes:
        assert process.wait(120) == 0, process.log


def test_arguments_that_the_store_has_lost_are_reported(stage: Stage, name: str) -> None:
    for value in (1, 2):
        result = stage.app.newest.apply_async((name, value), queue=name)
    stage.redis.delete(*kept(stage, name))
    worker = stage.worker(concurrency=1, queues=[name])
    assert result.get(timeout=20) == 1
    assert "the store has lost those of later calls" in worker.log
    worker.kill_group()


def test_a_content_type_that_the_worker_refuses_fails_the_task(stage: Stage, name: str) -> None:
    stage.app.newest.apply_async((name, 1), queue=name)
    result = stage.app.newest.apply_async((name, 2), queue=name, serializer=SETS)
    worker = stage.worker(concurrency=1, queues=[name], env={"ACCEPT": "json"})
    with pytest.raises(Exception, match="Refusing to deserialize"):
        result.get(timeout=20)
    wait_until(lambda: stage.redis.get(stage.app.newest.lock_key(name)) is None, "it is released")
    worker.kill_group()
    assert stage.starts(name) == []


def test_the_arguments_come_by_the_serializer_of_their_call(stage: Stage, name: str) -> None:
    stage.app.newest.apply_async((name, 1), queue=name)
    result = stage.app.newest.apply_async((name, {3, 4}), queue=name, serializer=SETS)
    worker = stage.worker(concurrency=1, queues=[name])
    assert result.get(timeout=20) == 7
    worker.kill_group()


def test_too_large_arguments_are_refused(stage: Stage, name: str) -> None:
    with pytest.raises(ValueError, match=f"keeps at most {MAX_ARGUMENTS} in the lock store"):
        stage.app.newest.apply_async((name, "x" * MAX_ARGUMENTS), queue=name)
    assert stage.redis.llen(name) == 0
    stage.app.newest.apply_async((name, "x" * (MAX_ARGUMENTS - 100)), queue=name)


def test_a_key_that_leaves_arguments_out_says_that_they_are_dropped(
    stage: Stage, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "celery_singleton_lock")
    for value in (1, 2):
        stage.app.first.apply_async((name, value), queue=name)
    assert "arguments=dropped" in caplog.text
    for value in (1, 2):
        stage.app.newest.apply_async((name, value), queue=name)
    assert "outcome=replace" in caplog.text
    assert caplog.text.count("arguments=dropped") == 1


def test_a_store_that_cannot_replace_arguments_is_refused(
    stage: Stage, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runtime.of(stage.app.app).store, "arguments", None)
    with pytest.raises(SettingsError, match="can't replace the arguments of a queued message"):
        stage.app.newest.apply_async((name, 1), queue=name)
    app, refusal = stage.app.app, "has on_duplicate=.* can't replace the arguments"
    with pytest.raises(SettingsError, match=refusal):  # a worker does not start
        check_tasks(app, Runtime.of(app).store)


class Encrypting(Task):
    """A base class that changes the arguments of each message."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        return super().apply_async([f"encrypted {one}" for one in args], kwargs, **options)


def test_a_base_class_that_may_change_the_arguments_is_refused(stage: Stage) -> None:
    app = Celery("encrypted", broker=stage.environment["BROKER_URL"], set_as_current=False)
    options: Any = {"app": app, "base": Encrypting, "shared": False, "key": "{name}"}

    @singleton_task(**options, unique="until_start", on_duplicate="replace")
    def encrypted(name: str) -> None: ...

    with pytest.raises(SettingsError, match="a base class overrides apply_async"):
        encrypted.delay("a")
    with pytest.raises(SettingsError, match="a base class overrides apply_async"):
        check_tasks(app, Runtime.of(app).store)


@pytest.mark.parametrize("late", ["", "_late"])
def test_arguments_of_another_key_run_under_that_key(
    stage: Stage, worker: CeleryWorker, name: str, late: str
) -> None:
    web = Celery("web", broker=stage.environment["BROKER_URL"], set_as_current=False)
    task, other = getattr(stage.app, f"newest{late}"), f"{name}-2"
    web.conf.singleton_lock_url = stage.environment["RESULT_URL"]
    running = task.delay(other, "runs", name)
    wait_until(lambda: stage.starts(other), "it runs")
    options = {"unique": "until_start", "on_duplicate": "replace"}
    result = task.apply_async((name, 1), countdown=1)
    assert claim_and_send(web, task.name, [other, 2], singleton=options, key=name).id == result.id
    worker.wait_for_event(
        EventName.REQUEUED, task_id=result.id, reason="the newest arguments have another key"
    )
    stage.open(name)
    assert (running.get(timeout=20), result.get(timeout=20)) == ("runs", 2)
    assert values(stage, other) == ["runs", 2]
    assert [pair for pair in stage.journal.overlaps() if pair[0].key == other] == []
    wait_until(lambda: not kept(stage, name), "the arguments are deleted")


def test_a_message_whose_arguments_are_fixed_gets_a_second_message_beside_it(
    stage: Stage, name: str
) -> None:
    # The first call's message is of a publisher that does not know the option, or chose another.
    task, fixed = stage.app.newest, {"on_duplicate": "return_existing"}
    first = task.apply_async((name, 1), singleton=fixed, queue=name)
    second = task.apply_async((name, 2), queue=name)
    assert first.id != second.id
    worker = stage.worker(concurrency=2, queues=[name])
    assert [first.get(timeout=20), second.get(timeout=20)] == [1, 2]
    worker.kill_group()
