"""The queue of a key: joins, hints, ends, looks and removals.

On Redis and Valkey, behind Sentinels and in a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import pytest
import redis

from celery_singleton_lock import StoreError
from celery_singleton_lock.core.call_queue import (
    CallState,
    Depth,
    Hint,
    Join,
    Place,
    Removal,
)
from celery_singleton_lock.core.keyspace import CallQueueNames, Keyspace
from celery_singleton_lock.core.lease import Kind, Token
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.core.store_requests import (
    CompletionState,
    Refused,
    Relation,
    ReleaseReply,
)
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.testing.contract import TIMEOUT, new_key, new_token
from celery_singleton_lock.testing.contract.steps import LONG, give, take, take_claim
from tests.harness.calls import DAY, Calls
from tests.harness.deliveries import wait_until

SHORT = 0.05


@pytest.fixture
def calls(store: Store) -> Calls:
    return Calls(store)


@pytest.fixture
def early(store: Store) -> Calls:
    return Calls(store, late=False)


def of(token: Token, hint: Hint | None, copies: int = 1) -> bool:
    return hint is not None and (hint.call_id, hint.copies) == (token.call_id, copies)


# Order.


def test_the_reply_to_a_join_has_the_place_of_a_call_that_had_none(calls: Calls) -> None:
    first, second = new_token(), new_token()
    assert calls.joins(first) == (Place.HINTED, 1)
    assert calls.joins(second) == (Place.WAITING, 2)
    assert calls.joins(second) == (Place.WAITING, 0)
    calls.begin(first)
    assert calls.joins(first.next_attempt()) == (Place.WAITING, 0)


def test_calls_run_in_the_order_of_their_joins(calls: Calls) -> None:
    tokens = calls.joined(5)
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        calls.begin(token)
        hint = calls.end(token)
        assert hint is None if following is None else of(following, hint)


def test_only_the_head_of_the_queue_is_granted(calls: Calls) -> None:
    first, second, _ = calls.joined(3)
    assert calls.relation(second) is Relation.QUEUED
    calls.begin(first)
    assert calls.relation(second) is Relation.QUEUED
    calls.end(first)
    calls.begin(second)


def test_a_call_that_has_to_wait_is_told_which_lease_holds_the_key(calls: Calls) -> None:
    """So that its worker can free the lease of a process that is dead."""
    first, second = calls.joined(2)
    for token in (second, new_token()):
        reply = calls.ask(token)
        assert isinstance(reply, Refused)
        assert reply.record is None, "the key is free"
    calls.begin(first)
    retry = new_token(first.task_id, retries=1)
    for token in (second, new_token(), retry):
        reply = calls.ask(token)
        assert isinstance(reply, Refused)
        assert reply.record is not None
        assert (reply.record.kind, reply.record.token) == (Kind.LEASE, str(first))


def test_a_call_without_a_place_waits_behind_those_that_have_one(calls: Calls) -> None:
    (first,) = calls.joined(1)
    other = new_token()
    assert calls.relation(other) is Relation.UNQUEUED
    assert calls.join(other) is Place.WAITING
    calls.begin(first)
    assert of(other, calls.end(first))


def test_a_call_without_a_place_runs_if_the_key_is_free(calls: Calls) -> None:
    first, second = new_token(), new_token()
    calls.begin(first)
    assert calls.relation(second) is Relation.UNQUEUED
    assert calls.join(second) is Place.WAITING
    assert of(second, calls.end(first))


def test_a_call_that_joins_when_the_one_before_it_has_just_ended_runs_at_once(calls: Calls) -> None:
    (first,) = calls.joined(1)
    calls.begin(first)
    other = new_token()
    assert calls.relation(other) is Relation.UNQUEUED
    calls.end(first)
    assert calls.join(other) is Place.HINTED
    calls.begin(other)


def test_a_call_knows_how_many_are_before_it(calls: Calls) -> None:
    tokens = calls.joined(3)
    assert [calls.position(token) for token in tokens] == [0, 1, 2]
    calls.begin(tokens[0])
    assert calls.position(tokens[0]) == 0, "also while it runs"
    calls.end(tokens[0])
    assert [calls.position(token) for token in [*tokens, new_token()]] == [None, 0, 1, None]


def test_the_queues_of_a_shard_and_their_calls_are_read_in_order(calls: Calls) -> None:
    shard, queue = Keyspace.shard(calls.key), calls.queue
    assert calls.key not in queue.keys(shard, timeout=TIMEOUT)
    assert queue.depths([calls.key], timeout=TIMEOUT) == [Depth(waiting=0, oldest_at=None)]
    tokens = calls.joined(3)
    assert calls.key in queue.keys(shard, timeout=TIMEOUT)
    (depth,) = queue.depths([calls.key], timeout=TIMEOUT)
    found = queue.calls(calls.key, most=10, timeout=TIMEOUT)
    assert (depth.waiting, depth.oldest_at) == (3, found[0].joined_at)
    assert [(call.call_id, call.position) for call in found] == [
        (token.call_id, number) for number, token in enumerate(tokens)
    ]
    assert [call.state for call in found] == [CallState.HINTED, CallState.WAITS, CallState.WAITS]
    assert [call.message for call in found] == [token.attempt.encode() for token in tokens]
    calls.begin(tokens[0])
    (depth,) = queue.depths([calls.key], timeout=TIMEOUT)
    assert (depth.waiting, depth.oldest_at) == (2, found[1].joined_at)
    (first, second) = queue.calls(calls.key, most=2, messages=False, timeout=TIMEOUT)
    assert (first.state, first.has_begun, first.message) == (CallState.BEGUN, True, b"")
    assert [call.call_id for call in queue.calls(calls.key, first=2, most=5, timeout=TIMEOUT)] == [
        tokens[2].call_id
    ]
    assert queue.calls(calls.key, first=3, most=5, timeout=TIMEOUT) == []
    assert queue.leave(calls.key, second.call_id, timeout=TIMEOUT)
    (second,) = queue.calls(calls.key, first=1, most=1, timeout=TIMEOUT)
    assert second.state is CallState.LEAVES


def test_a_queue_takes_as_many_calls_as_may_wait(calls: Calls) -> None:
    first, second = calls.joined(2)
    request = Join(key=calls.key, token=new_token(), message=b"m", late=True, max_waiting=2)
    assert calls.queue.join(request, timeout=TIMEOUT) == (Place.FULL, 2)
    assert calls.join(second, max_waiting=2) is Place.WAITING  # it has a place
    calls.begin(first)
    calls.end(first)
    assert calls.join(new_token(), max_waiting=2) is Place.WAITING


# Repeated requests, whose replies were lost.


def test_a_repeated_join_keeps_the_place_and_its_reply(calls: Calls) -> None:
    first, second = new_token(), new_token()
    assert [calls.join(first), calls.join(first)] == [Place.HINTED, Place.HINTED]
    assert [calls.join(second), calls.join(second)] == [Place.WAITING, Place.WAITING]
    calls.begin(first)
    assert of(second, calls.end(first))


def test_a_join_after_the_end_of_the_call_finds_that_it_has_ended(calls: Calls) -> None:
    (token,) = calls.joined(1)
    calls.begin(token)
    calls.end(token)
    assert calls.join(token) is Place.ENDED
    assert calls.relation(token) is Relation.DONE


def test_a_repeated_end_has_the_same_reply(calls: Calls) -> None:
    first, second, third = calls.joined(3)
    calls.begin(first)
    assert [of(second, calls.end(first)) for _ in range(3)] == [True, True, True]
    calls.begin(second)
    assert calls.end(first) is None  # the second call was published meanwhile
    assert of(third, calls.end(second))


# Copies.


def test_a_call_that_an_older_worker_has_ended_leaves_the_queue(calls: Calls) -> None:
    first, second = calls.joined(2)
    take(calls.store, calls.key, token=first)
    done = {"completion": CompletionState.DONE, "completion_ttl": DAY}
    give(calls.store, calls.key, first, **done)
    assert calls.relation(new_token(first.task_id)) is Relation.DONE
    assert calls.is_due()
    assert of(second, calls.hinted_by_sweep())


def test_every_end_leaves_a_completion_record_whichever_attempt_a_copy_has(early: Calls) -> None:
    (token,) = early.joined(1)
    early.begin(token)
    newer = new_token(token.task_id, retries=1)
    early.join(newer)
    early.release(token, goes_on=True)
    early.begin(newer)
    early.end(newer)
    for copy in (token, newer):
        assert early.relation(copy) is Relation.DONE


def test_a_copy_of_an_older_attempt_is_superseded(calls: Calls) -> None:
    (token,) = calls.joined(1)
    calls.begin(token)
    newer = new_token(token.task_id, retries=1)
    calls.join(newer)
    calls.release(token, goes_on=True)
    assert calls.relation(token) is Relation.SUPERSEDED
    calls.begin(newer)


def test_a_second_copy_is_kept_if_the_store_has_no_message_of_the_call(calls: Calls) -> None:
    token = new_token()
    calls.begin(token)
    copy = new_token(token.task_id)
    assert calls.relation(copy) is Relation.UNQUEUED
    calls.join(copy)
    assert calls.relation(copy) is Relation.QUEUED


def test_a_newer_message_of_a_call_that_waits_is_not_published(calls: Calls) -> None:
    _, second = calls.joined(2)
    assert calls.join(second, sequence=1) is Place.WAITING


# Retries.


def test_an_attempt_that_was_acknowledged_early_is_not_hinted_for_its_retry(early: Calls) -> None:
    """The retry's message has not joined: the store did not answer."""
    first, second = early.joined(2)
    early.begin(first)
    early.release(first, goes_on=True)
    assert early.relation(second) is Relation.QUEUED
    assert not early.is_due()
    assert early.lost_by_sweep().call_id == first.call_id


