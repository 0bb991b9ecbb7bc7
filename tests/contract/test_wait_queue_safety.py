"""A key that is reserved for the woken client leaves all others their rights, and is no lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from celery_singleton_lock.cli.commands import row_of, table
from celery_singleton_lock.core import native_threads
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Kind, LossReason, Phase, Record, Token
from celery_singleton_lock.core.store_requests import (
    RENEWED,
    CompletionState,
    Granted,
    Refused,
    Relation,
    Release,
    ReleaseReply,
)
from celery_singleton_lock.inspection import HeldKey
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.redis import connection as connections
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.stores.redlock.store import RedlockStore
from celery_singleton_lock.testing.contract import TIMEOUT, ask, lease_of, new_key, new_token
from celery_singleton_lock.testing.contract.steps import (
    LONG,
    becomes,
    freed,
    give,
    new_claim,
    publish,
    record_of,
    relation_of,
    renew,
    running,
    take,
)
from example_project.private_server import PrivateServer
from tests.harness.deliveries import wait_until
from tests.harness.keys import EVERY_NAME

from .test_async_release import Bench, asks_for_another, renewal_is_due

WAITS = 60.0  # seconds that a waiter is counted for: no test lasts as long


@dataclass(frozen=True, slots=True)
class Reserved:
    """A key that was given back while a client waited, reserved until a test says otherwise."""

    key: str
    holder: Token
    waiter: Token
    handoff: str


class Scene:
    """A store, and what goes around it."""

    def __init__(self, store: RedisStore, raw: redis.Redis) -> None:
        self.store, self.raw = store, raw

    def woken(self, key: str) -> list[str]:
        """The handoff tokens that no client has received yet."""
        found: Any = self.raw.lrange(f"{Keyspace.wait_queue(key)}!", 0, -1)
        return [handoff.decode() for handoff in found]

    def waits(self, key: str, waiter: Token, **options: Any) -> None:
        """Ask for ``key``, and join its wait queue."""
        assert (
            relation_of(ask(self.store, key, waiter, wait_ttl=WAITS, **options)) is Relation.OTHER
        )

    def reserved(self, **options: Any) -> Reserved:
        """A hand-over that stopped half-way, whose half second doesn't end."""
        found: list[Reserved] = []

        def in_time() -> bool:
            key, waiter = new_key(), new_token()
            holder = take(self.store, key)
            self.waits(key, waiter)
            assert give(self.store, key, holder, **options) is ReleaseReply.OURS
            if self.stays(key):
                found.append(Reserved(key, holder, waiter, holder.nonce))
            return bool(found)

        wait_until(in_time, "this machine is too slow to see what is reserved for half a second")
        return found[0]

    def stays(self, key: str) -> bool:
        """Prolong the half second of a reserved key; False: it is over already."""
        return all(self.raw.pexpire(name, 600000) for name in (key, f"{Keyspace.wait_queue(key)}!"))

    def is_waiters(self, key: str) -> bool:
        return (self.raw.get(key) or b"").startswith(b"r %waiter|")


@pytest.fixture
def scene(redis_store: RedisStore, raw: redis.Redis) -> Scene:
    return Scene(redis_store, raw)


# --- what may take it ----------------------------------------------------------------------------


def test_only_the_woken_client_takes_a_reserved_key(scene: Scene) -> None:
    reserved, late = scene.reserved(), new_token()
    assert relation_of(ask(scene.store, reserved.key, late)) is Relation.OTHER
    for handoff in ("", "another", reserved.holder.nonce + "0", "-"):
        assert (
            relation_of(ask(scene.store, reserved.key, late, wait_ttl=WAITS, handoff=handoff))
            is Relation.OTHER
        )
    assert relation_of(ask(scene.store, reserved.key, reserved.waiter)) is Relation.OTHER
    assert isinstance(
        ask(scene.store, reserved.key, reserved.waiter, wait_ttl=WAITS, handoff=reserved.handoff),
        Granted,
    )
    assert relation_of(
        ask(scene.store, reserved.key, late, wait_ttl=WAITS, handoff=reserved.handoff)
    ) is (Relation.OTHER), "the handoff is over: the key has a lease now"


