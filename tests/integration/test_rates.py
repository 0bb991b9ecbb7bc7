"""A rate: calls of a key start no faster, and what waits for its time is not lost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from celery_singleton_lock import LockConflict, hold, inspection, is_skipped, pause, resume
from celery_singleton_lock.core.keyspace import CallQueueNames
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, wait_until
from tests.integration.test_pools import every_pool

APP = "tests.apps.rates"
#: Seconds: the fence and the rate of a grant are read one after the other.
MOMENT = 0.002


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=3, env={"LOSES": "1"})


def in_queue(stage: Stage, task: Any, name: str) -> int:
    return int(stage.redis.zcard(CallQueueNames.of(task.lock_key(name)).queue))


def seconds_between(stage: Stage, name: str) -> list[float]:
    """Between two starts, by the store's clock."""
    fences = sorted(start.fence or 0 for start in stage.starts(name))
    return [(after - before) / 1e6 for before, after in pairwise(fences)]


def test_calls_start_in_order_and_no_faster_than_the_rate(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task, numbers = stage.app.in_order, list(range(12))
    results = [task.delay(name, number) for number in numbers]
    assert [result.get(timeout=30) for result in results] == numbers
    assert [start.data["number"] for start in stage.starts(name)] == numbers
    between = seconds_between(stage, name)
    assert min(between) > 0.1 - MOMENT
    wait_until(lambda: in_queue(stage, task, name) == 0, "the queue is empty")


def test_a_message_is_published_once_and_then_for_its_time(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task = stage.app.in_order
    results = [task.delay(name, number) for number in range(6)]
    for result in results:
        result.get(timeout=30)
    received = [worker.log.count(f"[{result.id}] received") for result in results]
    assert received[1] < 3, "twice if the first had ended before it joined"
    assert received[2:] == [1] * 4, "each comes when it may start"


def test_a_message_that_comes_a_little_early_waits_at_its_worker(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    """A clock that is ahead makes it early."""
    task = stage.app.in_order
    task.delay(name, 1).get(timeout=30)
    result = task.apply_async((name, 2), countdown=0.01)
    assert result.get(timeout=30) == 2
    assert worker.log.count(f"[{result.id}] received") == 1
    assert min(seconds_between(stage, name)) > 0.1 - MOMENT


def test_a_burst_starts_at_once(stage: Stage, worker: CeleryWorker, name: str) -> None:
    task = stage.app.early
    results = [task.delay(name, number) for number in range(5)]
    assert [result.get(timeout=30) for result in results] == [0, 1, 2, 3, 4]
    between = seconds_between(stage, name)
    assert sum(between[:2]) > 0.2 - MOMENT
    assert sum(between) > 0.6 - MOMENT


@every_pool
def test_no_pool_keeps_the_message_of_a_call_whose_time_is_far(
    stage: Stage, name: str, pool: str
) -> None:
    task = stage.app.slow
    stage.worker(pool=pool, queues=[name], concurrency=1)
    results = [task.apply_async((name, number), queue=name) for number in range(3)]
    assert results[0].get(timeout=30) == 0
    wait_until(lambda: in_queue(stage, task, name) == 2, "they wait in the store")
    wait_until(
        lambda: not stage.redis.hlen("unacked") and not stage.redis.llen(name),
        "no worker has a message",
    )
    assert [start.data["number"] for start in stage.starts(name)] == [0]


def test_operators_see_when_the_next_call_may_start(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task = stage.app.slow
    first, second, _, fourth = [task.delay(name, number) for number in range(4)]
    first.get(timeout=30)
    app, key = stage.app.app, task.lock_key(name)

    def states() -> list[str]:
        found = inspection.held_keys(app, counts_calls=True)
        return [one.state for one in found if one.key == key]

    wait_until(lambda: states() == ["rate-limited"], "its next call waits for its time")
    found = inspection.explain(app, second.id)
    assert found.sentences[1].startswith("The rate of its key lets it start in 3")
    assert found.fate is inspection.Fate.WAITING
    assert found.sentences[-1] == "To do: nothing, it runs in its turn."
    found = inspection.explain(app, fourth.id)
    assert f"lets the first of them, {task.name}[{second.id}], start in 3" in " ".join(
        found.sentences
    )


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("skip", "because the rate of {key} let no call start for another 0."),
        ("revoke", "by on_conflict=\"revoke\": the rate of '{key}' lets its next call start in"),
        ("refuse", "failed"),
    ],
)
def test_a_call_that_the_rate_has_refused_is_explained(
    stage: Stage, worker: CeleryWorker, name: str, rule: str, text: str
) -> None:
    task = getattr(stage.app, rule)
    task.delay(name).get(timeout=30)
    result = task.delay(name)
    wait_until(result.ready, "it is refused")
    found = inspection.explain(stage.app.app, result.id)
    assert text.format(key=task.lock_key(name)) in found.sentences[0]
    assert len(found.sentences) == 2, "nobody has the key"
    assert found.sentences[1].startswith("To do: send it again")


def test_skip_drops_what_is_above_the_rate_and_says_for_how_long(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task = stage.app.skip
    assert task.delay(name, 1).get(timeout=30) == 1
    value = task.delay(name, 2).get(timeout=30)
    assert is_skipped(value)
    assert (value["key"], value["holder"]) == (task.lock_key(name), {})
    assert 0 < value["retry_after"] <= 0.5
    assert [start.data["number"] for start in stage.starts(name)] == [1]


def test_revoke_ends_a_call_above_the_rate_as_revoked(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task = stage.app.revoke
    task.delay(name).get(timeout=30)
    result = task.delay(name)
    wait_until(lambda: result.state == "REVOKED", "it is revoked")


@pytest.mark.parametrize("rule", ["refuse", "impatient"])
def test_the_error_says_when_a_call_may_start(
    stage: Stage, worker: CeleryWorker, name: str, rule: str
) -> None:
    task = getattr(stage.app, rule)
    task.delay(name).get(timeout=30)
    with pytest.raises(LockConflict, match="lets its next call start in") as raised:
        task.delay(name).get(timeout=30)
    assert 0 < (raised.value.retry_after or 0) <= 6
    assert raised.value.holder == {}


def test_wait_waits_for_its_time(stage: Stage, worker: CeleryWorker, name: str) -> None:
    task = stage.app.wait
    results = [task.delay(name, number) for number in range(3)]
    assert sorted(result.get(timeout=30) for result in results) == [0, 1, 2]
    assert min(seconds_between(stage, name)) > 0.25 - MOMENT


def test_an_attempt_of_a_call_that_began_is_not_skipped_and_counts(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task = stage.app.skip
    assert task.delay(name, 1, attempts=3).get(timeout=30) == 1
    between = seconds_between(stage, name)
    assert len(between) == 2
    assert min(between) > 0.5 - MOMENT


def test_retries_above_the_rate_wait_in_the_store_instead_of_coming_back_together(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task, numbers = stage.app.crowd, list(range(6))
    results = [task.delay(name, number, attempts=2, countdown=0.5) for number in numbers]
    assert [result.get(timeout=30) for result in results] == numbers
    requeued = [one.id for one in results if f"requeued: rates.crowd[{one.id}]" in worker.log]
    assert requeued == []
    received = [worker.log.count(f"[{result.id}] received") for result in results]
    assert max(received) <= 4, "the call, its retry, and for its time; once more if that changed"
    wait_until(lambda: in_queue(stage, task, name) == 0, "the queue is empty")


@pytest.mark.parametrize("rule", ["skip", "revoke", "raise", "wait"])
def test_no_call_is_dropped_because_of_its_own_start_that_nobody_heard_of(
    stage: Stage, worker: CeleryWorker, name: str, rule: str
) -> None:
    """The store counted a start, and its reply was lost: no body began."""
    task = stage.app.lost[rule]
    result = task.delay(name, 1)
    assert result.get(timeout=30) == 1
    log = [line for line in worker.log.splitlines() if result.id in line]
    assert any("reason=rate" in line for line in log), "its own start has refused it"


def test_a_call_that_has_not_reached_the_store_keeps_its_rule(stage: Stage, name: str) -> None:
    """It can't have counted. Else a throttle would run all calls of an outage."""
    worker = stage.worker(queues=[name], concurrency=1, env={"LOSES": "1"})
    task = stage.app.away
    assert task.apply_async((name, 1), queue=name).get(timeout=30) == 1
    result = task.apply_async((name, 2), queue=name)
    assert is_skipped(result.get(timeout=30))
    assert f"requeued: rates.away[{result.id}]" in worker.log


def test_a_worker_whose_tasks_have_a_rate_sweeps_the_queues(stage: Stage, name: str) -> None:
    """Retries above the rate wait there, also those that another worker has put there."""
    options = {"queues": [name], "concurrency": 1, "env": {"WITHOUT_QUEUE": "1"}}
    task, app = stage.app.skip, stage.app.app
    pause(task.lock_key(name), app=app)
    first = stage.worker(**options)
    result = task.apply_async((name, 1), queue=name)
    wait_until(lambda: in_queue(stage, task, name) == 1, "it waits in the store")
    first.kill_group()
    stage.worker(**options)
    resume(task.lock_key(name), app=app)
    assert result.get(timeout=30) == 1


def test_a_call_that_expires_while_it_waits_for_its_time_never_runs(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task = stage.app.limited_in_time
    assert task.delay(name, 1).get(timeout=30) == 1
    late = task.apply_async((name, 2), expires=0.7)
    last = task.delay(name, 3)
    assert last.get(timeout=30) == 3
    assert late.state == "REVOKED"
    assert [start.data["number"] for start in stage.starts(name)] == [1, 3]


def test_a_retry_that_reserves_no_key_waits_for_its_time(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    assert stage.app.kept.delay(name, 1, attempts=2).get(timeout=30) == 1
    assert seconds_between(stage, name)[0] > 0.5 - MOMENT


def test_a_retry_of_a_call_in_order_keeps_its_place(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task = stage.app.in_order
    results = [task.delay(name, number, attempts=2) for number in range(3)]
    assert [result.get(timeout=30) for result in results] == [0, 1, 2]
    assert [start.data["number"] for start in stage.starts(name)] == [0, 0, 1, 1, 2, 2]
    assert min(seconds_between(stage, name)) > 0.1 - MOMENT


def test_a_retry_keeps_its_own_countdown(stage: Stage, worker: CeleryWorker, name: str) -> None:
    """The rate only makes it later."""
    task = stage.app.in_order
    results = [task.delay(name, 0, attempts=2, countdown=1), task.delay(name, 1)]
    assert [result.get(timeout=30) for result in results] == [0, 1]
    first, second, *_ = seconds_between(stage, name)
    assert first > 1 - MOMENT
    assert second > 0.1 - MOMENT


def test_newer_calls_do_not_keep_a_retry_from_running(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task = stage.app.skip
    retried = task.delay(name, 1, attempts=2)
    stage.journal.wait_for_starts(key=name)
    while not retried.ready():
        task.delay(name, 2).get(timeout=30)
    assert retried.get() == 1
    assert [start.data["number"] for start in stage.starts(name)][:2] == [1, 1]


def test_the_claim_of_a_call_that_is_skipped_is_freed(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task = stage.app.unique
    task.delay(name, 1).get(timeout=30)
    first = task.delay(name, 2)
    assert is_skipped(first.get(timeout=30))
    second = task.delay(name, 3)
    assert second.id != first.id
    assert is_skipped(second.get(timeout=30))


def test_several_slots_of_a_key_have_one_rate(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    values = [stage.app.several.delay(name, number).get(timeout=30) for number in range(4)]
    assert values[:3] == [0, 1, 2]
    assert is_skipped(values[3])


def test_a_block_counts_as_a_call(stage: Stage, name: str) -> None:
    for task in (stage.app.wait, stage.app.refuse):
        with task.hold(name):
            pass
        refused = pytest.raises(LockConflict, match="lets its next call start in")
        with refused as raised, task.hold(name):
            raise AssertionError
        assert raised.value.retry_after
    refused = pytest.raises(LockConflict, match="waited 0 s")
    with refused, hold(name, scope=stage.app.refuse.name, wait=5, app=stage.app.app):
        raise AssertionError("it waits in vain, as the store has said")
    task = stage.app.wait
    with hold(name, scope=task.name, wait=5, app=stage.app.app) as lease:
        assert lease.fence


def test_eager_calls_have_a_rate_too(stage: Stage, name: str) -> None:
    assert stage.app.skip.apply((name, 1)).get() == 1
    assert is_skipped(stage.app.skip.apply((name, 2)).get())
    assert stage.app.early.apply((name, 1)).get() == 1
    assert stage.app.early.apply((name, 2)).get() == 2
    with pytest.raises(LockConflict, match="an eager call takes no place"):
        stage.app.early.apply((name, 3)).get()