def test_a_call_that_retries_keeps_its_place(calls: Calls) -> None:
    first, second = calls.joined(2)
    calls.begin(first)
    newer = new_token(first.task_id, retries=1)
    calls.join(newer, message=b"the second attempt")
    reply, hint = calls.release(first, goes_on=True, due_in=30.0)
    assert reply is ReleaseReply.OURS
    assert of(newer, hint)
    assert hint is not None
    assert hint.message == b"the second attempt"
    assert calls.relation(second) is Relation.QUEUED
    assert not calls.is_due()
    calls.begin(newer)
    assert of(second, calls.end(newer))


def test_a_repeated_release_of_a_call_that_retries_has_the_same_reply(calls: Calls) -> None:
    first, second = calls.joined(2)
    calls.begin(first)
    newer = new_token(first.task_id, retries=1)
    calls.join(newer)
    assert of(newer, calls.release(first, goes_on=True)[1])
    assert of(newer, calls.release(first, goes_on=True)[1]), "the reply was lost"
    calls.begin(newer)
    assert calls.release(first, goes_on=True)[1] is None, "its message has arrived"
    assert of(second, calls.end(newer))


def test_calls_that_1_0_0rc1_has_written_are_read(on_server: Calls, client: redis.Redis) -> None:
    """Their states have no time of a sweep."""
    first, second = on_server.joined(2)
    names = CallQueueNames.of(on_server.key)
    for token in (first, second):
        state = client.hget(names.calls, f"={token.call_id}") or b""
        client.hset(names.calls, f"={token.call_id}", state.rpartition(b" ")[0])
    assert of(first, on_server.hinted_by_sweep(), copies=2)
    on_server.begin(first)
    assert of(second, on_server.end(first))


def test_a_sweep_publishes_the_newest_attempt(calls: Calls) -> None:
    (token,) = calls.joined(1)
    calls.begin(token)
    calls.join(new_token(token.task_id, retries=1), message=b"the second attempt")
    calls.lose_lease()
    hint = calls.hinted_by_sweep()
    assert (hint.message, hint.has_begun) == (b"the second attempt", False)