def test_the_fence_rises_with_each_hand_over(scene: Scene) -> None:
    fences = []
    for _ in range(3):
        reserved = scene.reserved()
        before = scene.raw.hget(Keyspace.shard_hash(reserved.key), "|fence")
        reply = ask(
            scene.store, reserved.key, reserved.waiter, wait_ttl=WAITS, handoff=reserved.handoff
        )
        assert isinstance(reply, Granted)
        assert reply.fence is not None
        assert reply.fence > int(before or 0)
        fences.append(reply.fence)
    assert fences == sorted(set(fences))


def test_a_reserved_key_is_free_when_no_client_comes(scene: Scene) -> None:
    reserved = scene.reserved()
    scene.raw.pexpire(reserved.key, 1)
    wait_until(lambda: not scene.raw.exists(reserved.key), "its time is over")
    take(scene.store, reserved.key)


@pytest.mark.parametrize("name", ["%waiter", "%25waiter", "waiter"])
def test_no_task_has_the_name_of_a_waiter(scene: Scene, name: str) -> None:
    reserved = scene.reserved()
    forged = Token(name, 0, 0, reserved.handoff)
    assert relation_of(ask(scene.store, reserved.key, forged)) is Relation.OTHER
    assert renew(scene.store, [lease_of(reserved.key, forged)]) == [LossReason.REPLACED]
    assert give(scene.store, reserved.key, forged) is ReleaseReply.NOT_OURS
    assert scene.is_waiters(reserved.key)


# --- it is no lease ------------------------------------------------------------------------------


def test_its_former_holder_finds_it_no_more_its_own(scene: Scene) -> None:
    reserved = scene.reserved()
    assert renew(scene.store, [lease_of(reserved.key, reserved.holder)]) == [LossReason.REPLACED]
    assert give(scene.store, reserved.key, reserved.holder) is ReleaseReply.NOT_OURS
    assert scene.is_waiters(reserved.key)


def test_operators_see_that_it_has_no_holder(scene: Scene) -> None:
    reserved = scene.reserved()
    record = record_of(scene.store, reserved.key)
    assert (record.kind, record.fence) == (Kind.RESERVED, None)
    assert (record.holder.worker, record.holder.pid) == ("", 0)
    row = row_of(HeldKey.of(record))
    assert (row["state"], row["since"]) == ("reserved for a waiting client", "")
    assert reserved.holder.task_id not in table([HeldKey.of(record)])
    assert [found.token for found in scene.store.operators.scan(reserved.key)] == [record.token]
    assert reserved.key not in dict(scene.store.operators.foreign_keys(EVERY_NAME))


def test_its_value_is_a_code(scene: Scene) -> None:
    reserved = scene.reserved()
    value = (scene.raw.get(reserved.key) or b"").decode()
    assert value == f"r %waiter|0.0|{reserved.handoff} 0 {{}}"
    read = Record.parse(reserved.key, value, 0.5)
    assert str(read.holder) == "the client that has waited longest, for which the key is reserved"
    assert read.holder.for_error()["task_id"] == "%waiter"
    assert HeldKey.of(read).task_id == ""


def test_an_operator_frees_it_like_any_other(scene: Scene) -> None:
    reserved = scene.reserved()
    assert scene.store.operators.free(reserved.key, str(reserved.holder)) is False
    assert scene.store.operators.free(reserved.key, record_of(scene.store, reserved.key).token)
    take(scene.store, reserved.key)
    refused = ask(
        scene.store, reserved.key, reserved.waiter, wait_ttl=WAITS, handoff=reserved.handoff
    )
    assert relation_of(refused) is Relation.OTHER, "it was woken for a key that is another's now"


# --- releases that are resent ---------------------------------------------------------------------


def test_a_release_that_is_resent_hands_over_once(scene: Scene) -> None:
    reserved = scene.reserved()
    value = scene.raw.get(reserved.key)
    for _ in range(2):
        assert give(scene.store, reserved.key, reserved.holder) is ReleaseReply.NOT_OURS
    assert scene.raw.get(reserved.key) == value
    assert scene.woken(reserved.key) == [reserved.handoff]


