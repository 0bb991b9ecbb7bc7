"""docs/how-to/killed.md: what was killed, when the job runs again, and when its key is free.

The leases have a ttl of 60 s, longer than any test here waits, except where the ttl is what frees
the key.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import redis
from celery import Task, states

from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.process import identity_of_this_process
from celery_singleton_lock.inspection import Fate
from tests.harness.bodies import power_cut
from tests.harness.deliveries import RedisBroker, wait_until
from tests.harness.explanations import explained, text
from tests.harness.journal import Journal
from tests.harness.processes import is_running, kill_process
from tests.harness.rabbit import RabbitServer
from tests.harness.worker import CeleryWorker

CRASH = "tests.apps.crash"
SLOW = pytest.mark.slow

StartWorker = Callable[..., CeleryWorker]

needs_proof = pytest.mark.skipif(
    not identity_of_this_process(), reason="needs Linux's /proc, of this PID namespace"
)


@dataclass(frozen=True)
class Broker:
    """The broker of a test."""

    name: str
    wait_until_empty: Callable[[], None]


@pytest.fixture
def visibility_timeout() -> str:
    """Seconds after which Redis delivers an unacknowledged message again."""
    return "2"


@pytest.fixture(params=["redis", pytest.param("rabbitmq", marks=SLOW)])
def broker(
    request: pytest.FixtureRequest,
    visibility_timeout: str,
    environment: dict[str, str],
    redis_client: redis.Redis,
) -> Broker:
    """With RabbitMQ, an unacknowledged message comes back when its connection has ended."""
    if request.param == "redis":
        environment["VISIBILITY_TIMEOUT"] = visibility_timeout
        return Broker("redis", RedisBroker(redis_client).wait_until_empty)
    rabbit: RabbitServer = request.getfixturevalue("rabbit")
    vhost = rabbit.vhost()
    environment.update(BROKER_URL=rabbit.url(vhost), QUEUE_TYPE="classic", HEARTBEAT="2")
    return Broker("rabbitmq", lambda: rabbit.wait_until_empty(vhost))


@pytest.fixture
def ttl() -> str:
    return "60"


@pytest.fixture
def crash(
    broker: Broker,
    ttl: str,
    load_app: Callable[..., ModuleType],
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> ModuleType:
    environment["TTL"] = ttl
    module = load_app(CRASH)
    # The gates of this test, seen from here.
    monkeypatch.setenv("JOURNAL", environment["JOURNAL"])
    return module


@pytest.fixture(
    params=[pytest.param("early", marks=SLOW), pytest.param("late", marks=SLOW), "rejected"]
)
def task(request: pytest.FixtureRequest, crash: ModuleType) -> Any:
    """Acknowledged before its body; after it; and that with ``reject_on_worker_lost``."""
    names = {"early": "first_early", "late": "late", "rejected": "first_late"}
    return getattr(crash, names[request.param])


def begin(
    task: Any, worker: StartWorker, journal: Journal, **env: str
) -> tuple[CeleryWorker, Any, int]:
    """A worker, the result of a call whose body it runs, and the process of that body."""
    process = worker(CRASH, concurrency=1, env=env)
    result = task.delay("k", "end")
    [start] = journal.wait_for_starts(1)
    return process, result, start.pid


def assert_it_runs_again(result: Any, crash: ModuleType, broker: Broker, journal: Journal) -> None:
    journal.wait_for_starts(2)
    crash.open_gate("end")
    assert result.get(timeout=60) == journal.runs("k")[1].data["mark"]
    killed, again = journal.runs("k")
    assert (killed.task_id, killed.finished, again.finished) == (result.id, False, True)
    assert killed.fence < again.fence
    assert journal.overlaps() == []
    broker.wait_until_empty()


@pytest.mark.parametrize("visibility_timeout", ["3600"])
def test_a_job_runs_again_after_the_death_of_its_pool_process_only_if_it_is_rejected_then(
    task: Any,
    crash: ModuleType,
    broker: Broker,
    worker: StartWorker,
    journal: Journal,
    redis_client: redis.Redis,
) -> None:
    process, result, pid = begin(task, worker, journal)
    journal.death(pid, kill_process(pid))
    freed = process.wait_for_event(EventName.FREED, task_id=result.id)
    assert freed.has(reason=f"pool process {pid} died")
    process.wait_for_log(r"ERROR/MainProcess\] Task handler raised error: WorkerLostError")
    if task.acks_late and task.reject_on_worker_lost:
        assert_it_runs_again(result, crash, broker, journal)
        return
    with pytest.raises(Exception, match="signal 9"):
        result.get(timeout=30)
    assert "WorkerLostError" in text(explained(crash.app, result, Fate.FAILED))
    broker.wait_until_empty()
    assert not redis_client.exists(task.lock_key("k", ""))
    assert len(journal.runs("k")) == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(Task, "retry_on_worker_lost"), reason="since Celery 5.7")
@pytest.mark.parametrize("visibility_timeout", ["3600"])
def test_a_job_that_kills_its_process_each_time_is_bounded_by_its_retries(
    crash: ModuleType, broker: Broker, worker: StartWorker, journal: Journal
) -> None:
    _, result, first = begin(crash.lost_once, worker, journal)
    journal.death(first, kill_process(first))
    _, start = journal.wait_for_starts(2)
    journal.death(start.pid, kill_process(start.pid))
    with pytest.raises(Exception, match="signal 9"):
        result.get(timeout=60)
    broker.wait_until_empty()
    assert len(journal.runs("k")) == 2
    assert journal.overlaps() == []


@pytest.mark.slow
def test_a_job_that_kills_its_process_each_time_is_bounded_by_the_delivery_limit_of_a_quorum_queue(
    rabbit: RabbitServer,
    environment: dict[str, str],
    load_app: Callable[..., ModuleType],
    worker: StartWorker,
    journal: Journal,
) -> None:
    vhost = rabbit.vhost()
    environment.update(BROKER_URL=rabbit.url(vhost), QUEUE_TYPE="quorum", TTL="60")
    policy = {
        "delivery-limit": 1,
        "dead-letter-exchange": "",
        "dead-letter-routing-key": "dead",
    }
    rabbit.ctl(
        *("set_policy", "--vhost", vhost, "limit", "^celery$", json.dumps(policy)),
        *("--apply-to", "queues"),
    )
    crash = load_app(CRASH)
    with crash.app.connection_for_write() as connection:
        dead = connection.SimpleQueue("dead")
        process, result, first = begin(crash.first_late, worker, journal)
        journal.death(first, kill_process(first))
        _, start = journal.wait_for_starts(2)
        journal.death(start.pid, kill_process(start.pid))
        assert dead.get(timeout=60).headers["id"] == result.id
    assert len(journal.runs("k")) == 2
    assert process.alive
    assert result.state == states.PENDING


@needs_proof
@pytest.mark.slow
@pytest.mark.parametrize("how", ["main process", "eviction"])
def test_a_job_runs_again_after_the_death_of_its_worker_if_it_is_acknowledged_late(
    how: str,
    task: Any,
    crash: ModuleType,
    broker: Broker,
    worker: StartWorker,
    journal: Journal,
    redis_client: redis.Redis,
) -> None:
    """Its own delivery frees the key, for the next worker is on the same host."""
    process, result, pid = begin(task, worker, journal)
    if how == "main process":
        journal.death(pid, process.kill())
        wait_until(lambda: not is_running(pid), "the pool has died with it", 10)
    else:
        if how == "eviction":
            process.terminate()
            process.wait_for_log("Warm shutdown")
        power_cut(process, journal)
    key = task.lock_key("k", "")
    if not task.acks_late:
        broker.wait_until_empty()
        assert redis_client.pttl(key) > 0
        assert explained(crash.app, result, Fate.LEFT), "its lease still holds the key"
        assert result.state == states.PENDING
        return
    again = worker(CRASH, concurrency=1)
    freed = again.wait_for_event(EventName.FREED, task_id=result.id)
    assert freed.has(reason="its process no longer exists on this host")
    assert_it_runs_again(result, crash, broker, journal)


@pytest.mark.slow
@pytest.mark.parametrize("ttl", ["6"])
def test_after_the_loss_of_a_host_the_key_is_free_when_its_ttl_is_over(
    task: Any,
    crash: ModuleType,
    broker: Broker,
    worker: StartWorker,
    journal: Journal,
    redis_client: redis.Redis,
) -> None:
    """A host that is gone closes no connection: stopped processes stand for it.

    RabbitMQ notices missing heartbeats. UNKNOWN_PROCESS: the worker's death can't be proven here.
    """
    process, result, _ = begin(task, worker, journal, UNKNOWN_PROCESS="1")
    at = time.monotonic()
    for pid in process.group():
        os.kill(pid, signal.SIGSTOP)
        journal.death(pid, at)
    key = task.lock_key("k", "")
    if not task.acks_late:
        assert redis_client.pttl(key) > 0
        wait_until(lambda: not redis_client.exists(key), "the ttl is over")
        broker.wait_until_empty()
        assert explained(crash.app, result, Fate.UNKNOWN)
        return
    elsewhere = worker(CRASH, concurrency=1)
    assert_it_runs_again(result, crash, broker, journal)
    killed, again = journal.runs("k")
    # By the fences, the server's time of each grant in microseconds: a body begins a moment later.
    assert (again.fence or 0) - (killed.fence or 0) > task.singleton_policy().ttl * 1e6
    assert "singleton freed" not in elsewhere.log
