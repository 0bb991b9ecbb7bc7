"""Connections to one Redis server: one pipeline at a time each, no hidden retries.

Promises
    A connection on which anything went wrong, were it an exception thrown into the thread between
    send and read, is closed and never used again: the next call would read the earlier call's
    reply. redis-py's errors leave this module as the library's own.

Not the broker's pool, whose size and retries belong to the broker: redis-py's own defaults blocked
59 s on a dead link, and turned a lost reply into "not acquired". Idle connections are kept per
timeout, and per native thread under gevent, where a socket belongs to a thread's hub.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, parse_url
from redis.retry import Retry

from celery_singleton_lock.core import native
from celery_singleton_lock.errors import SettingsError, StoreError, StoreUnavailable
from celery_singleton_lock.stores.replies import receive, told
from celery_singleton_lock.stores.resp import ProtocolError, Replies, pack
from celery_singleton_lock.stores.transport import Command

__all__ = [
    "Connections",
    "Exchange",
    "ScriptForgotten",
    "checked",
    "connection_url",
]

# Valkey speaks Redis' protocol; redis-py reads only the names that Redis has.
_AS_REDIS: Final = {"valkey": "redis", "valkeys": "rediss"}
_BROKEN: Final = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    OSError,
    ProtocolError,
)
# CLUSTERDOWN and MASTERDOWN end with a failover, TRYAGAIN with the migration of a slot.
_PASSING: Final = (redis.exceptions.ClusterDownError, redis.exceptions.TryAgainError)


class Connections:
    """To the server that ``url`` names, made when they are needed.

    Args:
        url: In the form of redis-py, Celery or kombu.
        options: For redis-py's connection, such as ``{"ssl_ca_certs": ...}``.

    Raises:
        SettingsError: The URL or an option can't be read.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        try:
            # Not ConnectionPool.from_url: it adds options for a pool that we don't use, by which a
            # server may replace our timeouts (redis-py 7's maintenance notifications).
            self._options: dict[str, Any] = {**parse_url(connection_url(url)), **(options or {})}
            # What an exchange reads. redis-py's own reading is of twice the cost.
            self._options["protocol"] = 2
            self._make = self._options.pop("connection_class", Connection)
            for name in ("socket_timeout", "socket_connect_timeout", "decode_responses"):
                self._options.pop(name, None)
            # Sends nothing, but refuses options that it doesn't know: better here than in a body.
            self._made(timeout=1.0)
        except (ValueError, TypeError) as exc:
            raise SettingsError(f"the store's URL can't be read: {exc}") from exc
        # Connections of redis-py, whose methods are only partly typed.
        self._idle: dict[tuple[int, float], deque[Any]] = {}

    @property
    def address(self) -> str:
        """Of the server, for people: host and port, or the path of its socket."""
        options = self._options
        return str(options.get("path") or f"{options.get('host')}:{options.get('port')}")

    def at(self, host: str, port: int) -> Connections:
        """To another server, with the same login and options."""
        other = copy.copy(self)
        other._options = {**self._options, "host": host, "port": port}
        other._idle = {}
        return other

    def run(self, commands: Sequence[Command], timeout: float) -> list[Any]:
        """Send all commands at once, read all replies; the first error reply is raised.

        Args:
            commands: Name and arguments of each.
            timeout: Seconds to wait for each reply.

        Raises:
            ScriptForgotten: The server knows no such script.
            StoreUnavailable, StoreError: No answer; a refusal.
        """
        exchange = self.begin(commands, timeout)
        try:
            replies = exchange.replies()
        finally:
            exchange.end()
        for reply in replies:
            if isinstance(reply, redis.exceptions.ReadOnlyError):
                # A failover behind this address: the connections lead to the demoted master, and
                # would for ever. A fresh one may lead to the new.
                self.drop()
        return checked(replies)

    def begin(self, commands: Sequence[Command], timeout: float) -> Exchange:
        """Send all commands at once; the replies are read from what is returned.

        Raises:
            StoreUnavailable, StoreError: They can't be sent.
        """
        idle = self._idle_for(timeout)
        fresh = False
        try:
            connection = idle.pop()
        except IndexError:
            connection, fresh = self.new(timeout), True
        try:
            if fresh:
                self.greet(connection)
            # Not redis-py's packing, which costs as much as the sending.
            connection.send_packed_command([pack(commands)], check_health=False)
            return Exchange(self, connection, idle, len(commands))
        except (redis.exceptions.RedisError, OSError) as exc:
            connection.disconnect()
            raise self.translated(exc) from exc
        except BaseException:
            connection.disconnect()
            raise

    def has_idle(self, timeout: float) -> bool:
        """Whether the next command would go out without connecting first."""
        return bool(self._idle_for(timeout))

    def translated(self, error: Exception) -> StoreError:
        """The library's error for one of redis-py's or the system's."""
        if isinstance(error, redis.exceptions.AuthenticationError):
            return StoreError(f"the store refuses the login: {error}")
        if isinstance(error, _BROKEN):
            self.drop()
            return StoreUnavailable(f"the store doesn't answer: {error}")
        return StoreError(f"the store refuses: {error}")

    def drop(self) -> None:
        """What broke one connection broke the others: the next try shall meet a fresh one."""
        # Of this thread alone where a socket belongs to its thread's hub.
        thread = _thread()
        for (owner, _), idle in list(self._idle.items()):
            if owner == thread:
                _disconnect_all(idle)

    def close(self) -> None:
        """Close what is idle; what is in use is closed by its user's next failure, or never."""
        while self._idle:
            _disconnect_all(self._idle.popitem()[1])

    def new(self, timeout: float) -> Any:
        """A connection that waits ``timeout`` seconds for each reply, and never tries twice."""
        return self._made(timeout)

    def greet(self, connection: Any) -> None:
        """What a new connection is asked before its first use: nothing, here."""

    def _made(self, timeout: float, **options: Any) -> Any:
        return self._make(
            **{**self._options, **options},
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
        )

    def _idle_for(self, timeout: float) -> deque[Any]:
        return self._idle.setdefault((_thread(), timeout), deque())


