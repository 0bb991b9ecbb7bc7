"""What a Redis or Valkey server tells of itself, as far as it may."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.diagnosis.finding import Finding, Severity
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.redis import RedisStore

__all__ = ["examine_redis"]

_OLDEST: Final = (6, 0)
# Seconds. Leases don't depend on it; `since` in records and the age of a claim do.
_CLOCKS_MAY_DIFFER: Final = 2.0
# More are the same mistake again.
_STRAYS_SHOWN: Final = 10


def examine_redis(
    store: RedisStore, keyspace: Keyspace, *, wall: Callable[[], float]
) -> Iterator[Finding]:
    """Version, memory, persistence, replicas, clock, and keys that are not ours."""
    info = _info(store)
    if info:
        yield from _version(info)
        yield from _eviction(info)
        yield from _persistence(info)
        yield from _replication(info)
    else:
        yield Finding(
            Severity.NOTE,
            "server",
            "INFO is denied, so version, eviction policy, persistence and replicas are unknown",
            "grant +info, or make sure of maxmemory-policy noeviction yourself",
        )
    yield from _clock(store, wall)
    yield from _strays(store, keyspace)


def _info(store: RedisStore) -> dict[str, str]:
    sections = ("server", "memory", "persistence", "replication")
    return {name: value for section in sections for name, value in store.info(section).items()}


def _version(info: Mapping[str, str]) -> Iterator[Finding]:
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = info.get("valkey_version") or info.get("redis_version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers >= _OLDEST:
        yield Finding(Severity.OK, "server", f"{name} {version}")
        return
    yield Finding(
        Severity.WARNING,
        "server",
        f"{name} {version} is older than what this library is tested with",
        "Redis 6 or newer, or Valkey",
    )


def _eviction(info: Mapping[str, str]) -> Iterator[Finding]:
    policy, limit = info.get("maxmemory_policy", ""), info.get("maxmemory", "0")
    if policy in ("", "noeviction"):
        yield Finding(Severity.OK, "eviction", policy or "no policy told")
        return
    severity = Severity.WARNING if limit == "0" else Severity.ERROR
    yield Finding(
        severity,
        "eviction",
        f"maxmemory-policy is {policy} (maxmemory {limit}): when memory is short, leases go first "
        "and two bodies run at once",
        "CONFIG SET maxmemory-policy noeviction, or a server of its own for locks",
    )


def _persistence(info: Mapping[str, str]) -> Iterator[Finding]:
    if info.get("aof_enabled") == "1":
        yield Finding(Severity.OK, "persistence", "append-only file")
        return
    yield Finding(
        Severity.NOTE,
        "persistence",
        "no append-only file: a restart forgets leases. Bodies that run then are interrupted "
        "within ttl/3, and put back if their task is acks_late",
        "appendonly yes, if restarts happen often",
    )


def _replication(info: Mapping[str, str]) -> Iterator[Finding]:
    if info.get("role") == "slave":
        yield Finding(
            Severity.ERROR,
            "replication",
            "this server is a replica: it can't take leases",
            "point singleton_lock_url at the master",
        )
    elif replicas := int(info.get("connected_slaves", "0")):
        yield Finding(
            Severity.NOTE,
            "replication",
            f"{replicas} replicas, asynchronous: a failover may lose leases it had acknowledged",
            "write with the fence where that matters",
        )


def _clock(store: RedisStore, wall: Callable[[], float]) -> Iterator[Finding]:
    try:
        seconds, micros = store.command("TIME")
    except StoreError:
        return
    offset = int(seconds) + int(micros) / 1e6 - wall()
    if abs(offset) <= _CLOCKS_MAY_DIFFER:
        yield Finding(Severity.OK, "clock", f"{offset:+.2f} s from this host")
        return
    yield Finding(
        Severity.WARNING,
        "clock",
        f"the server's clock is {offset:+.1f} s from this host's. Leases don't mind; if it is "
        "stepped back into line, they end early or late by as much",
        "NTP on both, slewing instead of stepping",
    )


def _strays(store: RedisStore, keyspace: Keyspace) -> Iterator[Finding]:
    try:
        strays = list(store.strays(keyspace.match_all()))
    except StoreError:
        yield Finding(Severity.NOTE, "keys", "SCAN is denied, so foreign keys are unknown")
        return
    for key, what in strays[:_STRAYS_SHOWN]:
        yield Finding(
            Severity.WARNING,
            "keys",
            f"{key!r} {what}: other code uses a lock's name, and a task with that key can't run",
            "find out who writes it, then delete it or choose another singleton_lock_prefix",
        )
    if len(strays) > _STRAYS_SHOWN:
        more = len(strays) - _STRAYS_SHOWN
        yield Finding(Severity.WARNING, "keys", f"{more} more of this kind")
