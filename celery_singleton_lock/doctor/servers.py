"""Checks of a store's servers; visits to single Redis servers, Redlock, Sentinel and Cluster."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

from ..core.clock_drift import drift
from ..core.heartbeat import timeout_for
from ..errors import StoreError, StoreUnavailable
from ..stores.eviction import REMEDY, eviction_of, policy_of
from ..stores.redis.cluster import Topology
from ..stores.redis.connection import OPERATOR_TIMEOUT, Connections
from ..stores.redis.sentinel import SentinelConnections
from ..stores.redlock.node_urls import read_nodes
from ..stores.remedies import fault_of
from ..stores.store_url import Address, StoreUrl
from .context import Context, Findings, Server, error, note, ok, warning

# The oldest version of each product that the tests run with, or that there is.
_OLDEST: Final = {"Redis": (6, 2), "Valkey": (7, 2), "etcd": (3, 4), "ZooKeeper": (3, 8)}
_Version = tuple[int, ...]
# For each product the versions with a flaw that matters here (from the first one to the one before
# the second), and the flaw; docs/reference/stores.md has the sources.
_FLAWS: Final[dict[str, tuple[tuple[tuple[_Version, _Version], ...], str]]] = {
    "etcd": (
        (((3, 4, 0), (3, 4, 31)), ((3, 5, 0), (3, 5, 13))),
        "after a leader has stood still and another was elected, leases that are held may end, "
        "and two runs overlap",
    ),
    "ZooKeeper": (
        (((3, 6, 0), (3, 8, 1)),),
        "a member sometimes forgets a request until another one comes; each is repeated",
    ),
}
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
# Milliseconds that a key of the doctor lasts if it can't be removed.
_PROBE_MILLIS: Final = 1000
_TWO_BODIES: Final = "two runs can overlap"
_UNREACHABLE: Final = {
    "sentinel": ("replicas", "start it; or SENTINEL RESET, if it is gone for good"),
    "redis cluster": ("nodes", "start it; or CLUSTER FORGET it, and take it out of the URL"),
    "redlock": ("nodes", "start it: while it is away, the loss of fewer others ends all locks"),
    "etcd": ("members", "start it; or member remove, and take it out of the URL"),
    "zookeeper": ("members", "start it, and look at its log; or take it out of the URL"),
}
_SLOTS: Final = 16384
# The minimum number of voters: of sentinels, and of a cluster's masters. A failover needs the votes
# of a majority, and with two voters no majority is left after the loss of one.
_FEWEST: Final = 3
NO_QUORUM: Final = note(
    "quorum",
    "SENTINEL CKQUORUM is denied, so whether a failover could be decided is unknown",
    "grant +sentinel|ckquorum",
)
NO_STATE: Final = note(
    "cluster",
    "CLUSTER INFO is denied, so the state of the cluster is unknown",
    "grant +cluster|info +cluster|nodes",
)


# --- visits to Redis servers ----------------------------------------------------------------------


def visit_one(context: Context) -> Iterator[Server]:
    """The only server of the store."""
    for link in context.store.servers():
        yield replace(_visit(context, link), name="")


def visit_nodes(context: Context) -> Iterator[Server]:
    """Redlock's nodes. If a node has an append-only file, `info` also contains its sync policy."""
    for member in read_nodes(context.settings.url)[0]:
        link = context.stack.enter_context(closing(Connections(member)))
        node = replace(_visit(context, link), name=str(member))
        if node.info.get("aof_enabled") == "1":
            with suppress(StoreError):  # CONFIG may be denied
                node.info |= _fields_of(_command(link, "CONFIG", "GET", "appendfsync"))
        yield node


def _visit(context: Context, link: Any, *, grants: bool = True) -> Server:
    """Read a server's INFO and clock, as far as the login has the rights."""
    server = Server(name=link.address, link=link, grants=grants, product="Redis")
    with server.visited():
        for section in ("server", "memory", "persistence", "replication"):
            server.info |= link.info(section)
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
    seconds, micros = _command(link, "TIME")
    received = context.clock.wall()
    return received - sent, int(seconds) + int(micros) / 1e6 - (sent + received) / 2


def _command(link: Any, *words: Any) -> Any:
    """The reply to one command.

    Raises:
        StoreError: There is no reply, or the server refuses the command.
    """
    return link.run([words], OPERATOR_TIMEOUT)[0]


def _fields_of(reply: Any) -> dict[str, str]:
    """The names and values of a reply in RESP2 or RESP3."""
    flat = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
    return {name.decode(): value.decode() for name, value in flat.items()}


# --- Sentinel: visits -----------------------------------------------------------------------------


