"""Real workers over a partition of their lock store: a member that lives, and is cut off.

Between a master of Sentinel's and the rest, both sides grant: two bodies run, and the fence refuses
the stale one's write. etcd and ZooKeeper go on with the majority, and no client notices.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from types import ModuleType
from typing import Any

import pytest
import redis

from celery_singleton_lock import is_skipped
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores import open_store
from example_project.private_server import PrivateServer
from tests.harness.deliveries import wait_until
from tests.harness.etcd import EtcdCluster
from tests.harness.journal import Journal
from tests.harness.sentinels import Sentinels, add_worker_login, client_of, partition
from tests.harness.worker import CeleryWorker
from tests.harness.zookeeper import ZooKeeperEnsemble
from tests.integration.test_failover import assert_the_fence_refuses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

FENCED, LOSS, CRASH = "tests.apps.fenced", "tests.apps.loss", "tests.apps.crash"

#: Seconds. Long enough for renewals on a busy machine.
TTL = 8

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]


class SplitStore:
    """A store behind Sentinel whose master will be cut off from all but its present clients."""

    def __init__(self, sentinels: Sentinels) -> None:
        self._sentinels = sentinels
        login = add_worker_login(sentinels.servers)
        self.url = sentinels.url.replace("://", f"://{login}@")
        self.old = sentinels.master()

    def replicate(self) -> None:
        """Wait until the replicas have all that was written."""
        with client_of(self.old) as client:
            wait_until(lambda: client.wait(2, 1000) == 2, "the replicas have it")

    def split(self) -> PrivateServer:
        """Cut, and wait for the master of the other side."""
        partition(self.old)
        return self._sentinels.wait_until_promoted(self.old)

    def left_on_the_old_side(self, key: str) -> float:
        """Seconds that the old master keeps ``key``; negative: it has none."""
        with redis.Redis(port=self.old.port, username="worker", password="pw") as client:
            ttl_ms: Any = client.pttl(key)
        return float(ttl_ms) / 1000


@pytest.fixture
def split_store(private_sentinels: Sentinels) -> SplitStore:
    return SplitStore(private_sentinels)


@pytest.fixture
def load(
    environment: dict[str, str], load_app: LoadApp, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], ModuleType]]:
    """``load(module, lock_url)``, with the gates of this test in sight."""
    modules: list[ModuleType] = []

    def loaded(name: str, url: str, ttl: float = TTL) -> ModuleType:
        environment.update(LOCK_URL=url, TTL=str(ttl))
        monkeypatch.setenv("JOURNAL", environment["JOURNAL"])
        modules.append(load_app(name))
        return modules[-1]

    yield loaded
    for module in modules:
        Runtime.of(module.app).close()


def test_a_holder_beside_the_old_master_goes_on_and_the_fence_refuses_its_stale_write(
    split_store: SplitStore,
    load: Callable[[str, str], ModuleType],
    worker: StartWorker,
    journal: Journal,
) -> None:
    store, fenced = split_store, load(FENCED, split_store.url)
    old_side = worker(FENCED, concurrency=1, queues=["old"])

    def write(name: str, side: str) -> Any:
        return fenced.write.apply_async(("k", name), singleton={"ttl": TTL}, queue=side)

    stale = write("stale", "old")
    journal.wait_for_starts(1)
    store.replicate()
    store.split()
    # Its lease was replicated, and no renewal since: the other side waits for the ttl.
    worker(FENCED, concurrency=1, queues=["new"])
    successor = None

    def begun() -> bool:
        nonlocal successor
        if successor is None or successor.ready():  # skipped, while the copy stands
            successor = write("successor", "new")
        return len(journal.runs("k")) == 2

    wait_until(begun, "another body runs on the other side", timeout=90)
    assert journal.overlaps(), "both run: this is what replication can't exclude"
    key = fenced.write.lock_key("k", "")
    assert store.left_on_the_old_side(key) > 0, "it is renewed there still"
    assert not old_side.events(EventName.LEASE_LOST)
    assert_the_fence_refuses(fenced, journal, stale)


def test_with_min_replicas_the_old_side_is_notified_before_the_new_side_begins(
    split_store: SplitStore,
    load: Callable[[str, str], ModuleType],
    worker: StartWorker,
    journal: Journal,
) -> None:
    """What docs/reference/stores.md advises: a master without replicas refuses to renew."""
    store = split_store
    with client_of(store.old) as client:
        client.config_set("min-replicas-to-write", "1")
        client.config_set("min-replicas-max-lag", "1")
    loss = load(LOSS, store.url)
    worker(LOSS, concurrency=1, queues=["old"])
    first = loss.early.apply_async(("k", "sleep", 120.0), queue="old")
    journal.wait_for_starts(1)
    store.replicate()
    store.split()
    worker(LOSS, concurrency=1, queues=["new"])
    second = loss.competitor.apply_async(("k", "sleep", 1.0), queue="new")
    journal.wait_for_starts(2, timeout=90)
    with pytest.raises(Exception, match="lost"):
        first.get(timeout=60)
    assert second.get(timeout=60)["lost"] is False
    old, new = journal.runs("k")
    assert old.finished
    assert old.end <= new.begin
    assert old.fence < new.fence


# --- a member of a majority ----------------------------------------------------------------------


@pytest.mark.parametrize("whom", ["leader", "follower"])
def test_a_body_goes_on_over_a_member_that_is_cut_off(
    consensus: EtcdCluster | ZooKeeperEnsemble,
    whom: str,
    load: Callable[..., ModuleType],
    worker: StartWorker,
    journal: Journal,
) -> None:
    leader = consensus.leader()
    cut_off = leader if whom == "leader" else followers_of(consensus, leader)[0]
    # etcd's clients go to the first that the URL names.
    order = (cut_off, *(number for number in range(3) if number != cut_off))
    # Followers give a silent leader syncLimit * tickTime (5 s here) before they elect another, and
    # ZooKeeper's leases trust a renewal for half of their ttl. etcd's election takes 1 or 2 s.
    ttl = 60.0 if isinstance(consensus, ZooKeeperEnsemble) else 12.0
    name = f"t{time.monotonic_ns()}"
    crash = load(CRASH, consensus.url(name, members=order), ttl)
    process = worker(CRASH, concurrency=3)
    running = crash.late.delay("k", "all")
    journal.wait_for_starts(1)
    if isinstance(consensus, ZooKeeperEnsemble) and whom == "follower":
        # kazoo goes to any; only one that a session of ours is with is worth cutting off.
        cut_off = next(
            (n for n in followers_of(consensus, leader) if serves(consensus, n)), cut_off
        )
    consensus.pause(cut_off)
    try:
        cut = time.monotonic()
        trusted = Runtime.of(crash.app).store.capabilities.trusted
        while time.monotonic() < cut + 1.2 * trusted * ttl:  # without a renewal it were lost
            # Each one asks the store, as a new lease does.
            assert is_skipped(crash.late.delay("k", "all").get(timeout=60))
        other = crash.early.delay("other", "all")
        journal.wait_for_starts(2, timeout=60)
        crash.open_gate("all")
        assert running.get(timeout=60) == journal.runs("k")[0].data["mark"]
        other.get(timeout=60)
        # A leader of etcd 3.4 that wakes has those leases revoked that were over by its own clock;
        # a result is there a moment before its key is free.
        others = [number for number in range(3) if number != cut_off]
        keys = [crash.late.lock_key("k", "all"), crash.early.lock_key("other", "all")]
        with closing(open_store(consensus.url(name, members=others))) as witness:
            wait_until(lambda: not any(map(witness.leases.inspect, keys)), "both keys are free")
    finally:
        consensus.resume(cut_off)
    consensus.leader()
    assert not process.events(EventName.LEASE_LOST)
    assert len(journal.runs("k")) == 1
    assert journal.overlaps() == []


def followers_of(consensus: EtcdCluster | ZooKeeperEnsemble, leader: int) -> list[int]:
    return [number for number in range(3) if number != leader]


def serves(ensemble: ZooKeeperEnsemble, number: int) -> bool:
    """Whether a member has a client beside the one that asks."""
    return len(re.findall(r"^ /", ensemble.ask(number, "cons"), re.MULTILINE)) > 1
