"""Checks of a store's servers, one by one and against each other; visits to Redis servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, Final

from celery_singleton_lock.core.lease import drift
from celery_singleton_lock.doctor.context import Context, Findings, Server, error, note, ok, warning
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.redis.inspect import OPERATOR_TIMEOUT, info_of

_OLDEST: Final = {"Redis": (6, 0), "Valkey": (7, 2), "etcd": (3, 4), "ZooKeeper": (3, 5)}
_SECTIONS: Final = ("server", "memory", "persistence", "replication")
# The number of clock readings. The quickest one counts, because a slow reply makes it inaccurate.
_READINGS: Final = 3
# Seconds. Leases on one server don't depend on its clock, but `since` in records and the age of a
# claim do.
_FROM_THIS_HOST: Final = 2.0
# Seconds. The first fence of a new master is not below its clock. The old master ended at least one
# second before the promotion: sentinels wait that long, and the shortest sensible
# cluster-node-timeout is as long.
_BETWEEN_MASTERS: Final = 1.0
_NTP: Final = "NTP on all hosts, slewing instead of stepping"
_UNREACHABLE: Final = {
    "sentinel": ("replicas", "start it; or SENTINEL RESET, if it is gone for good"),
    "redis cluster": ("nodes", "start it; or CLUSTER FORGET it, and take it out of the URL"),
    "redlock": ("nodes", "start it: while it is away, the loss of fewer others ends all locks"),
    "etcd": ("members", "start it; or member remove, and take it out of the URL"),
    "zookeeper": ("members", "start it, and look at its log; or take it out of the URL"),
}


# --- visits to Redis servers ----------------------------------------------------------------------


def visit_one(context: Context) -> list[Server]:
    """The only server of the store."""
    [link] = context.store.servers()
    return [visit_redis(context, "", link)]


def visit_redis(context: Context, name: str, link: Any, *, grants: bool = True) -> Server:
    """Read a server's INFO and clock, as far as the login has the rights."""
    server = Server(name=name, link=link, grants=grants, product="Redis")
    info: dict[str, str] = {}
    try:
        for section in _SECTIONS:
            info |= info_of(link, section)
    except StoreError as exc:
        return replace(server, error=str(exc))
    server = replace(server, info=info, version=info.get("redis_version", ""))
    if "valkey_version" in info:
        server = replace(server, product="Valkey", version=info["valkey_version"])
    try:
        reply_time, ahead = min(_reading(context, link) for _ in range(_READINGS))
    except StoreError:
        return server
    return replace(server, clock_ahead=ahead, reply_time=reply_time)


def _reading(context: Context, link: Any) -> tuple[float, float]:
    """The duration of TIME and the lead of the server's clock, in seconds."""
    sent = context.clock.wall()
    seconds, micros = command(link, "TIME")
    received = context.clock.wall()
    return received - sent, int(seconds) + int(micros) / 1e6 - (sent + received) / 2


def command(link: Any, *words: Any) -> Any:
    """The reply to one command.

    Raises:
        StoreError: There is no reply, or the server refuses the command.
    """
    return link.run([words], OPERATOR_TIMEOUT)[0]


# --- each server ----------------------------------------------------------------------------------


def check_reachability(context: Context) -> Findings:
    """Whether some servers don't answer while others do."""
    subject, remedy = _UNREACHABLE[context.kind]
    for server in context.servers:
        if server.error:
            yield warning(subject, f"{server.name}: {server.error}", remedy)


def per_server(check: Callable[[Context, Server], Findings]) -> Callable[[Context], Findings]:
    """Turn a check of one server into a check of every granting server; merge equal findings."""

    @wraps(check)
    def check_each(context: Context) -> Findings:
        names: dict[Any, list[str]] = {}
        for server in context.granting:
            for finding in check(context, server):
                names.setdefault(finding, []).append(server.name)
        for finding, where in names.items():
            prefix = f"{', '.join(where)}: " if any(where) else ""
            yield replace(finding, text=f"{prefix}{finding.text}")

    return check_each


@per_server
def check_version(context: Context, server: Server) -> Findings:
    if not server.info:
        text = "INFO is denied: version, eviction policy, persistence and replicas are unknown"
        yield note("server", text, "grant +info, or make sure of maxmemory-policy noeviction")
    elif server.version:
        numbers = tuple(int(part) for part in server.version.split(".")[:2] if part.isdecimal())
        oldest, name = _OLDEST[server.product], f"{server.product} {server.version}"
        if numbers >= oldest:
            yield ok("server", name)
            return
        newer = f"{server.product} {oldest[0]}.{oldest[1]} or newer"
        yield warning("server", f"{name} is older than what this library is tested with", newer)


