"""Asynchronous releases, on a real server: whatever goes wrong, the key is given back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

import pytest
import redis
from celery import Celery

from celery_singleton_lock import hold, singleton_task
from celery_singleton_lock.core import native_threads
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.events import Event, EventName, Events
from celery_singleton_lock.core.heartbeat import Heartbeat, timeout_for
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Kind, Lease, LossReason
from celery_singleton_lock.core.locker import Locker
from celery_singleton_lock.core.store_requests import (
    RENEWED,
    Acquire,
    ClaimChange,
    CompletionState,
    Granted,
    Mark,
    Refused,
    Relation,
    Release,
    ReleaseReply,
)
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.redis import connection as connections
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.testing import ManualClock
from celery_singleton_lock.testing.contract import TIMEOUT, ask, lease_of, new_key, new_token
from celery_singleton_lock.testing.contract.steps import HOLDER, publish, take_claim
from example_project.private_server import PrivateServer, free_port
from tests.costs.site import open_site
from tests.harness.deliveries import wait_until
from tests.harness.processes import ROOT

from .test_redis_interrupted import fault, struck_at_random, thousand_times

__all__ = ["fault"]

TTL = 60.0


class LeaseNotes:
    """What the worker parent would free, should this process die."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.strikes: list[str] = []

    def note(self, keys: Sequence[str], token: str, ttl: float, claim: str) -> None:
        if token not in self.held:
            self.held.append(token)

    def share(self, lease: Lease) -> None:
        return None

    def freeing(self, token: str) -> None: ...

    def erase(self, token: str) -> None:
        self.strikes.append(token)
        if token in self.held:
            self.held.remove(token)


class Bench:
    """A worker process's locker on a real server. Its heartbeat sweeps when a test says so."""

    def __init__(self, url: str, store: RedisStore, raw: redis.Redis, clock: Any = None) -> None:
        self.url, self.store, self.raw = url, store, raw
        self.clock = clock or ManualClock()
        self.events: list[Event] = []
        # As in most workers: what is released is logged at DEBUG, and no receiver is connected.
        events = Events(
            observes=lambda name: name is not EventName.RELEASED, record=self.events.append
        )
        self.heartbeat = Heartbeat(store, self.clock, events)
        self.notes = LeaseNotes()
        self.locker = Locker(store, self.clock, self.heartbeat, events, self.notes)
        # The first one teaches the server the script, and is waited for.
        self.end(self.begin(new_key()))
        self.events.clear()

    def begin(self, *slots: str, ttl: float = TTL) -> Lease:
        request = Acquire(slots=slots, token=new_token(), holder=HOLDER, ttl=ttl)
        lease = self.locker.acquire(request)
        assert isinstance(lease, Lease), lease
        return lease

    def end(self, lease: Lease, **options: Any) -> None:
        request = Release(keys=(lease.key,), token=lease.token, **options)
        self.locker.give_back(lease, request)

    def release_async(self, lease: Lease) -> None:
        self.end(lease)
        assert self.is_pending(lease), "it was waited for"

    def is_pending(self, lease: Lease) -> bool:
        return str(lease.token) in self.notes.held

    def next_renewal(self) -> None:
        """The heartbeat's sweep when the next renewal is due."""
        self.clock.advance(TTL / 3)
        self.heartbeat.sweep()

    def is_free(self, key: str) -> bool:
        return self.raw.get(key) is None

    def names(self) -> list[EventName]:
        return [event.name for event in self.events]

    def cut(self) -> None:
        """Let the server close the store's connections, of which the store knows nothing yet."""
        self.raw.client_kill_filter(_type="normal", skipme=True)


@pytest.fixture(params=["redis", "valkey"])
def own_server(request: pytest.FixtureRequest) -> PrivateServer:
    name = {"redis": "server"}.get(request.param, request.param)
    server: PrivateServer = request.getfixturevalue(name)
    return server