def test_a_release_that_is_resent_leaves_a_later_holder_alone(scene: Scene) -> None:
    reserved, third = scene.reserved(), new_token()
    reply = ask(
        scene.store, reserved.key, reserved.waiter, wait_ttl=WAITS, handoff=reserved.handoff
    )
    assert isinstance(reply, Granted)
    scene.waits(reserved.key, third)
    for _ in range(2):
        assert give(scene.store, reserved.key, reserved.holder) is ReleaseReply.NOT_OURS
    assert record_of(scene.store, reserved.key).token == str(reserved.waiter)
    assert scene.woken(reserved.key) == [reserved.handoff]


@pytest.fixture
def bench(server: PrivateServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(native_threads, "start_new_thread", lambda function, name: None)
    monkeypatch.setattr(connections, "_CHECKED_AFTER", float("inf"))  # see Bench.cut
    url = server.url(db=11)
    with closing(RedisStore(url)) as store, redis.Redis.from_url(url) as raw:
        yield Bench(url, store, raw)


@pytest.mark.parametrize("lost", [False, True], ids=["confirmed", "lost"])
@pytest.mark.parametrize("notices", [asks_for_another, renewal_is_due])
def test_an_asynchronous_release_wakes_once_whether_it_was_lost_or_not(
    bench: Bench, notices: Callable[[Bench], None], lost: bool
) -> None:
    scene = Scene(bench.store, bench.raw)

    def in_time() -> bool:
        lease = bench.begin(new_key())
        with closing(RedisStore(bench.url)) as other:
            Scene(other, bench.raw).waits(lease.key, new_token())
        if lost:
            bench.cut()
        bench.release_async(lease)
        if lost:
            assert (bench.raw.get(lease.key) or b"").startswith(b"l "), "it arrived"
        notices(bench)
        if not scene.stays(lease.key):
            return False
        for _ in range(2):
            bench.next_renewal()
            bench.store.async_releases.drain(timeout=TIMEOUT)
        assert not bench.is_pending(lease)
        assert scene.is_waiters(lease.key)
        assert scene.woken(lease.key) == [lease.token.nonce]
        return True

    wait_until(in_time, "this machine is too slow to see what is reserved for half a second")


def test_an_asynchronous_release_that_is_late_finds_what_its_next_copy_left(bench: Bench) -> None:
    scene, waiter = Scene(bench.store, bench.raw), new_token()
    key = new_key()
    holder = take(bench.store, key)
    scene.waits(key, waiter)
    request = Release(keys=(key,), token=holder)
    assert bench.store.leases.release(request, timeout=TIMEOUT) is ReleaseReply.OURS
    handoff = bench.raw.blpop([f"{Keyspace.wait_queue(key)}!"], 1)
    assert handoff is None or handoff[1].decode() == holder.nonce  # None: its half second was over
    bench.raw.delete(key)
    third = take(bench.store, key)
    scene.waits(key, waiter)
    assert bench.store.leases.release(request, timeout=TIMEOUT) is ReleaseReply.NOT_OURS
    assert record_of(bench.store, key).token == str(third)
    assert scene.woken(key) == []


# --- the rest of what scripts decide -------------------------------------------------------------


def test_a_holder_that_asks_again_keeps_its_lease_while_others_wait(scene: Scene) -> None:
    key, waiter = new_key(), new_token()
    holder = take(scene.store, key)
    scene.waits(key, waiter)
    assert isinstance(ask(scene.store, key, holder), Granted)  # its first reply was lost
    duplicate = Token(holder.task_id, 0, 0, "another-delivery")
    assert relation_of(ask(scene.store, key, duplicate)) is Relation.DUPLICATE
    assert relation_of(ask(scene.store, key, holder.next_attempt())) is Relation.EARLIER
    assert renew(scene.store, [lease_of(key, holder)]) == [RENEWED]
    scene.waits(key, waiter)  # the poll that says so again
    assert give(scene.store, key, holder) is ReleaseReply.OURS
    assert scene.woken(key) in ([holder.nonce], [])  # []: its half second was over


def test_a_duplicate_of_a_done_task_learns_so_and_takes_no_handoff(scene: Scene) -> None:
    reserved = scene.reserved(completion=CompletionState.DONE, completion_ttl=LONG)
    duplicate = Token(reserved.holder.task_id, 0, 0, "another-delivery")
    for handoff in ("", reserved.handoff):
        reply = ask(scene.store, reserved.key, duplicate, wait_ttl=WAITS, handoff=handoff)
        assert relation_of(reply) is Relation.DONE
    assert scene.is_waiters(reserved.key)
    assert isinstance(
        ask(scene.store, reserved.key, reserved.waiter, wait_ttl=WAITS, handoff=reserved.handoff),
        Granted,
    )


@pytest.mark.parametrize("kind", [Kind.RESERVED, Kind.COOLING])
def test_what_becomes_of_a_lease_is_not_handed_over(scene: Scene, kind: Kind) -> None:
    key, waiter = new_key(), new_token()
    holder = take(scene.store, key)
    scene.waits(key, waiter)
    options = {"become": kind, "become_ttl": LONG, "next_token": holder.next_attempt()}
    assert give(scene.store, key, holder, **options) is ReleaseReply.OURS
    assert record_of(scene.store, key).kind is kind
    assert scene.woken(key) == []
    scene.waits(key, waiter, handoff=holder.nonce)
    if kind is Kind.RESERVED:
        assert isinstance(ask(scene.store, key, holder.next_attempt()), Granted)


def test_a_claim_goes_with_a_lease_that_is_waited_for(scene: Scene) -> None:
    key, claim = new_claim()
    holder, waiter = publish(scene.store, claim), new_token()
    take(scene.store, key, holder, claim=running(claim))
    scene.waits(key, waiter)
    change = becomes(claim, Phase.RETRYING)
    assert give(scene.store, key, holder, claim=change) is ReleaseReply.OURS
    record = record_of(scene.store, claim)
    assert (record.token, record.phase) == (holder.call_id, Phase.RETRYING)
    handoff = holder.nonce
    granted = ask(scene.store, key, waiter, wait_ttl=WAITS, handoff=handoff, claim=running(claim))
    assert isinstance(granted, Granted)
    assert record_of(scene.store, claim).token == holder.call_id, "another's claim"
    assert give(scene.store, key, waiter, claim=freed(claim)) is ReleaseReply.OURS
    assert record_of(scene.store, claim).token == holder.call_id


def test_a_waiter_with_a_claim_changes_it_as_without_a_wait_queue(scene: Scene) -> None:
    key, claim = new_claim()
    holder = take(scene.store, key)
    waiter = publish(scene.store, claim)
    scene.waits(key, waiter, claim=running(claim))
    assert record_of(scene.store, claim).phase is Phase.QUEUED
    give(scene.store, key, holder)
    granted = ask(
        scene.store, key, waiter, wait_ttl=WAITS, handoff=holder.nonce, claim=running(claim)
    )
    assert isinstance(granted, Granted)
    assert record_of(scene.store, claim).phase is Phase.RUNNING
    assert give(scene.store, key, waiter, claim=freed(claim)) is ReleaseReply.OURS
    assert scene.store.leases.inspect(claim) is None


def test_a_caller_refused_by_a_claim_is_in_no_wait_queue(scene: Scene) -> None:
    key, claim = new_claim()
    publish(scene.store, claim)
    refused = ask(
        scene.store, key, new_token(), claim=running(claim), refused_if_claimed=True, wait_ttl=WAITS
    )
    assert isinstance(refused, Refused)
    assert refused.record is not None
    assert refused.record.kind is Kind.CLAIM
    assert not scene.raw.exists(Keyspace.wait_queue(key))


def test_of_several_slots_the_reserved_one_is_taken_and_no_other_is_lost(scene: Scene) -> None:
    slots = Keyspace.slots(new_key(), 3)
    holders = [take(scene.store, slots) for _ in slots]
    waiter = new_token()
    assert relation_of(ask(scene.store, slots, waiter, wait_ttl=WAITS)) is Relation.OTHER
    give(scene.store, slots[1], holders[1])
    granted = ask(scene.store, slots, waiter, wait_ttl=WAITS, handoff=holders[1].nonce)
    assert granted == Granted(key=slots[1], fence=None)
    assert [record_of(scene.store, slot).kind for slot in slots] == [Kind.LEASE] * 3
    assert [record_of(scene.store, slot).token for slot in slots[::2]] == [
        str(holder) for holder in holders[::2]
    ]


def test_stores_that_wake_no_client_have_no_wait_queues() -> None:
    assert MemoryStore(SystemClock()).wait_queue is None
    assert RedlockStore("redlock://h1,h2,h3/0").wait_queue is None