class _Master(NamedTuple):
    """The app's master in the view of the sentinels.

    Attributes:
        connections: The connections to the sentinels and, with ``at()``, to the servers.
        asked: The sentinels, each with its report on the master.
        informed: The sentinels that know the master.
        master: The master that the first of them reports; None if no sentinel knows it.
        replicas: The first one's report on each replica; None if there is no report.
    """

    connections: SentinelConnections
    asked: list[Server]
    informed: list[Server]
    master: Server | None
    replicas: list[dict[str, str]] | None


def _watch(context: Context) -> _Master:
    connections = SentinelConnections(context.settings.url, context.settings.connection_options)
    context.stack.enter_context(closing(connections))
    name, master, replicas = connections.master_name, None, None
    asked = [Server(name=link.address, link=link) for link in connections.sentinels]
    for sentinel in asked:
        with sentinel.visited():
            sentinel.info = _fields_of(_command(sentinel.link, "SENTINEL", "MASTER", name))
    informed = [sentinel for sentinel in asked if sentinel.info]
    for sentinel in informed[:1]:
        link = connections.at(sentinel.info["ip"], int(sentinel.info["port"]))
        master = _visit(context, link)
        with suppress(StoreError):  # SENTINEL REPLICAS may be denied
            reply = _command(sentinel.link, "SENTINEL", "REPLICAS", name)
            replicas = [_fields_of(fields) for fields in reply]
    return _Master(connections, asked, informed, master, replicas)


def visit_sentinel(context: Context) -> Iterator[Server]:
    """The master, if it answers, and its replicas with the report of a sentinel in `info`."""
    watch = context.once(_watch)
    if watch.master is None or watch.master.error:
        return
    yield watch.master
    for fields in watch.replicas or []:
        link = watch.connections.at(fields["ip"], int(fields["port"]))
        replica = _visit(context, link, grants=False)
        replica.info |= fields
        yield replica


# --- Cluster: visits ------------------------------------------------------------------------------


class _NodeView(NamedTuple):
    """The cluster in the view of one node.

    Attributes:
        link: The connections to that node.
        shards: For each master: the number of its slots, and its replicas.
    """

    link: Any
    shards: dict[Address, tuple[int, list[Address]]]


def _view(context: Context) -> _NodeView | None:
    """The view of the first node that answers; None if no node does."""
    links: list[Connections] = []
    with suppress(StoreError):
        links = list(context.store.servers())
    for link in [*links, *(links[0].at(*seed) for seed in _seeds(context) if links)]:
        view = _NodeView(link, {})
        with suppress(StoreError):
            for row in _command(link, "CLUSTER", "SLOTS"):
                master, *replicas = Topology([row], _address(link)).nodes
                slots, known = view.shards.get(master, (0, []))
                view.shards[master] = (slots + row[1] - row[0] + 1, [*known, *replicas])
            return view
    return None


def _seeds(context: Context) -> tuple[Address, ...]:
    return StoreUrl.parse(context.settings.url, port=6379).hosts


def visit_cluster(context: Context) -> Iterator[Server]:
    """All nodes, including nodes that only the URL or CLUSTER NODES names."""
    view = context.once(_view)
    if view is None:
        return
    replicas = [replica for _, replicas in view.shards.values() for replica in replicas]
    addresses = dict.fromkeys([*view.shards, *replicas, *_known(view), *_seeds(context)])
    for each in addresses:
        yield _visit(context, view.link.at(*each), grants=each in view.shards)


def _known(view: _NodeView) -> Iterator[Address]:
    """The nodes of CLUSTER NODES: CLUSTER SLOTS leaves out nodes that fail."""
    with suppress(StoreError):  # CLUSTER NODES may be denied
        for line in _command(view.link, "CLUSTER", "NODES").decode().splitlines():
            address, flags = line.split()[1:3]
            host, _, port = address.partition(",")[0].partition("@")[0].rpartition(":")
            if "noaddr" not in flags and "handshake" not in flags:
                yield Address(host or _address(view.link).host, int(port))


def _address(link: Any) -> Address:
    host, _, port = link.address.rpartition(":")
    return Address(host.strip("[]"), int(port))


# --- each server ----------------------------------------------------------------------------------


def check_reachability(context: Context) -> Findings:
    """Whether some servers don't answer while others do."""
    subject, start = _UNREACHABLE[context.kind]
    for server in context.servers:
        if server.error:
            fault = fault_of(context.kind, server.error)
            remedy = start if fault.subject == "reachability" else fault.remedy
            yield warning(subject, f"{server.name}: {server.error}", remedy)


