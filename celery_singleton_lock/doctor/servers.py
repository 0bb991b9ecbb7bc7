"""Checks of a store's servers, one by one and against each other; visits to Redis servers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, Final

from celery_singleton_lock.core.heartbeat import timeout_for
from celery_singleton_lock.core.lease import drift
from celery_singleton_lock.doctor.context import Context, Findings, Server, error, note, ok, warning
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.redis.connection import Connections
from celery_singleton_lock.stores.redis.inspect import OPERATOR_TIMEOUT, info_of
from celery_singleton_lock.stores.redlock.url import read_nodes

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
# A request of a lease waits up to ttl/6 for its reply. If replies usually take more than a tenth of
# that, the margin for slow replies is small.
_COMFORTABLE_SHARE: Final = 0.1
# A server counts its uptime in whole seconds.
_UPTIME_PRECISION: Final = 1.0
_TWO_BODIES: Final = "two bodies can run at once"
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


def visit_nodes(context: Context) -> list[Server]:
    """Redlock's nodes. If a node has an append-only file, `info` also contains its sync policy."""
    nodes = []
    for member in read_nodes(context.settings.url).members:
        link = context.stack.enter_context(closing(Connections(member.url)))
        node = visit_redis(context, str(member), link)
        if node.info.get("aof_enabled") == "1":
            with suppress(StoreError):  # CONFIG may be denied
                node.info |= fields_of(command(link, "CONFIG", "GET", "appendfsync"))
        nodes.append(node)
    return nodes


def visit_redis(context: Context, name: str, link: Any, *, grants: bool = True) -> Server:
    """Read a server's INFO and clock, as far as the login has the rights."""
    server = Server(name=name, link=link, grants=grants, product="Redis")
    try:
        for section in _SECTIONS:
            server.info |= info_of(link, section)
    except StoreError as exc:
        server.error = exc
        return server
    server.version = server.info.get("redis_version", "")
    if "valkey_version" in server.info:
        server.product, server.version = "Valkey", server.info["valkey_version"]
    with suppress(StoreError):  # TIME may be denied
        readings = [_read_clock(context, link) for _ in range(_READINGS)]
        server.reply_time, server.clock_ahead = min(readings)
    return server


def _read_clock(context: Context, link: Any) -> tuple[float, float]:
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


def fields_of(reply: Any) -> dict[str, str]:
    """The names and values of a reply in RESP2 or RESP3."""
    flat = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
    return {name.decode(): value.decode() for name, value in flat.items()}


# --- each server ----------------------------------------------------------------------------------


def check_reachability(context: Context) -> Findings:
    """Whether some servers don't answer while others do."""
    subject, remedy = _UNREACHABLE[context.kind]
    for server in context.servers:
        if server.error:
            yield warning(subject, f"{server.name}: {server.error}", remedy)


def per_server(check: Callable[[Context, Server], Findings]) -> Callable[[Context], Findings]:
    """Turn a check of one server into a check of every granting server; merge equal findings."""

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
        else:
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
        text = f"has {replicas} replicas: a failover forgets votes, and {_TWO_BODIES}"
        remedy = "no replicas here, or none that is ever promoted; another node instead"
        yield warning("replication", text, remedy)
    elif replicas:
        text = f"{replicas} replicas, asynchronous: a failover may lose acknowledged leases"
        yield note("replication", text, "write with the fence where that matters")


# --- Redlock's nodes ------------------------------------------------------------------------------


def check_majority(context: Context) -> Findings:
    nodes, answered = len(context.servers), len(context.granting)
    majority = nodes // 2 + 1
    if answered >= majority:
        yield ok("nodes", f"{answered} of {nodes} answer")
    else:
        text = f"{answered} of {nodes} answer, and a lease takes {majority}"
        yield error("nodes", text, "start the others, or correct singleton_lock_url")


