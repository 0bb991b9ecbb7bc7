"""Ends that are reported late, and blocks of ``hold()`` that other contexts and processes leave.

Workers that are ended consume a queue of their own; all else runs on the module's worker.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from celery.exceptions import TimeLimitExceeded

from celery_singleton_lock import hold
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.lease import Kind
from tests.chaos import proxy
from tests.harness.deliveries import RedisBroker, reported
from tests.harness.journal import Record, overlaps
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, wait_until

APP = "tests.apps.ends"

# Seconds; nothing waits that long when all is well.
SOON = 20.0


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=3)


def key_of(stage: Stage, name: str) -> str:
    return str(stage.app.skipping.lock_key(name))


def kind_of(stage: Stage, name: str) -> str | None:
    """The kind of the value at the key of ``name``; None where there is none."""
    value = stage.redis.get(key_of(stage, name))
    return value[0] if value else None


def notes(stage: Stage, text: str, name: str) -> list[Record]:
    records = stage.journal.records()
    return [r for r in records if r.key == name and r.data.get("text") == text]


def wait_for_notes(stage: Stage, text: str, name: str, count: int = 1) -> None:
    wait_until(lambda: len(notes(stage, text, name)) >= count, f"{count} notes {text!r} of {name}")


def last_breaths(stage: Stage, name: str) -> dict[int, float]:
    """When each body of ``name`` surely still ran."""
    return {note.pid: note.at for note in notes(stage, "breath", name)}


def overlaps_of(stage: Stage, name: str) -> list[Any]:
    records = [record for record in stage.journal.records() if record.key == name]
    return overlaps(records, deaths=last_breaths(stage, name))


# Ends that are reported late.


@pytest.mark.slow
def test_no_body_starts_while_the_parent_reports_a_hard_time_limit_and_the_body_runs_on(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    stage.worker(concurrency=1, queues=[name])
    result = stage.app.limited.apply_async((name,), queue=name)
    stage.journal.wait_for_starts(key=name)
    competitor = stage.app.patient.delay(name)
    wait_for_notes(stage, "on_failure", name)
    breaths = len(notes(stage, "breath", name))
    # Two seconds of a task that runs on, and of a competitor that comes again and again.
    wait_for_notes(stage, "breath", name, breaths + 40)
    worker.wait_for_event(EventName.REQUEUED, task_id=competitor.id, sequence=6)
    stage.open(name)
    assert competitor.get(timeout=SOON) == name
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=SOON)
    assert overlaps_of(stage, name) == []
    assert [run.task_id for run in stage.journal.runs(name)] == [result.id, competitor.id]
    wait_until(lambda: kind_of(stage, name) is None, f"{name} is free")


def test_a_slow_observer_of_a_freed_lease_delays_neither_the_kill_nor_its_worker(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    """The worker's main thread finds it out, and kills the child afterwards."""
    slow = stage.worker(concurrency=2, queues=[name], env={"SLOW_OBSERVER": "1"})
    result = stage.app.limited_plainly.apply_async((name,), queue=name)
    stage.journal.wait_for_starts(key=name)
    competitor = stage.app.patient.delay(name)
    wait_for_notes(stage, "observing", name)
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=SOON)
    assert competitor.get(timeout=SOON) == name
    beside = stage.app.skipping.apply_async((f"{name}-beside",), queue=name)
    assert beside.get(timeout=SOON) == f"{name}-beside"
    assert overlaps_of(stage, name) == []
    slow.kill_group()