def test_a_message_that_is_requeued_replaces_the_older_copy(calls: Calls) -> None:
    first, _ = calls.joined(2)
    calls.begin(first)
    calls.lose_lease()
    copy: Any = {"message": b"after a loss", "asked": (first.nonce,)}
    assert calls.join(first, sequence=1, **copy) is Place.HINTED
    assert calls.relation(new_token(first.task_id)) is Relation.SUPERSEDED
    calls.begin(new_token(first.task_id), sequence=1)
    calls.lose_lease()
    assert calls.hinted_by_sweep().message == b"after a loss"


def test_a_message_that_arrives_before_it_has_joined_joins_before_its_body_begins(
    calls: Calls,
) -> None:
    """With the message of an older one the call would lose its place together with its worker."""
    first, second = calls.joined(2)
    calls.begin(first)
    calls.release(first, goes_on=True)
    newer = new_token(first.task_id, retries=1)
    for sequence in (0, 1):
        reply = calls.ask(newer, sequence=sequence)
        assert isinstance(reply, Refused)
        assert reply.relation is Relation.UNQUEUED
        assert calls.join(newer, sequence=sequence) is Place.HINTED
        calls.begin(newer, sequence=sequence)
        assert calls.relation(first) is Relation.SUPERSEDED
        calls.lose_lease()
        assert calls.hinted_by_sweep().call_id == first.call_id
    calls.begin(newer, sequence=1)
    assert of(second, calls.end(newer))


def test_a_retry_that_joins_when_it_arrives_runs_although_the_key_is_reserved_for_it(
    calls: Calls,
) -> None:
    (first,) = calls.joined(1)
    calls.begin(first)
    newer = first.next_attempt()
    reserved = {"become": Kind.RESERVED, "become_ttl": LONG, "next_token": newer}
    calls.release(first, goes_on=True, **reserved)
    assert calls.join(new_token("another")) is Place.WAITING
    newer = new_token(first.task_id, retries=1)
    assert calls.relation(newer) is Relation.UNQUEUED
    assert calls.join(newer) is Place.HINTED
    calls.begin(newer)


def test_a_call_may_leave_one_queue_for_another(store: Store) -> None:
    """The arguments of a retry may have another key."""
    one, other = Calls(store), Calls(store)
    other.key = f"{one.key}-other"  # a server alone has one shard
    first, second = (new_token("t", retries=retries) for retries in range(2))
    one.join(first)
    one.begin(first)
    assert other.join(second) is Place.HINTED
    one.end(first)
    other.begin(second)
    other.end(second)
    assert other.relation(second) is Relation.DONE


def test_a_new_call_that_joins_prolongs_its_own_claim(calls: Calls) -> None:
    claim, (first, second) = Keyspace.claim("app.sync", calls.key), (new_token(), new_token())
    take_claim(calls.store, claim, first, ttl=5.0)

    def ttl() -> float:
        record = calls.store.leases.inspect(claim)
        assert record is not None
        assert record.token == first.call_id
        return record.ttl

    calls.join(second, claim=claim, claim_ttl=60.0)
    assert ttl() <= 5.0
    calls.join(first, claim=claim, claim_ttl=60.0)
    assert 50.0 < ttl() <= 60.0
    calls.join(first, claim=claim, claim_ttl=600.0)
    assert ttl() <= 60.0, "it has a place already"


@pytest.mark.parametrize("has_joined", [True, False], ids=["joins-before", "joins-after"])
def test_a_call_that_has_left_a_queue_may_come_back(calls: Calls, has_joined: bool) -> None:
    """The second retry has the key of the first attempt again, which may not have ended yet."""
    here, beyond = (new_token("t", retries=retries) for retries in (0, 2))
    following = new_token()
    calls.join(here)
    calls.hinted_by_sweep()  # so that the end is remembered for a week
    calls.begin(here)
    calls.join(following)
    if has_joined:
        assert calls.join(beyond) is Place.WAITING
        assert of(beyond, calls.end(here, may_return_from=1))
    else:
        assert of(following, calls.end(here, may_return_from=1))
        assert calls.join(beyond) is Place.WAITING
        calls.begin(following)
        assert of(beyond, calls.end(following))
        assert calls.relation(here) is Relation.DONE, "a late copy of the first attempt"
    calls.begin(beyond)
    calls.end(beyond)
    assert calls.relation(beyond) is Relation.DONE


def test_a_call_that_has_left_a_queue_does_not_begin_there_again(early: Calls) -> None:
    token = new_token("t")
    early.join(token)
    early.begin(token)
    early.end(token, may_return_from=1)
    assert early.relation(token) is Relation.DONE
    assert early.join(token) is Place.ENDED


def test_a_call_that_the_broker_may_deliver_again_may_begin_again(calls: Calls) -> None:
    """Celery has rejected its message, and the queue of dead letters leads to this one."""
    (token,) = calls.joined(1)
    calls.hinted_by_sweep()
    calls.begin(token)
    calls.end(token, may_return_from=0)
    calls.begin(token)


# Looks.


def test_a_queue_is_due_as_soon_as_its_lease_has_ended(calls: Calls) -> None:
    first, _ = calls.joined(2)
    calls.begin(first, ttl=SHORT)
    wait_until(calls.is_due, "the time of the sweep")
    hint = calls.hinted_by_sweep()
    assert of(first, hint, copies=2)
    assert hint.has_begun
    assert not calls.is_due()
    calls.begin(new_token(first.task_id))


def test_a_call_that_was_acknowledged_early_does_not_begin_again(early: Calls) -> None:
    first, second = early.joined(2)
    early.begin(first, ttl=SHORT)
    wait_until(early.is_due, "the time of the sweep")
    lost = early.lost_by_sweep()
    assert lost.call_id == first.call_id
    assert not early.is_due()
    assert early.sweep() == (True, lost)  # the first client died before it had stored the result
    assert early.relation(new_token(first.task_id)) is Relation.SUPERSEDED
    assert early.relation(second) is Relation.QUEUED
    removal, hint = early.remove(first)
    assert removal is Removal.REMOVED
    assert of(second, hint)
    early.begin(second)


