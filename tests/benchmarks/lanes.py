"""One lane per store: its servers, real and private, and its contenders."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Final

import redis
from etcd3gw.client import Etcd3Client
from kazoo.client import KazooClient
from redis.cluster import ClusterNode, RedisCluster
from redis.sentinel import Sentinel

from celery_singleton_lock.stores.zookeeper.store import ZooKeeperStore
from example_project.private_server import PrivateServer, find_binary, find_valkey
from tests.benchmarks import peers
from tests.benchmarks.contest import Contender
from tests.benchmarks.ours import TTL, ours
from tests.harness.cluster import Cluster
from tests.harness.etcd import EtcdCluster
from tests.harness.redlock_nodes import RedlockNodes
from tests.harness.sentinels import MASTER, Sentinels
from tests.harness.zookeeper import ZooKeeperEnsemble

__all__ = ["LANES", "Lane"]


@dataclass(frozen=True, slots=True)
class Lane:
    """What runs on one store."""

    contenders: list[Contender]
    servers: Collection[int]  # ports


@contextmanager
def _redis() -> Iterator[Lane]:
    with PrivateServer(binary=find_binary()) as server, ours(server.url()) as mine:
        client = redis.Redis.from_url(server.url())
        yield Lane(
            [
                *mine,
                peers.redis_py_lock(client),
                peers.raw_pair(client),
                peers.python_redis_lock(client),
            ],
            {server.port},
        )


@contextmanager
def _valkey() -> Iterator[Lane]:
    with PrivateServer(binary=find_valkey()) as server:
        url = server.url().replace("redis://", "valkey://")
        with ours(url) as mine:
            client = redis.Redis.from_url(server.url())
            yield Lane([*mine, peers.redis_py_lock(client), peers.raw_pair(client)], {server.port})


@contextmanager
def _sentinel() -> Iterator[Lane]:
    with Sentinels() as servers, ours(servers.url) as mine:
        sentinel = Sentinel([("127.0.0.1", port) for port in servers.sentinel_ports])
        ports = {*servers.sentinel_ports, *(server.port for server in servers.servers)}
        client = sentinel.master_for(MASTER)
        yield Lane([*mine, peers.redis_py_lock(client, "redis-py Lock, master_for")], ports)


@contextmanager
def _cluster() -> Iterator[Lane]:
    with Cluster() as servers, ours(servers.url) as mine:
        ports = [node.port for node in servers.nodes]
        client = RedisCluster(startup_nodes=[ClusterNode("127.0.0.1", port) for port in ports])
        yield Lane([*mine, peers.redis_py_lock(client, "redis-py Lock, RedisCluster")], ports)


@contextmanager
def _redlock() -> Iterator[Lane]:
    with RedlockNodes(5) as nodes, ours(nodes.url()) as mine:
        urls = [node.url() for node in nodes]
        yield Lane(
            [*mine, peers.pottery_redlock(urls), peers.redlock_py(urls)],
            {node.port for node in nodes},
        )


@contextmanager
def _etcd() -> Iterator[Lane]:
    with EtcdCluster(3) as cluster:
        # All clients talk to one member that doesn't lead: which one they would choose by
        # themselves makes more of a difference than the locks do.
        member = (cluster.leader() + 1) % 3
        with ours(cluster.url(members=(member,))) as mine:
            client = Etcd3Client(host="127.0.0.1", port=cluster.ports[member], api_path="/v3/")
            yield Lane([*mine, peers.etcd3gw_lock(client)], cluster.ports)


@contextmanager
def _zookeeper() -> Iterator[Lane]:
    with ZooKeeperEnsemble(3, durable=True) as ensemble, ExitStack() as stack:
        member = (ensemble.leader() + 1) % 3  # as in etcd
        mine = stack.enter_context(ours(ensemble.url(members=(member,))))
        client = KazooClient(hosts=f"127.0.0.1:{ensemble.ports[member]}", timeout=TTL)
        client.start()
        # Each is made when it is needed first, once in the life of an ensemble.
        with closing(ZooKeeperStore(ensemble.url())) as store:
            for bucket in store.buckets:
                client.ensure_path(bucket)
        stack.callback(client.close)
        stack.callback(client.stop)
        yield Lane([*mine, peers.kazoo_lock(client)], ensemble.ports)


#: By name, in the order of the table.
LANES: Final[dict[str, Callable[[], AbstractContextManager[Lane]]]] = {
    "Redis": _redis,
    "Valkey": _valkey,
    "Sentinel": _sentinel,
    "Cluster": _cluster,
    "Redlock": _redlock,
    "etcd": _etcd,
    "ZooKeeper": _zookeeper,
}
