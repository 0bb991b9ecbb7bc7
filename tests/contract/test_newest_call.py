"""The order of calls in the store: the newest stays, whatever arrives when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from celery import Celery
from celery.app.trace import build_tracer

from celery_singleton_lock import OnConflict, current_lease, singleton_task
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Kind
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.core.store_requests import NewestCall
from celery_singleton_lock.message.request_data import ATTRIBUTE, Arrival
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.redis.cluster import ClusterStore
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.testing.contract import TIMEOUT, ask, new_key, new_token
from celery_singleton_lock.testing.contract.steps import LONG, held_as, take


@pytest.fixture(params=["redis", pytest.param("cluster", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest) -> Iterator[RedisStore]:
    if request.param == "cluster":
        store: RedisStore = ClusterStore(request.getfixturevalue("cluster").url)
    else:
        store = RedisStore(request.getfixturevalue("redis_url"))
    with closing(store):
        yield store


def note(
    store: Store, key: str, task: str, called_at: float | None, reservation: str = ""
) -> NewestCall:
    call = NewestCall(call_id=task, called_at=called_at)
    return store.newest_calls.register(
        key, call, ttl=LONG, timeout=TIMEOUT, reservation=reservation
    )


def test_a_call_is_replaced_by_a_newer_one_only(store: RedisStore) -> None:
    key = new_key()
    assert store.newest_calls.of([key, new_key()], timeout=TIMEOUT) == [None, None]
    first = note(store, key, "b+1", 1763876543.123456)
    assert (first.call_id, first.called_at, first.task_id) == ("b+1", 1763876543.123456, "b")
    assert note(store, key, "older", 1763876543.123455) == first
    assert note(store, key, "a", first.called_at) == first  # of two at one time, one is the newer
    assert note(store, key, "b+1", 1.0) == first  # the same call, delivered again
    newer = note(store, key, "c", 1763876543.123457)
    assert newer.call_id == "c"
    assert newer.is_newer_than(first)
    assert not first.is_newer_than(newer)
    assert note(store, key, "b+1", first.called_at) == newer
    assert store.newest_calls.of([new_key(), key], timeout=TIMEOUT) == [None, newer]


def test_a_call_from_the_future_or_of_an_unknown_time_is_made_now(store: RedisStore) -> None:
    key, other = new_key(), new_key()
    ahead = note(store, key, "ahead", 1e10)
    assert ahead.called_at == pytest.approx(SystemClock().wall(), abs=5)
    assert note(store, key, "unknown", None).call_id == "unknown"
    assert note(store, key, "ahead", ahead.called_at).call_id == "unknown"
    # The server's clock was set back, so that a noted call lies in its future.
    value = "9999999999.000000 future"
    store.runner.connections.run([("SET", Keyspace.newest_call(other), value)], TIMEOUT)
    assert note(store, other, "next", 1e9).call_id == "next"


def test_the_newest_call_deletes_the_reservation_that_it_names(store: RedisStore) -> None:
    key, token = held_as(store, Kind.RESERVED)
    record = store.leases.inspect(key)
    assert record is not None
    note(store, key, token.call_id, 5.0)
    note(store, key, "older", 4.0, record.token)
    note(store, key, "newer", 6.0)
    note(store, key, "newer", 6.0, str(new_token()))
    assert store.leases.inspect(key) is not None
    note(store, key, "newer", 6.0, record.token)
    assert store.leases.inspect(key) is None


@pytest.mark.parametrize("kind", [Kind.LEASE, Kind.COOLING, Kind.DYING])
def test_no_lease_is_touched(store: RedisStore, kind: Kind) -> None:
    key, _ = held_as(store, kind)
    before = store.leases.inspect(key)
    assert before
    note(store, key, "newer", 6.0, before.token)
    after = store.leases.inspect(key)
    assert after
    assert (after.kind, after.token) == (before.kind, before.token)


def test_only_a_new_call_wakes_and_only_if_another_client_waits(store: RedisStore) -> None:
    key = new_key()
    take(store, key)
    handoffs = f"{Keyspace.wait_queue(key)}!"

    def ask_server(*command: object) -> object:
        (reply,) = store.runner.connections.run([command], TIMEOUT)
        return reply

    ask(store, key, new_token("a"), wait_ttl=LONG)
    note(store, key, "a", 1.0)
    assert ask_server("LLEN", handoffs) == 0
    ask(store, key, new_token("b"), wait_ttl=LONG)
    note(store, key, "b", 2.0)
    assert ask_server("LRANGE", handoffs, 0, -1) == [b"newer"]
    assert 0 < float(str(ask_server("PTTL", handoffs))) <= 500
    note(store, key, "b", 2.0)
    note(store, key, "a", 1.0)
    assert ask_server("LLEN", handoffs) == 1


def test_a_newer_call_interrupts_the_body_that_runs(store: RedisStore) -> None:
    app = Celery("newer", broker="memory://", backend="cache+memory://", set_as_current=False)
    Runtime.install(app, Runtime(app, store=store))
    rule, key, waited = OnConflict.cancel_running(within=0.1), new_key(), []

    @singleton_task(app=app, name="work", shared=False, key="{name}", on_conflict=rule)
    def work(name: str) -> None:
        note(store, current_lease().key, "newer", None)
        waited.append(threading.Event().wait(5))

    trace = build_tracer("work", app.tasks["work"], app=app)
    message = {"id": key, "task": "work", "delivery_info": {}, ATTRIBUTE: Arrival(nonce="a1")}
    trace(key, [key], {}, message)
    state = app.AsyncResult(key).state
    app.close()
    assert (state, waited) == ("REVOKED", [])
