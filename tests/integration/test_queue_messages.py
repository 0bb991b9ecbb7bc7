"""``on_conflict="queue"``: how the messages of a queue travel, whatever the broker is."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import celery
import kombu
import pytest
import redis
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError, WorkerLostError
from kombu import Connection, Exchange, Queue

from celery_singleton_lock import inspection
from celery_singleton_lock.core.keyspace import CallQueueNames
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.key_queue.sweep import QueueSweep
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.redis.call_queue import RedisCallQueue
from example_project.private_server import PrivateServer
from tests.harness.app_module import fresh_module
from tests.harness.bodies import power_cut
from tests.harness.calls import DAY
from tests.harness.sentinels import Sentinels, cut_replication
from tests.harness.worker import CeleryWorker
from tests.integration.conftest import Consume
from tests.integration.key_queue import (
    APP,
    also_consume,
    begun,
    bodies,
    call_queue,
    ended,
    make_due,
    running,
    unconsumed,
)
from tests.integration.stage import Stage, open_stage, wait_until

needs_batches = pytest.mark.skipif(
    not hasattr(kombu.Producer, "batch"), reason="kombu has Producer.batch() since 5.7"
)


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=2)


@needs_batches
def test_calls_in_a_batch_of_a_producer_run_in_order(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    app = stage.app.app
    with app.producer_pool.acquire(block=True) as producer, producer.batch():
        results = [
            stage.app.early.apply_async((name, number), producer=producer) for number in range(3)
        ]
    assert ended(results) == [0, 1, 2]
    assert bodies(stage, name) == [(name, 0), (name, 1), (name, 2)]


def test_a_call_that_waits_is_reported_as_sent(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    """Celery publishes its event `task-sent` through the producer that it is given."""
    first = running(stage, name)
    with fresh_module(APP, stage.environment) as publisher, stage.redis.pubsub() as events:
        publisher.app.conf.task_send_sent_event = True
        events.psubscribe("*celeryev/task.sent")
        assert events.get_message(timeout=30)["type"] == "psubscribe"
        results = [publisher.early.delay(name, number) for number in (1, 2)]
        sent = [json.loads(events.get_message(timeout=30)["data"]) for _ in results]
        uuids = [json.loads(b64decode(event["body"]))["uuid"] for event in sent]
        assert uuids == [result.id for result in results]
        stage.open(name)
        assert ended([first, *results]) == [0, 1, 2]


def test_results_are_sent_to_the_caller_of_a_call_that_waited(
    stage: Stage, name: str, consume: Consume
) -> None:
    """The `rpc://` backend writes the queue of the caller's thread into each message."""
    env = {**stage.environment, "RESULTS": "rpc://"}
    consume(name, concurrency=2, env=env)
    with fresh_module(APP, env) as publisher:
        results = [publisher.early.apply_async((name, n), queue=name) for n in range(3)]
        assert ended(results) == [0, 1, 2]


@pytest.mark.slow
def test_results_of_calls_without_a_body_are_sent_to_their_callers(
    redis_url: str, tmp_path: Path, name: str
) -> None:
    """One is cancelled, the other is lost with its worker. `rpc://` needs the stored message."""
    with open_stage(redis_url, tmp_path, APP, {"RESULTS": "rpc://"}) as stage:
        first_worker = stage.worker(concurrency=1)
        lost = running(stage, name)
        cancelled = stage.app.early.delay(name, 1)
        call = inspection.find_call(stage.app.app, cancelled.id)
        assert call is not None
        assert inspection.cancel(stage.app.app, call)
        power_cut(first_worker, stage.journal)
        stage.worker(concurrency=1)
        with pytest.raises(TaskRevokedError, match="taken out"):
            cancelled.get(timeout=30)
        with pytest.raises(WorkerLostError, match="acknowledged"):
            lost.get(timeout=30)


