"""The URL of a Redis server and the options of its connections, as redis-py reads them.

redis-py's schemes are ``redis``, ``rediss`` and ``unix``. `stores.store_url` splits a URL with
several servers; `stores.open_store` decides by the scheme which store it names.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, Final
from urllib.parse import unquote, urlencode

import redis
from kombu.utils.imports import symbol_by_name
from redis.connection import parse_url

from ...option_names import suggestion
from ..store_url import Address, StoreUrl

logger = logging.getLogger("celery_singleton_lock")

PORT: Final = 6379

# redis-py accepts only the schemes of Redis. The part after a "+" is ours or kombu's.
_WITH_TLS: Final = ("rediss", "valkeys", "sentinels", "redlocks")

# Options of redis-py's connections for address and login. Its TLS options are used too.
_USED: Final = frozenset(
    (
        *("connection_class", "host", "port", "path", "db", "socket_type"),
        *("username", "password", "credential_provider", "client_name"),
        *("socket_keepalive", "socket_keepalive_options", "redis_connect_func"),
    )
)
# Options of redis-py's pools and clients, and of kombu: timeouts, retries, decoding, pool sizes.
# They are accepted without effect, because the store sets these itself.
_NOT_USED: Final = frozenset(
    (
        *("max_connections", "timeout", "socket_timeout", "socket_connect_timeout"),
        *("socket_read_size", "retry", "retry_on_timeout", "retry_on_error"),
        *("health_check_interval", "protocol", "legacy_responses", "decode_responses"),
        *("encoding", "encoding_errors", "parser_class", "driver_info", "lib_name", "lib_version"),
        *("connect_timeout", "heartbeat", "login_method", "insist"),
    )
)


def connection_options(url: StoreUrl, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The arguments of redis-py's connection class, and that class as ``connection_class``.

    Args:
        url: The URL, in the form of redis-py, Celery or kombu.
        options: Further options, which override those of the URL.

    Raises:
        ValueError: The URL or an option can't be read.
    """
    found = {**parse_url(connection_url(url)), **(options or {})}
    for name in found:
        if name not in _USED | _NOT_USED and not name.startswith("ssl_"):
            known = [*sorted(_USED - {"connection_class", "redis_connect_func"}), "ssl_..."]
            raise ValueError(f"{name!r} is no option of a connection{suggestion(name, known)}")
    if not_used := sorted(_NOT_USED.intersection(found)):
        _note_once(", ".join(not_used))
    found = {name: value for name, value in found.items() if name not in _NOT_USED}
    if provider := found.get("credential_provider"):
        # A provider replaces the URL's user and password, as in Celery's backend and kombu.
        found["credential_provider"] = _Credentials(provider)
        found.pop("username", None)
        found.pop("password", None)
    return found


@cache
def _note_once(names: str) -> None:
    logger.info(
        "singleton: %s of the store's URL: without effect on locks, whose connections have "
        "their own timeouts and retries",
        names,
    )


class _Credentials(redis.CredentialProvider):
    """A credential provider whose failures are raised as connection errors.

    Args:
        provider: A provider of redis-py, or the dotted path of a class without arguments.

    Raises:
        ValueError: ``provider`` is neither.
    """

    def __init__(self, provider: Any) -> None:
        if isinstance(provider, str):
            try:
                provider = symbol_by_name(provider)()
            except Exception as exc:
                raise ValueError(f"credential_provider={provider!r}: {exc}") from exc
        if not isinstance(provider, redis.CredentialProvider):
            raise ValueError(f"credential_provider: {provider!r} is no redis.CredentialProvider")
        self._provider = provider

    def get_credentials(self) -> Any:
        try:
            return self._provider.get_credentials()
        except Exception as exc:
            name = type(self._provider).__name__
            raise redis.exceptions.ConnectionError(f"{name} gives no login: {exc}") from exc


def connection_url(url: StoreUrl) -> str:
    """Convert a URL to the form that redis-py reads. It names the first server.

    ``redis+socket:///path?virtual_host=1`` is kombu's form for a Unix socket. The ssl module's
    names of ``ssl_cert_reqs`` are Celery's.

    Raises:
        ValueError: The path of the URL is not a database number.
    """
    path, query = url.path, dict(url.options)
    is_socket = url.scheme in ("unix", "redis+socket")
    if url.scheme == "redis+socket":
        db = query.pop("virtual_host", "") or query.pop("db", "") or "0"
        path, query["db"] = unquote(path), db.strip("/")
    elif not is_socket:
        if path and not path.isdecimal():
            # The path is not shown: it may be the rest of a password that contains a "/".
            raise ValueError("its path is no number of a database: write redis://host:6379/0")
        virtual_host = query.pop("virtual_host", "").strip("/")
        if virtual_host and not path:
            query.setdefault("db", virtual_host)
    if "ssl_cert_reqs" in query:
        query["ssl_cert_reqs"] = query["ssl_cert_reqs"].removeprefix("CERT_").lower()
    login = f"{url.logins[0]}@" if url.logins[0] else ""
    if is_socket:
        return f"unix://{login}{path and f'/{path}'}?{urlencode(query)}"
    scheme = "rediss" if url.scheme.partition("+")[0] in _WITH_TLS else "redis"
    host, port = url.hosts[0]
    # As in redis-py, options may name the host and the port that the URL's address does not name.
    host = query.pop("host", host) if host == "localhost" else host
    port = query.pop("port", port) if port == PORT else port
    return f"{scheme}://{login}{Address(host, port)}/{path}?{urlencode(query)}"
