"""Checks of Redis Sentinel and Redis Cluster: masters, replicas, and what decides a failover."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, Final, NamedTuple

from celery_singleton_lock.doctor.context import Context, Findings, Server, error, note, ok, warning
from celery_singleton_lock.doctor.servers import command, fields_of, visit_redis
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.cluster import Address, Topology
from celery_singleton_lock.stores.redis.sentinel import SentinelConnections
from celery_singleton_lock.stores.urls import Hosts

_SLOTS: Final = 16384
# The minimum number of voters: of sentinels, and of a cluster's masters. A failover needs the votes
# of a majority, and with two voters no majority is left after the loss of one.
_FEWEST: Final = 3


# --- Sentinel: visits -----------------------------------------------------------------------------


def _connections(context: Context) -> SentinelConnections:
    settings = context.settings
    connections = SentinelConnections(settings.url, settings.connection_options)
    return context.stack.enter_context(closing(connections))


def _sentinels(context: Context) -> list[Server]:
    """The report of each sentinel on the app's master."""
    connections = context.once(_connections)
    sentinels = [Server(name=link.address, link=link) for link in connections.sentinels]
    for sentinel in sentinels:
        try:
            reply = command(sentinel.link, "SENTINEL", "MASTER", connections.master_name)
            sentinel.info = fields_of(reply)
        except StoreError as exc:
            sentinel.error = exc
    return sentinels


def _informed(context: Context) -> list[Server]:
    """The sentinels that know the app's master."""
    return [sentinel for sentinel in context.once(_sentinels) if sentinel.info]


def _master(context: Context) -> Server | None:
    """The master that the first informed sentinel reports; None if there is no such sentinel."""
    informed = _informed(context)
    return _visit(context, informed[0].info) if informed else None


def _reported_replicas(context: Context) -> list[dict[str, str]] | None:
    """The first informed sentinel's report on each replica; None if the report is denied."""
    name = context.once(_connections).master_name
    try:
        reply = command(_informed(context)[0].link, "SENTINEL", "REPLICAS", name)
    except StoreError:
        return None
    return [fields_of(fields) for fields in reply]


def visit_sentinel(context: Context) -> list[Server]:
    """The master, if it answers, and its replicas with the report of a sentinel in `info`."""
    master = context.once(_master)
    if master is None or master.error:
        return []
    servers = [master]
    for fields in context.once(_reported_replicas) or []:
        replica = _visit(context, fields, grants=False)
        replica.info |= fields
        servers.append(replica)
    return servers


def _visit(context: Context, fields: Mapping[str, str], *, grants: bool = True) -> Server:
    host, port = fields["ip"], int(fields["port"])
    link = context.once(_connections).at(host, port)
    return visit_redis(context, f"{host}:{port}", link, grants=grants)


# --- Sentinel: checks -----------------------------------------------------------------------------


def check_sentinels(context: Context) -> Findings:
    asked, informed = context.once(_sentinels), _informed(context)
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
    for sentinel in _informed(context)[:1]:
        name = context.once(_connections).master_name
        try:
            yield ok("quorum", command(sentinel.link, "SENTINEL", "CKQUORUM", name).decode())
        except StoreError as exc:
            if "NOQUORUM" not in str(exc):
                raise
            text = f"no failover can be decided, says {sentinel.name}: {exc}"
            remedy = "start the other sentinels; `sentinel monitor` of their configuration sets it"
            yield error("quorum", text, remedy)


def check_master(context: Context) -> Findings:
    """Whether the sentinels agree on the master, and it answers."""
    named: dict[str, list[str]] = {}
    for sentinel in _informed(context):
        address = f"{sentinel.info['ip']}:{sentinel.info['port']}"
        named.setdefault(address, []).append(sentinel.name)
    if len(named) > 1:
        views = "; ".join(f"{', '.join(names)}: {address}" for address, names in named.items())
        text = f"the sentinels name different masters, during a failover or a partition ({views})"
        remedy = "run doctor again in a minute; then look at the network between them"
        yield warning("master", text, remedy)
    down = [each.name for each in _informed(context) if "o_down" in each.info.get("flags", "")]
    if down:
        text = f"{down[0]} and a quorum of others think that it is down"
        yield error("master", text, "wait for the failover; if none comes, see `quorum`")
    master = context.once(_master)
    if master and master.error:
        remedy = "wait for the failover; if the sentinels reach it, look at the network from here"
        yield error("master", f"{master.name}: {master.error}", remedy)
    elif master:
        yield ok("master", f"{context.once(_connections).master_name} is {master.name}")


def check_min_replicas(context: Context) -> Findings:
    for master in context.granting:
        # INFO contains that field only if min-replicas-to-write is set.
        if master.info and "min_slaves_good_slaves" not in master.info:
            yield note(
                "min-replicas",
                "min-replicas-to-write is not set: a master that is cut off from all others goes "
                "on granting to clients that reach it, until it is demoted",
                "min-replicas-to-write 1, min-replicas-max-lag 3, and the fence for what matters",
            )


