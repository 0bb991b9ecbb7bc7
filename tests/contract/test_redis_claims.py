"""What is special about claims in Redis: foreign data in their keys, scripts, round trips."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from itertools import product
from typing import Any

import pytest
import redis

from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import LossReason, Phase, Token
from celery_singleton_lock.core.store_requests import (
    RENEWED,
    CompletionState,
    Refused,
    Relation,
    ReleaseReply,
)
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.redis.connection import Connections
from celery_singleton_lock.stores.redis.scripts import Command
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.testing.contract.steps import (
    LONG,
    ODD_TASK_IDS,
    PUBLISHER,
    ask,
    becomes,
    change,
    freed,
    give,
    is_claimed,
    lease_of,
    mark,
    new_claim,
    new_key,
    new_token,
    publish,
    record_of,
    renew,
    running,
    take,
    take_claim,
)
from example_project.private_server import PrivateServer
from tests.harness.keys import EVERY_NAME
from tests.harness.servers import server_version

FOREIGN = {
    "text": b"another's data",
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
    for instead_of, wants_ttl in product(("", "foreign"), (True, False)):
        with pytest.raises(StoreError, match="can't read"):
            take_claim(redis_store, claim, token, instead_of=instead_of, wants_ttl=wants_ttl)
    for phase in (None, *Phase):
        change(redis_store, token, claim, phase)
        mark(redis_store, key, token, CompletionState.WAITING, claim=becomes(claim, phase))
        take(redis_store, key, token, claim=becomes(claim, phase), refused_if_claimed=True)
        assert give(redis_store, key, token, claim=becomes(claim, phase)) is ReleaseReply.OURS
    assert redis_store.leases.inspect(claim) is None
    assert raw.get(claim) == value
    assert raw.ttl(claim) == -1


def test_a_foreign_list_is_neither_given_nor_touched_and_fails_no_lease(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    key, claim = new_claim()
    token = new_token()
    raw.rpush(claim, "another's", "data")
    for wants_ttl in (True, False):
        with pytest.raises(StoreError, match="WRONGTYPE"):
            take_claim(redis_store, claim, token, wants_ttl=wants_ttl)
    for phase in (None, *Phase):
        change(redis_store, token, claim, phase)
        mark(redis_store, key, token, CompletionState.WAITING, claim=becomes(claim, phase))
        take(redis_store, key, token, claim=becomes(claim, phase), refused_if_claimed=True)
        assert renew(redis_store, [lease_of(key, token, 1, claim)]) == [RENEWED]
        assert give(redis_store, key, token, claim=becomes(claim, phase)) is ReleaseReply.OURS
    take(redis_store, key)
    reply = ask(redis_store, key, token, claim=freed(claim), frees_claim=True)
    assert isinstance(reply, Refused)
    assert raw.lrange(claim, 0, -1) == [b"another's", b"data"]
    assert raw.ttl(claim) == -1


def test_a_claim_of_a_phase_that_a_newer_version_knows_is_still_its_tasks(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    key, claim = new_claim()
    token = new_token()
    publisher = PUBLISHER.to_json()

    def write() -> None:
        raw.set(claim, f"q {token.call_id} sleeping {publisher}", px=600_000)

    write()
    for wants_ttl in (True, False):
        with pytest.raises(StoreError, match="can't read"):
            take_claim(redis_store, claim, new_token(), wants_ttl=wants_ttl)
    reply = ask(redis_store, key, new_token(), claim=running(claim), refused_if_claimed=True)
    assert reply == Refused(relation=Relation.OTHER, record=None)
    for wants_ttl in (True, False):
        assert take_claim(redis_store, claim, token, wants_ttl=wants_ttl) is None
        assert raw.get(claim) == f"q {token.call_id} sleeping {publisher}".encode()
    take(redis_store, key, token, claim=running(claim))
    assert record_of(redis_store, claim).phase is Phase.RUNNING
    write()
    change(redis_store, token, claim, Phase.QUEUED, 600)
    assert is_claimed(redis_store, claim, token)
    write()
    assert redis_store.operators.free(claim, new_token().call_id) is False
    assert redis_store.operators.free(claim, token.call_id) is True


def test_every_operation_on_claims_survives_a_script_flush(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    key, claim = new_claim()
    token = new_token()
    raw.script_flush()
    assert take_claim(redis_store, claim, token) is None
    raw.script_flush()
    change(redis_store, token, claim, Phase.RETRYING)
    assert record_of(redis_store, claim).phase is Phase.RETRYING
    raw.script_flush()
    take(redis_store, key, token, claim=running(claim))
    assert record_of(redis_store, claim).phase is Phase.RUNNING
    raw.script_flush()
    mark(redis_store, key, token, CompletionState.WAITING, claim=becomes(claim, Phase.QUEUED))
    assert record_of(redis_store, claim).phase is Phase.QUEUED
    raw.script_flush()
    give(redis_store, key, token, claim=freed(claim))
    assert redis_store.leases.inspect(claim) is None


def test_a_renewal_of_600_leases_with_claims_survives_a_script_flush(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    leases = []
    for _ in range(600):
        key, claim = new_claim()
        token = take(redis_store, key, ttl=60, claim=running(claim))
        leases.append(lease_of(key, token, 600, claim))
    raw.script_flush()
    assert renew(redis_store, leases) == [RENEWED] * 600
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
    assert renew(redis_store, leases) == [RENEWED] * 200
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
    assert renew(redis_store, leases) == [RENEWED, LossReason.GONE] * 3
    assert [raw.ttl(claim) > 60 for claim in claims] == [True, False] * 3


def test_a_login_that_may_touch_our_keys_alone_is_enough(
    server: PrivateServer, raw: redis.Redis
) -> None:
    raw.execute_command(f"ACL SETUSER claiming on >secret ~{EVERY_NAME} +@all")
    url = server.url().replace("redis://", "redis://claiming:secret@")
    with closing(RedisStore(url)) as store:
        key, claim = new_claim()
        token = publish(store, claim)
        take(store, key, token, claim=running(claim))
        bare = new_key()
        take(store, bare, token)
        leases = [lease_of(bare, token), lease_of(key, token, claim_key=claim)]
        assert renew(store, leases) == [RENEWED] * 2
        mark(store, key, token, CompletionState.WAITING)
        assert give(store, bare, token) is ReleaseReply.OURS


def test_claims_cost_no_round_trip_beside_those_of_the_lease(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    def once() -> None:
        key, claim = new_claim()
        token = publish(redis_store, claim)
        take(redis_store, key, token, claim=running(claim))
        renew(redis_store, [lease_of(key, token, 60, claim)])
        mark(redis_store, key, token, CompletionState.WAITING, claim=becomes(claim, Phase.QUEUED))
        give(redis_store, key, token, claim=freed(claim))

    def calls() -> int:
        return int(raw.info("commandstats")["cmdstat_evalsha"]["calls"])

    once()  # the scripts are known now, the connections open
    once()  # and the number of shards, which is read again where a script was not known
    before = calls()
    once()
    assert calls() - before == 5


# --- claimed by a command, or by a script --------------------------------------------------------


class Spoiled(Connections):
    """To a server that knows GET beside NX no more than one before Redis 7: it says so itself."""

    def run(self, commands: Sequence[Command], timeout: float) -> list[Any]:
        return super().run([_spoiled(command) for command in commands], timeout)


def _spoiled(command: Command) -> Command:
    return command if command[0] != "SET" else (*command[:-1], command[-1].replace("GET", "GOT"))


def asked(raw: redis.Redis) -> Counter[str]:
    """What the server has run since the last time, but for what scripts did."""
    stats = raw.info("commandstats")
    raw.config_resetstat()
    return Counter({name.removeprefix("cmdstat_"): one["calls"] for name, one in stats.items()})


def test_both_ways_write_the_same(redis_store: RedisStore, raw: redis.Redis) -> None:
    for task_id in ODD_TASK_IDS:
        values = []
        for wants_ttl in (True, False):
            claim = Keyspace.claim("app.sync", f"{new_key()}-küche")
            token = Token(task_id, 0, 0, "n", "a1")
            assert take_claim(redis_store, claim, token, wants_ttl=wants_ttl) is None
            values.append(raw.get(claim))
            assert LONG - 60 < raw.ttl(claim) <= LONG
        assert values[0] == values[1]


def test_a_claim_and_a_duplicate_cost_one_command_and_no_script(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    _, claim = new_claim()
    take_claim(redis_store, new_claim()[1], new_token(), wants_ttl=False)
    asked(raw)
    assert take_claim(redis_store, claim, new_token(), wants_ttl=False) is None
    for _ in range(3):
        assert take_claim(redis_store, claim, new_token(), wants_ttl=False) is not None
    found = asked(raw)
    # Redis 6.2 has no SET with NX and GET, so the script does it.
    commands = (4, 0, 0, 0) if server_version() >= (7, 0) else (1, 4, 4, 0)
    assert (found["set"], found["get"], found["evalsha"], found["eval"]) == commands


def test_where_the_command_is_refused_the_script_claims_and_the_command_is_not_tried_again(
    server: PrivateServer, raw: redis.Redis
) -> None:
    with closing(RedisStore(server.url(), connect=Spoiled)) as store:
        _, claim = new_claim()
        with pytest.raises(StoreError, match="syntax"):
            store.runner.connections.run([("SET", claim, "value", "PX", "1000", "NX", "GET")], 1.0)
        token = new_token()
        assert take_claim(store, claim, token, wants_ttl=False) is None
        assert is_claimed(store, claim, token)
        asked(raw)
        found = take_claim(store, claim, new_token(), wants_ttl=False)
        assert found is not None
        assert found.token == token.call_id
        assert take_claim(store, new_claim()[1], new_token(), wants_ttl=False) is None
        counted = asked(raw)
        assert counted["evalsha"] == 2
        assert counted["set"] == 1, "the script's own"


def test_a_key_at_which_the_command_fails_does_not_end_its_use(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    _, claim = new_claim()
    raw.rpush(claim, "another's", "data")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        take_claim(redis_store, claim, new_token(), wants_ttl=False)
    asked(raw)
    assert take_claim(redis_store, new_claim()[1], new_token(), wants_ttl=False) is None
    found = asked(raw)
    # Redis 6.2 refuses the command, and the script does it.
    commands = (1, 0) if server_version() >= (7, 0) else (2, 1)
    assert (found["set"], found["evalsha"]) == commands
