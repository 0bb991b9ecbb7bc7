"""What a Redis server says, in redis-py's words; and taking what has come, without waiting."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import redis
from redis.connection import Connection

from celery_singleton_lock.stores.redis.replies import receive, told
from celery_singleton_lock.stores.redis.resp import ErrorReply


@pytest.fixture
def connection() -> Connection:
    return Connection(socket_timeout=20, protocol=2)


@pytest.fixture
def connected(connection: Connection) -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(20)
        connection._sock = ours
        yield connection, theirs
        connection._sock = None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("NOSCRIPT No matching script.", redis.exceptions.NoScriptError),
        ("READONLY You can't write against a read only replica.", redis.exceptions.ReadOnlyError),
        ("MOVED 42 127.0.0.1:7000", redis.exceptions.MovedError),
        ("ERR something else", redis.exceptions.ResponseError),
    ],
)
def test_an_error_about_one_command_is_a_reply_among_others(
    connection: Connection, text: str, error: type[Exception]
) -> None:
    assert isinstance(told(connection, ErrorReply(text)), error)
    assert told(connection, b"granted") == b"granted"


@pytest.mark.parametrize(
    "text",
    [
        "LOADING Redis is loading the dataset in memory",
        "NOAUTH Authentication required.",
        "ERR max number of clients reached",
    ],
)
def test_an_error_about_the_whole_connection_is_raised(connection: Connection, text: str) -> None:
    with pytest.raises(redis.exceptions.ConnectionError):
        told(connection, ErrorReply(text))


def test_what_has_come_is_taken_without_waiting_and_later_reads_wait_again(
    connected: tuple[Connection, socket.socket],
) -> None:
    connection, theirs = connected
    with pytest.raises(redis.exceptions.TimeoutError, match="no reply in time"):
        receive(connection, within=0)
    theirs.sendall(b"+OK\r\n")
    assert receive(connection, within=0) == b"+OK\r\n"
    theirs.sendall(b"+AGAIN\r\n")
    assert receive(connection) == b"+AGAIN\r\n"
    assert connection._sock is not None
    assert connection._sock.gettimeout() == 20


def test_a_connection_that_the_server_closed_is_broken(
    connected: tuple[Connection, socket.socket],
) -> None:
    connection, theirs = connected
    theirs.close()
    with pytest.raises(redis.exceptions.ConnectionError, match="closed"):
        receive(connection)
