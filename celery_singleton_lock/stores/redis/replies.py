"""Reading of Redis replies, and mapping of error replies to this library's errors."""

from __future__ import annotations

from typing import Any, Final

import redis

from celery_singleton_lock.errors import StoreError, StoreUnavailable

# CLUSTERDOWN and MASTERDOWN end with a failover. TRYAGAIN ends with the migration of a slot.
_TEMPORARY: Final = (redis.exceptions.ClusterDownError, redis.exceptions.TryAgainError)

_OF_CLUSTERS: Final[dict[str, type[redis.exceptions.ResponseError]]] = {
    "ASK": redis.exceptions.AskError,
    "CLUSTERDOWN": redis.exceptions.ClusterDownError,
    "CROSSSLOT": redis.exceptions.ClusterCrossSlotError,
    "MASTERDOWN": redis.exceptions.MasterDownError,
    "MOVED": redis.exceptions.MovedError,
    "TRYAGAIN": redis.exceptions.TryAgainError,
}


def read(client: Any) -> Any:
    """The next reply on a connection of redis-py. An error reply is returned.

    Raises:
        RedisError, OSError, ValueError: The connection is broken, or the server refused it.
    """
    try:
        # The connection stays open: after a timeout the caller may wait for the rest of the reply.
        return client.read_response(disable_decoding=True, disconnect_on_error=False)
    except redis.exceptions.ResponseError as exc:
        return classified(exc)


def classified(error: redis.exceptions.ResponseError) -> redis.exceptions.ResponseError:
    """``error`` as an instance of redis-py's class for the first word of its message.

    redis-py 5 and 6 recognize the errors of a cluster only on connections of the cluster client.
    """
    if type(error) is redis.exceptions.ResponseError:
        word, _, rest = str(error).partition(" ")
        if word in _OF_CLUSTERS:
            return _OF_CLUSTERS[word](rest)
    return error


class ScriptForgotten(Exception):
    """NOSCRIPT: the server was restarted, or its scripts were flushed."""


def checked(replies: list[Any]) -> list[Any]:
    """Raise the first error reply; return ``replies`` if there is none.

    Raises:
        ScriptForgotten: The server does not have the script.
        StoreUnavailable: The error is temporary, such as during a failover.
        StoreError: Any other error.
    """
    for reply in replies:
        if isinstance(reply, redis.exceptions.ResponseError):
            if isinstance(reply, redis.exceptions.NoScriptError):
                raise ScriptForgotten
            raise _mapped(reply) from reply
    return replies


def _mapped(error: redis.exceptions.ResponseError) -> StoreError:
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return StoreUnavailable(f"the store is a replica now: {error}")
    if isinstance(error, _TEMPORARY) or str(error).startswith("NOREPLICAS"):
        return StoreUnavailable(f"the store can't answer now: {error}")
    if isinstance(error, redis.exceptions.AskError):  # MovedError is a subclass
        return StoreError(
            f"the store is one node of a Redis Cluster ({error}): name it redis+cluster://"
        )
    # Permanent, such as a wrong type or a missing right.
    return StoreError(f"the store refuses: {error}")
