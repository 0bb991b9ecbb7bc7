"""What is asked of ZooKeeper without reading first: one transaction, which fails if it is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Holder, Token
from celery_singleton_lock.core.store_requests import (
    Acquire,
    ClaimRequest,
    CompletionState,
    Granted,
    Mark,
    Refused,
    Relation,
    Release,
    ReleaseReply,
)
from celery_singleton_lock.stores.zookeeper.store import ZooKeeperStore
from celery_singleton_lock.testing.contract import TIMEOUT, ask, lease_of, new_key, new_token
from tests.harness.wire import Count, Wire
from tests.harness.zookeeper import ZooKeeperEnsemble

pytestmark = pytest.mark.slow

ONE = Count(requests=1, round_trips=1)


@pytest.fixture(scope="module")
def path(zookeeper: ZooKeeperEnsemble) -> str:
    """Below it all buckets are there: they are made once in the life of an ensemble."""
    with closing(ZooKeeperStore(zookeeper.url("guesses"))) as store:
        session = store._ensemble.session(store._clock.now() + 60)
        for bucket in store.buckets:
            session.client.ensure_path(bucket)
    return "guesses"


@pytest.fixture
def store(zookeeper: ZooKeeperEnsemble, path: str) -> Iterator[ZooKeeperStore]:
    with closing(ZooKeeperStore(zookeeper.url(path))) as store:
        yield store


@pytest.fixture
def other(zookeeper: ZooKeeperEnsemble, path: str) -> Iterator[ZooKeeperStore]:
    """Another process's, for all that the ensemble knows."""
    with closing(ZooKeeperStore(zookeeper.url(path))) as store:
        yield store


def give(store: ZooKeeperStore, key: str, token: Token, **options: Any) -> ReleaseReply:
    return store.leases.release(Release(keys=(key,), token=token, **options), timeout=TIMEOUT)


def usual_costs(
    ensemble: ZooKeeperEnsemble, rounds: list[tuple[Callable[[], object], ...]]
) -> list[Count]:
    """The counts of the first, second ... operation of most rounds.

    Most, because a session's own heartbeat may fall into one or the other, and on a busy machine
    a new session, which knows nothing of what stands.
    """
    wire, costs = Wire(ensemble.ports), [Counter[Count]() for _ in rounds[0]]
    with wire.listening():
        for operations in rounds:
            for number, operation in enumerate(operations):
                wire.take()
                operation()
                costs[number][wire.take()] += 1
    return [cost.most_common(1)[0][0] for cost in costs]


# --- what it costs -------------------------------------------------------------------------------


def test_a_free_key_is_taken_and_given_back_in_one_request_each(
    zookeeper: ZooKeeperEnsemble, store: ZooKeeperStore
) -> None:
    ask(store, new_key(), new_token())  # the session stands
    held = [(new_key(), new_token()) for _ in range(9)]
    rounds = [
        (
            lambda key=key, token=token: ask(store, key, token),
            lambda key=key, token=token: give(store, key, token),
        )
        for key, token in held
    ]
    assert usual_costs(zookeeper, rounds) == [ONE, ONE]
    assert all(store.leases.inspect(key) is None for key, _ in held)


def test_a_message_is_claimed_in_one_request(
    zookeeper: ZooKeeperEnsemble, store: ZooKeeperStore
) -> None:
    def claim() -> None:
        key = Keyspace.claim("app.task", new_key())
        request = ClaimRequest(key=key, token=new_token(), holder=Holder(), ttl=60)
        assert store.claims.take(request, timeout=TIMEOUT) is None

    claim()  # the session stands
    assert usual_costs(zookeeper, [(claim,)] * 9) == [ONE]


