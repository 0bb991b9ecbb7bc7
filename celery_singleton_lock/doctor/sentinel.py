"""Checks of Redis Sentinel: the sentinels, the master that they report, and its replicas."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

from celery_singleton_lock.doctor.context import Context, Findings, Server, error, note, ok, warning
from celery_singleton_lock.doctor.servers import command, visit_redis
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.sentinel import SentinelConnections

# The minimum number of sentinels. A failover needs the votes of a majority, and with two sentinels
# no majority is left after the loss of one.
_FEWEST: Final = 3


# --- visits ---------------------------------------------------------------------------------------


def _connections(context: Context) -> SentinelConnections:
    settings = context.settings
    connections = SentinelConnections(settings.url, settings.connection_options)
    return context.stack.enter_context(closing(connections))


def _sentinels(context: Context) -> list[Server]:
    """The report of each sentinel on the app's master."""
    connections = context.once(_connections)
    return [_ask(link, connections.master_name) for link in connections.sentinels]


def _ask(link: Any, master_name: str) -> Server:
    sentinel = Server(name=link.address, link=link)
    try:
        return replace(sentinel, info=_fields(command(link, "SENTINEL", "MASTER", master_name)))
    except StoreUnavailable as exc:
        return replace(sentinel, error=str(exc))
    except StoreError as exc:
        return replace(sentinel, error=str(exc), is_denied=True)


def _informed(context: Context) -> list[Server]:
    """The sentinels that know the app's master."""
    return [sentinel for sentinel in context.once(_sentinels) if sentinel.info]


def _master(context: Context) -> Server | None:
    """The master that the first informed sentinel reports; None if there is no such sentinel."""
    for sentinel in _informed(context):
        return _visit(context, sentinel.info)
    return None


def _replicas(context: Context) -> list[dict[str, str]] | None:
    """The first informed sentinel's report on each replica; None if the report is denied."""
    name = context.once(_connections).master_name
    try:
        reply = command(_informed(context)[0].link, "SENTINEL", "REPLICAS", name)
    except StoreError:
        return None
    return [_fields(fields) for fields in reply]


def visit_sentinel(context: Context) -> list[Server]:
    """The master, if it answers, and its replicas."""
    master = context.once(_master)
    if master is None or master.error:
        return []
    replicas = context.once(_replicas) or []
    return [master, *(_visit(context, fields, grants=False) for fields in replicas)]


def _visit(context: Context, fields: Mapping[str, str], *, grants: bool = True) -> Server:
    host, port = fields["ip"], int(fields["port"])
    link = context.once(_connections).at(host, port)
    return visit_redis(context, f"{host}:{port}", link, grants=grants)


def _fields(reply: Any) -> dict[str, str]:
    """The names and values of a reply in RESP2 or RESP3."""
    flat = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
    return {name.decode(): value.decode() for name, value in flat.items()}


# --- checks ---------------------------------------------------------------------------------------


def check_sentinels(context: Context) -> Findings:
    asked, informed = context.once(_sentinels), _informed(context)
    if all(sentinel.error and not sentinel.is_denied for sentinel in asked):
        text = f"none of {len(asked)} answers: {asked[0].error}"
        yield error("sentinels", text, "start them, or correct singleton_lock_url")
        return
    for sentinel in asked:
        remedy = "start it, or take it out of singleton_lock_url"
        if sentinel.is_denied:
            remedy = "give the login in the URL the right to SENTINEL, and the right master_name"
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
    known, (_, *replicas) = context.once(_replicas), context.servers
    if known is None:
        yield note("replicas", "SENTINEL REPLICAS is denied, so they are unknown")
        return
    usable = 0
    for fields, replica in zip(known, replicas, strict=True):
        flags, link = fields.get("flags", ""), fields.get("master-link-status", "ok")
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
