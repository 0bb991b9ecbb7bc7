"""The rate of a key: how many of its calls start in a time.

On Redis and Valkey, behind Sentinels, in a cluster, and in memory.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
import redis

from celery_singleton_lock.core.keyspace import CallQueueNames, Keyspace
from celery_singleton_lock.core.lease import Kind, Token
from celery_singleton_lock.core.rate import Rate
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.core.store_requests import Acquire, Granted, Refused, Relation, rated
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.testing.contract import TIMEOUT, new_key, new_token
from celery_singleton_lock.testing.contract.steps import (
    HOLDER,
    LONG,
    become,
    freed,
    give,
    new_claim,
    publish,
    running,
    take,
)
from tests.harness.calls import Calls
from tests.harness.deliveries import wait_until

#: So slow that no test sees a second start, and so quick that one does. A test whose process is
#: suspended for the interval of the quick one would see a start too many.
SLOW, QUICK = Rate("10/h"), Rate(4)
#: Seconds. The fence and the rate are read one after the other, and times are in whole ms.
MOMENT = 0.003


def ask(
    store: Store,
    key: str,
    rate: Rate,
    token: Token | None = None,
    *,
    limit: int = 1,
    **options: Any,
) -> Granted | Refused:
    slots = Keyspace.slots(key, limit)
    options = {"holder": HOLDER, "ttl": LONG, **options}
    request = rated(Acquire(slots=slots, token=token or new_token(), **options), rate)
    return store.leases.acquire(request, timeout=TIMEOUT)


def start(store: Store, key: str, rate: Rate, **options: Any) -> Token:
    """A run begins and ends."""
    token = new_token()
    reply = ask(store, key, rate, token, **options)
    assert isinstance(reply, Granted), reply
    give(store, reply.key, token)
    return token


def left(store: Store, key: str, rate: Rate, **options: Any) -> float:
    reply = ask(store, key, rate, **options)
    assert isinstance(reply, Refused), reply
    assert reply.relation is Relation.RATE
    assert reply.retry_after == reply.due_in
    return reply.due_in


@pytest.fixture
def key() -> str:
    return new_key()


def test_the_next_call_may_start_after_an_interval(store: Store, key: str) -> None:
    start(store, key, QUICK)
    due_in = left(store, key, QUICK)
    assert 0 < due_in <= QUICK.interval + MOMENT
    time.sleep(due_in)
    start(store, key, QUICK)
    start(store, new_key(), QUICK)


def test_a_burst_starts_at_once_and_comes_back_with_time(store: Store, key: str) -> None:
    rate = Rate(4, burst=3)
    for _ in range(3):
        start(store, key, rate)
    due_in = left(store, key, rate)
    assert 0 < due_in <= rate.interval + MOMENT
    time.sleep(due_in + rate.interval)
    start(store, key, rate), start(store, key, rate)
    left(store, key, rate)


def test_never_more_calls_start_than_the_rate_allows(store: Store, key: str) -> None:
    """By the store's clock, which the fences tell in microseconds.

    In memory the process may be suspended between the count of a start and its fence: a start is
    between two times of the client.
    """
    rate, starts = Rate(50, burst=4), list[tuple[float, float]]()
    until = time.monotonic() + 1
    while (before := time.monotonic()) < until:
        token = new_token()
        reply = ask(store, key, rate, token)
        if isinstance(reply, Granted):
            assert reply.fence is not None
            is_exact = store.capabilities.name != "memory"
            at = reply.fence / 1e6
            starts.append((at, at) if is_exact else (before, time.monotonic()))
            give(store, key, token)
    for first, (earliest, _) in enumerate(starts):
        for count, (_, latest) in enumerate(starts[first:], 1):
            assert count <= rate.burst + (latest - earliest + MOMENT) / rate.interval
    assert len(starts) >= 40, "the rate is used"


def test_a_refusal_counts_as_no_start(store: Store, key: str) -> None:
    start(store, key, SLOW)
    time.sleep(MOMENT)
    first = left(store, key, SLOW)
    assert left(store, key, SLOW) <= first, "a time that is too far ahead is cut to the interval"


def test_a_refusal_of_another_kind_counts_as_no_start(store: Store, key: str) -> None:
    rate, holder = Rate("10/h", burst=2), new_token()
    assert isinstance(ask(store, key, rate, holder), Granted)
    reply = ask(store, key, rate)
    assert isinstance(reply, Refused)
    assert reply.relation is Relation.OTHER, "another call holds the key"
    give(store, key, holder)
    start(store, key, rate)


def test_a_request_that_is_repeated_counts_once(store: Store, key: str) -> None:
    rate, token = Rate("2/h", burst=2), new_token()
    assert isinstance(ask(store, key, rate, token), Granted)
    assert isinstance(ask(store, key, rate, token), Granted), "its reply was lost"
    give(store, key, token)
    start(store, key, rate)


def test_the_next_attempt_of_a_retry_counts_and_keeps_its_reservation(
    store: Store, key: str
) -> None:
    token = new_token()
    assert isinstance(ask(store, key, QUICK, token), Granted)
    become(store, key, token, Kind.RESERVED, ttl=0.05)
    due_in = left(store, key, QUICK, token=token.next_attempt())
    time.sleep(due_in)
    other = ask(store, key, QUICK)
    assert isinstance(other, Refused)
    assert other.relation is Relation.OTHER, "it stays reserved until the retry may start"
    reply = ask(store, key, QUICK, token.next_attempt())
    assert isinstance(reply, Granted)


def test_a_refusal_by_the_rate_does_not_shorten_a_reservation(store: Store, key: str) -> None:
    token = new_token()
    assert isinstance(ask(store, key, QUICK, token), Granted)
    become(store, key, token, Kind.RESERVED, ttl=LONG)
    left(store, key, QUICK, token=token.next_attempt(), ttl=1.0)
    record = store.leases.inspect(key)
    assert record is not None
    assert record.ttl > LONG / 2


def test_all_slots_of_a_limit_have_one_rate(store: Store, key: str) -> None:
    rate = Rate("2/h", burst=2)
    for _ in range(2):
        assert isinstance(ask(store, key, rate, limit=5), Granted)
    left(store, key, rate, limit=5)


def test_a_request_without_a_rate_neither_waits_nor_counts(store: Store, key: str) -> None:
    start(store, key, SLOW)
    give(store, key, take(store, key))
    other = new_key()
    give(store, other, take(store, other))
    start(store, other, SLOW)


@pytest.mark.parametrize(
    ("before", "after"), [(SLOW, QUICK), (Rate("10/h", burst=5), Rate(4, burst=2))]
)
def test_a_higher_rate_holds_from_the_next_start(
    store: Store, key: str, before: Rate, after: Rate
) -> None:
    for _ in range(before.burst):
        start(store, key, before)
    due_in = left(store, key, after)
    assert due_in <= after.interval + MOMENT
    time.sleep(due_in)
    start(store, key, after)


def test_the_claim_of_a_message_that_ends_is_freed(store: Store) -> None:
    for frees, remains in ((True, False), (False, True)):
        key, claim = new_claim()
        token = publish(store, claim)
        start(store, key, SLOW)
        options = {"token": token, "claim": running(claim), "frees_claim": frees}
        left(store, key, SLOW, **options)
        assert (store.leases.inspect(claim) is not None) is remains
        with suppress(AssertionError):
            give(store, key, token, claim=freed(claim))


def test_a_store_that_comes_back_empty_lets_one_more_burst_start(store: Store, key: str) -> None:
    if not isinstance(store, RedisStore):
        pytest.skip("its times are not keys")
    rate = Rate("10/h", burst=2)
    for _ in range(2):
        start(store, key, rate)
    store.operators.free(Keyspace.rate(key), None)
    for _ in range(2):
        start(store, key, rate)
    left(store, key, rate)


def test_the_time_of_a_key_expires_when_it_has_passed(store: Store) -> None:
    if store.operators is None or store.capabilities.name == "memory":
        pytest.skip("its times are not keys")
    key = new_key()
    start(store, key, Rate(2))
    names = [name for name, _, ttl in store.operators.texts(Keyspace.rate(key)) if ttl > 0]
    assert names == [Keyspace.rate(key)]
    wait_until(lambda: not [*store.operators.texts(Keyspace.rate(key))], "its expiry")


# The queue of a key.


class RatedCalls(Calls):
    """The calls of a key that has a rate."""

    def __init__(self, store: Store, rate: Rate, **options: Any) -> None:
        super().__init__(store, **options)
        self.rate = rate

    def ask(self, token: Token, **options: Any) -> Granted | Refused:
        return super().ask(token, **{"rate": self.rate, **options})

    def too_early(self, token: Token) -> Refused:
        reply = self.ask(token)
        assert isinstance(reply, Refused), reply
        assert reply.relation is Relation.RATE
        return reply


def test_the_call_that_follows_is_published_for_the_time_at_which_it_may_start(
    store: Store,
) -> None:
    calls = RatedCalls(store, QUICK)
    first, second = calls.joined(2)
    calls.begin(first)
    hint = calls.end(first)
    assert hint is not None
    assert hint.call_id == second.call_id
    assert 0 < hint.countdown <= QUICK.interval + MOMENT
    time.sleep(hint.countdown)
    calls.begin(second)
    assert calls.end(second) is None


def test_a_call_that_comes_too_early_is_published_for_its_time(store: Store) -> None:
    calls = RatedCalls(store, QUICK)
    (first,) = calls.joined(1)
    calls.begin(first)
    calls.end(first)
    (second,) = calls.joined(1)
    refused = calls.too_early(second)
    hint = refused.hint
    assert hint is not None
    assert (hint.call_id, hint.copies) == (second.call_id, 1), "in place of the copy that asked"
    assert hint.message == second.attempt.encode()
    assert hint.countdown == refused.due_in <= QUICK.interval + MOMENT
    assert not calls.is_due()
    time.sleep(refused.due_in)
    calls.begin(second)


def test_a_call_joins_before_it_waits_for_its_time(store: Store) -> None:
    calls = RatedCalls(store, SLOW)
    first, second = new_token(), new_token()
    calls.begin(first)
    calls.end(first)
    assert calls.relation(second) is Relation.UNQUEUED
    calls.join(second)
    third = new_token()
    assert calls.relation(third) is Relation.UNQUEUED, "it is behind the second one"


def test_a_call_whose_time_is_far_waits_in_the_store(store: Store) -> None:
    """A worker would keep a message with a delay in its memory."""
    rate = Rate("10/h")
    calls = RatedCalls(store, rate)
    first, second, third = calls.joined(3)
    calls.begin(first)
    assert calls.end(first) is None, "a sweep publishes it"
    assert calls.relation(second) is Relation.QUEUED
    assert calls.sweep() is not None, "its sweep was put forward"
    assert calls.relation(second) is Relation.QUEUED
    assert not calls.is_due()
    assert calls.position(second) == 0
    assert calls.position(third) == 1


def test_a_call_whose_time_is_far_is_looked_at_again_soon(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    """A deploy may have brought a higher rate."""
    calls = RatedCalls(redis_store, Rate("1/h"))
    first, second = calls.joined(2)
    calls.begin(first)
    calls.end(first)

    def due_in() -> float:
        due = raw.zscore(CallQueueNames.of(calls.key).due, calls.key)
        assert isinstance(due, float)
        return due / 1000 - time.time()

    assert 60 < due_in() <= 300
    calls.sweep()
    calls.relation(second)
    assert 60 < due_in() <= 300


def test_the_time_comes_by_a_sweep(store: Store) -> None:
    calls = RatedCalls(store, Rate(2))
    first, second = calls.joined(2)
    calls.begin(first)
    hint = calls.end(first)
    assert hint is not None
    found = calls.sweep()  # the message was lost
    assert found is not None
    assert found[1].copies == 2
    refused = calls.too_early(second)
    assert refused.hint is not None
    time.sleep(refused.due_in)
    calls.begin(second)


def test_a_retry_of_a_call_waits_for_its_time_in_its_place(store: Store) -> None:
    calls = RatedCalls(store, QUICK)
    first, second = calls.joined(2)
    calls.begin(first)
    retry = new_token(first.task_id, retries=1)
    calls.join(retry)
    _, hint = calls.release(
        first, goes_on=True, become=Kind.RESERVED, become_ttl=LONG, next_token=first.next_attempt()
    )
    assert hint is not None
    assert (hint.call_id, hint.countdown) == (first.call_id, 0.0), "it has its own countdown"
    refused = calls.too_early(retry)
    assert calls.relation(second) is Relation.QUEUED
    time.sleep(refused.due_in)
    calls.begin(retry)


def test_a_release_whose_reply_was_lost_says_the_same_again(store: Store) -> None:
    calls = RatedCalls(store, Rate(1))
    first, second = calls.joined(2)
    calls.begin(first)
    hint = calls.end(first)
    _, again = calls.release(first)
    assert hint is not None
    assert again is not None
    assert (hint.call_id, again.call_id) == (second.call_id, second.call_id)
    assert 0 < again.countdown <= hint.countdown


def test_an_undone_begin_has_counted_and_its_call_waits(store: Store) -> None:
    calls = RatedCalls(store, QUICK)
    (first,) = calls.joined(1)
    calls.begin(first)
    calls.release(first, goes_on=True, has_begun=False)
    refused = calls.too_early(first)
    time.sleep(refused.due_in)
    calls.begin(first)


def test_nothing_of_a_queue_remains_when_its_calls_have_ended(store: Store) -> None:
    if store.operators is None or store.capabilities.name == "memory":
        pytest.skip("its queues are not keys")
    calls = RatedCalls(store, SLOW)
    (first,) = calls.joined(1)
    calls.begin(first)
    calls.end(first)
    assert calls.queue.keys(Keyspace.shard(calls.key), timeout=TIMEOUT).count(calls.key) == 0
    found: list[str] = []
    pattern = f"*{calls.key.partition('}:')[2]}*"
    for _ in store.operators.survey(pattern, lambda *one: None, lambda name, _: found.append(name)):
        pass
    assert [name for name in found if "}:calls|" in name] == []
