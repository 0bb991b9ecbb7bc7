"""A store of several independent masters: whether they are independent, and masters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Final

from celery_singleton_lock.core.heartbeat import timeout_for
from celery_singleton_lock.core.lease import drift
from celery_singleton_lock.doctor.finding import Finding, Severity, by_name
from celery_singleton_lock.doctor.patient import Patient
from celery_singleton_lock.doctor.server import (
    Report,
    clocks,
    examine_server,
    setting,
    unreachable,
)
from celery_singleton_lock.stores.redis.connection import Connections
from celery_singleton_lock.stores.redlock.url import read_nodes

__all__ = ["examine_redlock"]

# The share of the time that a node has for its vote.
_COMFORTABLE: Final = 0.1
_SECOND: Final = 1.0
_KEPT_ON_DISK: Final = "append-only file, synced with every write"


def examine_redlock(patient: Patient) -> Iterator[Finding]:
    """Every node by itself, and each against the others."""
    nodes = read_nodes(patient.settings.url)
    reports, synced = [], {}
    for node in nodes.members:
        with closing(Connections(node.url)) as link:
            report = Report.of(str(node), link, patient.clock.wall)
            reports.append(report)
            if report.info.get("aof_enabled") == "1":
                synced[report.name] = setting(link, "appendfsync")
    yield from _quorum(reports)
    named = [(report.name, report) for report in reports if not report.error]
    yield from by_name(named, examine_server)
    yield from by_name(named, _replication)
    yield from by_name(named, lambda report: _latency(report, patient.ttls[0]))
    yield from _identities(reports)
    yield from by_name(
        named,
        lambda report: _memory_of_votes(
            report, synced.get(report.name), nodes.quarantine, patient.ttls[-1]
        ),
    )
    allowed = drift(patient.ttls[0])
    yield from clocks(
        reports,
        allowed=allowed,
        harm=f"a lease of {patient.ttls[0]:g} s has an allowance of {allowed:.3f} s for clocks. It "
        "stands a difference, but not the step that ends it",
    )


def _quorum(reports: list[Report]) -> Iterator[Finding]:
    yield from unreachable(
        reports, "nodes", "start it: while it is away, the loss of fewer others ends all locks"
    )
    answered, majority = sum(not report.error for report in reports), len(reports) // 2 + 1
    if answered >= majority:
        yield Finding(Severity.OK, "nodes", f"{answered} of {len(reports)} answer")
        return
    yield Finding(
        Severity.ERROR,
        "nodes",
        f"{answered} of {len(reports)} answer, and a lease takes {majority}",
        "start the others, or correct singleton_lock_url",
    )


def _replication(report: Report) -> Iterator[Finding]:
    if report.is_replica:
        yield Finding(
            Severity.ERROR,
            "replication",
            "is a replica: it has no vote, and promoted it would bring another's votes along",
            "REPLICAOF NO ONE: the nodes of Redlock are masters that know nothing of each other",
        )
    elif report.count_of_replicas:
        yield Finding(
            Severity.WARNING,
            "replication",
            f"has {report.count_of_replicas} replicas: a failover to one of them forgets votes, "
            "and two bodies can run at once",
            "no replicas here, or none that is ever promoted; another node instead",
        )


def _latency(report: Report, ttl: float) -> Iterator[Finding]:
    time_to_vote = timeout_for(ttl)
    if report.took > time_to_vote * _COMFORTABLE:
        yield Finding(
            Severity.WARNING,
            "latency",
            f"a reply takes more than a tenth of the {time_to_vote * 1000:.0f} ms that a lease "
            f"of {ttl:g} s waits for it",
            "a longer ttl, or a node that is nearer",
        )


def _identities(reports: list[Report]) -> Iterator[Finding]:
    first: dict[str, str] = {}
    for report in reports:
        run_id = report.info.get("run_id", "")
        if run_id and run_id in first:
            yield Finding(
                Severity.ERROR,
                "identity",
                f"{first[run_id]} and {report.name} are one server: its vote counts twice, and two "
                "bodies can run at once",
                "name servers that fail independently",
            )
        first.setdefault(run_id, report.name)


def _memory_of_votes(
    report: Report, synced: str | None, quarantine: float | None, longest: float
) -> Iterator[Finding]:
    """Whether a node that restarts could grant what it has granted before."""
    info = report.info
    if info.get("aof_enabled") == "1" and synced == "always":
        yield Finding(Severity.OK, "persistence", _KEPT_ON_DISK)
        return
    if quarantine is not None and quarantine < longest:
        yield Finding(
            Severity.WARNING,
            "persistence",
            f"a node that restarts forgets votes, and quarantine={quarantine:g} lets it vote while "
            f"leases of {longest:g} s may stand: two bodies can run at once",
            "leave quarantine out of the URL (then it is each lease's ttl), or appendonly yes with "
            "appendfsync always",
        )
        return
    if "uptime_in_seconds" not in info:
        yield Finding(
            Severity.WARNING,
            "persistence",
            "INFO is denied, so nobody knows when it was started: after a restart it votes at "
            "once, and two bodies can run at once",
            "grant +info, or appendonly yes with appendfsync always",
        )
        return
    yield Finding(
        Severity.OK,
        "persistence",
        "a restart forgets votes; so it has none until it is up for as long as a lease lasts",
    )
    needed = longest if quarantine is None else quarantine
    left = needed - (int(info["uptime_in_seconds"]) - _SECOND)
    if left > 0:
        yield Finding(
            Severity.NOTE,
            "nodes",
            f"was started less than {needed:g} s ago: it has no vote on the longest lease yet",
            "wait",
        )
