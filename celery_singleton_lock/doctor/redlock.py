"""Checks of Redlock's nodes: a majority answers, they are independent, a restart keeps votes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any, Final

from celery_singleton_lock.core.heartbeat import timeout_for
from celery_singleton_lock.doctor.context import (
    Context,
    Findings,
    Server,
    error,
    is_slow,
    note,
    ok,
    warning,
)
from celery_singleton_lock.doctor.servers import command, per_server, visit_redis
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.redis.connection import Connections
from celery_singleton_lock.stores.redlock.url import read_nodes

# A server counts its uptime in whole seconds.
_UPTIME_PRECISION: Final = 1.0
_HARM: Final = "two bodies can run at once"


def visit_nodes(context: Context) -> list[Server]:
    """All nodes. If a node has an append-only file, `info` also contains its sync policy."""
    nodes = []
    for member in read_nodes(context.settings.url).members:
        link = context.stack.enter_context(closing(Connections(member.url)))
        node = visit_redis(context, str(member), link)
        if node.info.get("aof_enabled") == "1":
            node = replace(node, info={**node.info, "appendfsync": _appendfsync(link)})
        nodes.append(node)
    return nodes


def _appendfsync(link: Any) -> str:
    """The setting ``appendfsync``; empty if CONFIG is denied."""
    try:
        reply = command(link, "CONFIG", "GET", "appendfsync")
    except StoreError:
        return ""
    values = list(reply.values()) if isinstance(reply, dict) else reply[1:]
    return values[0].decode() if values else ""


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


def check_identities(context: Context) -> Findings:
    first: dict[str, str] = {}
    for node in context.servers:
        run_id = node.info.get("run_id", "")
        if run_id and run_id in first:
            text = f"{first[run_id]} and {node.name} are one server, with two votes: {_HARM}"
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
            f"leases of {longest:g} s may stand: {_HARM}",
            "no quarantine in the URL (then it is each lease's ttl), or appendonly yes with "
            "appendfsync always",
        )
    elif "uptime_in_seconds" not in info:
        text = f"INFO is denied, so a restart isn't noticed, and forgets votes: {_HARM}"
        yield warning("persistence", text, "grant +info, or appendonly yes with appendfsync always")
    else:
        text = "a restart forgets votes; so it has none until it is up for as long as a lease lasts"
        yield ok("persistence", text)
        if int(info["uptime_in_seconds"]) - _UPTIME_PRECISION < needed:
            text = f"was started less than {needed:g} s ago: no vote on the longest lease yet"
            yield note("nodes", text, "wait")
