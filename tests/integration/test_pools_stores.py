"""A gevent worker on every other store: exclusion, renewal beside busy greenlets, release.

ZooKeeper's client has a heartbeat of its own that would starve there, so it is refused.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from celery_singleton_lock import is_skipped
from celery_singleton_lock.runtime import Runtime
from tests.harness.deliveries import wait_until
from tests.harness.journal import Journal, Record
from tests.harness.redlock_nodes import RedlockNodes
from tests.harness.worker import CeleryWorker
from tests.harness.zookeeper import ZooKeeperEnsemble

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

POOLS = "tests.apps.pools"

# Seconds; etcd keeps whole ones, two at least.
TTL = 2

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]


@pytest.fixture
def redlock(sentinels: object) -> Iterator[RedlockNodes]:
    """Five masters; where there are sentinels, there is a program to start."""
    with RedlockNodes(5) as nodes:
        yield nodes


@pytest.fixture(params=["sentinels", "cluster", "redlock", "etcd"])
def lock_url(request: pytest.FixtureRequest) -> str:
    servers = request.getfixturevalue(request.param)
    url: str = servers.url() if callable(servers.url) else servers.url
    return url


@pytest.fixture
def pools(
    environment: dict[str, str], load_app: LoadApp, lock_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """The app in this process; bodies wait for gates beside the journal."""
    # The servers are shared.
    settings = {"singleton_lock_prefix": f"t-{secrets.token_hex(4)}"}
    environment.update(LOCK_URL=lock_url, TTL=str(TTL), SETTINGS=json.dumps(settings))
    monkeypatch.setenv("JOURNAL", environment["JOURNAL"])
    module = load_app(POOLS)
    yield module
    Runtime.of(module.app).close()


def held(pools: ModuleType) -> list[str]:
    runtime = Runtime.of(pools.app)
    return [record.key for record in runtime.store.operators.scan(runtime.keyspace.match_all())]


def noted(journal: Journal, text: str, task_id: str) -> Record:
    def notes(records: list[Record]) -> list[Record]:
        return [r for r in records if r.data.get("text") == text and r.task_id == task_id]

    found: list[Record] = journal.wait_for(notes, what=f"the note {text!r}", timeout=60)
    return found[0]


def test_a_body_longer_than_its_ttl_is_renewed_and_excludes_duplicates(
    pools: ModuleType, worker: StartWorker, journal: Journal
) -> None:
    worker(POOLS, pool="gevent", concurrency=5)
    first = pools.work.delay("k")
    journal.wait_for_starts(1, key="k")
    assert is_skipped(pools.work.delay("k").get(timeout=30))
    assert noted(journal, "outlived", first.id).data["lost"] is False
    late = pools.work.delay("k")
    assert late.get(timeout=30)["holder"]["task_id"] == first.id
    pools.gate("other").touch()
    others = [pools.work.delay("other") for _ in range(3)]  # beside it, by other greenlets
    assert any(not is_skipped(result.get(timeout=30)) for result in others)
    assert not first.ready()
    pools.gate("k").touch()
    assert not is_skipped(first.get(timeout=30))
    wait_until(lambda: held(pools) == [], "all keys are free")
    assert journal.overlaps() == []
    assert [run.task_id for run in journal.runs("k")] == [first.id]


def spin_beside_a_duplicate(
    pools: ModuleType, worker: StartWorker, journal: Journal, **env: str
) -> tuple[Any, Any]:
    """A greenlet loops without yielding for longer than its ttl; then a duplicate comes.

    The duplicate goes to a worker with a queue of its own: the looping one runs nothing else.
    """
    for queue in ("spinning", "others"):
        worker(POOLS, pool="gevent", concurrency=3, queues=[queue], env=env)
    first = pools.spin.apply_async(("k",), queue="spinning")
    noted(journal, "outlived", first.id)
    return first, pools.work.apply_async(("k",), queue="others")


def test_a_greenlet_that_never_yields_keeps_its_lease(
    pools: ModuleType, worker: StartWorker, journal: Journal
) -> None:
    first, late = spin_beside_a_duplicate(pools, worker, journal)
    assert is_skipped(late.get(timeout=30))
    pools.gate("k").touch()
    first.get(timeout=30)
    wait_until(lambda: held(pools) == [], "the key is free")
    assert [run.task_id for run in journal.runs("k")] == [first.id]


def test_zookeeper_is_refused_in_one_line(
    zookeeper: ZooKeeperEnsemble, environment: dict[str, str], worker: StartWorker
) -> None:
    environment.update(LOCK_URL=zookeeper.url("gevent"), TTL=str(TTL))
    process = worker(POOLS, pool="gevent", concurrency=3, wait=False)
    assert process.wait() == 1
    process.wait_for_log(
        r"CRITICAL.*singleton: the ZooKeeper store doesn't work with gevent or eventlet.*"
        r"Use the prefork, threads or solo pool, or another store"
    )
    assert "Traceback" not in process.log
