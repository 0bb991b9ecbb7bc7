"""Exclusion, crashes and redelivery over the stores that aren't a single server.

The same promises as on Redis; the broker is one Redis, as everywhere, and the locks are elsewhere.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import redis
from celery import Celery

from celery_singleton_lock import claim_and_send, is_skipped
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Kind, Phase, Record
from celery_singleton_lock.runtime import Runtime
from tests.harness.bodies import (
    assert_one_run_each,
    ids,
    power_cut,
    wait_for_starts,
    wait_until_received,
)
from tests.harness.deliveries import RedisBroker, reported, wait_until, wait_until_settled
from tests.harness.journal import Journal
from tests.harness.keys import Keys
from tests.harness.processes import ROOT, kill_process
from tests.harness.worker import CeleryWorker
from tests.integration.test_until_expired import assert_one_per_period

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

CRASH = "tests.apps.crash"
KEYS = [f"k{number}" for number in range(6)]

StartWorker = Callable[..., CeleryWorker]


@pytest.fixture(params=["sentinel", "cluster"])
def crash(
    request: pytest.FixtureRequest,
    environment: dict[str, str],
    load_app: Callable[..., ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> ModuleType:
    """The app in this process; an unacknowledged message comes back after 2 s."""
    name = "sentinels" if request.param == "sentinel" else "cluster"
    environment["LOCK_URL"] = request.getfixturevalue(name).url
    environment["VISIBILITY_TIMEOUT"] = "2"
    environment["PREFIX"] = f"t-{secrets.token_hex(4)}"  # the servers are shared
    module = load_app(CRASH)
    monkeypatch.setenv("JOURNAL", environment["JOURNAL"])
    return module


@pytest.fixture
def broker(redis_client: redis.Redis) -> RedisBroker:
    return RedisBroker(redis_client)


@pytest.fixture
def keys(crash: ModuleType) -> Keys:
    return Keys(crash.app)


@pytest.fixture
def publisher(crash: ModuleType) -> Iterator[Celery]:
    """An app that has the store and the names of the tasks, and not their code."""
    conf = crash.app.conf
    with Celery("publisher", broker=conf.broker_url, backend=conf.result_backend) as app:
        for name in ("singleton_lock_url", "singleton_lock_prefix"):
            app.conf[name] = conf[name]
        yield app


def held(app: Celery) -> list[Record]:
    """Every key of this test's prefix that is taken."""
    runtime = Runtime.of(app)
    return list(runtime.store.operators.scan(runtime.keyspace.match_all()))


def assert_ran_twice(journal: Journal, results: list[Any]) -> None:
    marks = [result.get(timeout=30) for result in results]
    for key, mark in zip(KEYS, marks, strict=True):
        killed, again = journal.runs(key)
        assert (killed.finished, again.finished) == (False, True)
        assert again.data["mark"] == mark
        assert killed.fence < again.fence
    assert journal.overlaps() == []


def test_calls_of_one_key_from_two_workers_run_one_after_the_other(
    crash: ModuleType, worker: StartWorker, journal: Journal
) -> None:
    for _ in range(2):
        worker(CRASH, concurrency=4)
    crash.open_gate("all")
    results = [crash.patient.delay("k", "all") for _ in range(12)]
    marks = {result.get(timeout=90) for result in results}
    runs = journal.runs("k")
    assert {run.data["mark"] for run in runs} == marks
    assert len(runs) == 12
    fences = [run.fence for run in runs]
    assert fences == sorted(fences)
    assert journal.overlaps() == []


def test_a_second_call_is_skipped_and_other_keys_run_in_parallel(
    crash: ModuleType, worker: StartWorker, journal: Journal
) -> None:
    worker(CRASH, concurrency=8)
    running = [crash.early.delay(key, "all") for key in KEYS]
    wait_for_starts(journal, running, 1)
    assert all(is_skipped(crash.early.delay(key, "all").get(timeout=30)) for key in KEYS)
    crash.open_gate("all")
    assert len({result.get(timeout=30) for result in running}) == len(KEYS)
    assert journal.overlaps() == []


def test_a_job_whose_child_was_killed_runs_again_long_before_its_ttl(
    crash: ModuleType, worker: StartWorker, journal: Journal, broker: RedisBroker
) -> None:
    process = worker(CRASH, concurrency=len(KEYS))
    results = [crash.requeued.delay(key, "killed") for key in KEYS]
    for start in journal.wait_for_starts(len(KEYS)):
        journal.death(start.pid, kill_process(start.pid))
    # Within the ttl of 60 s: nothing but the parent's release can have freed the keys.
    wait_for_starts(journal, results, 2)
    crash.open_gate("killed")
    assert_ran_twice(journal, results)
    broker.wait_until_empty()
    assert process.alive


