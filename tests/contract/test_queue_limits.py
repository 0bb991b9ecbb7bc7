"""The queue of a key whose ``limit`` lets several calls run at a time, in order.

On Redis and Valkey, behind Sentinels and in a cluster.
"""

from __future__ import annotations

from typing import Any

import pytest

from celery_singleton_lock.core.call_queue import Hint, Place, Removal
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Kind, Token
from celery_singleton_lock.core.pauses import Pause
from celery_singleton_lock.core.rate import Rate
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.core.store_requests import QueuedAcquire, Refused, Relation, ReleaseReply
from celery_singleton_lock.stores.redis.leases import on_slots
from celery_singleton_lock.testing.contract import TIMEOUT, new_key, new_token
from celery_singleton_lock.testing.contract.steps import HOLDER, LONG, give, take
from tests.harness.calls import Calls
from tests.harness.deliveries import wait_until


@pytest.fixture
def calls(store: Store) -> Calls:
    return Calls(store, limit=3)


@pytest.fixture
def early(store: Store) -> Calls:
    return Calls(store, late=False, limit=2)


def of(token: Token, hint: Hint | None, copies: int = 1) -> bool:
    return hint is not None and (hint.call_id, hint.copies) == (token.call_id, copies)


def all_run(calls: Calls, tokens: list[Token]) -> None:
    for token in tokens:
        calls.runs(token)


def states(calls: Calls) -> list[str]:
    found = calls.queue.calls(calls.key, most=10, messages=False, timeout=TIMEOUT)
    return [str(call.state) for call in found]


def pause_of(calls: Calls) -> Pause:
    return Pause(name=calls.key, user="", host="", reason="", since=0.0, left=None)


def test_each_call_that_begins_hints_the_next_until_as_many_run_as_may(calls: Calls) -> None:
    tokens = [new_token() for _ in range(5)]
    assert [calls.joins(token) for token in tokens] == [
        (Place.HINTED, 1),
        *((Place.WAITING, depth) for depth in range(2, 6)),
    ]
    first, second, third, fourth, fifth = tokens
    assert of(second, calls.runs(first))
    assert of(third, calls.runs(second))
    assert calls.runs(third) is None, "three run"
    assert states(calls) == ["b", "b", "b", "w", "w"]
    assert of(fourth, calls.end(second)), "whichever ends"
    assert calls.end(first) is None, "one is on its way; its grant hints the next"
    assert of(fifth, calls.runs(fourth))
    calls.runs(fifth)


def test_a_grant_whose_reply_is_lost_names_the_next_call_again(calls: Calls) -> None:
    first, second, _ = calls.joined(3)
    assert of(second, calls.runs(first))
    assert of(second, calls.runs(first)), "repeated"
    calls.runs(second)


def test_a_call_that_joins_while_others_run_is_hinted_if_a_slot_is_free(calls: Calls) -> None:
    first, second = new_token(), new_token()
    calls.join(first)
    calls.runs(first)
    assert calls.joins(second) == (Place.HINTED, 2)
    third = new_token()
    assert calls.joins(third) == (Place.WAITING, 3), "the second has not begun"
    assert of(third, calls.runs(second))


def test_no_call_begins_before_those_before_it_have_begun(calls: Calls) -> None:
    first, second, third = calls.joined(3)
    assert calls.relation(second) is Relation.QUEUED
    assert calls.relation(third) is Relation.QUEUED
    assert calls.relation(new_token()) is Relation.UNQUEUED, "nor one without a place"
    assert of(second, calls.runs(first))
    assert calls.relation(third) is Relation.QUEUED, "a copy too many"
    assert of(third, calls.runs(second)), "though its copy was dropped"
    calls.runs(third)


def test_no_more_calls_run_than_may_whatever_slots_are_free(calls: Calls) -> None:
    tokens = calls.joined(4)
    all_run(calls, tokens[:3])
    calls.lose_lease(tokens[1])
    assert calls.relation(tokens[3]) is Relation.QUEUED, "the second runs again first"
    assert of(tokens[1], calls.swept()[0][1], copies=2)
    calls.runs(new_token(tokens[1].task_id))


def test_a_call_without_a_place_runs_beside_others(calls: Calls) -> None:
    first, second = new_token(), new_token()
    calls.runs(first)
    calls.runs(second)
    assert [calls.position(token) for token in (first, second)] == [0, 1]
    assert calls.depth() == 0


