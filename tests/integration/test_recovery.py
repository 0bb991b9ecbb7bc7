"""Killed holders: their keys become free, their work is done, and only what never began is skipped.

Every scenario goes by events: a body ends when the test opens its gate, a queue is consumed when
the test says so. The number of keys is the number of times that a promise is put to the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
SLOW = pytest.mark.slow
COUNTS = [pytest.param(4, id="4"), pytest.param(20, id="20", marks=SLOW)]

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


def keys_of(count: int) -> list[str]:
    return [f"k{number}" for number in range(count)]


def wait_until_free(client: redis.Redis, lock_keys: Iterable[str], *, timeout: float) -> None:
    names = list(lock_keys)
    wait_until(lambda: not client.exists(*names), f"{names} are free", timeout=timeout)


# Line 1: what is skipped.


def killed_holders_meet_duplicates(
    count: int,
    crash: ModuleType,
    task: Any,
    worker: StartWorker,
    journal: Journal,
    free_the_keys: Callable[[list[str]], None],
    turned_away: Callable[[CeleryWorker, set[str]], bool],
) -> tuple[list[Any], list[Any], list[Any]]:
    """Kill the holders, let duplicates take their keys, deliver the killed calls to that.

    Two queues, so that it is the test that decides when the killed calls come back.

    Returns:
        The results of the killed calls, of the duplicates that got the keys, and of those that
        came while the keys were theirs; in the order of the keys.
    """
    keys = keys_of(count)
    first = worker(CRASH, concurrency=count, queues=["first"])
    killed = [task.apply_async((key, "killed"), queue="first") for key in keys]
    wait_for_starts(journal, killed, 1)
    power_cut(first, journal)
    free_the_keys(keys)
    second = worker(CRASH, concurrency=count + 2, queues=["second"])
    duplicates = [task.apply_async((key, "duplicate"), queue="second") for key in keys]
    wait_for_starts(journal, duplicates, 1)
    late = [task.apply_async((key, "late"), queue="second") for key in keys]
    for result in late:
        result.get(timeout=30)
    crash.app.control.add_consumer("first", destination=[second.hostname])
    wait_until(lambda: turned_away(second, ids(killed)), "each killed call met the duplicate")
    crash.open_gate("duplicate")
    for result in duplicates:
        result.get(timeout=30)
    crash.open_gate("killed")
    return killed, duplicates, late


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_a_killed_holders_redelivery_runs_after_the_duplicate_that_it_meets(
    count: int,
    crash: ModuleType,
    worker: StartWorker,
    journal: Journal,
    redis_client: redis.Redis,
    broker: RedisBroker,
) -> None:
    killed, duplicates, late = killed_holders_meet_duplicates(
        count,
        crash,
        crash.late,
        worker,
        journal,
        lambda keys: wait_until_free(
            redis_client, [crash.late.lock_key(key, "") for key in keys], timeout=10
        ),
        lambda second, killed: (
            set(reported([second], EventName.REQUEUED, reason="started")) >= killed
        ),
    )
    # Each refusal doubles the delay of a requeue, up to 30 s.
    results = [result.get(timeout=60) for result in killed]
    broker.wait_until_empty()
    for number, key in enumerate(keys_of(count)):
        lost, between, again = journal.runs(key)
        assert lost.task_id == again.task_id == killed[number].id
        assert between.task_id == duplicates[number].id
        assert not lost.finished
        assert again.data["mark"] == results[number]
    assert [is_skipped(result.get(timeout=30)) for result in late] == [True] * count
    assert not any(is_skipped(result.get(timeout=30)) for result in [*killed, *duplicates])
    assert journal.overlaps() == []


@pytest.mark.slow
def test_with_the_usual_recipe_the_killed_holders_call_is_lost(
    crash: ModuleType,
    worker: StartWorker,
    journal: Journal,
    redis_client: redis.Redis,
) -> None:
    """The same scenario can fail."""
    killed, _, _ = killed_holders_meet_duplicates(
        2,
        crash,
        crash.recipe,
        worker,
        journal,
        # As if its ttl were over.
        lambda keys: [redis_client.delete(f"recipe:{key}") for key in keys],
        lambda second, killed: all(crash.app.AsyncResult(task_id).ready() for task_id in killed),
    )
    assert [result.get(timeout=30) for result in killed] == ["skipped"] * 2


def retries_meet_duplicates(
    count: int,
    crash: ModuleType,
    task: Any,
    worker: StartWorker,
    journal: Journal,
    wait_for_the_keys: Callable[[list[str]], None],
    turned_away: Callable[[CeleryWorker, set[str]], bool],
) -> tuple[list[Any], list[Any]]:
    """Let duplicates take the keys between a retry and its next attempt.

    Returns:
        The results of the calls that retry, and of the duplicates; in the order of the keys.
    """
    keys = keys_of(count)
    crash.open_gate("retried")
    # Nothing is killed. A message that is acknowledged early and waits in a busy worker for longer
    # than this is delivered twice, and runs twice.
    process = worker(CRASH, concurrency=count + 2, env={"VISIBILITY_TIMEOUT": "10"})
    retried = [task.delay(key, "retried", again_on="first") for key in keys]
    journal.wait_for_ends(count)
    wait_until(lambda: all(r.state == "RETRY" for r in retried), "all of them wait for a retry")
    # The state is stored a moment before the first attempt lets go of its key.
    wait_for_the_keys(keys)
    duplicates = [task.delay(key, "duplicate") for key in keys]
    wait_for_starts(journal, duplicates, 1)
    crash.app.control.add_consumer("first", destination=[process.hostname])
    wait_until(lambda: turned_away(process, ids(retried)), "each retry met the duplicate")
    crash.open_gate("duplicate")
    return retried, duplicates


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_a_due_retry_runs_after_the_duplicate_that_it_meets(
    count: int,
    crash: ModuleType,
    worker: StartWorker,
    journal: Journal,
    redis_client: redis.Redis,
    broker: RedisBroker,
) -> None:
    retried, duplicates = retries_meet_duplicates(
        count,
        crash,
        crash.retried,
        worker,
        journal,
        lambda keys: wait_until_free(
            redis_client, [crash.retried.lock_key(key, "") for key in keys], timeout=10
        ),
        lambda process, retried: (
            set(reported([process], EventName.REQUEUED, reason="started")) >= retried
        ),
    )
    results = [result.get(timeout=30) for result in retried]
    broker.wait_until_empty()
    for number, key in enumerate(keys_of(count)):
        before, between, after = journal.runs(key)
        assert before.task_id == after.task_id == retried[number].id
        assert between.task_id == duplicates[number].id
        assert after.data["mark"] == results[number]
        # Being requeued is no retry of the user's.
        assert (before.data["retries"], after.data["retries"]) == (0, 1)
    assert not any(is_skipped(result.get(timeout=30)) for result in [*retried, *duplicates])
    assert journal.overlaps() == []


@pytest.mark.slow
def test_with_the_usual_recipe_the_retry_is_lost(
    crash: ModuleType, worker: StartWorker, journal: Journal, redis_client: redis.Redis
) -> None:
    retried, _ = retries_meet_duplicates(
        2,
        crash,
        crash.recipe_retried,
        worker,
        journal,
        lambda keys: wait_until_free(redis_client, [f"recipe:{key}" for key in keys], timeout=10),
        lambda process, retried: all(crash.app.AsyncResult(id).ready() for id in retried),
    )
    assert [result.get(timeout=30) for result in retried] == ["skipped"] * 2


# Line 2: when the key is free, and what becomes of the job.


def kill_the_child_of(task: Any, worker: StartWorker, journal: Journal) -> None:
    """Returns when Celery has reported the death."""
    worker(CRASH, concurrency=1)
    result = task.delay("k", "killed")
    [start] = journal.wait_for_starts(1)
    journal.death(start.pid, kill_process(start.pid))
    with pytest.raises(Exception, match="signal 9"):
        result.get(timeout=30)


def test_a_killed_childs_key_is_free_before_celery_reports_its_death(
    crash: ModuleType, worker: StartWorker, journal: Journal, redis_client: redis.Redis
) -> None:
    kill_the_child_of(crash.early, worker, journal)
    assert not redis_client.exists(crash.early.lock_key("k", ""))
    crash.open_gate("next")
    assert crash.early.delay("k", "next").get(timeout=30) == journal.runs("k")[1].data["mark"]


@pytest.mark.slow
def test_without_the_parents_release_a_killed_childs_key_stays(
    crash: ModuleType, worker: StartWorker, journal: Journal, redis_client: redis.Redis
) -> None:
    """The variant that must fail: `unheard` has Celery's own Request."""
    kill_the_child_of(crash.unheard, worker, journal)
    assert redis_client.exists(crash.unheard.lock_key("k", ""))