@pytest.fixture
def bench(own_server: PrivateServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(native_threads, "start_new_thread", lambda function, name: None)
    # The store would notice that a connection was cut; here it does not.
    monkeypatch.setattr(connections, "_CHECKED_AFTER", float("inf"))
    url = own_server.url(db=6)
    with closing(RedisStore(url)) as store, redis.Redis.from_url(url) as raw:
        yield Bench(url, store, raw)


def until(condition: Callable[[], bool]) -> None:
    wait_until(condition, "the release has arrived")


def asks_for_another(bench: Bench) -> None:
    """The next task of the process, with a key of its own."""
    bench.begin(new_key())


def renewal_is_due(bench: Bench) -> None:
    """There is no next task: the heartbeat's thread checks when the next renewal is due."""
    bench.next_renewal()


however_noticed = pytest.mark.parametrize("notices", [asks_for_another, renewal_is_due])


# --- all goes well -------------------------------------------------------------------------------


def test_a_release_is_confirmed_by_the_next_command(bench: Bench) -> None:
    lease = bench.begin(new_key())
    bench.release_async(lease)
    assert lease.lost, "what outlives the body must not take it for one that stands"
    assert len(bench.heartbeat) == 0
    until(lambda: bench.is_free(lease.key))
    asks_for_another(bench)
    assert not bench.is_pending(lease)
    assert bench.names() == [EventName.ACQUIRED, EventName.ACQUIRED]


def test_where_a_sink_of_its_task_observes_releases_each_is_waited_for(bench: Bench) -> None:
    bench.locker._events.observes = lambda name: True
    lease = bench.begin(new_key())
    bench.end(lease)
    assert bench.is_free(lease.key)
    assert bench.names() == [EventName.ACQUIRED, EventName.RELEASED]


def watched_by_monitors_alone(bench: Bench) -> None:
    bench.locker._events.observes = lambda name: True
    bench.locker._events.reaches_sinks = lambda name: False


@however_noticed
def test_a_release_that_monitors_alone_observe_is_not_waited_for_and_its_event_follows_the_reply(
    bench: Bench, notices: Callable[[Bench], None]
) -> None:
    watched_by_monitors_alone(bench)
    lease = bench.begin(new_key())
    bench.clock.advance(0.5)
    bench.release_async(lease)
    assert bench.names() == [EventName.ACQUIRED]
    until(lambda: bench.is_free(lease.key))
    notices(bench)
    assert not bench.is_pending(lease)
    [released] = [event for event in bench.events if event.name is EventName.RELEASED]
    assert released.lease == lease.token.nonce
    assert released.data == {"held": 0.5}, "not until the reply was read"


def test_its_event_comes_within_a_second_if_the_process_asks_for_nothing_else(
    bench: Bench,
) -> None:
    watched_by_monitors_alone(bench)
    bench.heartbeat.sweep()  # the thread sleeps
    for _ in range(3):
        lease = bench.begin(new_key())
        bench.release_async(lease)
        until(lambda key=lease.key: bench.is_free(key))  # type: ignore[misc]
        wakes_in = bench.heartbeat.sweep()
        assert wakes_in is not None
        assert wakes_in <= 1
        bench.clock.advance(wakes_in)
        bench.heartbeat.sweep()
        assert bench.names()[-1] is EventName.RELEASED


def test_a_watched_release_wakes_a_sleeping_thread_and_others_do_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings: list[None] = []
    monkeypatch.setattr(bench.heartbeat._alarm, "ring", lambda: rings.append(None))
    bench.heartbeat._wakes_at = bench.clock.now() + 10
    bench.heartbeat._running = True
    bench.release_async(bench.begin(new_key()))
    assert not rings
    watched_by_monitors_alone(bench)
    bench.release_async(bench.begin(new_key()))
    assert len(rings) == 1
    bench.heartbeat._wakes_at = bench.clock.now() + 0.5
    bench.release_async(bench.begin(new_key()))
    assert len(rings) == 1, "the thread wakes soon enough"


def test_a_loss_that_a_watched_release_meets_is_a_loss(bench: Bench) -> None:
    watched_by_monitors_alone(bench)
    lease = bench.begin(new_key())
    bench.raw.delete(lease.key)
    bench.release_async(lease)
    renewal_is_due(bench)
    assert bench.names() == [EventName.ACQUIRED, EventName.LEASE_LOST]


def test_the_same_key_is_free_for_the_next_task_of_the_process(bench: Bench) -> None:
    key = new_key()
    for _ in range(100):
        bench.release_async(bench.begin(key))


def test_the_last_one_is_confirmed_by_the_heartbeats_sweep_without_another_command(
    bench: Bench,
) -> None:
    lease = bench.begin(new_key())
    bench.release_async(lease)
    until(lambda: bench.is_free(lease.key))
    commands = commands_of(bench.raw)
    bench.clock.advance(TTL / 3 * 0.89)
    pause = bench.heartbeat.sweep()
    assert bench.is_pending(lease), "before its renewal is due it is not checked"
    assert pause is not None
    bench.clock.advance(pause)
    bench.heartbeat.sweep()
    assert not bench.is_pending(lease)
    assert commands_of(bench.raw) == commands
    assert bench.heartbeat.sweep() is None, "nothing is left to check"


def commands_of(raw: redis.Redis) -> int:
    stats: Any = raw.info("commandstats")
    # A command without calls since CONFIG RESETSTAT is left out.
    names = ("cmdstat_evalsha", "cmdstat_eval")
    return sum(stats[name]["calls"] for name in names if name in stats)


def test_the_heartbeats_sweep_comes_within_a_third_of_the_ttl_of_the_acquire(bench: Bench) -> None:
    for ttl in (60.0, 6.0, 600.0):
        lease = bench.begin(new_key(), ttl=ttl)
        bench.heartbeat.sweep()
        bench.release_async(lease)
        pause = bench.heartbeat.sweep()
        assert pause is not None
        assert pause <= ttl / 3
        bench.clock.advance(pause)
        bench.heartbeat.sweep()
        assert not bench.is_pending(lease)


def test_a_body_that_held_it_for_long_waits_for_the_reply(bench: Bench) -> None:
    lease = bench.begin(new_key())
    bench.clock.advance(1.5)
    bench.cut()
    bench.end(lease)
    assert bench.is_free(lease.key), "a connection that idled for long may be broken"
    assert not bench.is_pending(lease)


def test_a_body_that_has_lost_the_lease_waits_for_the_reply(bench: Bench) -> None:
    lease = bench.begin(new_key(), ttl=0.5)
    bench.clock.advance(0.6)
    bench.end(lease)
    assert not bench.is_pending(lease)


def test_a_release_that_a_caller_needs_is_waited_for(bench: Bench) -> None:
    lease = bench.begin(new_key())
    bench.locker.release(lease, Release(keys=(lease.key,), token=lease.token))
    assert bench.is_free(lease.key)
    assert not bench.is_pending(lease)


def test_a_connection_never_owes_more_than_one_reply(bench: Bench) -> None:
    leases = [bench.begin(new_key()) for _ in range(5)]
    for lease in leases:
        bench.end(lease)
    assert sum(bench.is_pending(lease) for lease in leases) <= 1


# --- the lease was lost --------------------------------------------------------------------------


def losses(bench: Bench) -> list[str]:
    return [
        str(event.data["reason"]) for event in bench.events if event.name is EventName.LEASE_LOST
    ]


def flushed(bench: Bench, lease: Lease) -> None:
    bench.raw.delete(lease.key)


def replaced(bench: Bench, lease: Lease) -> None:
    bench.raw.delete(lease.key)
    with closing(RedisStore(bench.url)) as other:
        assert isinstance(ask(other, lease.key, new_token()), Granted)


def freed(bench: Bench, lease: Lease) -> None:
    assert bench.store.operators.free(lease.key, str(lease.token))


however_lost = pytest.mark.parametrize(
    ("lose", "reason"), [(flushed, "gone"), (replaced, "replaced"), (freed, "gone")]
)


@however_noticed
@however_lost
def test_a_loss_that_an_asynchronous_release_meets_is_reported_once(
    bench: Bench,
    lose: Callable[[Bench, Lease], None],
    reason: str,
    notices: Callable[[Bench], None],
) -> None:
    lease = bench.begin(new_key())
    lose(bench, lease)
    bench.release_async(lease)
    notices(bench)
    bench.next_renewal()
    assert losses(bench) == [reason]
    assert lease.loss is not None
    assert lease.loss.reason == reason
    assert EventName.RELEASE_FAILED not in bench.names()


@however_lost
def test_a_loss_is_reported_where_no_connection_could_take_the_release(
    bench: Bench, lose: Callable[[Bench, Lease], None], reason: str
) -> None:
    lease = bench.begin(new_key())
    lose(bench, lease)
    bench.store.runner.connections.close()
    bench.end(lease)
    assert not bench.is_pending(lease), "it was not waited for"
    assert losses(bench) == [reason]


@pytest.mark.parametrize("age", [0.5, 1.5])
def test_a_release_is_not_sent_on_a_connection_that_the_server_has_closed(
    bench: Bench, age: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_CHECKED_AFTER", 0.0)
    lease = bench.begin(new_key())
    bench.raw.flushall()
    bench.cut()
    with closing(RedisStore(bench.url)) as other:
        ask(other, new_key(), new_token())  # the shard has a last fence again
    bench.clock.advance(age)
    bench.end(lease)
    assert losses(bench) == ["gone"], "it was sent once, so its reply leaves no doubt"


def test_a_loss_before_a_connection_broke_is_reported(bench: Bench) -> None:
    lease = bench.begin(new_key())
    replaced(bench, lease)
    bench.cut()
    bench.release_async(lease)
    asks_for_another(bench)
    assert losses(bench) == ["replaced"], "the present holder began before the release"


def test_a_lease_that_the_store_has_forgotten_was_lost_whatever_became_of_the_connection(
    bench: Bench,
) -> None:
    lease = bench.begin(new_key())
    bench.raw.flushall()
    bench.cut()
    bench.release_async(lease)
    bench.next_renewal()
    assert losses(bench) == ["gone"]


def lose_reply(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next release be carried out, and its reply get lost with its connection."""
    send_async = bench.store.runner.connections.send_async

    def carry_out_first(command: Any, timeout: float, pending: Any) -> bool:
        bench.raw.execute_command(*command)
        bench.cut()
        return bool(send_async(command, timeout, pending))

    monkeypatch.setattr(bench.store.runner.connections, "send_async", carry_out_first)


@however_noticed
def test_a_release_that_was_merely_sent_twice_is_no_loss(
    bench: Bench, notices: Callable[[Bench], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_reply(bench, monkeypatch)
    lease = bench.begin(new_key())
    bench.release_async(lease)
    notices(bench)
    assert losses(bench) == []
    failures = [event for event in bench.events if event.name is EventName.RELEASE_FAILED]
    assert len(failures) == 1
    assert "does not say which" in str(failures[0].data["error"])


@pytest.mark.parametrize("then", ["closes", "breaks", "grows too old"])
def test_a_reply_that_arrived_before_its_connection_ended_counts(
    bench: Bench, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = bench.begin(new_key())
    bench.release_async(lease)
    until(lambda: bench.is_free(lease.key))  # the reply is on its way, or in the socket
    if then == "closes":
        bench.cut()
        bench.store.runner.connections.close()
    elif then == "breaks":
        # The next command meets the end of the stream behind that reply.
        bench.raw.flushall()
        bench.cut()
        with closing(RedisStore(bench.url)) as other:
            ask(other, new_key(), new_token())
        with suppress(StoreUnavailable):
            marker = Mark(key=new_key(), token=new_token(), state=CompletionState.WAITING, ttl=60.0)
            bench.store.leases.mark(marker, timeout=timeout_for(TTL))
    else:
        monkeypatch.setattr(connections, "_CHECKED_AFTER", 0.0)
        monkeypatch.setattr(connections, "MAX_IDLE", 0.0)
        bench.begin(new_key())
    bench.next_renewal()
    assert not bench.is_pending(lease)
    assert {*bench.names()} == {EventName.ACQUIRED}


def test_a_release_that_an_acquire_resent_without_success_leaves_a_doubt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[tuple[Any, bool]] = []
    lease = bench.begin(new_key())
    request = Release(keys=(lease.key,), token=lease.token)
    pending = bench.store.runner.pending.begin(
        request, TIMEOUT, lambda *outcome: outcomes.append(outcome)
    )

    def carried_out_without_reply(request: Release, timeout: float) -> Any:
        raise StoreUnavailable("its reply was lost")

    with monkeypatch.context() as patched:
        patched.setattr(bench.store.runner.pending, "_release", carried_out_without_reply)
        with pytest.raises(StoreUnavailable):
            bench.store.runner.pending.resend(pending)
    pending.acknowledge(b"not_ours")
    bench.store.runner.pending.resend_lost()
    assert outcomes == [(ReleaseReply.NOT_OURS, True)]


def test_a_release_sent_twice_is_no_loss_where_another_has_acquired_the_key_since(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_reply(bench, monkeypatch)
    lease = bench.begin(new_key())
    bench.release_async(lease)
    with closing(RedisStore(bench.url)) as other:
        assert isinstance(ask(other, lease.key, new_token()), Granted)
    bench.next_renewal()
    assert losses(bench) == []


@pytest.mark.parametrize("kind", [Kind.COOLING, Kind.RESERVED])
def test_what_a_release_sent_twice_has_made_of_the_key_says_that_it_was_carried_out(
    bench: Bench, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_reply(bench, monkeypatch)
    lease = bench.begin(new_key())
    following = lease.token.next_attempt() if kind is Kind.RESERVED else None
    bench.end(lease, become=kind, become_ttl=60.0, next_token=following)
    bench.next_renewal()
    assert losses(bench) == []
    assert EventName.RELEASE_FAILED not in bench.names()


# --- the connection breaks -----------------------------------------------------------------------


@however_noticed
def test_a_release_that_was_lost_with_its_connection_is_resent(
    bench: Bench, notices: Callable[[Bench], None]
) -> None:
    lease = bench.begin(new_key())
    bench.cut()
    bench.release_async(lease)
    assert not bench.is_free(lease.key)
    notices(bench)
    assert bench.is_free(lease.key)
    assert not bench.is_pending(lease)
    assert EventName.RELEASE_FAILED not in bench.names()


def test_an_exception_while_a_lost_release_is_resent_leaves_it_to_the_next_operation(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = bench.begin(new_key())
    bench.cut()
    bench.release_async(lease)
    with monkeypatch.context() as patched:
        patched.setattr(bench.store.runner.pending, "_release", terminated)
        with pytest.raises(SystemExit):
            asks_for_another(bench)
    asks_for_another(bench)
    assert bench.is_free(lease.key)
    assert not bench.is_pending(lease)


def terminated(*args: Any) -> Any:
    raise SystemExit


def test_the_next_task_of_the_same_key_never_meets_a_release_that_was_lost(bench: Bench) -> None:
    lease = bench.begin(new_key())
    bench.cut()
    bench.release_async(lease)
    bench.begin(lease.key)


def test_an_acquire_on_another_connection_does_not_supersede_a_release(bench: Bench) -> None:
    bench.begin(new_key(), ttl=2.0)  # another ttl, and so another connection
    lease = bench.begin(new_key())
    bench.release_async(lease)
    requeue(bench, lease)
    bench.begin(lease.key, ttl=2.0)


def test_an_acquire_of_several_slots_supersedes_the_release_of_none(bench: Bench) -> None:
    bench.begin(new_key(), ttl=2.0)  # another ttl, and so another connection
    slots = Keyspace.slots(new_key(), 3)
    with closing(RedisStore(bench.url)) as other:
        # A refusal names the holder of the first slot.
        assert isinstance(ask(other, slots[0], new_token()), Granted)
        assert isinstance(ask(other, slots[1], new_token()), Granted)
    lease = bench.begin(*slots)
    assert lease.key == slots[2]
    bench.release_async(lease)
    requeue(bench, lease)
    assert bench.begin(*slots, ttl=2.0).key == slots[2]


def test_an_acquire_refused_all_slots_is_refused_beside_a_release_that_arrived(
    bench: Bench,
) -> None:
    slots = Keyspace.slots(new_key(), 2)
    lease = bench.begin(*slots)
    bench.release_async(lease)
    until(lambda: bench.is_free(lease.key))
    with closing(RedisStore(bench.url)) as other:
        for slot in slots:
            assert isinstance(ask(other, slot, new_token()), Granted)
    request = Acquire(slots=slots, token=new_token(), holder=HOLDER, ttl=TTL)
    assert isinstance(bench.locker.acquire(request), Refused)


def requeue(bench: Bench, lease: Lease) -> None:
    """As if the server had not read the release yet."""
    until(lambda: bench.is_free(lease.key))
    bench.raw.set(lease.key, f"l {lease.token} 1 {HOLDER.to_json()}", px=60_000)


def test_a_claim_on_another_connection_does_not_supersede_a_release(bench: Bench) -> None:
    key = new_key()
    claim, token = Keyspace.claim("app.sync", key), new_token()
    publish(bench.store, claim, token)
    request = Acquire(slots=(key,), token=token, holder=HOLDER, ttl=TTL)
    lease = bench.locker.acquire(request)
    assert isinstance(lease, Lease)
    value = bench.raw.get(claim)
    bench.end(lease, claim=ClaimChange(key=claim, phase=None))
    assert bench.is_pending(lease), "it was waited for"
    until(lambda: bench.is_free(claim))
    bench.raw.set(claim, value, px=60_000)
    assert take_claim(bench.store, claim, new_token()) is None


def test_anothers_lease_is_no_superseded_release(bench: Bench) -> None:
    lease = bench.begin(new_key())
    bench.release_async(lease)
    until(lambda: bench.is_free(lease.key))
    with closing(RedisStore(bench.url)) as other:
        assert isinstance(ask(other, lease.key, new_token()), Granted)
    request = Acquire(slots=(lease.key,), token=new_token(), holder=HOLDER, ttl=TTL)
    assert isinstance(bench.locker.acquire(request), Refused)


@however_noticed
def test_a_release_that_cannot_be_resent_is_reported_once_and_left_to_the_parent(
    notices: Callable[[Bench], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_threads, "start_new_thread", lambda function, name: None)
    with PrivateServer() as server, redis.Redis.from_url(server.url()) as raw:
        bench = Bench(server.url(), RedisStore(server.url()), raw)
        lease = bench.begin(new_key())
        server.kill()
        bench.release_async(lease)
        try:
            notices(bench)
        except StoreUnavailable:
            pass  # the next task can't reach the store either
        renewal_is_due(bench)
        assert EventName.RELEASE_FAILED not in bench.names()
        assert bench.is_pending(lease)
        assert bench.heartbeat.sweep() is None
        bench.clock.advance(TTL)
        bench.locker.retry_queue.catch_up()
        failures = [e for e in bench.events if e.name is EventName.RELEASE_FAILED]
        assert [(e.key, e.data["frees_in"]) for e in failures] == [(lease.key, 0.0)]
        bench.locker.retry_queue.catch_up()
        assert bench.names().count(EventName.RELEASE_FAILED) == 1


# --- the server refuses --------------------------------------------------------------------------


@however_noticed
def test_a_release_whose_script_was_forgotten_is_resent(
    bench: Bench, notices: Callable[[Bench], None]
) -> None:
    lease = bench.begin(new_key())
    bench.raw.script_flush()
    bench.release_async(lease)
    notices(bench)
    assert bench.is_free(lease.key)
    assert not bench.is_pending(lease)


def test_the_next_task_of_the_same_key_never_meets_a_script_that_was_forgotten(
    bench: Bench,
) -> None:
    lease = bench.begin(new_key())
    bench.raw.script_flush()
    bench.release_async(lease)
    with closing(RedisStore(bench.url)) as other:
        # Another process teaches the server to acquire, but not to release.
        assert isinstance(ask(other, new_key(), new_token()), Granted)
    bench.begin(lease.key)


def test_after_a_flush_the_next_release_is_waited_for(bench: Bench) -> None:
    bench.raw.script_flush()
    lease = bench.begin(new_key())
    bench.end(lease)
    assert bench.is_free(lease.key)
    assert not bench.is_pending(lease)


@pytest.fixture
def replica(bench: Bench) -> Iterator[Callable[[bool], None]]:
    """Makes the server a replica, of no master, or a master again."""

    def make(is_replica: bool) -> None:
        bench.raw.replicaof(*(("127.0.0.1", free_port()) if is_replica else ("NO", "ONE")))

    yield make
    make(False)


def test_a_release_that_a_replica_refused_is_repeated_until_there_is_a_master(
    bench: Bench, replica: Callable[[bool], None]
) -> None:
    lease = bench.begin(new_key())
    replica(True)
    bench.release_async(lease)
    with pytest.raises(StoreUnavailable, match="replica"):
        asks_for_another(bench)
    bench.next_renewal()
    assert bench.is_pending(lease)
    replica(False)
    bench.clock.advance(1.0)
    bench.locker.retry_queue.catch_up()
    assert bench.is_free(lease.key)
    assert not bench.is_pending(lease)
    assert EventName.RELEASE_FAILED not in bench.names()


@pytest.fixture
def denied(bench: Bench) -> Iterator[Callable[[bool], None]]:
    """Takes the right to run scripts away from the store's user, or gives it back."""

    def make(is_denied: bool) -> None:
        right = "-evalsha" if is_denied else "+evalsha"
        bench.raw.execute_command("ACL", "SETUSER", "default", right)

    yield make
    make(False)


@pytest.mark.parametrize("refusal", ["replica", "denied"])
def test_an_acquire_that_repeats_a_release_that_was_not_carried_out_reports_its_end_once(
    bench: Bench, request: pytest.FixtureRequest, refusal: str
) -> None:
    """The queue, which repeats it after that, does not find the lease."""
    refuse: Callable[[bool], None] = request.getfixturevalue(refusal)
    lease = bench.begin(new_key())
    refuse(True)
    bench.release_async(lease)
    with pytest.raises(StoreError):
        asks_for_another(bench)
    bench.next_renewal()
    refuse(False)
    bench.begin(lease.key)
    assert not bench.is_pending(lease)
    bench.clock.advance(1.0)
    bench.locker.retry_queue.catch_up()
    assert bench.locker.retry_queue.is_empty
    assert losses(bench) == []
    assert EventName.RELEASE_FAILED not in bench.names()


def test_a_release_that_a_replica_refused_is_resent_to_the_new_master(
    bench: Bench, replica: Callable[[bool], None]
) -> None:
    lease = bench.begin(new_key())
    replica(True)
    bench.release_async(lease)
    replica(False)
    bench.next_renewal()
    assert bench.is_free(lease.key)
    assert not bench.is_pending(lease)


def test_a_heartbeat_that_sweeps_before_the_release_is_sent_checks_it_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a short ttl a sweep may come while the body's thread is between let_go() and sending.
    release_async = bench.store.async_releases.send

    def after_a_sweep(*args: Any, **options: Any) -> bool:
        bench.heartbeat.sweep()
        bench.cut()
        return release_async(*args, **options)

    rings: list[bool] = []
    monkeypatch.setattr(bench.heartbeat._alarm, "ring", lambda: rings.append(True))
    lease = bench.begin(new_key(), ttl=3.0)
    bench.raw.persist(lease.key)  # no ttl does it instead
    bench.clock.advance(0.95)
    monkeypatch.setattr(bench.store.async_releases, "send", after_a_sweep)
    bench.release_async(lease)
    assert not bench.is_free(lease.key)
    assert rings, "it may sleep for ever"
    bench.heartbeat.sweep()
    assert bench.is_free(lease.key)
    assert not bench.is_pending(lease)
    assert bench.heartbeat.sweep() is None


# --- the heartbeat's own thread -------------------------------------------------------------------


def test_an_idle_process_resends_a_lost_release_by_itself(own_server: PrivateServer) -> None:
    url = own_server.url(db=7)
    with closing(RedisStore(url)) as store, redis.Redis.from_url(url) as raw:
        bench = Bench(url, store, raw, SystemClock())
        lease = bench.begin(new_key(), ttl=3.0)
        raw.persist(lease.key)  # no ttl does it instead
        bench.cut()
        bench.end(lease)
        until(lambda: bench.is_free(lease.key))
        until(lambda: not bench.is_pending(lease))
        bench.heartbeat.close()


def test_a_heartbeat_that_may_not_read_the_bodies_sockets_resends_it_and_it_is_reported_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As under gevent, where a socket is read in the thread of its hub alone.
    owners: dict[int, native_threads.SocketOwner] = defaultdict(native_threads.SocketOwner)
    monkeypatch.setattr(native_threads, "socket_owner", lambda: owners[threading.get_ident()])
    bench.end(bench.begin(new_key()))
    lease = bench.begin(new_key())
    bench.release_async(lease)
    heartbeat = threading.Thread(target=bench.next_renewal)
    heartbeat.start()
    heartbeat.join()
    assert not bench.is_pending(lease)
    asks_for_another(bench)
    assert bench.notes.strikes.count(str(lease.token)) == 1


def test_threads_never_meet_their_own_releases_and_every_one_is_confirmed(
    own_server: PrivateServer,
) -> None:
    url = own_server.url(db=7)
    with closing(RedisStore(url)) as store, redis.Redis.from_url(url) as raw:
        bench = Bench(url, store, raw, SystemClock())
        failures: list[BaseException] = []

        def tasks(number: int) -> None:
            key = new_key()
            try:
                for _ in range(50):
                    bench.end(bench.begin(key, ttl=(60.0, 3.0)[number % 2]))
            except BaseException as exc:
                failures.append(exc)

        threads = [threading.Thread(target=tasks, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        store.async_releases.drain(timeout=TIMEOUT)
        assert bench.notes.held == []
        assert raw.keys("*}:contract:*") == []
        bench.heartbeat.close()


# --- exceptions thrown into the thread -----------------------------------------------------------


@pytest.mark.slow
def test_an_interrupted_release_gives_its_reply_to_no_other_request(
    bench: Bench, fault: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Release] = []
    begin = bench.store.runner.pending.begin

    def noting(request: Release, timeout: float, on_reply: Any) -> Any:
        pending = begin(request, timeout, on_reply)
        begun.append(request)
        return pending

    monkeypatch.setattr(bench.store.runner.pending, "begin", noting)
    held = new_key()
    holder = new_token()
    ask(bench.store, held, holder)

    def once(fresh: bool) -> None:
        if fresh:
            bench.store.close()
        lease = bench.begin(new_key())
        begun.clear()
        try:
            with struck_at_random(0.0004):
                bench.end(lease)
        finally:
            assert len(bench.heartbeat) == 0 or lease.released_at is None, (
                "it would be renewed for ever"
            )
            bench.heartbeat.stop(lease)
            # Each of these has an answer that none of the others has.
            refused = ask(bench.store, held, new_token())
            assert isinstance(refused, Refused)
            assert refused.relation is Relation.OTHER
            leases = [lease_of(held, holder), lease_of(held, new_token())]
            assert bench.store.leases.renew(leases, timeout=TIMEOUT) == [
                RENEWED,
                LossReason.REPLACED,
            ]
            bench.next_renewal()
            if begun:
                assert bench.is_free(lease.key), "it was about to be sent, and was not resent"
            bench.raw.delete(lease.key)

    thousand_times(fault, once)


# --- processes that end, and that fork -----------------------------------------------------------

PROCESS = """
import os, signal, sys
from celery import Celery
from celery_singleton_lock.core.lease import Holder, Lease
from celery_singleton_lock.core.store_requests import Acquire, Refused, Release
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.testing.contract import new_token

app = Celery("p", broker="memory://")
app.conf.singleton_lock_url = sys.argv[1]

def begin(name):
    runtime = Runtime.of(app)
    key = runtime.keyspace.lock("process", name)
    token = new_token()
    return runtime.locker.acquire(Acquire(slots=(key,), token=token, holder=Holder(), ttl=600))

def end(lease):
    Runtime.of(app).locker.give_back(lease, Release(keys=(lease.key,), token=lease.token))

def owes():
    return len(Runtime.of(app).store.runner.pending.open())

end(begin("first"))
lease = begin("last")
end(lease)
assert owes() == 1, "it was waited for"
"""


def run(url: str, then: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROCESS + textwrap.dedent(then), url],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("sys.exit(0)", 0),
        ("os._exit(0)", 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_a_release_that_was_sent_needs_its_process_no_more(
    server: PrivateServer, then: str, status: int
) -> None:
    url = server.url(db=8)
    assert run(url, then).returncode == status
    with redis.Redis.from_url(url) as raw:
        until(lambda: raw.keys("*}:process:*") == [])


@pytest.mark.slow
def test_a_fork_never_reads_the_pending_replies_of_its_parents_connection(
    server: PrivateServer,
) -> None:
    then = """
    held = begin("held")
    end(begin("last"))
    assert owes() == 1
    pid = os.fork()
    if not pid:
        reply = begin("held")
        os._exit(0 if isinstance(reply, Refused) and not owes() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert owes() == 1, "the child has read it"
    assert isinstance(begin("held"), Refused)
    assert owes() == 0
    """
    assert run(server.url(db=9), then).returncode == 0


def test_a_task_ends_without_waiting_and_a_hold_does_not(server: PrivateServer) -> None:
    app = Celery("ends", broker="memory://")
    app.conf.singleton_lock_url = server.url(db=10)

    @singleton_task(app=app, key="{name}")
    def brief(name: str) -> str:
        return name

    @singleton_task(app=app, key="{name}")
    def leaving(name: str) -> None:
        raise SystemExit

    with closing(Runtime.of(app)) as runtime, redis.Redis.from_url(server.url(db=10)) as raw:
        store = runtime.store
        assert isinstance(store, RedisStore)
        assert brief.apply(("first",)).get() == "first"
        assert brief.apply(("second",)).get() == "second"
        assert len(store.runner.pending.open()) == 1
        with hold("third", scope="ends", app=app):
            assert not store.runner.pending.open()
        assert not store.runner.pending.open(), "a caller that leaves a block expects it to be free"
        with pytest.raises(SystemExit):
            leaving.apply(("fourth",))
        assert not store.runner.pending.open(), "a process that may be about to end waits"
        assert raw.keys("*fourth*") == []


def test_the_completion_record_of_a_task_that_is_acknowledged_late_is_waited_for(
    redis_url: str,
) -> None:
    with open_site(redis_url) as site:
        pending = site.runtime.store.runner.pending  # type: ignore[attr-defined]
        site.drain()
        site.run(site.late)
        assert pending.open() == []
        site.run(site.ours)
        assert len(pending.open()) == 1, "an early acknowledged one's release is not"
