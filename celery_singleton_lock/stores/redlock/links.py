"""Links to the nodes: sockets that never block, so that all nodes are asked at once.

Promises
    Whatever a node does (refuses, accepts and says nothing, drops every packet), no other node's
    reply waits for it: connecting, TLS and login are steps of the link, none of them a call that
    blocks. Replies come in the order of the commands, so one that nobody waits for any more is
    read and dropped when it comes: a slow node keeps its link, and what is sent to it later arrives
    later.

Does not promise
    To resolve names without blocking: Python's resolver can't. Addresses are kept for 30 s, and so
    is the news that there is none; name the nodes by address, or in the hosts file.

States of a link::

    closed --send--> connecting --> (TLS) --> open, asked --whole reply--> open
      ^                  |            |          |
      +------------------+------------+----------+-- error, or silent for too long: whoever waits
                                                     hears StoreUnavailable; but once per command,
                                                     what broke an idle link is met by a fresh one

A link belongs to the call that uses it; an exception in the midst closes it (see redlock.py).
"""

from __future__ import annotations

import errno
import socket
import ssl
import struct
from collections import deque
from typing import Any, Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.connection import MAX_IDLE
from celery_singleton_lock.stores.redis.exchange import Exchange
from celery_singleton_lock.stores.redis.resp import ErrorReply, ProtocolError, Replies
from celery_singleton_lock.stores.redlock.url import Node

__all__ = ["Link"]

# A link that owes a reply for longer is given up: no timeout of a call is longer.
_MAX_SILENCE: Final = 2.0
_MAX_UNSENT_BYTES: Final = 1 << 20
_RECEIVE_BYTES: Final = 1 << 16
_ADDRESSES_KEPT: Final = 30.0
_UNDER_WAY: Final = frozenset({errno.EINPROGRESS, errno.EALREADY, errno.EWOULDBLOCK, errno.EINTR})
_WOULD_BLOCK: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_NO_SCRIPT: Final = "NOSCRIPT"