@pytest.mark.slow
def test_a_killed_workers_keys_are_free_within_ttl(
    crash: ModuleType, worker: StartWorker, journal: Journal, redis_client: redis.Redis
) -> None:
    keys = keys_of(4)
    lock_keys = [crash.late.lock_key(key, "") for key in keys]
    process = worker(CRASH, concurrency=4)
    for key in keys:
        crash.late.delay(key, "killed")
    journal.wait_for_starts(4)
    power_cut(process, journal)
    left_ms = max(redis_client.pttl(key) for key in lock_keys)
    assert left_ms <= crash.late.singleton_policy().ttl * 1000
    # They are prolonged no more; a tenth of a second for the round trips of the question.
    wait_until_free(redis_client, lock_keys, timeout=left_ms / 1000 + 0.1)


@pytest.mark.parametrize("count", COUNTS)
def test_a_job_whose_child_was_killed_runs_again(
    count: int, crash: ModuleType, worker: StartWorker, journal: Journal, broker: RedisBroker
) -> None:
    keys = keys_of(count)
    process = worker(CRASH, concurrency=count)
    results = [crash.requeued.delay(key, "killed") for key in keys]
    for start in journal.wait_for_starts(count):
        journal.death(start.pid, kill_process(start.pid))
    # Within the ttl of 60 s: nothing but the parent's release can have freed the keys.
    wait_for_starts(journal, results, 2)
    crash.open_gate("killed")
    marks = [result.get(timeout=30) for result in results]
    broker.wait_until_empty()
    assert process.alive
    assert [[run.finished for run in journal.runs(key)] for key in keys] == [[False, True]] * count
    assert [journal.runs(key)[1].data["mark"] for key in keys] == marks
    assert journal.overlaps() == []


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["late", pytest.param("silent", marks=SLOW)])
def test_a_job_whose_worker_was_killed_runs_again(
    name: str,
    count: int,
    crash: ModuleType,
    worker: StartWorker,
    journal: Journal,
    broker: RedisBroker,
) -> None:
    keys = keys_of(count)
    process = worker(CRASH, concurrency=count)
    results = [getattr(crash, name).delay(key, "killed") for key in keys]
    wait_for_starts(journal, results, 1)
    power_cut(process, journal)
    worker(CRASH, concurrency=count)
    wait_for_starts(journal, results, 2)
    crash.open_gate("killed")
    broker.wait_until_empty()
    assert [[run.finished for run in journal.runs(key)] for key in keys] == [[False, True]] * count
    if name == "late":
        marks = [result.get(timeout=30) for result in results]
        assert [journal.runs(key)[1].data["mark"] for key in keys] == marks
    for key in keys:
        killed, again = journal.runs(key)
        assert killed.fence < again.fence
    assert journal.overlaps() == []


