"""Real workers over a failover of their lock store, and over the move of a slot.

What was replicated stays: the body goes on, and no other gets its key. What was not is lost with
the old master; then two bodies run, and only the fence marks the stale one's write.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from celery_singleton_lock import is_skipped
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.lease import Record
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.redis.cluster import slot_of
from example_project.private_server import PrivateServer
from tests.harness.cluster import Cluster
from tests.harness.deliveries import wait_until
from tests.harness.journal import Journal
from tests.harness.sentinels import Sentinels, cut_replication
from tests.harness.worker import CeleryWorker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CRASH, FENCED = "tests.apps.crash", "tests.apps.fenced"

#: Seconds: longer than a failover takes, short enough to see renewals. One comes every third of it.
TTL = 15

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]


class SentinelFailover:
    """A store behind Sentinel whose master dies."""

    def __init__(self, sentinels: Sentinels) -> None:
        self._sentinels = sentinels
        self.url = sentinels.url

    def cut(self, key: str) -> None:
        """Replicate nothing any more."""
        cut_replication(self._sentinels.master(), self._sentinels.replicas())

    def kill(self, key: str) -> None:
        """Kill the master of ``key``, and wait for the successor."""
        old = self._sentinels.master()
        old.kill()
        self._sentinels.wait_until_promoted(old)


class ClusterFailover:
    """A cluster one of whose masters dies."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.url = cluster.url

    def cut(self, key: str) -> None:
        master = self._cluster.master_of(key)
        cut_replication(master, [self._cluster.replica_of(master)])

    def kill(self, key: str) -> None:
        old = self._cluster.master_of(key)
        old.kill()
        self._cluster.wait_until_promoted(key, old)


@pytest.fixture(params=["sentinel", "cluster"])
def store(request: pytest.FixtureRequest) -> Any:
    if request.param == "sentinel":
        return SentinelFailover(request.getfixturevalue("private_sentinels"))
    return ClusterFailover(request.getfixturevalue("private_cluster"))


@pytest.fixture
def load(
    environment: dict[str, str], load_app: LoadApp, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], ModuleType]:
    """``load(module, lock_url)``, with the gates of this test in sight."""

    def loaded(name: str, url: str) -> ModuleType:
        environment["LOCK_URL"] = url
        monkeypatch.setenv("JOURNAL", environment["JOURNAL"])
        return load_app(name)

    return loaded


def record_of(app: Any, key: str) -> Record | None:
    try:
        return Runtime.of(app).store.leases.inspect(key)
    except StoreError:
        return None  # in the middle of a failover


def wait_until_renewed(app: Any, key: str) -> None:
    """Wait until the lease is prolonged twice: what is left of its ttl rises."""
    left = [TTL + 1.0]
    rises = []

    def twice() -> bool:
        record = record_of(app, key)
        if record is not None:
            if record.ttl > left[-1] + 0.5:
                rises.append(record.ttl)
            left.append(record.ttl)
        return len(rises) >= 2

    wait_until(twice, f"{key} is renewed twice", timeout=4 * TTL)


def start_of(task: Any, journal: Journal, *args: str) -> Any:
    """Call with our short ttl; returns once its body runs."""
    result = task.apply_async(args, singleton={"ttl": TTL})
    journal.wait_for(
        lambda records: [r for r in records if r.event == "start" and r.task_id == result.id]
    )
    return result


def assert_undisturbed(
    crash: ModuleType, process: CeleryWorker, journal: Journal, running: Any
) -> None:
    """The body that holds "k" ends well, and the next one then gets the key and a higher fence."""
    key = crash.early.lock_key("k", "")
    crash.open_gate("all")
    [run] = journal.runs("k")
    assert running.get(timeout=30) == run.data["mark"]
    assert not process.events(EventName.LEASE_LOST)
    wait_until(lambda: record_of(crash.app, key) is None, "the key is free")
    crash.open_gate("late")
    assert not is_skipped(crash.early.delay("k", "late").get(timeout=30))
    first, second = journal.runs("k")
    assert first.fence < second.fence, "the counter came along"
    assert journal.overlaps() == []


def test_a_body_goes_on_over_a_failover_and_no_other_gets_its_key(
    store: Any,
    load: Callable[[str, str], ModuleType],
    worker: StartWorker,
    journal: Journal,
) -> None:
    crash = load(CRASH, store.url)
    process = worker(CRASH, concurrency=4)
    key = crash.early.lock_key("k", "")
    running = start_of(crash.early, journal, "k", "all")
    # Renewed once, so replicated long ago.
    wait_until_renewed(crash.app, key)
    store.kill(key)
    wait_until_renewed(crash.app, key)
    late = [crash.early.delay("k", "late") for _ in range(5)]
    assert all(is_skipped(result.get(timeout=30)) for result in late)
    assert_undisturbed(crash, process, journal, running)


def assert_the_fence_refuses(fenced: ModuleType, journal: Journal, stale: Any) -> None:
    """After its successor has written, the write of ``stale`` changes nothing."""
    fenced.open_gate("successor")
    journal.wait_for_ends(1)
    fenced.open_gate("stale")
    assert stale.get(timeout=60) is False
    before, after = journal.runs("k")
    assert before.fence < after.fence
    writer, last_fence = fenced.account().execute("SELECT * FROM account").fetchone()
    assert (writer, last_fence) == ("successor", after.fence)


def test_a_lease_that_was_not_replicated_is_lost_and_the_fence_refuses_its_stale_write(
    store: Any,
    load: Callable[[str, str], ModuleType],
    worker: StartWorker,
    journal: Journal,
) -> None:
    fenced = load(FENCED, store.url)
    worker(FENCED, concurrency=2)
    key = fenced.write.lock_key("k", "")
    assert record_of(fenced.app, key) is None  # and this process knows the store
    store.cut(key)
    stale = fenced.write.delay("k", "stale")
    journal.wait_for_starts(1)
    store.kill(key)
    successor = None

    def begun() -> bool:
        nonlocal successor
        if successor is None or successor.ready():  # skipped, or requeued, before the promotion
            successor = fenced.write.delay("k", "successor")
        return len(journal.runs("k")) == 2

    wait_until(begun, "another body runs under the lost key", timeout=60)
    assert journal.overlaps(), "both run: this is what a store cannot exclude"
    assert_the_fence_refuses(fenced, journal, stale)


def test_a_body_goes_on_while_the_slot_of_its_key_moves(
    private_cluster: Cluster,
    load: Callable[[str, str], ModuleType],
    worker: StartWorker,
    journal: Journal,
) -> None:
    cluster = private_cluster
    crash = load(CRASH, cluster.url)
    process = worker(CRASH, concurrency=4)
    key = crash.early.lock_key("k", "")
    running = start_of(crash.early, journal, "k", "all")
    source = cluster.master_of(key)
    target = next(node for node in cluster.masters() if node is not source)
    cluster.begin_to_move(slot_of(key), source, target)
    cluster.move_keys([key], source, target)
    # The lease is there, the last fence here: renewals need nothing but the lease.
    wait_until_renewed(crash.app, key)
    assert key in cluster.keys_in(slot_of(key), target)
    move_the_rest(cluster, slot_of(key), source, target)
    late = [crash.early.delay("k", "late") for _ in range(5)]
    assert all(is_skipped(result.get(timeout=30)) for result in late)
    wait_until_renewed(crash.app, key)
    assert_undisturbed(crash, process, journal, running)


def move_the_rest(
    cluster: Cluster, slot: int, source: PrivateServer, target: PrivateServer
) -> None:
    cluster.move_keys(cluster.keys_in(slot, source), source, target)
    cluster.end_move(slot, target)
