"""A store that is a Redis Cluster: its state, its slots, its masters and their replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from celery_singleton_lock.doctor.finding import Finding, Severity, by_name
from celery_singleton_lock.doctor.patient import Patient
from celery_singleton_lock.doctor.server import (
    Report,
    clocks,
    command,
    examine_server,
    replicas,
    unreachable,
)
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.redis.cluster import ClusterStore
from celery_singleton_lock.stores.redis.connection import Connections
from celery_singleton_lock.stores.redis.nodes import Address, Topology
from celery_singleton_lock.stores.urls import Hosts

__all__ = ["examine_cluster"]

_PORT: Final = 6379
_SLOTS: Final = 16384
# Masters elect a dead one's successor by majority.
_FEWEST: Final = 3
# Seconds; see sentinel.py. The shortest sensible cluster-node-timeout is a second, too.
_CLOCKS_MAY_DIFFER: Final = 1.0
_FENCES_FALL: Final = "after a failover to the slower one, fences may be lower than before"


@dataclass(frozen=True, slots=True)
class _Part:
    """Slots that are together.

    Attributes:
        count: How many.
        master: Who has them.
        replicas: How many of its replicas answer.
    """

    count: int
    master: Report
    replicas: int

    @classmethod
    def of(cls, row: Sequence[Any], asked: Address, reports: Mapping[Address, Report]) -> _Part:
        """A row of CLUSTER SLOTS, by the node ``asked``."""
        [address] = Topology([row], asked).masters
        others = [node for node in Topology([row], asked).nodes if node != address]
        answering = sum(not reports[node].error for node in others)
        return cls(int(row[1]) - int(row[0]) + 1, reports[address], answering)


def examine_cluster(store: ClusterStore, patient: Patient) -> Iterator[Finding]:
    """Whether every key has a master, every master a successor, and all of them answer."""
    link, slots = _picture(store, patient)
    if link is None:
        yield Finding(
            Severity.ERROR,
            "cluster",
            "no node tells what the cluster looks like",
            "start the nodes, or correct singleton_lock_url",
        )
        return
    topology = Topology(slots, _address_of(link))
    seeds = Hosts.of(patient.settings.url, default_port=_PORT).addresses
    addresses = list(dict.fromkeys([*topology.nodes, *_known(link), *seeds]))
    reports = {a: Report.of(_name(a), link.at(*a), patient.clock.wall) for a in addresses}
    yield _state(link)
    parts = [_Part.of(row, _address_of(link), reports) for row in slots]
    yield from _coverage(parts)
    yield from _masters(store.shards, parts)
    yield from unreachable(
        list(reports.values()),
        "nodes",
        "start it; if it is gone for good, CLUSTER FORGET it and take it out of singleton_lock_url",
    )
    masters = [(_name(a), reports[a]) for a in topology.masters if not reports[a].error]
    yield from by_name(masters, examine_server)
    yield from by_name(masters, _persistence)
    yield from by_name(masters, partial(replicas, wanted=patient.settings.wait_replicas))
    yield from clocks(list(reports.values()), allowed=_CLOCKS_MAY_DIFFER, harm=_FENCES_FALL)


def _picture(store: ClusterStore, patient: Patient) -> tuple[Connections | None, list[Any]]:
    """A node that answers, and its CLUSTER SLOTS."""
    try:
        masters = list(store.servers())
    except StoreError:
        return None, []
    seeds = Hosts.of(patient.settings.url, default_port=_PORT).addresses
    for link in [*masters, *(masters[0].at(*seed) for seed in seeds if masters)]:
        try:
            return link, list(command(link, "CLUSTER SLOTS"))
        except StoreError:
            continue
    return None, []


def _state(link: Connections) -> Finding:
    try:
        info = command(link, "CLUSTER INFO")
    except StoreError:
        text = "CLUSTER INFO is denied, so the state of the cluster is unknown"
        return Finding(Severity.NOTE, "cluster", text, "grant +cluster|info +cluster|nodes")
    fields = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    state = fields.get("cluster_state", "")
    if state == "ok":
        size = fields.get("cluster_size", "?")
        return Finding(Severity.OK, "cluster", f"state ok, {size} masters have slots")
    return Finding(
        Severity.ERROR,
        "cluster",
        f"state {state}, says {link.address}: {fields.get('cluster_slots_fail', '?')} slots are "
        f"down, {fields.get('cluster_slots_assigned', '?')} of {_SLOTS} assigned",
        "wait for the failover; a master without a replica has to be started again. "
        "cluster-require-full-coverage no keeps the other slots at work meanwhile",
    )


def _coverage(parts: list[_Part]) -> Iterator[Finding]:
    missing = _SLOTS - sum(part.count for part in parts)
    silent = sum(part.count for part in parts if part.master.error)
    if missing:
        yield Finding(
            Severity.ERROR,
            "slots",
            f"{missing} of {_SLOTS} have no master: the keys in them can't be taken",
            "redis-cli --cluster fix, or CLUSTER ADDSLOTS",
        )
    if silent:
        yield Finding(
            Severity.ERROR,
            "slots",
            f"{silent} of {_SLOTS} have a master that doesn't answer: the keys in them can't be "
            "taken",
            "wait for the failover, or start it again",
        )
    if not missing and not silent:
        yield Finding(Severity.OK, "slots", f"all {_SLOTS} have a master that answers")


def _masters(shards: int, parts: list[_Part]) -> Iterator[Finding]:
    names = {part.master.name for part in parts}
    yield Finding(Severity.OK, "shards", f"{shards}, on {len(names)} masters")
    if len(names) < _FEWEST:
        yield Finding(
            Severity.WARNING,
            "masters",
            f"{len(names)} have slots: when one ends, no majority is left to elect another",
            f"{_FEWEST} or more",
        )
    for name in dict.fromkeys(part.master.name for part in parts if not part.replicas):
        yield Finding(
            Severity.WARNING,
            "replicas",
            f"{name} is a master without a replica that answers: if it ends, its slots are gone "
            "until it is back",
            "a replica, on another host",
        )


def _persistence(report: Report) -> Iterator[Finding]:
    if not report.info:
        return
    if report.info.get("aof_enabled") == "1":
        yield Finding(Severity.OK, "persistence", "append-only file")
        return
    yield Finding(
        Severity.WARNING,
        "persistence",
        "no append-only file: a master that restarts before the others notice is master still, and "
        "empty, and its replica empties itself after it",
        "appendonly yes on all nodes, or have nobody restart Redis by itself",
    )


def _known(link: Connections) -> list[Address]:
    """Nodes that fail are in no CLUSTER SLOTS; those that have no address are in nothing."""
    try:
        text = command(link, "CLUSTER NODES").decode()
    except StoreError:
        return []
    found = []
    for line in text.splitlines():
        place, flags = line.split()[1:3]
        host, _, port = place.partition(",")[0].partition("@")[0].rpartition(":")
        if "noaddr" not in flags and "handshake" not in flags:
            found.append((host or _address_of(link)[0], int(port)))
    return found


def _address_of(link: Connections) -> Address:
    host, _, port = link.address.rpartition(":")
    return host, int(port)


def _name(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
