"""Connections to one Redis server: a pool without retries over redis-py's connections.

Guarantees
    A connection is used again only after every reply on it has been read. Otherwise, also after an
    exception that a signal handler raises between send and read, it is closed: the next command
    would read the reply to an earlier one. Errors of redis-py and of the operating system leave
    this module as StoreError or StoreUnavailable.

Non-guarantees
    A command without a reply may have been executed. This module sends nothing a second time.

New connections
    The resolver of host names, and a credential provider, may be waited for without a limit. So a
    thread that serves others (`core.observers`) waits for `_OPENING` timeouts at most, and another
    thread opens the connection. One that is opened too late is for the next request. Not under
    gevent and eventlet, because a socket belongs to the hub of the thread that opens it.

Idle connections
    Idle connections are pooled by timeout. Under gevent and eventlet they are also pooled by native
    thread, because a socket belongs to the hub of a thread. A connection that was idle for longer
    than ``MAX_IDLE``, or that the server has closed, is not used; if a process has many, they are
    closed then (see ``stores.idle_connections``). TCP keepalive probes the others.

redis-py has no public access to the socket: ``_sock`` of its connection (5.2 to 8.x) is polled and
gets the timeouts of single replies. There is no fallback.

The broker's pool is not used: its size and its retries belong to the broker. The defaults of
redis-py blocked for 59 s on a dead link, and turned a lost reply into "not acquired".
"""

from __future__ import annotations

import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import redis
import redis.cluster
import redis.connection
from redis.backoff import NoBackoff
from redis.retry import Retry

from ...core import native_threads, observers
from ...core.clock import Clock, SystemClock
from ...core.native_threads import SocketOwner
from ...core.store import ConnectionWatch
from ...errors import SettingsError, StoreError, StoreUnavailable
from ..idle_connections import MAX_IDLE, IdleSweep
from ..store_url import Address, StoreUrl
from .async_release import PendingRelease
from .connection_options import PORT, connection_options
from .scripts import Command, pack
from .server_errors import (
    is_denied,
    is_not_clustered,
    is_temporary,
    is_unknown_command,
    is_without_password,
    own_error,
)

#: Seconds to wait for a reply to a request of the command line or the doctor. It may be long,
#: because operators hold no lease meanwhile.
OPERATOR_TIMEOUT: Final = 2.0

# The exceptions that redis-py raises while it reads. For a reply that is not RESP, int() raises a
# ValueError.
_READ_ERRORS: Final = (redis.exceptions.RedisError, OSError, ValueError)
_WHICH_RIGHT: Final = "; `celery -A ... singleton doctor` says which rights are missing"
# The read errors that are no replies to a command: the connection is broken, or no Redis answers.
_BROKEN: Final = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.InvalidResponse,
    OSError,
    ValueError,
)

# Seconds after which an idle connection is checked before use. A command sent on a connection that
# the server has closed gets no reply, so it is unknown whether a release was executed or the lease
# was lost with the server. The check costs a system call. A task with an empty body releases sooner
# and does not pay for it.
_CHECKED_AFTER: Final = 0.01

# The number of timeouts that a new connection may take on another thread: to connect, to log in,
# and to choose the database.
_OPENING: Final = 3
# Seconds for which a connection is kept that was opened too late.
_KEPT: Final = 5.0

# Seconds to wait for a reply that may have arrived. With 0 the socket would not block, and redis-py
# would report a broken connection instead of a timeout.
_ARRIVED: Final = 0.001

# Seconds until the first probe of an idle connection, seconds between two probes, and the number of
# lost probes after which the kernel closes the connection. The probes also keep a NAT entry alive.
_KEEPALIVE: Final = {
    getattr(socket, name): value
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)  # some systems lack some of these options
}