def check_version(context: Context, server: Server) -> Findings:
    if not server.info:
        text = "INFO is denied: version, eviction policy, persistence and replicas are unknown"
        yield note("server", text, "grant +info, or make sure of maxmemory-policy noeviction")
    elif server.version:
        numbers = _numbers(server.version)
        oldest, name = _OLDEST[server.product], f"{server.product} {server.version}"
        if numbers < oldest:
            newer = f"{server.product} {oldest[0]}.{oldest[1]} or newer"
            yield warning("server", f"{name} is older than what this library is tested with", newer)
        elif mended := mended_in(server.product, numbers):
            _, flaw = _FLAWS[server.product]
            report = warning if server.product == "etcd" else note
            yield report("server", f"{name}: {flaw}", f"{server.product} {mended} or newer")
        else:
            yield ok("server", name)


def _numbers(version: str) -> _Version:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def mended_in(product: str, version: _Version) -> str:
    """The first version without the flaw that ``version`` has; empty: it has no known one."""
    ranges, _ = _FLAWS.get(product, ((), ""))
    mended = (after for since, after in ranges if since <= version < after)
    return ".".join(map(str, next(mended, ())))


def check_eviction(context: Context, server: Server) -> Findings:
    """Whether the server may evict leases; an error if no worker takes any for that reason."""
    if found := eviction_of(server.info):
        is_refused = found.forbids_leases(allow_eviction=context.settings.allow_eviction)
        yield (error if is_refused else warning)("eviction", found.text, REMEDY)
    elif server.info:
        yield ok("eviction", policy_of(server.info))


def check_persistence(context: Context, server: Server) -> Findings:
    """Whether a restart forgets leases. See check_votes for Redlock's stricter requirements."""
    if server.info.get("aof_enabled") == "1":
        yield ok("persistence", "append-only file")
    elif server.info and (names := context.queue_tasks):
        yield warning(
            "persistence",
            "no append-only file: a restart loses the calls that wait in the queues of keys "
            f'(on_conflict="queue": {names})',
            "appendonly yes",
        )
    elif server.info and context.kind == "redis":
        yield note(
            "persistence",
            "no append-only file: a restart forgets leases. Tasks that run then are interrupted "
            "soon after the server answers again, and requeued if their task is acks_late",
            "appendonly yes",
        )
    elif server.info:
        text = "no append-only file: a master that restarts before a failover empties its replicas"
        remedy = "appendonly yes on all servers, or no automatic restart of Redis"
        yield warning("persistence", text, remedy)


def check_wait_replicas(context: Context, server: Server) -> Findings:
    """Whether a master has as many replicas as a grant waits for."""
    connected = int(server.info.get("connected_slaves", "0"))
    wanted = context.settings.wait_replicas
    if not server.info or not wanted:
        return
    text = f"{connected} replicas are connected, and singleton_lock_wait_replicas={wanted}: "
    if connected < wanted:
        remedy = f"singleton_lock_wait_replicas = {connected}, or more replicas"
        yield error("wait_replicas", f"{text}every grant is given back", remedy)
    elif connected == wanted:
        text += "without any one of them nothing is granted"
        yield note("wait_replicas", text, "one replica more than that, or accept it")


def check_replication(context: Context, server: Server) -> Findings:
    """Whether there are replicas: a failover loses leases, and Redlock's nodes must have none."""
    replicas, is_redlock = int(server.info.get("connected_slaves", "0")), context.kind == "redlock"
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


def check_latency(context: Context, node: Server) -> Findings:
    ttl = context.ttls[0]
    if is_slow(node.reply_time, ttl):
        patience = f"the {timeout_for(ttl) * 1000:.0f} ms that a lease of {ttl:g} s waits for it"
        text = f"a reply takes more than a tenth of {patience}"
        yield warning("latency", text, "a longer ttl, or a node in the same network")


def is_slow(reply_time: float, ttl: float) -> bool:
    """Whether replies that take ``reply_time`` seconds are slow for a lease of ``ttl`` seconds."""
    return reply_time > timeout_for(ttl) * _COMFORTABLE_SHARE


def check_writes(context: Context, node: Server) -> Findings:
    """Whether a node of Redlock accepts writes; the others may make up a majority without it."""
    key = context.runtime.keyspace.lock("singleton-doctor", secrets.token_hex(8))
    try:
        _command(node.link, "SET", key, "", "PX", _PROBE_MILLIS)
        _command(node.link, "DEL", key)
    except StoreError as exc:
        fault = fault_of(context.kind, exc)
        if fault.subject not in ("rights", "replica"):  # check_replication reports a replica
            text = f"{exc}: its vote is missing, so the loss of fewer others ends all locks"
            yield warning(fault.subject, text, fault.remedy)


