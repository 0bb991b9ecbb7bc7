"""What is special about claims in Redis: foreign data in their keys, scripts, round trips."""

from __future__ import annotations

from contextlib import closing

import pytest
import redis

from celery_singleton_lock.core.lease import Phase
from celery_singleton_lock.core.store import MarkerState, Refused, Relation, Released, Renewal
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.redis import RedisStore
from celery_singleton_lock.testing.contract.calls import (
    PUBLISHER,
    admit,
    ask,
    becomes,
    freed,
    give,
    is_as_published,
    lease_of,
    mark,
    new_claim,
    new_key,
    new_token,
    publish,
    record_of,
    renew,
    running,
    settle,
    take,
)
from celery_singleton_lock.testing.server import PrivateServer

FOREIGN = {
    "text": b"somebody's data",
    "empty": b"",
    "binary": b"\xff\x00\xfe",
    "almost a claim": b"q foreign queued",
    "a claim of no phase": b"q foreign",
    "another kind": b"z foreign queued {}",
}


@pytest.mark.parametrize("value", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_string_is_neither_given_nor_touched_and_fails_no_lease(
    redis_store: RedisStore, raw: redis.Redis, value: bytes
) -> None:
    key, claim = new_claim()
    token = new_token("foreign")
    raw.set(claim, value)
    for instead_of in ("", "foreign"):
        with pytest.raises(StoreError, match="can't read"):
            admit(redis_store, claim, token, instead_of=instead_of)
    for phase in (None, *Phase):
        settle(redis_store, token, claim, phase)
        mark(redis_store, key, token, MarkerState.WAITING, claim=becomes(claim, phase))
        take(redis_store, key, token, claim=becomes(claim, phase), yields=True)
        assert give(redis_store, key, token, claim=becomes(claim, phase)) is Released.RELEASED
    assert redis_store.inspect(claim) is None
    assert raw.get(claim) == value
    assert raw.ttl(claim) == -1


def test_a_foreign_list_is_neither_given_nor_touched_and_fails_no_lease(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    key, claim = new_claim()
    token = new_token()
    raw.rpush(claim, "somebody's", "data")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        admit(redis_store, claim, token)
    for phase in (None, *Phase):
        settle(redis_store, token, claim, phase)
        mark(redis_store, key, token, MarkerState.WAITING, claim=becomes(claim, phase))
        take(redis_store, key, token, claim=becomes(claim, phase), yields=True)
        assert renew(redis_store, [lease_of(key, token, 1, claim)]) == [Renewal.RENEWED]
        assert give(redis_store, key, token, claim=becomes(claim, phase)) is Released.RELEASED
    take(redis_store, key)
    reply = ask(redis_store, key, token, claim=freed(claim), frees_claim=True)
    assert isinstance(reply, Refused)
    assert raw.lrange(claim, 0, -1) == [b"somebody's", b"data"]
    assert raw.ttl(claim) == -1


def test_a_claim_of_a_phase_that_a_newer_version_knows_is_still_its_tasks(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    key, claim = new_claim()
    token = new_token()
    publisher = PUBLISHER.to_json()

    def write() -> None:
        raw.set(claim, f"q {token.task} sleeping {publisher}", px=600_000)

    write()
    with pytest.raises(StoreError, match="can't read"):
        admit(redis_store, claim, new_token())
    reply = ask(redis_store, key, new_token(), claim=running(claim), yields=True)
    assert reply == Refused(relation=Relation.OTHER, record=None)
    assert admit(redis_store, claim, token) is None
    assert raw.get(claim) == f"q {token.task} sleeping {publisher}".encode()
    take(redis_store, key, token, claim=running(claim))
    assert record_of(redis_store, claim).phase is Phase.RUNNING
    write()
    settle(redis_store, token, claim, Phase.QUEUED, 600)
    assert is_as_published(redis_store, claim, token)
    write()
    assert redis_store.free(claim, new_token().task) is False
    assert redis_store.free(claim, token.task) is True


def test_every_operation_on_claims_survives_a_script_flush(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    key, claim = new_claim()
    token = new_token()
    raw.script_flush()
    assert admit(redis_store, claim, token) is None
    raw.script_flush()
    settle(redis_store, token, claim, Phase.RETRYING)
    assert record_of(redis_store, claim).phase is Phase.RETRYING
    raw.script_flush()
    take(redis_store, key, token, claim=running(claim))
    assert record_of(redis_store, claim).phase is Phase.RUNNING
    raw.script_flush()
    mark(redis_store, key, token, MarkerState.WAITING, claim=becomes(claim, Phase.QUEUED))
    assert record_of(redis_store, claim).phase is Phase.QUEUED
    raw.script_flush()
    give(redis_store, key, token, claim=freed(claim))
    assert redis_store.inspect(claim) is None


def test_a_renewal_of_600_leases_with_claims_survives_a_script_flush(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    leases = []
    for _ in range(600):
        key, claim = new_claim()
        token = take(redis_store, key, ttl=60, claim=running(claim))
        leases.append(lease_of(key, token, 600, claim))
    raw.script_flush()
    assert renew(redis_store, leases) == [Renewal.RENEWED] * 600
    assert all(raw.ttl(lease.claim_key) > 60 for lease in leases)


def test_leases_and_claims_renewed_together_get_each_its_own_ttl(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    leases, expected = [], {}
    for number in range(200):
        key, claim = new_claim()
        token = take(redis_store, key, ttl=60, claim=running(claim))
        ttl = 600 + 100 * (number % 7)
        leases.append(lease_of(key, token, ttl, claim if number % 3 else ""))
        expected[key] = ttl
        expected[claim] = ttl if number % 3 else 60
    assert renew(redis_store, leases) == [Renewal.RENEWED] * 200
    found = {key: raw.pttl(key) / 1000 for key in expected}
    assert all(ttl - 50 < found[key] <= ttl for key, ttl in expected.items())


def test_the_claim_of_a_lease_that_is_not_renewed_is_not_either(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    leases, claims = [], []
    for number in range(6):
        key, claim = new_claim()
        token = take(redis_store, key, ttl=60, claim=running(claim))
        leases.append(lease_of(key, token, 600, claim))
        claims.append(claim)
        if number % 2:
            raw.delete(key)
    assert renew(redis_store, leases) == [Renewal.RENEWED, Renewal.EXPIRED] * 3
    assert [raw.ttl(claim) > 60 for claim in claims] == [True, False] * 3


def test_a_login_that_may_touch_our_keys_alone_is_enough(
    server: PrivateServer, raw: redis.Redis
) -> None:
    raw.execute_command("ACL SETUSER claiming on >secret ~csl:* +@all")
    url = server.url().replace("redis://", "redis://claiming:secret@")
    with closing(RedisStore(url)) as store:
        key, claim = new_claim()
        token = publish(store, claim)
        take(store, key, token, claim=running(claim))
        bare = new_key()
        take(store, bare, token)
        leases = [lease_of(bare, token), lease_of(key, token, claim_key=claim)]
        assert renew(store, leases) == [Renewal.RENEWED] * 2
        mark(store, key, token, MarkerState.WAITING)
        assert give(store, bare, token) is Released.RELEASED


def test_claims_cost_no_round_trip_beside_those_of_the_lease(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    def once() -> None:
        key, claim = new_claim()
        token = publish(redis_store, claim)
        take(redis_store, key, token, claim=running(claim))
        renew(redis_store, [lease_of(key, token, 60, claim)])
        mark(redis_store, key, token, MarkerState.WAITING, claim=becomes(claim, Phase.QUEUED))
        give(redis_store, key, token, claim=freed(claim))

    def calls() -> int:
        return int(raw.info("commandstats")["cmdstat_evalsha"]["calls"])

    once()  # the scripts are known now, the connections open
    once()  # and the number of shards, which is read anew where a script was not known
    before = calls()
    once()
    assert calls() - before == 5