def test_a_job_that_was_acknowledged_early_dies_with_its_worker(
    crash: ModuleType, worker: StartWorker, journal: Journal, broker: RedisBroker
) -> None:
    """What acks_late is for: without it, Celery has no message left that could run again."""
    process = worker(CRASH, concurrency=1)
    crash.early.delay("k", "killed")
    journal.wait_for_starts(1)
    wait_until(lambda: not broker.messages(), "the message is acknowledged")
    power_cut(process, journal)
    assert not broker.messages()


# Line 5: between the early release and the end.


def die_before_sending_the_follower(
    count: int, how: str, task: Any, crash: ModuleType, worker: StartWorker, journal: Journal
) -> list[Any]:
    """Run a task that triggers another one; its child dies in between, the first time.

    Returns:
        What has the ids of the tasks that die, in the order of the keys.
    """
    crash.open_gate("pass")
    worker(CRASH, concurrency=count)
    results = []
    for key in keys_of(count):
        if how == "link":
            results.append(task.apply_async((key, "pass"), link=crash.follower.si(key)))
        else:
            results.append((task.si(key, "pass") | crash.follower.si(key)).delay().parent)
    journal.wait_for(
        lambda records: len([r for r in records if r.data.get("text") == "dies"]) >= count,
        what="all of them died once",
    )
    return results


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("how", ["link", pytest.param("chain", marks=SLOW)])
def test_a_child_that_dies_after_the_early_release_does_not_lose_what_follows(
    how: str,
    count: int,
    crash: ModuleType,
    worker: StartWorker,
    journal: Journal,
    broker: RedisBroker,
) -> None:
    die_before_sending_the_follower(count, how, crash.first_late, crash, worker, journal)
    for key in keys_of(count):
        journal.wait_for_ends(1, key=f"after {key}")
    broker.wait_until_empty()
    for key in keys_of(count):
        assert len(journal.runs(key)) == 2
        assert len(journal.runs(f"after {key}")) == 1
    assert journal.overlaps() == []


@pytest.mark.slow
def test_with_an_early_acknowledgement_what_follows_is_lost(
    crash: ModuleType, worker: StartWorker, journal: Journal, broker: RedisBroker
) -> None:
    """The variant that must fail: the child does die before it has sent the follower."""
    [result] = die_before_sending_the_follower(1, "link", crash.first_early, crash, worker, journal)
    with pytest.raises(Exception, match="signal 9"):
        result.get(timeout=30)
    broker.wait_until_empty()
    assert journal.runs("after k0") == []
