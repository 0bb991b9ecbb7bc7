"""Connections to one Redis server: a pool without retries over redis-py's connections.

Guarantees
    A connection is used again only after every reply on it has been read. After any other end,
    including an exception that a signal handler raises between send and read, it is closed:
    otherwise the next command would read the reply to an earlier one. Errors of redis-py and of
    the system leave this module as StoreError or StoreUnavailable.

Non-guarantees
    A command without a reply may have been executed. Nothing is sent a second time in here.

Idle connections
    They are kept per timeout. Under gevent and eventlet they are kept per native thread too,
    because a socket belongs to the hub of a thread. A connection that was idle for longer than
    ``MAX_IDLE``, or that the server has closed, is not used. TCP keepalive probes the others.

The broker's pool is not used: its size and its retries belong to the broker. The defaults of
redis-py blocked for 59 s on a dead link, and turned a lost reply into "not acquired".
"""

from __future__ import annotations

import copy
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import redis
import redis.connection
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock.core import native
from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.errors import SettingsError, StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.async_release import PendingRelease
from celery_singleton_lock.stores.redis.replies import checked, classified, read
from celery_singleton_lock.stores.redis.scripts import Command, pack
from celery_singleton_lock.stores.redis.url_options import connection_options

#: Seconds after which an idle connection is closed instead of used. NATs and load balancers drop
#: idle connections without notice; the shortest common timeout is 240 s.
MAX_IDLE: Final = 60.0

# What redis-py raises while it reads. A reply that is no RESP is a ValueError of int().
_READ_ERRORS: Final = (redis.exceptions.RedisError, OSError, ValueError)
# Those of them that say nothing about a command: the connection is broken, or no Redis answers.
_BROKEN: Final = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.InvalidResponse,
    OSError,
    ValueError,
)

# Seconds after which an idle connection is checked before use. A command sent on a connection that
# the server has closed gets no reply, so it is unknown whether a release was executed or the lease
# was lost with the server. The check costs a system call; empty tasks are too quick for it.
_CHECKED_AFTER: Final = 0.01

# Seconds to wait for a reply that may have arrived. With 0 the socket would not block, and redis-py
# would report a broken connection instead of a timeout.
_ARRIVED: Final = 0.001

# Seconds until the first probe of an idle connection, seconds between two, and how many may be lost
# before the kernel closes the connection. The probes also keep its entry in a NAT.
_KEEPALIVE: Final = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)  # not every system has them all
}