def check_identities(context: Context) -> Findings:
    first: dict[str, str] = {}
    for node in context.servers:
        run_id = node.info.get("run_id", "")
        if run_id and run_id in first:
            text = f"{first[run_id]} and {node.name} are one server, with two votes: {_TWO_BODIES}"
            yield error("identity", text, "name servers that fail independently")
        first.setdefault(run_id, node.name)


def check_votes(context: Context, node: Server) -> Findings:
    """Whether a node could grant a lease a second time after a restart."""
    info, longest = node.info, context.ttls[-1]
    quarantine = read_nodes(context.settings.url)[1]
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


# --- Sentinel: checks -----------------------------------------------------------------------------


def check_sentinels(context: Context) -> Findings:
    _, asked, informed, _, _ = context.once(_watch)
    if all(isinstance(sentinel.error, StoreUnavailable) for sentinel in asked):
        text = f"none of {len(asked)} answers: {asked[0].error}"
        yield error("sentinels", text, "start them, or correct singleton_lock_url")
        return
    for sentinel in asked:
        remedy = "give the login in the URL the right to SENTINEL, and the right master_name"
        if isinstance(sentinel.error, StoreUnavailable):
            remedy = "start it, or take it out of singleton_lock_url"
        if sentinel.error:
            yield warning("sentinels", f"{sentinel.name}: {sentinel.error}", remedy)
    if not informed:
        return
    yield ok("sentinels", f"{len(informed)} of {len(asked)} named ones answer")
    # Each sentinel reports the number of other sentinels that it knows.
    count = 1 + max(int(sentinel.info.get("num-other-sentinels", "0")) for sentinel in informed)
    if count < _FEWEST:
        text = f"there are {count} for this master: without one of them no failover is decided"
        yield warning("sentinels", text, f"{_FEWEST} or more, on hosts that fail independently")
    if count > len(asked):
        text = f"{count} watch this master, and the URL names {len(asked)}, which may fail together"
        yield note("sentinels", text, "name all of them in singleton_lock_url")


def check_quorum(context: Context) -> Findings:
    """Whether a failover could be decided, in the view of one sentinel."""
    watch = context.once(_watch)
    for sentinel in watch.informed[:1]:
        name = watch.connections.master_name
        try:
            yield ok("quorum", _command(sentinel.link, "SENTINEL", "CKQUORUM", name).decode())
        except StoreError as exc:
            if "NOQUORUM" not in str(exc):
                raise
            text = f"no failover can be decided, says {sentinel.name}: {exc}"
            remedy = "start the other sentinels; `sentinel monitor` of their configuration sets it"
            yield error("quorum", text, remedy)


def check_master(context: Context) -> Findings:
    """Whether the sentinels agree on the master, and it answers."""
    connections, _, informed, master, _ = context.once(_watch)
    named: dict[str, list[str]] = {}
    for sentinel in informed:
        address = f"{sentinel.info['ip']}:{sentinel.info['port']}"
        named.setdefault(address, []).append(sentinel.name)
    if len(named) > 1:
        views = "; ".join(f"{', '.join(names)}: {address}" for address, names in named.items())
        text = f"the sentinels name different masters, during a failover or a partition ({views})"
        remedy = "run doctor again in a minute; then look at the network between them"
        yield warning("master", text, remedy)
    for name in [each.name for each in informed if "o_down" in each.info.get("flags", "")][:1]:
        text = f"{name} and a quorum of others think that it is down"
        yield error("master", text, "wait for the failover; if none comes, see `quorum`")
    if master and master.error:
        remedy = "wait for the failover; if the sentinels reach it, look at the network from here"
        yield error("master", f"{master.name}: {master.error}", remedy)
    elif master:
        yield ok("master", f"{connections.master_name} is {master.name}")


def check_min_replicas(context: Context) -> Findings:
    for master in context.granting:
        # INFO contains that field only if min-replicas-to-write is set.
        if master.info and "min_slaves_good_slaves" not in master.info:
            yield note(
                "min-replicas",
                "min-replicas-to-write is not set: a master that is cut off from all others goes "
                "on granting to clients that reach it, until it is demoted",
                "set min-replicas-to-write 1 and min-replicas-max-lag 3, and let your database "
                "check fencing tokens",
            )
        # Since 7.0 a script that writes is refused as a command is. Valkey began after it.
        elif master.product == "Redis" and _numbers(master.version) < (7, 0):
            yield note(
                "min-replicas",
                f"Redis {master.version} does not apply min-replicas-to-write to scripts, and "
                "scripts grant the leases",
                "use Redis 7.0 or newer, or Valkey, and let your database check fencing tokens",
            )