def test_a_delivery_that_got_no_reply_begins_although_it_may_have_been_granted_the_lease(
    early: Calls,
) -> None:
    (token,) = early.joined(1)
    early.begin(token)  # the reply is lost, and so is the release
    early.lose_lease()
    again = new_token(token.task_id)
    early.begin(again, asked=("another", token.nonce))
    early.lose_lease()
    assert early.relation(new_token(token.task_id)) is Relation.LOST


def requeued(calls: Calls, *asked: str, call: Token) -> Token:
    """The copy of a delivery that met a store without a reply. It joins when it arrives."""
    copy = new_token(call.task_id)
    reply = calls.ask(copy, sequence=1, asked=asked)
    assert isinstance(reply, Refused)
    assert reply.relation is Relation.UNQUEUED
    assert calls.join(copy, sequence=1, asked=(*asked, copy.nonce)) is Place.WAITING
    return copy


def test_a_copy_of_a_message_by_which_a_call_has_begun_does_not_begin_it_again(
    early: Calls,
) -> None:
    """Its message was delivered twice, and the second delivery met a store without a reply."""
    first, second = early.joined(2)
    early.begin(first)
    copy = requeued(early, new_token().nonce, call=first)
    early.lose_lease()
    reply = early.ask(copy, sequence=1)
    assert isinstance(reply, Refused)
    assert reply.relation is Relation.LOST
    assert early.found_by_look()[1].message == copy.attempt.encode(), "the newest message"
    assert of(second, early.remove(first)[1])


def test_a_copy_begins_the_call_if_its_delivery_may_have_been_granted_the_lease(
    early: Calls,
) -> None:
    (first,) = early.joined(1)
    early.begin(first)  # the reply is lost, and the delivery is requeued
    copy = requeued(early, first.nonce, call=first)
    early.lose_lease()
    assert of(first, early.hinted_by_sweep())
    early.begin(copy, sequence=1)


def test_a_call_that_begins_again_is_not_disturbed_by_a_copy_of_its_message(calls: Calls) -> None:
    (first,) = calls.joined(1)
    calls.begin(first)
    requeued(calls, new_token().nonce, call=first)
    (call,) = calls.queue.calls(calls.key, most=1, timeout=TIMEOUT)
    assert (call.state, call.begins) == (CallState.BEGUN, 1)
    calls.lose_lease()
    assert calls.hinted_by_sweep().begins == 1


def test_a_lease_that_was_given_back_before_the_body_began_leaves_the_call_in_its_place(
    early: Calls,
) -> None:
    first, second = early.joined(2)
    early.begin(first)
    assert early.release(first, goes_on=True, has_begun=False) == (ReleaseReply.OURS, None)
    assert early.relation(second) is Relation.QUEUED
    early.begin(new_token(first.task_id))


def test_a_call_that_has_not_begun_is_given_back_though_its_lease_has_ended(early: Calls) -> None:
    """The grant and all later requests of its client had no reply for longer than its ttl."""
    first, second = early.joined(2)
    early.begin(first)
    early.lose_lease()
    assert early.sweep() is None
    assert not early.is_due(), "its client has time to say that no body has begun"
    assert early.sweep_early() is None, "a sweep at the same time shortens it"
    (depth,) = early.queue.depths([early.key], timeout=TIMEOUT)
    assert depth.waiting == 1
    undone = early.release(first, goes_on=True, has_begun=False)
    assert undone == (ReleaseReply.NOT_OURS, None)
    assert not early.is_due(), "its message is on its way"
    assert early.relation(second) is Relation.QUEUED
    early.begin(new_token(first.task_id))


def test_a_call_that_another_client_has_begun_is_not_given_back(early: Calls) -> None:
    (token,) = early.joined(1)
    early.begin(token)
    early.lose_lease()
    again = new_token(token.task_id)
    early.begin(again, asked=(token.nonce,))
    early.lose_lease()
    assert early.sweep() is None
    undone = early.release(token, goes_on=True, has_begun=False)
    assert undone == (ReleaseReply.NOT_OURS, None)
    assert early.relation(new_token(token.task_id)) is Relation.LOST


def crash(calls: Calls, token: Token, **options: Any) -> None:
    """One more delivery of a call begins, and its process dies."""
    calls.begin(new_token(token.task_id, retries=token.retries), most_begins=2, **options)
    calls.lose_lease()


def is_lost(calls: Calls, token: Token) -> bool:
    """Whether one more delivery finds that the call has begun as often as it may."""
    reply = calls.ask(new_token(token.task_id, retries=token.retries), most_begins=2)
    return isinstance(reply, Refused) and reply.relation is Relation.LOST


def test_a_call_that_has_begun_as_often_as_it_may_is_lost_and_the_next_one_runs(
    calls: Calls,
) -> None:
    first, second = calls.joined(2)
    crash(calls, first)
    assert calls.hinted_by_sweep().begins == 1
    crash(calls, first)
    assert calls.hinted_by_sweep().begins == 2
    assert is_lost(calls, first)
    assert calls.relation(second) is Relation.QUEUED, "its result is stored before"
    lost, hint = calls.found_by_look()
    assert (lost, hint.call_id, hint.begins) == (True, first.call_id, 2)
    removal, following = calls.remove(first)
    assert (removal, of(second, following)) == (Removal.REMOVED, True)
    assert calls.relation(new_token(first.task_id)) is Relation.DONE
    calls.begin(second)


def test_a_call_that_joined_by_running_is_lost_too_if_it_has_begun_as_often_as_it_may(
    calls: Calls,
) -> None:
    first = new_token()
    crash(calls, first)
    assert calls.join(first) is Place.WAITING
    crash(calls, first)
    assert is_lost(calls, first)


