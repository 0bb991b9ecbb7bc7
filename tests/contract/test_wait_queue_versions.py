"""A deployment replaces workers one by one: those without wait queues beside those with them.

``older/`` has the scripts of before; their store polls, and its releases wake no client.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Kind, Lease, LossReason
from celery_singleton_lock.core.store import (
    RENEWED,
    Acquire,
    Granted,
    Relation,
    Release,
    ReleaseReply,
    Renewal,
    Store,
)
from celery_singleton_lock.core.waiter import Waiter
from celery_singleton_lock.stores.redis import scripts as module
from celery_singleton_lock.stores.redis.scripts import Command, Script, milliseconds
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.testing.contract import ask, lease_of, new_key, new_token
from celery_singleton_lock.testing.contract.steps import (
    HOLDER,
    TIMEOUT,
    give,
    record_of,
    relation_of,
    renew,
    take,
)
from example_project.private_server import PrivateServer
from tests.harness.deliveries import wait_until

from .test_redis import locker_on
from .test_wait_queue_safety import WAITS, Scene

TTL: Final = 60.0


class OlderScript(Script):
    """As it was before."""

    def __init__(self, *names: str) -> None:
        folder = Path(__file__).parent / "older"
        self.source = b"".join((folder / f"{name}.lua").read_bytes() for name in names)
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()
        Script.known[self.sha] = self


OLDER: Final = {
    module.ACQUIRE: OlderScript("claims", "acquire"),
    module.RELEASE: OlderScript("claims", "release"),
}
_RENEW: Final = OlderScript("renew")
_RENEWALS: Final = {
    1: RENEWED,
    0: LossReason.GONE,
    -1: LossReason.REPLACED,
    2: LossReason.DYING,
}


def _as_older(command: Command) -> Command:
    """The same run of the older script, if it has one."""
    script = Script.known[command[1]]
    if script is module.RELEASE:  # which was not given the wait queue and its list
        command = (*command[:2], int(command[2]) - 2, command[3], *command[6:])
    return ("EVALSHA", OLDER.get(script, script).sha, *command[2:])


class OlderStore(RedisStore):
    """The store of a worker of the version before."""

    def ticket(self, *_: Any, **__: Any) -> None:
        return None  # it wakes no waiters

    def _pipeline(self, commands: Sequence[Command], timeout: float) -> list[Any]:
        return super()._pipeline([*map(_as_older, commands)], timeout)

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[Renewal]:
        arguments: list[Any] = [len(leases)]
        for lease in leases:
            arguments += (str(lease.token), milliseconds(lease.ttl))
        command = _RENEW.command([lease.key for lease in leases], arguments)
        (replies,) = self._pipeline([command], timeout)
        return [_RENEWALS[reply] for reply in replies]

    def release_async(self, *_: Any, **__: Any) -> bool:
        return False  # its script would be another


@pytest.fixture
def older(server: PrivateServer) -> Iterator[OlderStore]:
    with closing(OlderStore(server.url())) as store:
        yield store


@pytest.fixture
def newer(redis_store: RedisStore) -> RedisStore:
    return redis_store


@pytest.fixture
def scene(newer: RedisStore, raw: redis.Redis) -> Scene:
    return Scene(newer, raw)


def test_the_older_store_is_what_it_says(older: OlderStore, raw: redis.Redis) -> None:
    raw.script_flush()
    key = new_key()
    token = take(older, key)
    assert renew(older, [lease_of(key, token)]) == [RENEWED]
    give(older, key, token)
    loaded = [raw.script_exists(script.sha)[0] for script in (*OLDER.values(), _RENEW)]
    assert loaded == [True] * 3
    assert not raw.script_exists(module.ACQUIRE.sha)[0]


def test_an_older_holder_is_not_disturbed_by_a_waiter(
    older: OlderStore, scene: Scene, raw: redis.Redis
) -> None:
    key, waiter = new_key(), new_token()
    holder = take(older, key)
    fence = record_of(older, key).fence
    scene.waits(key, waiter)
    assert (raw.get(key) or b"").endswith(b"} "), "nothing marks that a client waits"
    record = record_of(older, key)
    assert (record.token, record.fence, record.holder) == (str(holder), fence, HOLDER)
    assert renew(older, [lease_of(key, holder)]) == [RENEWED]
    assert isinstance(ask(older, key, holder), Granted)  # sent again
    scene.waits(key, waiter)
    assert give(older, key, holder) is ReleaseReply.OURS
    assert not raw.exists(key), "it wakes no client, and reserves it for none"
    assert isinstance(ask(scene.store, key, waiter, wait_ttl=WAITS), Granted)
    assert record_of(older, key).kind is Kind.LEASE


@pytest.mark.parametrize("kind", [Kind.COOLING, Kind.RESERVED])
def test_what_an_older_holder_makes_of_its_lease_is_as_ever(
    older: OlderStore, scene: Scene, kind: Kind
) -> None:
    key = new_key()
    holder = take(older, key)
    scene.waits(key, new_token())
    following = holder.next_attempt()
    options = {"become": kind, "become_ttl": TTL, "next_token": following}
    assert give(older, key, holder, **options) is ReleaseReply.OURS
    assert record_of(scene.store, key).kind is kind
    if kind is Kind.RESERVED:
        assert isinstance(ask(scene.store, key, following), Granted)


def test_an_older_worker_takes_a_reserved_key_when_that_is_over(
    older: OlderStore, scene: Scene
) -> None:
    reserved = scene.reserved()
    late = new_token()
    refused = ask(older, reserved.key, late)
    assert relation_of(refused) is Relation.OTHER
    assert record_of(older, reserved.key).kind is Kind.RESERVED
    assert renew(older, [lease_of(reserved.key, reserved.holder)]) == [LossReason.REPLACED]
    assert give(older, reserved.key, reserved.holder) is ReleaseReply.NOT_OURS
    scene.raw.pexpire(reserved.key, 1)
    wait_until(lambda: not scene.raw.exists(reserved.key), "its time is over")
    take(older, reserved.key, late)
    refused = ask(
        scene.store, reserved.key, reserved.waiter, wait_ttl=WAITS, handoff=reserved.handoff
    )
    assert relation_of(refused) is Relation.OTHER


def test_a_woken_client_is_not_stopped_by_an_older_worker(older: OlderStore, scene: Scene) -> None:
    reserved = scene.reserved()
    granted = ask(
        scene.store, reserved.key, reserved.waiter, wait_ttl=WAITS, handoff=reserved.handoff
    )
    assert isinstance(granted, Granted)
    assert relation_of(ask(older, reserved.key, new_token())) is Relation.OTHER
    # The older worker's parent, say, which knows the token.
    assert give(older, reserved.key, reserved.waiter) is ReleaseReply.OURS
    assert not scene.raw.exists(reserved.key)


def queue(store: RedisStore, key: str, rounds: int, inside: list[str]) -> int:
    """Take ``key`` some times, waiting as a body does; how often it was had."""
    locker = locker_on(store)
    for _ in range(rounds):
        request = Acquire(slots=(key,), token=new_token(), holder=HOLDER, ttl=TTL)
        waiter = Waiter(locker, request)
        try:
            while True:
                reply = waiter.acquire(request, waits=True)
                if isinstance(reply, Lease):
                    break
                waiter.wait(reply, TIMEOUT)
        finally:
            waiter.leave()
        inside.append(str(request.token))
        assert inside == [str(request.token)], "two have it"
        inside.remove(str(request.token))
        locker.give_back(reply, Release(keys=(key,), token=request.token))
    if isinstance(store, Store):
        store.drain(timeout=TIMEOUT)
    locker.heartbeat.close()
    return rounds


def test_old_and_new_never_share_a_key_and_all_have_it(
    older: OlderStore, newer: RedisStore, raw: redis.Redis
) -> None:
    key, inside = new_key(), list[str]()
    with ThreadPoolExecutor(6) as threads:
        stores = [older, newer] * 3
        crowd = [threads.submit(queue, store, key, 20, inside) for store in stores]
        assert [one.result() for one in crowd] == [20] * 6
    wait_until(lambda: not raw.keys(f"*{key.rpartition(':')[2]}*"), "nothing is left")
    assert not raw.exists(Keyspace.wait_queue(key))
