"""Replies are read with redis-py: error replies, what has arrived, a connection that has ended."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import count
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import redis

from celery_singleton_lock.core.native_threads import socket_owner
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.redis.connection import Connection, Connections, read
from celery_singleton_lock.stores.redis.scripts import pack

TIMEOUT = 20.0
Connected = tuple[Connection, socket.socket]


@pytest.fixture
def connected() -> Iterator[Connected]:
    """A connection with a PING under way, and the server's end of its socket."""
    connections = Connections("redis://127.0.0.1")
    client = connections.new(TIMEOUT)
    ours, theirs = socket.socketpair()
    ours.settimeout(TIMEOUT)
    client._sock = ours
    client._parser.on_connect(client)
    connection = Connection(connections, client, connections._idle[socket_owner(), TIMEOUT])
    with ours, theirs, closing(connection):
        connection.send(pack(("PING",)), 1)
        yield connection, theirs


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("NOSCRIPT No matching script.", redis.exceptions.NoScriptError),
        ("READONLY You can't write against a read only replica.", redis.exceptions.ReadOnlyError),
        ("MOVED 42 127.0.0.1:7000", redis.exceptions.MovedError),
        ("CLUSTERDOWN Hash slot not served", redis.exceptions.ClusterDownError),
        ("ERR something else", redis.exceptions.ResponseError),
    ],
)
def test_an_error_about_one_command_is_a_reply_among_others(
    connected: Connected, text: str, error: type[Exception]
) -> None:
    connection, theirs = connected
    connection.send(pack(("PING",)), 1)
    theirs.sendall(f"-{text}\r\n$7\r\ngranted\r\n".encode())
    first, second = connection.replies()
    assert isinstance(first, error)
    assert second == b"granted"


@pytest.mark.parametrize(
    "text",
    [
        "LOADING Redis is loading the dataset in memory",
        "NOAUTH Authentication required.",
        "ERR max number of clients reached",
    ],
)
def test_an_error_about_the_whole_connection_is_raised(connected: Connected, text: str) -> None:
    connection, theirs = connected
    theirs.sendall(f"-{text}\r\n".encode())
    with pytest.raises(redis.exceptions.ConnectionError):
        read(connection._client)


@pytest.mark.parametrize("text", ["HTTP/1.1 400 Bad\r\n", ":x\r\n", "$x\r\n"])
def test_a_server_that_is_no_redis_is_unavailable(connected: Connected, text: str) -> None:
    connection, theirs = connected
    theirs.sendall(text.encode())
    with pytest.raises(StoreUnavailable):
        connection.replies()


def test_what_has_arrived_is_taken_without_waiting_and_later_reads_wait_again(
    connected: Connected,
) -> None:
    connection, theirs = connected
    assert connection.arrived() == []
    theirs.sendall(b"*2\r\n$1\r\na\r\n")
    assert connection.arrived() == [], "a part of a reply"
    theirs.sendall(b":7\r\n")
    assert connection.arrived() == [[b"a", 7]]
    connection.send(pack(("PING",)), 1)
    theirs.sendall(b"+AGAIN\r\n")
    assert connection.replies() == [b"AGAIN"]
    assert connection._client._sock.gettimeout() == TIMEOUT


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_reply_is_whole_however_it_is_cut(connected: Connected, size: int) -> None:
    connection, theirs = connected
    data = b"*5\r\n+OK\r\n:-1\r\n$-1\r\n$4\r\na\r\nb\r\n*2\r\n*0\r\n$0\r\n\r\n"
    for start in range(0, len(data), size):
        assert connection.arrived() == []
        theirs.sendall(data[start : start + size])
    assert connection.arrived() == [[b"OK", -1, None, b"a\r\nb", [[], b""]]]


def test_a_connection_that_the_server_closed_is_unavailable(connected: Connected) -> None:
    connection, theirs = connected
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(StoreUnavailable, match=r"[Cc]losed"):
        connection.replies()


@pytest.mark.parametrize("step", range(150))
def test_an_interrupted_read_leaves_no_release_to_take_the_next_reply(
    connected: Connected, step: int
) -> None:
    connection, theirs = connected
    acknowledged: list[object] = []
    pending: Any = SimpleNamespace(acknowledge=acknowledged.append, lose=list)
    connection.pending = pending
    theirs.sendall(b"+released\r\n+PONG\r\n")
    steps = count()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not Connection.replies.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(steps) == step:
            raise ZeroDivisionError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(ZeroDivisionError):
            connection.replies()
    finally:
        sys.settrace(before)
    connection.end()
    assert connection._unread == -1 or (connection.pending is None and acknowledged)
