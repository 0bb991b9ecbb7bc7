"""URLs that name several servers: ``scheme://user:password@h1:1,h2:2/path?option=value``."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote

from celery_singleton_lock.errors import SettingsError
from celery_singleton_lock.policy import suggestion
from celery_singleton_lock.stores.urls import split_url

__all__ = ["ClusterUrl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterUrl:
    """The members of a cluster, and how to speak to them.

    Attributes:
        scheme: As it was written.
        hosts: Names and ports.
        path: Without its slashes at the ends.
        username: Empty: nobody logs in.
        password: Of that user.
        options: What the query and the app's connection options say; the latter win.
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
        """Read ``url``.

        Args:
            url: A member without a port listens on ``port``.
            port: The scheme's usual one.
            known: The options that there are.
            options: More of them.

        Raises:
            SettingsError: It can't be read, or has an option that nobody knows.
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
    # An IPv6 address stands in brackets; it has colons of its own.
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([^\[\]:@/\s]+))(?::([0-9]{1,5}))?", address)
    if match is None or int(match[3] or port) > 65_535:
        # Not shown: where an "@" or "/" in a password isn't quoted, this is the password.
        raise SettingsError(
            "the store's URL can't be read: write scheme://host:port,host:port/path, and "
            "percent-encode what is special in its password"
        )
    return match[1] or match[2], int(match[3] or port)
