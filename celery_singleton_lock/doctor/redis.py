"""A store that is one Redis or Valkey server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from celery_singleton_lock.doctor.finding import Finding, Severity
from celery_singleton_lock.doctor.patient import Patient
from celery_singleton_lock.doctor.server import Report, examine_server, replicas
from celery_singleton_lock.stores.redis.store import RedisStore

__all__ = ["examine_redis"]

# Seconds. Leases don't depend on it; `since` in records and the age of a claim do.
_CLOCKS_MAY_DIFFER: Final = 2.0


def examine_redis(store: RedisStore, patient: Patient) -> Iterator[Finding]:
    """Version, memory, persistence, replicas and clock."""
    [server] = store.servers()
    report = Report.of("the server", server, patient.clock.wall)
    if report.error:
        return  # the probe has said so
    yield from examine_server(report)
    if report.info:
        yield _persistence(report)
        yield from _replication(report)
        yield from replicas(report, patient.settings.wait_replicas)
    yield from _clock(report)


def _persistence(report: Report) -> Finding:
    if report.info.get("aof_enabled") == "1":
        return Finding(Severity.OK, "persistence", "append-only file")
    return Finding(
        Severity.NOTE,
        "persistence",
        "no append-only file: a restart forgets leases. Bodies that run then are interrupted "
        "within ttl/3, and put back if their task is acks_late",
        "appendonly yes, if restarts happen often",
    )


def _replication(report: Report) -> Iterator[Finding]:
    if report.is_replica:
        yield Finding(
            Severity.ERROR,
            "replication",
            "this server is a replica: it can't take leases",
            "point singleton_lock_url at the master",
        )
    elif report.count_of_replicas:
        yield Finding(
            Severity.NOTE,
            "replication",
            f"{report.count_of_replicas} replicas, asynchronous: a failover may lose leases it "
            "had acknowledged",
            "write with the fence where that matters",
        )


def _clock(report: Report) -> Iterator[Finding]:
    if report.ahead is None:
        return
    if abs(report.ahead) <= _CLOCKS_MAY_DIFFER:
        yield Finding(Severity.OK, "clock", f"{report.ahead:+.2f} s from this host")
        return
    yield Finding(
        Severity.WARNING,
        "clock",
        f"the server's clock is {report.ahead:+.1f} s from this host's. Leases don't mind; if it "
        "is stepped back into line, they end early or late by as much",
        "NTP on both, slewing instead of stepping",
    )