@per_server
def check_eviction(context: Context, server: Server) -> Findings:
    policy = server.info.get("maxmemory_policy", "noeviction")
    limit = server.info.get("maxmemory", "0")
    if policy != "noeviction":
        severe = warning if limit == "0" else error
        yield severe(
            "eviction",
            f"maxmemory-policy is {policy} (maxmemory {limit}): when memory is short, leases go "
            "first and two bodies run at once",
            "CONFIG SET maxmemory-policy noeviction, or a server of its own for locks",
        )
    elif server.info:
        yield ok("eviction", policy)


@per_server
def check_persistence(context: Context, server: Server) -> Findings:
    """Whether a restart forgets leases. See check_votes for Redlock's stricter requirements."""
    if server.info.get("aof_enabled") == "1":
        yield ok("persistence", "append-only file")
    elif server.info and context.kind == "redis":
        yield note(
            "persistence",
            "no append-only file: a restart forgets leases. Bodies that run then are interrupted "
            "within ttl/3, and put back if their task is acks_late",
            "appendonly yes, if restarts happen often",
        )
    elif server.info:
        text = "no append-only file: a master that restarts before a failover empties its replicas"
        remedy = "appendonly yes on all servers, or no automatic restart of Redis"
        yield warning("persistence", text, remedy)


def _replicas(server: Server) -> int:
    return int(server.info.get("connected_slaves", "0"))


@per_server
def check_wait_replicas(context: Context, server: Server) -> Findings:
    """Whether a master has as many replicas as a grant waits for."""
    connected, wanted = _replicas(server), context.settings.wait_replicas
    if not server.info or not wanted:
        return
    text = f"{connected} replicas are connected, and singleton_lock_wait_replicas={wanted}: "
    if connected < wanted:
        remedy = f"singleton_lock_wait_replicas = {connected}, or more replicas"
        yield error("wait_replicas", f"{text}every grant is given back", remedy)
    elif connected == wanted:
        text += "without any one of them nothing is granted"
        yield note("wait_replicas", text, "one replica more than that, or accept it")


@per_server
def check_replication(context: Context, server: Server) -> Findings:
    """Whether there are replicas: a failover loses leases, and Redlock's nodes must have none."""
    replicas, is_redlock = _replicas(server), context.kind == "redlock"
    if server.info.get("role") == "slave" and is_redlock:
        text = "is a replica: it has no vote, and promoted it would bring another's votes along"
        remedy = "REPLICAOF NO ONE: the nodes of Redlock are masters that don't know each other"
        yield error("replication", text, remedy)
    elif server.info.get("role") == "slave":
        text = "this server is a replica: it can't take leases"
        yield error("replication", text, "point singleton_lock_url at the master")
    elif replicas and is_redlock:
        text = f"has {replicas} replicas: a failover forgets votes, and two bodies can run at once"
        remedy = "no replicas here, or none that is ever promoted; another node instead"
        yield warning("replication", text, remedy)
    elif replicas:
        text = f"{replicas} replicas, asynchronous: a failover may lose acknowledged leases"
        yield note("replication", text, "write with the fence where that matters")


# --- clocks ---------------------------------------------------------------------------------------


@per_server
def check_clock(context: Context, server: Server) -> Findings:
    """The clock of a single server, compared with this host's."""
    ahead = server.clock_ahead
    if ahead is None:
        return
    if abs(ahead) <= _FROM_THIS_HOST:
        yield ok("clock", f"{ahead:+.2f} s from this host")
        return
    text = f"{ahead:+.1f} s from this host: if the clock is stepped back, leases end early or late"
    yield warning("clock", text, _NTP)


def check_clocks(context: Context) -> Findings:
    """The clocks of several servers, compared with each other: one may succeed another."""
    known = [server for server in context.servers if server.clock_ahead is not None]
    readings = sorted((each.clock_ahead or 0.0, each.reply_time, each.name) for each in known)
    if len(readings) < 2:
        return
    (slow, slow_reply, slowest), (fast, fast_reply, fastest) = readings[0], readings[-1]
    harm = "after a failover to the slower one, fences may be lower than before"
    allowed, ttl = _BETWEEN_MASTERS, context.ttls[0]
    if context.kind == "redlock":
        allowed = drift(ttl)
        harm = f"a lease of {ttl:g} s allows for {allowed:.3f} s, should one of them be stepped"
    # The error of each clock is up to half the time of a reply.
    if fast - slow - (fast_reply + slow_reply) / 2 <= allowed:
        yield ok("clock", f"{len(readings)} servers within {fast - slow:.3f} s")
        return
    text = f"the clock of {fastest} is {fast - slow:.3f} s ahead of that of {slowest}: {harm}"
    yield warning("clock", text, _NTP)
