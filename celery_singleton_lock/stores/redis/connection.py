"""Connections to one Redis server: one pipeline at a time each, no hidden retries.

Promises
    A connection on which anything went wrong, were it an exception thrown into the thread between
    send and read, is closed and never used again: the next call would read the earlier call's
    reply. redis-py's errors leave this module as the library's own. A connection that has been
    idle for longer than ``MAX_IDLE``, or that the server has closed meanwhile, is not used, and TCP
    keepalive probes the others.

Not the broker's pool, whose size and retries belong to the broker: redis-py's own defaults blocked
59 s on a dead link, and turned a lost reply into "not acquired". Idle connections are kept per
timeout, and per native thread under gevent, where a socket belongs to a thread's hub.
"""

from __future__ import annotations

import copy
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.retry import Retry

from celery_singleton_lock.core import native
from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.errors import SettingsError, StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.async_release import PostedRelease
from celery_singleton_lock.stores.redis.replies import checked, receive, told
from celery_singleton_lock.stores.redis.resp import ProtocolError, Replies, pack
from celery_singleton_lock.stores.redis.transport import MAX_IDLE, Command
from celery_singleton_lock.stores.redis.url_options import connection_options

__all__ = [
    "Connections",
    "Exchange",
]

_BROKEN: Final = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    OSError,
    ProtocolError,
)


# A connection of redis-py, whose methods are only partly typed, and what it owes: the reply to a
# release, which comes before the reply to its next command. Its attribute `idle_since` is ours; a
# connection that was not idle before has none.
_Idle = tuple[Any, PostedRelease | None]

# Seconds after which an idle connection is checked before use. A command sent on a connection that
# the server has closed gets no reply, so it is unknown whether a release was carried out or the
# lease was lost with the server. The check costs a system call; empty tasks are too quick for it.
_CHECKED_AFTER: Final = 0.01