class Connections:
    """The connections to the server that ``url`` names. Each is opened when it is needed.

    Args:
        url: The URL, in the form of redis-py, Celery or kombu.
        options: Options of redis-py's connection, such as ``{"ssl_ca_certs": ...}``.
        clock: The clock that measures the age of idle connections.

    Raises:
        SettingsError: The URL or an option can't be read.
    """

    def __init__(
        self,
        url: str | StoreUrl,
        options: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if isinstance(url, str):
            url = StoreUrl.parse(url, port=PORT)
        try:
            # ConnectionPool.from_url() would add options for redis-py's pool that let a server
            # replace our timeouts (redis-py 7's maintenance notifications).
            self._options = connection_options(url, options)
            self._options["protocol"] = 2
            # redis-py 5 recognizes the errors of a Cluster only with this parser.
            if parser := getattr(redis.cluster, "ClusterParser", None):
                self._options["parser_class"] = parser
            self._make = self._options.pop("connection_class", redis.connection.Connection)
            if issubclass(self._make, redis.connection.Connection):  # not a Unix socket
                self._options.setdefault("socket_keepalive", True)
                self._options.setdefault("socket_keepalive_options", _KEEPALIVE)
            # This sends nothing, but raises for unknown options here instead of in a task. Not
            # self.new(): Sentinel's would send a request to a sentinel.
            Connections.new(self, timeout=1.0)
        except ValueError as exc:
            raise SettingsError(f"the store's URL can't be read: {exc}") from exc
        except TypeError as exc:
            # "SomeConnection.__init__() got an unexpected keyword argument 'x'", for a TLS option.
            reason = str(exc).rpartition("__init__() ")[2]
            raise SettingsError(
                f"the store's URL can't be read: redis-py {redis.__version__} {reason}"
            ) from exc
        #: What the ends of the connections are reported to; None: nothing.
        self.watch: ConnectionWatch | None = None
        #: The clock of pauses.
        self.clock = clock or SystemClock()
        #: The current time in seconds, to compute the age of idle connections.
        self.now = self.clock.now
        self._have_none()

    def _have_none(self) -> None:
        self._idle: defaultdict[tuple[SocketOwner, float], _Idle] = defaultdict(_Idle)
        # By timeout, the opening of a connection that took too long.
        self._late: dict[float, _Opening] = {}
        self._sweep = IdleSweep(self.close_old, self.clock)

    @property
    def address(self) -> str:
        """The server's host and port, or the path of its socket, for messages."""
        options = self._options
        return str(options.get("path") or Address(options["host"], options["port"]))

    def at(self, host: str, port: int) -> Connections:
        """Connections to one server, with the same login and options."""
        other = object.__new__(Connections)
        other._options = {**self._options, "host": host, "port": port}
        other._make, other.clock, other.now = self._make, self.clock, self.now
        other._have_none()
        other.watch = self.watch
        return other

    def home_of(self, key: str, timeout: float) -> Connections:
        """The connections to the server that has ``key``. Here there is only one server."""
        return self

    def masters(self, timeout: float) -> list[Connections]:
        """The connections to each server that has keys. Here there is only one server."""
        return [self]

    def run(self, commands: Sequence[Command], timeout: float, *, check: bool = True) -> list[Any]:
        """Send all commands at once and read all replies.

        Args:
            commands: The name and the arguments of each command.
            timeout: Seconds to wait for each reply.
            check: Whether the first error reply is raised; else an error reply is a value.

        Raises:
            NoScriptError: The server does not have the script.
            StoreUnavailable: The server doesn't answer.
            StoreError: The server refuses a command.
        """
        connection = self.take(timeout)
        try:
            connection.send(b"".join(map(pack, commands)), len(commands))
            replies = connection.replies()
        finally:
            connection.end()
        return self.checked(replies) if check else replies

    def checked(self, replies: list[Any]) -> list[Any]:
        """Raise the first error among ``replies``; return ``replies`` if there is none.

        Raises:
            NoScriptError: The server was restarted, or its scripts were flushed.
            StoreUnavailable: The error is temporary, such as during a failover.
            StoreError: Any other error.
        """
        for reply in replies:
            if isinstance(reply, Exception):
                if isinstance(reply, redis.exceptions.NoScriptError):
                    # A new one: that of the replies would be in such a cycle when it is raised.
                    raise redis.exceptions.NoScriptError(*reply.args)
                if isinstance(reply, StoreError):
                    raise reply
                if isinstance(reply, redis.exceptions.ReadOnlyError):
                    # There was a failover behind this address. The idle connections lead to the old
                    # master; a new connection may lead to the new master.
                    self.drop()
                    self.note_other_server()
                raise _mapped(reply, self.address) from reply
        return replies

    def take(self, timeout: float) -> Connection:
        """An idle connection, or a new one. The caller must call ``end()`` on it in any case.

        Raises:
            StoreUnavailable, StoreError: The server can't be reached, or refuses the login.
        """
        idle = self._idle[native_threads.socket_owner(), timeout]
        try:
            connection = idle.pop()
        except IndexError:
            return self._connect(timeout, idle)
        age = self.now() - connection.idle_since
        if age > _CHECKED_AFTER and connection.is_stale(age):
            connection.close_idle()
            _close_all(idle)  # the others have been idle for longer
            return self._connect(timeout, idle)
        return connection

    def send_async(self, command: Command, timeout: float, pending: PendingRelease) -> bool:
        """Send a release. Its reply is read before the reply to the connection's next command.

        Returns:
            Whether the release was sent. This requires an idle connection without a pending reply.
            Otherwise a synchronous release costs no more.
        """
        idle = self._idle[native_threads.socket_owner(), timeout]
        try:
            connection = idle.pop()
        except IndexError:
            return False
        age = self.now() - connection.idle_since
        if connection.pending is not None or (age > _CHECKED_AFTER and connection.is_stale(age)):
            idle.append(connection)
            return False
        try:
            connection.send(pack(command), 1)
            # Its reply is left to the connection's next use.
            connection.pending, connection._unread = pending, 0
        except StoreError:
            return False
        finally:
            connection.end()
        return True

    def info(self, section: str) -> dict[str, str]:
        """One section of the server's INFO; empty if the server denies INFO.

        Raises:
            StoreUnavailable: The server doesn't answer.
            StoreError: The server refuses the connection, such as its login or database number.
        """
        try:
            (text,) = self.run([("INFO", section)], OPERATOR_TIMEOUT)
        except StoreError as exc:
            cause = exc.__cause__
            if is_denied(cause) or is_unknown_command(cause):
                return {}
            raise
        lines = text.decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def drain(self, timeout: float) -> None:
        """Read the pending replies on this thread's idle connections.

        A release whose reply does not arrive in time is lost.

        Args:
            timeout: Seconds to wait for all replies.
        """
        until = self.now() + timeout
        for idle in self._of_this_thread():
            for connection in list(idle):
                if connection.pending is None:
                    continue
                try:
                    idle.remove(connection)
                except ValueError:
                    continue  # in use by another thread, which reads the pending reply
                try:
                    connection.replies(until)
                except StoreError:
                    pass  # end() closes the connection, so the release is lost
                finally:
                    connection.end()

    def has_idle(self, timeout: float) -> bool:
        """Whether the next command would be sent without connecting first."""
        try:
            connection = self._idle[native_threads.socket_owner(), timeout][-1]
        except IndexError:
            return False
        return self.now() - connection.idle_since <= MAX_IDLE

    def drop(self) -> None:
        """Close this thread's idle connections, after one to the same server broke."""
        for idle in self._of_this_thread():
            _close_all(idle)

    def close_old(self) -> None:
        """Close this thread's connections that were idle for longer than ``MAX_IDLE``."""
        oldest = self.now() - MAX_IDLE
        for idle in self._of_this_thread():
            for connection in list(idle):
                if connection.idle_since >= oldest:
                    break  # so are those after it, which were used later
                with suppress(ValueError):  # in use by another thread again
                    idle.remove(connection)
                    connection.close_idle()

    def close(self) -> None:
        """Close all idle connections. A connection in use is closed after its use."""
        while self._late:
            self._late.popitem()[1].discard()
        while self._idle:
            idle = self._idle.popitem()[1]
            idle.closed = True
            _close_all(idle)

    def failure(self, error: Exception, *, was_idle: bool = False) -> StoreError:
        """This library's error for an error of redis-py or of the operating system."""
        if isinstance(error, redis.exceptions.AuthenticationError):
            return StoreError(f"the store refuses the login: {error}")
        if isinstance(error, _BROKEN):
            self.drop()
            unavailable = StoreUnavailable(f"the store doesn't answer: {error}")
            unavailable.was_idle = was_idle
            return unavailable
        return _mapped(error, self.address)

    def new(self, timeout: float, **options: Any) -> Any:
        """A connection of redis-py without retries; it is not connected yet."""
        return self._make(
            **{**self._options, **options},
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
        )

    def report_to(self, watch: ConnectionWatch) -> None:
        """See `Store.watch_connections`."""
        self.watch = watch

    def note_other_server(self) -> None:
        """Note that a reply came from a server that may not have the leases of this process."""
        if self.watch is not None:
            self.watch.ended()

    def greet(self, client: Any) -> None:
        """Check a new connection before its first use. A plain server needs no check."""

    def _connect(self, timeout: float, idle: _Idle) -> Connection:
        try:
            serves_others = observers.serves_others() and not native_threads.is_patched()
            open_one = self._opened_elsewhere if serves_others else self._opened
            connection = Connection(self, open_one(timeout), idle)
        except StoreUnavailable as exc:
            exc.was_sent = False  # whatever was asked before, such as a sentinel
            raise
        self._sweep.opened(connection)
        return connection

    def _opened_elsewhere(self, timeout: float) -> Any:
        opening = self._late.pop(timeout, None)
        if opening is not None and opening.is_over():
            opening.discard()
            opening = None
        if opening is None:
            opening = _Opening(partial(self._opened, timeout), self.now)
        if opening.ends_within(_OPENING * timeout):
            return opening.result()
        self._late[timeout] = opening
        raise StoreUnavailable(
            f"the store doesn't answer: no connection in {_OPENING * timeout:g} s (the resolver of "
            "host names, or a credential provider, may be slow)"
        )

    def _opened(self, timeout: float) -> Any:
        client = self.new(timeout)
        try:
            try:
                client.connect()
            except redis.exceptions.AuthenticationError as exc:
                if not is_without_password(exc):
                    raise
                # Celery's connections log in by HELLO since redis-py 8. There such a server accepts
                # any password.
                client.username = client.password = client.credential_provider = None
                client.connect()
            self.greet(client)
        except BaseException as exc:
            client.disconnect()
            if not isinstance(exc, _READ_ERRORS):
                raise
            raise self.failure(exc) from exc
        return client

    def _of_this_thread(self) -> list[_Idle]:
        thread = native_threads.socket_owner()
        return [idle for (owner, _), idle in list(self._idle.items()) if owner is thread]


class Connection:
    """One connection of redis-py, in use by one thread at a time.

    Args:
        owner: The object that maps the errors.
        client: The connected connection of redis-py.
        idle: The idle connections that this one returns to.

    Attributes:
        pending: The release whose reply comes before the reply to the next command.
        idle_since: The end of the last use, by the owner's clock; 0: it was never idle.
    """

    __slots__ = ("__weakref__", "_client", "_idle", "_owner", "_unread", "idle_since", "pending")

    def __init__(self, owner: Connections, client: Any, idle: _Idle) -> None:
        self._owner = owner
        self._client = client
        self._idle = idle
        # The number of replies to read; -1: the connection is closed.
        self._unread = 0
        self.pending: PendingRelease | None = None
        self.idle_since = 0.0

    def fileno(self) -> int:
        """The descriptor of the socket, to wait on."""
        return int(self._client._sock.fileno())

    def send(self, packed: bytes, count: int) -> None:
        """Send ``count`` commands, which `pack` has packed, at once.

        Raises:
            StoreUnavailable, StoreError: The commands can't be sent.
        """
        self._unread += count
        try:
            self._client.send_packed_command([packed], check_health=False)
        except (redis.exceptions.RedisError, OSError) as exc:
            raise self._owner.failure(exc, was_idle=self.idle_since > 0) from exc

    def replies(self, until: float | None = None) -> list[Any]:
        """Read the reply to each command. An error reply is a value.

        Args:
            until: A time on the owner's clock. After it, only replies that have arrived are read.
                None: the connection's timeout counts for each reply.

        Raises:
            StoreUnavailable, StoreError: The replies don't arrive.
        """
        client, pending = self._client, self.pending
        if pending is not None:
            self._unread += 1
        replies: list[Any] = []
        try:
            for _ in range(self._unread):
                if until is not None:
                    client._sock.settimeout(max(until - self._owner.now(), _ARRIVED))
                try:
                    reply = client.read_response(disable_decoding=True, disconnect_on_error=False)
                except redis.exceptions.ResponseError as exc:
                    # Its traceback has this frame, and so the replies, of which it is one: a cycle,
                    # which keeps all that the callers have until the garbage collector comes.
                    reply = own_error(exc).with_traceback(None)
                replies.append(reply)
            if until is not None:
                client._sock.settimeout(client.socket_timeout)
        except _READ_ERRORS as exc:
            raise self._owner.failure(exc, was_idle=self.idle_since > 0) from exc
        finally:
            # The release was executed, even if the connection broke after this reply.
            if pending is not None and replies:
                self.pending = None
                pending.acknowledge(replies.pop(0))
        # Last: after an exception from a signal handler before this line, end() closes the
        # connection. With the release still pending, it would take the next reply for that one.
        self._unread = 0
        return replies

    def arrived(self) -> list[Any]:
        """The reply to the only command that was sent, if it has arrived completely; else empty.

        Raises:
            StoreUnavailable, StoreError: The connection is broken.
        """
        try:
            replies = self._read_arrived()
        except _READ_ERRORS as exc:
            raise self._owner.failure(exc, was_idle=self.idle_since > 0) from exc
        if replies:
            self._unread = 0
        return replies

    def end(self) -> None:
        """Return to the idle connections, or close the connection unless every reply was read."""
        if self._unread or self._idle.closed:
            self.close()
        else:
            if not self.idle_since and self._owner.watch is not None:
                # Not sooner: a server may close each connection that it accepts.
                self._owner.watch.opened(self._client._sock)
            self.idle_since = self._owner.now()
            self._idle.append(self)

    def is_stale(self, age: float) -> bool:
        """Whether the connection was idle for too long, or was closed by the server."""
        if age > MAX_IDLE:
            return True
        # If no reply is pending, a readable connection has reached the end of its stream.
        return self.pending is None and native_threads.is_readable(self._client._sock)

    def close(self) -> None:
        """Close the connection. A pending release is lost."""
        self._unread = -1
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.lose()
        watch, sock = self._owner.watch, self._client._sock
        if watch is not None and sock is not None:
            watch.closing(sock)
        elif watch is not None and self.idle_since:
            watch.ended()  # redis-py has closed it, because it could not send
        self._client.disconnect()

    def close_idle(self) -> None:
        """Close the connection, after reading a pending reply that has arrived.

        Do not call this for a connection whose use was interrupted: its next bytes may belong to
        another reply.
        """
        pending = self.pending
        replies: list[Any] = []
        if pending is not None:
            with suppress(*_READ_ERRORS):
                replies = self._read_arrived()
        if pending is not None and replies:
            self.pending = None
            pending.acknowledge(replies[0])
        self.close()

    def _read_arrived(self) -> list[Any]:
        """The next reply, if it has arrived completely; else empty."""
        client = self._client
        if not native_threads.is_readable(client._sock):
            return []
        client._sock.settimeout(_ARRIVED)
        try:
            reply = read(client)
        except redis.exceptions.TimeoutError:
            return []  # a part of it, or bytes of TLS that belong to no reply
        client._sock.settimeout(client.socket_timeout)
        return [reply]


class _Opening:
    """The opening of a connection on a thread of its own.

    Args:
        open_one: Opens a connection of redis-py.
        now: The clock.
    """

    def __init__(self, open_one: Callable[[], Any], now: Callable[[], float]) -> None:
        self._open, self._now = open_one, now
        self._client: Any = None
        self._error: BaseException | None = None
        self._ended_at = float("inf")
        self._is_discarded = False
        self._running: Any = native_threads.allocate_lock()
        self._running.acquire()
        try:
            threading.Thread(target=self._run, name="singleton-connect", daemon=True).start()
        except RuntimeError:  # no thread can be started now
            self._run()

    def _run(self) -> None:
        try:
            self._client = self._open()
        except BaseException as exc:  # raised again in the thread that waits
            self._error = exc
        self._ended_at = self._now()
        self._running.release()
        if self._is_discarded:
            self.discard()

    def ends_within(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the end."""
        return bool(self._running.acquire(timeout=seconds))

    def is_over(self) -> bool:
        """Whether it has failed, or the connection was opened too long ago."""
        return self._error is not None or self._now() > self._ended_at + _KEPT

    def result(self) -> Any:
        """The connection.

        Raises:
            StoreError, StoreUnavailable: It could not be opened.
        """
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._client
        finally:
            del error  # its traceback has this frame: a cycle

    def discard(self) -> None:
        """Close the connection, now or when it is open."""
        self._is_discarded = True
        if self._client is not None:
            self._client.disconnect()


class _Idle(deque[Connection]):
    """The idle connections of one timeout, and of one thread where threads are patched.

    Attributes:
        closed: Whether a connection in use is closed after its use.
    """

    closed = False


def _close_all(idle: _Idle) -> None:
    while True:
        try:
            connection = idle.pop()
        except IndexError:
            return  # not tested before pop(): another thread may take the last one in between
        connection.close_idle()


def read(client: Any) -> Any:
    """The next reply on a connection of redis-py. An error reply is returned.

    Raises:
        RedisError, OSError, ValueError: The connection is broken, or the server refused it.
    """
    try:
        # The connection stays open: after a timeout the caller may wait for the rest of the reply.
        return client.read_response(disable_decoding=True, disconnect_on_error=False)
    except redis.exceptions.ResponseError as exc:
        return own_error(exc)


def _mapped(error: Exception, address: str) -> StoreError:
    """This library's error for an error reply of the server at ``address``."""
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return StoreUnavailable(f"the store is a replica now: {error}")
    if is_temporary(error):
        return StoreUnavailable(f"the store can't answer now: {error}")
    if isinstance(error, redis.exceptions.AskError):  # MovedError is a subclass
        return StoreError(
            f"the store is one node of a Redis Cluster ({error}): name it redis+cluster://"
        )
    if is_not_clustered(error):
        return StoreError(f"{address} belongs to no Redis Cluster: name it redis:// ({error})")
    # Permanent, such as a wrong type or a missing right.
    more = _WHICH_RIGHT if is_denied(error) else ""
    return StoreError(f"the store refuses: {error}{more}")
