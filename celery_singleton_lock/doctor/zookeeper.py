"""A store that is a ZooKeeper ensemble: its members, what sessions it grants, who may write.

Members are asked by the four-letter word ``srvr``, which no ``4lw.commands.whitelist`` takes away:
ZooKeeper's own scripts need it. What is in between may (a proxy); so whether there is a majority is
told by a session, and nothing else.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from celery_singleton_lock.doctor.finding import Finding, Severity, by_name
from celery_singleton_lock.doctor.patient import Patient
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.urls import ClusterUrl
from celery_singleton_lock.stores.zookeeper.sessions import OPTIONS, Session
from celery_singleton_lock.stores.zookeeper.store import ZooKeeperStore

__all__ = ["examine_zookeeper"]

_PORT: Final = 2181
_OLDEST: Final = (3, 5)
_TIMEOUT: Final = 2.0
# A session with the ensemble, over a member that may be away.
_PATIENCE: Final = 5.0
_SERVING: Final = frozenset({"leader", "follower", "observer", "standalone"})
# ZooKeeper rounds to milliseconds.
_ROUNDING: Final = 0.01
_ANYONE: Final = ("world", "anyone")


@dataclass(frozen=True, slots=True)
class _Member:
    """What one member answers to ``srvr``.

    Attributes:
        error: Why nothing; empty: it answers.
        mode: leader, follower, observer, standalone; empty where it serves nobody.
        version: Of the server.
    """

    name: str
    error: str = ""
    mode: str = ""
    version: str = ""


def examine_zookeeper(store: ZooKeeperStore, patient: Patient) -> Iterator[Finding]:
    """What each member says, and what a session of ours is granted."""
    settings = patient.settings
    url = ClusterUrl.parse(
        settings.url, port=_PORT, known=OPTIONS, options=settings.connection_options
    )
    members = [_visit(url, host) for host in url.hosts]
    yield from _reachable(members)
    told = [(member.name, member) for member in members if member.version]
    yield from by_name(told, _version)
    yield from _sessions(store, url, patient)


def _visit(url: ClusterUrl, host: tuple[str, int]) -> _Member:
    name = f"{host[0]}:{host[1]}"
    try:
        answer = _ask(url, host)
    except OSError as exc:
        return _Member(name, error=str(exc) or repr(exc))
    mode = re.search(r"^Mode: (\w+)", answer, re.MULTILINE)
    version = re.search(r"^Zookeeper version: ([\d.]+)", answer, re.MULTILINE)
    if mode is None:
        return _Member(name, error=answer.strip() or "it closed the connection")
    return _Member(name, mode=mode[1], version=version[1] if version else "")


def _ask(url: ClusterUrl, host: tuple[str, int]) -> str:
    plain = socket.create_connection(host, timeout=_TIMEOUT)
    with plain, _secured(plain, url, host[0]) as link:
        link.sendall(b"srvr")
        return b"".join(iter(lambda: link.recv(65_536), b"")).decode(errors="replace")


def _secured(plain: socket.socket, url: ClusterUrl, host: str) -> socket.socket:
    if url.scheme != "zks":
        return plain
    context = ssl.create_default_context(cafile=url.options.get("ca"))
    if "cert" in url.options:
        context.load_cert_chain(url.options["cert"], url.options.get("key"))
    return context.wrap_socket(plain, server_hostname=host)


def _reachable(members: list[_Member]) -> Iterator[Finding]:
    for member in members:
        if member.error:
            yield Finding(
                Severity.WARNING,
                "members",
                f"{member.name}: {member.error}",
                "start it, and look at its log; or take it out of singleton_lock_url",
            )
    serving = [member for member in members if member.mode in _SERVING]
    if serving:
        parts = ", ".join(f"{member.name} {member.mode}" for member in serving)
        text = f"{len(serving)} of {len(members)} named ones serve: {parts}"
        yield Finding(Severity.OK, "members", text)
    if any(member.mode == "standalone" for member in serving):
        yield Finding(
            Severity.NOTE,
            "members",
            "one alone is no ensemble: without it there are no locks",
            "three, on hosts that fail independently",
        )


def _version(member: _Member) -> Iterator[Finding]:
    numbers = tuple(int(part) for part in member.version.split(".")[:2])
    if numbers >= _OLDEST:
        yield Finding(Severity.OK, "server", f"ZooKeeper {member.version}")
        return
    yield Finding(
        Severity.WARNING,
        "server",
        f"ZooKeeper {member.version} is older than what this library is tested with",
        "ZooKeeper 3.5 or newer",
    )


def _sessions(store: ZooKeeperStore, url: ClusterUrl, patient: Patient) -> Iterator[Finding]:
    """The shortest and the longest ttl: between the two, what is asked for is granted."""
    findings: list[Finding] = []
    for ttl in dict.fromkeys((patient.ttls[0], patient.ttls[-1])):
        with closing(Session(url, ttl, patient.clock)) as session:
            try:
                session.start(patient.clock.now() + _PATIENCE)
            except StoreError as exc:
                yield Finding(
                    Severity.ERROR,
                    "quorum",
                    f"none of the {len(url.hosts)} members of the URL grants a session: {exc}",
                    "start members until a majority is there",
                )
                return
            findings += _granted(ttl, session.timeout)
            if ttl == patient.ttls[-1]:
                access = list(_access(session, store, url, patient))
    if not findings:
        text = f"from {patient.ttls[0]:g} to {patient.ttls[-1]:g} s, as the ttls here ask for"
        findings.append(Finding(Severity.OK, "session", text))
    yield from [*findings, *access]


def _granted(ttl: float, granted: float) -> Iterator[Finding]:
    if granted > ttl + _ROUNDING:
        yield Finding(
            Severity.WARNING,
            "session",
            f"the ensemble grants {granted:g} s where ttl={ttl:g} s is asked for: a dead holder "
            "blocks others so much longer",
            "a longer ttl, or minSessionTimeout (2 tickTime by default) below it",
        )
    elif granted < ttl - _ROUNDING:
        yield Finding(
            Severity.WARNING,
            "session",
            f"the ensemble grants {granted:g} s where ttl={ttl:g} s is asked for: a store that is "
            "silent for longer ends the lease",
            "a shorter ttl, or maxSessionTimeout (20 tickTime by default) above it",
        )


def _access(
    session: Session, store: ZooKeeperStore, url: ClusterUrl, patient: Patient
) -> Iterator[Finding]:
    """Whose the nodes are: each belongs to who made it."""
    if not url.username:
        yield Finding(
            Severity.NOTE,
            "login",
            "nobody logs in: whoever reaches the ensemble can take and free every lock",
            "a user and password in singleton_lock_url, before the first lock is taken",
        )
        return
    closed, unguarded = _foreign(session, store.buckets, patient)
    if closed:
        yield Finding(
            Severity.ERROR,
            "rights",
            f"{closed} nodes belong to another login than {url.username}: tasks whose keys are in "
            "them can't run",
            "one login for all apps; or another path in singleton_lock_url; or setAcl",
        )
    if unguarded:
        yield Finding(
            Severity.WARNING,
            "rights",
            f"{unguarded} nodes were made without a login, so anybody may change what is in them",
            "while no worker runs, delete them or setAcl",
        )
    if not closed and not unguarded:
        yield Finding(Severity.OK, "login", f"as {url.username}; its nodes are its own")


def _foreign(session: Session, paths: Sequence[str], patient: Patient) -> tuple[int, int]:
    """How many nodes are closed to us, and how many are open to everybody."""
    closed = unguarded = 0
    deadline = patient.clock.now() + _PATIENCE
    for request in [session.client.get_acls_async(path) for path in paths]:
        try:
            [reply] = session.collect([request], deadline)
        except StoreUnavailable:
            raise
        except StoreError:
            closed += 1
            continue
        if reply is not None:
            unguarded += any((acl.id.scheme, acl.id.id) == _ANYONE for acl in reply[0])
    return closed, unguarded