# Seconds until the first probe of an idle connection, seconds between two, and how many may be lost
# before the kernel closes the connection. The probes also keep its entry in a NAT.
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class Connections:
    """To the server that ``url`` names, made when they are needed.

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
            # Not ConnectionPool.from_url: it adds options for a pool that we don't use, by which a
            # server may replace our timeouts (redis-py 7's maintenance notifications).
            self._options = connection_options(url, options)
            # What an exchange reads. redis-py's own reading is of twice the cost.
            self._options["protocol"] = 2
            self._make = self._options.pop("connection_class", Connection)
            if issubclass(self._make, Connection):  # not where the server is a Unix socket
                self._options.setdefault("socket_keepalive", True)
                self._options.setdefault("socket_keepalive_options", _keepalive_options())
            # Sends nothing, but refuses options that it doesn't know: better here than in a body.
            self._made(timeout=1.0)
        except ValueError as exc:
            raise SettingsError(f"the store's URL can't be read: {exc}") from exc
        except TypeError as exc:
            # An option of TLS: "SomeConnection.__init__() got an unexpected keyword argument 'x'".
            reason = str(exc).rpartition("__init__() ")[2]
            raise SettingsError(
                f"the store's URL can't be read: redis-py {redis.__version__} {reason}"
            ) from exc
        self._idle: dict[tuple[int, float], deque[_Idle]] = {}
        #: Seconds, for the age of idle connections.
        self.now = (clock or SystemClock()).now

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

    def home_of(self, key: str, timeout: float) -> Connections:
        """See `Transport.home_of`: there is only one server."""
        return self

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
        try:
            return checked(replies)
        except StoreUnavailable as exc:
            self.leave_demoted(exc)
            raise

    def leave_demoted(self, error: StoreUnavailable) -> None:
        """If ``error`` is a replica's, who was the master: its idle connections are closed.

        A failover behind this address: they would lead to it for ever, and a fresh one may lead to
        the new master.
        """
        if isinstance(error.__cause__, redis.exceptions.ReadOnlyError):
            self.drop()

    def attempt(self, commands: Sequence[Command], timeout: float) -> list[Any]:
        """As :meth:`run`, with each error in the place of its reply."""
        exchange = self.begin(commands, timeout)
        try:
            return exchange.replies()
        finally:
            exchange.end()

    def begin(self, commands: Sequence[Command], timeout: float) -> Exchange:
        """Send all commands at once; the replies are read from what is returned.

        Raises:
            StoreUnavailable, StoreError: They can't be sent.
        """
        idle = self._idle_for(timeout)
        fresh = False
        try:
            taken: _Idle = idle.pop()
            age = self.now() - taken[0].idle_since
            if age > _CHECKED_AFTER and _is_stale(*taken, age):
                idle.append(taken)
                _disconnect_all(idle)  # the others have been idle for longer
                taken, fresh = (self.new(timeout), None), True
        except IndexError:
            taken, fresh = (self.new(timeout), None), True
        try:
            connection = taken[0]
            if fresh:
                self.greet(connection)
            # Not redis-py's packing, which costs as much as the sending.
            connection.send_packed_command([pack(commands)], check_health=False)
            return Exchange(self, taken, idle, len(commands))
        except BaseException as exc:
            _close(*taken)
            if isinstance(exc, (redis.exceptions.RedisError, OSError)):
                raise self.translated(exc, taken[0]) from exc
            raise

    def post(self, command: Command, timeout: float, posted: PostedRelease) -> bool:
        """Send a command, and leave its reply to whoever uses the connection next.

        Returns:
            Whether it was sent: only on a connection that stands, and owes no reply yet. Where one
            has to be made, or nobody has read for a while, a reply is as good as waited for.
        """
        idle = self._idle_for(timeout)
        try:
            connection, owes = idle.pop()
        except IndexError:
            return False
        now = self.now()
        age = now - connection.idle_since
        if owes is not None or (age > _CHECKED_AFTER and _is_stale(connection, owes, age)):
            idle.append((connection, owes))
            return False
        try:
            connection.send_packed_command([pack([command])], check_health=False)
        except (redis.exceptions.RedisError, OSError) as exc:
            connection.disconnect()
            self.translated(exc, connection)
            return False
        except BaseException:
            connection.disconnect()
            raise
        connection.idle_since = now
        idle.append((connection, posted))
        return True

    def collect(self, timeout: float) -> None:
        """Read what this thread's idle connections owe; what doesn't come in time is lost.

        Args:
            timeout: Seconds, for each.
        """
        thread = native.socket_owner()
        for (owner, _), idle in list(self._idle.items()):
            # Another thread's hub reads its sockets alone.
            for item in list(idle) if owner == thread else ():
                if item[1] is None:
                    continue
                try:
                    idle.remove(item)
                except ValueError:
                    continue  # in use: who uses it reads what it owes
                exchange = Exchange(self, item, idle, 0)
                try:
                    exchange.replies(within=timeout)
                except StoreError:
                    pass  # closed below, and so lost
                finally:
                    exchange.end()

    def has_idle(self, timeout: float) -> bool:
        """Whether the next command would go out without connecting first."""
        try:
            idle_since = self._idle_for(timeout)[-1][0].idle_since
        except IndexError:
            return False
        return bool(self.now() - idle_since <= MAX_IDLE)

    def translated(self, error: Exception, connection: Any) -> StoreError:
        """The library's error for one of redis-py's or the system's, met on ``connection``."""
        if isinstance(error, redis.exceptions.AuthenticationError):
            return StoreError(f"the store refuses the login: {error}")
        if isinstance(error, _BROKEN):
            self.drop()
            unavailable = StoreUnavailable(f"the store doesn't answer: {error}")
            unavailable.was_idle = hasattr(connection, "idle_since")
            return unavailable
        return StoreError(f"the store refuses: {error}")

    def drop(self) -> None:
        """What broke one connection broke the others: the next try shall meet a fresh one."""
        # Of this thread alone where a socket belongs to its thread's hub.
        thread = native.socket_owner()
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
        key = (native.socket_owner(), timeout)
        found = self._idle.get(key)
        return self._idle.setdefault(key, deque()) if found is None else found