def test_a_client_without_a_place_takes_one_of_the_slots(calls: Calls) -> None:
    holder = take(calls.store, calls.key)
    tokens = calls.joined(3)
    assert of(tokens[1], calls.runs(tokens[0]))
    assert calls.runs(tokens[1]) is None, "two run, and a client holds the key"
    assert calls.swept() == []
    give(calls.store, calls.key, holder)
    assert of(tokens[2], wait_until(calls.swept, "the slot is free")[0][1])


def test_a_retry_keeps_its_slot_and_its_place(calls: Calls) -> None:
    tokens = calls.joined(4)
    all_run(calls, tokens[:3])
    retry = tokens[0].next_attempt()
    assert calls.join(retry) is Place.WAITING, "it is published when the attempt before it ends"
    assert of(retry, calls.release(tokens[0], goes_on=True, due_in=30.0)[1])
    assert calls.relation(tokens[3]) is Relation.QUEUED
    assert calls.runs(retry) is None
    assert of(tokens[3], calls.end(retry))


def test_a_retry_is_not_published_while_its_body_runs_in_a_slot_above_the_limit(
    calls: Calls,
) -> None:
    tokens = calls.joined(2)
    all_run(calls, tokens)
    calls.end(tokens[0])
    calls.limit = 1
    assert calls.join(tokens[1].next_attempt()) is Place.WAITING


def test_a_retry_is_not_published_while_its_body_runs_though_a_slot_is_free(calls: Calls) -> None:
    first = new_token()
    calls.join(first)
    calls.runs(first)
    assert calls.join(first.next_attempt()) is Place.WAITING
    assert calls.swept() == []


def test_an_end_whose_reply_is_lost_is_repeated(calls: Calls) -> None:
    tokens = calls.joined(4)
    all_run(calls, tokens[:3])
    slot = calls.slot_of(tokens[0])
    assert of(tokens[3], calls.end(tokens[0]))
    assert slot is not None
    again = calls.release(tokens[0])
    assert again[0] is ReleaseReply.OURS
    assert of(tokens[3], again[1])


def test_a_call_whose_lease_has_ended_is_hinted_again_and_no_other(calls: Calls) -> None:
    tokens = calls.joined(4)
    all_run(calls, tokens[:3])
    calls.lose_lease(tokens[2])
    ((is_lost, hint),) = calls.swept()
    assert (is_lost, of(tokens[2], hint, copies=2)) == (False, True)
    assert not calls.is_due(), "the others run"


def test_several_calls_whose_leases_have_ended_are_hinted_in_one_sweep(calls: Calls) -> None:
    tokens = calls.joined(3)
    all_run(calls, tokens)
    for token in tokens:
        calls.lose_lease(token)
    assert [hint.call_id for _, hint in calls.swept()] == [one.call_id for one in tokens]


def test_a_lost_call_lets_the_next_one_begin(early: Calls) -> None:
    first, second, third = early.joined(3)
    all_run(early, [first, second])
    early.lose_lease(first)
    assert early.swept() == [], "its client may still say that no body has begun"
    ((is_lost, hint),) = wait_until(early.swept, "it is lost")
    assert (is_lost, hint.call_id) == (True, first.call_id)
    assert early.relation(third) is Relation.QUEUED, "its result is stored before"
    removal, following = early.remove(first)
    assert (removal, of(third, following)) == (Removal.REMOVED, True)


def test_a_late_hint_is_published_again_without_those_that_are_not_late(calls: Calls) -> None:
    first, second, _ = calls.joined(3)
    calls.runs(first)  # hints the second
    ((_, hint),) = calls.swept()
    assert of(second, hint, copies=2)
    assert states(calls) == ["b", "h", "w"]


def test_a_late_hint_is_not_early_because_a_lease_has_ended(calls: Calls) -> None:
    first, *_ = calls.joined(3)
    calls.runs(first, ttl=0.2)  # hints the second
    found = wait_until(lambda: calls.queue.sweep(calls.key, timeout=TIMEOUT), "its lease has ended")
    assert [hint.call_id for _, hint in found] == [first.call_id]


def test_a_running_call_is_not_published_again_whichever_slot_it_has(calls: Calls) -> None:
    tokens = calls.joined(3)
    all_run(calls, tokens)
    calls.end(tokens[0])
    assert calls.swept() == [], "though the first slot is free"


def test_the_sweep_comes_at_the_first_end_of_a_lease(calls: Calls) -> None:
    first, second, _ = calls.joined(3)
    calls.runs(first)
    calls.runs(second, ttl=0.2)
    found = wait_until(lambda: calls.queue.sweep(calls.key, timeout=TIMEOUT), "its lease has ended")
    ((_, hint),) = found
    assert of(second, hint, copies=2)


