"""The nodes that a ``redlock://`` URL names, and how each is reached.

::

    redlock://[user:password@]host[:port],host[:port],host[:port]/db?option=value&...

A login before a host is that host's; the first host's login is also that of every host without one
of its own. ``redlocks://`` speaks TLS to all of them. The database and the options hold for all:
``quarantine`` (see redlock.py), and for TLS redis-py's ``ssl_ca_certs``, ``ssl_ca_path``,
``ssl_ca_data``, ``ssl_certfile``, ``ssl_keyfile``, ``ssl_password``, ``ssl_cert_reqs`` (required,
optional, none) and ``ssl_check_hostname``.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from celery_singleton_lock.errors import SettingsError
from celery_singleton_lock.policy import seconds, suggestion

__all__ = ["SCHEMES", "Node", "Nodes", "read_nodes"]

SCHEMES: Final = frozenset({"redlock", "redlocks"})
_MIN_NODES: Final = 3
_PORT: Final = 6379
_TLS_OPTIONS: Final = frozenset(
    f"ssl_{name}"
    for name in (
        "ca_certs",
        "ca_path",
        "ca_data",
        "certfile",
        "keyfile",
        "password",
        "cert_reqs",
        "check_hostname",
    )
)
_CERT_REQS: Final = {
    "required": ssl.CERT_REQUIRED,
    "optional": ssl.CERT_OPTIONAL,
    "none": ssl.CERT_NONE,
}
# Of the characters that end a login elsewhere, those that may be left in one here.
_SPECIAL: Final = frozenset("#@")
_FORM: Final = "redlock://[user:password@]host:port,host:port,host:port/0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One of the servers.

    Attributes:
        url: Its own, in the form that RedisStore reads.
        tls: How to speak TLS to it; None: not at all.
    """

    host: str
    port: int
    db: int
    username: str
    password: str = field(repr=False)
    url: str = field(repr=False)
    tls: ssl.SSLContext | None = None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """What a URL says.

    Attributes:
        quarantine: Seconds that a node which was started has no vote; None: the ttl of the lease
            that is asked for.
    """

    members: tuple[Node, ...]
    quarantine: float | None


def read_nodes(url: str) -> Nodes:
    """What ``url`` says.

    Raises:
        SettingsError: It can't be read, or names a number of nodes that is no quorum. No password
            is in the message.
    """
    scheme, _, rest = url.partition("://")
    netloc, _, path = rest.partition("?")[0].partition("/")
    query = rest.partition("?")[2]
    if "@" in query:
        # Its names aren't shown: with a "?" in a password, one of them is the rest of it.
        raise SettingsError(
            "an '@' stands in the options of the redlock:// URL: percent-encode what is special in "
            f"its passwords ('?' is %3F, '@' is %40), and write {_FORM}"
        )
    options = _options(urlsplit(f"redis://host/?{query}").query)
    quarantine = _quarantine(options.pop("quarantine", None))
    if options and scheme != "redlocks":
        raise SettingsError(
            f"{', '.join(sorted(options))} in the URL of redlock:// have no effect without TLS: "
            "write redlocks://"
        )
    tls = _context(options) if scheme == "redlocks" else None
    members: list[Node] = []
    for part in netloc.split(","):
        first = members[0] if members else None
        members.append(_node(part, _db(path), tls, options, first))
    _check_number([str(node) for node in members])
    return Nodes(members=tuple(members), quarantine=quarantine)


def _check_number(names: list[str]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise SettingsError(
            f"redlock:// names {', '.join(sorted(twice))} more than once: one server has one vote"
        )
    count = len(names)
    if count < _MIN_NODES:
        raise SettingsError(
            f"redlock:// names {count} node(s) ({', '.join(names)}), and a majority that survives "
            f"the loss of one takes {_MIN_NODES}. For one server, write redis://"
        )
    if count % 2 == 0:
        raise SettingsError(
            f"redlock:// names {count} nodes: no more of them may fail than of {count - 1}, and "
            "votes can be split into halves. Name an odd number"
        )


def _node(
    text: str, db: int, tls: ssl.SSLContext | None, options: dict[str, str], first: Node | None
) -> Node:
    login, at, place = text.rpartition("@")
    try:
        if set(login) & _SPECIAL:
            raise ValueError(login)
        parts = urlsplit(f"redis://{place}")
        host, port = parts.hostname, parts.port or _PORT
    except ValueError:
        host, port = None, 0
    if not host:
        # Not shown: the usual cause is a special character in a password.
        raise SettingsError(
            "a node of the redlock:// URL can't be read: percent-encode what is special in its "
            f"password ('/' is %2F, '@' is %40, ',' is %2C), and write {_FORM}"
        )
    if at or first is None:
        username, _, password = map(unquote, login.partition(":"))
    else:
        username, password = first.username, first.password
        login = first.url.partition("://")[2].rpartition("@")[0]
    query = f"?{urlencode(options)}" if options else ""
    credentials = f"{login}@" if login else ""
    return Node(
        host=host,
        port=port,
        db=db,
        username=username,
        password=password,
        url=f"{'rediss' if tls else 'redis'}://{credentials}{place}/{db}{query}",
        tls=tls,
    )


def _db(path: str) -> int:
    text = path.strip("/") or "0"
    if not text.isdecimal():
        # Not shown: with a "/" in a password, this is the rest of it.
        raise SettingsError(
            "what follows the nodes of the redlock:// URL is no number of a database (a '/' in a "
            f"password is written %2F): write {_FORM}"
        )
    return int(text)


def _options(query: str) -> dict[str, str]:
    try:
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        raise SettingsError("the options of the redlock:// URL can't be read") from None
    for name in options:
        known = _TLS_OPTIONS | {"quarantine"}
        if name not in known:
            raise SettingsError(f"unknown option {name!r} of redlock://{suggestion(name, known)}")
    return options


def _quarantine(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return seconds("quarantine", float(text))
    except (TypeError, ValueError):
        raise SettingsError(f"quarantine={text!r} of redlock:// is no number of seconds") from None


def _context(options: dict[str, str]) -> ssl.SSLContext:
    requirement = options.get("ssl_cert_reqs", "required").removeprefix("CERT_").lower()
    checks = options.get("ssl_check_hostname", "true").lower() in ("1", "true", "yes", "on")
    if requirement not in _CERT_REQS:
        raise SettingsError(f"ssl_cert_reqs is one of {', '.join(_CERT_REQS)}")
    arguments: dict[str, Any] = {
        "cafile": options.get("ssl_ca_certs"),
        "capath": options.get("ssl_ca_path"),
        "cadata": options.get("ssl_ca_data"),
    }
    try:
        context = ssl.create_default_context(**arguments)
        context.check_hostname = checks and requirement != "none"
        context.verify_mode = _CERT_REQS[requirement]
        if "ssl_certfile" in options:
            context.load_cert_chain(
                options["ssl_certfile"], options.get("ssl_keyfile"), options.get("ssl_password")
            )
    except (OSError, ValueError) as exc:
        raise SettingsError(f"the TLS options of redlocks:// don't work: {exc}") from exc
    return context
