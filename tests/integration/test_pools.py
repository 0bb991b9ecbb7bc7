"""In every pool: exclusion, skip, renewal, release, and no key left behind."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import redis

from celery_singleton_lock import LeaseLost, is_skipped
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.runtime import Runtime
from tests.harness.deliveries import wait_until
from tests.harness.journal import Journal, Record
from tests.harness.keys import EVERY_NAME
from tests.harness.worker import CeleryWorker

POOLS = "tests.apps.pools"

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]

eventlet = pytest.param(
    "eventlet",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("eventlet") is None, reason="eventlet is not installed"
    ),
)
every_pool = pytest.mark.parametrize(
    "pool",
    [
        "prefork",
        "threads",
        pytest.param("solo", marks=pytest.mark.slow),
        "gevent",
        pytest.param("eventlet", marks=[*eventlet.marks, pytest.mark.slow]),
    ],
)
green_pool = pytest.mark.parametrize("pool", ["gevent", eventlet])


def started(worker: StartWorker, pool: str, **env: str) -> list[CeleryWorker]:
    """Workers with room for several bodies; of a solo pool that takes several workers."""
    count = 3 if pool == "solo" else 1
    workers = [worker(POOLS, pool=pool, concurrency=3, env=env, wait=False) for _ in range(count)]
    return [process.wait_until_ready() for process in workers]


def notes(journal: Journal, text: str, **wanted: Any) -> list[Record]:
    return [
        record
        for record in journal.records()
        if record.data.get("text") == text
        and all(wanted[name] == getattr(record, name) for name in wanted)
    ]


def wait_for_note(journal: Journal, text: str, **wanted: Any) -> Record:
    found = journal.wait_for(lambda _: notes(journal, text, **wanted), what=f"the note {text!r}")
    return found[0]


def held_keys(client: redis.Redis) -> list[str]:
    """Every key of ours but those that stay: the hash of the shard, and the number of shards."""
    keys: Any = client.keys(EVERY_NAME)
    return sorted(key for key in keys if not Keyspace.stays(key))


def wait_until_free(client: redis.Redis, *, seconds: float = 10) -> None:
    """Far less than the ttl of `brief`: what frees the key is the release."""
    deadline = time.monotonic() + seconds
    while held_keys(client) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert held_keys(client) == []


@every_pool
def test_a_body_longer_than_its_ttl_is_renewed_and_excludes_duplicates(
    pool: str, worker: StartWorker, load_app: LoadApp, journal: Journal, redis_client: redis.Redis
) -> None:
    pools = load_app(POOLS)
    started(worker, pool)
    first = pools.work.delay("k")
    journal.wait_for_starts(1, key="k")
    early = pools.work.delay("k")
    assert is_skipped(early.get(timeout=20))
    assert wait_for_note(journal, "outlived", key="k").data["lost"] is False
    late = pools.work.delay("k")
    assert is_skipped(late.get(timeout=20))
    assert late.get()["holder"]["task_id"] == first.id
    pools.gate("other").touch()
    pools.work.delay("other").get(timeout=20)  # another key runs beside it
    assert not first.ready()
    pools.gate("k").touch()
    assert not is_skipped(first.get(timeout=20))
    wait_until_free(redis_client)
    assert journal.overlaps() == []
    assert [run.task_id for run in journal.runs("k")] == [first.id]
    assert notes(journal, EventName.LEASE_LOST) == []


@pytest.mark.parametrize(
    ("pool", "slow"),
    [
        pytest.param("prefork", "signal", marks=pytest.mark.slow),
        ("threads", "signal"),
        pytest.param("prefork", "log", marks=pytest.mark.slow),
        pytest.param("solo", "signal", marks=pytest.mark.slow),
        pytest.param("gevent", "signal", marks=pytest.mark.slow),
        pytest.param("eventlet", "signal", marks=[*eventlet.marks, pytest.mark.slow]),
    ],
)
def test_a_slow_observer_of_one_loss_costs_no_other_lease(
    pool: str,
    slow: str,
    worker: StartWorker,
    load_app: LoadApp,
    journal: Journal,
    redis_client: redis.Redis,
) -> None:
    pools = load_app(POOLS)
    started(worker, pool, SLOW=slow)
    assert lose_one_of_two(pools, journal, redis_client) is False
    pools.gate("observer").touch()
    pools.gate("k").touch()
    wait_until_free(redis_client)


@pytest.mark.parametrize(
    "pool", ["gevent", pytest.param("eventlet", marks=[*eventlet.marks, pytest.mark.slow])]
)
def test_a_receiver_that_uses_the_client_of_the_bodies_changes_no_tasks_outcome(
    pool: str, worker: StartWorker, load_app: LoadApp, journal: Journal, redis_client: redis.Redis
) -> None:
    """A socket that was opened on another hub fails in the greenlet that uses it next."""
    pools = load_app(POOLS)
    worker(POOLS, pool=pool, concurrency=5, env={"COUNTED": "1"})
    count_a_loss_and_then_tasks(pools, journal, redis_client)


def count_a_loss_and_then_tasks(
    pools: ModuleType, journal: Journal, redis_client: redis.Redis
) -> None:
    """The receiver of the loss is the first that uses the client of the bodies.

    Raises:
        Exception: A task has failed.
    """
    pools.work.delay("k")
    journal.wait_for_starts(1)
    redis_client.delete(pools.work.lock_key("k"))
    wait_until(lambda: redis_client.get("counted:lease-lost"), "the loss is counted")
    for result in [pools.count.delay() for _ in range(20)]:
        result.get(timeout=20)
    pools.gate("k").touch()


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["threads", "gevent", eventlet])
def test_the_log_goes_on_beside_a_receiver_that_blocks(
    pool: str, worker: StartWorker, load_app: LoadApp, journal: Journal, redis_client: redis.Redis
) -> None:
    pools = load_app(POOLS)
    process = worker(POOLS, pool=pool, concurrency=5, env={"SLOW": "signal"})
    for key in "abcd":
        pools.work.delay(key)
    journal.wait_for_starts(4)
    for key in "abc":
        redis_client.delete(pools.work.lock_key(key))
    for _ in range(3):
        assert is_skipped(pools.work.delay("d").get(timeout=20))
    wait_until(lambda: len(process.events(EventName.LEASE_LOST)) == 3, "the losses are logged")
    wait_until(lambda: len(process.events(EventName.CONFLICT)) == 3, "the conflicts are logged")
    slow = process.wait_for_log("has run for 10 s")
    assert "tests.apps.pools._block" in slow.string
    assert wait_for_note(journal, "observing")
    for key in ("observer", *"abcd"):
        pools.gate(key).touch()


def lose_one_of_two(pools: ModuleType, journal: Journal, redis_client: redis.Redis) -> bool:
    """Take one of a body's two leases, whose observer blocks; whether the other is lost too."""
    pools.nested.delay("k")
    journal.wait_for_starts(1, key="k")
    redis_client.delete(Runtime.of(pools.app).keyspace.lock("inner", "k"))
    wait_for_note(journal, "observing")
    return bool(wait_for_note(journal, "outlived").data["lost"])


