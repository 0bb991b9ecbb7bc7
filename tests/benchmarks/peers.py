"""The locks that users would take instead, each as its documentation shows it.

A task's key is known when the task runs, so a lock object is made per acquire; clients are made
once per process. kazoo's Lock asks as often if its object is kept: then it looks for its old node.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import pottery
import redis
import redis_lock
from etcd3gw.client import Etcd3Client
from kazoo.client import KazooClient
from redlock import Redlock

from tests.benchmarks.contest import Contender, Role
from tests.benchmarks.ours import TTL

__all__ = [
    "etcd3gw_lock",
    "kazoo_lock",
    "pottery_redlock",
    "python_redis_lock",
    "raw_pair",
    "redis_py_lock",
    "redlock_py",
]

_COMPARE_AND_DELETE = """\
if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end
return 0
"""


def redis_py_lock(client: Any, name: str = "redis-py Lock") -> Contender:
    """The lock of a client of one server, of Sentinel's master, or of a cluster."""
    return Contender(
        name,
        Role.PEER,
        _taken(lambda key: client.lock(f"lock:{key}", timeout=TTL, blocking=False)),
        lambda lock: lock.release(),
    )


def raw_pair(client: Any) -> Contender:
    """Two calls of redis-py's, on its default pool: neither renewed, nor fenced, nor noticed."""
    sha = client.script_load(_COMPARE_AND_DELETE)

    def acquire(key: str) -> tuple[str, str]:
        token = uuid.uuid4().hex
        assert client.set(f"raw:{key}", token, nx=True, px=TTL * 1000)
        return f"raw:{key}", token

    return Contender(
        "SET NX PX + EVALSHA",
        Role.FLOOR,
        acquire,
        lambda held: client.evalsha(sha, 1, *held),
    )


def python_redis_lock(client: Any) -> Contender:
    def make(key: str) -> Any:
        return redis_lock.Lock(client, key, expire=TTL)

    return Contender(
        "python-redis-lock",
        Role.INFORMATION,
        _taken(make, blocking=False),
        lambda lock: lock.release(),
    )


def pottery_redlock(urls: Sequence[str]) -> Contender:
    masters = {redis.Redis.from_url(url) for url in urls}

    def make(key: str) -> Any:
        return pottery.Redlock(key=key, masters=masters, auto_release_time=TTL)

    return Contender(
        "pottery Redlock", Role.PEER, _taken(make, blocking=False), lambda lock: lock.release()
    )


def redlock_py(urls: Sequence[str]) -> Contender:
    locks = Redlock(list(urls))

    def acquire(key: str) -> Any:
        lock = locks.lock(f"redlock:{key}", TTL * 1000)
        assert lock
        return lock

    return Contender("redlock-py", Role.PEER, acquire, locks.unlock)


def etcd3gw_lock(client: Etcd3Client) -> Contender:
    return Contender(
        "etcd3gw Lock",
        Role.PEER,
        _taken(lambda key: client.lock(key, ttl=TTL)),
        lambda lock: lock.release(),
    )


def kazoo_lock(client: KazooClient) -> Contender:
    return Contender(
        "kazoo Lock",
        Role.PEER,
        _taken(lambda key: client.Lock(f"/locks/{key}", "benchmark"), blocking=False),
        lambda lock: lock.release(),
    )


def _taken(make: Callable[[str], Any], **options: Any) -> Callable[[str], Any]:
    """Make a lock and acquire it."""

    def acquire(key: str) -> Any:
        lock = make(key)
        granted = lock.acquire(**options)
        assert granted, key
        return lock

    return acquire
