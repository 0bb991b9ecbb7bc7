"""A store behind Redis Sentinel: the sentinels, the master that they name, and its replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
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
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.connection import Connections
from celery_singleton_lock.stores.redis.sentinel import SentinelConnections

__all__ = ["examine_sentinel"]

# A failover takes the votes of a majority, and two of two are no majority that survives a loss.
_FEWEST: Final = 3
# Seconds. The first fence of a new master is not below its clock. The old master's end came before
# the promotion by the time that the sentinels waited for it, a second at least.
_CLOCKS_MAY_DIFFER: Final = 1.0
_FENCES_FALL: Final = "after a failover to the slower one, fences may be lower than before"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sentinel:
    """What one sentinel says of our master.

    Attributes:
        error: Why it says nothing; empty: it does.
        denied: Whether it answers, but to others.
        master: The fields that it has.
    """

    name: str
    link: Connections
    error: str = ""
    denied: bool = False
    master: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        return self.master["ip"], int(self.master["port"])

    @property
    def count(self) -> int:
        """How many sentinels it knows, itself included."""
        return int(self.master.get("num-other-sentinels", "0")) + 1


def examine_sentinel(patient: Patient) -> Iterator[Finding]:
    """Who can be reached, whether a failover could be decided, and what it would cost."""
    settings = patient.settings
    with closing(SentinelConnections(settings.url, settings.connection_options)) as links:
        asked = [_ask(link, links.master_name) for link in links.sentinels]
        yield from _sentinels(asked)
        told = [sentinel for sentinel in asked if sentinel.master]
        if not told:
            return
        yield _quorum(told[0], links.master_name)
        yield from _agreement(told)
        yield from _servers(links, told[0], patient)


def _ask(link: Connections, name: str) -> _Sentinel:
    try:
        reply = command(link, "SENTINEL", "MASTER", name)
    except StoreUnavailable as exc:
        return _Sentinel(name=link.address, link=link, error=str(exc))
    except StoreError as exc:
        return _Sentinel(name=link.address, link=link, error=str(exc), denied=True)
    return _Sentinel(name=link.address, link=link, master=_fields(reply))


def _sentinels(asked: list[_Sentinel]) -> Iterator[Finding]:
    answered = [sentinel for sentinel in asked if not sentinel.error]
    if not any(sentinel.denied or not sentinel.error for sentinel in asked):
        yield Finding(
            Severity.ERROR,
            "sentinels",
            f"none of {len(asked)} answers: {asked[0].error}",
            "start them, or correct singleton_lock_url",
        )
        return
    for sentinel in asked:
        if sentinel.error:
            yield Finding(
                Severity.WARNING,
                "sentinels",
                f"{sentinel.name}: {sentinel.error}",
                "give the login in the URL the right to SENTINEL, and the right master_name"
                if sentinel.denied
                else "start it, or take it out of singleton_lock_url",
            )
    if not answered:
        return
    yield Finding(Severity.OK, "sentinels", f"{len(answered)} of {len(asked)} named ones answer")
    there = max(sentinel.count for sentinel in answered)
    if there < _FEWEST:
        yield Finding(
            Severity.WARNING,
            "sentinels",
            f"there are {there} for this master: without one of them no failover is decided",
            f"{_FEWEST} or more, on hosts that fail independently",
        )
    if there > len(asked):
        yield Finding(
            Severity.NOTE,
            "sentinels",
            f"{there} watch this master, and the URL names {len(asked)}: with those away, a new "
            "process finds no master",
            "name all of them in singleton_lock_url",
        )


def _quorum(sentinel: _Sentinel, name: str) -> Finding:
    try:
        reply = command(sentinel.link, "SENTINEL", "CKQUORUM", name)
    except StoreUnavailable as exc:
        return Finding(Severity.WARNING, "quorum", f"{sentinel.name}: {exc}", "run doctor again")
    except StoreError as exc:
        if "NOQUORUM" in str(exc):
            return Finding(
                Severity.ERROR,
                "quorum",
                f"no failover can be decided, says {sentinel.name}: {exc}",
                "start the other sentinels; the quorum is in `sentinel monitor` of their "
                "configuration",
            )
        text = "SENTINEL CKQUORUM is denied, so whether a failover could be decided is unknown"
        return Finding(Severity.NOTE, "quorum", text, "grant +sentinel|ckquorum")
    return Finding(Severity.OK, "quorum", reply.decode())


def _agreement(told: list[_Sentinel]) -> Iterator[Finding]:
    named: dict[tuple[str, int], list[str]] = {}
    for sentinel in told:
        named.setdefault(sentinel.address, []).append(sentinel.name)
    if len(named) > 1:
        views = "; ".join(f"{', '.join(who)}: {host}:{port}" for (host, port), who in named.items())
        yield Finding(
            Severity.WARNING,
            "master",
            f"the sentinels name different masters ({views}): a failover is under way, or some of "
            "them are cut off from the others",
            "run doctor again in a minute; then look at the network between them",
        )
    for sentinel in told:
        if "o_down" in sentinel.master.get("flags", ""):
            yield Finding(
                Severity.ERROR,
                "master",
                f"{sentinel.name} and a quorum of others think that it is down",
                "wait for the failover; if none comes, see `quorum`",
            )
            return


def _servers(
    links: SentinelConnections, sentinel: _Sentinel, patient: Patient
) -> Iterator[Finding]:
    host, port = sentinel.address
    master = Report.of(f"{host}:{port}", links.at(host, port), patient.clock.wall)
    if master.error:
        yield Finding(
            Severity.ERROR,
            "master",
            f"{master.name}: {master.error}",
            "wait for the failover; if the sentinels reach it, look at the network from here",
        )
        return
    yield Finding(Severity.OK, "master", f"{links.master_name} is {master.name}")
    yield from by_name([(master.name, master)], examine_server)
    yield from _persistence(master)
    yield from _min_replicas(master)
    yield from replicas(master, patient.settings.wait_replicas)
    try:
        reply = command(sentinel.link, "SENTINEL", "REPLICAS", links.master_name)
    except StoreError:
        yield Finding(Severity.NOTE, "replicas", "SENTINEL REPLICAS is denied, so they are unknown")
        return
    known = [_fields(fields) for fields in reply]
    others = [
        Report.of(f"{f['ip']}:{f['port']}", links.at(f["ip"], int(f["port"])), patient.clock.wall)
        for f in known
    ]
    yield from _replicas(known, others)
    yield from clocks([master, *others], allowed=_CLOCKS_MAY_DIFFER, harm=_FENCES_FALL)


def _persistence(master: Report) -> Iterator[Finding]:
    if not master.info:
        return
    if master.info.get("aof_enabled") == "1":
        yield Finding(Severity.OK, "persistence", "append-only file on the master")
        return
    yield Finding(
        Severity.WARNING,
        "persistence",
        "no append-only file on the master: if it restarts before the sentinels notice, it is "
        "master still, and empty, and its replicas empty themselves after it",
        "appendonly yes on all of them, or have nobody restart Redis by itself",
    )


def _min_replicas(master: Report) -> Iterator[Finding]:
    """INFO has that field only where the setting is."""
    if master.info and "min_slaves_good_slaves" not in master.info:
        yield Finding(
            Severity.NOTE,
            "min-replicas",
            "min-replicas-to-write is not set: a master that is cut off from all others goes on "
            "granting to those who reach it, until it is demoted",
            "min-replicas-to-write 1 with min-replicas-max-lag 3, and the fence for what matters",
        )


def _replicas(known: list[dict[str, str]], reports: list[Report]) -> Iterator[Finding]:
    yield from unreachable(
        reports, "replicas", "start it; or SENTINEL RESET, if it is gone for good"
    )
    usable = 0
    for fields, report in zip(known, reports, strict=True):
        if report.error:
            continue
        link = fields.get("master-link-status", "ok")
        if "down" in fields.get("flags", "") or link != "ok":
            yield Finding(
                Severity.WARNING,
                "replicas",
                f"{report.name} is out of step (flags {fields.get('flags')}, link {link}): "
                "promoted now, it would not have the newest leases",
                "look at its log; it needs the master's login and address",
            )
        else:
            usable += 1
    if usable:
        yield Finding(Severity.OK, "replicas", f"{usable} in step, as the sentinels see them")
    else:
        yield Finding(
            Severity.WARNING,
            "replicas",
            "there is none that could be promoted: if the master ends, there are no locks",
            "a replica or two, on other hosts",
        )


def _fields(reply: Any) -> dict[str, str]:
    """Names and values, from either protocol."""
    flat = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
    return {name.decode(): value.decode() for name, value in flat.items()}
