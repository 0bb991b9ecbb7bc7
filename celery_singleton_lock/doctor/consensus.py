"""Checks of etcd clusters and ZooKeeper ensembles: members, majority, ttl, rights.

The clients of both are optional, so they are imported where they are used.
"""

from __future__ import annotations

import math
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ..errors import StoreError, StoreUnavailable
from ..stores.remedies import CORRUPT, SPACE
from .context import Context, Findings, Server, error, note, ok, warning

if TYPE_CHECKING:
    from ..stores.store_url import StoreUrl
    from ..stores.zookeeper.sessions import Session

# Seconds to wait for one reply of one member.
_TIMEOUT: Final = 2.0
# Seconds to wait for a session with the ensemble. A try with an unreachable member may precede it.
_SESSION_TIMEOUT: Final = 5.0
_DISAGREE: Final = "members disagree on what is stored"
_ALARMS: Final = {
    "NOSPACE": ("the cluster refuses writes, so there are no locks", SPACE.remedy),
    "CORRUPT": (_DISAGREE, CORRUPT.remedy),
}
_LOGIN_REMEDIES: Final = {
    "etcd": "etcdctl auth enable, and a login in singleton_lock_url; or client certificates",
    "zookeeper": "a user and password in singleton_lock_url, before the first lock is taken",
}
NO_SIZE: Final = note("cluster", "its members are unknown: the login may not list them")
NO_ALARMS: Final = note("alarms", "they are unknown: the login may not list them")
_SERVING: Final = frozenset({"leader", "follower", "observer", "standalone"})
# Seconds; ZooKeeper rounds to milliseconds.
_ROUNDING: Final = 0.01
_START: Final = "start members until a majority is there"
_HARM: Final = "a dead holder blocks others so much longer"
_THREE: Final = "three, on hosts that fail independently"


def check_login(context: Context) -> Findings:
    url = context.store.url
    if url.username:
        yield ok("login", f"as {url.username}")
    elif context.kind == "etcd" and "cert" in url.options:
        yield ok("login", "by certificate")
    else:
        text = "there is no login: any client that reaches the store can take and free every lock"
        yield note("login", text, _LOGIN_REMEDIES[context.kind])


# --- etcd -----------------------------------------------------------------------------------------


def visit_etcd(context: Context) -> Iterator[Server]:
    """The members that the URL names, each with its own view: version, leader, id."""
    from ..stores.etcd.gateway import Gateway

    url = context.store.url
    for address in url.hosts:
        gateway = Gateway(replace(url, hosts=(address,)), context.clock)
        context.stack.enter_context(closing(gateway))
        member = Server(name=str(address), link=gateway, product="etcd")
        with member.visited():
            member.info = _ask(context, member, "maintenance/status")
            member.version = str(member.info.get("version", ""))
        yield member


def _ask(context: Context, member: Server, path: str, **body: Any) -> Any:
    return member.link.request(path, body, context.clock.now() + _TIMEOUT, repeatable=True)


def _led(context: Context) -> list[Server]:
    """The members that follow a leader."""
    return [member for member in context.granting if str(member.info.get("leader", "0")) != "0"]


def check_etcd_members(context: Context) -> Findings:
    named, led = len(context.servers), _led(context)
    leader = "a member that doesn't answer, or isn't in the URL"
    for member in context.granting:
        if member not in led:
            text = f"{member.name} follows no leader: it is cut off, or there is no majority"
            remedy = "look at its log, and at the network between the members"
            yield warning("members", text, remedy)
        elif str(member.info["header"]["member_id"]) == str(member.info["leader"]):
            leader = member.name
    if led:
        yield ok("members", f"{len(led)} of {named} named ones follow a leader: {leader}")
    elif not any(member.refuses for member in context.servers):
        text = f"none of the {named} members of the URL follows a leader: no locks"
        yield error("quorum", text, _START)


def check_etcd_size(context: Context) -> Findings:
    for member in _led(context)[:1]:
        members = _ask(context, member, "cluster/member/list").get("members", [])
        voters = sum(not each.get("isLearner") for each in members)
        named = len(context.servers)
        if voters < 3:
            text = f"{voters} members vote: without one of them there are no locks"
            yield note("cluster", text, _THREE)
        elif voters % 2 == 0:
            text = f"{voters} members vote: no more of them may fail than of {voters - 1}"
            yield note("cluster", text, "an odd number")
        if len(members) > named:
            text = f"{len(members)} members, and the URL names {named}: the others are never asked"
            yield note("cluster", text, "name all of them in singleton_lock_url")


def check_alarms(context: Context) -> Findings:
    for member in _led(context)[:1]:
        reply = _ask(context, member, "maintenance/alarm", action="GET")
        kinds = {alarm.get("alarm", "?") for alarm in reply.get("alarms", [])}
        if not kinds:
            yield ok("alarms", "none")
        for kind in sorted(kinds):
            harm, remedy = _ALARMS.get(kind, (_DISAGREE, "etcdctl alarm list"))
            yield error("alarms", f"{kind} is raised: {harm}", remedy)


def check_shortest_ttl(context: Context) -> Findings:
    """The ttl that is granted instead of one second; it depends on the election timeout."""
    for member in _led(context)[:1]:
        with suppress(StoreError):  # check_leases or check_alarms has reported it
            granted = _ask(context, member, "lease/grant", TTL=1, ID=0)
            _ask(context, member, "lease/revoke", ID=granted["ID"])
            shortest, ttl = float(granted["TTL"]), context.ttls[0]
            uneven = ", ".join(f"{ttl:g}" for ttl in context.ttls if ttl != math.ceil(ttl))
            if shortest > math.ceil(ttl):
                text = f"no lease of less than {shortest:g} s, for a ttl of {ttl:g} s: {_HARM}"
                yield warning("ttl", text, "a longer ttl, or a shorter --election-timeout")
            elif uneven:
                text = f"a dead holder's key is free after ttl={uneven} rounded up"
                yield note("ttl", f"etcd keeps whole seconds: {text}")
            else:
                yield ok("ttl", f"{shortest:g} s are possible")


