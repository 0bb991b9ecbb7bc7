"""A ZooKeeper session, with a client of its own.

Guarantees
    Requests end within their timeout. If a reply is missing after half of the timeout, another
    request is sent, which wakes a server that has forgotten the first one. If a reply times out,
    the connection is closed, so that kazoo connects to the next member instead of waiting for two
    thirds of the session's timeout. A session also leaves a member early that doesn't answer while
    the session connects: kazoo would wait for a third of the session's timeout (for all of it if no
    packet arrives), and the session's leases would be lost by then.

Non-guarantees
    A request that timed out may still be in kazoo's queue and be sent later. The requests of one
    session are sent in order, so a later write that was acknowledged proves that the queue is
    empty.

State model::

    connecting -> ready <-> reconnecting --the server has expired it--> connecting (kazoo creates a
                                                                        new session without nodes)

kazoo has no public way to read the timeout that the server granted, to close a connection, or to
limit the time for a connection attempt. All of these use its connection object: ``_connection``,
``_connect``, ``_invoke`` and ``_socket`` (2.10, 2.11). Without the first three no session can be
created; without ``_socket`` kazoo leaves a member that does not answer later.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from kazoo import exceptions as kazoo_errors
from kazoo.client import KazooClient
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.serialization import Auth
from kazoo.protocol.states import KeeperState
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from ...core import observers
from ...core.clock import Clock
from ...errors import StoreError, StoreUnavailable
from ..store_url import StoreUrl

#: Options of the URL's query.
OPTIONS: Final = frozenset({"ca", "cert", "key"})

_TLS_SCHEME: Final = "zks"
# The share of a session's timeout that a member has to accept the session. A holder trusts a lease
# for half of the timeout and renews it after a third. The rest suffices for two members that don't
# answer.
_ACCEPT_RATIO: Final = 1 / 12
# Seconds. A slow member gets twice the time at the next attempt.
_MIN_ACCEPT, _MAX_ACCEPT = 0.25, 2.0
# The share of a reply's timeout after which a sync is sent, and the maximum in seconds. ZooKeeper
# 3.6.0 to 3.8.0 may forget to wake the thread that applies a committed write (ZOOKEEPER-4537: seen
# on 3.8.0, once in some thousand writes with pauses between them). In a quiet ensemble the client
# then waits for the member's next request: the client's ping, after a third of the session's
# timeout. A sync, and the write before it, were answered in 0.01 s.
_REMIND_RATIO, _MAX_REMIND = 0.5, 0.5
# kazoo's default waits up to a minute between two attempts.
_RECONNECT: Final = {"max_tries": -1, "delay": 0.05, "backoff": 1.5, "max_delay": 0.5}
_UNKNOWN_OUTCOME: Final = (
    kazoo_errors.ConnectionClosedError,
    kazoo_errors.ConnectionLoss,
    kazoo_errors.OperationTimeoutError,
    kazoo_errors.SessionExpiredError,
    kazoo_errors.SessionMovedError,
)


def _is_no_login(record: logging.LogRecord) -> bool:
    return not any(isinstance(argument, Auth) for argument in record.args or ())


# A child of kazoo's own logger, whose level and handlers apply. At DEBUG kazoo logs each request
# that it sends. The first request is the login with its password, which a filter removes. A handler
# that blocks kazoo's thread would end the session, and with it all leases.
_logger = logging.getLogger("kazoo.client.singleton")
_logger.addFilter(_is_no_login)
_logger.addFilter(lambda record: not observers.defers(record, always=True))


class Session:
    """One session, with a client of its own.

    Attributes:
        timeout: Seconds without a heartbeat after which the server ends it; the requested value
            until the server has answered.
        client: kazoo's client.
        users: The number of threads that are writing nodes of this session.
    """

    def __init__(self, url: StoreUrl, ttl: float, clock: Clock) -> None:
        self.timeout = ttl
        self.users = 0
        self._clock = clock
        self._ready = threading.Event()
        self._guard = threading.Lock()
        self._is_started = False
        login = [("digest", f"{url.username}:{url.password}")] if url.username else None
        self.client: Any = KazooClient(
            hosts=str(url),
            logger=_logger,
            timeout=ttl,
            default_acl=CREATOR_ALL_ACL if login else OPEN_ACL_UNSAFE,
            auth_data=login,
            connection_retry=dict(_RECONNECT),
            use_ssl=url.scheme == _TLS_SCHEME,
            ca=url.options.get("ca"),
            certfile=url.options.get("cert"),
            keyfile=url.options.get("key", url.options.get("cert")),
        )
        shortest = min(max(ttl * _ACCEPT_RATIO, _MIN_ACCEPT), _MAX_ACCEPT)
        self._accept = shortest
        connection, handler = self.client._connection, self.client.handler
        connect, invoke, dial = connection._connect, connection._invoke, handler.create_connection

        def note_timeout(*args: Any) -> Any:
            # Doubled for the next member, until a member has accepted.
            accept, self._accept = self._accept, self._accept * 2
            connection._invoke = lambda timeout, *rest, **options: invoke(
                min(timeout, accept), *rest, **options
            )
            handler.create_connection = lambda timeout, **options: dial(
                timeout=min(timeout, accept), **options
            )
            read_timeout, connect_timeout = connect(*args)
            self._accept = shortest
            self.timeout = read_timeout * 1.5 / 1000  # kazoo reads for two thirds of it.
            self._ready.set()
            return read_timeout, connect_timeout

        connection._connect = note_timeout

    @property
    def is_over(self) -> bool:
        """Whether the session is closed and will not reconnect."""
        return self.client.client_state in (KeeperState.CLOSED, KeeperState.AUTH_FAILED)

    def start(self, deadline: float) -> None:
        """Wait for the server's answer. After the deadline, kazoo keeps trying.

        Raises:
            StoreUnavailable: There was no answer until the deadline.
        """
        with self._guard:
            # A client is started once: two threads that start one client deadlock.
            started, self._is_started = self._is_started, True
            try:
                if not started:
                    self.client.start_async()
            except RuntimeError:
                self._is_started = False  # No thread could be started. Try again later.
                raise
        if not self._ready.wait(max(0.0, deadline - self._clock.now())):
            raise StoreUnavailable("the store doesn't answer: no session within the time")

    def collect(self, requests: Sequence[Any], deadline: float) -> list[Any]:
        """The replies to asynchronous requests; None if there is no such node.

        Raises:
            StoreUnavailable: The server doesn't answer.
            StoreError: The server refuses a request.
        """
        return [self._reply(request, deadline) for request in requests]

    def _reply(self, request: Any, deadline: float) -> Any:
        left = max(0.0, deadline - self._clock.now())
        try:
            if not request.wait(min(left * _REMIND_RATIO, _MAX_REMIND)):
                self.client.sync_async("/")
            return request.get(timeout=max(0.0, deadline - self._clock.now()))
        except kazoo_errors.NoNodeError:
            return None
        except KazooTimeoutError as exc:
            self._hang_up()
            raise StoreUnavailable("the store doesn't answer within the time") from exc
        except _UNKNOWN_OUTCOME as exc:
            raise StoreUnavailable(f"the store doesn't answer: {exc!r}") from exc
        except kazoo_errors.KazooException as exc:
            raise StoreError(f"the store refuses: {exc!r}") from exc

    def close(self) -> None:
        """End the session, and with it its ephemeral nodes."""
        self.client.stop()
        self.client.close()

    def _hang_up(self) -> None:
        connection = getattr(self.client._connection, "_socket", None)
        # A new connection stays open: it may lead to the next member already.
        if connection is not None and self.client.connected:
            with suppress(OSError):  # The socket is closed already.
                connection.shutdown(socket.SHUT_RDWR)
