"""The locks that users would write or take instead, as redis-py's documentation shows them.

A task's key is known when the task runs, so a lock object is made per acquire; clients are made
once per process.
"""

from __future__ import annotations

import uuid
from typing import Any

from tests.benchmarks.contest import Contender, Role
from tests.benchmarks.ours import TTL

__all__ = ["raw_pair", "redis_py_lock"]

_COMPARE_AND_DELETE = """\
if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end
return 0
"""


def redis_py_lock(client: Any) -> Contender:
    """The lock of a client of one server, of Sentinel's master, or of a cluster."""

    def acquire(key: str) -> Any:
        lock = client.lock(f"lock:{key}", timeout=TTL, blocking=False)
        assert lock.acquire(), key
        return lock

    return Contender("redis-py Lock", Role.PEER, acquire, lambda lock: lock.release())


def raw_pair(client: Any) -> Contender:
    """Two calls of redis-py's, on its default pool: neither renewed, nor fenced, nor noticed."""
    sha = client.script_load(_COMPARE_AND_DELETE)

    def acquire(key: str) -> tuple[str, str]:
        token = uuid.uuid4().hex
        assert client.set(f"raw:{key}", token, nx=True, px=TTL * 1000)
        return f"raw:{key}", token

    return Contender(
        "SET NX PX + EVALSHA", Role.FLOOR, acquire, lambda held: client.evalsha(sha, 1, *held)
    )