def test_a_call_without_a_bound_may_begin_any_number_of_times(calls: Calls) -> None:
    (token,) = calls.joined(1)
    for _ in range(30):
        calls.begin(new_token(token.task_id))
        calls.lose_lease()
    assert calls.hinted_by_sweep().begins == 30


def test_only_begins_of_bodies_count(calls: Calls) -> None:
    (token,) = calls.joined(1)
    crash(calls, token)
    undone = new_token(token.task_id)
    calls.begin(undone)
    calls.begin(undone)  # repeated, because the reply was lost
    assert calls.release(undone, goes_on=True, has_begun=False) == (ReleaseReply.OURS, None)
    unanswered = new_token(token.task_id)
    calls.begin(unanswered)
    calls.lose_lease()
    crash(calls, token, asked=(unanswered.nonce,))
    assert calls.hinted_by_sweep().begins == 2
    assert is_lost(calls, token)


def test_a_grant_that_is_undone_counts_once(early: Calls) -> None:
    first, second = early.joined(2)
    for _ in range(2):  # its client asks again, and knows that no body has begun
        early.begin(first)
        early.release(first, goes_on=True, has_begun=False)
        first, asked = new_token(first.task_id), (first.nonce,)
    assert of(first, early.hinted_by_sweep(), copies=2), "it has its place"
    assert early.relation(second) is Relation.QUEUED
    early.begin(first, asked=asked)
    early.lose_lease()
    assert early.lost_by_sweep().begins == 1


def test_a_retry_may_begin_as_often_as_the_attempt_before_it(calls: Calls) -> None:
    (token,) = calls.joined(1)
    crash(calls, token)
    calls.begin(token)
    retry = token.next_attempt()
    calls.join(retry)
    calls.release(token, goes_on=True)
    crash(calls, retry)
    assert not is_lost(calls, retry), "it runs"
    calls.lose_lease()
    assert is_lost(calls, retry)


@pytest.mark.parametrize("is_lost", [False, True])
def test_of_clients_that_sweep_at_the_same_time_one_finds_the_call(
    store: Store, is_lost: bool
) -> None:
    calls = Calls(store, late=not is_lost)
    (token,) = calls.joined(1)
    if is_lost:
        calls.begin(token)
        calls.lose_lease()
        assert calls.sweep() is None
    found = calls.found_by_look()
    assert (found[0], found[1].call_id) == (is_lost, token.call_id)
    assert [calls.sweep_early() for _ in range(3)] == [None] * 3
    assert calls.found_by_look()[0] is is_lost, "the first has died before it could act"


def test_a_copy_of_a_call_that_is_lost_makes_it_leave(early: Calls) -> None:
    first, _ = early.joined(2)
    early.begin(first)
    early.lose_lease()
    assert early.relation(new_token(first.task_id)) is Relation.LOST
    assert early.is_due()
    lost = early.sweep_early()
    assert lost is not None
    assert lost[0]


def test_the_sweep_at_a_call_that_is_lost_is_not_put_off(calls: Calls) -> None:
    """The parent of a process that died notices it late, when another delivery was refused."""
    first, second = calls.joined(2)
    for _ in range(2):
        crash(calls, first)
    assert is_lost(calls, first)
    calls.queue.defer(calls.key, seconds=LONG, timeout=TIMEOUT)
    assert calls.is_due()
    lost = calls.sweep_early()
    assert lost is not None
    assert lost[0]
    # Its result could not be stored: the next sweep comes as soon as the client says.
    calls.queue.defer(calls.key, seconds=SHORT, timeout=TIMEOUT, unpublished=lost[1])
    wait_until(calls.is_due, "the time of the sweep")
    assert calls.relation(second) is Relation.QUEUED


def test_a_sweep_while_the_key_is_held_waits_for_the_end_of_the_lease(calls: Calls) -> None:
    first, _ = calls.joined(2)
    calls.begin(first)
    assert calls.sweep() is None
    assert not calls.is_due()


def test_a_call_without_a_message_leaves_the_queue_to_the_next(calls: Calls) -> None:
    """The broker still has its message, and it joins again when that is delivered."""
    first = new_token()
    calls.begin(first)
    (second,) = calls.joined(1)
    calls.lose_lease()
    assert [hint.call_id for _, hint in calls.swept()] == [second.call_id], "in the same sweep"
    assert calls.relation(new_token(first.task_id)) is Relation.UNQUEUED


def test_a_hint_that_was_not_published_is_due_again_soon(calls: Calls) -> None:
    (token,) = calls.joined(1)
    assert not calls.is_due()
    calls.queue.defer(calls.key, seconds=SHORT, timeout=TIMEOUT)
    wait_until(calls.is_due, "the time of the sweep")
    assert of(token, calls.hinted_by_sweep(), copies=2)


def test_a_hint_that_was_not_published_is_no_copy(calls: Calls) -> None:
    """Else the deadline of the next one would grow with each second of an outage of the broker."""
    (token,) = calls.joined(1)
    for _ in range(8):
        calls.queue.defer(calls.key, seconds=0.001, timeout=TIMEOUT)
        hint = calls.hinted_by_sweep()
        assert of(token, hint, copies=2)
        calls.queue.defer(calls.key, seconds=LONG, timeout=TIMEOUT, unpublished=hint)


def test_an_empty_queue_is_not_due(calls: Calls) -> None:
    (token,) = calls.joined(1)
    calls.begin(token)
    calls.end(token)
    calls.queue.defer(calls.key, seconds=0.001, timeout=TIMEOUT)
    assert calls.sweep() is None
    assert not calls.is_due()


# Other clients of the key.