@pytest.mark.slow
def test_a_body_is_killed_before_its_mark_ends_though_the_replies_of_the_store_are_lost(
    stage: Stage, name: str
) -> None:
    """The mark is in the store for a second, and its reply is awaited before the kill."""
    url = stage.environment["RESULT_URL"]
    port = urlsplit(url).port or 6379
    with proxy.Proxy(port) as link:
        through = {"LOCK_URL": url.replace(f":{port}", f":{link.port}")}
        stage.worker(concurrency=1, queues=[name], env=through)
        before = stage.app.limited_plainly.apply_async((f"{name}-before",), queue=name)
        with pytest.raises(TimeLimitExceeded):  # now the worker's parent is connected
            before.get(timeout=SOON)
        result = stage.app.limited_plainly.apply_async((name,), queue=name)
        stage.journal.wait_for_starts(key=name)
        link.set(proxy.Mode(kind=proxy.Kind.NO_REPLIES))
        wait_until(lambda: kind_of(stage, name) == Kind.DYING, "the mark is in the store")
        marked = time.monotonic()
        with pytest.raises(TimeLimitExceeded):
            result.get(timeout=SOON)
        wait_until(lambda: kind_of(stage, name) != Kind.DYING, "the mark has ended")
        assert max(last_breaths(stage, name).values()) < marked + 0.9
        link.set(proxy.Mode())


@pytest.mark.slow
def test_a_task_that_is_acknowledged_late_does_not_come_back_after_its_hard_time_limit(
    stage: Stage, name: str
) -> None:
    process = stage.worker(concurrency=1, queues=[name])
    result = stage.app.limited_late.apply_async((name,), queue=name)
    wait_for_notes(stage, "on_failure", name)
    breaths = len(notes(stage, "breath", name))
    # Until after the heartbeat at four seconds.
    wait_for_notes(stage, "breath", name, breaths + 50)
    stage.open(name)
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=SOON)
    broker = RedisBroker(stage.redis, [name])
    wait_until(lambda: result.id not in broker.messages(), "the message is gone")
    wait_until(lambda: kind_of(stage, name) is None, f"{name} is free")
    # What came back would run before this one does.
    stage.app.skipping.apply_async((f"{name}-2",), queue=name).get(timeout=SOON)
    assert len(stage.journal.runs(name)) == 1
    assert not reported([process], EventName.REQUEUED)


# Retries.


def test_whatever_goes_wrong_when_a_lease_is_settled_its_key_is_free_at_once(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    # Celery publishes what no worker can read.
    stage.app.punctual.delay(name, "half past nine")
    stage.journal.wait_for_ends(key=name)
    wait_until(lambda: kind_of(stage, name) is None, f"{name} is free", timeout=10)
    assert stage.app.skipping.delay(name).get(timeout=SOON) == name


# Processes and connections.


@pytest.fixture
def app(redis_url: str) -> Iterator[Celery]:
    app = Celery("ends-of-hold", broker=redis_url, backend=redis_url, set_as_current=False)
    yield app
    app.close()


def clients_of(client: redis.Redis) -> int:
    """How many connections there are to the test's database."""
    database = str(client.connection_pool.connection_kwargs["db"])
    return sum(one["db"] == database for one in client.client_list())


def test_three_hundred_ttls_need_a_handful_of_connections(
    app: Celery, redis_client: redis.Redis
) -> None:
    before = clients_of(redis_client)
    for number in range(300):
        with hold("k", scope="s", ttl=1 + number / 10, app=app):
            pass
    assert clients_of(redis_client) - before <= 8


def test_a_hold_left_in_another_context_is_renewed_no_more(
    app: Celery, redis_client: redis.Redis
) -> None:
    block = hold("k", scope="s", ttl=0.9, app=app)
    lease = copy_context().run(block.__enter__)
    assert redis_client.exists(lease.key)
    copy_context().run(block.__exit__, None, None, None)
    assert not redis_client.exists(lease.key)
    # Had the store not been notified of its end, the ttl would free the key: nothing renews it.
    redis_client.set(lease.key, f"l {lease.token} 1 {{}}", px=900)
    wait_until(lambda: not redis_client.exists(lease.key), "its ttl is over", timeout=5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_leaves_the_block_leaves_its_parent_s_lease_alone(
    app: Celery, redis_client: redis.Redis
) -> None:
    block = hold("k", scope="s", ttl=60, app=app)
    lease = block.__enter__()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            block.__exit__(None, None, None)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    assert redis_client.get(lease.key), "the child released it"
    lease.check()
    block.__exit__(None, None, None)
    assert not redis_client.exists(lease.key)