@pytest.mark.parametrize(
    "pool",
    [
        "prefork",
        pytest.param("solo", marks=pytest.mark.slow),
        pytest.param("gevent", marks=pytest.mark.slow),
        pytest.param("eventlet", marks=[*eventlet.marks, pytest.mark.slow]),
    ],
)
def test_a_body_is_interrupted_before_any_observer_of_its_loss_has_returned(
    pool: str, worker: StartWorker, load_app: LoadApp, journal: Journal, redis_client: redis.Redis
) -> None:
    # Not in the threads pool: there a blocking call ends first.
    pools = load_app(POOLS)
    started(worker, pool, SLOW="signal")
    pools.interruptible.delay("k")
    journal.wait_for_starts(1, key="k")
    redis_client.delete(pools.interruptible.lock_key("k"))
    journal.wait_for(lambda _: journal.runs("k")[0].finished, what="the end of the body")
    assert journal.runs("k")[0].error == "LeaseInterrupt"
    wait_for_note(journal, "observing")
    pools.gate("observer").touch()


@pytest.mark.parametrize(
    ("pool", "how"),
    [
        pytest.param("gevent", "time_limit", marks=pytest.mark.slow),  # eventlet enforces none
        ("gevent", "revoke"),
        pytest.param("eventlet", "revoke", marks=[*eventlet.marks, pytest.mark.slow]),
    ],
)
def test_the_claim_of_a_greenlet_that_was_ended_is_free(
    pool: str,
    how: str,
    worker: StartWorker,
    load_app: LoadApp,
    journal: Journal,
    redis_client: redis.Redis,
) -> None:
    """Celery acknowledges its message, although ``acks_late`` requeues others that have no end."""
    pools = load_app(POOLS)
    [process] = started(worker, pool)
    limit = {"time_limit": 1} if how == "time_limit" else {}
    ended = pools.unique_late.apply_async(("k",), **limit)
    journal.wait_for_starts(1, key="k")
    assert pools.unique_late.delay("k").id == ended.id
    if how == "revoke":
        process.wait_until_it_answers(pools.app)
        ended.revoke(terminate=True)
    wait_until_free(redis_client)
    assert pools.unique_late.delay("k").id != ended.id
    journal.wait_for_starts(2, key="k")


