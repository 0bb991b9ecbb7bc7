"""A lock store that is away, or comes back empty: nothing is lost, and nothing runs twice at once.

The store is a server of its own here, or the broker and result backend too, as in small setups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import ModuleType

import pytest
import redis

from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.runtime import Runtime
from example_project.private_server import PrivateServer
from tests.harness.busy import busy
from tests.harness.deliveries import wait_until
from tests.harness.etcd import EtcdCluster
from tests.harness.journal import Journal, events
from tests.harness.keys import Keys
from tests.harness.processes import kill_process
from tests.harness.redlock_nodes import RedlockNodes
from tests.harness.worker import CeleryWorker
from tests.harness.zookeeper import ZooKeeperEnsemble

LOSS = "tests.apps.loss"
CRASH = "tests.apps.crash"

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]

# Seconds.
TTL = 3.0
SLACK = 0.9
# Of leases that a renewal has to find lost, at the latest after a third of it. Twenty bodies are
# interrupted by then on a busy machine too.
LONG = 12.0
# Seconds. The queue of a process repeats its requests every second.
UNTIL_REPEATED = 6.0


@pytest.fixture
def environment(environment: dict[str, str], private_redis: PrivateServer) -> dict[str, str]:
    """The lock store is apart from broker and result backend."""
    return {**environment, "LOCK_URL": private_redis.url(), "TTL": str(TTL)}


@pytest.fixture
def long_leases(environment: dict[str, str]) -> None:
    environment["TTL"] = str(LONG)


@pytest.fixture
def one_for_all(environment: dict[str, str], private_redis: PrivateServer) -> None:
    """The lock store is the broker and the result backend too."""
    url = private_redis.url()
    environment.update(BROKER_URL=url, RESULT_URL=url, LOCK_URL=url)
    with redis.Redis.from_url(url) as client:
        # Else a write may wait in the server's memory for the disk, and be gone after a kill.
        client.config_set("appendfsync", "no")


def bring_back(server: PrivateServer, *, with_data: bool) -> None:
    """Start a server that was killed."""
    if not with_data:
        server.stop()  # removes its files
    server.start()


def said(journal: Journal, text: str) -> bool:
    return text in [note.data["text"] for note in events(journal.records(), "note")]


# Down before the body.


@pytest.mark.slow
@pytest.mark.parametrize("outage", ["killed", "stopped"])
def test_a_task_whose_store_is_down_is_neither_run_nor_lost(
    private_redis: PrivateServer,
    worker: StartWorker,
    load_app: LoadApp,
    journal: Journal,
    outage: str,
) -> None:
    loss = load_app(LOSS)
    process = worker(LOSS)
    private_redis.kill() if outage == "killed" else private_redis.pause()
    results = [loss.early.delay("early", "sleep", 0), loss.late.delay("late", "sleep", 0)]
    for result in results:
        process.wait_for_event(EventName.STORE_UNREACHABLE, task_id=result.id)
        process.wait_for_event(EventName.REQUEUED, task_id=result.id, reason="store")
    assert journal.records() == []
    private_redis.start() if outage == "killed" else private_redis.resume()
    assert [result.get(timeout=30)["lost"] for result in results] == [False, False]
    assert len(journal.runs()) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("one_for_all")
@pytest.mark.parametrize("with_data", [True, False], ids=["persistent", "empty"])
def test_a_message_that_only_the_child_has_outlives_store_and_broker(
    private_redis: PrivateServer,
    worker: StartWorker,
    load_app: LoadApp,
    journal: Journal,
    with_data: bool,
) -> None:
    process = worker(LOSS)
    result = load_app(LOSS).cut.delay("k", cut_before=private_redis.pid)
    # The child killed the server after the broker had let go of the message, and has to keep it.
    process.wait_for_event(EventName.STORE_UNREACHABLE)
    process.wait_for_log("could not requeue")
    assert said(journal, "cut")
    assert journal.runs() == []
    bring_back(private_redis, with_data=with_data)
    journal.wait_for_ends(key="k")
    # Our connections are to the dead server; a fresh app has new ones.
    assert not load_app(LOSS).app.AsyncResult(result.id).get(timeout=30)["lost"]
    assert [run.task_id for run in journal.runs("k")] == [result.id]


# Down at the release.


@pytest.mark.slow
@pytest.mark.parametrize("link", [False, True], ids=["alone", "with a link"])
def test_a_result_stands_though_the_store_is_down_at_the_release(
    private_redis: PrivateServer,
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    journal: Journal,
    link: bool,
) -> None:
    # Far longer than it takes to start the server again.
    ttl = 3 * TTL
    environment["TTL"] = str(ttl)
    loss = load_app(LOSS)
    process = worker(LOSS)
    with redis.Redis.from_url(private_redis.url()) as client:
        client.config_set("appendfsync", "no")
    # With a link the release comes when the body ends, and without when its result is stored.
    following = loss.early.si("following", "sleep", 0) if link else None
    result = loss.cut.apply_async(("k",), {"cut_after": private_redis.pid}, link=following)
    assert not result.get(timeout=30)["lost"]
    process.wait_for_event(EventName.STORE_UNREACHABLE, action="released-later")
    assert result.state == "SUCCESS"
    private_redis.kill()  # it is dead; this reaps it
    private_redis.start()
    Keys(loss.app).wait_until_free(loss.cut.lock_key("k"), timeout=UNTIL_REPEATED)
    assert len(journal.runs("k")) == 1
    if link:
        journal.wait_for_ends(key="following")
    assert not process.events(EventName.RELEASE_FAILED)


@contextmanager
def away(server: PrivateServer, outage: str) -> Iterator[None]:
    """The store does not answer, answers BUSY, or refuses scripts: its user has lost the right."""
    if outage == "busy":
        with busy(lambda: redis.Redis(port=server.port)):
            yield
        return
    if outage == "no rights":
        with redis.Redis(port=server.port) as admin:
            admin.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")
            yield
            admin.execute_command("ACL", "SETUSER", "default", "+evalsha", "+eval")
        return
    server.pause()
    try:
        yield
    finally:
        server.resume()


@pytest.mark.parametrize(
    ("outage", "pool"),
    [
        ("stopped", "prefork"),
        ("no rights", "prefork"),
        pytest.param("busy", "prefork", marks=pytest.mark.slow),
        pytest.param("stopped", "threads", marks=pytest.mark.slow),
        pytest.param("stopped", "solo", marks=pytest.mark.slow),
        pytest.param("stopped", "gevent", marks=pytest.mark.slow),
        pytest.param("stopped", "eventlet", marks=pytest.mark.slow),
    ],
)
def test_a_body_that_ends_during_an_outage_frees_its_key_when_the_store_is_back(
    private_redis: PrivateServer,
    redis_client: redis.Redis,
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    journal: Journal,
    outage: str,
    pool: str,
) -> None:
    environment["TTL"] = "60"
    start_worker = partial(worker, LOSS, pool=pool)
    outage_of_store = away(private_redis, outage)
    assert_freed_after(outage_of_store, start_worker, load_app(LOSS), redis_client, journal)


@pytest.fixture(params=["redlock", "etcd", "zookeeper"])
def three_nodes(
    request: pytest.FixtureRequest, environment: dict[str, str]
) -> Iterator[RedlockNodes | EtcdCluster | ZooKeeperEnsemble]:
    """The lock store is on three nodes."""
    if request.param == "redlock":
        with RedlockNodes(3) as nodes:
            environment["LOCK_URL"] = nodes.url()
            yield nodes
    else:
        shared: EtcdCluster | ZooKeeperEnsemble = request.getfixturevalue(request.param)
        environment["LOCK_URL"] = shared.url(f"t{time.monotonic_ns()}")
        yield shared


@pytest.mark.slow
def test_a_body_that_ends_without_a_majority_frees_its_key_when_there_is_one_again(
    three_nodes: RedlockNodes | EtcdCluster | ZooKeeperEnsemble,
    redis_client: redis.Redis,
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    journal: Journal,
) -> None:
    environment["TTL"] = "60"
    loss = load_app(LOSS)
    outage = three_nodes.paused([0, 1])
    assert_freed_after(outage, partial(worker, LOSS), loss, redis_client, journal)
    Runtime.of(loss.app).close()


def assert_freed_after(
    outage: AbstractContextManager[None],
    start_worker: Callable[[], CeleryWorker],
    loss: ModuleType,
    broker: redis.Redis,
    journal: Journal,
) -> None:
    """A body ends in the outage; after it, its key is free, and its completion record is written.

    So a redelivered message does not run again.
    """
    result = loss.late.delay("k", "until_notified", 60)
    [message] = broker.lrange("celery", 0, -1)
    process = start_worker()
    journal.wait_for_starts(key="k")
    with outage:
        journal.note("go on")
        assert not result.get(timeout=30)["lost"]
        process.wait_for_event(EventName.STORE_UNREACHABLE, action="released-later")
    Keys(loss.app).wait_until_free(loss.late.lock_key("k"), timeout=UNTIL_REPEATED)
    assert not process.events(EventName.RELEASE_FAILED)
    broker.lpush("celery", message)
    process.wait_for_event(EventName.DROPPED, task_id=result.id, reason="done")
    assert len(journal.runs("k")) == 1


def test_a_release_is_reported_as_failed_when_the_process_ends_before_the_store_answers(
    private_redis: PrivateServer, worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    loss = load_app(LOSS)
    process = worker(LOSS, env={"TTL": "60"})
    result = loss.late.delay("k", "until_notified", 60)
    journal.wait_for_starts(key="k")
    private_redis.pause()
    journal.note("go on")
    result.get(timeout=30)
    process.wait_for_event(EventName.STORE_UNREACHABLE, action="released-later")
    assert not process.events(EventName.RELEASE_FAILED)
    process.terminate()
    process.wait()
    [failure] = process.events(EventName.RELEASE_FAILED)
    assert 0 < float(failure.fields["frees_in"]) < 60
    private_redis.resume()


@pytest.mark.parametrize(
    "killed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["lives", "killed"]
)
def test_a_block_that_ends_during_an_outage_frees_its_key_when_the_store_is_back(
    private_redis: PrivateServer,
    worker: StartWorker,
    load_app: LoadApp,
    journal: Journal,
    killed: bool,
) -> None:
    """If its process is killed before, the worker's parent does, by the note of the lease."""
    loss = load_app(LOSS)
    process = worker(LOSS, env={"TTL": "60"})
    loss.holding.delay("k")
    [start] = journal.wait_for_starts(key="k")
    keys, key = Keys(loss.app), Runtime.of(loss.app).keyspace.lock("held", "k")
    wait_until(lambda: keys.find(key), "the block is entered")
    private_redis.pause()
    journal.note("go on")
    wait_until(lambda: said(journal, "left"), "the block is left")
    if killed:
        kill_process(start.pid)
        process.wait_for_log("freed when the store does it")
    private_redis.resume()
    keys.wait_until_free(key, timeout=UNTIL_REPEATED)
    if not killed:
        assert keys.find(loss.holding.lock_key("k")) is not None, "its task goes on"


