"""The store in memory, for tests of users that run for long."""

from __future__ import annotations

from celery_singleton_lock.core.lease import Holder
from celery_singleton_lock.core.store_requests import Acquire, Granted
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.testing import ManualClock
from celery_singleton_lock.testing.contract import new_key, new_token

_KEPT = 300


def test_expired_entries_go() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    for _ in range(3000):
        request = Acquire(slots=(new_key(),), token=new_token(), holder=Holder(), ttl=10)
        assert isinstance(store.leases.acquire(request, timeout=1), Granted)
        clock.advance(1)
    assert len(store._entries) < _KEPT
    assert len(list(store.operators.scan("*"))) == 9, "and no others"
