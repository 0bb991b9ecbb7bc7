"""A body that keeps the GIL longer than its ttl keeps its lease: its worker parent renews it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from celery_singleton_lock import is_skipped
from celery_singleton_lock.core.events import EventName
from example_project.private_server import PrivateServer
from tests.harness.deliveries import wait_until
from tests.harness.etcd import EtcdCluster
from tests.harness.journal import Journal
from tests.harness.keys import Keys
from tests.harness.processes import kill_process
from tests.harness.redlock_nodes import RedlockNodes
from tests.harness.worker import CeleryWorker
from tests.harness.zookeeper import ZooKeeperEnsemble

pytestmark = pytest.mark.slow

GIL = "tests.apps.gil"

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]

# Seconds: of the leases, and of a call that outlives one more than twice.
TTL = 2.0
CALL = 5.0
# What the parent's log says once it renews for a child.
TAKEN_OVER = r"singleton: pid (\d+) doesn't renew (\S+); its worker does"


@pytest.fixture
def gil(load_app: LoadApp) -> ModuleType:
    return load_app(GIL)


@pytest.fixture
def keys(gil: ModuleType) -> Keys:
    return Keys(gil.app)


def send_duplicates(task: Any, firsts: dict[str, Any], every: float) -> list[Any]:
    """Call ``task`` for each key again and again until the result of each is there."""
    results = []
    while not all(first.ready() for first in firsts.values()):
        results += [task.delay(key, 0.0) for key in firsts]
        time.sleep(every)  # the pace of the calls; nothing waits for it
    return results


def assert_no_run_came_between(journal: Journal, firsts: dict[str, Any]) -> None:
    assert journal.overlaps() == []
    for key, result in firsts.items():
        first, *later = journal.runs(key)
        assert first.task_id == result.id
        assert all(other.begin > first.end for other in later)


# --- the promise ---------------------------------------------------------------------------------


def test_ten_bodies_that_keep_the_gil_for_9_seconds_of_a_ttl_of_2_keep_their_leases(
    worker: StartWorker, gil: ModuleType, journal: Journal
) -> None:
    worker(GIL, concurrency=10, queues=["first"])
    worker(GIL, concurrency=2)
    firsts = {
        key: gil.early.apply_async((key, 9.0), queue="first")
        for key in (f"k{number}" for number in range(10))
    }
    journal.wait_for_starts(10)
    duplicates = send_duplicates(gil.early, firsts, every=0.5)
    assert [first.state for first in firsts.values()] == ["SUCCESS"] * 10
    assert [first.get()["lost"] for first in firsts.values()] == [False] * 10
    skipped = [is_skipped(duplicate.get(timeout=60)) for duplicate in duplicates]
    assert sum(skipped) >= 10 * 5, "the duplicates met the leases"
    assert_no_run_came_between(journal, firsts)
    assert all(run.end - run.begin >= 9 for run in (journal.runs(key)[0] for key in firsts))


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_in_pools_without_children_only_the_flag_and_the_fence_show_it(
    worker: StartWorker, gil: ModuleType, journal: Journal, pool: str
) -> None:
    process = worker(GIL, pool=pool, concurrency=1, queues=["first"])
    first = gil.deaf.apply_async(("k", CALL), queue="first")
    journal.wait_for_starts(1)
    worker(GIL, concurrency=1)
    gil.competitor.delay("k").get(timeout=60)
    assert first.get(timeout=60)["lost"]
    run, other = journal.runs("k")
    assert other.fence > run.fence
    assert "its worker does" not in process.log


def test_a_hold_in_a_plain_task_is_renewed_too(
    worker: StartWorker, gil: ModuleType, journal: Journal
) -> None:
    worker(GIL, concurrency=1)
    # Sixteen at once are; the seventeenth has no note in shared memory.
    assert gil.holding.delay("k", 17, CALL).get(timeout=60) == [False] * 16 + [True]


# --- ends ----------------------------------------------------------------------------------------


def test_a_child_killed_in_its_call_holds_its_key_no_longer_than_the_parents_release(
    worker: StartWorker, load_app: LoadApp, environment: dict[str, str], journal: Journal
) -> None:
    environment["TTL"] = "9"
    gil = load_app(GIL)
    keys, key = Keys(gil.app), gil.early.lock_key("k", 0.0)
    process = worker(GIL, concurrency=1)
    gil.early.delay("k", 60.0)
    [start] = journal.wait_for_starts(1)
    process.wait_for_log(TAKEN_OVER)  # the key has its whole ttl from here
    kill_process(start.pid)
    died = f"pool process {start.pid} died"
    process.wait_for_event(EventName.FREED, key=key, reason=died)
    assert keys.find(key) is None
    assert not gil.early.delay("k", 0.0).get(timeout=60)["lost"]


def test_a_stopped_child_keeps_its_key_and_ends_well_when_it_wakes(
    worker: StartWorker, gil: ModuleType, journal: Journal
) -> None:
    process = worker(GIL, concurrency=1, queues=["first"])
    worker(GIL, concurrency=1)
    first = gil.early.apply_async(("k", 1.0), queue="first")
    [start] = journal.wait_for_starts(1)
    os.kill(start.pid, signal.SIGSTOP)
    process.wait_for_log(TAKEN_OVER)
    until = time.monotonic() + 2 * TTL
    while time.monotonic() < until:
        assert is_skipped(gil.early.delay("k", 0.0).get(timeout=60))
    os.kill(start.pid, signal.SIGCONT)
    assert not first.get(timeout=60)["lost"]
    assert_no_run_came_between(journal, {"k": first})


def test_a_warm_shutdown_keeps_the_leases_of_what_still_runs(
    worker: StartWorker, gil: ModuleType, journal: Journal
) -> None:
    process = worker(GIL, concurrency=1, queues=["first"])
    worker(GIL, concurrency=1)
    first = gil.early.apply_async(("k", CALL), queue="first")
    journal.wait_for_starts(1)
    process.terminate()
    process.wait_for_log("Warm shutdown")
    duplicates = send_duplicates(gil.early, {"k": first}, every=0.2)
    assert not first.get(timeout=60)["lost"]
    assert process.wait() == 0
    assert any(is_skipped(duplicate.get(timeout=60)) for duplicate in duplicates)
    assert_no_run_came_between(journal, {"k": first})
    process.assert_none_left()


def test_a_cold_shutdown_ends_the_parent_heartbeat(
    worker: StartWorker, gil: ModuleType, keys: Keys, journal: Journal
) -> None:
    process = worker(GIL, concurrency=1)
    gil.early.delay("k", 60.0)
    journal.wait_for_starts(1)
    process.wait_for_log(TAKEN_OVER)
    process.send_signal(signal.SIGQUIT)
    process.wait()
    process.kill_group()  # what the pool left of its own
    keys.wait_until_free(gil.early.lock_key("k", 0.0), timeout=TTL + 10)


# --- outages -------------------------------------------------------------------------------------


@contextmanager
def away(server: PrivateServer, seconds: float) -> Iterator[None]:
    server.pause()
    time.sleep(seconds)  # the outage
    server.resume()
    yield


def test_a_store_that_does_not_answer_for_half_a_ttl_costs_no_lease(
    private_redis: PrivateServer,
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    journal: Journal,
) -> None:
    environment |= {"LOCK_URL": private_redis.url(), "TTL": str(2 * TTL)}
    gil = load_app(GIL)
    process = worker(GIL, concurrency=1, queues=["first"])
    worker(GIL, concurrency=1)
    first = gil.early.apply_async(("k", 3 * CALL), queue="first")
    process.wait_for_log(TAKEN_OVER)
    with away(private_redis, TTL):
        duplicates = send_duplicates(gil.early, {"k": first}, every=0.5)
    assert not first.get(timeout=60)["lost"]
    assert sum(is_skipped(duplicate.get(timeout=60)) for duplicate in duplicates) > 10
    assert_no_run_came_between(journal, {"k": first})


def test_a_broker_that_is_restarted_does_not_stop_the_parent_heartbeat(
    private_redis: PrivateServer,
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    redis_url: str,
    journal: Journal,
) -> None:
    environment |= {"BROKER_URL": private_redis.url(), "LOCK_URL": redis_url}
    gil = load_app(GIL)
    keys, key = Keys(gil.app), gil.early.lock_key("k", 0.0)
    process = worker(GIL, concurrency=1)
    first = gil.early.delay("k", 2 * CALL)
    journal.wait_for_starts(1)
    token = keys.record(key).token
    private_redis.kill()
    seen = 0
    while seen < 4:  # in 4 times half a ttl, without a renewal, it would be gone
        wait_until(lambda: keys.record(key).ttl < 0.75 * TTL, "some of it is gone")
        wait_until(lambda: keys.record(key).ttl > 0.9 * TTL, "it is renewed")
        seen += 1
    private_redis.start()
    assert keys.record(key).token == token
    assert not first.get(timeout=90)["lost"]
    assert process.alive


# --- children that come and go -------------------------------------------------------------------


@pytest.mark.parametrize("churn", ["recycling", "autoscale", "pool restart"])
def test_whichever_child_it_is_its_lease_is_kept(
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    journal: Journal,
    churn: str,
) -> None:
    environment["SETTINGS"] = '{"worker_pool_restarts": true}'
    gil = load_app(GIL)
    options: dict[str, Any] = {
        "recycling": {"concurrency": 2, "args": ["--max-tasks-per-child", "1"]},
        "autoscale": {"args": ["--autoscale", "4,1"]},
        "pool restart": {"concurrency": 2},
    }[churn]
    process = worker(GIL, **options)
    pids = {gil.brief.delay(f"b{number}").get(timeout=60) for number in range(8)}
    if churn == "pool restart":
        [reply] = gil.app.control.pool_restart(
            destination=[process.hostname], reply=True, timeout=60
        )
        assert reply == {process.hostname: {"ok": "reload started"}}

        def is_another() -> bool:
            # Billiard's child looks whether it is to end when it receives a task, and Celery sends
            # one, to one child.
            gil.brief.delay("again").get(timeout=60)
            return len(process.children()) == 2 and not pids & set(process.children())

        wait_until(is_another, "the pool is another one")
    firsts = {key: gil.early.delay(key, CALL) for key in ("k0", "k1")}
    journal.wait_for_starts(2)
    duplicates = send_duplicates(gil.early, firsts, every=0.5)
    results = [first.get(timeout=60) for first in firsts.values()]
    assert [result["lost"] for result in results] == [False, False]
    if churn != "autoscale":
        assert not pids & {result["pid"] for result in results}, "these are other children"
    for duplicate in duplicates:
        duplicate.get(timeout=60)
    assert_no_run_came_between(journal, firsts)


# --- other stores --------------------------------------------------------------------------------


def keeps_its_lease(
    url: str,
    ttl: float,
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    journal: Journal,
) -> bool:
    """Whether a body that keeps the GIL for two and a half ttls still has its lease then."""
    environment |= {"LOCK_URL": url, "TTL": str(ttl)}
    gil = load_app(GIL)
    process = worker(GIL, concurrency=2)
    first = gil.deaf.delay("k", 2.5 * ttl)
    journal.wait_for_starts(1)
    duplicates = send_duplicates(gil.early, {"k": first}, every=0.5)
    kept = not first.get(timeout=60)["lost"]
    for duplicate in duplicates:
        duplicate.get(timeout=60)
    if kept:
        process.wait_for_log(TAKEN_OVER)
        assert_no_run_came_between(journal, {"k": first})
    return kept


def test_a_quorum_renews_for_a_starving_child(
    worker: StartWorker, load_app: LoadApp, environment: dict[str, str], journal: Journal
) -> None:
    with RedlockNodes(3) as nodes:
        assert keeps_its_lease(nodes.url(), TTL, worker, load_app, environment, journal)


def test_etcd_renews_for_a_starving_child(
    etcd: EtcdCluster,
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    journal: Journal,
) -> None:
    url = etcd.url(f"t{time.monotonic_ns()}")
    assert keeps_its_lease(url, 2 * TTL, worker, load_app, environment, journal)


def test_zookeeper_cannot_renew_for_a_starving_child(
    zookeeper: ZooKeeperEnsemble,
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    journal: Journal,
) -> None:
    url = zookeeper.url(f"t{time.monotonic_ns()}")
    assert not keeps_its_lease(url, 2 * TTL, worker, load_app, environment, journal)
