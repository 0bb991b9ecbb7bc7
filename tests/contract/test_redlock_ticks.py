"""Last runs on nodes that were away: no run is authorized twice, and a leader goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import redis

from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Token
from celery_singleton_lock.core.store_requests import Authorization, AuthorizeRun
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.redlock.store import RedlockStore
from celery_singleton_lock.testing.contract.steps import LONG, TIMEOUT, give, new_key, take
from tests.harness.redlock_nodes import RedlockNodes

# Several servers each: `make test` keeps memory, Redis and Valkey.
pytestmark = pytest.mark.slow


@pytest.fixture
def store(nodes: RedlockNodes) -> Iterator[RedlockStore]:
    with closing(RedlockStore(nodes.url())) as store:
        yield store


def authorize_run(
    store: RedlockStore, leader: str, token: Token, expected: str | None, new: str
) -> Authorization:
    entry = Keyspace.last_run(leader, "e")
    call = AuthorizeRun(
        leader=leader, token=token, entry=entry, expected=expected, new=new, ttl=LONG
    )
    return store.schedule.authorize(call, timeout=TIMEOUT)


def last_run(store: RedlockStore, leader: str) -> str | None:
    return store.schedule.last_runs([Keyspace.last_run(leader, "e")], timeout=TIMEOUT)[0]


def put_on(nodes: RedlockNodes, leader: str, text: str, *indexes: int) -> None:
    for index in indexes:
        with redis.Redis.from_url(nodes[index].url()) as client:
            client.set(Keyspace.last_run(leader, "e"), text, ex=600)


def test_the_newest_is_read_and_followed_where_two_nodes_missed_it_and_two_are_gone(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    leader = new_key()
    token = take(store, leader)
    put_on(nodes, leader, "1.5 a", 3, 4)
    put_on(nodes, leader, "2.5 b", 0, 1, 2)
    nodes[0].kill()
    nodes[1].kill()
    assert last_run(store, leader) == "2.5 b"
    assert (
        authorize_run(store, leader, token, last_run(store, leader), "4.5 d")
        is Authorization.AUTHORIZED
    )
    assert last_run(store, leader) == "4.5 d"


def test_what_a_majority_has_stands_against_a_client_that_expects_what_a_minority_has(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    leader = new_key()
    token = take(store, leader)
    put_on(nodes, leader, "1.5 a", 3, 4)
    put_on(nodes, leader, "2.5 b", 0, 1, 2)
    assert authorize_run(store, leader, token, "1.5 a", "3.5 c") is Authorization.CHANGED
    assert last_run(store, leader) == "2.5 b"


def test_a_deposed_leader_is_permitted_nowhere_else_though_a_minority_knows_it_still(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    leader = new_key()
    old = take(store, leader)
    assert authorize_run(store, leader, old, None, "1.5 a") is Authorization.AUTHORIZED
    give(store, leader, old)
    token = take(store, leader)
    with redis.Redis.from_url(nodes[0].url()) as client:
        client.set(leader, f"l {old} 1 {{}}", ex=600)
    assert authorize_run(store, leader, old, "1.5 a", "2.5 x") is Authorization.DEPOSED
    assert last_run(store, leader) == "1.5 a"
    assert authorize_run(store, leader, token, "1.5 a", "2.5 b") is Authorization.AUTHORIZED
    assert last_run(store, leader) == "2.5 b"


def test_unresponsive_nodes_that_decide_make_it_no_answer(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    leader = new_key()
    token = take(store, leader)
    with redis.Redis.from_url(nodes[0].url()) as client:
        client.delete(leader)
    nodes[1].kill()
    nodes[2].kill()
    with pytest.raises(StoreUnavailable):
        authorize_run(store, leader, token, None, "1.5 a")
