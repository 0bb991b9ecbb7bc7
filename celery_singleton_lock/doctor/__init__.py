"""``celery singleton doctor``: checks of an app's settings, store and tasks.

Guarantees
    The doctor writes only to its own keys, and removes them. A missing right (INFO, CONFIG or SCAN
    denied by an ACL) may hide findings, but is never an error. A server that does not answer is a
    warning while the store works without it.

To add a check, write a function that takes a Context and yields findings, and add a row to
``CHECKS``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from celery import Celery

from celery_singleton_lock.doctor import (
    cluster,
    consensus,
    operations,
    redlock,
    sentinel,
    servers,
    tasks,
)
from celery_singleton_lock.doctor.context import (
    Context,
    Finding,
    Findings,
    Severity,
    error,
    note,
    ok,
    warning,
)
from celery_singleton_lock.errors import SingletonLockError, StoreError, StoreUnavailable

__all__ = ["CHECKS", "Check", "Finding", "Severity", "diagnose"]

_SENTINEL: Final = ("sentinel",)
_CLUSTER: Final = ("redis cluster",)
_REDLOCK: Final = ("redlock",)
_MASTERS: Final = ("redis", "sentinel", "redis cluster")
_REDIS: Final = (*_MASTERS, "redlock")
_ETCD: Final = ("etcd",)
_ZOOKEEPER: Final = ("zookeeper",)
_SEVERAL: Final = ("sentinel", "redis cluster", "redlock", "etcd", "zookeeper")


class Check(NamedTuple):
    """A row of the table.

    Attributes:
        findings: The function that checks.
        stores: The kinds of store that it applies to; None: every store.
        needs_locks: Whether the check is skipped after another check has found an error.
        denied: The finding if the login lacks a right that the check needs.
    """

    findings: Callable[[Context], Findings]
    stores: Collection[str] | None
    needs_locks: bool = False
    denied: Finding | None = None


_NO_SCAN: Final = note("keys", "SCAN is denied, so foreign keys are unknown")
_NO_QUORUM: Final = note(
    "quorum",
    "SENTINEL CKQUORUM is denied, so whether a failover could be decided is unknown",
    "grant +sentinel|ckquorum",
)
_NO_STATE: Final = note(
    "cluster",
    "CLUSTER INFO is denied, so the state of the cluster is unknown",
    "grant +cluster|info +cluster|nodes",
)
_NO_SIZE: Final = note("cluster", "its members are unknown: the login may not list them")
_NO_ALARMS: Final = note("alarms", "they are unknown: the login may not list them")

#: The checks, in the order of their execution. The checks of servers run even if the store doesn't
#: work, because they may show the reason.
CHECKS: Final = (
    Check(operations.check_processes, ("memory",)),
    Check(operations.check_shards, None),
    Check(operations.check_leases, None, needs_locks=True),
    Check(operations.check_waiting, None, needs_locks=True),
    Check(operations.check_keys, None, needs_locks=True, denied=_NO_SCAN),
    Check(sentinel.check_sentinels, _SENTINEL),
    Check(sentinel.check_quorum, _SENTINEL, denied=_NO_QUORUM),
    Check(sentinel.check_master, _SENTINEL),
    Check(cluster.check_state, _CLUSTER, denied=_NO_STATE),
    Check(cluster.check_slots, _CLUSTER),
    Check(cluster.check_masters, _CLUSTER),
    Check(servers.check_reachability, _SEVERAL),
    Check(redlock.check_majority, _REDLOCK),
    Check(consensus.check_etcd_members, _ETCD),
    Check(consensus.check_zookeeper_members, _ZOOKEEPER),
    Check(servers.check_version, ("redis", *_SEVERAL)),
    Check(servers.check_eviction, _REDIS),
    Check(servers.check_persistence, _MASTERS),
    Check(servers.check_replication, ("redis", "redlock")),
    Check(sentinel.check_min_replicas, _SENTINEL),
    Check(servers.check_wait_replicas, _MASTERS),
    Check(sentinel.check_replicas, _SENTINEL),
    Check(redlock.check_latency, _REDLOCK),
    Check(redlock.check_identities, _REDLOCK),
    Check(redlock.check_votes, _REDLOCK),
    Check(servers.check_clock, ("redis",)),
    Check(servers.check_clocks, ("sentinel", "redis cluster", "redlock")),
    Check(consensus.check_etcd_size, _ETCD, denied=_NO_SIZE),
    Check(consensus.check_alarms, _ETCD, denied=_NO_ALARMS),
    Check(consensus.check_shortest_ttl, _ETCD),
    Check(consensus.check_sessions, _ZOOKEEPER),
    Check(consensus.check_login, (*_ETCD, *_ZOOKEEPER)),
    Check(consensus.check_rights, _ZOOKEEPER),
    Check(tasks.check_beat, None),
    Check(tasks.check_policies, None),
    Check(tasks.check_timeouts, None),
)

_VISITS: Final = {
    "redis": servers.visit_one,
    "sentinel": sentinel.visit_sentinel,
    "redis cluster": cluster.visit_cluster,
    "redlock": redlock.visit_nodes,
    "etcd": consensus.visit_etcd,
    "zookeeper": consensus.visit_zookeeper,
}


def diagnose(app: Celery) -> Findings:
    """Check the settings, the store and the tasks of ``app``, in this order."""
    try:
        context = Context(app, _VISITS)
    except SingletonLockError as exc:
        yield error("settings", str(exc), "correct this setting")
        return
    settings = context.settings
    yield ok("store", f"{settings.safe_url}, from {settings.url_source}")
    has_failed = False
    with context.stack:
        for check in CHECKS:
            applies = check.stores is None or context.kind in check.stores
            if not applies or (check.needs_locks and has_failed):
                continue
            for finding in _run(check, context):
                has_failed = has_failed or finding.severity is Severity.ERROR
                yield finding


def _run(check: Check, context: Context) -> Findings:
    try:
        yield from check.findings(context)
    except StoreError as exc:
        if check.denied and not isinstance(exc, StoreUnavailable):
            yield check.denied
        else:
            yield warning("store", str(exc), "run doctor again")
