"""``on_conflict="queue"``: the calls of a key run one after another, in the order of the calls."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import celery
import pytest
import redis
from celery import Celery
from celery.exceptions import (
    NotRegistered,
    SoftTimeLimitExceeded,
    TaskRevokedError,
    TimeLimitExceeded,
    WorkerLostError,
)
from kombu.exceptions import OperationalError

from celery_singleton_lock import SettingsError, claim_and_send, hold, inspection, singleton_task
from celery_singleton_lock.core.call_queue import Remove
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.keyspace import CallQueueNames, Keyspace
from celery_singleton_lock.core.process import identity_of_this_process
from celery_singleton_lock.errors import (
    LockConflict,
    LockKeyError,
    QueueFull,
    StoreError,
    StoreUnavailable,
)
from celery_singleton_lock.key_queue.sweep import QueueSweep
from celery_singleton_lock.message.header import HEADER, Delivery
from celery_singleton_lock.message.stored_message import StoredMessage
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.redis.call_queue import RedisCallQueue
from example_project.private_server import PrivateServer
from tests.chaos import proxy
from tests.harness.app_module import fresh_module
from tests.harness.bodies import power_cut
from tests.harness.calls import DAY, Calls
from tests.harness.deliveries import reported
from tests.harness.processes import ROOT, kill_process
from tests.harness.worker import CeleryWorker
from tests.integration.conftest import Consume
from tests.integration.key_queue import (
    APP,
    also_consume,
    begun,
    call_queue,
    calls_of,
    ended,
    make_due,
    numbers,
    running,
    unconsumed,
    unreachable_broker,
)
from tests.integration.stage import Stage, open_stage, wait_until

#: Before 5.7, the option has no effect: the call of a lost child fails.
RETRIES_LOST_WORKERS = hasattr(celery.Task, "retry_on_worker_lost")


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=3)


@pytest.fixture(scope="module")
def without_the_option(stage: Stage) -> CeleryWorker:
    """A worker whose tasks do not queue; it consumes what `also_consume` names."""
    return stage.worker(concurrency=2, queues=["without"], env={"OFF": "1"})


@pytest.fixture(scope="module")
def faulty(stage: Stage) -> CeleryWorker:
    """One that dies where a test lets it, and does not know the task `gone`."""
    for fault in ("died", "died-at-link"):
        stage.redis.set(fault, "1")  # until a test deletes it
    env = {"DIES": "1", "DIES_AT_LINK": "1", "WITHOUT": "1"}
    return stage.worker(concurrency=1, queues=["faulty"], env=env)


def kill(stage: Stage, pid: int) -> None:
    stage.journal.death(pid, kill_process(pid))


def in_queue(stage: Stage, name: str, task: Any = None) -> int:
    key = (task or stage.app.early).lock_key(name, 0)
    return int(stage.redis.zcard(CallQueueNames.of(key).queue))


def messages(stage: Stage, name: str) -> int:
    """The messages for ``name`` in the broker, delivered or not."""
    texts = [*stage.redis.lrange("celery", 0, -1), *stage.redis.hvals("unacked")]
    return sum(name in text for text in texts)


@pytest.fixture(params=["early", "late"])
def task(stage: Stage, request: pytest.FixtureRequest) -> Any:
    return getattr(stage.app, request.param)


def test_calls_run_one_after_another_in_the_order_in_which_they_were_made(
    stage: Stage, worker: CeleryWorker, task: Any, name: str
) -> None:
    results = [task.delay(name, number) for number in range(20)]
    assert ended(results) == list(range(20))
    assert numbers(stage, name) == list(range(20))
    assert stage.journal.overlaps() == []
    wait_until(lambda: not in_queue(stage, name), "the queue is empty")


def test_calls_that_wait_need_neither_a_worker_nor_the_broker(
    stage: Stage, worker: CeleryWorker, task: Any, name: str
) -> None:
    results = [running(stage, name, task)]
    results += [task.delay(name, number) for number in range(1, 20)]
    assert in_queue(stage, name) == 20
    others = [task.delay(f"{name}-{key}", key) for key in range(3)]
    assert ended(others) == [0, 1, 2], "other keys run meanwhile"
    assert messages(stage, f'"{name}"') <= 1, "the running one"
    stage.open(name)
    assert ended(results) == list(range(20))
    assert numbers(stage, name) == list(range(20))


def test_a_call_that_retries_keeps_its_place(stage: Stage, worker: CeleryWorker, name: str) -> None:
    results = [stage.app.retrying.delay(name, 0, countdown=0.2), stage.app.early.delay(name, 1)]
    assert ended(results) == [0, 1]
    assert numbers(stage, name) == [0, 0, 0, 1]


def test_a_message_without_a_place_takes_one_when_it_arrives(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    """It was sent by name."""
    results = [running(stage, name)]
    send = stage.app.app.send_task
    results.append(send(stage.app.early.name, (name, 1)))
    wait_until(lambda: in_queue(stage, name) == 2, "the message has a place")
    wait_until(lambda: messages(stage, name) <= 1, "and is acknowledged")
    results.append(stage.app.early.delay(name, 2))
    stage.open(name)
    assert ended(results) == [0, 1, 2]
    assert numbers(stage, name) == [0, 1, 2]


def test_a_call_with_a_countdown_keeps_no_other_waiting(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    stage.app.early.apply_async((name, 0), queue=name, countdown=3600)
    assert in_queue(stage, name) == 0, "its place is that of its arrival"
    assert stage.app.early.delay(name, 1).get(timeout=30) == 1


def test_a_call_has_not_ended_before_its_links_are_published(
    stage: Stage, faulty: CeleryWorker, name: str
) -> None:
    """Its process dies in between; the broker delivers it again."""
    stage.redis.delete("died-at-link")
    also_consume(stage, faulty, name)
    link = stage.app.early.si(name, 1).set(queue=name)
    stage.app.requeued.apply_async((name, 0), queue=name, link=link)
    begun(stage, name, 1)
    assert numbers(stage, name) == [0, 0, 1]
    assert stage.redis.get("died-at-link")


# Releases of clients that publish nothing: no test waits for the ttl, 300 s.


def three_waiting(stage: Stage, name: str) -> list[Any]:
    """Three calls that wait, for the key is held."""
    results = [stage.app.early.delay(name, number) for number in (1, 2, 3)]
    assert numbers(stage, name) in ([], [0]), "they wait"
    return results


def test_calls_that_wait_run_when_a_client_without_a_broker_has_released_the_key(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    with hold(name, scope="queue", ttl=300, app=stage.app.app):
        results = three_waiting(stage, name)
    assert ended(results) == [1, 2, 3]
    assert numbers(stage, name) == [1, 2, 3]


@pytest.mark.parametrize("kind", [pytest.param("early", marks=pytest.mark.slow), "late"])
def test_calls_that_wait_run_when_an_operator_has_released_the_key(
    stage: Stage, worker: CeleryWorker, kind: str, name: str, consume: Consume
) -> None:
    """The worker that held it is gone."""
    task = getattr(stage.app, f"patient_{kind}")
    other = consume(name)
    first = task.apply_async((name, 0, name), queue=name)
    begun(stage, name, 0)
    results = three_waiting(stage, name)
    power_cut(other, stage.journal)
    stage.open(name)
    also_consume(stage, worker, name)
    assert inspection.release(stage.app.app, task.lock_key(name, 0), None)
    assert ended(results) == [1, 2, 3]
    runs = [0, 1, 2, 3] if kind == "early" else [0, 0, 1, 2, 3]
    assert numbers(stage, name) == runs
    assert first.state == ("FAILURE" if kind == "early" else "SUCCESS")


@pytest.mark.skipif(not identity_of_this_process(), reason="needs Linux's /proc")
@pytest.mark.parametrize("kind", ["early", pytest.param("late", marks=pytest.mark.slow)])
def test_calls_that_wait_run_when_a_message_has_found_the_holder_dead(
    stage: Stage, worker: CeleryWorker, kind: str, name: str, consume: Consume
) -> None:
    """A call that is made proves no death: its message is in the store, and not in a worker."""
    other = consume(name)
    task = getattr(stage.app, f"patient_{kind}")
    first = task.apply_async((name, 0, name), queue=name)
    begun(stage, name, 0)
    results = three_waiting(stage, name)
    power_cut(other, stage.journal)
    stage.open(name)
    results.append(stage.app.early.delay(name, 4))
    key = task.lock_key(name, 0)
    assert stage.redis.pttl(key) > 60_000
    also_consume(stage, worker, name)
    results.append(stage.app.app.send_task(stage.app.early.name, (name, 5)))
    assert ended(results) == [1, 2, 3, 4, 5]
    runs = [0, 1, 2, 3, 4, 5] if kind == "early" else [0, 0, 1, 2, 3, 4, 5]
    assert numbers(stage, name) == runs
    if kind == "early":
        with pytest.raises(WorkerLostError, match="acknowledged"):
            first.get(timeout=30)
    else:
        assert first.get(timeout=30) == 0


# Ends of calls that no body returns from.


def is_killed(stage: Stage, call: Any, pid: int) -> None:
    kill(stage, pid)


def is_terminated(stage: Stage, call: Any, pid: int) -> None:
    call.revoke(terminate=True)


GATE = {"gate": "never opened"}
#: Its task, its options, what is done to its body, its error, and how often it begins.
ENDS: dict[str, tuple[str, dict[str, Any], Any, type[Exception] | None, int]] = {
    "fails": ("retrying", {"kwargs": {"fail": True}}, None, ValueError, 3),
    "is rejected": ("rejecting", {}, None, None, 1),
    "exits": ("exiting", {}, None, WorkerLostError, 1),
    "fails in before_start": ("never_begun", {}, None, RuntimeError, 0),
    "is not accepted": ("early", {"serializer": "pickle"}, None, None, 0),
    "late, is not accepted": ("late", {"serializer": "pickle"}, None, None, 0),
    "is killed": ("patient_early", {"kwargs": GATE}, is_killed, WorkerLostError, 1),
    "late, is killed": ("patient_late", {"kwargs": GATE}, is_killed, WorkerLostError, 1),
    "is terminated": ("early", {"kwargs": GATE}, is_terminated, TaskRevokedError, 1),
    "late, is terminated": ("late", {"kwargs": GATE}, is_terminated, TaskRevokedError, 1),
    **{
        f"{kind}, meets its hard time limit": (
            f"patient_{kind}",
            {"kwargs": GATE, "time_limit": 1},
            None,
            TimeLimitExceeded,
            1,
        )
        for kind in ("early", "late")
    },
}


@pytest.mark.parametrize("way", ENDS)
def test_however_a_call_ends_the_next_one_runs(
    stage: Stage, worker: CeleryWorker, name: str, way: str
) -> None:
    task, options, done_to, error, begins = ENDS[way]
    first = getattr(stage.app, task).apply_async((name, 0), **options)
    second = stage.app.early.delay(name, 1)
    if done_to is not None:
        done_to(stage, first, begun(stage, name, 0))
    assert second.get(timeout=30) == 1
    if error is not None:
        with pytest.raises(error):
            first.get(timeout=30)
    assert numbers(stage, name) == [0] * begins + [1]


def test_a_call_that_is_requeued_after_the_death_of_its_child_runs_before_the_next(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    results = [stage.app.requeued.delay(name, 0, gate=name), stage.app.requeued.delay(name, 1)]
    kill(stage, begun(stage, name, 0))
    stage.open(name)
    assert ended(results) == [0, 1]
    assert numbers(stage, name) == [0, 0, 1]


def test_the_queues_go_on_after_the_death_of_a_whole_worker(
    stage: Stage, worker: CeleryWorker, name: str, consume: Consume
) -> None:
    """One message was sent by name, and began at once, so the store has no message of it."""
    early, late, by_name = (f"{name}-{kind}" for kind in ("early", "late", "by-name"))
    other = consume(name, concurrency=3)
    firsts = [
        stage.app.early.apply_async(
            (early, 0, name), queue=name, link_error=stage.app.error_callback.s()
        ),
        stage.app.late.apply_async((late, 0, name), queue=name),
        stage.app.app.send_task(stage.app.early.name, (by_name, 0, name), queue=name),
    ]
    for key in (early, late, by_name):
        begun(stage, key, 0)
    results = [
        task.delay(key, number)
        for task, key in ((stage.app.early, early), (stage.app.late, late))
        for number in (1, 2)
    ]
    results.append(stage.app.early.delay(by_name, 1))
    power_cut(other, stage.journal)
    stage.open(name)
    also_consume(stage, worker, name)
    for first in (firsts[0], firsts[2]):
        with pytest.raises(WorkerLostError, match="acknowledged"):
            first.get(timeout=30)
    assert firsts[1].get(timeout=30) == 0
    assert ended(results) == [1, 2, 1, 2, 1]
    assert numbers(stage, early) == [0, 1, 2]
    assert numbers(stage, late) == [0, 0, 1, 2]
    assert numbers(stage, by_name) == [0, 1]
    begun(stage, firsts[0].id, 0)  # its error callback


def test_a_sweep_passes_over_a_queue_that_it_can_not_read(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    """Another program has written to its key. The calls of other keys are published."""
    unreadable, other = f"{name}-unreadable", f"{name}-other"
    for each in (unreadable, other):
        stage.app.early.apply_async((each, 0), queue=name)
    key = stage.app.early.lock_key(unreadable, 0)
    queue, calls, due = CallQueueNames.of(key)
    make_due(stage, unreadable)
    stage.redis.delete(name, calls)
    stage.redis.set(calls, "no hash")
    make_due(stage, other)
    wait_until(lambda: stage.redis.llen(name) == 1, "the other call is published again")
    worker.wait_for_log(f"can't check the queue of {re.escape(key)}")
    stage.redis.delete(queue, calls)
    stage.redis.zrem(due, key)


@pytest.mark.parametrize("is_silent", [False, True], ids=["down", "silent"])
def test_a_sweep_passes_over_a_call_whose_result_can_not_be_read(
    stage: Stage, name: str, redis_url: str, private_redis: PrivateServer, is_silent: bool
) -> None:
    """The calls of other keys are published nevertheless. Celery's client waits two minutes."""
    other = f"{name}-other"
    results = private_redis.url() if is_silent else "redis://127.0.0.1:1/0"
    env = {**stage.environment, "LOCK_URL": redis_url, "RESULT_URL": results}
    with fresh_module(APP, env) as app, ExitStack() as stack:
        calls = Calls(app.early._runtime().store)
        for each in (name, other):
            app.late.apply_async((each, 0), queue=name, ignore_result=True)
        calls.key = app.late.lock_key(name, 0)
        (place,) = calls.queue.calls(calls.key, most=1, timeout=5.0)
        calls.begin(Delivery.of(StoredMessage.from_bytes(place.message).headers).token)
        calls.lose_lease()
        calls.queue.defer(calls.key, seconds=0.0, timeout=5.0)
        (unpublished,) = calls.queue.calls(app.late.lock_key(other, 0), most=1, timeout=5.0)
        options: Any = {"seconds": 0.0, "timeout": 5.0, "unpublished": unpublished}
        calls.queue.defer(unpublished.key, **options)
        shard = Keyspace.shard(calls.key)
        wait_until(lambda: len(calls.queue.due(shard, limit=9, timeout=5.0)) == 2, "both are due")
        if is_silent:
            private_redis.pause()
            stack.callback(private_redis.resume)
        QueueSweep(app.app, lambda: calls.store, lambda: False).sweep()
        (unread,) = calls.queue.calls(calls.key, most=1, timeout=5.0)
        assert calls.queue.due(shard, limit=9, timeout=5.0) == []
    assert unread.copies == 1, "it was not published"
    assert stage.redis.llen(name) == 3, "the other call was"