def test_a_cancelled_call_lets_the_next_one_begin(calls: Calls) -> None:
    tokens = calls.joined(3)
    all_run(calls, tokens[:1])
    left = calls.queue.leave(calls.key, tokens[1].call_id, timeout=TIMEOUT)
    assert isinstance(left, Hint)
    assert of(tokens[2], calls.remove(tokens[1])[1])
    assert calls.queue.leave(calls.key, tokens[0].call_id, timeout=TIMEOUT) is Removal.RUNNING
    calls.runs(tokens[2])


def test_a_waiting_call_that_is_cancelled_publishes_none(calls: Calls) -> None:
    tokens = calls.joined(5)
    all_run(calls, tokens[:3])
    assert calls.queue.leave(calls.key, tokens[4].call_id, timeout=TIMEOUT)
    assert calls.remove(tokens[4]) == (Removal.REMOVED, None)
    assert of(tokens[3], calls.end(tokens[0]))


def test_a_running_call_can_not_be_cancelled_whichever_slot_it_has(calls: Calls) -> None:
    tokens = calls.joined(3)
    all_run(calls, tokens)
    for token in tokens:
        assert calls.queue.leave(calls.key, token.call_id, timeout=TIMEOUT) is Removal.RUNNING
        assert calls.remove(token)[0] is Removal.RUNNING


def test_a_lower_limit_holds_as_soon_as_calls_have_ended(calls: Calls) -> None:
    tokens = calls.joined(5)
    all_run(calls, tokens[:3])
    calls.limit = 1
    late = new_token()
    assert calls.join(late) is Place.WAITING
    for ended, following in ((0, None), (1, None), (2, tokens[3])):
        hint = calls.end(tokens[ended])
        assert hint is None if following is None else of(following, hint)
    assert calls.runs(tokens[3]) is None
    assert calls.relation(tokens[4]) is Relation.QUEUED


def test_a_call_in_a_slot_that_is_not_granted_any_more_does_not_run_twice(calls: Calls) -> None:
    tokens = calls.joined(3)
    all_run(calls, tokens)
    calls.end(tokens[0])
    calls.limit = 1
    for token in tokens[1:]:
        again = calls.ask(new_token(token.task_id))
        assert isinstance(again, Refused)
        assert again.relation is Relation.QUEUED
    assert calls.swept() == []
    assert calls.remove(tokens[2])[0] is Removal.RUNNING


def test_a_higher_limit_lets_more_calls_begin(calls: Calls) -> None:
    calls.limit = 1
    tokens = calls.joined(3)
    assert calls.runs(tokens[0]) is None
    calls.limit = 3
    joining = new_token()
    assert calls.join(joining) is Place.WAITING
    assert calls.is_due(), "a sweep publishes the second"
    ((_, hint),) = calls.queue.sweep(calls.key, timeout=TIMEOUT)
    assert of(tokens[1], hint)
    assert of(tokens[2], calls.runs(tokens[1]))
    assert calls.runs(tokens[2]) is None
    assert of(joining, calls.end(tokens[0]))


def test_only_the_calls_that_wait_count(calls: Calls) -> None:
    tokens = calls.joined(5)
    all_run(calls, tokens[:2])
    assert calls.depth() == 3
    calls.end(tokens[0])
    assert calls.depth() == 3


def test_a_paused_key_hints_its_next_call_after_the_pause_alone(calls: Calls) -> None:
    pauses = calls.store.pauses
    assert pauses is not None
    tokens = calls.joined(3)
    calls.runs(tokens[0])
    pauses.pause(pause_of(calls), timeout=TIMEOUT)
    assert calls.relation(tokens[1]) is Relation.QUEUED
    assert calls.swept() == []
    pauses.resume(calls.key, timeout=TIMEOUT)
    assert of(tokens[1], calls.swept()[0][1])
    assert of(tokens[2], calls.runs(tokens[1]))


def test_a_rate_delays_the_call_that_begins_next(calls: Calls) -> None:
    rate = Rate("6/m")
    tokens = calls.joined(3)
    hint = calls.runs(tokens[0], rate=rate)
    assert of(tokens[1], hint)
    assert hint is not None
    assert hint.countdown == pytest.approx(10, abs=1)
    reply = calls.ask(tokens[1], rate=rate)
    assert isinstance(reply, Refused)
    assert reply.relation is Relation.RATE
    assert calls.relation(tokens[2]) is Relation.QUEUED