def check_replicas(context: Context) -> Findings:
    if not context.servers:
        return
    if context.once(_reported_replicas) is None:
        yield note("replicas", "SENTINEL REPLICAS is denied, so they are unknown")
        return
    usable = 0
    for replica in context.servers[1:]:
        flags, link = replica.info.get("flags", ""), replica.info.get("master-link-status", "ok")
        if replica.error:
            continue  # check_reachability reports it
        if "down" not in flags and link == "ok":
            usable += 1
            continue
        text = f"{replica.name} is out of step (flags {flags}, link {link}): it may lack leases"
        yield warning("replicas", text, "look at its log; it needs the master's login and address")
    if usable:
        yield ok("replicas", f"{usable} in step, as the sentinels see them")
    else:
        text = "there is none that could be promoted: if the master ends, there are no locks"
        yield warning("replicas", text, "a replica or two, on other hosts")


# --- Cluster: visits ------------------------------------------------------------------------------


class _View(NamedTuple):
    """The cluster in the view of one node.

    Attributes:
        link: The connections to that node.
        shards: For each master: the number of its slots, and its replicas.
    """

    link: Any
    shards: dict[Address, tuple[int, list[Address]]]


def _view(context: Context) -> _View | None:
    """The view of the first node that answers; None if no node does."""
    try:
        links = list(context.store.servers())
    except StoreError:
        return None
    for link in [*links, *(links[0].at(*seed) for seed in _seeds(context) if links)]:
        view = _View(link, {})
        try:
            for row in command(link, "CLUSTER", "SLOTS"):
                master, *replicas = Topology([row], _address(link)).nodes
                slots, known = view.shards.get(master, (0, []))
                view.shards[master] = (slots + row[1] - row[0] + 1, [*known, *replicas])
        except StoreError:
            continue
        return view
    return None


def _seeds(context: Context) -> tuple[Address, ...]:
    return Hosts.of(context.settings.url, default_port=6379).addresses


def visit_cluster(context: Context) -> list[Server]:
    """All nodes, including nodes that only the URL or CLUSTER NODES names."""
    view = context.once(_view)
    if view is None:
        return []
    replicas = [replica for _, replicas in view.shards.values() for replica in replicas]
    addresses = dict.fromkeys([*view.shards, *replicas, *_known(view), *_seeds(context)])
    return [
        visit_redis(context, _name(each), view.link.at(*each), grants=each in view.shards)
        for each in addresses
    ]


def _known(view: _View) -> Iterator[Address]:
    """The nodes of CLUSTER NODES: CLUSTER SLOTS leaves out nodes that fail."""
    try:
        text = command(view.link, "CLUSTER", "NODES").decode()
    except StoreError:
        return
    for line in text.splitlines():
        address, flags = line.split()[1:3]
        host, _, port = address.partition(",")[0].partition("@")[0].rpartition(":")
        if "noaddr" not in flags and "handshake" not in flags:
            yield host or _address(view.link)[0], int(port)


def _address(link: Any) -> Address:
    host, _, port = link.address.rpartition(":")
    return host, int(port)


def _name(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


# --- Cluster: checks ------------------------------------------------------------------------------


def check_state(context: Context) -> Findings:
    view = context.once(_view)
    if view is None:
        text = "no node says what the cluster looks like"
        yield error("cluster", text, "start the nodes, or correct singleton_lock_url")
        return
    info = command(view.link, "CLUSTER", "INFO").decode()
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    state, size = fields.get("cluster_state", ""), fields.get("cluster_size", "?")
    down, assigned = (fields.get(f"cluster_slots_{name}", "?") for name in ("fail", "assigned"))
    if state == "ok":
        yield ok("cluster", f"state ok, {size} masters have slots")
        return
    yield error(
        "cluster",
        f"state {state}, says {view.link.address}: {down} slots are down, {assigned} of {_SLOTS} "
        "assigned",
        "wait for the failover; a master without a replica has to be started again. Meanwhile "
        "cluster-require-full-coverage no keeps the other slots at work",
    )


def check_shards(context: Context) -> Findings:
    """Whether every slot has a master that answers, and every master a replica and a successor."""
    view = context.once(_view)
    if view is None:
        return
    failed = {server.name for server in context.servers if server.error}
    missing = _SLOTS - sum(slots for slots, _ in view.shards.values())
    silent = sum(slots for master, (slots, _) in view.shards.items() if _name(master) in failed)
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
    answering = {server.name for server in context.servers if not server.error}
    for master, (_, replicas) in view.shards.items():
        if answering.isdisjoint(map(_name, replicas)):
            text = "is a master without a replica that answers: its end takes its slots away"
            yield warning("replicas", f"{_name(master)} {text}", "a replica, on another host")