def test_a_key_that_was_found_taken_is_not_written_to_again(
    store: ZooKeeperStore, other: ZooKeeperStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, token = new_key(), new_token()
    ask(other, key, token)
    written: list[object] = []
    commit = store._ensemble.commit

    def noting(*args: Any) -> Any:
        stats = commit(*args)
        written.append(stats)
        return stats

    monkeypatch.setattr(store._ensemble, "commit", noting)
    for _ in range(5):
        reply = ask(store, key, new_token())
        assert isinstance(reply, Refused)
        assert reply.relation is Relation.OTHER
    assert written == [None]
    assert give(other, key, token) is ReleaseReply.OURS
    third = new_token()
    assert isinstance(ask(store, key, third), Granted)
    give(store, key, third)
    written.clear()
    assert isinstance(ask(store, key, new_token()), Granted)
    assert [stats is not None for stats in written] == [True]


# --- what it must not do -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "relation"),
    [
        (CompletionState.DONE, Relation.DONE),
        (CompletionState.FINISHING, Relation.DUPLICATE),
        (CompletionState.WAITING, Relation.SUPERSEDED),
    ],
)
def test_a_completion_record_refuses_its_attempt_though_the_key_is_free(
    store: ZooKeeperStore, other: ZooKeeperStore, state: CompletionState, relation: Relation
) -> None:
    key, token = new_key(), new_token()
    other.leases.mark(Mark(key=key, token=token, state=state, ttl=60, sequence=1), timeout=TIMEOUT)
    for _ in range(2):
        reply = ask(store, key, token)
        assert isinstance(reply, Refused)
        assert reply.relation is relation
    assert store.leases.inspect(key) is None


def test_a_proof_that_no_completion_record_stands_leaves_none_behind(
    store: ZooKeeperStore, other: ZooKeeperStore
) -> None:
    key, token = new_key(), new_token()
    ask(store, key, token)
    view, _ = other._ensemble.read(
        (Keyspace.completion(key, token.attempt),), other._clock.now() + TIMEOUT
    )
    assert [seen.exists for seen in view.values()] == [False]


def test_of_many_clients_that_guess_that_a_key_is_free_one_is_granted(
    store: ZooKeeperStore, other: ZooKeeperStore
) -> None:
    with ThreadPoolExecutor(8) as threads:
        for _ in range(25):
            key = new_key()
            asked = [threads.submit(ask, one, key, new_token()) for one in (store, other) * 4]
            replies = [one.result() for one in asked]
            assert [isinstance(reply, Granted) for reply in replies].count(True) == 1


def test_a_holder_granted_by_a_guess_does_not_release_its_successor(
    store: ZooKeeperStore, other: ZooKeeperStore
) -> None:
    key, first, second = new_key(), new_token(), new_token()
    ask(store, key, first)
    assert other.operators.free(key, str(first))
    ask(other, key, second)
    assert give(store, key, first) is ReleaseReply.NOT_OURS
    record = store.leases.inspect(key)
    assert record is not None
    assert record.token == str(second)


def test_a_completion_record_that_came_beside_a_guessed_lease_decides_its_release(
    store: ZooKeeperStore, other: ZooKeeperStore
) -> None:
    key, token = new_key(), new_token()
    duplicate = Token(token.task_id, token.nesting, token.retries, "duplicate")
    ask(store, key, token)
    other.leases.mark(
        Mark(key=key, token=duplicate, state=CompletionState.DONE, ttl=60), timeout=TIMEOUT
    )
    done = {"completion": CompletionState.FINISHING, "completion_ttl": 60.0}
    assert give(store, key, token, **done) is ReleaseReply.OURS
    reply = ask(store, key, token)
    assert isinstance(reply, Refused)
    assert reply.relation is Relation.DONE  # and not what the release would have written


def test_a_grant_whose_reply_was_lost_is_granted_again(store: ZooKeeperStore) -> None:
    key, token = new_key(), new_token()
    request = Acquire(slots=(key,), token=token, holder=lease_of(key, token).holder, ttl=60)
    first = store.leases.acquire(request, timeout=TIMEOUT)
    store._own.forget((key, str(token)))  # as if the reply had been lost
    again = store.leases.acquire(request, timeout=TIMEOUT)
    assert isinstance(first, Granted)
    assert isinstance(again, Granted)
    assert first.fence is not None
    assert again.fence is not None
    assert again.fence > first.fence
