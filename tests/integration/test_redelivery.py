"""One task delivered more than once, because its visibility_timeout is shorter than its body.

A message that is older than 2 s comes back here, at a sweep every second; the bodies last until all
of them were delivered again several times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import kombu
import pytest
import redis

from celery_singleton_lock.core.events import EventName
from tests.harness.bodies import assert_one_run_each, ids, wait_until_received
from tests.harness.deliveries import (
    RedisBroker,
    received,
    reported,
    wait_until,
    wait_until_settled,
)
from tests.harness.journal import Journal
from tests.harness.worker import CeleryWorker

CRASH = "tests.apps.crash"
swept = pytest.mark.skipif(
    kombu.VERSION[:2] < (5, 7), reason="before kombu 5.7 the sweep comes every 100 s at best"
)
#: Keys of a test.
COUNT = 4

#: Seconds. The sweep looks every second for what is older.
VISIBILITY_TIMEOUT = 2.0
#: A copy waits at least half of the third of visibility_timeout that a copy waits at most.
SHORTEST_PAUSE = VISIBILITY_TIMEOUT / 3 / 2

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]


@pytest.fixture
def crash(load_app: LoadApp, environment: dict[str, str], monkeypatch: Any) -> ModuleType:
    """The app in this process."""
    environment["VISIBILITY_TIMEOUT"] = str(VISIBILITY_TIMEOUT)
    module = load_app(CRASH)
    # The gates of this test, seen from here.
    monkeypatch.setenv("JOURNAL", environment["JOURNAL"])
    return module


@pytest.fixture
def broker(redis_client: redis.Redis) -> RedisBroker:
    return RedisBroker(redis_client)


def assert_bounded(workers: list[CeleryWorker], results: list[Any], seconds: float) -> None:
    """No copy multiplied: there is one, which comes as often as its pauses allow, and the sweep's.

    Doubling copies exceed this after a few rounds (1 message became 1060 deliveries in 40 s).
    """
    by_copy = seconds / SHORTEST_PAUSE
    by_sweep = seconds / VISIBILITY_TIMEOUT
    worst = max(received(workers)[result.id] for result in results)
    print(f"{worst} deliveries of one task in {seconds:.1f} s; all: {received(workers)}")
    assert worst <= 1 + by_copy + by_sweep


@swept
@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_that_is_delivered_again_while_it_runs_has_one_body(
    pool: str,
    crash: ModuleType,
    worker: StartWorker,
    journal: Journal,
    broker: RedisBroker,
) -> None:
    process = worker(CRASH, concurrency=COUNT + 2, pool=pool)
    began = time.monotonic()
    results = [crash.late.delay(f"k{number}", "all") for number in range(COUNT)]
    most: list[int] = []

    def delivered_four_times() -> bool:
        most.append(max(broker.messages().values(), default=0))
        return all(received([process])[result.id] >= 4 for result in results)

    wait_until(delivered_four_times, "all were delivered four times", timeout=60)
    crash.open_gate("all")
    marks = [result.get(timeout=30) for result in results]
    broker.wait_until_empty()
    wait_until_settled([process], ids(results))
    assert_bounded([process], results, time.monotonic() - began)
    # What is delivered, what is requeued, and for a moment the copy that replaces it.
    assert max(most) <= 3
    # The copies ended by themselves: the last word on every task is that one was dropped.
    assert (
        set(reported([process], EventName.REQUEUED))
        == set(reported([process], EventName.DROPPED))
        == ids(results)
    )
    assert_one_run_each(journal, results, marks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["late", "silent", "linked"])
def test_a_duplicate_that_arrives_after_the_success_is_dropped(
    name: str, crash: ModuleType, worker: StartWorker, journal: Journal, broker: RedisBroker
) -> None:
    process = worker(CRASH, concurrency=1)
    task = crash.silent if name == "silent" else crash.late
    link = crash.follower.si("k") if name == "linked" else None
    crash.open_gate("died-k")  # the link is sent without an accident
    result = task.apply_async(("k", "all"), link=link)
    journal.wait_for_starts(1)
    # One process: what is queued now arrives after the success.
    broker.deliver_again(result.id)
    wait_until_received([process], [result], 2)
    crash.open_gate("all")
    process.wait_for_event(EventName.DROPPED, task_id=result.id, reason="done")
    wait_until_settled([process], [result.id])
    [run] = journal.runs("k")
    if name != "silent":
        assert crash.app.AsyncResult(result.id).result == run.data["mark"]
    if name == "linked":
        journal.wait_for_ends(1, key="after k")
        assert len(journal.runs("after k")) == 1


def test_the_completion_records_of_done_and_of_waiting_messages_live_as_long_as_the_settings_say(
    crash: ModuleType,
    environment: dict[str, str],
    worker: StartWorker,
    journal: Journal,
    redis_client: redis.Redis,
) -> None:
    environment["MARKER_TTL"] = "90"
    process = worker(CRASH, concurrency=2)
    done = crash.patient.delay("k", "all")
    journal.wait_for_starts(1)
    waiting = crash.patient.delay("k", "all")
    process.wait_for_event(EventName.REQUEUED, task_id=waiting.id)
    longest = {}

    def are_marked() -> bool:
        for result in (done, waiting):
            for key in redis_client.scan_iter(f"*done|{result.id}*"):
                ttl_ms: Any = redis_client.pttl(key)
                longest[result.id] = max(ttl_ms, longest.get(result.id, 0))
        return len(longest) == 2

    crash.open_gate("all")
    wait_until(are_marked, "both have a marker", timeout=30)
    # That of a requeued message lives for its delay in addition.
    assert 30_000 < longest[done.id] <= 90_000
    assert 30_000 < longest[waiting.id] <= 91_000


@swept
@pytest.mark.slow
def test_messages_that_wait_in_a_worker_for_too_long_run_once_each(
    crash: ModuleType, worker: StartWorker, journal: Journal, broker: RedisBroker
) -> None:
    """Two workers with one process each: all but two messages get too old in a worker's memory."""
    workers = [worker(CRASH, concurrency=1) for _ in range(2)]
    began = time.monotonic()
    results = [crash.late.delay(f"k{number}", "all") for number in range(2 * COUNT)]
    wait_until_received(workers, results, 3)
    crash.open_gate("all")
    marks = [result.get(timeout=60) for result in results]
    broker.wait_until_empty(timeout=60)
    wait_until_settled(workers, ids(results))
    assert_bounded(workers, results, time.monotonic() - began)
    assert_one_run_each(journal, results, marks)


@swept
@pytest.mark.slow
def test_a_countdown_longer_than_the_visibility_timeout_ends_in_one_run(
    crash: ModuleType, worker: StartWorker, journal: Journal, broker: RedisBroker
) -> None:
    """Each sweep adds a delivery that waits for the same moment."""
    process = worker(CRASH, concurrency=4)
    began = time.monotonic()
    results = [crash.late.apply_async((f"k{number}", "all"), countdown=5) for number in range(4)]
    wait_until_received([process], results, 2)
    crash.open_gate("all")
    marks = [result.get(timeout=30) for result in results]
    broker.wait_until_empty()
    wait_until_settled([process], ids(results))
    assert_bounded([process], results, time.monotonic() - began)
    assert_one_run_each(journal, results, marks)