def test_a_job_whose_worker_was_killed_runs_again(
    crash: ModuleType, worker: StartWorker, journal: Journal, broker: RedisBroker, keys: Keys
) -> None:
    process = worker(CRASH, concurrency=len(KEYS))
    results = [crash.late.delay(key, "killed") for key in KEYS]
    wait_for_starts(journal, results, 1)
    power_cut(process, journal)
    for key in KEYS:
        keys.wait_until_free(crash.late.lock_key(key, ""))
    worker(CRASH, concurrency=len(KEYS))
    wait_for_starts(journal, results, 2)
    crash.open_gate("killed")
    broker.wait_until_empty()
    assert_ran_twice(journal, results)


def test_a_task_that_is_delivered_again_while_it_runs_has_one_body(
    crash: ModuleType, worker: StartWorker, journal: Journal, broker: RedisBroker
) -> None:
    process = worker(CRASH, concurrency=len(KEYS) + 2)
    results = [crash.late.delay(key, "all") for key in KEYS]
    wait_until_received([process], results, 4)
    crash.open_gate("all")
    marks = [result.get(timeout=30) for result in results]
    broker.wait_until_empty()
    wait_until_settled([process], ids(results))
    assert (
        set(reported([process], EventName.REQUEUED))
        == set(reported([process], EventName.DROPPED))
        == ids(results)
    )
    assert_one_run_each(journal, results, marks)


def test_a_duplicate_that_arrives_after_the_success_is_dropped(
    crash: ModuleType, worker: StartWorker, journal: Journal, broker: RedisBroker
) -> None:
    process = worker(CRASH, concurrency=1)
    result = crash.late.delay("k", "all")
    journal.wait_for_starts(1)
    # One process: what is queued now arrives after the success.
    broker.deliver_again(result.id)
    wait_until_received([process], [result], 2)
    crash.open_gate("all")
    process.wait_for_event(EventName.DROPPED, task_id=result.id, reason="done")
    [run] = journal.runs("k")
    assert result.get(timeout=30) == run.data["mark"]


def test_a_claim_under_another_key_than_the_workers_stands_until_its_task_is_done(
    crash: ModuleType, publisher: Celery, worker: StartWorker, journal: Journal
) -> None:
    """Published by name, so its key is a digest: on a cluster that is nearly always elsewhere."""

    def send(key: str) -> Any:
        options: Any = {"unique": "until_done"}
        return claim_and_send(publisher, crash.early.name, [key, "all"], singleton=options)

    worker(CRASH, concurrency=len(KEYS))
    first = [send(key) for key in KEYS]
    wait_for_starts(journal, first, 1)
    claims = [record for record in held(crash.app) if record.kind is Kind.CLAIM]
    assert [record.phase for record in claims] == [Phase.RUNNING] * len(KEYS)
    if crash.app.conf.singleton_lock_url.startswith("redis+cluster"):
        locks = [crash.early.lock_key(key, "") for key in KEYS]
        assert not all(any(Keyspace.same_shard(c.key, k) for k in locks) for c in claims)
    assert [send(key).id for key in KEYS] == [result.id for result in first]
    crash.open_gate("all")
    for result in first:
        result.get(timeout=30)
    wait_until(lambda: not held(crash.app), "claims and leases are free")


def test_the_claim_of_a_killed_child_goes_with_its_lease_wherever_it_is(
    crash: ModuleType, publisher: Celery, worker: StartWorker, journal: Journal
) -> None:
    worker(CRASH, concurrency=len(KEYS))
    options: Any = {"unique": "until_done"}
    for key in KEYS:
        claim_and_send(publisher, crash.early.name, [key, "never"], singleton=options)
    for start in journal.wait_for_starts(len(KEYS)):
        kill_process(start.pid)
    # The ttl is 60 s: the parent frees both.
    wait_until(lambda: not held(crash.app), "claims and leases are free", timeout=20)


def test_one_call_runs_in_a_period(crash: ModuleType, worker: StartWorker) -> None:
    worker(CRASH, concurrency=2)
    crash.open_gate("open")
    for key in KEYS:
        assert_one_per_period(crash.early, key, "open")


def test_the_command_line_lists_and_frees_what_is_held_anywhere(
    crash: ModuleType, environment: dict[str, str], worker: StartWorker, journal: Journal
) -> None:
    worker(CRASH, concurrency=len(KEYS))
    for key in KEYS:
        crash.early.delay(key, "all")
    journal.wait_for_starts(len(KEYS))

    def singleton(*arguments: str) -> str:
        command = [sys.executable, "-m", "celery", "-A", CRASH, "singleton", *arguments]
        environ = {**os.environ, **environment}
        return subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    listed = json.loads(singleton("ls", "--json"))
    assert {row["key"] for row in listed} == {crash.early.lock_key(key, "") for key in KEYS}
    assert "released" in singleton("release", "--yes", crash.early.lock_key(KEYS[0], ""))
    assert len(json.loads(singleton("ls", "--json"))) == len(KEYS) - 1
    crash.open_gate("all")
    journal.wait_for_ends(len(KEYS))