def test_a_queue_is_due_soon_after_another_client_has_left_the_key(store: Store) -> None:
    released, freed, expired = three = [Calls(store) for _ in range(3)]
    tokens = [take(store, one.key, ttl=0.8 if one is expired else LONG) for one in three]
    waiting = [new_token() for _ in three]
    for one, token in zip(three, waiting, strict=True):
        assert [one.join(token), one.join(new_token())] == [Place.WAITING, Place.WAITING]
    assert not released.is_due()
    assert give(store, released.key, tokens[0]) is ReleaseReply.OURS
    assert store.operators.free(freed.key, None)
    for one, token in zip(three, waiting, strict=True):
        wait_until(one.is_due, "the time of the sweep")
        assert of(token, one.hinted_by_sweep())


def test_the_next_call_is_delayed_while_its_key_cools_down(calls: Calls) -> None:
    first, second = calls.joined(2)
    calls.begin(first)
    hint = calls.end(first, become=Kind.COOLING, become_ttl=30.0)
    assert hint is not None
    assert of(second, hint)
    assert 30.0 < hint.countdown <= 30.02, "a little later: clocks differ"
    assert not calls.is_due()
    repeated = calls.end(first, become=Kind.COOLING, become_ttl=30.0)
    assert repeated is not None
    assert of(second, repeated)
    assert 0.0 < repeated.countdown <= hint.countdown
    assert calls.relation(second) is Relation.QUEUED, "its key still cools down"


def test_a_key_that_cools_down_for_long_keeps_the_queue_waiting(calls: Calls) -> None:
    first, second = calls.joined(2)
    calls.begin(first)
    assert calls.end(first, become=Kind.COOLING, become_ttl=61.0) is None
    assert calls.sweep() is None
    calls.lose_lease()
    assert of(second, calls.hinted_by_sweep())


# Removals.


def test_a_call_that_leaves_never_begins_and_is_then_removed(calls: Calls) -> None:
    first, second, third = calls.joined(3)
    found = calls.queue.leave(calls.key, second.call_id, timeout=TIMEOUT)
    assert isinstance(found, Hint)
    assert (found.call_id, found.message) == (second.call_id, second.attempt.encode())
    assert calls.queue.leave(calls.key, second.call_id, timeout=TIMEOUT) == found
    calls.begin(first)
    assert calls.end(first) is None  # its result is not stored yet
    removal, hint = calls.remove(second)
    assert removal is Removal.REMOVED
    assert of(third, hint)
    assert calls.relation(second) is Relation.DONE


def test_a_running_call_is_not_removed(calls: Calls) -> None:
    first, second = calls.joined(2)
    calls.begin(first)
    queue = calls.queue
    assert queue.leave(calls.key, first.call_id, timeout=TIMEOUT) is Removal.RUNNING
    for only_unbegun in (False, True):
        assert calls.remove(first, only_unbegun=only_unbegun) == (Removal.RUNNING, None)
    assert queue.leave(calls.key, "another", timeout=TIMEOUT) is Removal.ABSENT
    assert of(second, calls.end(first))


def test_a_call_that_has_not_begun_is_withdrawn_and_never_begins(calls: Calls) -> None:
    first, second = calls.joined(2)
    removal, hint = calls.remove(first, only_unbegun=True)
    assert removal is Removal.REMOVED
    assert of(second, hint)
    assert calls.relation(first) is Relation.DONE
    calls.begin(second)


def test_a_call_that_is_removed_from_the_middle_publishes_nothing(calls: Calls) -> None:
    first, second, third = calls.joined(3)
    for token in (second, third):
        removed = calls.remove(token)
        assert removed == (Removal.REMOVED, None), "the head was published by its own join"
    calls.begin(first)
    assert calls.end(first) is None


def test_a_call_that_leaves_while_it_retries_does_not_begin_again(calls: Calls) -> None:
    (first,) = calls.joined(1)
    calls.begin(first)
    newer = new_token(first.task_id, retries=1)
    calls.join(newer)
    calls.release(first, goes_on=True)
    assert isinstance(calls.queue.leave(calls.key, first.call_id, timeout=TIMEOUT), Hint)
    assert calls.join(newer, sequence=1) is Place.WAITING
    assert calls.relation(newer) is Relation.SUPERSEDED
    removal, _ = calls.remove(newer)
    assert removal is Removal.REMOVED


def test_a_call_whose_retry_has_joined_runs_until_its_body_has_ended(calls: Calls) -> None:
    first, _ = calls.joined(2)
    calls.begin(first)
    calls.join(new_token(first.task_id, retries=1))
    leave = partial(calls.queue.leave, calls.key, first.call_id, timeout=TIMEOUT)
    assert leave() is Removal.RUNNING
    assert of(first, calls.end(first, goes_on=True)), "its retry"
    assert isinstance(leave(), Hint)


def test_a_retry_that_is_removed_leaves_the_key_that_is_reserved_for_it(calls: Calls) -> None:
    first, second = calls.joined(2)
    calls.begin(first)
    retry = new_token(first.task_id, retries=1)
    calls.join(retry)
    reserved = {"become": Kind.RESERVED, "become_ttl": LONG, "next_token": first.next_attempt()}
    calls.release(first, goes_on=True, **reserved)
    assert isinstance(calls.queue.leave(calls.key, first.call_id, timeout=TIMEOUT), Hint)
    removed, hint = calls.remove(retry)
    assert (removed, of(second, hint)) == (Removal.REMOVED, True)
    calls.begin(second)


def test_a_call_that_leaves_holds_up_the_queue_until_a_sweep(calls: Calls) -> None:
    """The client that has made it leave may still store its result, or may have died."""
    first, second = calls.joined(2)
    assert isinstance(calls.queue.leave(calls.key, second.call_id, timeout=TIMEOUT), Hint)
    calls.begin(first)
    assert calls.end(first) is None
    assert not calls.is_due(), "its client has time for its result"
    is_lost, hint = calls.found_by_look()
    assert (is_lost, hint.call_id, hint.has_begun) == (True, second.call_id, False)