def test_calls_that_are_revoked_while_they_wait_are_passed_over_at_once(
    stage: Stage, worker: CeleryWorker, task: Any, name: str
) -> None:
    """A sweep of a worker for each would take a second."""
    first = running(stage, name, task)
    revoked = [task.delay(name, number) for number in range(1, 21)]
    last = task.delay(name, 21)
    stage.app.app.control.revoke([call.id for call in revoked])
    worker.wait_for_log(rf"Tasks flagged as revoked: .*{revoked[-1].id}")
    stage.open(name)
    assert last.get(timeout=10) == 21
    for call in revoked:
        with pytest.raises(TaskRevokedError):
            call.get(timeout=30)
    assert (first.get(timeout=30), numbers(stage, name)) == (0, [0, 21])


def test_a_call_that_expires_while_it_waits_is_passed_over(
    stage: Stage, worker: CeleryWorker, task: Any, name: str
) -> None:
    first = running(stage, name, task)
    expiring, last = task.apply_async((name, 1), expires=0.5), task.delay(name, 2)
    expires_at = time.monotonic() + 0.5
    wait_until(lambda: time.monotonic() > expires_at, "its expiry passes")
    stage.open(name)
    assert last.get(timeout=30) == 2
    with pytest.raises(TaskRevokedError):
        expiring.get(timeout=30)
    assert (first.get(timeout=30), numbers(stage, name)) == (0, [0, 2])