class Connections:
    """The connections to the server that ``url`` names. They are made when they are needed.

    Args:
        url: In the form of redis-py, Celery or kombu.
        options: For redis-py's connection, such as ``{"ssl_ca_certs": ...}``.
        clock: Measures the age of idle connections.

    Raises:
        SettingsError: The URL or an option can't be read.
    """

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, clock: Clock | None = None
    ) -> None:
        try:
            # Not ConnectionPool.from_url: it adds options for redis-py's pool, by which a server
            # may replace our timeouts (redis-py 7's maintenance notifications).
            self._options = connection_options(url, options)
            self._options["protocol"] = 2
            self._make = self._options.pop("connection_class", redis.connection.Connection)
            if issubclass(self._make, redis.connection.Connection):  # not a Unix socket's
                self._options.setdefault("socket_keepalive", True)
                self._options.setdefault("socket_keepalive_options", _KEEPALIVE)
            # Sends nothing, but refuses unknown options here instead of in a task. Sentinel's new()
            # would ask a sentinel.
            Connections.new(self, timeout=1.0)
        except ValueError as exc:
            raise SettingsError(f"the store's URL can't be read: {exc}") from exc
        except TypeError as exc:
            # An option of TLS: "SomeConnection.__init__() got an unexpected keyword argument 'x'".
            reason = str(exc).rpartition("__init__() ")[2]
            raise SettingsError(
                f"the store's URL can't be read: redis-py {redis.__version__} {reason}"
            ) from exc
        self._idle: dict[tuple[int, float], deque[Connection]] = {}
        #: Seconds, for the age of idle connections.
        self.now = (clock or SystemClock()).now

    @property
    def address(self) -> str:
        """Host and port of the server, or the path of its socket, for messages."""
        options = self._options
        return str(options.get("path") or f"{options.get('host')}:{options.get('port')}")

    def at(self, host: str, port: int) -> Connections:
        """Connections to another server, with the same login and options."""
        other = copy.copy(self)
        other._options = {**self._options, "host": host, "port": port}
        other._idle = {}
        return other

    def home_of(self, key: str, timeout: float) -> Connections:
        """The connections to the server that has ``key``: there is only one server."""
        return self

    def masters(self, timeout: float) -> list[Connections]:
        """The connections to each server that has keys: there is only one server."""
        return [self]

    def run(self, commands: Sequence[Command], timeout: float) -> list[Any]:
        """Send all commands at once and read all replies. The first error reply is raised.

        Args:
            commands: Name and arguments of each.
            timeout: Seconds to wait for each reply.

        Raises:
            ScriptForgotten: The server knows no such script.
            StoreUnavailable: The server doesn't answer.
            StoreError: The server refuses a command.
        """
        connection = self.take(timeout)
        try:
            connection.send(commands)
            replies = connection.replies()
        finally:
            connection.end()
        try:
            return checked(replies)
        except StoreUnavailable as exc:
            if isinstance(exc.__cause__, redis.exceptions.ReadOnlyError):
                # A failover behind this address. The idle connections lead to the old master, and
                # a new one may lead to the new master.
                self.drop()
            raise

    def attempt(self, commands: Sequence[Command], timeout: float) -> list[Any]:
        """As :meth:`run`, with each error reply as a value in its place."""
        connection = self.take(timeout)
        try:
            connection.send(commands)
            return connection.replies()
        finally:
            connection.end()

    def take(self, timeout: float) -> Connection:
        """An idle connection, or a new one. The caller ends its use in any case.

        Raises:
            StoreUnavailable, StoreError: The server can't be reached, or refuses the login.
        """
        idle = self._idle_for(timeout)
        try:
            connection = idle.pop()
        except IndexError:
            connection = self._connect(timeout)
        else:
            age = self.now() - connection.idle_since
            if age > _CHECKED_AFTER and connection.is_stale(age):
                connection.close_idle()
                _close_all(idle)  # the others have been idle for longer
                connection = self._connect(timeout)
        connection.pool = idle
        return connection

    def send_async(self, command: Command, timeout: float, pending: PendingRelease) -> bool:
        """Send a release. Its reply is read before that of the connection's next command.

        Returns:
            Whether it was sent. That needs an idle connection without a pending reply. Where one
            has to be made, or replies have not been read for a while, waiting costs no more.
        """
        idle = self._idle_for(timeout)
        try:
            connection = idle.pop()
        except IndexError:
            return False
        age = self.now() - connection.idle_since
        if connection.pending is not None or (age > _CHECKED_AFTER and connection.is_stale(age)):
            idle.append(connection)
            return False
        connection.pool = idle
        try:
            connection.send((command,))
            connection.leave_pending(pending)
        except StoreError:
            return False
        finally:
            connection.end()
        return True

    def drain(self, timeout: float) -> None:
        """Read the pending replies on this thread's idle connections.

        A release whose reply does not arrive in time is lost.

        Args:
            timeout: Seconds, for each.
        """
        for idle in self._of_this_thread():
            for connection in list(idle):
                if connection.pending is None:
                    continue
                try:
                    idle.remove(connection)
                except ValueError:
                    continue  # in use by another thread, which reads the pending reply
                connection.pool = idle
                try:
                    connection.replies(within=timeout)
                except StoreError:
                    pass  # end() closes it, so the release is lost
                finally:
                    connection.end()

    def has_idle(self, timeout: float) -> bool:
        """Whether the next command would be sent without connecting first."""
        try:
            connection = self._idle_for(timeout)[-1]
        except IndexError:
            return False
        return self.now() - connection.idle_since <= MAX_IDLE

    def drop(self) -> None:
        """Close this thread's idle connections: what broke one has broken the others too."""
        for idle in self._of_this_thread():
            _close_all(idle)

    def close(self) -> None:
        """Close all idle connections. One in use is closed after its use: its pool is gone."""
        while self._idle:
            _close_all(self._idle.popitem()[1])

    def failure(self, error: Exception, *, was_idle: bool) -> StoreError:
        """The library's error for an error of redis-py or of the system."""
        if isinstance(error, redis.exceptions.AuthenticationError):
            return StoreError(f"the store refuses the login: {error}")
        if isinstance(error, _BROKEN):
            self.drop()
            unavailable = StoreUnavailable(f"the store doesn't answer: {error}")
            unavailable.was_idle = was_idle
            return unavailable
        return StoreError(f"the store refuses: {error}")

    def new(self, timeout: float, **options: Any) -> Any:
        """A connection of redis-py that never tries twice; it is not connected yet."""
        return self._make(
            **{**self._options, **options},
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
        )

    def greet(self, client: Any) -> None:
        """Check a new connection before its first use: nothing is checked here."""

    def _connect(self, timeout: float) -> Connection:
        client = self.new(timeout)
        try:
            client.connect()
            self.greet(client)
        except BaseException as exc:
            client.disconnect()
            if isinstance(exc, _READ_ERRORS):
                failure = self.failure(exc, was_idle=False)
                if isinstance(failure, StoreUnavailable):
                    failure.was_sent = False
                raise failure from exc
            raise
        return Connection(self, client)

    def _idle_for(self, timeout: float) -> deque[Connection]:
        key = (native.socket_owner(), timeout)
        found = self._idle.get(key)
        return self._idle.setdefault(key, deque()) if found is None else found

    def _of_this_thread(self) -> list[deque[Connection]]:
        thread = native.socket_owner()
        return [idle for (owner, _), idle in list(self._idle.items()) if owner == thread]


