"""`celery singleton explain`: each fate of a task, staged on a worker, is reported as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import group
from celery.exceptions import Retry

from celery_singleton_lock import OnConflict, inspection, is_skipped
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.inspection import Explanation, Fate
from celery_singleton_lock.inspection.explain import _REMEDIES
from celery_singleton_lock.runtime import Runtime
from tests.harness.cli import run_here
from tests.harness.explanations import explained, text
from tests.harness.processes import ROOT
from tests.harness.worker import CeleryWorker
from tests.integration.stage import APP, Stage, open_stage, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=4, args=["--prefetch-multiplier", "4"])


@pytest.fixture
def name(stage: Stage) -> Iterator[str]:
    """A key of its own; the bodies that wait at the gate of this name end with the test."""
    name = uuid4().hex[:12]
    yield name
    stage.open(name)


@pytest.fixture
def holder(stage: Stage, worker: CeleryWorker, name: str) -> str:
    """The id of a task that runs and holds ``name``."""
    return str(stage.occupy(name).id)


def assert_names_holder(found: Explanation, worker: CeleryWorker, holder: str) -> None:
    assert found.holder is not None
    assert (found.holder["task_id"], found.holder["worker"]) == (holder, worker.hostname)
    assert f"[{holder}] on {worker.hostname}" in text(found)


def test_it_ran(stage: Stage, worker: CeleryWorker, name: str) -> None:
    result = stage.app.work.delay(name)
    assert result.get(timeout=30) == name
    found = explained(stage.app.app, result, Fate.RAN)
    assert found.state == "SUCCESS"
    assert found.sentences[0].startswith("It ran, and ended at 20")


def test_it_failed(stage: Stage, worker: CeleryWorker, name: str) -> None:
    found = explained(stage.app.app, stage.app.work.delay(name, fail=True), Fate.FAILED)
    assert f"ArithmeticError('{name}')" in text(found)


def test_it_runs(stage: Stage, worker: CeleryWorker, name: str, holder: str) -> None:
    found = explained(stage.app.app, holder, Fate.RUNNING)
    [start] = stage.starts(name)
    assert found.key == stage.key(name)
    assert f"on {worker.hostname} (pid {start.pid}), and holds {stage.key(name)}" in text(found)
    assert "It runs now since 20" in text(found)
    assert "Its lease was acquired or renewed" in text(found)
    assert found.sentences[-1] == "To do: nothing, it is at work."


def test_it_was_skipped(stage: Stage, worker: CeleryWorker, name: str, holder: str) -> None:
    result = stage.app.work.delay(name)
    assert is_skipped(result.get(timeout=30))
    found = explained(stage.app.app, result, Fate.SKIPPED)
    assert_names_holder(found, worker, holder)
    assert f"held {stage.key(name)}." in found.sentences[0]
    assert f"holds {stage.key(name)} since 20" in found.sentences[1]
    assert found.key == stage.key(name)
    assert found.sentences[-1].startswith("To do: nothing, if that call did its work")
    stage.open(name)
    explained(stage.app.app, holder, Fate.RAN)
    wait_until(lambda: stage.kind(name) is None, "the release, which follows the result, arrives")
    then = inspection.explain(stage.app.app, result.id).sentences[1]
    assert then.startswith(f"{APP}.work[{holder}] ended at 20")
    assert then.endswith("(SUCCESS). When it took the key isn't recorded.")


def test_it_was_revoked_by_its_policy(
    stage: Stage, worker: CeleryWorker, name: str, holder: str
) -> None:
    found = explained(stage.app.app, stage.app.revoking.delay(name), Fate.REVOKED)
    assert 'by on_conflict="revoke", because' in text(found)
    assert f"[{holder}] on {worker.hostname}" in text(found)


@pytest.mark.parametrize("task", ["refusing", "waiting", "impatient"])
def test_it_was_refused(
    stage: Stage, worker: CeleryWorker, name: str, holder: str, task: str
) -> None:
    """By on_conflict="raise", at the end of a wait, and at the end of max_wait."""
    found = explained(stage.app.app, getattr(stage.app, task).delay(name), Fate.REFUSED)
    assert_names_holder(found, worker, holder)
    assert "It did not run, and failed at 20" in text(found)


def test_it_was_requeued(stage: Stage, worker: CeleryWorker, name: str, holder: str) -> None:
    found = explained(stage.app.app, stage.app.sleepy.delay(name), Fate.REQUEUED)
    assert found.sentences[0].startswith("It was requeued once ")
    assert "will be tried again at 20" in found.sentences[0]
    assert_names_holder(found, worker, holder)
    again = stage.app.patient.delay(name)
    worker.wait_for_event(EventName.REQUEUED, task_id=again.id, sequence=3)
    found = explained(stage.app.app, again, Fate.REQUEUED)
    times = int(found.sentences[0].partition(" times")[0].rpartition(" ")[2])
    assert times >= 3
    stage.open(name)
    again.get(timeout=30)
    assert explained(stage.app.app, again, Fate.RAN).state == "SUCCESS"


def test_it_waits(stage: Stage, worker: CeleryWorker, name: str, holder: str) -> None:
    options = {"singleton": {"on_conflict": OnConflict.wait(timeout=300)}}
    last = None
    for place in ("first", "second", "third"):
        last = stage.app.work.apply_async((name,), **options)
        found = explained(stage.app.app, last, Fate.WAITING)
        assert f"It waits for its key as {place} of " in text(found)
        assert_names_holder(found, worker, holder)
    assert inspection.explain(stage.app.app, holder).fate is Fate.RUNNING
    stage.open(name)
    assert last is not None
    last.get(timeout=30)


def test_it_is_a_duplicate(stage: Stage, worker: CeleryWorker, name: str) -> None:
    once = {"unique": "until_done"}
    first = stage.app.work.apply_async((name,), countdown=300, singleton=once)
    again = stage.app.work.s(name).set(singleton=once)
    [duplicate] = group(again).apply_async().results
    assert duplicate.id != first.id
    found = explained(stage.app.app, duplicate, Fate.DUPLICATE)
    assert found.holder is not None
    assert found.holder["task_id"] == first.id
    assert f"It is a duplicate of {APP}.work[{first.id}]" in text(found)
    assert "(queued)" in text(found)
    # Without a canvas, the caller gets the first call's id.
    assert stage.app.work.apply_async((name,), singleton=once).id == first.id
    first.revoke()


def test_an_operator_took_its_lease(stage: Stage, worker: CeleryWorker, name: str) -> None:
    result = stage.app.work.apply_async((name,), {"gate": name}, singleton={"ttl": 3})
    held = None

    def is_held() -> bool:
        nonlocal held
        held = inspection.find_task(stage.app.app, result.id)
        return held is not None

    wait_until(is_held, "it runs")
    assert held is not None
    assert inspection.release(
        stage.app.app, held.key, held.token, user="ann", reason="stuck import"
    )
    found = explained(stage.app.app, result, Fate.LOST_LEASE)
    assert found.key == stage.key(name)
    assert "operator (released by ann on " in text(found)
    assert "An operator released its key at 20" in found.sentences[-2]


def test_it_lost_its_lease(stage: Stage, worker: CeleryWorker, name: str) -> None:
    result = stage.app.work.apply_async((name,), {"gate": name}, singleton={"ttl": 3})
    wait_until(lambda: stage.kind(name) == "l", "it runs")
    stage.redis.delete(stage.key(name))
    found = explained(stage.app.app, result, Fate.LOST_LEASE)
    assert "gone (the store no longer has it" in text(found)
    assert "An operator released" not in text(found)


def test_a_retry_of_which_nothing_is_found_is_not_promised(
    stage: Stage, worker: CeleryWorker
) -> None:
    """As plain Celery leaves a call that a cold shutdown has ended."""
    task_id = uuid4().hex
    stage.app.app.backend.mark_as_retry(task_id, Retry("cancelled by Celery"))
    found = inspection.explain(stage.app.app, task_id)
    assert (found.fate, found.state) == ("unknown", "RETRY")
    assert "no worker that answered has its message" in text(found)
    assert "send the call again" in text(found)


def test_it_will_be_retried(stage: Stage, worker: CeleryWorker, name: str) -> None:
    found = explained(stage.app.app, stage.app.flaky.delay(name, countdown=300), Fate.RETRYING)
    assert f"{stage.key(name)} is reserved for it" in text(found)


def test_a_worker_has_received_it(stage: Stage, worker: CeleryWorker, name: str) -> None:
    result = stage.app.work.apply_async((name,), countdown=300)
    received = explained(stage.app.app, result, Fate.RECEIVED)
    assert f"{worker.hostname} has received it" in text(received)
    assert "It is due at 20" in text(received)
    assert received.key == stage.key(name)
    result.revoke()


def test_it_was_revoked_in_its_queue(stage: Stage, worker: CeleryWorker, name: str) -> None:
    result = stage.app.work.apply_async((name,), queue="of no worker")
    result.revoke()
    # Celery 5.7 writes REVOKED at once, earlier versions when a worker discards the message.
    assert " revoked" in text(explained(stage.app.app, result, Fate.REVOKED))


def test_it_was_revoked_before_it_ran(stage: Stage, worker: CeleryWorker, name: str) -> None:
    result = stage.app.work.apply_async((name,), countdown=2)
    explained(stage.app.app, result, Fate.RECEIVED)
    result.revoke()
    wait_until(lambda: result.state == "REVOKED", "it is discarded")
    assert "A caller revoked it before it ran" in text(
        explained(stage.app.app, result, Fate.REVOKED)
    )


def test_its_body_was_terminated(
    stage: Stage, worker: CeleryWorker, name: str, holder: str
) -> None:
    stage.app.app.control.revoke(holder, terminate=True)
    assert "revoke(terminate=True) ended it at 20" in text(
        explained(stage.app.app, holder, Fate.REVOKED)
    )


def test_it_expired(stage: Stage, worker: CeleryWorker, name: str) -> None:
    result = stage.app.work.apply_async((name,), countdown=1.5, expires=1)
    assert "`expires` had passed" in text(explained(stage.app.app, result, Fate.REVOKED))


def test_its_process_was_killed(stage: Stage, worker: CeleryWorker, name: str, holder: str) -> None:
    [start] = stage.starts(name)
    # Before its parent knows of the start, Celery would pass the task to another process.
    active = stage.app.app.control.inspect([worker.hostname]).active
    wait_until(lambda: holder in str(active()), "the parent knows that the body has started")
    os.kill(start.pid, signal.SIGKILL)
    assert "WorkerLostError" in text(explained(stage.app.app, holder, Fate.FAILED))


def test_a_worker_that_was_killed_as_a_whole_is_not_said_to_run(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"LOCK_URL": redis_url, "PREFIX": "killed"}
    with open_stage(redis_url, tmp_path, "tests.apps.fates", env) as stage:
        app, worker = stage.app, stage.worker(concurrency=2)
        dead = app.work.apply_async(("a",), {"gate": "a"}, singleton={"ttl": 18})
        explained(app.app, dead, Fate.RUNNING)
        skipped = app.work.delay("a")
        assert is_skipped(skipped.get(timeout=30))
        short = app.work.apply_async(("b",), {"gate": "b"}, singleton={"ttl": 5})
        alive = text(explained(app.app, short, Fate.RUNNING))
        assert "overdue" not in alive
        worker.kill_group()
        left = inspection.explain(app.app, dead.id, timeout=0.2)
        assert left.fate is Fate.LEFT
        assert f"on {worker.hostname} (pid " in left.sentences[0]
        assert "Its process no longer exists on this host, but its lease" in left.sentences[0]
        assert left.sentences[1].startswith("The key is free when the lease expires, in ")
        assert "Its message was acknowledged before it began, so it does not come" in text(left)
        held = inspection.find_task(app.app, dead.id)
        assert held is not None
        command = f"singleton release '{held.key}' --token '{held.token}'`."
        assert left.sentences[-1].startswith("To do: send it again if it must run. To free the key")
        assert left.sentences[-1].endswith(command)
        then = inspection.explain(app.app, skipped.id, timeout=0.2)
        assert "Its process no longer exists on this host." in then.sentences[1]
        assert then.sentences[-1].startswith("To do: free the key of the dead process: `celery")
        assert command.removesuffix(".") in then.sentences[-1]
        assert then.sentences[-1].endswith("Then send it again if it must run.")

        # As the same is seen from another host, where nothing is proven.
        monkeypatch.setattr(Runtime.of(app.app), "process", "")
        unproven = inspection.explain(app.app, dead.id, timeout=0.2)
        assert unproven.fate is Fate.RUNNING
        assert f"{worker.hostname} didn't answer a ping; its process may be dead" in text(unproven)
        assert "no longer exists" not in text(unproven)
        assert f"inspect ping -d {worker.hostname}`" in unproven.sentences[-1]
        assert f"`ps -p {held.pid}`" in unproven.sentences[-1]
        assert unproven.sentences[-1].endswith(command)
        then = inspection.explain(app.app, skipped.id, timeout=0.2)
        assert f"{worker.hostname} didn't answer a ping" in then.sentences[1]
        assert f"inspect ping -d {worker.hostname}`" in then.sentences[-1]
        found: list[Explanation] = []

        def is_overdue() -> bool:
            found[:] = [inspection.explain(app.app, dead.id, timeout=0.2)]
            return "overdue" in text(found[0])

        # After more than a third of the ttl, which is 18 s, and before its end.
        wait_until(is_overdue, "the renewal is overdue", timeout=18)
        assert "It has run since 20" in found[0].sentences[0]
        assert "its process may be dead" in found[0].sentences[0]
        then = inspection.explain(app.app, skipped.id, timeout=0.2)
        assert "its process may be dead" in text(then), "also of the holder of another task's key"
        assert "Its message was acknowledged before it began, so it does not come" in text(found[0])
        assert "If so, it died after 20" in text(found[0])
        assert found[0].sentences[-1].endswith(command)
        gone = explained(app.app, dead, Fate.UNKNOWN, timeout=0.2)
        assert "Its worker may have been killed as a whole" in text(gone)
        assert "The broker has no message of it" in text(gone)
        assert "comes back" not in text(gone)
        assert gone.sentences[-1].startswith("To do: look for its id in the logs")


def test_the_message_of_a_worker_that_was_killed_as_a_whole_is_found_in_the_broker(
    redis_url: str, tmp_path: Path
) -> None:
    """With acks_late, also after the end of its lease: who had it, and when it comes back."""
    env = {"LOCK_URL": redis_url, "PREFIX": "left"}
    with open_stage(redis_url, tmp_path, "tests.apps.fates", env) as stage:
        app, worker = stage.app, stage.worker(concurrency=1)
        call = app.late.apply_async(("a",), {"gate": "a"}, singleton={"ttl": 5})
        explained(app.app, call, Fate.RUNNING)
        waiting = app.late.delay("b")  # prefetched, and not begun
        explained(app.app, waiting, Fate.RECEIVED)
        worker.kill_group()
        left = inspection.explain(app.app, call.id, timeout=0.2)
        assert (left.fate, left.key) == (Fate.LEFT, stage.key("a"))
        assert "Its process no longer exists on this host" in left.sentences[0]
        assert left.sentences[2].startswith("A worker took its message at 20")
        assert "don't send it again, or it runs twice. To free" in left.sentences[-1]
        wait_until(lambda: stage.kind("a") is None, "its lease has expired", timeout=15)
        for each in (call, waiting):
            found = explained(app.app, each, Fate.LEFT, timeout=0.2)
            assert found.sentences[0].startswith("A worker took its message at 20")
            assert "that worker has died since" in found.sentences[0]
            assert "The broker delivers it again at 20" in found.sentences[1]
            assert found.sentences[-1].startswith("To do: nothing, if you can wait")
        took = datetime.fromisoformat(found.sentences[0].split()[6].strip(","))
        back = datetime.fromisoformat(found.sentences[1].split()[6])
        assert (back - took).total_seconds() == 3600  # kombu's visibility_timeout


def test_a_worker_that_was_restarted_under_its_name_does_not_hide_that_its_process_may_be_dead(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"LOCK_URL": redis_url, "PREFIX": "restarted"}
    with open_stage(redis_url, tmp_path, "tests.apps.fates", env) as stage:
        app, worker = stage.app, stage.worker(concurrency=1)
        call = app.work.apply_async(("a",), {"gate": "a"}, singleton={"ttl": 3600})
        explained(app.app, call, Fate.RUNNING)
        held = inspection.find_task(app.app, call.id)
        assert held is not None
        worker.kill_group()
        again = stage.worker(concurrency=1, name=worker.name)
        assert again.hostname == worker.hostname
        shown = run_here(app.app, "show", "a").out
        assert "state: process is dead (its process no longer exists on this host)" in shown
        assert "process is dead" in run_here(app.app, "ls").out
        [row] = run_here(app.app, "ls", "--json").json()
        assert (row["state"], row["is_dead"]) == ("running", True)
        monkeypatch.setattr(Runtime.of(app.app), "process", "")  # as on another host
        found = inspection.explain(app.app, call.id, timeout=0.2)
        assert f"{worker.hostname} answers, but names no process {held.pid}:" in found.sentences[0]
        assert f"`ps -p {held.pid}`" in found.sentences[-1]
        assert "process is dead" not in run_here(app.app, "ls").out
        [row] = run_here(app.app, "ls", "--json").json()
        assert not row["is_dead"]


def test_a_lease_whose_call_sets_its_ttl_is_judged_by_that(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    ttl = 2 * stage.app.work.singleton_policy().ttl
    result = stage.app.work.apply_async((name,), {"gate": name}, singleton={"ttl": ttl})
    assert "Its lease was acquired or renewed" in text(
        explained(stage.app.app, result, Fate.RUNNING)
    )
    (held,) = inspection.held_keys(stage.app.app, inspection.Filter(task_id=result.id))
    assert held.call_ttl == ttl
    stage.open(name)
    assert result.get(timeout=30)


def test_it_is_queued(stage: Stage, worker: CeleryWorker, name: str) -> None:
    result = stage.app.work.apply_async(
        (name,), queue="of no worker", singleton={"unique": "until_done"}
    )
    found = explained(stage.app.app, result, Fate.QUEUED)
    assert f"(pid {os.getpid()})" in text(found)
    assert "in the broker's queue 'of no worker'." in text(found)
    assert "No worker that answered consumes 'of no worker'" in text(found)
    assert "The queues that workers consume: 'celery'." in text(found)
    assert found.sentences[-1].endswith("celery -A ... worker -Q 'of no worker'.")
    result.revoke()


def test_a_message_in_a_queue_that_no_worker_consumes_is_found(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    """Without a claim the store has nothing of it; also with a priority, which is another list."""
    queue = f"forgotten-{name}"
    results = [
        stage.app.work.apply_async((name,), queue=queue, priority=priority) for priority in (0, 5)
    ]
    for result in results:
        found = explained(stage.app.app, result, Fate.QUEUED)
        assert found.sentences == (
            f"It is one of 2 messages in the broker's queue '{queue}'.",
            f"No worker that answered consumes '{queue}'. The queues that workers consume: "
            "'celery'.",
            f"To do: start a worker that consumes it: celery -A ... worker -Q {queue}.",
        )


def test_a_call_whose_key_an_operator_released_is_not_said_to_wait_for_it(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    result = stage.app.work.delay(name, gate=name)
    explained(stage.app.app, result, Fate.RUNNING)
    (held,) = inspection.held_keys(stage.app.app, inspection.Filter(task_id=result.id))
    assert inspection.release(stage.app.app, held.key, held.token, user="ann", reason="test")
    found = inspection.explain(stage.app.app, result.id)
    assert found.fate in (Fate.STARTED, Fate.LOST_LEASE)  # its process notices it at a renewal
    if found.fate is Fate.STARTED:
        assert "without its lease" in found.sentences[0]
        assert "about to acquire" not in text(found)
        assert found.sentences[-1].startswith("To do: nothing; when it has been interrupted")
    stage.open(name)


def test_every_fate_but_that_of_a_call_that_ran_has_a_remedy() -> None:
    assert set(Fate) - set(_REMEDIES) == {Fate.RAN}


def test_it_ran_and_its_result_is_not_stored(stage: Stage, worker: CeleryWorker, name: str) -> None:
    result = stage.app.work_late.apply_async((name,), ignore_result=True)
    stage.journal.wait_for_ends(1, key=name)
    found = explained(stage.app.app, result, Fate.RAN)
    assert found.state == "PENDING"
    assert "Its completion record says that it is done" in text(found)


def test_a_task_without_a_lock_ran(stage: Stage, worker: CeleryWorker, name: str) -> None:
    result = stage.app.unlocked.delay(name)
    assert explained(stage.app.app, result, Fate.RAN).key is None


def test_it_is_unknown_and_what_was_not_found_is_said(stage: Stage, worker: CeleryWorker) -> None:
    found = inspection.explain(stage.app.app, "no-such-task")
    assert (found.fate, found.key, found.holder) == (Fate.UNKNOWN, None, None)
    assert found.sentences[0] == "Nothing is known of no-such-task."
    assert "The result backend has nothing of it." in found.sentences
    assert "None of the 1 worker(s) that answered has its message." in found.sentences
    assert f"singleton {EventName.DUPLICATE}" in text(found)
    assert "The broker has no message of it, waiting or taken by a worker." in found.sentences
    assert all(len(sentence) < 220 for sentence in found.sentences)


def test_a_newer_call_cancelled_it(stage: Stage, worker: CeleryWorker, name: str) -> None:
    first = stage.app.newest.delay(f"{name}-2", gate=name)
    explained(stage.app.app, first, Fate.RUNNING)
    newer = stage.app.newest.delay(f"{name}-2")
    found = explained(stage.app.app, first, Fate.CANCELLED)
    assert f"It was cancelled by the newer call {newer.id}" in text(found)
    explained(stage.app.app, newer, Fate.RAN)


def test_the_store_is_searched_once(
    stage: Stage, worker: CeleryWorker, name: str, holder: str
) -> None:
    """A lock store that is also the result backend may have millions of other keys."""
    server = stage.redis
    for task_id in (holder, uuid4().hex):
        server.config_resetstat()
        inspection.explain(stage.app.app, task_id)
        keys = server.dbsize()
        stats = server.info("commandstats")
        # And one of the broker, in larger pages, for a call of which the store has nothing.
        most = keys // 100 + 1 + (task_id != holder) * (keys // 1000 + 1)
        assert stats["cmdstat_scan"]["calls"] <= most, "one pass"


def test_without_a_worker_the_store_alone_is_read(load_app: Any) -> None:
    module = load_app(APP)
    result = module.work.apply_async(("a",), singleton={"unique": "until_done"})
    found = inspection.explain(module.app, result.id)
    assert found.fate is Fate.QUEUED
    assert "No worker has answered, so no worker is known to consume 'celery'." in found.sentences
    nothing = inspection.explain(module.app, "none")
    assert "No worker has answered." in nothing.sentences


@pytest.mark.parametrize("backend", ["rpc://", "disabled://"])
def test_a_result_backend_that_cannot_be_read_is_said(
    load_app: Any, environment: dict[str, str], backend: str
) -> None:
    environment["RESULT_URL"] = backend
    module = load_app(APP)
    result = module.work.apply_async(("a",), singleton={"unique": "until_done"})
    found = inspection.explain(module.app, result.id)
    assert found.fate is Fate.QUEUED
    assert found.sentences[-2].startswith("Its result is unknown, because ")


def command(stage: Stage, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "celery", "-A", APP, "singleton", "explain", *arguments],
        cwd=ROOT,
        env={**os.environ, **stage.environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_prints_the_fate_and_its_sentences(
    stage: Stage, worker: CeleryWorker, name: str, holder: str
) -> None:
    shown = command(stage, holder)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"{holder}: running\n  It runs now since ")
    as_logged = command(stage, f"{stage.app.work.name}[{holder}]")
    assert as_logged.stdout.startswith(f"{holder}: running\n")
    row = json.loads(command(stage, "--json", holder).stdout)
    assert (row["fate"], row["key"], row["task_id"]) == ("running", stage.key(name), holder)
    unknown = command(stage, "--timeout", "0.5", "none")
    assert unknown.returncode == 1
    assert unknown.stdout.startswith("none: unknown\n")