class Link:
    """To one node; connects when it is needed."""

    def __init__(self, node: Node, clock: Clock) -> None:
        self.node = node
        #: When the server there was started, at the latest (on the clock); None: it doesn't tell.
        self.started_at: float | None = None
        #: The server's name for this run of it; empty: it doesn't tell.
        self.run_id = ""
        self._clock = clock
        self._resolved: list[tuple[Any, ...]] = []
        self._resolved_at = float("-inf")
        self._addresses: list[tuple[Any, ...]] = []
        self._asked: deque[Exchange] = deque()
        self._reset()

    def send(self, exchange: Exchange) -> None:
        """Send what can be sent now; the rest goes with :meth:`pump`. Errors end the exchange."""
        if self._asked:
            self.pump()  # what has come, and nobody has read, is no silence
        elif self._clock.now() - self._heard_at > MAX_IDLE:
            self.close()
        self.give_up_if_silent()
        self.taught.add(exchange.sha)
        self._put(exchange)
        self.pump()

    def pump(self) -> None:
        """Do whatever can be done without waiting."""
        try:
            if self._socket is not None and (self._open or self._connect()):
                self._flush()
                self._receive()
        except (OSError, ProtocolError) as exc:
            self._break(exc)

    @property
    def owes(self) -> bool:
        """Whether replies have not come yet."""
        return bool(self._asked) and self._asked[-1] is not self._greeting

    def give_up_if_silent(self) -> None:
        """Close a link that has owed a reply for too long; the next command opens a new one."""
        waited = self._clock.now() - self._heard_at if self._asked else 0.0
        if waited > _MAX_SILENCE or len(self._unsent) > _MAX_UNSENT_BYTES:
            self.give_up(f"silent for {waited:.1f} s")

    def give_up(self, why: str) -> None:
        """Close it though it owes replies; none will come.

        One that was still connecting goes on with the next address of its node, but without what it
        was asked: the same tasks may ask another link meanwhile, and the order would be lost.
        """
        if not self._open:
            failure = StoreUnavailable(f"{self.node} doesn't answer: {why}")
            while self.owes:
                self._asked.pop().error = failure
        if self._socket is not None:
            # Reset, not closed: what is on its way must not arrive after what the next link sends.
            linger = struct.pack("ii", 1, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._break(TimeoutError(why))

    def interest(self) -> tuple[Any, bool]:
        """The socket, and whether it is to be waited for until it takes bytes."""
        return self._socket, self._wants_write or bool(self._open and self._unsent)

    def close(self) -> None:
        """End the connection; whoever waits for a reply hears so."""
        for exchange in self._asked:
            exchange.error = StoreUnavailable(f"the link to {self.node} was closed")
        self._asked.clear()
        if self._socket is not None:
            self._socket.close()
        self._reset()

    def _reset(self) -> None:
        # Sockets as ssl or gevent make them: only partly typed.
        self._socket: Any = None
        self._open = False
        self._wants_write = False
        self._unsent = b""
        self._replies = Replies()
        self._greeting: Exchange | None = None
        self._served = False
        #: Scripts that were sent over this connection.
        self.taught: set[str] = set()
        self._heard_at = self._clock.now()

    def _put(self, exchange: Exchange) -> None:
        if not self._asked:
            self._heard_at = self._clock.now()
        self._asked.append(exchange)
        if self._socket is not None:
            self._unsent += exchange.packed
            return
        self._addresses = list(self._resolve())
        self._dial(OSError("no address"))

    def _resolve(self) -> list[tuple[Any, ...]]:
        now = self._clock.now()
        if now - self._resolved_at > _ADDRESSES_KEPT:
            self._resolved_at = now
            try:
                self._resolved = socket.getaddrinfo(
                    self.node.host, self.node.port, type=socket.SOCK_STREAM
                )
            except OSError:
                pass  # the last known one may still do
        return self._resolved

    def _dial(self, error: Exception) -> None:
        """Begin to connect to the next address; with none left, ``error`` is the news."""
        while self._addresses:
            family, kind, protocol, _, address = self._addresses.pop(0)
            try:
                self._socket = socket.socket(family, kind, protocol)
                self._socket.setblocking(False)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                status = self._socket.connect_ex(address)
            except OSError as exc:
                error = exc
                continue
            if status == 0 or status in _UNDER_WAY:
                self._wants_write = True
                self._greet()
                return
            error = OSError(status, errno.errorcode.get(status, "connect failed"))
        self._fail(StoreUnavailable(f"{self.node} doesn't answer: {error}"))

    def _greet(self) -> None:
        """Put login, database and a question for the server's age before what is asked."""
        node, commands = self.node, []
        if node.password:
            user = (node.username,) if node.username else ()
            commands.append(("AUTH", *user, node.password))
        if node.db:
            commands.append(("SELECT", node.db))
        commands.append(("INFO", "server"))
        self._greeting = Exchange(commands)
        self._asked.appendleft(self._greeting)
        self._unsent = b"".join(exchange.packed for exchange in self._asked)

    def _connect(self) -> bool:
        """Go on with connecting; whether it is done."""
        if not isinstance(self._socket, ssl.SSLSocket):
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, errno.errorcode.get(error, "connect failed"))
            try:
                self._socket.getpeername()
            except OSError:
                return False  # still under way
            if self.node.tls is not None:
                self._socket = self.node.tls.wrap_socket(
                    self._socket,
                    server_hostname=self.node.host,
                    do_handshake_on_connect=False,
                )
        if isinstance(self._socket, ssl.SSLSocket):
            try:
                self._socket.do_handshake()
            except ssl.SSLWantReadError:
                self._wants_write = False
                return False
            except ssl.SSLWantWriteError:
                self._wants_write = True
                return False
        self._open, self._wants_write = True, False
        return True

    def _flush(self) -> None:
        if self._unsent:
            for exchange in self._asked:
                exchange.sent = True
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except _WOULD_BLOCK:
            pass

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except _WOULD_BLOCK:
                return
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._heard_at = self._clock.now()
            for reply in self._replies.feed(data):
                self._take(reply)
            if len(data) < _RECEIVE_BYTES and self.node.tls is None:
                return

    def _take(self, reply: Any) -> None:
        if self._socket is None:
            return  # the reply before this one has ended the link
        if not self._asked:
            raise ProtocolError(f"{reply!r} is the reply to nothing")
        exchange = self._asked[0]
        exchange.replies.append(reply)
        if len(exchange.replies) < exchange.count:
            return
        self._asked.popleft()
        if exchange is self._greeting:
            self._read_greeting(exchange.replies)
            return
        self._served = True
        if any(isinstance(r, ErrorReply) and r.startswith(_NO_SCRIPT) for r in exchange.replies):
            self.taught.discard(exchange.sha)

    def _read_greeting(self, replies: list[Any]) -> None:
        *setup, info = replies
        refusals = [str(reply) for reply in setup if isinstance(reply, ErrorReply)]
        if refusals:
            self._fail(StoreError(f"{self.node} refuses the login: {refusals[0]}"))
            return
        if isinstance(info, ErrorReply):
            if info.startswith("NOAUTH"):
                self._fail(StoreError(f"{self.node} refuses the login: {info}"))
            return  # an ACL denies INFO: then nobody knows its age
        lines = info.decode(errors="replace").splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        self.run_id = fields.get("run_id", "")
        if fields.get("uptime_in_seconds", "").isdecimal():
            # Both ends are whole seconds to the server: it may be up to 1 s younger than it says.
            uptime = max(0, int(fields["uptime_in_seconds"]) - 1)
            self.started_at = self._clock.now() - uptime

    def _break(self, error: Exception) -> None:
        asked = deque(exchange for exchange in self._asked if exchange is not self._greeting)
        was_open, served, self._asked = self._open, self._served, deque()
        self.close()
        if not was_open and self._addresses:
            self._asked = asked
            self._dial(error)
            return
        failure = StoreUnavailable(f"{self.node} doesn't answer: {error}")
        for exchange in asked:
            if exchange.awaited and served and not exchange.sent_again:
                # An idle link that a restart of the server has cut says so only when it is used.
                exchange.sent_again = True
                exchange.replies.clear()
                self._put(exchange)
            else:
                exchange.error = failure

    def _fail(self, failure: StoreError) -> None:
        asked, self._asked = self._asked, deque()
        for exchange in asked:
            exchange.error = failure
        self.close()
