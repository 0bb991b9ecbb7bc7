"""Requests to an etcd cluster through its HTTP gateway: endpoints, failover, login.

Guarantees
    A request ends within its timeout, apart from the time to read the last bytes. If a member
    refuses the connection, the request goes on to the next member. A request that may have been
    carried out is repeated only if it is ``repeatable``. Otherwise it raises StoreUnavailable.

After any exception, also one that another thread raised between send and receive, the connection is
closed and never used again. A connection that was idle for longer than ``MAX_IDLE`` is not used; if
a process has many, they are closed then (see ``stores.idle_connections``). Under gevent idle
connections are pooled by native thread, because a socket belongs to the hub of a thread.

The resolver of host names may be waited for without a limit. So a thread that serves others
(`core.observers`) lets another thread send a request that needs a new connection. Not under gevent
and eventlet.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import requests
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

from ...core import native_threads, observers
from ...core.clock import Clock
from ...core.executor import within
from ...core.native_threads import SocketOwner
from ...core.store import ConnectionWatch
from ...errors import StoreError, StoreUnavailable
from ..idle_connections import MAX_IDLE, IdleSweep
from ..store_url import StoreUrl

Body = Mapping[str, Any]
Reply = dict[str, Any]

#: Options of the URL's query.
OPTIONS: Final = frozenset({"ca", "cert", "key", "api_path"})

_MIN_TIMEOUT: Final = 0.01
# Status codes of gRPC, which the gateway passes on.
_NOT_FOUND: Final = 5
_UNAUTHENTICATED: Final = 16
# The codes unknown, deadline exceeded, aborted, internal and unavailable: there is no leader, the
# leader has changed, or the proposal was dropped. The request may have been carried out or not.
_UNAVAILABLE: Final = 14
_UNCERTAIN: Final = frozenset({2, 4, 10, 13, _UNAVAILABLE})
# The message of a member whose backlog is too long. Its code, resource exhausted, is also that of a
# full disk, which does not pass.
_OVERLOADED: Final = "too many requests"
# Messages of a member if the login's token has expired or was issued before the member's restart.
_BAD_TOKEN: Final = ("invalid auth token", "user name is empty", "auth store is old")
# urllib3's loggers: at DEBUG they log each request, and a warning may come with any reply. Other
# requests of the process use them too, so only the records of threads that serve others are
# deferred. A logger's filters do not apply to its children, so each logger has the filter.
for _name in ("connection", "connectionpool", "response", "util.retry"):
    logging.getLogger(f"urllib3.{_name}").addFilter(lambda record: not observers.defers(record))


class LeaseGone(Exception):
    """A key could not be bound to its etcd lease, because the etcd lease has expired."""


class Gateway:
    """A connection pool for the cluster that ``url`` names.

    A forked process must create its own.

    Args:
        url: Members, login and options.
        clock: The clock of the deadlines.
    """

    def __init__(self, url: StoreUrl, clock: Clock) -> None:
        protocol = "https" if url.scheme == "etcds" else "http"
        version = url.options.get("api_path", "/v3/")
        self._members = [f"{protocol}://{host}{version}" for host in url.hosts]
        self._url = url
        self._clock = clock
        self._member = 0  # The index of the member that answered last.
        self._token = ""
        self._idle: dict[tuple[SocketOwner, str], deque[_Connection]] = {}
        # By member, the end of the request on another thread that was given up on.
        self._given_up: dict[str, threading.Event] = {}
        self._sweep = IdleSweep(self.close_old, clock)
        #: What the ends of the connections are reported to; None: nothing.
        self.watch: ConnectionWatch | None = None

    def request(self, path: str, body: Body, deadline: float, *, repeatable: bool) -> Reply:
        """POST ``body`` to ``path`` and return the reply.

        Args:
            path: The path after the API version, such as ``kv/txn``.
            body: JSON, with keys and values in base64.
            deadline: The deadline, on the clock.
            repeatable: Whether repeating a request that was carried out does no harm.

        Raises:
            LeaseGone: The body names an etcd lease that has expired.
            StoreUnavailable: There is no reply.
            StoreError: etcd refuses the request.
        """
        tries_left = members = len(self._members)
        logged_in_again = False
        while True:
            member = self._member
            try:
                return self._send(self._members[member], path, body, deadline, tries_left)
            except _Failure as exc:
                if exc.code == _UNAUTHENTICATED and self._url.username and not logged_in_again:
                    logged_in_again, self._token = True, ""
                    continue
                if exc.is_refusal:
                    is_lease = exc.code == _NOT_FOUND and "lease" in str(exc)
                    kind = LeaseGone if is_lease else StoreError
                    raise kind(f"the store refuses: {exc}") from exc.__cause__
                # Later requests start with the next member.
                self._member = (member + 1) % members
                tries_left -= 1
                may_repeat = tries_left and (repeatable or not exc.was_sent)
                if not may_repeat or self._clock.now() >= deadline:
                    raise StoreUnavailable(f"the store doesn't answer: {exc}") from exc.__cause__

    def close_old(self) -> None:
        """Close this thread's connections that were idle for longer than ``MAX_IDLE``."""
        oldest, thread = self._clock.now() - MAX_IDLE, native_threads.socket_owner()
        for (owner, _), idle in list(self._idle.items()):
            if owner is not thread:
                continue
            for connection in list(idle):
                if connection.idle_since >= oldest:
                    break  # so are those after it, which were used later
                with suppress(ValueError):  # in use by another thread again
                    idle.remove(connection)
                    self._close(connection)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            for connection in self._idle.popitem()[1]:
                self._close(connection)

    def _send(self, member: str, path: str, body: Body, deadline: float, tries_left: int) -> Reply:
        left = max(deadline - self._clock.now(), _MIN_TIMEOUT)
        # A host that drops packets must leave time for the other members.
        timeout = (left / tries_left, left)
        if self._url.username and not self._token:
            self._token = self._log_in(member, timeout)
        return self._post(member, path, body, timeout, self._token)

    def _log_in(self, member: str, timeout: tuple[float, float]) -> str:
        body = {"name": self._url.username, "password": self._url.password}
        try:
            return str(self._post(member, "auth/authenticate", body, timeout)["token"])
        except _Failure as exc:
            if exc.is_refusal:
                raise StoreError(f"the store refuses the login: {exc}") from exc.__cause__
            raise _Failure(str(exc), was_sent=False) from exc.__cause__

    def _post(
        self, member: str, path: str, body: Body, timeout: tuple[float, float], token: str = ""
    ) -> Reply:
        idle = self._idle.setdefault((native_threads.socket_owner(), member), deque())
        connection, clean = self._take(idle), False
        headers = {"Authorization": token} if token else {}
        try:
            # stream: the response has the connection until its body is read.
            send = partial(
                connection.session.post,
                member + path,
                json=body,
                headers=headers,
                timeout=timeout,
                stream=True,
            )
            is_new = connection.sock is None
            if is_new and observers.serves_others() and not native_threads.is_patched():
                response = self._sent_elsewhere(member, send, timeout[1])
            else:
                response = send()
            sock = getattr(response.raw.connection, "sock", None)
            if response.status_code == requests.codes.ok:
                reply: Reply = response.json()
                clean = True
                return reply
            failure = _failure(response.text)
            clean = failure.is_refusal
            raise failure
        except (OSError, ValueError) as exc:
            # Exceptions of requests are OSErrors. A missing certificate file is an OSError too.
            reason = getattr(exc.args[0] if exc.args else None, "reason", None)
            never_sent = isinstance(reason, (NewConnectionError, ConnectTimeoutError))
            raise _Failure(str(exc), was_sent=not never_sent) from exc
        finally:
            if clean:
                connection.idle_since = self._clock.now()
                if sock is not connection.sock:
                    connection.sock = sock
                    if self.watch is not None and sock is not None:
                        self.watch.opened(sock)
                idle.append(connection)
            else:
                self._close(connection)

    def _sent_elsewhere(self, member: str, send: Callable[[], Any], seconds: float) -> Any:
        """The result of ``send``, which another thread calls.

        Raises:
            TimeoutError: There is none in time, or ``member`` has not answered the last one yet.
        """
        given_up = self._given_up.get(member)
        if given_up is not None and not given_up.is_set():
            raise TimeoutError("the resolver of host names, or the server, is slow")
        ended = threading.Event()

        def run() -> Any:
            try:
                with observers.elsewhere():  # a log handler must not delay this request either
                    return send()
            finally:
                ended.set()

        try:
            return within(seconds, run)
        except TimeoutError:
            self._given_up[member] = ended
            raise

    def _close(self, connection: _Connection) -> None:
        if self.watch is not None and connection.sock is not None:
            self.watch.closing(connection.sock)
        connection.session.close()

    def _take(self, idle: deque[_Connection]) -> _Connection:
        """An idle connection, or a new one."""
        try:
            connection = idle.pop()
            is_old = self._clock.now() - connection.idle_since > MAX_IDLE
            if not is_old and not (connection.sock and native_threads.has_ended(connection.sock)):
                return connection
            self._close(connection)
        except IndexError:
            pass  # There is no idle connection.
        options = self._url.options
        session = requests.Session()
        # Proxy variables and .netrc are meant for the web. Reading .netrc takes as long as a
        # request.
        session.trust_env = False
        session.verify = options.get("ca", True)
        if "cert" in options:
            session.cert = (options["cert"], options.get("key", options["cert"]))
        connection = _Connection(session)
        self._sweep.opened(connection)
        return connection


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Connection:
    """A session of requests with one connection.

    Attributes:
        session: The session.
        sock: The socket, after the first reply.
        idle_since: The end of the last use, on the clock.
    """

    session: Any
    sock: Any = None
    idle_since: float = 0.0


class _Failure(Exception):
    """A request that failed.

    Attributes:
        was_sent: Whether the request may have been carried out.
        code: The status code of gRPC; None if no member has answered.
    """

    def __init__(self, message: str, *, was_sent: bool, code: int | None = None) -> None:
        super().__init__(message)
        self.was_sent = was_sent
        self.code = code

    @property
    def is_refusal(self) -> bool:
        return self.code is not None and self.code not in _UNCERTAIN


def _failure(text: str) -> _Failure:
    try:
        reply = json.loads(text)
        # Not "error": etcd 3.6 has no such field any more.
        message, code = str(reply["message"]), int(reply["code"])
    except (ValueError, TypeError, KeyError):
        return _Failure(text[:200], was_sent=True)  # A proxy's page, for example.
    if any(sign in message for sign in _BAD_TOKEN):
        code = _UNAUTHENTICATED
    elif _OVERLOADED in message:
        code = _UNAVAILABLE
    return _Failure(message, was_sent=True, code=code)
