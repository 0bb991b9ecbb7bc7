"""`python -m tests.benchmarks stores`: acquire + release on every store, and redis-py's there."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import redis
from redis.cluster import ClusterNode, RedisCluster
from redis.sentinel import Sentinel

from example_project.private_server import PrivateServer, find_binary, find_valkey
from tests.benchmarks.before import exported
from tests.benchmarks.contest import Contender, Result, Role, run
from tests.benchmarks.machine import conditions, seeded
from tests.benchmarks.ours import ours
from tests.benchmarks.peers import raw_pair, redis_py_lock
from tests.benchmarks.publication import publish
from tests.benchmarks.samples import in_micros, ratios, spread
from tests.harness.cluster import Cluster
from tests.harness.etcd import EtcdCluster
from tests.harness.redlock_nodes import RedlockNodes
from tests.harness.sentinels import MASTER, Sentinels
from tests.harness.zookeeper import ZooKeeperEnsemble

__all__ = ["add_options", "as_table", "benchmark"]

_PACKAGES: Final = ("celery-singleton-lock", "redis", "kazoo")


@contextmanager
def _redis() -> Iterator[list[Contender]]:
    with PrivateServer(binary=find_binary()) as server, ours(server.url()) as mine:
        client = redis.Redis.from_url(server.url())
        yield [*mine, redis_py_lock(client), raw_pair(client)]


@contextmanager
def _valkey() -> Iterator[list[Contender]]:
    with (
        PrivateServer(binary=find_valkey()) as server,
        ours(server.url().replace("redis://", "valkey://")) as mine,
    ):
        client = redis.Redis.from_url(server.url())
        yield [*mine, redis_py_lock(client), raw_pair(client)]


@contextmanager
def _sentinel() -> Iterator[list[Contender]]:
    with Sentinels() as servers, ours(servers.url) as mine:
        sentinel = Sentinel([("127.0.0.1", port) for port in servers.sentinel_ports])
        yield [*mine, redis_py_lock(sentinel.master_for(MASTER))]


@contextmanager
def _cluster() -> Iterator[list[Contender]]:
    with Cluster() as servers, ours(servers.url) as mine:
        nodes = [ClusterNode("127.0.0.1", node.port) for node in servers.nodes]
        yield [*mine, redis_py_lock(RedisCluster(startup_nodes=nodes))]


@contextmanager
def _redlock() -> Iterator[list[Contender]]:
    with RedlockNodes(5) as nodes, ours(nodes.url()) as mine:
        yield mine


# In etcd and ZooKeeper, one member that doesn't lead is asked: which one a client would choose by
# itself makes a difference.


@contextmanager
def _etcd() -> Iterator[list[Contender]]:
    with (
        EtcdCluster(3) as cluster,
        ours(cluster.url(members=((cluster.leader() + 1) % 3,))) as mine,
    ):
        yield mine


@contextmanager
def _zookeeper() -> Iterator[list[Contender]]:
    with (
        ZooKeeperEnsemble(3, durable=True) as ensemble,
        ours(ensemble.url(members=((ensemble.leader() + 1) % 3,))) as mine,
    ):
        yield mine


#: The contenders on each, in the order of the table.
_STORES: Final[dict[str, Callable[[], AbstractContextManager[list[Contender]]]]] = {
    "Redis": _redis,
    "Valkey": _valkey,
    "Sentinel": _sentinel,
    "Cluster": _cluster,
    "Redlock": _redlock,
    "etcd": _etcd,
    "ZooKeeper": _zookeeper,
}
_NOTES: Final = {Role.FLOOR: " (no lock, a floor)", Role.INFORMATION: " (for information)"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of this benchmark."""
    parser.add_argument("--rounds", type=int, default=40, help="blocks of each contender")
    parser.add_argument("--block", type=float, default=0.1, help="seconds of a block, about")
    parser.add_argument("--before", metavar="REVISION", help="an earlier one, run beside this one")
    parser.add_argument("--seed", type=int, help="of the order of the blocks; printed")
    parser.add_argument(
        "--only", action="append", choices=list(_STORES), metavar="STORE", help="may be repeated"
    )
    parser.add_argument("--save", action="store_true", help="write docs/dev/benchmarks.md")


def benchmark(options: argparse.Namespace) -> None:
    """Run it; the table goes to standard output, and with ``--save`` into the docs."""
    seed = seeded(options.seed)
    how = f"{options.rounds} rounds of about {options.block:g} s for each, seed {seed}"
    about = conditions(_PACKAGES, how, options.before)
    order = random.Random(seed)
    results: dict[str, Result] = {}
    with exported(options.before) if options.before else nullcontext():
        for store in options.only or _STORES:
            with _STORES[store]() as contenders:
                results[store] = run(
                    contenders, rounds=options.rounds, block=options.block, order=order
                )
    table = as_table(results)
    print(f"\n{table}")
    if options.save:
        publish("stores", f"{table}\n{about}\n")


def as_table(results: Mapping[str, Result]) -> str:
    """Markdown: a row per contender, ours first in each store, then the others by their time."""
    rows = [
        "| store | lock | p50 [p25 .. p75], µs | times ours [p25 .. p75] |",
        "|---|---|---:|---:|",
    ]
    for store, result in results.items():
        roles = result.roles
        mine = next(name for name, role in roles.items() if role is Role.OURS)
        times = ratios(result.seconds, mine)
        for name in sorted(roles, key=lambda name: (name != mine, times[name].middle)):
            label = f"**{name}**" if name == mine else f"{name}{_NOTES.get(roles[name], '')}"
            seconds = spread([one for block in result.seconds[name] for one in block])
            ratio = "1" if name == mine else str(times[name])
            rows.append(f"| {store} | {label} | {in_micros(seconds)} | {ratio} |")
            store = ""
    return "\n".join(rows) + "\n"
