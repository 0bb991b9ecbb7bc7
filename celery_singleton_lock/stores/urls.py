"""Parsing, checking and masking of URLs that may name several servers.

Kombu's form ``sentinel://:pw@h1:26379/0;sentinel://h2:26379/0`` and ours,
``sentinel://:pw@h1:26379,h2:26379/0``, mean the same. As in kombu, login and database are those of
the first server.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from kombu.utils.url import maybe_sanitize_url

from celery_singleton_lock.errors import SettingsError
from celery_singleton_lock.policy import suggestion

# The redlock package parses these: each host may have a login of its own.
_LOGIN_PER_HOST = ("redlock://", "redlocks://")
_HOST_WITH_LOGIN = re.compile(r"(?:(.*)@)?((?:\[[^\]@]*\]|[^:@\[\]]+)(?::[0-9]*)?)")
# An IPv6 address is in brackets, because it contains colons.
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\[\]:@/\s]+))(?::([0-9]{1,5}))?")
_PERCENT_ENCODE = (
    "percent-encode what is special in its password ('/' is %2F, '?' is %3F, '#' is %23, '[' is "
    "%5B), and an '@' behind its hosts (%40)"
)
# A ';' separates URLs only if a URL follows, because a password may contain a ';'.
_SEPARATOR = re.compile(r";(?=[a-z+]+://)")


@dataclass(frozen=True, slots=True)
class Hosts:
    """The parsed URL of sentinels or of Cluster nodes.

    Attributes:
        scheme: The scheme of the first URL.
        addresses: Host and port of each server.
        parts: The first URL, split; its host is not usable.
        query: The options of all URLs.
    """

    scheme: str
    addresses: tuple[tuple[str, int], ...]
    parts: SplitResult = field(repr=False)
    query: dict[str, str] = field(repr=False)

    @classmethod
    def of(cls, url: str, *, default_port: int) -> Hosts:
        """Parse ``url``.

        Raises:
            SettingsError: A port is not a number.
        """
        try:
            splits = [urlsplit(single) for single in single_urls(url)]
            addresses = [
                (split.hostname or "localhost", split.port or default_port) for split in splits
            ]
        except ValueError as exc:
            raise SettingsError(f"the store's URL can't be read: {exc}") from exc
        query = {name: value for split in splits for name, value in parse_qsl(split.query)}
        return cls(splits[0].scheme, tuple(dict.fromkeys(addresses)), splits[0], query)

    def redis_url(self, *, tls: bool, query: dict[str, str]) -> str:
        """A URL of one server with the login, the database and the options."""
        login, at, _ = self.parts.netloc.rpartition("@")
        suffix = f"?{urlencode(query)}" if query else ""
        return f"{'rediss' if tls else 'redis'}://{login}{at}localhost{self.parts.path}{suffix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterUrl:
    """The parsed URL ``scheme://user:password@h1:1,h2:2/path?option=value`` of etcd or ZooKeeper.

    Attributes:
        hosts: Names and ports.
        path: The path, without slashes at its ends.
        username: The user; empty: no login.
        options: The options of the query and of the app; the app's options override.
    """

    scheme: str
    hosts: tuple[tuple[str, int], ...]
    path: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        port: int,
        known: Collection[str],
        options: Mapping[str, Any] | None = None,
    ) -> ClusterUrl:
        """Parse ``url``.

        Args:
            url: The URL.
            port: The port of a member whose address has none.
            known: The names of the known options.
            options: Further options.

        Raises:
            SettingsError: The URL can't be parsed, or an option is unknown.
        """
        parts = split_url(url)
        login, _, addresses = parts.netloc.rpartition("@")
        username, _, password = login.partition(":")
        given = {**dict(parse_qsl(parts.query)), **(options or {})}
        for name in given:
            if name not in known:
                raise SettingsError(
                    f"the store's URL has the unknown option {name!r}{suggestion(name, known)}"
                )
        return cls(
            scheme=parts.scheme,
            hosts=tuple(_host(address, port) for address in addresses.split(",")),
            path=parts.path.strip("/"),
            username=unquote(username),
            password=unquote(password),
            options=given,
        )


def _host(address: str, port: int) -> tuple[str, int]:
    match = _HOST.fullmatch(address)
    if match is None or int(match[3] or port) > 65_535:
        # The address is not shown: if an "@" or "/" in a password is not encoded, the address is a
        # part of the password.
        raise SettingsError(
            "the store's URL can't be read: write scheme://host:port,host:port/path, and "
            "percent-encode what is special in its password"
        )
    return match[1] or match[2], int(match[3] or port)


def split_url(url: str) -> SplitResult:
    """``urlsplit`` without its check of the host: newer Pythons refuse ``[::1]`` in a list."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return urlsplit(url)
    netloc = re.split(r"[/?#]", rest, maxsplit=1)[0]
    return urlsplit(f"{scheme}://host{rest[len(netloc) :]}")._replace(netloc=netloc)


