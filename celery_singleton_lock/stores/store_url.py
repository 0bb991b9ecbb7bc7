"""Parsing, checking and masking of URLs that may name several servers.

Kombu's form ``sentinel://:pw@h1:26379/0;sentinel://h2:26379/0`` and ours,
``sentinel://:pw@h1:26379,h2:26379/0``, mean the same. As in kombu, login and database are those of
the first server; a ``redlock://`` URL may have a login before each host.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ..errors import SettingsError
from ..option_names import suggestion

_OF_REDLOCK: Final = ("redlock", "redlocks")
_PERCENT_ENCODE: Final = (
    "percent-encode what is special in its password ('/' is %2F, '?' is %3F, '#' is %23, '[' is "
    "%5B), and an '@' behind its hosts (%40)"
)
# A ';' separates URLs only if a URL follows, because a password may contain a ';'.
_SEPARATOR: Final = re.compile(r";(?=[a-z+]+://)")


class Address(NamedTuple):
    """Host and port of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUrl:
    """The parsed URL ``scheme://user:password@h1:1,h2:2/path?option=value``.

    Attributes:
        hosts: The servers.
        logins: ``user:password``, percent-encoded, of each server; empty: no login.
        path: The path, without slashes at its ends.
        options: The options of the queries and of the app; the app's options override.
    """

    scheme: str
    hosts: tuple[Address, ...]
    logins: tuple[str, ...] = field(repr=False)
    path: str
    options: Mapping[str, Any] = field(repr=False)

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        port: int,
        host: str = "localhost",
        known: Collection[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> StoreUrl:
        """Parse ``url``.

        Args:
            url: The URL.
            port: The port of a server without one.
            host: The host of a server without one; empty: each server needs a host.
            known: The names of the known options; None: any name.
            options: Further options.

        Raises:
            SettingsError: The URL can't be parsed, which shows no part of it, or an option is
                unknown.
        """
        servers = servers_of(url)
        hosts, logins = list[Address](), list[str]()
        try:
            for server in servers:
                checked = _checked(server)
                name = checked.hostname or host
                if name.split() != [name]:
                    raise ValueError("write scheme://host:port,host:port/path")
                hosts.append(Address(name, checked.port or port))
                login, at, _ = server.netloc.rpartition("@")
                logins.append(login if at else "".join(logins[:1]))
        except ValueError as exc:
            raise SettingsError(f"the store's URL can't be read: {exc}") from None
        found: dict[str, Any] = {}
        strict = servers[0].scheme in _OF_REDLOCK
        for query in filter(None, (server.query for server in servers)):
            try:
                found |= parse_qsl(query, keep_blank_values=strict, strict_parsing=strict)
            except ValueError:
                raise SettingsError("the options of the redlock:// URL can't be read") from None
        found |= options or {}
        for name in found:
            if known is not None and name not in known:
                raise SettingsError(
                    f"the store's URL has the unknown option {name!r}{suggestion(name, known)}"
                )
        return cls(
            scheme=servers[0].scheme,
            hosts=tuple(hosts),
            logins=tuple(logins),
            path=servers[0].path.strip("/"),
            options=found,
        )

    @property
    def username(self) -> str:
        """The user of the first server; empty: no login."""
        return unquote(self.logins[0].partition(":")[0])

    @property
    def password(self) -> str:
        """The password for the first server."""
        return unquote(self.logins[0].partition(":")[2])

    def __str__(self) -> str:
        return ",".join(map(str, self.hosts))


def split_url(url: str) -> SplitResult:
    """``urlsplit`` without its check of the host: newer Pythons refuse ``[::1]`` in a list."""
    scheme, separator, rest = url.strip().partition("://")
    if not separator:
        return urlsplit(url)
    netloc = re.split(r"[/?#]", rest, maxsplit=1)[0]
    parts = urlsplit(f"//host{rest[len(netloc) :]}")
    return parts._replace(scheme=scheme.lower(), netloc=netloc)


def servers_of(url: str) -> list[SplitResult]:
    """A URL for each server that ``url`` names."""
    found = []
    for part in _SEPARATOR.split(url):
        split = split_url(part)
        login, at, hosts = split.netloc.rpartition("@")
        if split.scheme in _OF_REDLOCK:
            login, at, hosts = "", "", split.netloc
        first, *others = hosts.split(",")
        found += [split._replace(netloc=netloc) for netloc in (f"{login}{at}{first}", *others)]
    return found


def take_option(url: str, name: str) -> tuple[str, str | None]:
    """``url`` without the option ``name`` of its queries, and the option's value; None: no value.

    Of several URLs, the last one that has the option decides.
    """
    parts, value = [], None
    for part in _SEPARATOR.split(url):
        start, mark, query = part.partition("?")
        kept = []
        for item in query.split("&") if mark else ():
            key, _, text = item.partition("=")
            if key == name:
                value = unquote(text)
            else:
                kept.append(item)
        parts.append(f"{start}?{'&'.join(kept)}" if kept else start)
    return ";".join(parts), value


def check_url(url: str) -> None:
    """Check that no special character of a password has shifted the parts of ``url``.

    Raises:
        ValueError: There is an "@" after the hosts, or a port is not a number. The usual cause of
            the first is a "/", "?" or "#" in a password: the rest of the password is then parsed as
            a port, a path or an option. The message shows no part of the URL.
    """
    for server in servers_of(url):
        _checked(server)


def _checked(server: SplitResult) -> SplitResult:
    """The login, host and port of ``server``, parsed by ``urlsplit``."""
    try:
        parts = urlsplit(f"//{server.netloc}")
    except ValueError:
        raise ValueError(_PERCENT_ENCODE) from None  # An unbalanced bracket.
    if "@" in server.path + server.query + server.fragment:
        raise ValueError(_PERCENT_ENCODE)
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(
            "the port behind a host's ':' is no number from 0 to 65535 (if that is a password, "
            "write user:password@host; a ',' in it is %2C)"
        ) from None
    return parts


def masked(url: str) -> str:
    """``url`` without passwords, for logs and errors; ``scheme://**`` if it can't be parsed."""
    return ";".join(map(_masked, _SEPARATOR.split(url)))


def _masked(url: str) -> str:
    if "://" not in url:
        return url
    split, hosts = split_url(url), []
    has_options = split.scheme in _OF_REDLOCK
    try:
        for server in servers_of(url):
            # A password that contains a "," may be parsed as a port without a host.
            if not _checked(server).hostname and has_options:
                raise ValueError
            login, at, place = server.netloc.rpartition("@")
            user, colon, _ = login.partition(":")
            # A login without a ":" may be the end of a password that contains a ",", or a name.
            hosts.append((f"{user}:**@" if colon else at and "**@") + place)
    except ValueError:
        return f"{split.scheme}://**"
    # The match ends at the next option, because the password may contain an "&".
    query = re.sub(r"(password=).*?(?=&(?:ssl_|quarantine=)|$)", r"\1**", split.query)
    shown = f"?{query}" if query and has_options else ""
    return f"{split.scheme}://{','.join(hosts)}{split.path or '/'}{shown}"
