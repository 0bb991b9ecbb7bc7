"""However a lease is lost, and however its release fails: one loss is reported, no release.

Bodies of every sort hold their leases in real workers, and a beat leads. Then something takes the
leases away, with the connections to the store or without, and the bodies end before a renewal.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.lease import Holder
from celery_singleton_lock.core.store_requests import Acquire, Granted
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.testing.contract import new_token
from example_project.private_server import ExternalServer, PrivateServer
from tests.harness.cluster import Cluster
from tests.harness.processes import Process
from tests.harness.sentinels import MASTER, Sentinels, client_of, cut_replication
from tests.harness.worker import CeleryBeat

from .stage import Stage, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

APP = "tests.apps.losses"
#: Seconds after its acquire in which the release of a body is not waited for, and a bit.
LONG = 1.3
_numbers = itertools.count()


class OneRedis:
    """One server."""

    def __init__(self, server: PrivateServer) -> None:
        self._server = server
        self.url = server.url()

    def servers(self) -> Sequence[PrivateServer]:
        """Those that have keys now."""
        return [self._server]

    def restart(self) -> None:
        """Without the data, before anything else could happen."""
        for server in self.servers():
            server.kill()
            server.start()


class SentinelSite:
    """Three servers, one of which has the leases."""

    def __init__(self, sentinels: Sentinels) -> None:
        self._sentinels = sentinels
        self.url = sentinels.url

    def servers(self) -> Sequence[PrivateServer]:
        return [self._sentinels.master()]

    def restart(self) -> None:
        self._wait_before_failover(60_000)
        (master,) = self.servers()
        master.kill()
        master.start()
        self._wait_before_failover(1000)

    def _wait_before_failover(self, ms: int) -> None:
        for port in self._sentinels.sentinel_ports:
            with redis.Redis(port=port) as sentinel:
                sentinel.sentinel_set(MASTER, "down-after-milliseconds", ms)

    def cut(self, leader: str) -> PrivateServer:
        """Stop replication; return the server whose data is about to be lost."""
        master = self._sentinels.master()
        cut_replication(master, self._sentinels.replicas())
        return master

    def fail_over(self, cut: PrivateServer, leader: str) -> None:
        cut.kill()
        self._sentinels.wait_until_promoted(cut)

    def has(self, server: PrivateServer, key: str) -> bool:
        return True


class ClusterSite:
    """Three masters with a replica each."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.url = cluster.url

    def servers(self) -> Sequence[PrivateServer]:
        return self._cluster.masters()

    def restart(self) -> None:
        masters = self.servers()
        self._wait_before_failover(60_000)
        for master in masters:
            master.kill()
            master.start()
        self._wait_before_failover(1000)
        wait_until(self._cluster._is_whole, "the cluster is whole")

    def _wait_before_failover(self, ms: int) -> None:
        for node in self._cluster.nodes:
            with client_of(node) as client:
                client.config_set("cluster-node-timeout", ms)

    def cut(self, leader: str) -> PrivateServer:
        master = self._cluster.master_of(leader)
        cut_replication(master, [self._cluster.replica_of(master)])
        return master

    def fail_over(self, cut: PrivateServer, leader: str) -> None:
        cut.kill()
        self._cluster.wait_until_promoted(leader, cut)

    def has(self, server: PrivateServer, key: str) -> bool:
        return self._cluster.master_of(key) is server


Site = OneRedis | SentinelSite | ClusterSite


class Bench:
    """Two workers and a beat of one app, and their logs.

    In the first worker nothing observes releases, as usual, so that a task does not wait for the
    reply to its release. The second logs them.
    """

    def __init__(self, url: str, site: Site, directory: Path, stack: ExitStack) -> None:
        self.stage = Stage(url, directory, stack, APP, {"LOCK_URL": site.url})
        self.app = self.stage.app
        runtime = Runtime.of(self.app.app)
        self.store: Any = runtime.store
        self.leader = runtime.keyspace.leader("losses")
        self.beat = CeleryBeat(APP, scheduler="singleton", env=self.stage.environment).start()
        stack.callback(self.beat.kill_group)
        self.processes: list[Process] = [
            self.stage.worker(concurrency=8, queues=["quiet"]),
            self.stage.worker(concurrency=8, queues=["loud"], loglevel="DEBUG"),
            self.beat,
        ]

    def start(self, length: str) -> dict[str, str]:
        """Start a body of every sort in both workers; the gate by lock key."""
        number = next(_numbers)
        gates: dict[str, str] = {}
        names = []
        for queue, kind in itertools.product(("quiet", "loud"), self.app.KINDS):
            name = f"{number}-{length}-{queue}-{kind}"
            names.append(name)
            gates[str(self.app.early.lock_key(name, ""))] = f"{number}"
            self.app.KINDS[kind].apply_async((name, f"{number}"), queue=queue)
        for name in names:
            self.stage.journal.wait_for_starts(1, key=name)
        return gates

    def end(self, gates: dict[str, str]) -> None:
        """Let the bodies end, and wait until they have."""
        for gate in set(gates.values()):
            self.stage.open(gate)
        for key in gates:
            self.stage.journal.wait_for_ends(1, key=key.rpartition(":")[2])

    def wait_for_a_leader(self) -> None:
        wait_until(lambda: self._has(self.leader), "the beat leads")

    def _has(self, key: str) -> bool:
        try:
            return self.store.leases.inspect(key) is not None
        except StoreError:
            return False

    def reported(self, event: str) -> Counter[str]:
        """How often each key was reported with ``event``."""
        pattern = re.compile(rf"singleton {event}: .*?key=(\S+) ")
        lines = [line for process in self.processes for line in process.lines]
        return Counter(match[1] for line in lines if (match := pattern.search(line)))

    def check(self, lost: Sequence[str], kept: Sequence[str], leader: int) -> None:
        """Each of ``lost`` was reported as that once, each of ``kept`` never.

        Args:
            lost: Keys of bodies.
            kept: Keys of bodies too.
            leader: How often the beat's leader has lost its lease.
        """
        wanted = Counter(dict.fromkeys(lost, 1) | ({self.leader: leader} if leader else {}))
        watched = {*lost, *kept, self.leader}

        def found() -> Counter[str]:
            losses = self.reported(EventName.LEASE_LOST)
            return Counter({key: count for key, count in losses.items() if key in watched})

        wait_until(lambda: found() >= wanted, f"{wanted - found()} are reported as lost", 30.0)
        # The next tasks of the same processes bring the replies to releases that are still due.
        clean = self.start("brief")
        self.end(clean)
        loud = {key for key in clean if "-loud-" in key}
        wait_until(
            lambda: loud <= set(self.reported(EventName.RELEASED)), "the others are released"
        )
        assert found() == wanted
        assert not set(lost) & set(self.reported(EventName.RELEASED))
        assert not set(clean) & set(self.reported(EventName.LEASE_LOST))


