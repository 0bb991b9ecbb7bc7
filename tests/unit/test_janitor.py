"""The janitor of ZooKeeper's leases, and its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from celery_singleton_lock.core import native_threads
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.stores.consensus import Name
from celery_singleton_lock.stores.zookeeper.store import Own, ZooKeeperStore
from tests.harness.deliveries import wait_until

SOON = 5.0


class Bench:
    """What the janitor of a store expired; the store sends nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = SystemClock()
        self.expired: list[tuple[str, str]] = []
        self.noticed = threading.Event()
        self.store = ZooKeeperStore("zk://127.0.0.1")
        monkeypatch.setattr(self.store, "_expire_late", self.expire)

    def expire(self, name: Name, own: Own) -> None:
        self.expired.append(name)
        self.noticed.set()

    def watch(self, key: str, name: str = "name") -> None:
        """A lease whose time is over already."""
        self.store._own.add({(key, name): Own(self.clock.now(), cast(Any, None))})
        self.store._wake_janitor()


def test_what_is_over_is_expired_although_the_thread_could_not_be_started_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_more_threads(function: Callable[[], None], name: str) -> None:
        raise RuntimeError("can't start new thread")

    bench = Bench(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(native_threads, "start_new_thread", no_more_threads)
        with pytest.raises(RuntimeError):
            bench.watch("first")
    bench.watch("second")
    assert bench.noticed.wait(SOON)
    bench.store.close()
    assert bench.expired[0] == ("first", "name")


def test_two_writes_that_come_first_start_one_janitor(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Callable[[], None]] = []
    monkeypatch.setattr(native_threads, "start_new_thread", lambda run, name: started.append(run))
    bench = Bench(monkeypatch)
    bench.watch("first")
    bench.watch("second")
    assert len(started) == 2
    one = threading.Thread(target=started[0], daemon=True)
    one.start()
    assert bench.noticed.wait(SOON)
    started[1]()  # returns
    bench.store.close()
    one.join(SOON)
    assert not one.is_alive()
    assert sorted(bench.expired) == [("first", "name"), ("second", "name")]


def test_a_key_is_expired_for_each_session_that_may_have_written_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Callable[[], None]] = []
    monkeypatch.setattr(native_threads, "start_new_thread", lambda run, name: started.append(run))
    bench = Bench(monkeypatch)
    bench.watch("key", "first")
    bench.watch("key", "second")
    janitor = threading.Thread(target=started[0], daemon=True)
    janitor.start()
    wait_until(lambda: len(bench.expired) == 2, "both were", timeout=SOON)
    bench.store.close()
    janitor.join(SOON)
    assert sorted(bench.expired) == [("key", "first"), ("key", "second")]
