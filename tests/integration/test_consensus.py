"""Real workers whose locks live in etcd or ZooKeeper; their broker is a plain Redis."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from celery_singleton_lock import is_skipped
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.lease import Record
from celery_singleton_lock.runtime import Runtime
from tests.harness.bodies import power_cut
from tests.harness.deliveries import wait_until
from tests.harness.etcd import EtcdCluster
from tests.harness.journal import Journal
from tests.harness.processes import kill_process
from tests.harness.worker import CeleryWorker
from tests.harness.zookeeper import ZooKeeperEnsemble
from tests.integration.test_until_expired import assert_one_per_period

pytestmark = pytest.mark.slow

CRASH = "tests.apps.crash"
LOSS = "tests.apps.loss"

# Seconds: of the leases, and of a server's own granularity on a machine with other things to do.
TTL = 4.0
GRANULARITY = 3.0

Cluster = EtcdCluster | ZooKeeperEnsemble
StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]


@pytest.fixture(autouse=True)
def _locks_live_there(consensus: Cluster, environment: dict[str, str], monkeypatch: Any) -> None:
    path = f"t{time.monotonic_ns()}"
    environment |= {"LOCK_URL": consensus.url(path), "TTL": str(TTL), "VISIBILITY_TIMEOUT": "2"}
    # The gates of this test, seen from here.
    monkeypatch.setenv("JOURNAL", environment["JOURNAL"])


def record(app: Any, key: str) -> Record | None:
    return Runtime.of(app).store.leases.inspect(key)


def close(app: Any) -> None:
    Runtime.of(app).close()


def test_bodies_of_two_workers_never_overlap_and_fences_rise(
    load_app: LoadApp, worker: StartWorker, journal: Journal
) -> None:
    loss = load_app(LOSS)
    for _ in range(2):
        worker(LOSS, concurrency=3)
    results = [loss.competitor.delay(f"k{n % 2}", "sleep", 0.1) for n in range(20)]
    for result in results:
        assert result.get(timeout=60)["lost"] is False
    assert journal.overlaps() == []
    for key in ("k0", "k1"):
        fences = [run.fence for run in journal.runs(key)]
        assert len(fences) == 10
        assert fences == sorted(fences)
    close(loss.app)


def test_one_call_runs_in_a_period(load_app: LoadApp, worker: StartWorker) -> None:
    crash = load_app(CRASH)
    worker(CRASH, concurrency=2)
    crash.open_gate("open")
    assert_one_per_period(crash.early, "k", "open")
    close(crash.app)


def test_a_killed_childs_key_is_free_before_celery_reports_its_death(
    load_app: LoadApp, worker: StartWorker, journal: Journal
) -> None:
    crash = load_app(CRASH)
    worker(CRASH, concurrency=1)
    result = crash.early.delay("k", "killed")  # its ttl is a minute
    [start] = journal.wait_for_starts(1)
    key = crash.early.lock_key("k", "")
    assert record(crash.app, key) is not None
    journal.death(start.pid, kill_process(start.pid))
    with pytest.raises(Exception, match="signal 9"):
        result.get(timeout=30)
    assert record(crash.app, key) is None
    crash.open_gate("next")
    assert crash.early.delay("k", "next").get(timeout=30) == journal.runs("k")[1].data["mark"]
    close(crash.app)


def test_a_killed_workers_keys_are_free_within_ttl_and_its_jobs_run_again(
    load_app: LoadApp, worker: StartWorker, journal: Journal
) -> None:
    crash = load_app(CRASH)
    names = [f"k{number}" for number in range(4)]
    keys = [crash.late.lock_key(name, "") for name in names]
    process = worker(CRASH, concurrency=4)
    results = [crash.late.delay(name, "all") for name in names]
    journal.wait_for_starts(4)
    assert all(record(crash.app, key) for key in keys)
    at = power_cut(process, journal)
    wait_until(
        lambda: not any(record(crash.app, key) for key in keys),
        "the keys are free",
        timeout=TTL + GRANULARITY,
    )
    print(f"free {time.monotonic() - at:.2f} s after the kill")
    worker(CRASH, concurrency=4)
    journal.wait_for_starts(8)
    crash.open_gate("all")
    marks = [result.get(timeout=30) for result in results]
    for name, mark in zip(names, marks, strict=True):
        killed, again = journal.runs(name)
        assert (killed.finished, again.data["mark"]) == (False, mark)
        assert again.fence > killed.fence
    assert journal.overlaps() == []
    close(crash.app)


def test_a_redelivery_in_mid_body_makes_no_second_body(
    load_app: LoadApp, worker: StartWorker, journal: Journal
) -> None:
    crash = load_app(CRASH)
    process = worker(CRASH, concurrency=3)
    result = crash.late.delay("k", "all")
    journal.wait_for_starts(1)
    # 2 s later its duplicate comes.
    process.wait_for_event(EventName.REQUEUED, task_id=result.id, timeout=30)
    crash.open_gate("all")
    mark = result.get(timeout=30)
    process.wait_for_event(EventName.DROPPED, task_id=result.id, timeout=30)
    assert [run.data["mark"] for run in journal.runs("k")] == [mark]
    assert crash.app.AsyncResult(result.id).result == mark
    close(crash.app)


def test_a_body_goes_on_over_the_loss_of_the_leader(
    consensus: Cluster, load_app: LoadApp, worker: StartWorker, journal: Journal
) -> None:
    crash = load_app(CRASH, TTL="8")
    worker(CRASH, concurrency=3, env={"TTL": "8"})
    result = crash.late.delay("k", "all")
    journal.wait_for_starts(1)
    leader = consensus.leader()
    consensus.kill(leader)
    try:
        time.sleep(1.5 * 8)  # the body outlives its ttl, which only a heartbeat makes good
        duplicate = crash.early.delay("other", "all")
        late = crash.late.delay("k", "all")
        assert is_skipped(late.get(timeout=30))
        crash.open_gate("all")
        assert result.get(timeout=30) == journal.runs("k")[0].data["mark"]
        duplicate.get(timeout=30)
    finally:
        consensus.revive(leader)
    assert len(journal.runs("k")) == 1
    assert journal.overlaps() == []
    close(crash.app)


def test_a_holder_that_was_stopped_beyond_its_ttl_is_interrupted_when_it_wakes(
    load_app: LoadApp, worker: StartWorker, journal: Journal
) -> None:
    loss = load_app(LOSS)
    first = worker(LOSS, concurrency=1, queues=["first"])
    stopped = loss.early.apply_async(("k", "sleep", 60.0), queue="first")
    [start] = journal.wait_for_starts(1)
    os.killpg(first.pid, signal.SIGSTOP)
    try:
        worker(LOSS, concurrency=1, queues=["second"])
        other = loss.competitor.apply_async(("k", "sleep", 2.0), queue="second")
        journal.wait_for_starts(2, timeout=TTL + GRANULARITY + 10)
        begun, woken = journal.wait_for_starts(2)[1], time.monotonic()
    finally:
        os.killpg(first.pid, signal.SIGCONT)
    with pytest.raises(Exception, match="lost"):
        stopped.get(timeout=10)
    print(f"interrupted {time.monotonic() - woken:.2f} s after it woke")
    assert other.get(timeout=30)["lost"] is False
    assert begun.fence > start.fence
    close(loss.app)


def test_a_ttl_that_the_store_cannot_keep_stops_the_worker(
    load_app: LoadApp, worker: StartWorker
) -> None:
    process = worker(LOSS, wait=False, env={"TTL": "0.5"})
    process.wait_for_log(r"has ttl=0\.5 s, but the store \((etcd|zookeeper)\) keeps no lease")
    assert process.wait() != 0