@pytest.mark.parametrize(
    "pool", ["gevent", pytest.param("eventlet", marks=[*eventlet.marks, pytest.mark.slow])]
)
def test_a_release_is_not_reported_as_failed_when_a_green_worker_is_idle(
    pool: str, worker: StartWorker, load_app: LoadApp, redis_client: redis.Redis
) -> None:
    """A heartbeat that looks for replies comes a third of the ttl after the release."""
    pools = load_app(POOLS)
    [process] = started(worker, pool, UNOBSERVED="1")
    pools.gate("k").touch()
    for _ in range(3):
        pools.work.delay("k").get(timeout=20)
        time.sleep(pools.TTL)
    wait_until_free(redis_client)
    assert not process.events(EventName.RELEASE_FAILED)


@pytest.mark.parametrize(
    "pool",
    [
        "gevent",
        *(pytest.param(pool, marks=pytest.mark.slow) for pool in ("prefork", "solo")),
        pytest.param("eventlet", marks=[*eventlet.marks, pytest.mark.slow]),
    ],
)
def test_a_sleeping_body_is_interrupted_when_its_lease_is_lost(
    pool: str, worker: StartWorker, load_app: LoadApp, journal: Journal, redis_client: redis.Redis
) -> None:
    # Not in the threads pool: there a blocking call ends first.
    pools = load_app(POOLS)
    started(worker, pool)
    first = pools.interruptible.delay("k")
    journal.wait_for_starts(1, key="k")
    redis_client.delete(pools.interruptible.lock_key("k"))
    with pytest.raises(LeaseLost):
        first.get(timeout=30)  # half of what the body sleeps
    [run] = journal.runs("k")
    assert run.error == "LeaseInterrupt"
    # Its greenlet, or process, goes on with other work.
    pools.gate("k").touch()
    assert not is_skipped(pools.interruptible.delay("k").get(timeout=20))


@pytest.mark.slow
@every_pool
def test_a_key_is_released_with_its_body_and_not_by_its_ttl(
    pool: str, worker: StartWorker, load_app: LoadApp, journal: Journal, redis_client: redis.Redis
) -> None:
    pools = load_app(POOLS)
    started(worker, pool)
    fences: list[int] = []
    for _ in range(3):
        assert not is_skipped(pools.brief.delay("k").get(timeout=20))
        wait_until_free(redis_client)
        fences.append(journal.runs("k")[-1].fence or 0)
    assert fences == sorted(set(fences))
    first = pools.brief.delay("k", until_open=True)
    journal.wait_for_starts(4, key="k")
    [key] = held_keys(redis_client)
    assert 10 < int(str(redis_client.ttl(key))) <= 60
    assert is_skipped(pools.brief.delay("k").get(timeout=20))
    pools.gate("k").touch()
    first.get(timeout=20)
    wait_until_free(redis_client)
    assert len(journal.runs("k")) == 4
    assert journal.overlaps() == []


def spin_beside_a_duplicate(
    pool: str, worker: StartWorker, load_app: LoadApp, journal: Journal, **env: str
) -> tuple[Any, Any, ModuleType]:
    """A greenlet loops without yielding for longer than its ttl; then a duplicate comes.

    The duplicate goes to a worker with a queue of its own: the looping one runs nothing else.
    """
    pools = load_app(POOLS)
    workers = [
        worker(POOLS, pool=pool, concurrency=3, queues=[queue], env=env, wait=False)
        for queue in ("spinning", "others")
    ]
    for process in workers:
        process.wait_until_ready()
    first = pools.spin.apply_async(("k",), queue="spinning")
    wait_for_note(journal, "outlived", key="k", task_id=first.id)
    late = pools.work.apply_async(("k",), queue="others")
    return first, late, pools


@pytest.mark.slow
@green_pool
def test_a_greenlet_that_never_yields_keeps_its_lease(
    pool: str, worker: StartWorker, load_app: LoadApp, journal: Journal, redis_client: redis.Redis
) -> None:
    first, late, pools = spin_beside_a_duplicate(pool, worker, load_app, journal)
    assert is_skipped(late.get(timeout=20))
    pools.gate("k").touch()
    first.get(timeout=20)
    wait_until_free(redis_client)
    assert [run.task_id for run in journal.runs("k")] == [first.id]
    assert notes(journal, EventName.LEASE_LOST) == []
