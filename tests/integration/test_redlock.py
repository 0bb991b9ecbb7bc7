"""Real workers whose locks are in five independent masters; broker and results in a plain Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import redis

from celery_singleton_lock import is_skipped
from celery_singleton_lock.core.events import EventName
from example_project.private_server import ServerNotFound, find_binary
from tests.conftest import missing
from tests.harness.bodies import assert_one_run_each, ids, power_cut, wait_until_received
from tests.harness.deliveries import RedisBroker, reported, wait_until_settled
from tests.harness.journal import Journal
from tests.harness.keys import Keys
from tests.harness.processes import kill_process
from tests.harness.redlock_nodes import RedlockNodes
from tests.harness.worker import CeleryWorker
from tests.integration.test_until_expired import assert_one_per_period

# Five servers, and workers that are killed.
pytestmark = pytest.mark.slow

CRASH, LOSS = "tests.apps.crash", "tests.apps.loss"

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]

# Seconds.
TTL = 3.0
SLACK = 0.9


@pytest.fixture
def nodes() -> Iterator[RedlockNodes]:
    try:
        find_binary()
    except ServerNotFound as error:
        missing(str(error))
    with RedlockNodes(5) as nodes:
        yield nodes


@pytest.fixture
def environment(environment: dict[str, str], nodes: RedlockNodes) -> dict[str, str]:
    return {**environment, "LOCK_URL": nodes.url(), "TTL": str(TTL), "VISIBILITY_TIMEOUT": "2"}


@pytest.fixture
def crash(load_app: LoadApp, environment: dict[str, str], monkeypatch: Any) -> ModuleType:
    module = load_app(CRASH)
    # The gates of this test, seen from here.
    monkeypatch.setenv("JOURNAL", environment["JOURNAL"])
    return module


@pytest.fixture
def broker(redis_client: redis.Redis) -> RedisBroker:
    return RedisBroker(redis_client)


def test_the_worker_says_where_its_locks_are_without_the_password(
    nodes: RedlockNodes, worker: StartWorker, environment: dict[str, str]
) -> None:
    for server in nodes:
        with redis.Redis.from_url(server.url()) as client:
            client.execute_command("ACL SETUSER tenant on >s3cret ~* +@all")
    environment["LOCK_URL"] = nodes.url().replace("redlock://", "redlock://tenant:s3cret@")
    process = worker(LOSS)
    process.wait_for_log(r"singleton locks live in redlock://tenant:\*\*@127\.0\.0\.1")
    assert "s3cret" not in process.log


def test_a_worker_with_an_even_number_of_nodes_does_not_start(
    nodes: RedlockNodes, worker: StartWorker, environment: dict[str, str]
) -> None:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in list(nodes)[:4])
    process = worker(LOSS, wait=False, env={"LOCK_URL": f"redlock://{hosts}/0"})
    assert process.wait() == 1
    assert "names 4 nodes" in process.log


def test_a_hundred_calls_of_one_key_run_one_at_a_time(
    crash: ModuleType, worker: StartWorker, journal: Journal
) -> None:
    workers = [worker(CRASH, concurrency=4) for _ in range(2)]
    crash.open_gate("open")
    results = [crash.early.delay("k", "open") for _ in range(100)]
    values = [result.get(timeout=60) for result in results]
    ran = [value for value in values if not is_skipped(value)]
    assert journal.overlaps() == []
    assert len(journal.runs("k")) == len(ran) >= 1
    assert sum(worker.log.count("Traceback") for worker in workers) == 0


def test_one_call_runs_in_a_period(crash: ModuleType, worker: StartWorker) -> None:
    worker(CRASH, concurrency=2)
    crash.open_gate("open")
    assert_one_per_period(crash.early, "k", "open")


def test_what_waits_for_the_key_runs_after_it(
    crash: ModuleType, worker: StartWorker, journal: Journal
) -> None:
    worker(CRASH, concurrency=4)
    crash.open_gate("open")
    results = [crash.patient.delay("k", "open") for _ in range(10)]
    for result in results:
        result.get(timeout=90)
    assert len(journal.runs("k")) == 10
    assert journal.overlaps() == []


def test_the_key_of_a_killed_child_is_free_at_once_and_its_job_runs_again(
    nodes: RedlockNodes, crash: ModuleType, worker: StartWorker, journal: Journal
) -> None:
    worker(CRASH, concurrency=1)
    result = crash.requeued.delay("k", "killed")  # its ttl is 60 s
    [start] = journal.wait_for_starts(1)
    assert len(set(nodes.holders(crash.requeued.lock_key("k", "killed")))) == 1
    journal.death(start.pid, kill_process(start.pid))
    journal.wait_for_starts(2)
    crash.open_gate("killed")
    assert result.get(timeout=30) == journal.runs("k")[1].data["mark"]
    assert journal.overlaps() == []


@pytest.mark.slow
@pytest.mark.parametrize("down", [0, 2])
def test_the_jobs_of_a_killed_worker_run_again(
    down: int,
    nodes: RedlockNodes,
    crash: ModuleType,
    worker: StartWorker,
    journal: Journal,
    broker: RedisBroker,
) -> None:
    for index in range(down):
        nodes[index].kill()
    keys = [f"k{number}" for number in range(4)]
    process = worker(CRASH, concurrency=4)
    results = [crash.late.delay(key, "killed") for key in keys]
    journal.wait_for_starts(4)
    power_cut(process, journal)
    worker(CRASH, concurrency=4)
    journal.wait_for_starts(8)
    crash.open_gate("killed")
    marks = [result.get(timeout=30) for result in results]
    broker.wait_until_empty()
    assert [[run.finished for run in journal.runs(key)] for key in keys] == [[False, True]] * 4
    assert [journal.runs(key)[1].data["mark"] for key in keys] == marks
    assert journal.overlaps() == []


@pytest.mark.slow
def test_a_task_that_is_delivered_again_while_it_runs_has_one_body(
    crash: ModuleType, worker: StartWorker, journal: Journal, broker: RedisBroker
) -> None:
    process = worker(CRASH, concurrency=6)
    results = [crash.late.delay(f"k{number}", "all") for number in range(4)]
    wait_until_received([process], results, 3)
    crash.open_gate("all")
    marks = [result.get(timeout=30) for result in results]
    broker.wait_until_empty()
    wait_until_settled([process], ids(results))
    assert set(reported([process], EventName.DROPPED)) == ids(results)
    assert_one_run_each(journal, results, marks)


# Nodes that go while a body runs.


def test_a_body_goes_on_without_two_of_five(
    nodes: RedlockNodes, worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    worker(LOSS)
    loss = load_app(LOSS)
    result = loss.late.delay("k", "sleep", 2 * TTL)
    journal.wait_for_starts(1)
    nodes[1].kill()
    nodes[3].pause()
    # Its lease would have ended long before the body does.
    answer = result.get(timeout=30)
    assert answer["lost"] is False
    assert len(journal.runs("k")) == 1
    Keys(loss.app).wait_until_free(loss.late.lock_key("k"))
    again = loss.early.delay("k", "sleep", 0).get(timeout=30)
    assert again["lost"] is False


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_body_without_three_of_five_is_interrupted_in_time_and_runs_again_when_they_return(
    how: str, nodes: RedlockNodes, worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    worker(LOSS)
    result = load_app(LOSS).late.delay("k", "sleep", 60, 0.2)
    journal.wait_for_starts(1)
    for index in (0, 2, 4):
        nodes[index].kill() if how == "killed" else nodes[index].pause()
    at = time.monotonic()  # until now a majority may have renewed it
    [end] = journal.wait_for_ends(1)
    assert end.at - at < TTL + 0.1
    assert end.data["error"] == "LeaseInterrupt"
    assert len(journal.runs("k")) == 1
    for index in (0, 2, 4):
        nodes[index].start() if how == "killed" else nodes[index].resume()
    assert result.get(timeout=60)["lost"] is False
    assert [run.task_id for run in journal.runs("k")] == [result.id] * 2
    assert journal.overlaps() == []


def test_a_task_is_requeued_while_no_majority_answers(
    nodes: RedlockNodes, worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    process = worker(LOSS)
    for index in range(3):
        nodes[index].kill()
    result = load_app(LOSS).early.delay("k", "sleep", 0)
    process.wait_for_event(EventName.REQUEUED, task_id=result.id, reason="store")
    assert journal.records() == []
    nodes[0].start()
    assert result.get(timeout=60)["lost"] is False


def test_operators_see_and_free_what_a_majority_has(
    nodes: RedlockNodes, worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    worker(LOSS)
    loss = load_app(LOSS)
    result = loss.early.delay("k", "sleep", 60)
    journal.wait_for_starts(1)
    nodes[0].kill()
    keys, key = Keys(loss.app), loss.early.lock_key("k")
    assert keys.held()[key].holder.task_id == result.id
    assert keys.record(key).fence is None
    keys.free(key)
    [end] = journal.wait_for_ends(1, timeout=TTL + SLACK)
    assert end.data["error"] == "LeaseInterrupt"
