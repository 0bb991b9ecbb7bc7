"""Killed holders: their keys become free, their work is done, and only what never began is skipped.

Every scenario goes by events: a body ends when the test opens its gate, a queue is consumed when
the test says so. What becomes of each job that is killed: `test_killed_workers`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import redis

from celery_singleton_lock import is_skipped
from celery_singleton_lock.core.events import EventName
from tests.harness.bodies import ids, power_cut, wait_for_starts
from tests.harness.deliveries import RedisBroker, reported, wait_until
from tests.harness.journal import Journal
from tests.harness.processes import kill_process
from tests.harness.worker import CeleryWorker

CRASH = "tests.apps.crash"
KEYS = [f"k{number}" for number in range(4)]

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]


@pytest.fixture
def crash(load_app: LoadApp, environment: dict[str, str], monkeypatch: Any) -> ModuleType:
    """The app in this process; an unacknowledged message comes back after 2 s."""
    environment["VISIBILITY_TIMEOUT"] = "2"
    module = load_app(CRASH)
    # The gates of this test, seen from here.
    monkeypatch.setenv("JOURNAL", environment["JOURNAL"])
    return module


@pytest.fixture
def broker(redis_client: redis.Redis) -> RedisBroker:
    return RedisBroker(redis_client, queues=["celery", "first", "second"])


@pytest.mark.slow
def test_a_killed_holders_redelivery_runs_after_the_duplicate_that_it_meets(
    crash: ModuleType,
    worker: StartWorker,
    journal: Journal,
    redis_client: redis.Redis,
    broker: RedisBroker,
) -> None:
    """Two queues, so that it is the test that decides when the killed calls come back."""
    first = worker(CRASH, concurrency=len(KEYS), queues=["first"])
    killed = [crash.late.apply_async((key, "killed"), queue="first") for key in KEYS]
    wait_for_starts(journal, killed, 1)
    power_cut(first, journal)
    held = [crash.late.lock_key(key, "") for key in KEYS]
    wait_until(lambda: not redis_client.exists(*held), "the keys are free", timeout=10)
    second = worker(CRASH, concurrency=len(KEYS) + 2, queues=["second"])
    duplicates = [crash.late.apply_async((key, "duplicate"), queue="second") for key in KEYS]
    wait_for_starts(journal, duplicates, 1)
    late = [crash.late.apply_async((key, "late"), queue="second") for key in KEYS]
    assert all(is_skipped(result.get(timeout=30)) for result in late)
    crash.app.control.add_consumer("first", destination=[second.hostname])
    wait_until(
        lambda: ids(killed) <= set(reported([second], EventName.REQUEUED, reason="started")),
        "each killed call met the duplicate",
    )
    crash.open_gate("duplicate")
    assert not any(is_skipped(result.get(timeout=30)) for result in duplicates)
    crash.open_gate("killed")
    # Each refusal doubles the delay of a requeue, up to 30 s.
    results = [result.get(timeout=60) for result in killed]
    broker.wait_until_empty()
    for number, key in enumerate(KEYS):
        lost, between, again = journal.runs(key)
        assert lost.task_id == again.task_id == killed[number].id
        assert between.task_id == duplicates[number].id
        assert not lost.finished
        assert again.data["mark"] == results[number]
    assert journal.overlaps() == []


def test_a_killed_childs_key_is_free_before_celery_reports_its_death(
    crash: ModuleType, worker: StartWorker, journal: Journal, redis_client: redis.Redis
) -> None:
    worker(CRASH, concurrency=1)
    result = crash.early.delay("k", "killed")
    [start] = journal.wait_for_starts(1)
    journal.death(start.pid, kill_process(start.pid))
    with pytest.raises(Exception, match="signal 9"):
        result.get(timeout=30)
    assert not redis_client.exists(crash.early.lock_key("k", ""))
    crash.open_gate("next")
    assert crash.early.delay("k", "next").get(timeout=30) == journal.runs("k")[1].data["mark"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["link", "chain"])
def test_a_child_that_dies_after_the_early_release_does_not_lose_what_follows(
    how: str, crash: ModuleType, worker: StartWorker, journal: Journal, broker: RedisBroker
) -> None:
    """Each child dies before it sends the follower, once."""
    crash.open_gate("pass")
    worker(CRASH, concurrency=len(KEYS))
    for key in KEYS:
        if how == "link":
            crash.first_late.apply_async((key, "pass"), link=crash.follower.si(key))
        else:
            (crash.first_late.si(key, "pass") | crash.follower.si(key)).delay()
    for key in KEYS:
        journal.wait_for_ends(1, key=f"after {key}")
    broker.wait_until_empty()
    for key in KEYS:
        assert len(journal.runs(key)) == 2
        assert len(journal.runs(f"after {key}")) == 1
    assert journal.overlaps() == []
