"""URLs that name several servers: of sentinels, and of a cluster's nodes; masked, also Redlock's.

Two forms are one: kombu's ``sentinel://:pw@h1:26379/0;sentinel://h2:26379/0``, and
``sentinel://:pw@h1:26379,h2:26379/0``. Login and database are the first server's, as in kombu.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from kombu.utils.url import maybe_sanitize_url

__all__ = ["Hosts", "check_url", "masked", "single_urls", "split_url"]

# Read by redlock_url.py: each host may have a login of its own.
_LOGIN_PER_HOST = ("redlock://", "redlocks://")
_HOST_WITH_LOGIN = re.compile(r"(?:(.*)@)?((?:\[[^\]@]*\]|[^:@\[\]]+)(?::[0-9]*)?)")
_PERCENT_ENCODE = (
    "percent-encode what is special in its password ('/' is %2F, '?' is %3F, '#' is %23, '[' is "
    "%5B), and an '@' behind its hosts (%40)"
)
# Only where a URL follows: a ';' may stand in a password.
_SEPARATOR = re.compile(r";(?=[a-z+]+://)")


@dataclass(frozen=True, slots=True)
class Hosts:
    """What a URL of several servers says.

    Attributes:
        scheme: Of the first URL.
        addresses: Host and port of each server.
        parts: The first URL, split; its host is of no use.
        query: The options of all URLs.
    """

    scheme: str
    addresses: tuple[tuple[str, int], ...]
    parts: SplitResult = field(repr=False)
    query: dict[str, str] = field(repr=False)

    @classmethod
    def of(cls, url: str, *, default_port: int) -> Hosts:
        """Read ``url``.

        Raises:
            ValueError: A port is no number.
        """
        splits = [urlsplit(single) for single in single_urls(url)]
        addresses = [
            (split.hostname or "localhost", split.port or default_port) for split in splits
        ]
        query = {name: value for split in splits for name, value in parse_qsl(split.query)}
        return cls(splits[0].scheme, tuple(dict.fromkeys(addresses)), splits[0], query)

    def redis_url(self, *, tls: bool, query: dict[str, str]) -> str:
        """The URL of one server, for its login, database and options."""
        login, at, _ = self.parts.netloc.rpartition("@")
        suffix = f"?{urlencode(query)}" if query else ""
        return f"{'rediss' if tls else 'redis'}://{login}{at}localhost{self.parts.path}{suffix}"


def split_url(url: str) -> SplitResult:
    """``urlsplit``, but for the check of the host: newer Pythons refuse ``[::1]`` among several."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return urlsplit(url)
    netloc = re.split(r"[/?#]", rest, maxsplit=1)[0]
    return urlsplit(f"{scheme}://host{rest[len(netloc) :]}")._replace(netloc=netloc)


def single_urls(url: str) -> list[str]:
    """``url`` as several, each of which names one server."""
    singles = []
    for part in _SEPARATOR.split(url):
        split = split_url(part)
        login, at, hosts = split.netloc.rpartition("@")
        for number, host in enumerate(hosts.split(",")):
            netloc = host if number else f"{login}{at}{host}"
            singles.append(split._replace(netloc=netloc).geturl() if "," in hosts else part)
    return singles


def check_url(url: str) -> None:
    """Do nothing if the parts of ``url`` are where they seem to be.

    Raises:
        ValueError: There is an "@" after the hosts, or a port is no number. The usual cause of the
            first is a "/", "?" or "#" in a password: the rest of the password is then parsed as a
            port, a path or an option. The message shows no part of the URL.
    """
    for single in single_urls(url):
        try:
            split = urlsplit(single)
        except ValueError:
            raise ValueError(_PERCENT_ENCODE) from None  # a bracket
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
    """``url`` without its passwords, for logs and errors; one that can't be read is only ``**``."""
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
        return f"{scheme}://**"  # a "," in a password
    hosts = [_HOST_WITH_LOGIN.sub(_without_password, part) for part in parts]
    # To the next option that there is: an "&" may stand in the password.
    query = re.sub(r"(ssl_password=).*?(?=&(?:ssl_|quarantine=)|$)", r"\1**", path)
    return f"{scheme}://{','.join(hosts)}{slash}{query}"


def _without_password(match: re.Match[str]) -> str:
    login, host = match[1], match[2]
    if login is None:
        return host
    # What has no ":" may be a password's end, with a "," before it, as well as a name.
    user, colon, _ = login.partition(":")
    return f"{user}:**@{host}" if colon else f"**@{host}"


def _is_shifted(split: SplitResult) -> bool:
    return "@" in split.path + split.query + split.fragment
