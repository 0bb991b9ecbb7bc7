"""The options of `celery singleton serve`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from ..errors import SettingsError

# A token is compared, never hashed, so only its length protects it from guesses.
_MIN_TOKEN_CHARS: Final = 16
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Where the server listens, and what it allows.

    Attributes:
        host: The address to listen on.
        port: The port to listen on; 0: any free one.
        token: The token that a release requires; empty: no release is allowed.
        allowed_hosts: Names by which browsers and scrapers may address this server, besides
            localhost and IP addresses.
        max_connections: The most connections of one address. Further ones are for probes and
            scrapes alone.

    Raises:
        SettingsError: A value is wrong.
    """

    host: str = "127.0.0.1"
    port: int = 9876
    token: str = field(default="", repr=False)
    allowed_hosts: tuple[str, ...] = ()
    max_connections: int = 64  # a browser opens six, and a proxy for many browsers some more

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"--port {self.port} is no port: give a number from 0 to 65535")
        if self.max_connections < 1:
            raise SettingsError(
                f"--max-connections {self.max_connections} allows no connection: give 1 or more"
            )
        if self.token and (len(self.token) < _MIN_TOKEN_CHARS or not is_plain(self.token)):
            # The value is not shown, because it is a secret.
            raise SettingsError(
                f"the token must have at least {_MIN_TOKEN_CHARS} characters, all of them visible "
                "ASCII: write one with `openssl rand -hex 32 > FILE`"
            )
        for name in self.allowed_hosts:
            if not _HOST.fullmatch(name):
                raise SettingsError(
                    f"--allowed-host {name!r} is no host name: give it without scheme and port"
                )

    @property
    def is_public(self) -> bool:
        """Whether other hosts may reach the server."""
        return not (self.host == "localhost" or (is_ip(self.host) and _is_loopback(self.host)))


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        SettingsError: The file cannot be read, or is empty.
    """
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingsError(f"--token-file {str(path)!r} can't be read: {exc}") from exc
    if not token:
        raise SettingsError(
            f"--token-file {str(path)!r} is empty: write a token into it, or omit the option "
            "for a read-only page"
        )
    return token


def is_plain(text: str) -> bool:
    """Whether ``text`` can be part of a header's value."""
    return text.isascii() and text.isprintable() and " " not in text


def is_ip(host: str) -> bool:
    """Whether ``host`` is an IP address."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return ip_address(host).is_loopback