# Back without its data, while bodies run.


def lose_all_under_running_bodies(
    server: PrivateServer,
    process: CeleryWorker,
    load_app: LoadApp,
    journal: Journal,
    count: int,
) -> None:
    """Needs `long_leases`."""
    late = load_app(LOSS).late
    names = [f"k{number}" for number in range(count)]
    ids = [late.delay(name, "sleep", 60, 0.2).id for name in names]
    journal.wait_for_starts(count)
    server.restart(keep_data=False)
    at = time.monotonic()
    journal.wait_for_ends(2 * count, timeout=60)
    fresh = load_app(LOSS).app
    assert [fresh.AsyncResult(id).get(timeout=30)["lost"] for id in ids] == [False] * count
    runs = [journal.runs(name) for name in names]
    assert [[run.error for run in pair] for pair in runs] == [["LeaseInterrupt", None]] * count
    assert [[run.task_id for run in pair] for pair in runs] == [[id, id] for id in ids]
    assert max(first.end for first, _ in runs) - at < LONG / 3
    lost = process.events(EventName.LEASE_LOST)
    assert {event.fields["reason"] for event in lost} == {"gone"}, "found by a renewal"
    assert max(first.fence or 0 for first, _ in runs) < min(second.fence or 0 for _, second in runs)
    assert journal.overlaps() == []
    # Nothing comes again: each was requeued once. A child reports it after it has published the
    # copy, which another may have run by then.
    wait_until(lambda: process.log.count("reason=lease-lost") >= count, "all have reported")
    assert process.log.count("reason=lease-lost") == count


