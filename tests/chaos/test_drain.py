"""What a drain calls left over, and what stays on purpose; on a real server."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Holder, Token
from celery_singleton_lock.core.store_requests import Acquire, CompletionState, Release
from celery_singleton_lock.stores import open_store
from tests.chaos.drain import Drain
from tests.chaos.history import History
from tests.chaos.store_kinds import keys_left
from tests.harness.journal import events

KEY = Keyspace("celery", 1).lock("chaos", "k")
TOKEN = Token("job", 0, 0, "nonce")


def test_a_lease_is_left_and_what_its_release_leaves_is_not_unless_it_never_expires(
    redis_url: str, redis_client: redis.Redis
) -> None:
    store = open_store(redis_url, clock=SystemClock())
    store.leases.acquire(Acquire(slots=(KEY,), token=TOKEN, holder=Holder(), ttl=60), timeout=10)
    assert list(keys_left(redis_client)) == [KEY]
    done = Release(keys=(KEY,), token=TOKEN, completion=CompletionState.DONE, completion_ttl=60)
    store.leases.release(done, timeout=10)
    assert (
        len(list(redis_client.scan_iter("*"))) >= 2
    )  # the hash of its shard, its completion record
    assert keys_left(redis_client) == {}
    marker = Keyspace.completion(KEY, TOKEN.attempt)
    redis_client.persist(marker)
    assert list(keys_left(redis_client)) == [marker]
    store.close()


@pytest.mark.parametrize("leaves", [True, False])
def test_a_process_has_time_to_leave_its_task(tmp_path: Path, leaves: bool) -> None:
    history = History(tmp_path)
    history.write("taken", pid=7, task_id="job")
    worker = SimpleNamespace(group=lambda: [7], number_of=lambda pid: pid, alive=False)
    site: Any = SimpleNamespace(
        plan=SimpleNamespace(ttl=1.0), history=history, workers=lambda: [worker]
    )
    timer = threading.Timer(0.1, lambda: history.write("left", pid=7, task_id="job"))
    if leaves:
        timer.start()
    Drain(site, lambda: None, patience=30.0 if leaves else 0.2)._ended_bodies()
    assert len(events(history.records(), "never-ends")) == (not leaves)
