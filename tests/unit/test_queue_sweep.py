"""The thread of the sweeps at the queues of keys, without a store."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.key_queue import sweep as module
from celery_singleton_lock.key_queue.sweep import QueueSweep
from celery_singleton_lock.stores.memory import MemoryStore


def test_a_flood_of_keys_that_are_asked_for_keeps_no_look_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = Celery("looks", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = "memory://"
    seen: list[str] = []

    def open_store() -> None:
        raise AssertionError("nothing is swept here")

    def is_over() -> bool:
        return seen.count("all") == 2 or len(seen) == 20_000

    def sweep_key(key: str) -> None:
        seen.append(key)
        sweep._soon.put(key)

    sweep = QueueSweep(app, open_store, is_over)  # type: ignore[arg-type]
    monkeypatch.setattr(sweep, "sweep", lambda: seen.append("all"))
    monkeypatch.setattr(sweep, "_sweep_key", sweep_key)
    monkeypatch.setattr(module, "_EVERY", 0.01)
    sweep._soon.put("a")
    sweep._run()
    assert seen.count("all") == 2


def test_each_round_of_sweeps_reaches_every_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery("rounds", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = "memory://"
    store = MemoryStore(SystemClock())
    seen: list[str] = []
    monkeypatch.setattr(store.call_queue, "due", lambda shard, **_: seen.append(shard) or [])
    sweep = QueueSweep(app, lambda: store, lambda: False)
    keyspace = Keyspace("rounds", shards=256)
    monkeypatch.setattr(sweep._runtime, "keyspace", keyspace)
    for _ in range(2):
        seen.clear()
        for _ in range(22):  # the seconds that the page says
            sweep.sweep()
        assert sorted(seen) == sorted(keyspace.all_shards())
