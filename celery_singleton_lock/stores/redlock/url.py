"""The nodes that a ``redlock://`` URL names.

::

    redlock://[user:password@]host[:port],host[:port],host[:port]/db?option=value&...

A login before a host is for that host. Hosts without a login use the login of the first host.
``redlocks://`` uses TLS for all nodes. The database and the options apply to all nodes. The options
are ``quarantine`` (see store.py) and, with TLS, the options of redis-py in ``_TLS_OPTIONS``.
"""

from __future__ import annotations

import os.path
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from celery_singleton_lock.errors import SettingsError
from celery_singleton_lock.policy import seconds, suggestion

_MIN_NODES: Final = 3
_PORT: Final = 6379
_TLS_PATHS: Final = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_TLS_OPTIONS: Final = frozenset(
    (*_TLS_PATHS, "ssl_ca_data", "ssl_password", "ssl_cert_reqs", "ssl_check_hostname")
)
_CERT_REQS: Final = ("required", "optional", "none")
# Characters that end a login in other URLs. A redlock URL must not contain them unescaped.
_SPECIAL: Final = frozenset("#@")
_FORM: Final = "redlock://[user:password@]host:port,host:port,host:port/0"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUrl:
    """One node.

    Attributes:
        name: Host and port, for messages.
        url: The node's URL, in the form that RedisStore reads.
    """

    name: str
    url: str = field(repr=False)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The parsed URL.

    Attributes:
        members: The nodes.
        quarantine: Seconds after its start in which a server has no vote; None: the ttl of the
            requested lease.
    """

    members: tuple[NodeUrl, ...]
    quarantine: float | None


def read_nodes(url: str) -> Nodes:
    """The nodes that ``url`` names.

    Raises:
        SettingsError: The URL cannot be read, or does not name an odd number of nodes above 2. The
            message contains no password.
    """
    scheme, _, rest = url.partition("://")
    location, _, query = rest.partition("?")
    netloc, _, path = location.partition("/")
    if "@" in query:
        # The options are not shown: if a password contains a "?", they are the rest of it.
        raise SettingsError(
            "an '@' stands in the options of the redlock:// URL: percent-encode what is special in "
            f"its passwords ('?' is %3F, '@' is %40), and write {_FORM}"
        )
    options = _options(urlsplit(f"redis://host/?{query}").query)
    quarantine = _quarantine(options.pop("quarantine", None))
    tls = scheme == "redlocks"
    if options and not tls:
        raise SettingsError(
            f"{', '.join(sorted(options))} in the URL of redlock:// have no effect without TLS: "
            "write redlocks://"
        )
    requirement = _check_tls(options)
    if tls:
        # redis-py checks the host's name by default since 6.0; without a certificate there is none.
        given = options.get("ssl_check_hostname", "true")
        options["ssl_check_hostname"] = "false" if requirement == "none" else given
    suffix = f"/{_db(path)}{'?' if options else ''}{urlencode(options)}"
    members, first_login = [], ""
    for number, part in enumerate(netloc.split(",")):
        name, login, place = _node(part)
        if number == 0:
            first_login = login
        login = login or first_login
        url = f"{'rediss' if tls else 'redis'}://{login}{place}{suffix}"
        members.append(NodeUrl(name=name, url=url))
    _check_number([member.name for member in members])
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


def _node(text: str) -> tuple[str, str, str]:
    """The name, the login with its "@", and the host with its port."""
    login, at, place = text.rpartition("@")
    try:
        if set(login) & _SPECIAL:
            raise ValueError(login)
        parts = urlsplit(f"redis://{place}")
        host, port = parts.hostname, parts.port or _PORT
    except ValueError:
        host, port = None, 0
    if not host:
        # The text is not shown: the usual cause is a special character in a password.
        raise SettingsError(
            "a node of the redlock:// URL can't be read: percent-encode what is special in its "
            f"password ('/' is %2F, '@' is %40, ',' is %2C), and write {_FORM}"
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}", f"{login}{at}", place


def _db(path: str) -> int:
    text = path.strip("/") or "0"
    if not text.isdecimal():
        # The path is not shown: if a password contains a "/", the path is the rest of it.
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
    known = _TLS_OPTIONS | {"quarantine"}
    for name in options:
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


def _check_tls(options: dict[str, str]) -> str:
    """Check the TLS files, which redis-py reads only when it connects.

    Returns:
        Whether a certificate is required: one of ``_CERT_REQS``.
    """
    requirement = options.get("ssl_cert_reqs", "required").removeprefix("CERT_").lower()
    if requirement not in _CERT_REQS:
        raise SettingsError(f"ssl_cert_reqs is one of {', '.join(_CERT_REQS)}")
    for name in _TLS_PATHS:
        if name in options and not os.path.exists(options[name]):
            raise SettingsError(
                f"the TLS options of redlocks:// don't work: {name}: no file {options[name]!r}"
            )
    return requirement