def test_priorities_are_of_keys_not_of_the_calls_of_one(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    results = [
        stage.app.early.apply_async((name, number), queue=name, priority=priority)
        for number, priority in enumerate([0, 9, 3, 6])
    ]
    also_consume(stage, worker, name)
    assert ended(results) == [0, 1, 2, 3]
    assert bodies(stage, name) == [(name, number) for number in range(4)]


def replaced_by(stage: Stage, name: str, acknowledged: str, canvas: Any) -> list[Any]:
    """A call that a canvas has replaced after a second call was made; both."""
    replacing = getattr(stage.app, f"replacing_{acknowledged}")
    results = [replacing.delay(name, 0, canvas, gate=f"{name}-replacing")]
    results.append(stage.app.early.delay(name, 1))
    stage.open(f"{name}-replacing")
    return results


def wait_until_gone(stage: Stage, name: str) -> None:
    """Neither a call nor a lease is left of a key."""
    key = stage.app.early.lock_key(name, 0)
    names = [key, *CallQueueNames.of(key)[:2]]
    wait_until(lambda: not stage.redis.exists(*names), f"{name} is free, and its queue empty")


def chord_of(first: Any, second: Any, third: Any) -> Any:
    return chord([first, second], third)


def first_of(first: Any, *_: Any) -> Any:
    return first


@pytest.mark.parametrize(
    ("acknowledged", "task", "canvas", "result"),
    [
        ("early", "early", first_of, 0),
        ("late", "unlocked", chain, 2),
        ("early", "unlocked", group, [0, 1, 2]),
        ("late", "early", chord_of, 2),
    ],
    ids=["task", "chain", "group", "chord"],
)
def test_a_call_that_is_replaced_by_calls_of_other_keys_leaves_its_queue_at_once(
    stage: Stage,
    worker: CeleryWorker,
    name: str,
    acknowledged: str,
    task: str,
    canvas: Callable[..., Any],
    result: Any,
) -> None:
    keys = [f"{name}-{number}" for number in range(3)]
    members = [getattr(stage.app, task).si(key, number) for number, key in enumerate(keys)]
    members[0].kwargs["gate"] = name
    replaced, last = replaced_by(stage, name, acknowledged, canvas(*members))
    assert last.get(timeout=30) == 1, "it does not wait for the canvas"
    stage.open(name)
    assert replaced.get(timeout=30) == result
    assert bodies(stage, name) == [(name, 0), (name, 1)]
    members_run = [(key, number) for number, key in enumerate(keys[: 1 if result == 0 else 3])]
    assert sorted(bodies(stage, *keys)) == members_run
    for key in (name, *keys):
        wait_until_gone(stage, key)


@pytest.mark.parametrize("acknowledged", ["early", "late"])
def test_a_task_of_the_same_key_that_replaces_a_call_runs_in_its_place(
    stage: Stage, worker: CeleryWorker, name: str, acknowledged: str
) -> None:
    results = replaced_by(stage, name, acknowledged, stage.app.early.si(name, 10))
    assert ended(results) == [10, 1]
    assert bodies(stage, name) == [(name, 0), (name, 10), (name, 1)]
    wait_until_gone(stage, name)


@pytest.mark.parametrize(
    ("acknowledged", "canvas"),
    [("early", chain), ("late", group), ("early", chord_of)],
    ids=["chain", "group", "chord"],
)
def test_the_calls_of_the_same_key_in_a_canvas_that_replaces_a_call_are_new_ones(
    stage: Stage, worker: CeleryWorker, name: str, acknowledged: str, canvas: Callable[..., Any]
) -> None:
    """They take their places behind the calls that were made before."""
    members = [stage.app.early.si(name, number) for number in (10, 11, 12)]
    replaced, last = replaced_by(stage, name, acknowledged, canvas(*members))
    assert replaced.get(timeout=30) == ([10, 11, 12] if canvas is group else 12)
    assert last.get(timeout=30) == 1
    assert [number for _, number in bodies(stage, name)] == [0, 1, 10, 11, 12]
    wait_until_gone(stage, name)


def test_an_end_without_a_reply_is_repeated_and_the_next_call_runs_once(
    stage: Stage, name: str, consume: Consume
) -> None:
    consume(name, concurrency=2, env={"NO_REPLY": "1"})
    results = unconsumed(stage, name, 4)
    assert ended(results) == [0, 1, 2, 3]
    assert bodies(stage, name) == [(name, number) for number in range(4)]


def test_a_broker_that_does_not_answer_neither_fails_nor_delays_the_end_of_a_call(
    redis_url: str, tmp_path: Path, name: str
) -> None:
    with (
        PrivateServer() as broker,
        open_stage(redis_url, tmp_path, APP, {"BROKER_URL": broker.url()}) as stage,
    ):
        worker = stage.worker(concurrency=1)
        first = running(stage, name)
        second = stage.app.early.delay(name, 1)
        broker.pause()
        stage.open(name)
        assert first.get(timeout=30) == 0
        worker.wait_for_log("could not publish .*, the next call of")
        assert not stage.redis.exists(stage.app.early.lock_key(name, 0)), "its key is free"
        broker.resume()
        assert second.get(timeout=30) == 1, "it was due again in a second"
        assert bodies(stage, name) == [(name, 0), (name, 1)]
        (end,) = wait_until(lambda: stage.redis.keys(f"*:ended|*{second.id}*"), "it has ended")
        assert stage.redis.ttl(end) > 6 * DAY, "the broker may have a first copy"


def test_a_call_that_kombu_publishes_again_after_a_reconnect_has_one_message(
    redis_url: str, tmp_path: Path, name: str
) -> None:
    with (
        PrivateServer() as broker,
        open_stage(redis_url, tmp_path, APP, {"BROKER_URL": broker.url()}) as stage,
        ThreadPoolExecutor() as pool,
    ):
        policy = {"max_retries": 1000, "interval_start": 0.1, "interval_max": 0.1}
        options = {"queue": name, "retry": True, "retry_policy": policy}
        stage.app.early.apply_async((f"{name}-x", 0), queue=name)  # the producer is connected
        broker.stop()
        call = pool.submit(stage.app.early.apply_async, (name, 0), **options)
        key = stage.app.early.lock_key(name, 0)
        places = partial(call_queue(stage).calls, key, most=9, timeout=5.0)
        wait_until(places, "it has a place, and the broker is down")
        broker.start()
        assert call.result(timeout=30)
        with redis.Redis.from_url(broker.url()) as client:
            assert client.llen(name) == 1
        assert [place.copies for place in places()] == [1]


@pytest.mark.slow
@pytest.mark.skipif(celery.__version__ < "5.7", reason="kombu repeats it, as often as it is told")
def test_a_link_is_kept_if_the_broker_refuses_it_for_a_while(
    redis_url: str, tmp_path: Path, name: str
) -> None:
    """Celery 5.7 would repeat the publish, and tells kombu not to."""
    with (
        PrivateServer() as broker,
        open_stage(redis_url, tmp_path, APP, {"BROKER_URL": broker.url()}) as stage,
    ):
        worker = stage.worker(concurrency=1)
        there = f"{name}-there"
        link = stage.app.early.si(there, 1)
        first = stage.app.early.apply_async((name, 0), {"gate": name}, link=link)
        begun(stage, name, 0)
        broker.stop(keep_data=True)
        stage.open(name)
        assert first.get(timeout=30) == 0
        worker.wait_for_log("could not publish")
        broker.start()
        begun(stage, there, 1)
        wait_until_gone(stage, there)


def test_a_sweep_publishes_a_bounded_number_of_calls(
    redis_url: str, tmp_path: Path, name: str
) -> None:
    with open_stage(redis_url, tmp_path, APP) as stage:
        keys = [f"{name}-{number}" for number in range(150)]
        for key in keys:
            stage.app.early.apply_async((key, 0), queue=name)
        store = Runtime.of(stage.app.app).store
        sweep = QueueSweep(stage.app.app, lambda: store, lambda: False)
        stage.redis.delete(name)
        for key in keys:
            make_due(stage, key)
        published, counts = 0, []
        while published < len(keys):
            sweep.sweep()
            # Which of the due keys a sweep gets is random.
            counts.append(stage.redis.llen(name) - published)
            published += counts[-1]
        assert max(counts) <= 100
        assert sum(counts) == 150


def test_each_look_declares_what_the_broker_has_lost_since_the_last_one(
    redis_url: str, tmp_path: Path, name: str
) -> None:
    """kombu declares once for each connection, and Redis drops what no binding leads to a queue."""
    with open_stage(redis_url, tmp_path, APP) as stage:
        entity = Queue(name, Exchange(f"{name}-topic", "topic"), routing_key="#")
        to: dict[str, Any] = {"exchange": entity.exchange, "declare": [entity]}
        stage.app.early.apply_async((name, 0), routing_key="any", **to)
        store = Runtime.of(stage.app.app).store
        sweep = QueueSweep(stage.app.app, lambda: store, lambda: False)
        for copies in (2, 3):
            assert stage.redis.delete(f"_kombu.binding.{name}-topic", name) == 2
            make_due(stage, name)

            def is_published(copies: int = copies) -> bool:
                sweep.sweep()
                key = stage.app.early.lock_key(name, 0)
                (call,) = call_queue(stage).calls(key, most=1, timeout=5.0)
                return call.copies == copies

            wait_until(is_published, "it is published again")
            assert stage.redis.llen(name) == 1


def test_a_sweep_asks_for_some_of_many_shards_and_in_time_for_all(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster has 256: workers that asked for all each second would keep its nodes busy."""
    runtime = Runtime.of(stage.app.app)
    keyspace = replace(runtime.keyspace, shards=256)
    monkeypatch.setattr(runtime, "keyspace", keyspace)
    asked: list[str] = []

    def due(_: Any, shard: str, **options: Any) -> list[str]:
        asked.append(shard)
        return []

    monkeypatch.setattr(RedisCallQueue, "due", due)
    sweep = QueueSweep(stage.app.app, lambda: runtime.store, lambda: False)
    sweep.sweep()
    assert len(asked) == len(set(asked)) == 12
    for _ in range(500):  # each shard is missed by all with a probability of 1e-11
        sweep.sweep()
    assert set(asked) == set(keyspace.all_shards())


def test_a_worker_without_the_option_sweeps_at_the_queues_when_it_starts(
    redis_url: str, tmp_path: Path, name: str
) -> None:
    """No message is left in the broker, and the option was switched off meanwhile."""
    with open_stage(redis_url, tmp_path, APP) as stage:
        results = unconsumed(stage, name, 2)
        assert stage.redis.delete(name) == 1
        make_due(stage, name)
        stage.worker(concurrency=1, queues=[name], env={"OFF": "1"})
        assert [result.get(timeout=30) for result in results] == [0, 1]


@pytest.mark.parametrize(
    "pool",
    [
        "threads",
        pytest.param("solo", marks=pytest.mark.slow),
        "gevent",
        pytest.param("eventlet", marks=pytest.mark.slow),
    ],
)
def test_in_each_pool_calls_run_in_order_and_one_that_the_broker_lost_is_published_again(
    redis_url: str, tmp_path: Path, name: str, pool: str
) -> None:
    pytest.importorskip(pool if pool in ("gevent", "eventlet") else "threading")
    with open_stage(redis_url, tmp_path, APP) as stage:
        results = unconsumed(stage, name, 6)
        assert stage.redis.delete(name) == 1
        stage.worker(pool=pool, concurrency=3, queues=[name])
        make_due(stage, name)
        assert [result.get(timeout=30) for result in results] == [*range(6)]
        assert bodies(stage, name) == [(name, number) for number in range(6)]
        assert stage.journal.overlaps() == []


@pytest.mark.parametrize("pool", ["gevent", pytest.param("eventlet", marks=pytest.mark.slow)])
def test_where_threads_are_greenlets_a_queue_goes_on_after_calls_that_are_discarded(
    redis_url: str, tmp_path: Path, name: str, pool: str
) -> None:
    """The thread that settles their ends comes and goes. A later one once got its sockets."""
    pytest.importorskip(pool)
    with open_stage(redis_url, tmp_path, APP) as stage:
        worker = stage.worker(pool=pool, concurrency=3, queues=["celery"])
        for turn in range(3):
            key = f"{name}-{turn}"
            running(stage, key)
            calls = [stage.app.early.delay(key, number) for number in range(1, 11)]
            revoked = calls[1::2]
            stage.app.app.control.revoke([call.id for call in revoked])
            worker.wait_for_log(rf"Tasks flagged as revoked: .*{revoked[-1].id}")
            stage.open(key)
            assert ended(calls[::2]) == [1, 3, 5, 7, 9]
            wait_until(lambda calls=revoked: {c.state for c in calls} == {"REVOKED"}, "all ended")
        assert "cannot switch to a different thread" not in worker.log
        assert "a request to the store failed" not in worker.log


def test_a_store_that_is_emptied_loses_the_calls_that_wait_and_no_key_is_stuck(
    redis_url: str, tmp_path: Path, private_redis: PrivateServer, name: str
) -> None:
    env = {"LOCK_URL": private_redis.url()}
    with open_stage(redis_url, tmp_path, APP, env) as stage:
        published, _ = unconsumed(stage, name, 2)
        with redis.Redis.from_url(private_redis.url()) as locks:
            locks.flushall()
        stage.worker(concurrency=1, queues=[name])
        assert published.get(timeout=30) == 0, "its message is in the broker"
        following = stage.app.early.apply_async((name, 2), queue=name)
        assert following.get(timeout=30) == 2
        assert bodies(stage, name) == [(name, 0), (name, 2)]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_failover_that_loses_the_last_writes_loses_joins_and_no_key_is_stuck(
    redis_url: str, tmp_path: Path, private_sentinels: Sentinels, name: str
) -> None:
    """The end of the first call is lost too. Its result is known, so it does not run again."""
    servers, ended_early = private_sentinels, f"{name}-ended"
    with open_stage(redis_url, tmp_path, APP, {"LOCK_URL": servers.url}) as stage:
        stage.worker(concurrency=2)
        calls = [running(stage, name), stage.app.early.delay(name, 1)]
        also_running = running(stage, ended_early, stage.app.late)
        old = servers.master()
        cut_replication(old, servers.replicas())
        stage.app.early.delay(name, 2)  # is lost
        stage.open(ended_early)
        assert also_running.get(timeout=30) == 0
        old.kill()
        servers.wait_until_promoted(old)
        stage.open(name)

        def call(key: str, number: int) -> Any:
            with suppress(StoreError):
                return stage.app.early.delay(key, number)

        for key in (name, ended_early):
            calls.append(wait_until(partial(call, key, 3), "the new master takes calls"))
        assert [one.get(timeout=60) for one in calls] == [0, 1, 3, 3]
        assert [number for _, number in bodies(stage, name)] == [0, 1, 3]
        assert [number for _, number in bodies(stage, ended_early)] == [0, 3]
        assert stage.journal.overlaps() == []


@pytest.mark.slow
def test_calls_that_wait_when_the_arguments_of_the_broker_s_queue_change_run_in_order(
    redis_url: str, rabbit_url: str, tmp_path: Path, name: str
) -> None:
    """RabbitMQ refuses a declaration with the former ones."""
    env = {"BROKER_URL": rabbit_url, "LIMITS": json.dumps({"x-max-length": 5})}
    with open_stage(redis_url, tmp_path, APP, env) as stage:
        former = stage.worker(concurrency=1, queues=["limited"])
        first, *others = [
            stage.app.late.apply_async((name, number, name), queue="limited") for number in range(3)
        ]
        begun(stage, name, 0)
        power_cut(former, stage.journal)
        with Connection(rabbit_url) as connection:
            connection.default_channel.queue_delete("limited")
        env = {"LIMITS": json.dumps({"x-max-length": 7})}
        stage.worker(concurrency=1, queues=["limited"], env=env)
        stage.open(name)
        assert ended([first, *others]) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"x-message-ttl": 1000}, {"x-max-length": 1}], ids=str)
def test_calls_that_a_limited_queue_of_the_broker_drops_run_in_order(
    redis_url: str, rabbit_url: str, tmp_path: Path, name: str, limits: Mapping[str, int]
) -> None:
    """RabbitMQ drops a message after its time, or the oldest one of a queue that is full."""
    env = {"BROKER_URL": rabbit_url, "LIMITS": json.dumps(limits)}
    with open_stage(redis_url, tmp_path, APP, env) as stage:
        keys = [f"{name}-a", f"{name}-b"]
        results = [
            stage.app.early.apply_async((key, number), queue="limited")
            for number in range(3)
            for key in keys
        ]
        with Connection(rabbit_url) as connection:

            def waiting() -> int:
                return int(connection.default_channel.queue_declare("limited", passive=True)[1])

            left = 1 if "x-max-length" in limits else 0
            wait_until(lambda: waiting() == left, "the broker has dropped the others")
        stage.worker(concurrency=1, args=["-Q", "limited"])
        for key in keys:
            make_due(stage, key)
        assert ended(results) == [0, 0, 1, 1, 2, 2]
        for key in keys:
            assert bodies(stage, key) == [(key, 0), (key, 1), (key, 2)]