@per_server
def check_latency(context: Context, node: Server) -> Findings:
    ttl = context.ttls[0]
    if is_slow(node.reply_time, ttl):
        patience = f"the {timeout_for(ttl) * 1000:.0f} ms that a lease of {ttl:g} s waits for it"
        text = f"a reply takes more than a tenth of {patience}"
        yield warning("latency", text, "a longer ttl, or a node that is nearer")


def is_slow(reply_time: float, ttl: float) -> bool:
    """Whether replies that take ``reply_time`` seconds are slow for a lease of ``ttl`` seconds."""
    return reply_time > timeout_for(ttl) * _COMFORTABLE_SHARE


def check_identities(context: Context) -> Findings:
    first: dict[str, str] = {}
    for node in context.servers:
        run_id = node.info.get("run_id", "")
        if run_id and run_id in first:
            text = f"{first[run_id]} and {node.name} are one server, with two votes: {_TWO_BODIES}"
            yield error("identity", text, "name servers that fail independently")
        first.setdefault(run_id, node.name)


@per_server
def check_votes(context: Context, node: Server) -> Findings:
    """Whether a node could grant a lease a second time after a restart."""
    info, longest = node.info, context.ttls[-1]
    quarantine = read_nodes(context.settings.url).quarantine
    needed = longest if quarantine is None else quarantine
    if info.get("aof_enabled") == "1" and info.get("appendfsync") == "always":
        yield ok("persistence", "append-only file, synced with every write")
    elif needed < longest:
        yield warning(
            "persistence",
            f"a node that restarts forgets votes, and quarantine={needed:g} lets it vote while "
            f"leases of {longest:g} s may stand: {_TWO_BODIES}",
            "no quarantine in the URL (then it is each lease's ttl), or appendonly yes with "
            "appendfsync always",
        )
    elif "uptime_in_seconds" not in info:
        text = f"INFO is denied, so a restart isn't noticed, and forgets votes: {_TWO_BODIES}"
        yield warning("persistence", text, "grant +info, or appendonly yes with appendfsync always")
    else:
        text = "a restart forgets votes; so it has none until it is up for as long as a lease lasts"
        yield ok("persistence", text)
        if int(info["uptime_in_seconds"]) - _UPTIME_PRECISION < needed:
            text = f"was started less than {needed:g} s ago: no vote on the longest lease yet"
            yield note("nodes", text, "wait")


# --- clocks ---------------------------------------------------------------------------------------


def check_clocks(context: Context) -> Findings:
    """Compare a single clock with this host's; of several clocks, the slowest with the fastest."""
    readings = sorted(
        (server.clock_ahead, server.reply_time, server.name)
        for server in context.servers
        if server.clock_ahead is not None
    )
    if context.kind == "redis":
        for ahead, _, _ in readings:
            yield from _compare_with_host(ahead)
    elif len(readings) > 1:
        yield from _compare_clocks(context, readings)


def _compare_with_host(ahead: float) -> Findings:
    if abs(ahead) <= _FROM_THIS_HOST:
        yield ok("clock", f"{ahead:+.2f} s from this host")
    else:
        harm = "if the clock is stepped back, leases end early or late"
        yield warning("clock", f"{ahead:+.1f} s from this host: {harm}", _NTP)


def _compare_clocks(context: Context, readings: list[tuple[float, float, str]]) -> Findings:
    """One server may succeed another, so their clocks must agree."""
    (slow, slow_reply, slowest), (fast, fast_reply, fastest) = readings[0], readings[-1]
    harm = "after a failover to the slower one, fences may be lower than before"
    allowed, ttl = _BETWEEN_MASTERS, context.ttls[0]
    if context.kind == "redlock":
        allowed = drift(ttl)
        harm = f"a lease of {ttl:g} s allows for {allowed:.3f} s, should one of them be stepped"
    # The error of each clock is up to half the time of a reply.
    if fast - slow - (fast_reply + slow_reply) / 2 <= allowed:
        yield ok("clock", f"{len(readings)} servers within {fast - slow:.3f} s")
    else:
        text = f"the clock of {fastest} is {fast - slow:.3f} s ahead of that of {slowest}: {harm}"
        yield warning("clock", text, _NTP)