class Exchange:
    """A pipeline that was sent, on a connection of its own until :meth:`end`."""

    __slots__ = ("_connection", "_connections", "_count", "_idle", "_owes", "_read", "_replies")

    def __init__(
        self, connections: Connections, taken: _Idle, idle: deque[_Idle], count: int
    ) -> None:
        self._connections = connections
        self._connection, self._owes = taken
        self._idle = idle
        self._count = count
        self._read = False
        self._replies = Replies()

    def replies(
        self, is_late: Callable[[], bool] | None = None, *, within: float | None = None
    ) -> list[Any]:
        """All of them, error replies as values.

        Args:
            is_late: Whether to take only what has arrived already.
            within: Seconds to wait for each, other than the connection's own.

        Raises:
            StoreUnavailable, StoreError: They don't come.
        """
        connection, owes = self._connection, self._owes
        count = self._count if owes is None else self._count + 1
        replies: list[Any] = []
        try:
            while len(replies) < count:
                data = receive(connection, 0.0 if is_late is not None and is_late() else within)
                replies += [told(connection, reply) for reply in self._replies.feed(data)]
        except (redis.exceptions.RedisError, OSError, ProtocolError) as exc:
            if owes is not None and replies:
                # The server replied to the release before the connection broke.
                self._owes = None
                owes.hear(replies.pop(0))
            raise self._connections.translated(exc, connection) from exc
        self._read = True
        if owes is not None:
            # From here on the connection owes nothing, whatever strikes while others are told.
            self._owes = None
            owes.hear(replies.pop(0))
        return replies

    def more(self, commands: Sequence[Command]) -> None:
        """Send these too, behind what was sent: for who reads with :meth:`some`.

        Raises:
            StoreUnavailable, StoreError: They can't be sent.
        """
        self._read = False
        self._count += len(commands)
        try:
            self._connection.send_packed_command([pack(commands)], check_health=False)
        except (redis.exceptions.RedisError, OSError) as exc:
            raise self._connections.translated(exc, self._connection) from exc

    def some(self) -> list[Any]:
        """What has come of the replies, after waiting for at least a part of one.

        Returns:
            Those that are whole, error replies as values; each is told once.

        Raises:
            StoreUnavailable, StoreError: They don't come.
        """
        connection = self._connection
        try:
            replies = [told(connection, one) for one in self._replies.feed(receive(connection))]
        except (redis.exceptions.RedisError, OSError, ProtocolError) as exc:
            raise self._connections.translated(exc, connection) from exc
        if self._owes is not None and replies:
            owes, self._owes = self._owes, None
            owes.hear(replies.pop(0))
        self._count -= len(replies)
        self._read = not self._count
        return replies

    def end(self) -> None:
        """Keep the connection if every reply was read, else close it. Harmless twice."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._read:
            connection.idle_since = self._connections.now()
            self._idle.append((connection, None))
        else:
            _close(connection, self._owes, self._replies)


def _keepalive_options() -> dict[int, int]:
    """The options of keepalive that this system has."""
    return {
        getattr(socket, name): value for name, value in _KEEPALIVE.items() if hasattr(socket, name)
    }


def _is_stale(connection: Any, owes: PostedRelease | None, age: float) -> bool:
    """Whether an idle connection is too old, or was closed by the server."""
    # If no reply is due, a readable connection has reached the end of its stream.
    return age > MAX_IDLE or (owes is None and native.is_readable(connection._sock))


def _disconnect_all(idle: deque[_Idle]) -> None:
    while idle:
        _close(*idle.pop())


def _close(connection: Any, owes: PostedRelease | None, replies: Replies | None = None) -> None:
    """Close a connection; the reply that is due on it is taken if it has arrived.

    Args:
        connection: redis-py's.
        owes: The release whose reply is due; None: none is.
        replies: What has been read of that reply.
    """
    if owes is not None:
        reply = _arrived(connection, replies or Replies())
        if reply is None:
            owes.lose()
        else:
            owes.hear(reply)
    connection.disconnect()


def _arrived(connection: Any, replies: Replies) -> Any:
    """The next reply on ``connection`` if it has arrived whole; else None."""
    try:
        found = replies.feed(receive(connection, 0.0))
        return told(connection, found[0]) if found else None
    except Exception:
        return None  # the connection is broken, and about to be closed