@pytest.mark.slow
@pytest.mark.usefixtures("one_for_all", "long_leases")
def test_twenty_bodies_under_which_store_and_broker_are_emptied_are_requeued_and_finish(
    private_redis: PrivateServer, worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    process = worker(LOSS, concurrency=20)
    lose_all_under_running_bodies(private_redis, process, load_app, journal, 20)


@pytest.mark.slow
@pytest.mark.usefixtures("one_for_all")
def test_bodies_whose_store_and_broker_stay_away_are_ended_and_kept_until_both_are_back(
    private_redis: PrivateServer, worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    loss = load_app(LOSS)
    process = worker(LOSS, concurrency=5)
    ids = [loss.late.delay(f"k{number}", "sleep", 60, 0.2).id for number in range(5)]
    journal.wait_for_starts(5)
    private_redis.kill()
    at = time.monotonic()
    ends = journal.wait_for_ends(5)
    assert max(end.at for end in ends) - at < TTL + SLACK
    wait_until(lambda: process.log.count("could not requeue") >= 5, "all are held")
    bring_back(private_redis, with_data=False)
    journal.wait_for_ends(10)
    fresh = load_app(LOSS).app
    assert [fresh.AsyncResult(id).get(timeout=30)["lost"] for id in ids] == [False] * 5
    assert journal.overlaps() == []
    assert len(journal.runs()) == 10


def test_the_leases_of_children_that_die_while_the_store_is_unresponsive_are_freed_when_it_answers(
    private_redis: PrivateServer, worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    """Their parent waits once for a store that does not answer, not for each of them."""
    crash = load_app(CRASH)
    process = worker(CRASH, concurrency=4)
    names = [f"k{number}" for number in range(4)]
    results = [crash.early.delay(name, "never") for name in names]  # its ttl is 60 s
    starts = journal.wait_for_starts(4)
    private_redis.pause()
    for start in starts:
        kill_process(start.pid)
    # Celery has noticed all four deaths, on the thread that would have waited for each.
    wait_until(lambda: all(result.failed() for result in results), "four children are lost")
    private_redis.resume()
    with redis.Redis.from_url(private_redis.url()) as client:
        keys = [crash.early.lock_key(name, "never") for name in names]
        wait_until(lambda: not client.exists(*keys), "their keys are free", timeout=20)
    wait_until(lambda: len(process.events(EventName.FREED)) == 4, "each release is reported")
    assert process.log.count("freed when the store does it") == 1