def test_a_retry_that_is_revoked_lets_the_next_call_run(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    retrying = stage.app.retrying.delay(name, 0, countdown=2)
    begun(stage, name, 0)
    last = stage.app.early.delay(name, 1)
    wait_until(lambda: retrying.state == "RETRY", "it retries")
    retrying.revoke()
    assert last.get(timeout=30) == 1
    assert numbers(stage, name) == [0, 1]
    wait_until(lambda: retrying.state == "REVOKED", "its end is stored")


def test_a_call_whose_task_no_worker_knows_frees_its_claim_and_lets_the_next_one_run(
    stage: Stage, worker: CeleryWorker, faulty: CeleryWorker, name: str
) -> None:
    unique: Any = {"queue": name, "singleton": {"unique": "until_done"}}
    unknown = stage.app.gone.apply_async((name, 0), **unique)
    claim_and_send(stage.app.app, f"no.{name}", **unique)
    last = stage.app.early.delay(name, 1)
    claim = Keyspace.claim(stage.app.gone.name, stage.app.gone.lock_key(name, 0))
    assert stage.redis.exists(claim)
    assert stage.redis.keys(f"*:claim|no.{name}*")
    also_consume(stage, faulty, name)
    with pytest.raises(NotRegistered):
        unknown.get(timeout=30)
    assert last.get(timeout=30) == 1
    wait_until(lambda: not stage.redis.exists(claim), "its claim is free")
    wait_until(lambda: not stage.redis.keys(f"*:claim|no.{name}*"), "that without a queue too")


@pytest.fixture
def elsewhere(stage: Stage, redis_url: str) -> Mapping[str, str]:
    """The environment of another deployment, with the same store for locks."""
    locks = stage.environment["RESULT_URL"]
    urls = {"BROKER_URL": redis_url, "RESULT_URL": redis_url, "LOCK_URL": locks}
    return {**stage.environment, **urls}


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_sweep_leaves_a_call_of_another_broker_to_the_workers_there(
    stage: Stage, worker: CeleryWorker, name: str, elsewhere: Mapping[str, str], is_lost: bool
) -> None:
    result = stage.app.early.apply_async((name, 0), queue=name)
    with fresh_module(APP, elsewhere) as other:
        calls = Calls(other.early._runtime().store)
        calls.key = stage.app.early.lock_key(name, 0)
        if is_lost:
            (call,) = calls.queue.calls(calls.key, most=1, timeout=5.0)
            calls.queue.leave(calls.key, call.call_id, timeout=5.0)
        sweep = QueueSweep(other.app, lambda: calls.store, lambda: False)
        for _ in range(3):
            calls.queue.defer(calls.key, seconds=0.0, timeout=5.0)
            sweep.sweep()
        with redis.Redis.from_url(elsewhere["BROKER_URL"]) as broker:
            assert broker.keys() == []
    also_consume(stage, worker, name)
    if is_lost:
        with pytest.raises(TaskRevokedError):
            result.get(timeout=30)
    else:
        assert result.get(timeout=30) == 0


def test_a_worker_learns_another_spelling_of_its_broker_from_a_message(
    stage: Stage, name: str, consume: Consume
) -> None:
    spelled = stage.environment["BROKER_URL"].replace("127.0.0.1", "localhost")
    with fresh_module(APP, {**stage.environment, "BROKER_URL": spelled}) as publisher:
        results = [publisher.early.apply_async((name, n), queue=name) for n in range(3)]
        key = publisher.early.lock_key(name, 0)
        (first,) = call_queue(stage).calls(key, most=1, timeout=5.0)
        assert "localhost" in StoredMessage.from_bytes(first.message).broker
        process = consume(name)
        assert ended(results) == [0, 1, 2]
        assert numbers(stage, name) == [0, 1, 2]
    assert "calls of apps with the broker" not in process.log


def test_calls_that_wait_when_the_option_is_switched_off_run_in_order_and_once(
    stage: Stage, without_the_option: CeleryWorker, name: str
) -> None:
    results = unconsumed(stage, name, 4)
    also_consume(stage, without_the_option, name)
    assert ended(results) == [0, 1, 2, 3]
    assert numbers(stage, name) == [0, 1, 2, 3]
    wait_until(lambda: not in_queue(stage, name), "the queue is empty")


def test_calls_with_and_without_a_place_run_once_and_apart_while_the_option_is_deployed(
    stage: Stage, worker: CeleryWorker, without_the_option: CeleryWorker, name: str
) -> None:
    queues = [f"{name}-{n}" for n in range(2)]
    also_consume(stage, worker, queues[0])
    also_consume(stage, without_the_option, queues[1])
    results = []
    for number in range(4):
        for queue in queues:
            results.append(stage.app.early.apply_async((name, 2 * number), queue=queue))
            plain = stage.app.early.name, (name, 2 * number + 1)
            results.append(stage.app.app.send_task(*plain, queue=queue))
    ended(results)
    begun = numbers(stage, name)
    assert sorted(begun) == sorted([*range(8), *range(8)])
    assert [n for n in begun if n % 2 == 0] == [0, 0, 2, 2, 4, 4, 6, 6], "those with a place"
    assert stage.journal.overlaps() == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["early", "late"])
