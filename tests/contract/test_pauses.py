"""Pauses of keys and scopes: no lease is granted and no call of a queue is published.

On Redis and Valkey, behind Sentinels, in a cluster, and in memory.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Kind
from celery_singleton_lock.core.pauses import Pause
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.core.store_requests import Granted, Refused, Relation
from celery_singleton_lock.testing.contract import TIMEOUT, ask, lease_of, new_key, new_token
from celery_singleton_lock.testing.contract.steps import (
    LONG,
    become,
    freed,
    give,
    new_claim,
    publish,
    refused,
    renew,
    running,
    take,
)
from tests.harness.calls import Calls
from tests.harness.deliveries import wait_until

SHORT = 0.2


def paused(store: Store, name: str, *, left: float | None = None, reason: str = "") -> Pause:
    assert store.pauses is not None
    pause = Pause(name=name, user="anna", host="web1", since=1000.0, left=left, reason=reason)
    return store.pauses.pause(pause, timeout=TIMEOUT)


def resumed(store: Store, name: str) -> Pause | None:
    assert store.pauses is not None
    return store.pauses.resume(name, timeout=TIMEOUT)


def listed(store: Store, key: str) -> list[Pause]:
    assert store.pauses is not None
    shard = Keyspace.shard(key)
    own = {key, Keyspace.scope_of(key)}
    return [one for one in store.pauses.of_shard(shard, timeout=TIMEOUT) if one.name in own]


def refusal(store: Store, key: str, **options: Any) -> Refused:
    reply = ask(store, key, new_token(), **options)
    assert isinstance(reply, Refused), reply
    return reply


@pytest.fixture
def key() -> str:
    """A key in a scope of its own."""
    shard, _, name = new_key().partition("}:")
    suffix = name.partition(":")[2]
    return f"{shard}}}:scope-{suffix}:{suffix}"


def test_a_paused_key_is_refused_with_who_paused_it_and_why(store: Store, key: str) -> None:
    paused(store, key, reason="their API is down ü")
    reply = refusal(store, key)
    assert reply.relation is Relation.PAUSED
    pause = reply.pause
    assert (pause.name, pause.user, pause.host, pause.since) == (key, "anna", "web1", 1000.0)
    assert (pause.reason, pause.left, reply.retry_after) == ("their API is down ü", None, None)
    take(store, new_key())


def test_a_paused_scope_refuses_each_of_its_keys(store: Store, key: str) -> None:
    scope = Keyspace.scope_of(key)
    paused(store, scope)
    assert refusal(store, key).pause.name == scope
    assert refusal(store, f"{scope}:other").relation is Relation.PAUSED
    take(store, f"{scope}x:k")
    resumed(store, scope)
    take(store, key)


def test_every_slot_of_a_limit_is_paused(store: Store, key: str) -> None:
    slots = Keyspace.slots(key, 3)
    paused(store, key)
    assert refused(store, slots, new_token()) is Relation.PAUSED
    resumed(store, key)
    assert isinstance(ask(store, slots, new_token()), Granted)


def test_a_pause_ends_by_itself_and_the_refusal_says_when(store: Store, key: str) -> None:
    paused(store, key, left=SHORT)
    assert 0 < (refusal(store, key).retry_after or 0.0) <= SHORT
    time.sleep(SHORT + 0.01)
    assert listed(store, key) == []
    take(store, key)
    assert resumed(store, key) is None


def test_a_pause_that_is_over_refuses_nothing_though_nobody_lists_it(
    store: Store, key: str
) -> None:
    paused(store, key, left=SHORT)
    paused(store, Keyspace.scope_of(key), left=SHORT)
    time.sleep(SHORT + 0.01)
    take(store, key)


@pytest.mark.parametrize(
    ("first", "second", "in_force"),
    [(60.0, 600.0, 600.0), (600.0, 60.0, 600.0), (None, 60.0, None), (60.0, None, None)],
)
def test_the_pause_that_ends_later_counts(
    store: Store, key: str, first: float | None, second: float | None, in_force: float | None
) -> None:
    paused(store, key, left=first)
    for found in (paused(store, key, left=second).left, refusal(store, key).retry_after):
        assert found == (None if in_force is None else pytest.approx(in_force, abs=5))
    assert len(listed(store, key)) == 1
    for one, other in ((key, Keyspace.scope_of(key)), (Keyspace.scope_of(key), key)):
        resumed(store, one), resumed(store, other)
        paused(store, one, left=first)
        paused(store, other, left=second)
        found = refusal(store, key).retry_after
        assert found == (None if in_force is None else pytest.approx(in_force, abs=5))


def test_a_resume_returns_the_pause_and_is_repeated_without_effect(store: Store, key: str) -> None:
    pause = paused(store, key, reason="x")
    assert listed(store, key) == [pause]
    assert resumed(store, key) == pause
    assert resumed(store, key) is None
    assert listed(store, key) == []
    take(store, key)


def test_a_run_goes_on_and_ends_while_its_key_is_paused(store: Store, key: str) -> None:
    token = new_token()
    first = take(store, key, token)
    paused(store, key)
    assert renew(store, [lease_of(key, first)]) == [None]
    assert isinstance(ask(store, key, token), Granted), "a repeated request, without a reply"
    assert refused(store, key) is Relation.PAUSED, "not that another call holds the key"
    give(store, key, token)
    assert refused(store, key) is Relation.PAUSED


def test_the_next_attempt_of_a_retry_is_paused_and_keeps_its_reservation(
    store: Store, key: str
) -> None:
    token = take(store, key)
    become(store, key, token, Kind.RESERVED)
    paused(store, key)
    assert refused(store, key, token.next_attempt()) is Relation.PAUSED
    resumed(store, key)
    assert refused(store, key) is Relation.OTHER
    take(store, key, token.next_attempt())


def test_a_duplicate_is_refused_by_its_claim_though_the_key_is_paused(store: Store) -> None:
    key, claim = new_claim()
    publish(store, claim)
    paused(store, key)
    change = running(claim)
    options = {"claim": change, "refused_if_claimed": True}
    assert refused(store, key, **options) is Relation.OTHER
    resumed(store, key)
    take(store, key)
    paused(store, key)
    assert refused(store, key, **options) is Relation.OTHER


def test_a_refusal_by_a_pause_frees_no_claim(store: Store) -> None:
    key, claim = new_claim()
    token = publish(store, claim)
    paused(store, key)
    assert refused(store, key, token, claim=running(claim), frees_claim=True) is Relation.PAUSED
    assert store.leases.inspect(claim) is not None
    resumed(store, key)
    take(store, key, token, claim=running(claim))
    give(store, key, token, claim=freed(claim))


# The queue of a key.


def test_the_first_call_of_a_queue_waits_for_the_end_of_the_pause(store: Store) -> None:
    calls = Calls(store)
    paused(store, calls.key)
    first, second = calls.joined(2)
    assert calls.relation(first) is Relation.QUEUED
    assert calls.relation(new_token()) is Relation.UNQUEUED
    assert not calls.is_due()
    assert calls.sweep() is None
    assert not calls.is_due(), "it is looked at again in an hour, or when it is resumed"
    resumed(store, calls.key)
    found = calls.sweep()
    assert found is not None
    assert (found[0], found[1].call_id) == (False, first.call_id)
    assert found[1].copies == 1, "the copy that met the pause has ended"
    calls.begin(first)
    assert calls.end(first) is not None
    calls.begin(second)


def test_the_queue_of_a_key_is_due_when_its_pause_ends(store: Store) -> None:
    calls = Calls(store)
    paused(store, Keyspace.scope_of(calls.key), left=SHORT)
    (first,) = calls.joined(1)
    assert calls.relation(first) is Relation.QUEUED
    assert calls.sweep_early() is None
    wait_until(calls.is_due, "the end of the pause")
    assert calls.sweep_early() is not None
    calls.begin(first)


def test_a_retry_that_was_paused_is_published_though_its_key_is_reserved(store: Store) -> None:
    calls = Calls(store)
    (first,) = calls.joined(1)
    calls.begin(first)
    paused(store, calls.key)
    retry = new_token(first.task_id, retries=1)
    calls.join(retry)
    _, hint = calls.release(
        first, goes_on=True, become=Kind.RESERVED, become_ttl=LONG, next_token=first.next_attempt()
    )
    assert hint is not None
    assert calls.relation(retry) is Relation.QUEUED
    resumed(store, calls.key)
    found = calls.sweep()
    assert found is not None
    assert found[1].call_id == first.call_id
    calls.begin(retry)


def test_a_call_that_is_lost_ends_while_its_key_is_paused(store: Store) -> None:
    calls = Calls(store, late=False)
    first, second = calls.joined(2)
    calls.begin(first)
    calls.lose_lease()
    paused(store, calls.key)
    is_lost, _ = calls.found_by_look()
    assert is_lost
    calls.remove(first)
    assert calls.sweep() is None
    assert calls.relation(second) is Relation.QUEUED


def test_a_pause_is_kept_for_ever(store: Store, key: str) -> None:
    """Its record does not count as one that was left behind."""
    paused(store, key, left=LONG)
    operators = store.operators
    assert operators is not None
    found: list[tuple[str, str]] = []
    pattern = f"*{Keyspace.shard(key).rpartition('{')[2]}*"
    for _ in operators.survey(pattern, lambda *one: found.append(one)):
        pass
    assert [name for name, _ in found if name == Keyspace.shard_hash(key)] == []
