"""Round trips, counted where they happen: at the sockets of this process.

Whatever client it is, it sends and receives by Python's sockets. While `Wire` listens, each send
and each receive to or from one of the servers is noted with its thread and its connection.

requests
    How often something was sent on a connection that had nothing under way: what the servers get.
round trips
    How many of those had to wait for an earlier one. A thread that sends after it has received from
    a socket that blocks has waited; so has what goes to a server that has answered before. Five
    servers that are asked at once are five requests, and one round trip. Of clients with threads
    this is a lower bound.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["Count", "Happening", "Wire", "count"]

_SENDING: Final = ("send", "sendall")
_RECEIVING: Final = ("recv", "recv_into")


@dataclass(frozen=True, slots=True)
class Happening:
    """Something went over a connection."""

    sent: bool  # else it was received
    thread: int
    connection: int
    server: int
    blocking: bool = True  # whether the socket waits


@dataclass(frozen=True, slots=True)
class Count:
    """What one operation cost."""

    requests: int
    round_trips: int


def count(happenings: Sequence[Happening]) -> Count:
    """What happened, in this order, as numbers."""
    by_connection = _round_trips([(one.connection, one.sent) for one in happenings])
    by_thread = _round_trips([(one.thread, one.sent) for one in happenings if one.blocking])
    server_of = {one.connection: one.server for one in happenings}
    by_server: Counter[int] = Counter()
    for connection, round_trips in by_connection.items():
        by_server[server_of[connection]] += round_trips
    longest = max([*by_thread.values(), *by_server.values()], default=0)
    return Count(sum(by_connection.values()), longest)


def _round_trips(events: Sequence[tuple[int, bool]]) -> Counter[int]:
    """How often each began to send, at first or after it had received."""
    round_trips: Counter[int] = Counter()
    sends: dict[int, bool] = {}
    for source, sent in events:
        if sent and not sends.get(source, False):
            round_trips[source] += 1
        sends[source] = sent
    return round_trips


@dataclass(slots=True)
class Wire:
    """Notes what goes to and comes from some servers.

    Args:
        servers: Their ports on this machine.
    """

    servers: Collection[int]
    happenings: list[Happening] = field(default_factory=list)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Slows every socket of the process down: nothing is timed meanwhile."""
        names = {name: getattr(socket.socket, name) for name in (*_SENDING, *_RECEIVING)}
        for name, original in names.items():
            setattr(socket.socket, name, self._noting(original, name in _SENDING))
        try:
            yield
        finally:
            for name, original in names.items():
                if name in vars(socket.socket):
                    delattr(socket.socket, name)
                if getattr(socket.socket, name) is not original:
                    setattr(socket.socket, name, original)

    def take(self) -> Count:
        """What has happened since the last time."""
        noted, self.happenings[:] = list(self.happenings), []
        return count(noted)

    def _noting(self, original: Callable[..., Any], sent: bool) -> Callable[..., Any]:
        def noting(sock: socket.socket, *args: Any, **options: Any) -> Any:
            server = _port_of(sock)
            if sent:
                # Before it is sent: the reply may come on another thread.
                self._note(sock, server, sent=True)
                return original(sock, *args, **options)
            received = original(sock, *args, **options)
            self._note(sock, server, sent=False)
            return received

        return noting

    def _note(self, sock: socket.socket, server: int, *, sent: bool) -> None:
        if server in self.servers:
            blocking = sock.gettimeout() != 0
            thread = threading.get_ident()
            self.happenings.append(Happening(sent, thread, id(sock), server, blocking))


def _port_of(sock: socket.socket) -> int:
    """The port of the server at the other end; 0: its kind is not counted."""
    try:
        address = sock.getpeername()
    except OSError:
        return 0
    return address[1] if isinstance(address, tuple) else 0