def test_a_call_whose_retry_has_joined_is_not_removed_with_its_former_attempt(calls: Calls) -> None:
    """The child was killed between the two."""
    first, second = calls.joined(2)
    calls.begin(first)
    newer = new_token(first.task_id, retries=1)
    calls.join(newer)
    calls.lose_lease()
    removed = calls.remove(first)
    assert removed == (Removal.RUNNING, None)
    calls.begin(newer)
    assert of(second, calls.end(newer))


def test_a_call_whose_later_copy_has_joined_is_not_removed_with_the_former_one(
    calls: Calls,
) -> None:
    """A process died after it had put its message back."""
    (token,) = calls.joined(1)
    calls.join(token, sequence=1)
    for only_unbegun in (False, True):
        removed = calls.remove(token, sequence=0, only_unbegun=only_unbegun)
        assert removed == (Removal.RUNNING, None)
    calls.begin(token, sequence=1)
    calls.lose_lease()
    assert calls.remove(token, sequence=1) == (Removal.REMOVED, None)


def test_a_call_that_waits_for_its_retry_is_removed_when_that_is_discarded(calls: Calls) -> None:
    """It was revoked."""
    first, second = calls.joined(2)
    calls.begin(first)
    newer = new_token(first.task_id, retries=1)
    calls.join(newer)
    calls.release(first, goes_on=True)
    removal, hint = calls.remove(newer)
    assert removal is Removal.REMOVED
    assert of(second, hint)


def test_a_call_that_has_begun_is_not_withdrawn_while_it_retries(calls: Calls) -> None:
    (first,) = calls.joined(1)
    calls.begin(first)
    calls.release(first, goes_on=True)
    withdrawn = calls.remove(first, only_unbegun=True)
    assert withdrawn == (Removal.RUNNING, None)


# The release is that of a lease.


def test_the_end_of_a_call_marks_its_attempt_and_the_lost_lease_of_a_call_ends_nothing(
    calls: Calls,
) -> None:
    first, _ = calls.joined(2)
    calls.begin(first)
    calls.lose_lease()
    assert calls.release(first) == (ReleaseReply.NOT_OURS, None)
    again = new_token(first.task_id)
    calls.begin(again)
    calls.end(again, completion=CompletionState.DONE, completion_ttl=DAY)
    assert calls.relation(first) is Relation.DONE


def test_a_late_end_of_a_call_that_was_taken_for_dead_releases_none_of_those_after_it(
    early: Calls,
) -> None:
    """Its process was silent, and its body ended when the next one had begun."""
    first, second, third = early.joined(3)
    early.begin(first)
    early.lose_lease()
    early.lost_by_sweep()
    assert of(second, early.remove(new_token(first.task_id))[1])
    early.begin(second)
    assert early.release(first) == (ReleaseReply.NOT_OURS, None)
    assert early.remove(first) == (Removal.ABSENT, None)
    assert early.relation(third) is Relation.QUEUED
    assert of(third, early.end(second))


def test_keys_that_others_hold_do_not_keep_sweeps_from_the_keys_behind_them(store: Store) -> None:
    held, late = [Calls(store) for _ in range(3)], Calls(store)
    for one in held:
        take(store, one.key, ttl=LONG)
    for one in (*held, late):
        one.joined(1)
    for one in (*held, late):
        one.queue.defer(one.key, seconds=0.0, timeout=TIMEOUT)
    names = {one.key for one in (*held, late)}
    seen: set[str] = set()

    def all_are_seen() -> bool:
        for key in store.call_queue.due(Keyspace.shard(late.key), limit=2, timeout=TIMEOUT):
            seen.add(key)
            late.queue.sweep(key, timeout=TIMEOUT)
        return names <= seen

    wait_until(all_are_seen, "each sweep has two of the four")


# What Redis keeps.


@pytest.fixture
def on_server(server: Any) -> Iterator[Calls]:
    with closing(open_store(server.url())) as store:
        yield Calls(store)


@pytest.fixture
def client(server: Any) -> Iterator[redis.Redis]:
    with closing(redis.Redis.from_url(server.url())) as client:
        yield client


def due_in(calls: Calls, client: redis.Redis) -> int | None:
    """Seconds until the next sweep; None: there is none."""
    at: Any = client.zscore(CallQueueNames.of(calls.key).due, calls.key)
    now, _ = client.time()
    return None if at is None else round(at / 1000 - now)


def test_a_sweep_is_due_at_the_deadline_of_the_hint_or_at_the_end_of_the_lease(
    on_server: Calls, client: redis.Redis
) -> None:
    first, _ = on_server.joined(2)
    deadlines = [due_in(on_server, client)]
    for _ in range(3):
        on_server.hinted_by_sweep()
        deadlines.append(due_in(on_server, client))
    assert deadlines == pytest.approx([60, 240, 960, 3840], abs=2)
    on_server.begin(first)
    assert due_in(on_server, client) == pytest.approx(LONG, abs=2)
    assert on_server.sweep() is None
    assert due_in(on_server, client) == pytest.approx(LONG, abs=2)
    on_server.release(first, goes_on=True, due_in=30.0)
    assert due_in(on_server, client) == pytest.approx(90, abs=2)


def test_an_empty_queue_leaves_nothing_but_completion_record(
    on_server: Calls, client: redis.Redis
) -> None:
    first, second = on_server.joined(2)
    for token in (first, second):
        on_server.begin(token)
        on_server.end(token)
    on_server.queue.defer(on_server.key, seconds=SHORT, timeout=TIMEOUT)
    assert due_in(on_server, client) is None
    assert client.exists(*CallQueueNames.of(on_server.key)[:2]) == 0


def test_calls_whose_states_were_lost_hold_up_no_others(
    on_server: Calls, client: redis.Redis
) -> None:
    """Part of the data was deleted, or evicted."""
    on_server.joined(2)
    client.delete(CallQueueNames.of(on_server.key).calls)
    after = new_token()
    on_server.join(after)
    on_server.queue.defer(on_server.key, seconds=0.0, timeout=TIMEOUT)
    assert of(after, on_server.hinted_by_sweep())
    on_server.begin(after)
    on_server.end(after)
    assert client.exists(on_server.key, *CallQueueNames.of(on_server.key)[:2]) == 0


