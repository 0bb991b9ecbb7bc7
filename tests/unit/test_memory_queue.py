"""The queue of a key in memory, where no server's clock is waited for."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.call_queue import Join
from celery_singleton_lock.core.store_requests import (
    Granted,
    QueuedAcquire,
    QueuedRelease,
    Refused,
    Relation,
)
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.testing import ManualClock
from celery_singleton_lock.testing.contract import new_key, new_token
from celery_singleton_lock.testing.contract.steps import HOLDER

HOUR = 3600.0


@pytest.mark.parametrize(("hints", "kept"), [(1, HOUR), (2, 7 * 86400.0)])
def test_the_end_of_a_call_is_remembered_longer_if_its_message_was_published_twice(
    hints: int, kept: float
) -> None:
    clock = ManualClock()
    store, key, token = MemoryStore(clock), new_key(), new_token()
    store.call_queue.join(Join(key=key, token=token, message=b"m", late=True), timeout=1)
    for _ in range(hints - 1):
        clock.advance(61)
        assert store.call_queue.sweep(key, timeout=1) is not None
    request = QueuedAcquire(slots=(key,), token=token, holder=HOLDER, ttl=60, late=True)
    assert isinstance(store.leases.acquire(request, timeout=1), Granted)
    store.call_queue.release(QueuedRelease(keys=(key,), token=token, ended_ttl=HOUR), timeout=1)
    copy = request.again("another")
    clock.advance(kept - 1)
    refused = store.leases.acquire(copy, timeout=1)
    assert isinstance(refused, Refused)
    assert refused.relation is Relation.DONE
    clock.advance(2)
    assert isinstance(store.leases.acquire(copy, timeout=1), Granted)


def test_each_hint_has_four_times_as_long_as_the_one_before() -> None:
    clock = ManualClock()
    store, key = MemoryStore(clock), new_key()
    store.call_queue.join(Join(key=key, token=new_token(), message=b"m", late=True), timeout=1)
    for seconds in (60, 240, 960, 3840):
        clock.advance(seconds - 1)
        assert store.call_queue.sweep(key, timeout=1) == []
        clock.advance(2)
        assert len(store.call_queue.sweep(key, timeout=1)) == 1
