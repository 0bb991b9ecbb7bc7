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

from celery_singleton_lock.doctor import consensus, failover, locks, servers
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

_MASTERS: Final = {"redis", "sentinel", "redis cluster"}
_REDIS: Final = {*_MASTERS, "redlock"}
_SEVERAL: Final = {"sentinel", "redis cluster", "redlock", "etcd", "zookeeper"}


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
    Check(locks.check_processes, {"memory"}),
    Check(locks.check_shards, None),
    Check(locks.check_leases, None, needs_locks=True),
    Check(locks.check_keys, None, needs_locks=True, denied=_NO_SCAN),
    Check(failover.check_sentinels, {"sentinel"}),
    Check(failover.check_quorum, {"sentinel"}, denied=_NO_QUORUM),
    Check(failover.check_master, {"sentinel"}),
    Check(failover.check_state, {"redis cluster"}, denied=_NO_STATE),
    Check(failover.check_shards, {"redis cluster"}),
    Check(servers.check_reachability, _SEVERAL),
    Check(servers.check_majority, {"redlock"}),
    Check(consensus.check_etcd_members, {"etcd"}),
    Check(consensus.check_zookeeper_members, {"zookeeper"}),
    Check(servers.check_version, {"redis", *_SEVERAL}),
    Check(servers.check_eviction, _REDIS),
    Check(servers.check_persistence, _MASTERS),
    Check(servers.check_replication, {"redis", "redlock"}),
    Check(failover.check_min_replicas, {"sentinel"}),
    Check(servers.check_wait_replicas, _MASTERS),
    Check(failover.check_replicas, {"sentinel"}),
    Check(servers.check_latency, {"redlock"}),
    Check(servers.check_identities, {"redlock"}),
    Check(servers.check_votes, {"redlock"}),
    Check(servers.check_clocks, _REDIS),
    Check(consensus.check_etcd_size, {"etcd"}, denied=_NO_SIZE),
    Check(consensus.check_alarms, {"etcd"}, denied=_NO_ALARMS),
    Check(consensus.check_shortest_ttl, {"etcd"}),
    Check(consensus.check_sessions, {"zookeeper"}),
    Check(consensus.check_login, {"etcd", "zookeeper"}),
    Check(consensus.check_rights, {"zookeeper"}),
    Check(locks.check_policies, None),
    Check(locks.check_timeouts, None),
)

_VISITS: Final = {
    "redis": servers.visit_one,
    "sentinel": failover.visit_sentinel,
    "redis cluster": failover.visit_cluster,
    "redlock": servers.visit_nodes,
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
    with context.stack:
        has_failed = False
        for check in CHECKS:
            applies = check.stores is None or context.kind in check.stores
            if applies and not (check.needs_locks and has_failed):
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
