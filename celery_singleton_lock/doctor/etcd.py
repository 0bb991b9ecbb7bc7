"""A store that is an etcd cluster: its members, its leader, its alarms, its shortest ttl."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from celery_singleton_lock.doctor.finding import Finding, Severity, by_name
from celery_singleton_lock.doctor.patient import Patient
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.etcd.gateway import OPTIONS, Gateway
from celery_singleton_lock.stores.urls import ClusterUrl

__all__ = ["examine_etcd"]

_PORT: Final = 2379
_OLDEST: Final = (3, 4)
_TIMEOUT: Final = 2.0
_ALARM_CURES: Final = {
    "NOSPACE": "etcdctl compact, defrag, then alarm disarm; raise --quota-backend-bytes, and set "
    "--auto-compaction-retention",
    "CORRUPT": "take the corrupt member out, and add it again empty",
}


@dataclass(frozen=True, slots=True)
class _Member:
    """One that the URL names.

    Attributes:
        error: Why it tells nothing; empty: it does.
        status: Its own view: version, leader, id.
    """

    name: str
    gateway: Gateway
    error: str = ""
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return str(self.status["header"]["member_id"])

    @property
    def leader(self) -> str:
        """The id of whom it follows; empty: nobody."""
        leader = str(self.status.get("leader", "0"))
        return "" if leader == "0" else leader


def examine_etcd(patient: Patient) -> Iterator[Finding]:
    """What each member says, and the cluster."""
    settings = patient.settings
    url = ClusterUrl.parse(
        settings.url, port=_PORT, known=OPTIONS, options=settings.connection_options
    )
    members = [_visit(replace(url, hosts=(host,)), patient) for host in url.hosts]
    try:
        answering = [member for member in members if not member.error]
        yield from _reachable(members)
        yield from by_name([(member.name, member) for member in answering], _version)
        led = [member for member in answering if member.leader]
        if led:
            yield from _cluster(led[0].gateway, len(url.hosts), patient)
            yield from _alarms(led[0].gateway, patient)
            yield from _shortest_ttl(led[0].gateway, patient)
        yield _login(url)
    finally:
        for member in members:
            member.gateway.close()


def _visit(url: ClusterUrl, patient: Patient) -> _Member:
    name, gateway = f"{url.hosts[0][0]}:{url.hosts[0][1]}", Gateway(url, patient.clock)
    try:
        status = _call(gateway, "maintenance/status", {}, patient)
    except StoreError as exc:
        return _Member(name, gateway, error=str(exc))
    return _Member(name, gateway, status=status)


def _call(gateway: Gateway, path: str, body: dict[str, Any], patient: Patient) -> dict[str, Any]:
    return gateway.call(path, body, patient.clock.now() + _TIMEOUT, repeatable=True)


def _reachable(members: list[_Member]) -> Iterator[Finding]:
    for member in members:
        if member.error:
            yield Finding(
                Severity.WARNING,
                "members",
                f"{member.name}: {member.error}",
                "start it; or member remove, and take it out of singleton_lock_url",
            )
        elif not member.leader:
            yield Finding(
                Severity.WARNING,
                "members",
                f"{member.name} follows no leader: it is cut off, or there is no majority",
                "look at its log, and at the network between the members",
            )
    led = [member for member in members if not member.error and member.leader]
    if not led:
        yield Finding(
            Severity.ERROR,
            "quorum",
            f"no leader, as far as the {len(members)} members of the URL tell: no locks",
            "start members until a majority is there",
        )
        return
    leaders = [member.name for member in led if member.id == member.leader]
    where = leaders[0] if leaders else "a member that the URL doesn't name, or that is silent"
    text = f"{len(led)} of {len(members)} named ones follow a leader: {where}"
    yield Finding(Severity.OK, "members", text)


def _version(member: _Member) -> Iterator[Finding]:
    version = str(member.status.get("version", ""))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers >= _OLDEST:
        yield Finding(Severity.OK, "server", f"etcd {version}")
        return
    yield Finding(
        Severity.WARNING,
        "server",
        f"etcd {version} is older than what this library is tested with",
        "etcd 3.4 or newer",
    )


def _cluster(gateway: Gateway, named: int, patient: Patient) -> Iterator[Finding]:
    try:
        members = _call(gateway, "cluster/member/list", {}, patient).get("members", [])
    except StoreError as exc:
        yield Finding(Severity.NOTE, "cluster", f"its members are unknown ({exc})")
        return
    voters = [member for member in members if not member.get("isLearner")]
    if len(voters) < 3:
        yield Finding(
            Severity.NOTE,
            "cluster",
            f"{len(voters)} members vote: without one of them there are no locks",
            "three, on hosts that fail independently",
        )
    elif len(voters) % 2 == 0:
        yield Finding(
            Severity.NOTE,
            "cluster",
            f"{len(voters)} members vote: no more of them may fail than of {len(voters) - 1}",
            "an odd number",
        )
    if len(members) > named:
        yield Finding(
            Severity.NOTE,
            "cluster",
            f"it has {len(members)} members, and the URL names {named}: the others are never asked",
            "name all of them in singleton_lock_url",
        )


def _alarms(gateway: Gateway, patient: Patient) -> Iterator[Finding]:
    try:
        alarms = _call(gateway, "maintenance/alarm", {"action": "GET"}, patient).get("alarms", [])
    except StoreError as exc:
        yield Finding(Severity.NOTE, "alarms", f"they are unknown ({exc})")
        return
    if not alarms:
        yield Finding(Severity.OK, "alarms", "none")
    for kind in sorted({alarm.get("alarm", "?") for alarm in alarms}):
        yield Finding(
            Severity.ERROR,
            "alarms",
            f"{kind} is raised: the cluster refuses writes, so there are no locks"
            if kind == "NOSPACE"
            else f"{kind} is raised: members disagree on what is stored",
            _ALARM_CURES.get(kind, "etcdctl alarm list"),
        )


def _shortest_ttl(gateway: Gateway, patient: Patient) -> Iterator[Finding]:
    """What is granted instead of one second: the server's election timeout decides."""
    try:
        granted = _call(gateway, "lease/grant", {"TTL": 1, "ID": 0}, patient)
        _call(gateway, "lease/revoke", {"ID": granted["ID"]}, patient)
    except StoreError:
        return  # the probe or an alarm has said why
    shortest, ttl = float(granted["TTL"]), patient.ttls[0]
    if shortest > math.ceil(ttl):
        yield Finding(
            Severity.WARNING,
            "ttl",
            f"the cluster grants no lease of less than {shortest:g} s, and the shortest ttl here "
            f"is {ttl:g} s: a dead holder blocks others so much longer",
            "a longer ttl, or a shorter --election-timeout",
        )
    elif uneven := [ttl for ttl in patient.ttls if ttl != math.ceil(ttl)]:
        listed = ", ".join(f"{ttl:g}" for ttl in uneven)
        text = (
            f"etcd keeps whole seconds: a dead holder's key is free after ttl={listed} rounded up"
        )
        yield Finding(Severity.NOTE, "ttl", text)
    else:
        yield Finding(Severity.OK, "ttl", f"{shortest:g} s are possible")


def _login(url: ClusterUrl) -> Finding:
    if url.username or "cert" in url.options:
        return Finding(
            Severity.OK, "login", f"as {url.username}" if url.username else "by certificate"
        )
    return Finding(
        Severity.NOTE,
        "login",
        "nobody logs in: whoever reaches the cluster can take and free every lock",
        "etcdctl auth enable, and a login in singleton_lock_url; or client certificates",
    )