def test_no_call_is_taken_for_lost_when_its_worker_is_stopped(
    stage: Stage, name: str, kind: str, consume: Consume
) -> None:
    """Its end is in the store before the process exits."""
    task = getattr(stage.app, kind)
    results = [task.apply_async((name, number), queue=name) for number in range(60)]
    for number in (10, 30):
        stopped = consume(name)
        begun(stage, name, number)
        stopped.terminate()
        stopped.wait()
    consume(name)
    assert ended(results) == list(range(60))
    assert numbers(stage, name) == list(range(60))


@pytest.mark.slow
def test_the_queue_goes_on_without_a_result_backend(
    stage: Stage, name: str, consume: Consume
) -> None:
    first_worker = consume(name, env={"RESULTS": "disabled://"})
    stage.app.early.apply_async((name, 0, name), queue=name)
    begun(stage, name, 0)
    stage.app.early.apply_async((name, 1), queue=name)
    power_cut(first_worker, stage.journal)
    consume(name, env={"RESULTS": "disabled://"})
    begun(stage, name, 1)
    wait_until(lambda: not in_queue(stage, name), "both have ended")
    assert numbers(stage, name) == [0, 1]


def test_a_call_that_kills_its_process_each_time_fails_and_lets_the_next_call_run(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    """No bound of the broker ends it: each sweep publishes it again."""
    first, second = [stage.app.poison.delay(name, number) for number in (0, 1)]
    with pytest.raises(WorkerLostError, match="died each of the 3 times that it ran"):
        first.get(timeout=60)
    assert second.get(timeout=30) == 1
    assert numbers(stage, name) == [0, 0, 0, 1]
    # Any worker of the app may look at the queue: one of another test, too.
    wait_until(
        lambda: reported(stage.workers, EventName.REMOVED, reason="lost")[first.id] == 1,
        "the removal is reported once",
    )


def test_a_call_that_a_cold_shutdown_ends_fails_and_lets_the_next_call_run(
    stage: Stage, name: str, consume: Consume
) -> None:
    """Its message was acknowledged early. A softer stop reports no less than a kill."""
    first = stage.app.early.apply_async((name, 0, name), queue=name)
    second = stage.app.early.apply_async((name, 1), queue=name)
    ending = consume(name)
    begun(stage, name, 0)
    ending.send_signal(signal.SIGQUIT)
    with pytest.raises(WorkerLostError, match="a cold shutdown of its worker ended it"):
        first.get(timeout=30)
    ending.wait()
    assert rf"early[{first.id}] is lost" in ending.log
    assert inspection.explain(stage.app.app, first.id).fate == "failed"
    consume(name)
    assert second.get(timeout=30) == 1
    assert numbers(stage, name) == [0, 1]


def test_a_message_that_can_not_be_decoded_lets_the_next_call_run(
    stage: Stage, worker: CeleryWorker, task: Any, name: str
) -> None:
    results = [task.apply_async((name, number), queue=name) for number in (0, 1)]
    message = json.loads(stage.redis.lpop(name))
    stage.redis.lpush(name, json.dumps({**message, "body": b64encode(b"[").decode()}))
    also_consume(stage, worker, name)
    assert results[1].get(timeout=30) == 1
    assert numbers(stage, name) == [1]


def test_a_call_that_celery_retries_after_the_death_of_its_child_runs_before_the_next(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    results = [stage.app.retried.delay(name, 0, gate=name), stage.app.early.delay(name, 1)]
    kill(stage, begun(stage, name, 0))
    stage.open(name)
    if not RETRIES_LOST_WORKERS:
        with pytest.raises(WorkerLostError):
            results[0].get(timeout=60)
        assert ended(results[1:]) == [1]
        assert numbers(stage, name) == [0, 1]
        return
    assert ended(results) == [0, 1]
    assert numbers(stage, name) == [0, 0, 1]


def test_a_retry_with_another_key_runs_in_the_queue_of_that_key(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    there = f"{name}-there"
    moving = stage.app.moving.delay(name, 0, [there, name])
    assert moving.get(timeout=30) == 0
    assert (numbers(stage, name), numbers(stage, there)) == ([0, 0], [0])
    wait_until(lambda: in_queue(stage, name) == in_queue(stage, there) == 0, "it has ended")


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_call_whose_result_is_stored_does_not_run_again(
    stage: Stage, worker: CeleryWorker, name: str, has_begun: bool
) -> None:
    """Its worker did not tell the store that it has ended, or, an older one, that it has begun."""
    results = [stage.app.late.apply_async((name, number), queue=name) for number in (0, 1)]
    token = Delivery.of({"id": results[0].id, HEADER: sent_header(stage, name)}).token
    calls = calls_of(stage, name)
    if has_begun:
        calls.begin(token)
        calls.lose_lease()
    stage.app.app.backend.store_result(results[0].id, 0, "SUCCESS")
    stage.redis.delete(name)
    make_due(stage, name)
    also_consume(stage, worker, name)
    assert results[1].get(timeout=30) == 1
    assert numbers(stage, name) == [1]


def test_a_call_is_not_taken_for_an_earlier_one_with_its_id_that_ended_while_it_waited(
    stage: Stage, worker: CeleryWorker, name: str, task: Any
) -> None:
    """Their caller has named both. The broker loses the message of the second."""
    first = task.apply_async((name, 0, name), task_id=name)
    begun(stage, name, 0)
    task.apply_async((name, 1), task_id=name, queue=name)
    stage.open(name)
    assert first.get(timeout=30) == 0
    wait_until(lambda: stage.redis.delete(name), "the second is published")
    also_consume(stage, worker, name)
    make_due(stage, name)
    assert begun(stage, name, 1)
    assert numbers(stage, name) == [0, 1]


def sent_header(stage: Stage, queue: str) -> Any:
    (text,) = stage.redis.lrange(queue, 0, -1)
    return json.loads(text)["headers"][HEADER]


# What is lost on the way.


def test_a_call_that_the_broker_refuses_leaves_no_place(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    with unreachable_broker() as connection, pytest.raises(OperationalError):
        stage.app.early.apply_async((name, 0), connection=connection, task_id=name)
    assert in_queue(stage, name) == 0
    (end,) = stage.redis.keys(f"*:ended|*{name}*")
    assert stage.redis.ttl(end) > 6 * DAY, "the broker may have taken it nevertheless"
    assert stage.app.early.delay(name, 1).get(timeout=30) == 1
    assert numbers(stage, name) == [1]


def test_a_call_whose_publisher_dies_before_its_message_is_sent_runs_at_a_sweep(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    dies = f"""if True:
        import os
        from celery_singleton_lock.message.stored_message import StoredMessage
        StoredMessage.publish = lambda *_, **__: os._exit(9)
        from tests.apps.queue import early
        early.delay({name!r}, 0)
    """
    env = {**os.environ, **stage.environment}
    done = subprocess.run([sys.executable, "-c", dies], cwd=ROOT, env=env, timeout=60)
    assert done.returncode == 9
    assert in_queue(stage, name) == 1
    second = stage.app.early.delay(name, 1)
    make_due(stage, name)
    assert second.get(timeout=30) == 1
    assert numbers(stage, name) == [0, 1]


@pytest.mark.parametrize(
    ("part", "step"),
    [(RedisCallQueue, "join"), (StoredMessage, "publish")],
    ids=["join", "publish"],
)
def test_a_call_whose_publication_is_interrupted_leaves_no_place(
    stage: Stage,
    worker: CeleryWorker,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    part: Any,
    step: str,
) -> None:
    """By the soft time limit of the task that makes the call."""
    take = getattr(part, step) if part is RedisCallQueue else lambda *_, **__: None

    def interrupt(*args: Any, **options: Any) -> None:
        take(*args, **options)
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(part, step, interrupt)
    with pytest.raises(SoftTimeLimitExceeded):
        stage.app.early.delay(name, 0)
    assert in_queue(stage, name) == 0
    monkeypatch.undo()
    assert stage.app.early.delay(name, 1).get(timeout=30) == 1
    assert numbers(stage, name) == [1]


def test_a_call_behind_one_that_the_broker_refuses_runs_at_once(
    stage: Stage, worker: CeleryWorker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has joined meanwhile."""
    remove, behind = RedisCallQueue.remove, []

    def after_another_join(*args: Any, **options: Any) -> Any:
        behind.append(stage.app.early.delay(name, 1))
        return remove(*args, **options)

    with monkeypatch.context() as patched, unreachable_broker() as connection:
        patched.setattr(RedisCallQueue, "remove", after_another_join)
        with pytest.raises(OperationalError):
            stage.app.early.apply_async((name, 0), connection=connection)
    assert behind[0].get(timeout=30) == 1
    assert numbers(stage, name) == [1]


def test_a_join_without_a_reply_is_repeated_and_its_call_runs_once(
    stage: Stage, worker: CeleryWorker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_replies(monkeypatch, "join", 1)
    results = [stage.app.early.delay(name, number) for number in (0, 1)]
    assert ended(results) == [0, 1]
    assert numbers(stage, name) == [0, 1]


def test_a_call_of_which_no_reply_says_that_it_has_joined_is_unknown(
    stage: Stage, worker: CeleryWorker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_replies(monkeypatch, "join", 2)
    with pytest.raises(StoreUnavailable, match="it is unknown whether the call is in the queue"):
        stage.app.early.apply_async((name, 0), queue=name)
    assert in_queue(stage, name) == 1, "it has one, and a sweep publishes it"


def test_a_call_that_can_not_be_withdrawn_is_unknown(
    stage: Stage, worker: CeleryWorker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_replies(monkeypatch, "remove", 1)
    with (
        unreachable_broker() as connection,
        pytest.raises(StoreUnavailable, match=r"the broker refused.* it is unknown"),
    ):
        stage.app.early.apply_async((name, 0), connection=connection)


def test_a_call_that_has_begun_meanwhile_is_not_refused(
    stage: Stage, worker: CeleryWorker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker's error came late: a sweep has published the call."""
    queue: Any = call_queue(stage)
    remove = queue.remove

    def after_a_sweep(self: Any, request: Remove, *, timeout: float) -> Any:
        make_due(stage, name)
        begun(stage, name, 0)
        return remove(request, timeout=timeout)

    monkeypatch.setattr(type(queue), "remove", after_a_sweep)
    with unreachable_broker() as connection:
        result = stage.app.early.apply_async((name, 0), connection=connection)
    assert result.get(timeout=30) == 0
    assert numbers(stage, name) == [0]


def lose_replies(monkeypatch: pytest.MonkeyPatch, operation: str, count: int) -> None:
    """Let the store carry out an operation, and lose its first replies."""
    original, left = getattr(RedisCallQueue, operation), [None] * count

    def lose(*args: Any, **options: Any) -> Any:
        reply = original(*args, **options)
        if not left:
            return reply
        left.pop()
        raise StoreUnavailable("no reply")

    monkeypatch.setattr(RedisCallQueue, operation, lose)


def test_a_call_whose_message_the_broker_has_lost_is_published_again(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    results = unconsumed(stage, name, 3)
    assert stage.redis.delete(name) == 1
    also_consume(stage, worker, name)
    make_due(stage, name)
    assert ended(results) == [0, 1, 2]
    assert numbers(stage, name) == [0, 1, 2]


def test_the_next_call_runs_although_the_process_before_it_died_before_publishing_it(
    stage: Stage, faulty: CeleryWorker, name: str
) -> None:
    stage.redis.delete("died")
    also_consume(stage, faulty, name)
    results = unconsumed(stage, name, 3)
    # The parent makes it due when Celery notices the death; the deadline of the hint is a minute.
    assert [result.get(timeout=30) for result in results] == [0, 1, 2]
    assert stage.redis.get("died")
    assert numbers(stage, name) == [0, 1, 2]


def test_a_call_stays_in_its_queue_when_the_key_template_changes(
    stage: Stage, worker: CeleryWorker, name: str, consume: Consume
) -> None:
    first = running(stage, name)
    waiting = stage.app.early.apply_async((name, 1), queue=name)
    consume(name, env={"KEY": "other:{name}"})
    stage.open(name)
    assert ended([first, waiting]) == [0, 1]
    wait_until(lambda: not in_queue(stage, name), "the queue is empty")


def test_a_call_whose_key_can_not_be_computed_any_more_fails_and_leaves_its_queue(
    stage: Stage, name: str, consume: Consume
) -> None:
    """A deploy has changed the template of the key."""
    results = unconsumed(stage, name, 3)
    consume(name, env={"KEY": "{name.missing}"})
    for result in results:
        with pytest.raises(LockKeyError):
            result.get(timeout=20)
    wait_until(lambda: not in_queue(stage, name), "the queue is empty")


def test_a_call_that_has_no_key_any_more_runs_once_and_leaves_its_queue(
    stage: Stage, name: str, consume: Consume
) -> None:
    """A deploy has changed the function of the key."""
    results = unconsumed(stage, name, 3)
    consume(name, env={"NO_KEY": "1"})
    assert [result.get(timeout=20) for result in results] == [0, 1, 2]
    wait_until(lambda: not in_queue(stage, name), "the queue is empty")
    assert numbers(stage, name) == [0, 1, 2]


def test_a_call_that_fails_because_the_store_does_not_answer_leaves_its_queue(
    redis_url: str, tmp_path: Path, private_redis: PrivateServer, name: str
) -> None:
    env = {"LOCK_URL": private_redis.url(), "ON_STORE_ERROR": "raise"}
    with open_stage(redis_url, tmp_path, APP, env) as stage:
        stage.worker(concurrency=1)
        assert stage.app.early.delay(f"{name}-first", 0).get(timeout=30) == 0
        first, second = unconsumed(stage, name, 2)
        private_redis.pause()
        assert stage.app.app.control.add_consumer(name, reply=True, limit=1, timeout=60)
        with pytest.raises(StoreError):
            first.get(timeout=30)
        private_redis.resume()
        assert second.get(timeout=30) == 1
        assert numbers(stage, name) == [1]


def test_a_call_whose_grant_has_no_reply_runs_though_its_worker_dies(
    redis_url: str, tmp_path: Path, private_redis: PrivateServer, name: str
) -> None:
    """Its copy tells the store that no body has begun, and is acknowledged early."""
    with proxy.Proxy(private_redis.port) as link:
        lock_url = private_redis.url()
        env = {"LOCK_URL": lock_url, "TTL": "10"}
        with open_stage(redis_url, tmp_path, APP, env) as stage:
            through = {"LOCK_URL": lock_url.replace(str(private_redis.port), str(link.port))}
            worker = stage.worker(concurrency=1, env=through)
            assert stage.app.early.delay(f"{name}-first", 0).get(timeout=30) == 0
            (result,) = unconsumed(stage, name, 1)
            # The one process begins it when the release of the first has its reply.
            assert stage.app.unlocked.delay(f"{name}-unlocked", 0).get(timeout=30) == 0
            key, store = stage.app.early.lock_key(name, 0), Runtime.of(stage.app.app).store
            link.set(proxy.Mode(kind=proxy.Kind.NO_REPLIES))
            also_consume(stage, worker, name)
            wait_until(lambda: store.leases.inspect(key), "the lease is granted")
            # The other reply is that of the parent's sweep.
            wait_until(lambda: link.lost > 1, "its reply is lost")
            link.set(proxy.Mode(kind=proxy.Kind.NO_REQUESTS))  # so that it is not given back
            stage.app.app.control.cancel_consumer(name, destination=[worker.hostname])
            worker.wait_for_event(EventName.REQUEUED, task_id=result.id, reason="store")
            power_cut(worker, stage.journal)
            stage.worker(concurrency=1, queues=[name])
            assert result.get(timeout=60) == 0
            assert numbers(stage, name) == [0]


def test_a_header_that_names_another_key_gives_its_message_no_place_there(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    """A foreign publisher may write any header."""
    first = running(stage, name)
    other = f"{name}-other"
    headers = {HEADER: {"queue": stage.app.early.lock_key(name, 0)}}
    forged = stage.app.app.send_task(stage.app.early.name, (other, 1), headers=headers)
    assert forged.get(timeout=30) == 1, "it runs beside the holder of the key that it names"
    assert in_queue(stage, name) == 1
    stage.open(name)
    assert first.get(timeout=30) == 0


def test_an_equal_call_is_answered_by_the_one_that_waits_and_a_claim_ends_with_its_call(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    first = running(stage, name, stage.app.unique)
    assert stage.app.unique.delay(name, 0, gate=name).id == first.id
    assert in_queue(stage, name) == 1
    other = stage.app.early.delay(name, 2)
    stage.open(name)
    assert ended([first, other]) == [0, 2]
    again = stage.app.unique.delay(name, 0)
    assert again.id != first.id
    assert again.get(timeout=30) == 0


@pytest.mark.parametrize("countdown", [None, 0.1], ids=["joins-at-publish", "joins-at-the-worker"])
def test_a_claim_lasts_while_its_call_waits_for_its_turn(
    stage: Stage, worker: CeleryWorker, name: str, countdown: float | None
) -> None:
    first = stage.app.early.delay(name, 1, gate=name)
    begun(stage, name, 1)
    options: Any = {"countdown": countdown, "singleton": {"unique_for": 1.5}}
    second = stage.app.unique.apply_async((name, 2), **options)
    wait_until(lambda: in_queue(stage, name) == 2, "it has its place")
    claim = Keyspace.claim(stage.app.unique.name, stage.app.unique.lock_key(name, 0))
    assert stage.redis.pttl(claim) > 60_000
    assert stage.app.unique.apply_async((name, 2), **options).id == second.id
    stage.open(name)
    assert ended([first, second]) == [1, 2]
    assert stage.app.unique.apply_async((name, 2), **options).id != second.id


def test_an_equal_call_that_others_wait_for_runs_though_one_behind_it_has_the_claim(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    """The one with the claim has a countdown, and takes its place when it arrives."""
    claimed = stage.app.unique.apply_async((name, 0), countdown=3)
    link = stage.app.early.si(f"{name}-link", 1)
    linked = stage.app.unique.apply_async((name, 0), link=link)
    assert linked.id != claimed.id
    last = stage.app.early.delay(name, 2)
    assert [one.get(timeout=30) for one in (linked, last, claimed)] == [0, 2, 0]
    begun(stage, f"{name}-link", 1)


def test_a_duplicate_of_a_period_that_others_wait_for_fails_and_leaves_its_queue(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    period: Any = {"unique": "until_expired", "unique_for": 600}
    first = stage.app.early.apply_async((name, 0), singleton=period)
    assert first.get(timeout=30) == 0
    link = stage.app.early.si(f"{name}-link", 9)
    linked = stage.app.early.apply_async((name, 1), singleton=period, link=link)
    with pytest.raises(LockConflict, match="the end of a period"):
        linked.get(timeout=20)
    assert stage.app.early.delay(name, 2).get(timeout=20) == 2
    assert numbers(stage, name) == [0, 2]


def test_a_publisher_that_dies_before_its_call_has_a_place_holds_the_claim_for_seconds(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    dies = f"""if True:
        import os
        from celery_singleton_lock.stores.redis.call_queue import RedisCallQueue
        RedisCallQueue.join = lambda *_, **__: os._exit(9)
        from tests.apps.queue import unique
        unique.delay({name!r}, 0)
    """
    env = {**os.environ, **stage.environment}
    done = subprocess.run([sys.executable, "-c", dies], cwd=ROOT, env=env, timeout=60)
    assert done.returncode == 9
    claim = Keyspace.claim(stage.app.unique.name, stage.app.unique.lock_key(name, 0))
    assert 0 < stage.redis.pttl(claim) <= 10_000
    stage.redis.delete(claim)  # as it would be after ten seconds
    first = stage.app.early.delay(name, 1, gate=name)
    second = stage.app.unique.delay(name, 0)
    assert stage.redis.pttl(claim) > 60_000
    stage.open(name)
    assert ended([first, second]) == [1, 0]


# Refusals.


def test_a_call_is_refused_if_the_store_keeps_no_queues() -> None:
    app = Celery("nowhere", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = "redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3/0"

    @singleton_task(app=app, on_conflict="queue", shared=False)
    def work() -> None: ...

    with pytest.raises(SettingsError, match="keeps no queues"):
        work.delay()


def test_a_full_queue_raises_where_the_call_is_made(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    results = [running(stage, name, stage.app.few)]
    results.append(stage.app.few.delay(name, 1))
    with pytest.raises(QueueFull, match="2 calls are in the queue") as caught:
        stage.app.few.delay(name, 2)
    assert caught.value.depth == 2
    sent = stage.app.app.send_task(stage.app.few.name, (name, 3))
    with pytest.raises(LockConflict, match="2 calls are in the queue"):
        sent.get(timeout=30)
    stage.open(name)
    assert ended(results) == [0, 1]


@pytest.mark.parametrize("env", [{}, {"NO_JOIN": "1"}], ids=["joins-at-publish", "at-the-worker"])
def test_a_retry_takes_a_place_in_a_full_queue(
    stage: Stage, worker: CeleryWorker, name: str, consume: Consume, env: dict[str, str]
) -> None:
    """Started work is never refused. The retry has another key than its call."""
    full = f"{name}-full"
    results = [running(stage, full, stage.app.few), stage.app.few.delay(full, 1)]
    consume(name, env=env)
    results.append(stage.app.few.apply_async((name, 2), {"retry_as": full}, queue=name))
    wait_until(lambda: in_queue(stage, full, stage.app.few) == 3, "the retry has a place")
    stage.open(full)
    assert ended(results) == [0, 1, 2]
    assert numbers(stage, full) == [0, 1, 2]


def test_a_call_is_not_published_while_the_store_is_down(stage: Stage, name: str) -> None:
    env = {**stage.environment, "LOCK_URL": "redis://127.0.0.1:1/0"}
    with fresh_module(APP, env) as publisher, pytest.raises(StoreUnavailable):
        publisher.early.delay(name, 0)
    assert messages(stage, name) == 0
