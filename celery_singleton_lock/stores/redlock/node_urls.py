"""The URL of a Redlock store."""

from __future__ import annotations

import os.path
from dataclasses import replace
from typing import Final

from ...errors import SettingsError
from ...option_values import seconds
from ..store_url import StoreUrl

_MIN_NODES: Final = 3
_PORT: Final = 6379
_TLS_PATHS: Final = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_TLS_OPTIONS: Final = frozenset(
    (*_TLS_PATHS, "ssl_ca_data", "ssl_password", "ssl_cert_reqs", "ssl_check_hostname")
)
_CERT_REQS: Final = ("required", "optional", "none")


def read_nodes(url: str) -> tuple[list[StoreUrl], float | None]:
    """The nodes that ``url`` names, and the quarantine.

    ::

        redlock://[user:password@]host[:port],host[:port],host[:port]/db?option=value&...

    A login before a host is for that host. Hosts without a login use the login of the first host.
    ``redlocks://`` uses TLS for all nodes. The database and the options apply to all nodes. The
    options are ``quarantine`` and, with TLS, the options of redis-py in ``_TLS_OPTIONS``.

    Returns:
        The nodes, and the seconds after its start in which a server has no vote; None: the ttl of
        the requested lease.

    Raises:
        SettingsError: The URL cannot be read, or does not name an odd number of nodes above 2. The
            message contains no password.
    """
    parsed = StoreUrl.parse(url, port=_PORT, host="", known=_TLS_OPTIONS | {"quarantine"})
    options = dict(parsed.options)
    text = options.pop("quarantine", None)
    try:
        quarantine = None if text is None else seconds("quarantine", float(text))
    except ValueError:
        raise SettingsError(f"quarantine={text!r} of redlock:// is no number of seconds") from None
    tls = parsed.scheme == "redlocks"
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
    if parsed.path and not parsed.path.isdecimal():
        # The path is not shown: if a password contains a "/", the path is the rest of it.
        raise SettingsError(
            "what follows the nodes of the redlock:// URL is no number of a database (a '/' in a "
            "password is written %2F): write redlock://[user:password@]host:port,host:port,"
            "host:port/0"
        )
    _check_number([str(host) for host in parsed.hosts])
    nodes = [
        replace(parsed, hosts=(host,), logins=(login,), options=options)
        for host, login in zip(parsed.hosts, parsed.logins, strict=True)
    ]
    return nodes, quarantine


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
