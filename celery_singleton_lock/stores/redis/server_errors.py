"""What the error replies of a Redis or Valkey server mean, whichever version sends them.

redis-py has a class for most error codes. Where a server has no code, or hides it in another text,
only the words tell. `tests/unit/test_server_errors.py` has a table with the words of each version.
"""

from __future__ import annotations

import re
from typing import Final

import redis

# Redis 6.2 puts the error of a command of a script into a text of its own, and its code with it:
# "Error running script (call to f_...): @user_script:9: @user_script: 9: -READONLY You can't ...".
# Newer servers send the error itself, and name the script behind it.
_OF_SCRIPT: Final = re.compile(
    r"Error running script \(call to \w+\): @user_script:\s?\d+: (?:@user_script:\s?\d+: )?-?"
)
# A right that a command of a script lacks. It has no code. Redis 6.2 and 7.0; all newer servers.
_DENIED_IN_SCRIPT: Final = ("The user executing the script can't ", "ACL failure in script: ")
# Redis 6.0 and newer, Valkey. Without these words it is the key that may not be accessed.
_DENIED_COMMAND: Final = re.compile(r"no permissions to run the '([\w|-]+)' command")
_READ_ONLY: Final = "READONLY "
# CLUSTERDOWN and MASTERDOWN end with a failover. TRYAGAIN ends with the migration of a slot.
_TEMPORARY: Final = (redis.exceptions.ClusterDownError, redis.exceptions.TryAgainError)
# Other temporary errors: a script has blocked the server for longer than its busy-reply-threshold,
# too few replicas are connected, the server could not save its data, and a node of a cluster has
# too many clients (redis-py knows the words of other servers for that: a ConnectionError).
_TEMPORARY_STARTS: Final = ("BUSY ", "NOREPLICAS ", "MISCONF ", "max number of clients ")
# Replies to AUTH of a server that has no password: since Redis 6, and before.
_NO_PASSWORD: Final = ("without any password configured", "no password is set")
# Redis-compatible servers have another word for it.
_UNKNOWN_COMMAND: Final = ("unknown command", "unknown cmd")


def own_error(reply: redis.exceptions.ResponseError) -> redis.exceptions.ResponseError:
    """The error that a command met, also where it met it in a script."""
    text = _OF_SCRIPT.sub("", str(reply), count=1)
    if text.startswith(_READ_ONLY):
        return redis.exceptions.ReadOnlyError(text.removeprefix(_READ_ONLY))
    if text.startswith(_DENIED_IN_SCRIPT):
        return redis.exceptions.NoPermissionError(text)
    return reply if text == str(reply) else redis.exceptions.ResponseError(text)


def is_temporary(error: BaseException) -> bool:
    """Whether the same request may succeed later, without a change of it or of a setting."""
    return isinstance(error, _TEMPORARY) or str(error).startswith(_TEMPORARY_STARTS)


def is_denied(error: BaseException | None) -> bool:
    """Whether the user lacks a right: to a command or to a key, in a script or outside."""
    return isinstance(error, redis.exceptions.NoPermissionError)


def denied_by(error: BaseException | None) -> str:
    """The command that the user may not use; empty: the right to a key is missing."""
    found = _DENIED_COMMAND.search(str(error))
    return found[1].upper() if found else ""


def is_unknown_command(error: BaseException | None) -> bool:
    """Whether the server has no such command."""
    return str(error).startswith(_UNKNOWN_COMMAND)


def is_without_password(error: Exception) -> bool:
    """Whether a login failed because the server demands none."""
    return any(words in str(error) for words in _NO_PASSWORD)


def is_not_clustered(error: Exception) -> bool:
    """Whether a command of Redis Cluster met a server that is no node of one."""
    return "cluster support disabled" in str(error)


def is_wrong_type(reply: object) -> bool:
    """Whether a reply is the refusal to read a key of another type."""
    return isinstance(reply, Exception) and str(reply).startswith("WRONGTYPE ")
