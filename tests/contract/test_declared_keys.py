"""Every key that a script touches is one of its KEYS: some servers (Dragonfly) refuse others.

Redis itself lets a script touch any key of its slot. MONITOR shows each script with its keys, and
each command that it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import pytest
import redis

from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Holder, Kind, Phase, Token
from celery_singleton_lock.core.pauses import Pause
from celery_singleton_lock.core.rate import Rate
from celery_singleton_lock.core.store_requests import (
    Acquire,
    AuthorizeRun,
    CompletionState,
    NewestCall,
    ReleaseReply,
    ReplaceArguments,
    rated,
)
from celery_singleton_lock.stores.redis import scripts as module
from celery_singleton_lock.stores.redis.scripts import Script
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.testing.contract import TIMEOUT, ask, lease_of, new_key, new_token
from celery_singleton_lock.testing.contract.steps import (
    LONG,
    become,
    change,
    freed,
    give,
    mark,
    new_claim,
    publish,
    renew,
    running,
    take,
    take_claim,
)
from tests.harness.calls import Calls

# A log line's words, and whether a script ran the command.
_LINE: Final = re.compile(rb"^\S+ \[\d+ (\S+)\] (.*)$", re.DOTALL)
# Valkey 8.1 does not escape a quotation mark inside of a word. No script has this in its text.
_BETWEEN_WORDS: Final = b'" "'
_WITHOUT_KEYS: Final = (b"TIME",)
WAITS: Final = 60.0

Undeclared = list[tuple[str, bytes]]


@contextmanager
def watching(url: str, undeclared: Undeclared, scripts: set[str]) -> Iterator[None]:
    """Note the digest of each script that is run, and each key that it touched undeclared."""
    with redis.Redis.from_url(url) as client:
        connection = client.connection_pool.make_connection()
        try:
            connection.send_command("MONITOR")
            connection.read_response()
            yield
            client.echo("that was all")
            script, declared = "", set[bytes]()
            while True:
                found = _LINE.match(connection.read_response())
                assert found is not None
                source, words = found[1], found[2][1:-1].split(_BETWEEN_WORDS)
                name = words[0].upper()
                if words[-1] == b"that was all":
                    return
                if source != b"lua" and name in (b"EVALSHA", b"EVAL"):
                    script = words[1].decode()
                    declared = {*words[3 : 3 + int(words[2])]}
                    scripts.add(script)
                elif source == b"lua" and name not in _WITHOUT_KEYS:
                    keys = words[1:] if name in (b"MGET", b"DEL") else words[1:2]
                    undeclared += [(script, key) for key in keys if key not in declared]
        finally:
            connection.disconnect()


def wait_in_queue(store: RedisStore) -> None:
    """A key is handed over, and so is a slot of three."""
    key = new_key()
    for slots in ((key,), (f"{key}x", f"{key}x#1", f"{key}x#2")):
        holders = [take(store, slots) for _ in slots]
        waiter = new_token()
        ask(store, slots, waiter, wait_ttl=WAITS)
        assert give(store, slots, holders[0]) is ReleaseReply.OURS
        take(store, slots, waiter, wait_ttl=WAITS, handoff=holders[0].nonce)
        ask(store, slots, new_token(), wait_ttl=0.0)


def hold_and_give_back(store: RedisStore) -> None:
    key, token = new_key(), new_token()
    take(store, key, token)
    ask(store, key, new_token())
    renew(store, [lease_of(key, token)])
    store.leases.trace(key, timeout=TIMEOUT)
    become(store, key, token, Kind.RESERVED)
    give(store, key, token.next_attempt(), completion=CompletionState.DONE, completion_ttl=LONG)
    mark(store, key, token, CompletionState.WAITING, 1)


def claim(store: RedisStore) -> None:
    key, claim = new_claim()
    token = publish(store, claim)
    take_claim(store, claim, new_token())
    take(store, key, token, claim=running(claim))
    renew(store, [lease_of(key, token, claim_key=claim)])
    change(store, token, claim, Phase.QUEUED)
    mark(store, key, token, CompletionState.WAITING, 1, claim=freed(claim))
    give(store, key, token, claim=freed(claim))
    store.runner.run(module.PROLONG.command([claim], [token.call_id, "1000"]), TIMEOUT)


def replace_arguments(store: RedisStore) -> None:
    key, claim = new_claim()
    token = new_token()
    arguments = Keyspace.arguments(claim, token.call_id)
    take_claim(store, claim, token, arguments=arguments)
    newest = ReplaceArguments(
        claim=claim, call_id=token.call_id, key=arguments, arguments=b"x", ttl=LONG
    )
    store.arguments.replace(newest, timeout=TIMEOUT)
    store.runner.run(module.DUE.command([arguments]), TIMEOUT)
    change = replace(freed(claim), arguments=arguments)
    take(store, key, token, claim=change)
    give(store, key, token, claim=change)


def lead_and_free(store: RedisStore) -> None:
    leader = new_key()
    token = take(store, leader)
    entry = Keyspace.last_run(leader, "entry")
    call = AuthorizeRun(leader=leader, token=token, entry=entry, expected=None, new="1", ttl=LONG)
    store.schedule.authorize(call, timeout=TIMEOUT)
    store.operators.free(leader, None)


def note_calls(store: RedisStore) -> None:
    """A newer call wakes an older one that waits, and replaces a retry's reservation."""
    key, other = new_key(), new_key()
    take(store, key)
    for number in (1, 2):
        ask(store, key, new_token(), wait_ttl=WAITS)
        store.newest_calls.register(
            key, NewestCall(call_id=f"t{number}", called_at=number), ttl=LONG, timeout=TIMEOUT
        )
    become(store, other, take(store, other), Kind.RESERVED)
    reserved = store.leases.inspect(other)
    assert reserved is not None
    call, options = NewestCall(call_id="t", called_at=1.0), {"ttl": LONG, "timeout": TIMEOUT}
    store.newest_calls.register(other, call, **options, reservation=reserved.token)
    assert store.leases.inspect(other) is None