class Connection:
    """One connection of redis-py, in use by one thread at a time.

    Args:
        owner: Maps its errors.
        client: Redis-py's, connected.

    Attributes:
        pending: The release whose reply comes before the reply to the next command.
        pool: Where it goes when its use ends; None: it is not in use.
        idle_since: When its last use ended, by the owner's clock; 0: it was never idle.
    """

    __slots__ = ("_client", "_owner", "_unread", "idle_since", "pending", "pool")

    def __init__(self, owner: Connections, client: Any) -> None:
        self._owner = owner
        self._client = client
        self._unread = 0
        self.pending: PendingRelease | None = None
        self.pool: deque[Connection] | None = None
        self.idle_since = 0.0

    def fileno(self) -> int:
        """The descriptor of the socket, to wait on."""
        return int(self._client._sock.fileno())

    def send(self, commands: Sequence[Command]) -> None:
        """Send all commands at once.

        Raises:
            StoreUnavailable, StoreError: They can't be sent.
        """
        self._unread += len(commands)
        try:
            self._client.send_packed_command([pack(commands)], check_health=False)
        except (redis.exceptions.RedisError, OSError) as exc:
            raise self._owner.failure(exc, was_idle=self.idle_since > 0) from exc

    def replies(self, *, within: float | None = None, until: float | None = None) -> list[Any]:
        """Read the reply to each command. An error reply is a value.

        Args:
            within: Seconds to wait for each, instead of the connection's timeout.
            until: A time on the owner's clock, after which only replies that have arrived are read.

        Raises:
            StoreUnavailable, StoreError: They don't arrive.
        """
        client, pending = self._client, self.pending
        if pending is not None:
            self._unread += 1
        replies: list[Any] = []
        try:
            if within is not None:
                client._sock.settimeout(max(within, _ARRIVED))
            for _ in range(self._unread) if until is None else self._unread_until(until):
                try:
                    reply = client.read_response(disable_decoding=True, disconnect_on_error=False)
                except redis.exceptions.ResponseError as exc:
                    reply = classified(exc)
                replies.append(reply)
            self._unread = 0
            if within is not None:
                client._sock.settimeout(client.socket_timeout)
        except _READ_ERRORS as exc:
            raise self._owner.failure(exc, was_idle=self.idle_since > 0) from exc
        finally:
            # Also where the connection broke behind this reply: the release was executed.
            if pending is not None and replies:
                self.pending = None
                pending.acknowledge(replies.pop(0))
        return replies

    def _unread_until(self, until: float) -> Iterator[None]:
        late = False
        for _ in range(self._unread):
            if not late and self._owner.now() >= until:
                late = True
                self._client._sock.settimeout(_ARRIVED)
            yield
        if late:
            self._client._sock.settimeout(self._client.socket_timeout)

    def arrived(self) -> list[Any]:
        """The reply to the only command that was sent, if it has arrived whole; else nothing.

        Raises:
            StoreUnavailable, StoreError: The connection is broken.
        """
        if not native.is_readable(self._client._sock):
            return []
        try:
            return self.replies(within=_ARRIVED)
        except StoreUnavailable as exc:
            if isinstance(exc.__cause__, redis.exceptions.TimeoutError):
                return []  # a part of it, or bytes of TLS that belong to no reply
            raise

    def leave_pending(self, pending: PendingRelease) -> None:
        """Leave the reply to the only command that was sent, a release, to the next use."""
        self.pending, self._unread = pending, 0

    def end(self) -> None:
        """Return it to its pool if every reply was read, else close it. Harmless twice."""
        pool, self.pool = self.pool, None
        if pool is None:
            return
        if self._unread:
            self.close()
        else:
            self.idle_since = self._owner.now()
            pool.append(self)

    def is_stale(self, age: float) -> bool:
        """Whether it was idle for too long, or was closed by the server."""
        if age > MAX_IDLE:
            return True
        # If no reply is due, a readable connection has reached the end of its stream.
        return self.pending is None and native.is_readable(self._client._sock)

    def close(self) -> None:
        """Close it. A pending release is lost."""
        self.pool = None
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.lose()
        self._client.disconnect()

    def close_idle(self) -> None:
        """Close it; a pending reply that has arrived counts.

        Not for a connection whose use was interrupted: the next bytes on it may belong to another
        reply.
        """
        pending = self.pending
        if pending is not None and native.is_readable(self._client._sock):
            try:
                self._client._sock.settimeout(_ARRIVED)
                reply = read(self._client)
            except _READ_ERRORS:
                pass
            else:
                self.pending = None
                pending.acknowledge(reply)
        self.close()


def _close_all(idle: deque[Connection]) -> None:
    while idle:
        idle.pop().close_idle()