class Exchange:
    """A pipeline that was sent, on a connection of its own until :meth:`end`."""

    __slots__ = ("_connection", "_connections", "_count", "_idle", "_read", "_replies")

    def __init__(
        self, connections: Connections, connection: Any, idle: deque[Any], count: int
    ) -> None:
        self._connections = connections
        self._connection = connection
        self._idle = idle
        self._count = count
        self._read = False
        self._replies = Replies()

    def replies(self, is_late: Callable[[], bool] | None = None) -> list[Any]:
        """All of them, error replies as values.

        Args:
            is_late: Whether to take only what has arrived already.

        Raises:
            StoreUnavailable, StoreError: They don't come.
        """
        connection = self._connection
        replies: list[Any] = []
        try:
            while len(replies) < self._count:
                data = receive(connection, wait=is_late is None or not is_late())
                replies += [told(connection, reply) for reply in self._replies.feed(data)]
        except (redis.exceptions.RedisError, OSError, ProtocolError) as exc:
            raise self._connections.translated(exc) from exc
        self._read = True
        return replies

    def end(self) -> None:
        """Keep the connection if every reply was read, else close it. Harmless twice."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._read:
            self._idle.append(connection)
        else:
            connection.disconnect()


class ScriptForgotten(Exception):
    """NOSCRIPT: the server was restarted, or its scripts were flushed."""


def checked(replies: list[Any]) -> list[Any]:
    """``replies``, unless one of them is an error: the first is raised.

    Raises:
        ScriptForgotten: The server knows no such script.
        StoreUnavailable, StoreError: A refusal, which passes by itself or doesn't.
    """
    for reply in replies:
        if isinstance(reply, redis.exceptions.NoScriptError):
            raise ScriptForgotten
        if isinstance(reply, redis.exceptions.ResponseError):
            raise _mapped(reply) from reply
    return replies


def connection_url(url: str) -> str:
    """The form redis-py reads, of a URL in Celery's or kombu's form.

    ``redis+socket:///path?virtual_host=1`` is kombu's for a unix socket; the ssl module's names of
    ``ssl_cert_reqs`` are Celery's; ``valkey://`` and ``valkeys://`` are read as Redis' own names.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    parts = parts._replace(scheme=_AS_REDIS.get(parts.scheme, parts.scheme))
    if parts.scheme == "redis+socket":
        db = query.pop("virtual_host", "") or query.pop("db", "") or "0"
        query["db"] = db.strip("/")
        parts = parts._replace(scheme="unix", path=unquote(parts.path))
    if "ssl_cert_reqs" in query:
        query["ssl_cert_reqs"] = query["ssl_cert_reqs"].removeprefix("CERT_").lower()
    # Not geturl(): it drops the // of a unix:// URL, which has no host.
    suffix = f"?{urlencode(query)}" if query else ""
    return f"{parts.scheme}://{parts.netloc}{parts.path}{suffix}"


def _mapped(error: redis.exceptions.ResponseError) -> StoreError:
    # None of these is a grant. What passes by itself is worth another try at once.
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return StoreUnavailable(f"the store is a replica now: {error}")
    if isinstance(error, _PASSING) or str(error).startswith("NOREPLICAS"):
        return StoreUnavailable(f"the store can't answer now: {error}")
    if isinstance(error, redis.exceptions.AskError):  # and MovedError, its subclass
        return StoreError(
            f"the store is one node of a Redis Cluster ({error}): name it redis+cluster://"
        )
    # A wrong type or a missing right doesn't pass.
    return StoreError(f"the store refuses: {error}")


def _disconnect_all(idle: deque[Any]) -> None:
    while idle:
        idle.pop().disconnect()


def _thread() -> int:
    """Whose a connection is: under gevent a thread's, with its hub; else of whoever needs it."""
    return native.get_ident() if native.is_patched() else 0