def test_the_keys_of_a_queue_are_none_of_other_programs(
    on_server: Calls, client: redis.Redis
) -> None:
    first, _ = on_server.joined(2)
    on_server.begin(first)
    shard = Keyspace.shard(on_server.key)
    beside = {CallQueueNames.of(on_server.key).last_number, *CallQueueNames.of(on_server.key)}
    assert client.exists(*beside) == 4
    found = dict(on_server.store.operators.foreign_keys(f"{shard.replace('{', '[{]')}:*"))
    assert beside.isdisjoint(found), found


def test_a_server_that_has_lost_everything_is_asked_for_its_number_of_shards_again(
    on_server: Calls, client: redis.Redis
) -> None:
    (token,) = on_server.joined(1)
    on_server.begin(token)
    note = Keyspace.shard_count(on_server.key)
    assert client.exists(note)
    client.flushall()
    client.script_flush()
    on_server.begin(new_token())  # it finds that the server has lost its scripts
    on_server.key = new_key()
    on_server.begin(new_token())
    assert client.exists(note)


def test_an_end_is_known_for_a_week_if_a_message_was_published_twice(
    on_server: Calls, client: redis.Redis
) -> None:
    first, second = on_server.joined(2)
    on_server.hinted_by_sweep()
    for token in (first, second):
        on_server.begin(token)
        on_server.end(token)
    ttls = [
        client.ttl(CallQueueNames.of(on_server.key).ended(token.call_id))
        for token in (first, second)
    ]
    assert ttls == pytest.approx([7 * DAY, DAY], abs=5)


@pytest.mark.parametrize("perhaps", [True, False])
def test_an_end_is_known_for_a_week_if_the_broker_may_have_a_message_that_it_refused(
    on_server: Calls, client: redis.Redis, perhaps: bool
) -> None:
    (token,) = on_server.joined(1)
    refused = Hint(key=on_server.key, call_id=token.call_id, copies=1, begins=0, message=b"m")
    options: Any = {"unpublished": refused, "perhaps": perhaps}
    on_server.queue.defer(on_server.key, seconds=LONG, timeout=TIMEOUT, **options)
    assert of(token, on_server.hinted_by_sweep())
    on_server.begin(token)
    on_server.end(token)
    known_for = client.ttl(CallQueueNames.of(on_server.key).ended(token.call_id))
    assert known_for == pytest.approx(7 * DAY if perhaps else DAY, abs=5)


def test_an_end_without_a_body_is_known_for_a_week_as_well(
    on_server: Calls, client: redis.Redis
) -> None:
    first, second = on_server.joined(2)
    on_server.hinted_by_sweep()
    for token in (first, second):
        on_server.remove(token)
    ttls = [
        client.ttl(CallQueueNames.of(on_server.key).ended(token.call_id))
        for token in (first, second)
    ]
    assert ttls == pytest.approx([7 * DAY, DAY], abs=5)


def test_the_first_call_that_leaves_is_due_soon_whatever_its_hint_s_deadline(
    on_server: Calls, client: redis.Redis
) -> None:
    (token,) = on_server.joined(1)
    for _ in range(3):
        on_server.hinted_by_sweep()
    on_server.queue.leave(on_server.key, token.call_id, timeout=TIMEOUT)
    assert due_in(on_server, client) == pytest.approx(60, abs=2)


def test_a_queue_is_due_if_the_server_s_clock_was_set_back(
    on_server: Calls, client: redis.Redis
) -> None:
    on_server.key = Keyspace("set-back").lock("contract", "k")  # in a shard of its own
    on_server.joined(1)
    due = CallQueueNames.of(on_server.key).due
    client.zadd(due, {on_server.key: (client.time()[0] + 30 * DAY) * 1000})
    assert on_server.is_due()


def test_a_number_is_given_once_though_the_queue_was_empty_meanwhile(
    on_server: Calls, client: redis.Redis
) -> None:
    numbers = []
    for _ in range(3):
        (token,) = on_server.joined(1)
        numbers.append(int(client.get(CallQueueNames.of(on_server.key).last_number) or 0))  # type: ignore[arg-type]
        on_server.begin(token)
        on_server.end(token)
    assert numbers == sorted(set(numbers))


@contextmanager
def full(client: redis.Redis) -> Iterator[None]:
    """No command that needs memory is carried out first in a script, or alone."""
    client.config_set("maxmemory", "1")
    try:
        yield
    finally:
        client.config_set("maxmemory", "0")


def test_a_full_server_refuses_joins_runs_calls_of_other_keys_and_drains_the_queue(
    on_server: Calls, client: redis.Redis
) -> None:
    tokens, with_place = on_server.joined(3), Calls(on_server.store)
    (other,) = with_place.joined(1)
    with full(client):
        with pytest.raises(StoreError, match="maxmemory"):
            on_server.join(new_token())
        with_place.begin(other)
        Calls(on_server.store).begin(new_token())  # it has no place, and its key is free
        for token in tokens:
            on_server.begin(token)
            reserved = {"become": Kind.RESERVED, "become_ttl": LONG}
            on_server.release(token, goes_on=True, **reserved, next_token=token.next_attempt())
            again = new_token(token.task_id, retries=1)
            assert on_server.join(again) is Place.HINTED, "it has a place"
            on_server.begin(again)
            on_server.end(again)


def test_calls_are_taken_out_and_published_again_by_a_full_server(
    on_server: Calls, client: redis.Redis
) -> None:
    first, second = on_server.joined(2)
    with full(client):
        assert isinstance(
            on_server.queue.leave(on_server.key, first.call_id, timeout=TIMEOUT), Hint
        )
        assert of(second, on_server.remove(first)[1])
        on_server.queue.defer(on_server.key, seconds=0.0, timeout=TIMEOUT)
        assert of(second, on_server.hinted_by_sweep(), copies=2)
