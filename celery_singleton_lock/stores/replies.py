"""Replies of a Redis server in redis-py's words: errors by their class, among the others."""

from __future__ import annotations

import ssl
from typing import Any, Final

import redis

from celery_singleton_lock.stores.resp import ErrorReply

__all__ = ["read", "receive", "told"]

_BYTES: Final = 1 << 16


def read(connection: Any) -> Any:
    """The next reply; an error reply is returned, a broken stream raised."""
    try:
        return connection.read_response()
    except redis.exceptions.ConnectionError:
        raise  # a ResponseError's cousin in name only: the stream is broken
    except redis.exceptions.ResponseError as exc:
        return exc  # one reply among others; the connection is in step


def told(connection: Any, reply: Any) -> Any:
    """``reply``; an error as redis-py's exception, which tells one from the other by its class."""
    if not isinstance(reply, ErrorReply):
        return reply
    error = connection._parser.parse_error(str(reply))
    if isinstance(error, redis.exceptions.ConnectionError):
        raise error  # LOADING, NOAUTH, too many clients: not about one command
    return error


def receive(connection: Any, *, wait: bool) -> bytes:
    """What comes next on ``connection``, or what has come already.

    Not redis-py's reading, which costs more than the system call; nor its can_read(), which takes
    what there is into a buffer of its own.
    """
    sock = connection._sock
    try:
        if wait:
            data: bytes = sock.recv(_BYTES)
        else:
            sock.settimeout(0)
            try:
                data = sock.recv(_BYTES)
            finally:
                sock.settimeout(connection.socket_timeout)
    except (BlockingIOError, ssl.SSLWantReadError) as exc:
        raise redis.exceptions.TimeoutError("no reply in time") from exc
    if not data:
        raise redis.exceptions.ConnectionError("the server closed the connection")
    return data
