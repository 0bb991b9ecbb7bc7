"""The faults of a store on which leases do not work, and what to do about each.

Servers report a fault in words, so it is found by words of its error. An error without such words
is a missing right if the store refuses, and an unreachable store if it does not answer.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from ..errors import DOCS, StoreError, StoreUnavailable


class Fault(NamedTuple):
    """A fault.

    Attributes:
        subject: What is wrong, in a word.
        remedy: The action to take.
    """

    subject: str
    remedy: str


_DISK: Final = Fault(
    "disk", "make room on the server's disk: it refuses writes while it can't save"
)
#: The faults that etcd also raises an alarm about.
SPACE: Final = Fault(
    "space",
    "etcdctl compact, defrag, then alarm disarm; raise --quota-backend-bytes, and set "
    "--auto-compaction-retention",
)
CORRUPT: Final = Fault("members", "take the corrupt member out, and add it again empty")
_LOGIN: Final = Fault(
    "login",
    "correct user and password in singleton_lock_url; percent-encode :/@%. A user that ACL SETUSER "
    "has made is gone after a restart without an aclfile",
)
_SCHEMES: Final = (
    "does the server speak TLS at this port? rediss://, etcds:// and zks:// are with TLS, "
    "redis://, etcd:// and zk:// without"
)
_NAME: Final = Fault("name", "correct the host's name in singleton_lock_url, or repair DNS")
_CLOSED: Final = Fault("connection", f"{_SCHEMES}. If the scheme is right, see its log")
# Faults of a connection to any store: words of its error, the fault.
_OF_CONNECTIONS: Final = (
    (
        "CERTIFICATE_VERIFY_FAILED",
        Fault("tls", "name the authority that signed the server's certificate in the URL (ca=...)"),
    ),
    ("SSL", Fault("tls", _SCHEMES)),
    # A server that gets TLS without speaking it, or the reverse, closes the connection. Depending
    # on what it has read until then, the client sees an end, which is SSL's, or a reset.
    ("reset by peer", _CLOSED),
    ("Broken pipe", _CLOSED),
    ("Remote end closed", _CLOSED),
    ("closed by server", _CLOSED),
    ("resolve", _NAME),
    ("name resolution", _NAME),
    ("Name or service not known", _NAME),  # glibc's; the next ones are of macOS and musl
    ("nodename nor servname", _NAME),
    ("Name does not resolve", _NAME),
)
_OF_REDIS: Final = (
    ("refuses the login", _LOGIN),
    ("DB index", Fault("database", "correct the database number in singleton_lock_url")),
    (
        "maxmemory",
        Fault("memory", "raise maxmemory, or remove data; leave maxmemory-policy at noeviction"),
    ),
    ("persist", _DISK),
    ("AOF", _DISK),
    (
        "good replicas",
        Fault("replicas", "start replicas, or lower min-replicas-to-write of the master"),
    ),
    (
        "wait_replicas asks",
        Fault("replicas", "start replicas, or lower singleton_lock_wait_replicas"),
    ),
    ("max number of clients", Fault("clients", "raise maxclients, or end clients that leak")),
    ("loading the dataset", Fault("loading", "wait until the server has read its data")),
    (
        "running a script",
        Fault("script", "SCRIPT KILL ends the script that blocks the server"),
    ),
)
_OF_ETCD: Final = (
    (
        "authentication is not enabled",
        Fault("login", "etcdctl auth enable, or no user and password in singleton_lock_url"),
    ),
    ("refuses the login", _LOGIN),
    (
        "user name is empty",
        Fault("login", "name a user and password in singleton_lock_url: etcd demands a login"),
    ),
    ("space exceeded", SPACE),
    ("corrupt", CORRUPT),
    (
        "permission denied",
        Fault(
            "rights",
            "etcdctl role grant-permission ROLE readwrite --prefix PATH, with the path of "
            "singleton_lock_url",
        ),
    ),
    ("too many requests", Fault("load", "etcd is overloaded: look at its disk's latency")),
)
_OF_ZOOKEEPER: Final = (
    (
        "NoAuth",
        Fault(
            "rights",
            "the login under which the nodes were made; or setAcl, or another path in "
            "singleton_lock_url",
        ),
    ),
    ("AuthFailed", _LOGIN),
    ("QuotaExceeded", Fault("quota", "raise the path's quota: setquota")),
)
_REPLICA: Final = "read only replica"
_MASTERS: Final = {
    "redis": "point singleton_lock_url at the master, or use sentinel://",
    "sentinel": "wait until Sentinel names the new master; if it doesn't, look at its log",
    "redis cluster": "wait until the failover is over; CLUSTER NODES shows the masters",
    "redlock": "REPLICAOF NO ONE: the nodes of Redlock are masters that don't know each other",
}
_FAULTS: Final = {
    **{
        kind: (*_OF_REDIS, (_REPLICA, Fault("replica", remedy)), *_OF_CONNECTIONS)
        for kind, remedy in _MASTERS.items()
    },
    "etcd": (*_OF_ETCD, *_OF_CONNECTIONS),
    "zookeeper": (*_OF_ZOOKEEPER, *_OF_CONNECTIONS),
}
# Redis waits for the rest of what it takes for a command, and kazoo reports no error of TLS: with
# the wrong scheme, both time out as if there were no server.
_UNREACHABLE: Final = Fault(
    "reachability",
    "start the store, or correct singleton_lock_url: host, port, and whether it is with TLS "
    "(rediss://, etcds://, zks://)",
)
_UNKNOWN: Final = Fault(
    "rights", f"grant what {DOCS}reference/settings.html#rights lists for an ACL user"
)


def fault_of(kind: str, error: Exception) -> Fault:
    """The fault that ``error`` is about.

    Args:
        kind: The name of the store in its capabilities, or ``sentinel``.
        error: The error of the store, or of a connection to one of its servers.
    """
    text = str(error)
    for words, fault in _FAULTS.get(kind, ()):
        if words in text:
            return fault
    refuses = isinstance(error, StoreError) and not isinstance(error, StoreUnavailable)
    return _UNKNOWN if refuses else _UNREACHABLE
