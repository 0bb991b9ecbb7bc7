"""The lock keys of a test's app, as an operator sees and frees them; names and ages of keys."""

from __future__ import annotations

from typing import Final

import redis
from celery import Celery

from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Record
from celery_singleton_lock.core.store import operators_of
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.runtime import Runtime
from tests.harness.deliveries import wait_until
from tests.harness.processes import TIMEOUT

#: A glob pattern of all names in the store, of every prefix.
EVERY_NAME: Final = Keyspace().match_all().partition("{")[0] + "*"


def name_in_store(rest: str, *, prefix: str = "celery", shard: object = 0) -> str:
    """The name of something beside the leases, or of a key that another program has left.

    The key of a task is ``task.lock_key(...)``.

    Args:
        rest: What follows the shard.
        prefix: That of the app.
        shard: Its number.
    """
    start = Keyspace(prefix).lock("scope", "rest").removesuffix("0}:scope:rest")
    return f"{start}{shard}}}:{rest}"


def grow_old(client: redis.Redis, seconds: float) -> None:
    """Take ``seconds`` from all keys of a database that expire."""
    keys = list(client.scan_iter(count=1000))
    with client.pipeline() as pipe:
        for key in keys:
            pipe.pttl(key)
        for key, left in zip(keys, pipe.execute(), strict=True):
            if left >= 0:
                # A key that would live for no time is deleted by this command.
                pipe.pexpire(key, left - round(seconds * 1000))
        pipe.execute()


class Keys:
    """The keys in the store that an app's tasks use.

    Args:
        app: The app of the test's own process, as ``load_app("tests.apps.loss").app``.
    """

    def __init__(self, app: Celery) -> None:
        self.store = Runtime.of(app).store

    def held(self) -> dict[str, Record]:
        """Every key that is taken, in whatever way."""
        return {record.key: record for record in operators_of(self.store).scan(EVERY_NAME)}

    def find(self, key: str) -> Record | None:
        """The holder of ``key``, if there is one."""
        try:
            return self.store.leases.inspect(key)
        except StoreUnavailable:
            # The server was restarted, and an idle connection of ours is to the old one.
            return self.store.leases.inspect(key)

    def record(self, key: str) -> Record:
        """The holder of ``key``.

        Raises:
            AssertionError: It has no holder.
        """
        record = self.find(key)
        assert record is not None, f"{key} is free"
        return record

    def free(self, key: str) -> None:
        """Take ``key`` from its holder.

        Raises:
            AssertionError: It had no holder.
        """
        assert operators_of(self.store).free(key, None), f"{key} was free"

    def wait_until_free(self, key: str, *, timeout: float = TIMEOUT) -> None:
        """Wait until ``key`` has no holder."""
        wait_until(lambda: self.find(key) is None, f"{key} is free", timeout=timeout)


#: The commands that docs/reference/settings.md says that locking needs.
LOCKING = (
    *("+eval", "+evalsha", "+get", "+set", "+del", "+pttl", "+pexpire", "+time"),
    *("+hdel", "+hget", "+hincrby", "+hkeys", "+hmget", "+hset"),
)
