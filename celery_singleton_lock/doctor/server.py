"""One server that speaks Redis' protocol: what it tells of itself, as far as it may.

Every store that has such servers is examined by these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from celery_singleton_lock.doctor.finding import Finding, Severity
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.redis.connection import Connections
from celery_singleton_lock.stores.redis.inspect import OPERATOR_TIMEOUT, info_of

__all__ = ["Report", "clocks", "command", "examine_server", "replicas", "setting", "unreachable"]

_OLDEST: Final = (6, 0)
_SECTIONS: Final = ("server", "memory", "persistence", "replication")
# Of these readings the quickest counts: what delays one hides the clock.
_READINGS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one visit to a server has brought.

    Attributes:
        name: The server's, for people.
        error: Why there was nothing to learn; empty: it answered.
        info: Its INFO; empty where that is denied.
        ahead: Seconds that its clock is ahead of this host's; None where TIME is denied.
        took: Seconds that a reply takes; the clock is read half as precisely.
    """

    name: str
    error: str = ""
    info: Mapping[str, str] = field(default_factory=dict)
    ahead: float | None = None
    took: float = 0.0

    @classmethod
    def of(cls, name: str, server: Connections, wall: Callable[[], float]) -> Report:
        """Visit ``server``."""
        try:
            info = {
                key: value
                for section in _SECTIONS
                for key, value in info_of(server, section).items()
            }
        except StoreError as exc:
            return cls(name=name, error=str(exc))
        try:
            took, ahead = min(_reading(server, wall) for _ in range(_READINGS))
        except StoreError:
            return cls(name=name, info=info)
        return cls(name=name, info=info, ahead=ahead, took=took)

    @property
    def count_of_replicas(self) -> int | None:
        """How many are connected to it; None where INFO is denied."""
        return int(self.info.get("connected_slaves", "0")) if self.info else None

    @property
    def is_replica(self) -> bool:
        """Whether it follows another server."""
        return self.info.get("role") == "slave"


def command(server: Connections, *words: Any) -> Any:
    """The reply to one command.

    Raises:
        StoreError: There is none, or it is a refusal.
    """
    return server.run([words], OPERATOR_TIMEOUT)[0]


def setting(server: Connections, name: str) -> str | None:
    """What CONFIG says of ``name``; None where it is denied, or unknown."""
    try:
        reply = command(server, "CONFIG", "GET", name)
    except StoreError:
        return None
    pairs = list(reply.items()) if isinstance(reply, dict) else [reply[:2]] if reply else []
    return pairs[0][1].decode() if pairs else None


def _reading(server: Connections, wall: Callable[[], float]) -> tuple[float, float]:
    sent = wall()
    seconds, micros = command(server, "TIME")
    came = wall()
    return came - sent, int(seconds) + int(micros) / 1e6 - (sent + came) / 2


def examine_server(report: Report) -> Iterator[Finding]:
    """Version and memory of a server that takes leases."""
    if not report.info:
        yield Finding(
            Severity.NOTE,
            "server",
            "INFO is denied, so version, eviction policy, persistence and replicas are unknown",
            "grant +info, or make sure of maxmemory-policy noeviction yourself",
        )
        return
    yield _version(report.info)
    yield _eviction(report.info)


def _version(info: Mapping[str, str]) -> Finding:
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = info.get("valkey_version") or info.get("redis_version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers >= _OLDEST:
        return Finding(Severity.OK, "server", f"{name} {version}")
    return Finding(
        Severity.WARNING,
        "server",
        f"{name} {version} is older than what this library is tested with",
        "Redis 6 or newer, or Valkey",
    )


def _eviction(info: Mapping[str, str]) -> Finding:
    policy, limit = info.get("maxmemory_policy", ""), info.get("maxmemory", "0")
    if policy in ("", "noeviction"):
        return Finding(Severity.OK, "eviction", policy or "no policy told")
    severity = Severity.WARNING if limit == "0" else Severity.ERROR
    return Finding(
        severity,
        "eviction",
        f"maxmemory-policy is {policy} (maxmemory {limit}): when memory is short, leases go first "
        "and two bodies run at once",
        "CONFIG SET maxmemory-policy noeviction, or a server of its own for locks",
    )


def replicas(report: Report, wanted: int) -> Iterator[Finding]:
    """Whether a master has as many replicas as ``singleton_lock_wait_replicas`` asks for."""
    there = report.count_of_replicas
    if there is None or not wanted:
        return
    if there < wanted:
        yield Finding(
            Severity.ERROR,
            "wait_replicas",
            f"{there} replicas are connected, and singleton_lock_wait_replicas={wanted}: every "
            "grant is given back",
            f"singleton_lock_wait_replicas = {there}, or more replicas",
        )
    elif there == wanted:
        yield Finding(
            Severity.NOTE,
            "wait_replicas",
            f"{there} replicas are connected, and singleton_lock_wait_replicas={wanted}: without "
            "any one of them nothing is granted",
            "one replica more than that, or accept it",
        )


def unreachable(reports: Sequence[Report], subject: str, cure: str) -> Iterator[Finding]:
    """Those that don't answer, while others do."""
    for report in reports:
        if report.error:
            text = f"{report.name}: {report.error}"
            yield Finding(Severity.WARNING, subject, text, cure)


def clocks(reports: Sequence[Report], *, allowed: float, harm: str) -> Iterator[Finding]:
    """Compare the servers' clocks with each other.

    Args:
        reports: Of servers one of which may have to go on where another ended.
        allowed: Seconds between the fastest and the slowest that do no harm.
        harm: What more of them does.
    """
    read = [(r.ahead, r.took / 2, r.name) for r in reports if r.ahead is not None]
    if len(read) < 2:
        return
    slowest, fastest = min(read), max(read)
    apart = fastest[0] - slowest[0]
    if apart - fastest[1] - slowest[1] <= allowed:
        yield Finding(Severity.OK, "clock", f"{len(read)} servers within {apart:.3f} s")
        return
    yield Finding(
        Severity.WARNING,
        "clock",
        f"the clock of {fastest[2]} is {apart:.3f} s ahead of that of {slowest[2]}: {harm}",
        "NTP on all hosts, slewing instead of stepping",
    )
