"""``celery singleton doctor``: checks of an app's settings, store and tasks.

Guarantees
    The doctor writes only to its own keys, and removes them. A missing right (INFO, CONFIG or SCAN
    denied by an ACL) may hide findings, but is never an error. A server that does not answer is a
    warning while the store works without it.

To add a check, write a function that takes a Context and yields findings, and add a row to
``CHECKS``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from celery import Celery

from ..errors import SingletonLockError
from . import consensus, locks, servers, tasks
from .context import Check, Context, Finding, Severity, error, ok

__all__ = ["CHECKS", "Finding", "Severity", "diagnose"]

_MASTERS: Final = {"redis", "sentinel", "redis cluster"}
_REDIS: Final = {*_MASTERS, "redlock"}
_SEVERAL: Final = {"sentinel", "redis cluster", "redlock", "etcd", "zookeeper"}

#: The checks, in the order of their execution. The checks of servers run even if the store doesn't
#: work, because they may show the reason.
CHECKS: Final = (
    Check(locks.check_processes, {"memory"}),
    Check(locks.check_shards, None),
    Check(locks.check_leases, None, needs_locks=True),
    Check(locks.check_prefix, _MASTERS, needs_locks=True),
    Check(locks.check_keys, None, needs_locks=True, denied=locks.NO_SCAN),
    Check(locks.check_queues, None, needs_locks=True),
    Check(locks.check_pauses, _MASTERS, needs_locks=True),
    Check(servers.check_sentinels, {"sentinel"}),
    Check(servers.check_quorum, {"sentinel"}, denied=servers.NO_QUORUM),
    Check(servers.check_master, {"sentinel"}),
    Check(servers.check_state, {"redis cluster"}, denied=servers.NO_STATE),
    Check(servers.check_slots, {"redis cluster"}),
    Check(servers.check_reachability, _SEVERAL),
    Check(servers.check_majority, {"redlock"}),
    Check(consensus.check_etcd_members, {"etcd"}),
    Check(consensus.check_zookeeper_members, {"zookeeper"}),
    Check(servers.check_version, {"redis", *_SEVERAL}, per_server=True),
    Check(servers.check_eviction, _REDIS, per_server=True),
    Check(servers.check_persistence, _MASTERS, per_server=True),
    Check(servers.check_replication, {"redis", "redlock"}, per_server=True),
    Check(servers.check_min_replicas, {"sentinel"}),
    Check(servers.check_wait_replicas, _MASTERS, per_server=True),
    Check(servers.check_replicas, {"sentinel"}),
    Check(servers.check_latency, {"redlock"}, per_server=True),
    Check(servers.check_writes, {"redlock"}, per_server=True),
    Check(servers.check_identities, {"redlock"}),
    Check(servers.check_votes, {"redlock"}, per_server=True),
    Check(servers.check_clocks, _REDIS),
    Check(consensus.check_etcd_size, {"etcd"}, denied=consensus.NO_SIZE),
    Check(consensus.check_alarms, {"etcd"}, denied=consensus.NO_ALARMS),
    Check(consensus.check_shortest_ttl, {"etcd"}),
    Check(consensus.check_sessions, {"zookeeper"}),
    Check(consensus.check_login, {"etcd", "zookeeper"}),
    Check(consensus.check_rights, {"zookeeper"}),
    Check(tasks.check_switch, None),
    Check(tasks.check_policies, None),
    Check(tasks.check_timeouts, None),
    Check(tasks.check_broker, None),
    Check(tasks.check_lost_workers, None),
    Check(tasks.check_keys, None),
)

_VISITS: Final = {
    "redis": servers.visit_one,
    "sentinel": servers.visit_sentinel,
    "redis cluster": servers.visit_cluster,
    "redlock": servers.visit_nodes,
    "etcd": consensus.visit_etcd,
    "zookeeper": consensus.visit_zookeeper,
}


def diagnose(app: Celery) -> Iterator[Finding]:
    """Check the settings, the store and the tasks of ``app``, in this order."""
    try:
        context = Context(app, _VISITS)
    except SingletonLockError as exc:
        yield error("settings", str(exc), "correct this setting")
        return
    settings = context.settings
    prefix = settings.global_keyprefix
    under = f", under keys that begin with {prefix!r}" if prefix else ""
    yield ok("store", f"{settings.safe_url}, from {settings.url_source}{under}")
    with context.stack:
        has_failed = False
        for check in CHECKS:
            applies = check.stores is None or context.kind in check.stores
            if applies and not (check.needs_locks and has_failed):
                for finding in check.run(context):
                    has_failed = has_failed or finding.severity is Severity.ERROR
                    yield finding
