"""A connection to the store that ends: the leases of the process are renewed at once, and once.

Their next renewal by the clock would come 18 s after the acquire at the earliest. A holder that
learns of a loss sooner has noticed that a connection ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
import redis

from celery_singleton_lock.core import heartbeat
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.events import Events
from celery_singleton_lock.core.heartbeat import Heartbeat
from celery_singleton_lock.core.lease import Lease, LossReason
from celery_singleton_lock.core.locker import Locker
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.core.store_requests import Acquire, Release, Renewal
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.testing.contract import new_key, new_token
from celery_singleton_lock.testing.contract.steps import HOLDER
from example_project.private_server import PrivateServer
from tests.chaos.proxy import Kind, Mode, Proxy
from tests.conftest import missing
from tests.harness.cluster import Cluster
from tests.harness.deliveries import wait_until
from tests.harness.etcd import EtcdCluster, find_etcd
from tests.harness.redlock_nodes import RedlockNodes
from tests.harness.sentinels import Sentinels, cut_replication

TTL = 60.0

#: Seconds. The goal is one; the rest is for a loaded machine. The next renewal comes much later.
SOON = 10.0


class Process:
    """The lock objects of a process that holds leases. Its heartbeat runs in its own thread."""

    def __init__(self, url: str) -> None:
        self.store: Store = open_store(url)
        self.clock = SystemClock()
        self.heartbeat = Heartbeat(self.store, self.clock, Events())
        self.locker = Locker(self.store, self.clock, self.heartbeat, Events())
        #: The replies to each renewal; the error where there was none.
        self.renewals: list[list[Renewal] | Exception] = []
        #: The time of each.
        self.asked_at: list[float] = []
        renew = self.store.leases.renew

        def counted(leases: Sequence[Lease], *, timeout: float) -> list[Renewal]:
            self.asked_at.append(self.clock.now())
            try:
                replies = renew(leases, timeout=timeout)
            except Exception as exc:
                self.renewals.append(exc)
                raise
            self.renewals.append(replies)
            return replies

        self.store.leases.renew = counted  # type: ignore[method-assign]

    def hold(self, key: str = "", ttl: float = TTL) -> tuple[Lease, threading.Event]:
        """A new lease, and what is set when its loss is reported."""
        lost = threading.Event()
        request = Acquire(slots=(key or new_key(),), token=new_token(), holder=HOLDER, ttl=ttl)
        lease = self.locker.acquire(request, on_lost=lambda lease: lost.set())
        assert isinstance(lease, Lease), lease
        return lease, lost

    def answered(self) -> int:
        """How many renewals the store has answered."""
        return sum(not isinstance(one, Exception) for one in self.renewals)

    def close(self) -> None:
        for lease in list(self.heartbeat._leases):  # a closed heartbeat renews what is held
            self.heartbeat.stop(lease)
        self.heartbeat.close()
        self.store.close()


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Process]]:
    processes: list[Process] = []

    def start(url: str) -> Process:
        processes.append(Process(url))
        return processes[-1]

    yield start
    for one in processes:
        one.close()


class OneServer:
    def __init__(self) -> None:
        self._server = PrivateServer()

    def __enter__(self) -> OneServer:
        self.url = self._server.start().url()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def lose(self, key: str) -> None:
        self._server.restart(keep_data=False)


class Majority:
    """Redlock nodes, of which all but two restart empty."""

    def __init__(self) -> None:
        self._nodes = RedlockNodes(5)

    def __enter__(self) -> Majority:
        self._nodes.__enter__()
        self.url = self._nodes.url()
        return self

    def __exit__(self, *_: object) -> None:
        self._nodes.__exit__()

    def lose(self, key: str) -> None:
        for node in list(self._nodes)[:3]:
            node.restart(keep_data=False)


class OneMember:
    """An etcd cluster whose only member restarts empty."""

    def __init__(self) -> None:
        self._cluster = EtcdCluster(1)

    def __enter__(self) -> OneMember:
        self._cluster.__enter__()
        self.url = self._cluster.url()
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.__exit__()

    def lose(self, key: str) -> None:
        self._cluster.restart_empty()


class Failover:
    """A master that dies, and a replica that never got the lease."""

    def __init__(self, servers: Sentinels | Cluster) -> None:
        self._servers = servers

    def __enter__(self) -> Failover:
        self._servers.__enter__()
        self.url = self._servers.url
        return self

    def __exit__(self, *_: object) -> None:
        self._servers.__exit__()

    def cut(self, key: str) -> None:
        """Replicate nothing from now on."""
        cut_replication(*self._pair(key))

    def lose(self, key: str) -> None:
        self._pair(key)[0].kill()

    def _pair(self, key: str) -> tuple[PrivateServer, list[PrivateServer]]:
        if isinstance(self._servers, Sentinels):
            return self._servers.master(), self._servers.replicas()
        master = self._servers.master_of(key)
        return master, [self._servers.replica_of(master)]


def site_of(name: str) -> Any:
    if name == "etcd":
        return OneMember() if find_etcd() else missing("etcd is not installed")
    if name in ("sentinel", "cluster"):
        return Failover(Sentinels() if name == "sentinel" else Cluster())
    return OneServer() if name == "redis" else Majority()


@pytest.mark.parametrize("name", ["redis", "redlock", "etcd"])
def test_a_holder_is_notified_at_once_when_its_store_restarts_empty(
    name: str, process: Callable[[str], Process]
) -> None:
    with site_of(name) as site:
        worker = process(site.url)
        lease, lost = worker.hold()
        site.lose(lease.key)
        assert lost.wait(SOON)
        assert lease.loss is not None
        assert lease.loss.reason is LossReason.GONE


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["sentinel", "cluster"])
def test_a_holder_is_notified_at_once_when_a_failover_has_lost_its_lease(
    name: str, process: Callable[[str], Process]
) -> None:
    with site_of(name) as site:
        worker = process(site.url)
        key = new_key()
        process(site.url).store.leases.inspect(key)
        site.cut(key)
        lease, lost = worker.hold(key)
        site.lose(key)
        assert lost.wait(17)  # the failover itself takes some seconds
        assert lease.loss is not None
        assert lease.loss.reason is LossReason.GONE


@pytest.mark.slow
@pytest.mark.alone
def test_a_holder_is_notified_within_a_second_after_an_empty_server_accepts_connections(
    process: Callable[[str], Process],
) -> None:
    with PrivateServer() as server:
        worker, delays = process(server.url()), list[float]()
        for _ in range(5):
            _, lost = worker.hold()
            server.restart(keep_data=False)
            accepted = time.monotonic()
            assert lost.wait(SOON)
            delays.append(time.monotonic() - accepted)
    assert median(delays) < 1, delays


@pytest.mark.slow
@pytest.mark.alone
def test_a_holder_is_notified_within_a_second_after_a_failover(
    process: Callable[[str], Process],
) -> None:
    delays = []
    for _ in range(3):
        with Sentinels() as servers:
            worker, old = process(servers.url), servers.master()
            worker.store.leases.inspect(new_key())
            cut_replication(old, servers.replicas())
            _, lost = worker.hold()
            old.kill()
            servers.wait_until_promoted(old)
            promoted = time.monotonic()
            assert lost.wait(SOON)
            delays.append(time.monotonic() - promoted)
    assert median(delays) < 1, delays


# --- what the end of a connection costs ----------------------------------------------------------


@pytest.fixture
def own_server() -> Iterator[PrivateServer]:
    # A restart takes a millisecond more for each command that it reads again.
    with PrivateServer(appendonly=True, arguments=["--key-load-delay", "1000"]) as server:
        yield server


def cut(server: PrivateServer) -> None:
    """Close the connections of all clients, as an operator may."""
    with redis.Redis.from_url(server.url()) as client:
        client.client_kill_filter(_type="normal", skipme=True)


def test_a_connection_that_an_operator_closes_costs_one_renewal(
    own_server: PrivateServer,
    process: Callable[[str], Process],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As soon as it may be: the connections were in use a moment ago.
    monkeypatch.setattr(heartbeat, "uniform", lambda low, high: low)
    worker = process(own_server.url())
    _, lost = worker.hold()
    for count in range(1, 4):
        cut(own_server)
        wait_until(lambda count=count: worker.answered() >= count, "the lease is renewed")
    assert worker.renewals == [[None]] * 3
    assert not lost.is_set()


def test_connections_that_the_server_closes_because_they_are_idle_cost_one_renewal_each(
    own_server: PrivateServer, process: Callable[[str], Process]
) -> None:
    worker = process(own_server.url())
    with redis.Redis.from_url(own_server.url()) as client:
        client.config_set("timeout", 1)
        worker.hold()
        before = int(client.info("stats")["total_connections_received"])  # type: ignore[index]
        wait_until(lambda: worker.answered() >= 3, "the lease is renewed three times")
        opened = int(client.info("stats")["total_connections_received"]) - before  # type: ignore[index]
    assert worker.renewals == [[None]] * 3
    assert opened <= 4  # and one of this client, which was idle too


@contextmanager
def starting(server: PrivateServer) -> Iterator[None]:
    """Start a server whose data take some time to load, and do not wait."""
    over = threading.Event()
    # The server ends with the thread that started it.
    thread = threading.Thread(target=lambda: (server.start(), over.wait()))
    thread.start()
    yield
    over.set()
    thread.join()
    server.kill()


#: What some servers say.
SAYS = {
    "is-full": "the store doesn't answer: max number of clients reached",
    "loads": "is loading the dataset in memory",
}


@pytest.mark.parametrize("how", ["refuses", "closes", "is-full", "loads"])
def test_a_server_that_does_not_serve_yet_is_asked_about_once_a_second(
    how: str, own_server: PrivateServer, process: Callable[[str], Process]
) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(own_server.port))
        client = stack.enter_context(redis.Redis.from_url(own_server.url()))
        worker = process(f"redis://127.0.0.1:{proxy.port}")
        _, lost = worker.hold()
        if how == "closes":
            proxy.set(Mode(kind=Kind.REFUSE))
        elif how == "is-full":
            client.config_set("maxclients", 1)
        elif how == "loads":
            with client.pipeline(transaction=False) as pipeline:
                for number in range(5000):
                    pipeline.set(f"key{number}", "")
                pipeline.execute()
        if how in ("refuses", "loads"):
            own_server.kill()
        else:
            client.client_kill_filter(_type="normal", skipme=True)
        if how == "loads":
            stack.enter_context(starting(own_server))
        if how != "loads":
            wait_until(lambda: len(worker.renewals) >= 3, "the server is asked")
        if how == "refuses":
            own_server.start()
        elif how == "closes":
            proxy.set(Mode())
        elif how == "is-full":
            client.config_set("maxclients", 1000)
        wait_until(worker.answered, "the lease is renewed")
    if how in SAYS:
        assert any(SAYS[how] in str(one) for one in worker.renewals), worker.renewals
    # The pause is 0.86 s at least. A loaded machine makes it longer.
    assert all(later - sooner > 0.8 for sooner, later in pairwise(worker.asked_at))
    assert not lost.is_set()


def test_a_reply_to_another_request_does_not_wake_the_heartbeat(
    own_server: PrivateServer, process: Callable[[str], Process]
) -> None:
    worker = process(own_server.url())
    lease, _ = worker.hold()
    sweeps: list[float | None] = []
    sweep = worker.heartbeat.sweep

    def counted() -> float | None:
        sweeps.append(sweep())
        return sweeps[-1]

    worker.heartbeat.sweep = counted  # type: ignore[method-assign]
    for _ in range(100):
        worker.store.leases.inspect(lease.key)
    assert sweeps == []
    cut(own_server)
    wait_until(lambda: worker.answered() == 1, "the lease is renewed")
    assert sweeps


def test_a_reply_from_a_server_without_our_scripts_has_the_leases_renewed(
    own_server: PrivateServer, process: Callable[[str], Process]
) -> None:
    """Behind a proxy that keeps its clients' connections, a restart shows in replies alone."""
    worker = process(own_server.url())
    released, _ = worker.hold()
    release = Release(keys=(released.key,), token=released.token)
    worker.locker.release(released, release)
    lease, lost = worker.hold()
    with redis.Redis.from_url(own_server.url()) as client:
        client.flushall()
        client.script_flush()
    worker.hold()
    assert lost.wait(SOON)
    assert lease.loss is not None
    assert lease.loss.reason is LossReason.GONE


def test_a_process_without_leases_asks_nothing_when_its_connection_ends(
    own_server: PrivateServer, process: Callable[[str], Process]
) -> None:
    worker = process(own_server.url())
    lease, _ = worker.hold()
    worker.locker.release(lease, Release(keys=(lease.key,), token=lease.token))
    hastened = threading.Event()
    hasten = worker.heartbeat.hasten

    def noted() -> None:
        hasten()
        hastened.set()

    worker.heartbeat.hasten = noted  # type: ignore[method-assign]
    with redis.Redis.from_url(own_server.url()) as client:
        scripts = client.info("commandstats")["cmdstat_evalsha"]["calls"]  # type: ignore[index]
        cut(own_server)
        assert hastened.wait(SOON)
        worker.heartbeat.sweep()
        after = client.info("commandstats")["cmdstat_evalsha"]["calls"]  # type: ignore[index]
    assert worker.renewals == []
    assert after == scripts