def queue_calls(store: RedisStore) -> None:
    """Calls join, run, retry, are lost and are taken out."""
    calls = Calls(store, late=False)
    first, second, third, fourth = calls.joined(4)
    calls.begin(first)
    calls.relation(second)
    calls.position(third)
    newer = new_token(first.task_id, retries=1)
    calls.join(newer)
    calls.release(first, goes_on=True)
    calls.begin(newer)
    calls.end(newer)
    calls.begin(second)
    calls.lose_lease()
    calls.sweep()
    calls.remove(second)
    calls.remove(third, only_unbegun=True)
    calls.queue.leave(calls.key, fourth.call_id, timeout=TIMEOUT)
    calls.queue.defer(calls.key, seconds=LONG, timeout=TIMEOUT)
    calls.is_due()
    calls.position(fourth)
    calls.queue.keys(Keyspace.shard(calls.key), timeout=TIMEOUT)
    calls.queue.depths([calls.key], timeout=TIMEOUT)
    calls.queue.calls(calls.key, most=10, timeout=TIMEOUT)


def pause(store: RedisStore) -> None:
    """A key and its scope are paused; a call asks, the queue is swept, one pause is over."""
    calls = Calls(store)
    shard, scope = Keyspace.shard(calls.key), Keyspace.scope_of(calls.key)
    (first,) = calls.joined(1)
    for name, left in ((calls.key, LONG), (scope, 0.001), (scope, None)):
        pause = Pause(name=name, user="you", host="here", left=left)
        store.pauses.pause(pause, timeout=TIMEOUT)
    calls.relation(first)
    ask(store, calls.key, new_token())
    ask(store, Keyspace.slots(calls.key, 2), new_token())
    calls.sweep()
    store.pauses.of_shard(shard, timeout=TIMEOUT)
    for name in (calls.key, scope):
        store.pauses.resume(name, timeout=TIMEOUT)


def start_at_a_rate(store: RedisStore) -> None:
    """Starts of a key are counted: without a place, with one, and with arguments."""
    key, rate, waiter = new_key(), Rate("10/m"), new_token()
    holder = new_token()
    options: Any = {"holder": Holder(), "ttl": LONG}

    def asked(token: Token, **more: Any) -> None:
        request = rated(Acquire(slots=(key,), token=token, **options, **more), rate)
        store.leases.acquire(request, timeout=TIMEOUT)

    asked(holder)
    asked(waiter, wait_ttl=WAITS)
    give(store, key, holder)
    asked(waiter, wait_ttl=WAITS, handoff=holder.nonce)
    assert store.leases.inspect(key) is None
    key, claim = new_claim()
    token = new_token()
    arguments = Keyspace.arguments(claim, token.call_id)
    take_claim(store, claim, token, arguments=arguments)
    for one in (token, new_token()):
        asked(one, claim=replace(freed(claim), arguments=arguments))
        give(store, key, one)
    calls = Calls(store)
    for one in calls.joined(2):
        calls.ask(one, rate=rate)
        calls.release(one)


WORK: Final[list[Callable[[RedisStore], None]]] = [
    wait_in_queue,
    hold_and_give_back,
    claim,
    replace_arguments,
    lead_and_free,
    note_calls,
    queue_calls,
    pause,
    start_at_a_rate,
]


@pytest.mark.parametrize("work", WORK)
def test_a_script_touches_declared_keys_alone(
    work: Callable[[RedisStore], None], redis_store: RedisStore, server: Any
) -> None:
    undeclared: Undeclared = []
    with watching(server.url(), undeclared, set()):
        work(redis_store)
    assert undeclared == []


def test_these_are_all_scripts(redis_store: RedisStore, server: Any) -> None:
    scripts: set[str] = set()
    with watching(server.url(), [], scripts):
        for work in WORK * 2:  # a script that the server doesn't know yet is sent whole
            work(redis_store)
    own = [script for script in vars(module).values() if isinstance(script, Script)]
    known = {one.sha for script in own for one in (script, script.rated) if one is not None}
    assert known - scripts <= {module.SHARDS.sha}, "run once, when the store is new"
