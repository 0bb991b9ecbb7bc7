"""Replies of a Redis server in redis-py's words, and its refusals in the library's own."""

from __future__ import annotations

import ssl
from typing import Any, Final

import redis

from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.resp import ErrorReply

__all__ = ["ScriptForgotten", "checked", "read", "receive", "told"]

_BYTES: Final = 1 << 16
# CLUSTERDOWN and MASTERDOWN end with a failover, TRYAGAIN with the migration of a slot.
_PASSING: Final = (redis.exceptions.ClusterDownError, redis.exceptions.TryAgainError)

_OF_CLUSTERS: Final[dict[str, type[redis.exceptions.ResponseError]]] = {
    "ASK": redis.exceptions.AskError,
    "CLUSTERDOWN": redis.exceptions.ClusterDownError,
    "CROSSSLOT": redis.exceptions.ClusterCrossSlotError,
    "MASTERDOWN": redis.exceptions.MasterDownError,
    "MOVED": redis.exceptions.MovedError,
    "TRYAGAIN": redis.exceptions.TryAgainError,
}


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
    if type(error) is redis.exceptions.ResponseError:
        # redis-py 5 knows these on connections of its cluster client alone.
        word, _, rest = reply.partition(" ")
        error = _OF_CLUSTERS[word](rest) if word in _OF_CLUSTERS else error
    if isinstance(error, redis.exceptions.ConnectionError):
        raise error  # LOADING, NOAUTH, too many clients: not about one command
    return error


def receive(connection: Any, within: float | None = None) -> bytes:
    """What comes next on ``connection``.

    Args:
        connection: redis-py's.
        within: Seconds to wait; 0: what has come already; None: as long as the connection does.

    Not redis-py's reading, which costs more than the system call; nor its can_read(), which takes
    what there is into a buffer of its own.
    """
    sock = connection._sock
    try:
        if within is None:
            data: bytes = sock.recv(_BYTES)
        else:
            sock.settimeout(within)
            try:
                data = sock.recv(_BYTES)
            finally:
                sock.settimeout(connection.socket_timeout)
    except (BlockingIOError, ssl.SSLWantReadError) as exc:
        raise redis.exceptions.TimeoutError("no reply in time") from exc
    if not data:
        raise redis.exceptions.ConnectionError("the server closed the connection")
    return data


class ScriptForgotten(Exception):
    """NOSCRIPT: the server was restarted, or its scripts were flushed."""


def checked(replies: list[Any]) -> list[Any]:
    """``replies``, unless one of them is an error: the first is raised.

    Raises:
        ScriptForgotten: The server knows no such script.
        StoreUnavailable, StoreError: A refusal, which passes by itself or doesn't.
    """
    for reply in replies:
        if isinstance(reply, redis.exceptions.ResponseError):
            if isinstance(reply, redis.exceptions.NoScriptError):
                raise ScriptForgotten
            raise _mapped(reply) from reply
    return replies


def _mapped(error: redis.exceptions.ResponseError) -> StoreError:
    # None of these is a grant. What passes by itself is worth another try at once.
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return StoreUnavailable(f"the store is a replica now: {error}")
    if isinstance(error, _PASSING) or str(error).startswith("NOREPLICAS"):
        return StoreUnavailable(f"the store can't answer now: {error}")
    if isinstance(error, redis.exceptions.AskError):  # and MovedError, its subclass
        return StoreError(
            f"the store is one node of a Redis Cluster ({error}): name it redis+cluster://"
        )
    # A wrong type or a missing right doesn't pass.
    return StoreError(f"the store refuses: {error}")