def retried(calls: Calls, token: Token, due_in: float) -> Token:
    """A call retries; its slot is reserved for it, and its message is published."""
    retry = token.next_attempt()
    calls.join(retry)
    reserved: Any = {"become": Kind.RESERVED, "become_ttl": due_in + 60.0, "next_token": retry}
    assert of(retry, calls.release(token, goes_on=True, due_in=due_in, **reserved)[1])
    return retry


def test_a_retry_leaves_its_slot_to_those_that_may_run_if_the_limit_is_lower(calls: Calls) -> None:
    ended, first, second, last = calls.joined(4)
    all_run(calls, [ended, first])
    calls.end(ended)
    calls.runs(second)  # in the slot that one call alone may have
    first, second = retried(calls, first, 0.0), retried(calls, second, 3600.0)
    calls.limit = 1
    calls.runs(first)
    assert calls.end(first) is None, "the second waits for its time, in its place"
    assert calls.relation(last) is Relation.QUEUED
    calls.runs(second)
    assert of(last, calls.end(second)), "its old slot is not reserved for it any more"


def test_a_retry_that_was_paused_runs_after_the_pause_though_the_limit_was_lower_meanwhile(
    calls: Calls,
) -> None:
    pauses = calls.store.pauses
    assert pauses is not None
    first, second, _ = calls.joined(3)
    all_run(calls, [first, second])
    second = retried(calls, second, 0.0)
    pauses.pause(pause_of(calls), timeout=TIMEOUT)
    assert calls.relation(second) is Relation.QUEUED
    calls.limit = 1
    calls.join(new_token())
    pauses.resume(calls.key, timeout=TIMEOUT)
    calls.queue.defer(calls.key, seconds=0.0, timeout=TIMEOUT)
    calls.limit = 2
    calls.join(new_token())
    assert of(second, calls.queue.sweep(calls.key, timeout=TIMEOUT)[0][1]), "not in an hour"


def test_a_call_that_has_lost_its_slot_gets_the_next_one(calls: Calls) -> None:
    tokens = calls.joined(5)
    all_run(calls, tokens[:3])
    calls.lose_lease(tokens[0])
    holder = take(calls.store, calls.key)
    assert calls.swept() == [], "no slot is free"
    assert of(tokens[0], calls.end(tokens[1]), copies=1), "before those that have not begun"
    assert of(tokens[3], calls.runs(new_token(tokens[0].task_id)) or calls.end(tokens[2]))
    give(calls.store, calls.key, holder)


def test_a_grant_that_is_undone_hints_no_other_call(calls: Calls) -> None:
    first, second = calls.joined(2)
    assert of(second, calls.runs(first))  # in a reply that is lost
    assert calls.release(first, goes_on=True, has_begun=False)[1] is None
    again = new_token(first.task_id)
    assert of(second, calls.runs(again, asked=(first.nonce,)))


def test_a_call_beside_one_whose_process_has_died_is_published_soon(calls: Calls) -> None:
    """It may have died before it published the call that its grant named."""
    first, _ = calls.joined(2)
    calls.runs(first)
    calls.lose_lease(first)
    calls.queue.defer(calls.key, seconds=LONG, returns=first.call_id, timeout=TIMEOUT)
    wait_until(calls.is_due, "the time of the sweep", timeout=5)


def test_a_request_with_the_slots_of_more_calls_keeps_its_own_limit() -> None:
    """Another worker, with a higher limit, may ask between its two requests."""
    slots = Keyspace.slots(new_key(), 2)
    request = QueuedAcquire(slots=slots, token=new_token(), holder=HOLDER, ttl=LONG)
    request = on_slots(on_slots(request, 3), 4)
    assert (len(request.slots), request.limit) == (4, 2)


def test_a_queue_that_drains_leaves_nothing_behind(calls: Calls) -> None:
    tokens = calls.joined(4)
    all_run(calls, tokens[:3])
    for token in tokens[:3]:
        calls.end(token)
    calls.runs(tokens[3])
    calls.end(tokens[3])
    assert not calls.is_due()
    assert calls.key not in calls.queue.keys(Keyspace.shard(calls.key), timeout=TIMEOUT)
    assert states(calls) == []


def test_the_number_of_calls_that_may_run_is_forgotten_with_the_queue(calls: Calls) -> None:
    (token,) = calls.joined(1)
    calls.runs(token)
    calls.end(token)
    calls.limit = 1
    first, second = calls.joined(2)
    assert calls.runs(first) is None
    assert calls.relation(second) is Relation.QUEUED
    assert calls.store.leases.inspect(f"{calls.key}#1") is None