def check_replicas(context: Context) -> Findings:
    if not context.servers:
        return
    if context.once(_watch).replicas is None:
        yield note("replicas", "SENTINEL REPLICAS is denied, so they are unknown")
        return
    usable = 0
    # check_reachability reports the others.
    for replica in [each for each in context.servers[1:] if not each.error]:
        flags, link = replica.info.get("flags", ""), replica.info.get("master-link-status", "ok")
        if "down" not in flags and link == "ok":
            usable += 1
        else:
            text = f"{replica.name} is out of step (flags {flags}, link {link}): it may lack leases"
            remedy = "look at its log; it needs the master's login and address"
            yield warning("replicas", text, remedy)
    if usable:
        yield ok("replicas", f"{usable} in step, as the sentinels see them")
    else:
        text = "there is none that could be promoted: if the master ends, there are no locks"
        yield warning("replicas", text, "a replica or two, on other hosts")


# --- Cluster: checks ------------------------------------------------------------------------------


def check_state(context: Context) -> Findings:
    view = context.once(_view)
    if view is None:
        text = "no node says what the cluster looks like"
        yield error("cluster", text, "start the nodes, or correct singleton_lock_url")
        return
    info = _command(view.link, "CLUSTER", "INFO").decode()
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    state, size = fields.get("cluster_state", ""), fields.get("cluster_size", "?")
    down, assigned = (fields.get(f"cluster_slots_{name}", "?") for name in ("fail", "assigned"))
    if state == "ok":
        yield ok("cluster", f"state ok, {size} masters have slots")
    else:
        yield error(
            "cluster",
            f"state {state}, says {view.link.address}: {down} slots are down, {assigned} of "
            f"{_SLOTS} assigned",
            "wait for the failover; a master without a replica has to be started again. Meanwhile "
            "cluster-require-full-coverage no keeps the other slots at work",
        )


def check_slots(context: Context) -> Findings:
    """Whether every slot has a master that answers, and every master a replica and a successor."""
    view = context.once(_view)
    if view is None:
        return
    answering = {server.name for server in context.servers if not server.error}
    missing = _SLOTS - sum(slots for slots, _ in view.shards.values())
    silent = sum(slots for each, (slots, _) in view.shards.items() if str(each) not in answering)
    problem = "the keys in them can't be taken"
    if missing:
        text = f"{missing} of {_SLOTS} have no master: {problem}"
        yield error("slots", text, "redis-cli --cluster fix, or CLUSTER ADDSLOTS")
    if silent:
        text = f"{silent} of {_SLOTS} have a master that doesn't answer: {problem}"
        yield error("slots", text, "wait for the failover, or start it again")
    if not missing and not silent:
        yield ok("slots", f"all {_SLOTS} have a master that answers")
    masters = len(view.shards)
    yield ok("shards", f"{context.store.shards}, on {masters} masters")
    if masters < _FEWEST:
        text = f"{masters} have slots: when one ends, no majority is left to elect another"
        yield warning("masters", text, f"{_FEWEST} or more")
    for master, (_, replicas) in view.shards.items():
        if answering.isdisjoint(map(str, replicas)):
            text = "is a master without a replica that answers: its end takes its slots away"
            yield warning("replicas", f"{master} {text}", "a replica, on another host")


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
            if abs(ahead) <= _FROM_THIS_HOST:
                yield ok("clock", f"{ahead:+.2f} s from this host")
            else:
                harm = "if the clock is stepped back, leases end early or late"
                yield warning("clock", f"{ahead:+.1f} s from this host: {harm}", _NTP)
    elif len(readings) > 1:
        yield from _compare(context, readings)


def _compare(context: Context, readings: list[tuple[float, float, str]]) -> Findings:
    """One server may succeed another, so their clocks must agree."""
    (slow, slow_reply, slowest), (fast, fast_reply, fastest) = readings[0], readings[-1]
    harm = "after a failover to the slower one, fences may be lower than before"
    allowed, ttl, apart = _BETWEEN_MASTERS, context.ttls[0], f"{fast - slow:.3f} s"
    if context.kind == "redlock":
        allowed = drift(ttl)
        harm = f"a lease of {ttl:g} s allows for {allowed:.3f} s, should one of them be stepped"
    # The error of each clock is up to half the time of a reply.
    if fast - slow - (fast_reply + slow_reply) / 2 <= allowed:
        yield ok("clock", f"{len(readings)} servers within {apart}")
    else:
        text = f"the clock of {fastest} is {apart} ahead of that of {slowest}: {harm}"
        yield warning("clock", text, _NTP)
