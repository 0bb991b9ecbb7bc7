"""What each server says of an error, as seen on the versions named; and what we take it for.

Seen on Redis 6.2.5, 7.0.15, 8.0.2 and 8.2.3, and on Valkey 8.1.1, 9.0.0 and 9.1.2. The tests of
`contract/test_redis_refusals.py` provoke most of them on the server that the tests run with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import redis
import redis.cluster
from redis.connection import DefaultParser

from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.redis import server_errors
from celery_singleton_lock.stores.redis.connection import Connections
from celery_singleton_lock.stores.remedies import fault_of

#: What the connections of the package parse with: redis-py 5 knows the errors of a Cluster only so.
Parser: Any = getattr(redis.cluster, "ClusterParser", DefaultParser)

_IN_6_2 = "ERR Error running script (call to f_1c): @user_script:7: "
_IN_7_0 = " script: 1c, on @user_script:7."
_IN_9_1 = " script: on @user_script:7."


class Row(NamedTuple):
    """A reply.

    Attributes:
        servers: Which servers send it.
        text: The reply without the leading minus.
        means: The check of `server_errors` that must hold, or the subject of the fault.
        is_temporary: Whether it ends by itself or by a failover.
    """

    servers: str
    text: str
    means: Callable[[Any], bool] | str
    is_temporary: bool = False


def is_read_only(error: Exception) -> bool:
    return isinstance(error, redis.exceptions.ReadOnlyError)


_DENIED = "no permissions to run the 'hget' command"
_KEY = "No permissions to access a key"
_OLD = "The user executing the script can't "
_OLD_COMMAND = _OLD + "run this command or subcommand"
_OLD_KEY = _OLD + "access at least one of the keys mentioned in the command arguments"
_REPLICA = "READONLY You can't write against a read only replica."
_FULL = "OOM command not allowed when used memory > 'maxmemory'."
_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
_DISK = (
    "MISCONF {} is configured to save RDB snapshots, but it's currently unable to persist to disk. "
    "Commands that may modify the data set are disabled"
)
_LOADING = "LOADING {} is loading the dataset in memory"
_BUSY = "BUSY {} is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE."

denied, unknown = server_errors.is_denied, server_errors.is_unknown_command
ROWS = [
    # A missing right: to a command and to a key.
    Row("Redis 6.2", f"NOPERM this user has {_DENIED} or its subcommand", denied),
    Row("Redis 7.0", f"NOPERM this user has {_DENIED}", denied),
    Row("Redis 8, Valkey 8, 9", f"NOPERM User locks has {_DENIED}", denied),
    Row("Redis 6.2, 7.0", f"NOPERM this user has {_KEY.lower()[3:]}", denied),
    Row("Redis 8, Valkey 8, 9", f"NOPERM {_KEY}", denied),
    # The same in a script.
    Row("Redis 6.2", f"{_IN_6_2}@user_script: 7: {_OLD_COMMAND}", denied),
    Row("Redis 6.2", f"{_IN_6_2}@user_script: 7: {_OLD_KEY}", denied),
    Row("Redis 7.0", f"ERR {_OLD_COMMAND}{_IN_7_0}", denied),
    Row("Redis 7.0", f"ERR {_OLD_KEY}{_IN_7_0}", denied),
    Row("Redis 8, Valkey 8", f"ERR ACL failure in script: User u has {_DENIED}{_IN_7_0}", denied),
    Row("Redis 8, Valkey 8", f"ERR ACL failure in script: {_KEY}{_IN_7_0}", denied),
    Row("Valkey 9.1", f"ERR ACL failure in script: User u has {_DENIED}{_IN_9_1}", denied),
    Row("Valkey 9.1", f"ERR ACL failure in script: {_KEY}{_IN_9_1}", denied),
    # A master that was demoted.
    Row("Redis 6.2", f"{_IN_6_2}@user_script: 7: -{_REPLICA}", is_read_only, True),
    Row("Redis 7.0, 8, Valkey 8", f"{_REPLICA}{_IN_7_0}", is_read_only, True),
    Row("Valkey 9.1", f"{_REPLICA}{_IN_9_1}", is_read_only, True),
    Row("all", _REPLICA, "replica", True),
    # A replica that has lost its master; a cluster in a failover; a slot that moves.
    Row(
        "all",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        server_errors.is_temporary,
        True,
    ),
    Row("all", "CLUSTERDOWN The cluster is down", server_errors.is_temporary, True),
    Row(
        "all",
        "TRYAGAIN Multiple keys request during rehashing of slot",
        server_errors.is_temporary,
        True,
    ),
    # No memory.
    Row("Redis 6.2", f"{_IN_6_2}@user_script: 7: -{_FULL}", "memory"),
    Row("Redis 7.0, 8, Valkey 8", f"{_FULL}{_IN_7_0}", "memory"),
    Row("Valkey 9.1", f"{_FULL}{_IN_9_1}", "memory"),
    # No disk, too few replicas, a script that does not end, a server that starts.
    Row("Redis 6.2", f"{_IN_6_2}@user_script: 7: -{_DISK.format('Redis')}", "disk", True),
    Row("Redis 7.0, 8", f"{_DISK.format('Redis')}{_IN_7_0}", "disk", True),
    Row("Valkey 8, 9", f"{_DISK.format('Valkey')}{_IN_7_0}", "disk", True),
    Row("all", "MISCONF Errors writing to the AOF file: No space left", "disk", True),
    Row(
        "Redis 7.0, 8, Valkey 8",
        f"NOREPLICAS Not enough good replicas to write.{_IN_7_0}",
        "replicas",
        True,
    ),
    Row("Redis", _BUSY.format("Redis"), "script", True),
    Row("Valkey 8, 9", _BUSY.format("Valkey"), "script", True),
    Row("Redis", _LOADING.format("Redis"), "loading", True),
    Row("Valkey 8, 9", _LOADING.format("Valkey"), "loading", True),
    # A connection that is refused.
    Row("all", "ERR max number of clients reached", "clients", True),
    Row(
        "Redis 7.0, 8, Valkey, in a cluster",
        "ERR max number of clients + cluster connections reached",
        "clients",
        True,
    ),
    Row("all", "WRONGPASS invalid username-password pair or user is disabled.", "login"),
    Row("all", "NOAUTH Authentication required.", "login"),
    Row("all", "ERR DB index is out of range", "database"),
    Row(
        "all",
        "ERR AUTH <password> called without any password configured for the default user. Are you "
        "sure your configuration is correct?",
        server_errors.is_without_password,
    ),
    # A wrong type, where other software has written under our prefix.
    Row("all", _TYPE, server_errors.is_wrong_type),
    Row("Redis 6.2", f"{_IN_6_2}{_TYPE}", server_errors.is_wrong_type),
    Row("Redis 7.0, 8, Valkey 8", f"{_TYPE}{_IN_7_0}", server_errors.is_wrong_type),
    # What the server does not have.
    Row("Redis 6.2", "ERR unknown command `BLPOP`, with args beginning with: `x`, ", unknown),
    Row(
        "Redis 7.0, 8, Valkey",
        "ERR unknown command 'BLPOP', with args beginning with: 'x' ",
        unknown,
    ),
    Row("all", "ERR This instance has cluster support disabled", server_errors.is_not_clustered),
]


@pytest.fixture(scope="module")
def connections() -> Connections:
    return Connections("redis://127.0.0.1:1")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.servers}: {row.text[:60]}")
def test_what_a_server_says_is_taken_for_what_it_means(row: Row, connections: Connections) -> None:
    reply = Parser.parse_error(row.text)
    if isinstance(reply, redis.exceptions.ResponseError):
        reply = server_errors.own_error(reply)
    failure = connections.failure(reply)
    if isinstance(row.means, str):
        assert fault_of("redis", failure).subject == row.means
    else:
        assert row.means(reply)
    assert isinstance(failure, StoreUnavailable) is row.is_temporary, failure


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.means is denied], ids=lambda r: r.text[:70]
)
def test_a_missing_right_sends_its_reader_to_the_doctor(row: Row, connections: Connections) -> None:
    reply = Parser.parse_error(row.text)
    text = str(connections.failure(server_errors.own_error(reply)))
    assert "doctor` says which rights are missing" in text