def flush(bench: Bench, site: Site, keys: Sequence[str]) -> None:
    for server in site.servers():
        with client_of(server) as client:
            client.flushall()


def restart(bench: Bench, site: Site, keys: Sequence[str]) -> None:
    site.restart()


def free(bench: Bench, site: Site, keys: Sequence[str]) -> None:
    for key in keys:
        assert bench.store.operators.free(key, None)


def replace(bench: Bench, site: Site, keys: Sequence[str]) -> None:
    with closing(open_store(site.url, clock=SystemClock())) as other:
        # It would take a lease that is free for a moment.
        bench.beat.stop()
        for key in keys:
            assert bench.store.operators.free(key, None)
            # The beat must lead again in the next test.
            ttl = 1.0 if key == bench.leader else 60.0
            request = Acquire(slots=(key,), token=new_token(), holder=Holder(task="other"), ttl=ttl)
            assert isinstance(other.leases.acquire(request, timeout=2.0), Granted)
        bench.beat.cont()


FAULTS: dict[str, Callable[[Bench, Site, Sequence[str]], None]] = {
    "flushed": flush,
    "restarted-empty": restart,
    "released-by-an-operator": free,
    "replaced": replace,
}


@pytest.fixture(scope="module")
def broker_url(redis_server: PrivateServer | ExternalServer) -> str:
    return redis_server.url(14)


@pytest.fixture(scope="module", params=["redis", "sentinel", "cluster"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    if request.param == "redis":
        with PrivateServer() as server:
            yield OneRedis(server)
    elif request.param == "sentinel":
        with Sentinels() as sentinels:
            yield SentinelSite(sentinels)
    else:
        with Cluster() as cluster:
            yield ClusterSite(cluster)


@pytest.fixture(scope="module")
def bench(broker_url: str, site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(broker_url, site, tmp_path_factory.mktemp("losses"), stack)


@pytest.mark.parametrize("broken", [False, True], ids=["connected", "disconnected"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_lease_lost_before_its_release_is_reported_once(
    bench: Bench, site: Site, fault: str, broken: bool
) -> None:
    bench.wait_for_a_leader()
    losses = bench.reported(EventName.LEASE_LOST)[bench.leader]
    long = bench.start("long")
    since = time.monotonic()
    brief = bench.start("brief")
    FAULTS[fault](bench, site, [*long, *brief, bench.leader])
    if broken:
        for server in site.servers():
            with client_of(server) as client:
                client.client_kill_filter(_type="normal", skipme=True)
    bench.end(brief)
    wait_until(lambda: time.monotonic() > since + LONG, "the long bodies are long")
    bench.end(long)
    bench.check([*long, *brief], [], losses + 1)


@pytest.fixture(params=["sentinel", "cluster"])
def replicated(request: pytest.FixtureRequest) -> SentinelSite | ClusterSite:
    if request.param == "sentinel":
        return SentinelSite(request.getfixturevalue("private_sentinels"))
    return ClusterSite(request.getfixturevalue("private_cluster"))


def test_a_lease_that_a_failover_loses_is_reported_once(
    redis_url: str, replicated: SentinelSite | ClusterSite, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        bench = Bench(redis_url, replicated, tmp_path, stack)
        bench.wait_for_a_leader()
        old = replicated.cut(bench.leader)
        bodies = bench.start("long")
        lost = [key for key in bodies if replicated.has(old, key)]
        kept = [key for key in bodies if key not in lost]
        replicated.fail_over(old, bench.leader)
        bench.end(bodies)
        # The leader's lease was replicated before the stream was cut: the beat may keep it.
        bench.check(lost, kept, bench.reported(EventName.LEASE_LOST)[bench.leader])
