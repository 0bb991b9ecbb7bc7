"""Checks of a Redis Cluster: its state, its slots, its masters and their replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from celery_singleton_lock.doctor.context import Context, Findings, Server, error, ok, warning
from celery_singleton_lock.doctor.servers import command, visit_redis
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.redis.nodes import Address, Topology
from celery_singleton_lock.stores.urls import Hosts

_PORT: Final = 6379
_SLOTS: Final = 16384
# The minimum number of masters. A majority of the masters elects the successor of a dead master.
_FEWEST: Final = 3


@dataclass(frozen=True, slots=True)
class _Picture:
    """The cluster in the view of one node.

    Attributes:
        link: The connections to that node.
        address: The address of that node.
        ranges: For each range of slots: the number of slots, the master, and its replicas.
    """

    link: Any
    address: Address
    ranges: list[tuple[int, Address, list[Address]]]

    @property
    def masters(self) -> list[Address]:
        return list(dict.fromkeys(master for _, master, _ in self.ranges))


# --- visits ---------------------------------------------------------------------------------------


def _picture(context: Context) -> _Picture | None:
    """The view of the first node that answers; None if no node does."""
    try:
        links = list(context.store.servers())
    except StoreError:
        return None
    for link in [*links, *(links[0].at(*seed) for seed in _seeds(context) if links)]:
        host, _, port = link.address.rpartition(":")
        address, ranges = (host, int(port)), []
        try:
            for row in command(link, "CLUSTER", "SLOTS"):
                master, *replicas = Topology([row], address).nodes
                ranges.append((int(row[1]) - int(row[0]) + 1, master, replicas))
        except StoreError:
            continue
        return _Picture(link, address, ranges)
    return None


def _seeds(context: Context) -> tuple[Address, ...]:
    return Hosts.of(context.settings.url, default_port=_PORT).addresses


def visit_cluster(context: Context) -> list[Server]:
    """All nodes, including nodes that only the URL or CLUSTER NODES names."""
    picture = context.once(_picture)
    if picture is None:
        return []
    masters = picture.masters
    replicas = [replica for _, _, replicas in picture.ranges for replica in replicas]
    addresses = dict.fromkeys([*masters, *replicas, *_known(picture), *_seeds(context)])
    return [
        visit_redis(context, _name(each), picture.link.at(*each), grants=each in masters)
        for each in addresses
    ]


def _known(picture: _Picture) -> Iterator[Address]:
    """The nodes of CLUSTER NODES: CLUSTER SLOTS leaves out nodes that fail."""
    try:
        text = command(picture.link, "CLUSTER", "NODES").decode()
    except StoreError:
        return
    for line in text.splitlines():
        address, flags = line.split()[1:3]
        host, _, port = address.partition(",")[0].partition("@")[0].rpartition(":")
        if "noaddr" not in flags and "handshake" not in flags:
            yield host or picture.address[0], int(port)


def _name(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


# --- checks ---------------------------------------------------------------------------------------


def check_state(context: Context) -> Findings:
    picture = context.once(_picture)
    if picture is None:
        text = "no node says what the cluster looks like"
        yield error("cluster", text, "start the nodes, or correct singleton_lock_url")
        return
    info = command(picture.link, "CLUSTER", "INFO").decode()
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    state, size = fields.get("cluster_state", ""), fields.get("cluster_size", "?")
    down, assigned = (fields.get(f"cluster_slots_{name}", "?") for name in ("fail", "assigned"))
    if state == "ok":
        yield ok("cluster", f"state ok, {size} masters have slots")
        return
    yield error(
        "cluster",
        f"state {state}, says {_name(picture.address)}: {down} slots are down, {assigned} of "
        f"{_SLOTS} assigned",
        "wait for the failover; a master without a replica has to be started again. Meanwhile "
        "cluster-require-full-coverage no keeps the other slots at work",
    )


def check_slots(context: Context) -> Findings:
    """Whether every slot has a master that answers."""
    picture = context.once(_picture)
    if picture is None:
        return
    failed = {server.name for server in context.servers if server.error}
    missing = _SLOTS - sum(count for count, _, _ in picture.ranges)
    silent = sum(count for count, master, _ in picture.ranges if _name(master) in failed)
    problem = "the keys in them can't be taken"
    if missing:
        text = f"{missing} of {_SLOTS} have no master: {problem}"
        yield error("slots", text, "redis-cli --cluster fix, or CLUSTER ADDSLOTS")
    if silent:
        text = f"{silent} of {_SLOTS} have a master that doesn't answer: {problem}"
        yield error("slots", text, "wait for the failover, or start it again")
    if not missing and not silent:
        yield ok("slots", f"all {_SLOTS} have a master that answers")


def check_masters(context: Context) -> Findings:
    """Whether the masters can elect a successor, and each master has a replica."""
    picture = context.once(_picture)
    if picture is None:
        return
    masters = picture.masters
    yield ok("shards", f"{context.store.shards}, on {len(masters)} masters")
    if len(masters) < _FEWEST:
        text = f"{len(masters)} have slots: when one ends, no majority is left to elect another"
        yield warning("masters", text, f"{_FEWEST} or more")
    answering = {server.name for server in context.servers if not server.error}
    alone = [
        _name(master)
        for _, master, replicas in picture.ranges
        if not answering.intersection(map(_name, replicas))
    ]
    for name in dict.fromkeys(alone):
        text = f"{name} is a master without a replica that answers: its end takes its slots away"
        yield warning("replicas", text, "a replica, on another host")