# --- ZooKeeper ------------------------------------------------------------------------------------


def visit_zookeeper(context: Context) -> Iterator[Server]:
    """The reply of each member in the URL to the four-letter word ``srvr``.

    ``4lw.commands.whitelist`` can't disable that word, because ZooKeeper's own scripts need it. A
    proxy may block it. So only a session shows whether there is a majority.
    """
    url = context.store.url
    for address in url.hosts:
        member = Server(name=str(address), product="ZooKeeper")
        with member.visited():
            plain = socket.create_connection(address, timeout=_TIMEOUT)
            with plain, _secured(plain, url, address.host) as connection:
                connection.sendall(b"srvr")
                answer = connection.makefile("rb").read().decode(errors="replace")
            fields = dict(re.findall(r"^(Mode|Zookeeper version): ([\w.]+)", answer, re.MULTILINE))
            if "Mode" not in fields:
                raise OSError(answer.strip() or "it closed the connection")
            member.info, member.version = fields, fields.get("Zookeeper version", "")
        yield member


def _secured(plain: socket.socket, url: StoreUrl, host: str) -> socket.socket:
    if url.scheme != "zks":
        return plain
    context = ssl.create_default_context(cafile=url.options.get("ca"))
    if "cert" in url.options:
        context.load_cert_chain(url.options["cert"], url.options.get("key"))
    return context.wrap_socket(plain, server_hostname=host)


def check_zookeeper_members(context: Context) -> Findings:
    modes = {member.name: member.info["Mode"] for member in context.granting}
    serving = [f"{name} {mode}" for name, mode in modes.items() if mode in _SERVING]
    if serving:
        text = f"{len(serving)} of {len(context.servers)} named ones serve: {', '.join(serving)}"
        yield ok("members", text)
    if "standalone" in modes.values():
        text = "one server alone is no ensemble: without it there are no locks"
        yield note("members", text, _THREE)


def _sessions(context: Context) -> tuple[dict[float, Session], str]:
    """Sessions of the shortest and the longest ttl, and the reason if one was not granted."""
    from ..stores.zookeeper.sessions import Session

    sessions: dict[float, Session] = {}
    for ttl in dict.fromkeys((context.ttls[0], context.ttls[-1])):
        session = Session(context.store.url, ttl, context.clock)
        context.stack.enter_context(closing(session))
        try:
            session.start(context.clock.now() + _SESSION_TIMEOUT)
        except StoreError as exc:
            return sessions, str(exc)
        sessions[ttl] = session
    return sessions, ""


def check_sessions(context: Context) -> Findings:
    """Whether the shortest and the longest ttl are granted as requested; then all others are."""
    sessions, problem = context.once(_sessions)
    if problem:
        text = f"none of the {len(context.servers)} members of the URL grants a session: {problem}"
        yield error("quorum", text, _START)
        return
    if all(abs(session.timeout - ttl) <= _ROUNDING for ttl, session in sessions.items()):
        text = f"from {context.ttls[0]:g} to {context.ttls[-1]:g} s, as the ttls here ask for"
        yield ok("session", text)
    for ttl, session in sessions.items():
        granted = session.timeout
        text = f"the ensemble grants {granted:g} s where ttl={ttl:g} s is asked for: "
        if granted > ttl + _ROUNDING:
            remedy = "a longer ttl, or minSessionTimeout (2 tickTime by default) below it"
            yield warning("session", f"{text}{_HARM}", remedy)
        elif granted < ttl - _ROUNDING:
            text += "a store that doesn't answer for longer ends the lease"
            remedy = "a shorter ttl, or maxSessionTimeout (20 tickTime by default) above it"
            yield warning("session", text, remedy)


def check_rights(context: Context) -> Findings:
    """Whether this login, and no other, may change the nodes: each belongs to its creator."""
    username, (sessions, problem) = context.store.url.username, context.once(_sessions)
    if not username or problem:
        return  # check_login or check_sessions reports it
    closed, unguarded = _foreign(context, sessions[context.ttls[-1]])
    if closed:
        text = f"{closed} nodes belong to another login than {username}: their tasks can't run"
        remedy = "one login for all apps; or another path in singleton_lock_url; or setAcl"
        yield error("rights", text, remedy)
    if unguarded:
        text = f"{unguarded} nodes were made without a login, so any client may change them"
        yield warning("rights", text, "while no worker runs, delete them or setAcl")
    if not closed and not unguarded:
        yield ok("login", f"the nodes belong to {username}")


def _foreign(context: Context, session: Session) -> tuple[int, int]:
    """The number of nodes closed to this login, and the number of nodes open to every client."""
    closed = unguarded = 0
    deadline = context.clock.now() + _SESSION_TIMEOUT
    for request in [session.client.get_acls_async(path) for path in context.store.buckets]:
        try:
            [reply] = session.collect([request], deadline)
        except StoreUnavailable:
            raise
        except StoreError:
            closed += 1
            continue
        if reply is not None:
            unguarded += any((acl.id.scheme, acl.id.id) == ("world", "anyone") for acl in reply[0])
    return closed, unguarded