def single_urls(url: str) -> list[str]:
    """``url`` as a list of URLs that name one server each."""
    singles = []
    for part in _SEPARATOR.split(url):
        split = split_url(part)
        login, at, hosts = split.netloc.rpartition("@")
        for number, host in enumerate(hosts.split(",")):
            netloc = host if number else f"{login}{at}{host}"
            singles.append(split._replace(netloc=netloc).geturl() if "," in hosts else part)
    return singles


def check_url(url: str) -> None:
    """Check that no special character of a password has shifted the parts of ``url``.

    Raises:
        ValueError: There is an "@" after the hosts, or a port is not a number. The usual cause of
            the first is a "/", "?" or "#" in a password: the rest of the password is then parsed as
            a port, a path or an option. The message shows no part of the URL.
    """
    for single in single_urls(url):
        try:
            split = urlsplit(single)
        except ValueError:
            raise ValueError(_PERCENT_ENCODE) from None  # An unbalanced bracket.
        if _is_shifted(split):
            raise ValueError(_PERCENT_ENCODE)
        try:
            _ = split.port
        except ValueError:
            raise ValueError(
                "the port behind a host's ':' is no number from 0 to 65535 (if that is a password, "
                "write user:password@host)"
            ) from None


def masked(url: str) -> str:
    """``url`` without passwords, for logs and errors; ``scheme://**`` if it can't be parsed."""
    return ";".join(_masked(part) for part in _SEPARATOR.split(url))


def _masked(url: str) -> str:
    split = split_url(url)
    scheme = url.partition("://")[0]
    if _is_shifted(split):
        return f"{scheme}://**"
    if url.startswith(_LOGIN_PER_HOST):
        return _masked_per_host(url)
    login, at, hosts = split.netloc.rpartition("@")
    try:
        if "," not in hosts:
            return str(maybe_sanitize_url(url))
        single = split._replace(netloc=f"{login}{at}hosts.invalid", query="").geturl()
        return str(maybe_sanitize_url(single)).replace("hosts.invalid", hosts)
    except ValueError:
        return f"{scheme}://**"


def _masked_per_host(url: str) -> str:
    scheme, _, rest = url.partition("://")
    netloc, slash, path = rest.partition("/")
    parts = netloc.split(",")
    if not all(_HOST_WITH_LOGIN.fullmatch(part) for part in parts):
        return f"{scheme}://**"  # A password contains a ",".
    hosts = [_HOST_WITH_LOGIN.sub(_without_password, part) for part in parts]
    # The match ends at the next option, because the password may contain an "&".
    query = re.sub(r"(ssl_password=).*?(?=&(?:ssl_|quarantine=)|$)", r"\1**", path)
    return f"{scheme}://{','.join(hosts)}{slash}{query}"


def _without_password(match: re.Match[str]) -> str:
    login, host = match[1], match[2]
    if login is None:
        return host
    # Text without a ":" may be the end of a password that contains a ",", or a name.
    user, colon, _ = login.partition(":")
    return f"{user}:**@{host}" if colon else f"**@{host}"


def _is_shifted(split: SplitResult) -> bool:
    return "@" in split.path + split.query + split.fragment
