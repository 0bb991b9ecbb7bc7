"""What is special about Redis: scripts, foreign data, connections, a server that is away."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import count
from typing import Any
from unittest.mock import ANY

import pytest
import redis

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.events import Events
from celery_singleton_lock.core.heartbeat import Heartbeat
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Kind, Lease, LossReason
from celery_singleton_lock.core.locker import Locker
from celery_singleton_lock.core.store_requests import (
    RENEWED,
    Acquire,
    CompletionState,
    Granted,
    Mark,
    Refused,
    Relation,
    Release,
    ReleaseReply,
    Renewal,
)
from celery_singleton_lock.errors import SettingsError, StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.connection import Connections
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.testing.contract import TIMEOUT, ask, lease_of, new_key, new_token
from example_project.private_server import PrivateServer, free_port
from tests.harness.keys import EVERY_NAME
from tests.harness.servers import server_version

FOREIGN = {
    "text": b"another's data",
    "number": b"42",
    "binary": b"\xff\x00\xfe",
    "almost a lease": b"l no token here",
    "another kind": b"z t|0.0|n 1 {}",
}


def give(store: RedisStore, key: str, token: object, **options: object) -> ReleaseReply:
    return store.leases.release(Release(keys=(key,), token=token, **options), timeout=TIMEOUT)


def fence(store: RedisStore, key: str) -> int:
    reply = ask(store, key, token := new_token())
    assert isinstance(reply, Granted)
    assert reply.fence is not None
    give(store, key, token)
    return reply.fence


def locker_on(store: RedisStore) -> Locker:
    events, clock = Events(), SystemClock()
    return Locker(store, clock, Heartbeat(store, clock, events), events)


def call_for(key: str) -> Acquire:
    return Acquire(
        slots=(key,), token=new_token(), holder=lease_of(key, new_token()).holder, ttl=60
    )


# --- many slots -----------------------------------------------------------------------------------


def test_a_refusal_by_many_slots_names_the_eight_leases_that_expire_first(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    """A holder of a high limit would otherwise get 100 kB at each try."""
    slots = Keyspace.slots(new_key(), 30)
    tokens = [new_token() for _ in slots]
    for number, (slot, token) in enumerate(zip(slots, tokens, strict=True)):
        assert ask(redis_store, slot, token) == Granted(key=slot, fence=ANY)
        raw.pexpire(slot, 300_000 - 1000 * number)
    # A key that cools down expires soon too, but no process holds it.
    give(redis_store, slots[29], tokens[29], become=Kind.COOLING, become_ttl=100.0)
    refused = ask(redis_store, slots, new_token())
    assert isinstance(refused, Refused)
    assert refused.record is not None
    named = [record.key for record in (refused.record, *refused.others)]
    assert named == [*reversed(slots[21:29])]
    assert 260 < refused.record.ttl <= 272
    assert refused.explain(slots[0], 30).startswith(f"all 30 slots of {slots[0]!r} are held")


# --- foreign data --------------------------------------------------------------------------------


@pytest.mark.parametrize("value", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_string_is_neither_granted_nor_deleted(
    redis_store: RedisStore, raw: redis.Redis, value: bytes
) -> None:
    key, token = new_key(), new_token()
    raw.set(key, value)
    reply = ask(redis_store, key, token)
    assert reply == Refused(relation=Relation.OTHER, record=None)
    assert give(redis_store, key, token) is ReleaseReply.NOT_OURS
    assert redis_store.leases.renew([lease_of(key, token)], timeout=TIMEOUT) == [
        LossReason.REPLACED
    ]
    assert redis_store.operators.free(key, str(token)) is False
    assert redis_store.leases.inspect(key) is None
    assert raw.get(key) == value
    assert raw.ttl(key) == -1


def test_a_foreign_list_is_neither_granted_nor_deleted(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    key, token = new_key(), new_token()
    raw.rpush(key, "another's", "data")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        ask(redis_store, key, token)
    with pytest.raises(StoreError, match="WRONGTYPE"):
        give(redis_store, key, token)
    assert raw.lrange(key, 0, -1) == [b"another's", b"data"]


def test_a_lease_overwritten_by_a_list_is_lost_and_the_others_are_renewed(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    leases = [lease_of(new_key(), new_token()) for _ in range(3)]
    for lease in leases:
        ask(redis_store, lease.key, lease.token)
    raw.delete(leases[1].key)
    raw.rpush(leases[1].key, "foreign")
    assert redis_store.leases.renew(leases, timeout=TIMEOUT) == [
        RENEWED,
        LossReason.REPLACED,
        RENEWED,
    ]


@pytest.mark.parametrize(("right", "reads"), [("-mget", {"get"}), ("+mget", {"get", "mget"})])
def test_a_renewal_says_the_same_and_is_denied_nothing_with_and_without_the_right_to_mget(
    server: PrivateServer, redis_store: RedisStore, raw: redis.Redis, right: str, reads: set[str]
) -> None:
    leases = [lease_of(new_key(), new_token()) for _ in range(4)]
    for lease in leases[:3]:
        ask(redis_store, lease.key, lease.token)
    raw.delete(leases[1].key)
    raw.rpush(leases[1].key, "foreign")
    raw.set(leases[2].key, "another's")
    rights = f"~{EVERY_NAME} resetchannels -@all +eval +evalsha +get +pexpire {right}"
    raw.execute_command(f"ACL SETUSER renewing on >secret {rights}")
    raw.execute_command("ACL LOG RESET")
    raw.config_resetstat()
    with closing(RedisStore(server.url().replace("//", "//renewing:secret@"))) as store:
        assert store.leases.renew(leases, timeout=TIMEOUT) == [
            RENEWED,
            LossReason.REPLACED,
            LossReason.REPLACED,
            LossReason.GONE,
        ]
    stats = raw.info("commandstats")
    if server_version() < (7, 0):  # a script can't ask for its rights
        reads = {"get"}
    assert {name for name in ("get", "mget") if f"cmdstat_{name}" in stats} == reads
    # The client library introduces itself, which needs no right: most servers note the refusal.
    assert {entry["object"].partition("|")[0] for entry in raw.acl_log()} <= {"client"}


def test_foreign_keys_under_the_prefix_do_not_end_a_scan(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    prefix = Keyspace("foreign")
    for number, value in enumerate(FOREIGN.values()):
        raw.set(prefix.lock("s", f"text{number}"), value)
    raw.rpush(prefix.lock("s", "list"), "x")
    raw.hset(prefix.lock("s", "hash"), "x", "y")
    key, token = prefix.lock("s", "lease"), new_token()
    ask(redis_store, key, token)
    assert [record.key for record in redis_store.operators.scan(prefix.match_all())] == [key]


class Pauses(SystemClock):
    """Counts what others would have had of the server meanwhile."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def test_a_search_leaves_nine_tenths_of_the_server_to_others_and_does_not_wait_for_its_own_keys(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    pauses = redis_store.runner.connections.clock = Pauses()
    printed: list[str] = []
    redis_store.operators.progress = printed.append
    raw.flushdb()
    raw.mset({f"celery-task-meta-{number}": "{}" for number in range(20_000)})
    raw.config_resetstat()
    assert list(redis_store.operators.scan(Keyspace("searched").match_all())) == []
    scans = raw.info("commandstats")["cmdstat_scan"]
    assert pauses.seconds >= 9 * scans["calls"] * 0.05e-3
    assert printed[-1] == f"searched {scans['calls'] - 1:,} pages of keys: 0 keys are ours"
    before, pauses.seconds = pauses.seconds, 0.0
    raw.flushdb()
    prefix = Keyspace("searched")
    raw.mset({prefix.lock("s", f"{number}"): "-" for number in range(20_000)})
    assert list(redis_store.operators.scan(prefix.match_all())) == []
    assert pauses.seconds < 0.1 * before, "pages of our keys are read without a pause"
    assert redis_store.operators.size() == 20_000
    raw.flushdb()


def test_a_survey_finds_records_and_strays_and_reads_each_key_once(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    prefix = Keyspace("survey")
    key = prefix.lock("s", "lease")
    ask(redis_store, key, new_token())
    raw.set(prefix.lock("s", "for ever"), "another's")
    raw.rpush(prefix.lock("s", "list"), "x")
    raw.set(prefix.lock("s", "for a while"), "another's", px=60_000)
    foreign: list[tuple[str, str]] = []
    raw.config_resetstat()
    found = redis_store.operators.survey(
        prefix.match_all(), lambda name, what: foreign.append((name, what))
    )
    assert [record.key for record in found] == [key]
    stats = raw.info("commandstats")
    keys = len(list(raw.scan_iter(prefix.match_all())))
    calls = {name: stats[f"cmdstat_{name}"]["calls"] for name in ("get", "type", "pttl")}
    assert calls == {"get": keys - 1, "type": 1, "pttl": keys}, "all but the hash of the shard"
    assert sorted(foreign) == sorted(redis_store.operators.foreign_keys(prefix.match_all()))
    assert len(foreign) == 2


def test_a_scan_of_many_pages_misses_nothing(redis_store: RedisStore) -> None:
    prefix = Keyspace("pages")
    keys = {prefix.lock("s", str(number)) for number in range(1200)}
    for key in keys:
        ask(redis_store, key, new_token())
    assert {record.key for record in redis_store.operators.scan(prefix.match_all())} == keys


# --- scripts -------------------------------------------------------------------------------------


def test_an_acquire_teaches_the_server_a_forgotten_script(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    for _ in range(3):
        raw.script_flush()
        assert isinstance(ask(redis_store, new_key(), new_token()), Granted)


def test_a_renewal_of_600_leases_survives_a_script_flush(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    leases = [lease_of(new_key(), new_token()) for _ in range(600)]
    for lease in leases:
        ask(redis_store, lease.key, lease.token)
    raw.script_flush()
    assert redis_store.leases.renew(leases, timeout=TIMEOUT) == [RENEWED] * 600


# Several batches of the heartbeat's.
MANY = 2600


def lease_many(client: redis.Redis) -> list[Lease]:
    leases = [lease_of(new_key(), new_token()) for _ in range(MANY)]
    pipeline = client.pipeline()
    for lease in leases:
        pipeline.set(lease.key, f"{Kind.LEASE} {lease.token} 1 {{}}", px=60_000)
    pipeline.execute()
    return leases


def test_each_of_many_renewals_gets_its_own_answer(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    leases = lease_many(raw)
    expected: list[Renewal] = [RENEWED] * MANY
    for number in range(0, MANY, 7):
        raw.delete(leases[number].key)
        expected[number] = LossReason.GONE
    assert redis_store.leases.renew(leases, timeout=TIMEOUT) == expected
    raw.script_flush()
    assert redis_store.leases.renew(leases, timeout=TIMEOUT) == expected


def test_what_was_renewed_before_the_server_died_is_noted() -> None:
    """The heartbeat asks for a part of its leases at a time."""
    with PrivateServer() as server, closing(RedisStore(server.url())) as store:
        leases = lease_many(redis.Redis.from_url(server.url()))
        heartbeat = Heartbeat(store, SystemClock(), Events())
        heartbeat._running = True  # this thread sweeps
        for lease in leases:
            heartbeat.add(lease, lambda lease: None)
        before = [lease.valid_until for lease in leases]
        renew, calls = store.leases.renew, count()

        def dies_after_two(asked: Sequence[Lease], *, timeout: float) -> list[Renewal]:
            if next(calls) == 2:
                server.kill()
            return renew(asked, timeout=timeout)

        store.leases.renew = dies_after_two  # type: ignore[method-assign, assignment]
        heartbeat._renew(list(heartbeat._leases))
        renewed = [
            lease for lease, until in zip(leases, before, strict=True) if lease.valid_until != until
        ]
    batch = store.capabilities.renewal_batch
    assert batch is not None
    assert renewed == leases[: 2 * batch]


class Relay:
    """A third party's transport: no subclass of ours, with the methods of the protocol alone."""

    def __init__(self, url: str, options: Mapping[str, Any] | None) -> None:
        there = Connections(url, options)
        self.run, self.send_async = there.run, there.send_async
        self.drain, self.close, self.home_of = there.drain, there.close, there.home_of


def test_a_store_needs_nothing_of_its_transport_but_the_protocol(
    server: PrivateServer, raw: redis.Redis
) -> None:
    with closing(RedisStore(server.url(), connect=Relay)) as store:
        key, token = new_key(), new_token()
        assert isinstance(ask(store, key, token), Granted)
        assert store.leases.renew([lease_of(key, token)], timeout=TIMEOUT) == [RENEWED]
        place = store.wait_queue.ticket(key, "waiter", timeout=TIMEOUT)
        assert place is not None
        raw.rpush(f"{Keyspace.wait_queue(key)}!", "nonce")
        assert place.wait(TIMEOUT) == "nonce"
        place.leave(counted=False)
        assert give(store, key, token) is ReleaseReply.OURS


def test_every_operation_survives_a_script_flush(redis_store: RedisStore, raw: redis.Redis) -> None:
    key, token = new_key(), new_token()
    ask(redis_store, key, token)
    raw.script_flush()
    assert give(redis_store, key, token, become=Kind.COOLING, become_ttl=60) is ReleaseReply.OURS
    raw.script_flush()
    redis_store.leases.mark(
        Mark(key=key, token=token, state=CompletionState.DONE, ttl=60), timeout=TIMEOUT
    )
    raw.script_flush()
    assert redis_store.operators.free(key, None) is True


def test_a_login_that_may_not_load_scripts_is_enough(
    server: PrivateServer, raw: redis.Redis
) -> None:
    raw.execute_command(f"ACL SETUSER modest on >secret ~{EVERY_NAME} +@all -script -info -config")
    raw.script_flush()
    url = server.url().replace("redis://", "redis://modest:secret@")
    with closing(RedisStore(url)) as store:
        assert isinstance(ask(store, new_key(), new_token()), Granted)
        assert store.operators.info("memory") == {}


def test_one_round_trip_each_for_an_acquire_a_release_and_a_refusal(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    key, token = new_key(), new_token()
    ask(redis_store, key, token)  # the script is known, the connection open
    give(redis_store, key, token)
    before = raw.info("commandstats")["cmdstat_evalsha"]["calls"]
    ask(redis_store, key, token)
    ask(redis_store, key, new_token())
    give(redis_store, key, token)
    assert raw.info("commandstats")["cmdstat_evalsha"]["calls"] - before == 3


def test_the_first_acquire_of_a_process_looks_at_the_number_of_shards_once() -> None:
    with PrivateServer() as server, redis.Redis.from_url(server.url()) as client:
        with closing(RedisStore(server.url())) as store:
            for _ in range(3):
                fence(store, new_key())
        calls = client.info("commandstats")
        # Three scripts were taught, each after one refusal; the rest is 3 acquires, 3 releases.
        assert calls["cmdstat_eval"]["calls"] == 3
        assert calls["cmdstat_evalsha"]["calls"] - calls["cmdstat_evalsha"]["failed_calls"] == 4
        with closing(RedisStore(server.url())) as store:
            before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
            fence(store, new_key())
            assert client.info("commandstats")["cmdstat_evalsha"]["calls"] - before == 3


def test_a_server_that_lost_its_data_gets_the_number_of_shards_again() -> None:
    with PrivateServer() as server, closing(RedisStore(server.url())) as store:
        key = new_key()
        fence(store, key)
        server.restart(keep_data=False)
        fence(store, key)
        fence(store, key)
        with redis.Redis.from_url(server.url()) as client:
            assert client.get(Keyspace.shard_count(key)) == b"1"


# --- fences --------------------------------------------------------------------------------------


def test_fences_rise_over_a_flushall(redis_store: RedisStore, raw: redis.Redis) -> None:
    key = new_key()
    before = fence(redis_store, key)
    raw.flushall()
    assert fence(redis_store, key) > before


def test_fences_rise_over_a_restart_without_data() -> None:
    with PrivateServer() as server, closing(RedisStore(server.url())) as store:
        key = new_key()
        before = fence(store, key)
        server.restart(keep_data=False)
        assert fence(store, key) > before


def test_fences_rise_though_the_servers_clock_is_behind_its_counter(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    key = new_key()
    ahead = fence(redis_store, key) + 3600 * 10**6
    raw.hset(Keyspace.shard_hash(key), "|fence", ahead)
    token = new_token()
    assert fence(redis_store, key) == ahead + 1
    ask(redis_store, key, token)
    assert redis_store.operators.free(key, str(token)) is True
    assert fence(redis_store, key) == ahead + 4
    raw.delete(Keyspace.shard_hash(key))


def test_fences_of_a_new_store_are_above_its_base(server: PrivateServer, raw: redis.Redis) -> None:
    base = 2**52 - 10
    key = Keyspace("based").lock("s", "k")
    with closing(RedisStore(server.url(), fence_base=base)) as store:
        assert [fence(store, key) for _ in range(3)] == [base + 1, base + 2, base + 3]


def test_a_fence_counter_that_is_no_number_grants_nothing(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    key = Keyspace("broken").lock("s", "k")
    raw.hset(Keyspace.shard_hash(key), "|fence", "no number")
    with pytest.raises(StoreError):
        ask(redis_store, key, new_token())
    assert raw.get(key) is None


# --- a server that is away, or refuses -----------------------------------------------------------


def test_no_server_is_store_unavailable() -> None:
    with (
        closing(RedisStore(f"redis://127.0.0.1:{free_port()}/0")) as store,
        pytest.raises(StoreUnavailable, match="doesn't answer"),
    ):
        ask(store, new_key(), new_token())


def test_an_unresponsive_server_is_given_up_after_the_timeout(server: PrivateServer) -> None:
    clock, key = SystemClock(), new_key()
    with closing(RedisStore(server.url())) as store:
        fence(store, key)
        server.pause()
        try:
            started = clock.now()
            with pytest.raises(StoreUnavailable):
                store.leases.renew([lease_of(key, new_token())], timeout=0.1)
            assert 0.09 < clock.now() - started < 2
        finally:
            server.resume()
        assert fence(store, key)


@pytest.mark.parametrize(
    ("login", "db"), [("stranger:wrong@", 0), ("", 99_999)], ids=["password", "database"]
)
def test_a_refusal_is_a_store_error_and_not_an_absence(
    server: PrivateServer, login: str, db: int
) -> None:
    url = server.url(db).replace("redis://", f"redis://{login}")
    with closing(RedisStore(url)) as store, pytest.raises(StoreError) as caught:
        ask(store, new_key(), new_token())
    assert not isinstance(caught.value, StoreUnavailable)


def test_a_full_server_grants_nothing_but_still_renews_and_releases() -> None:
    with PrivateServer() as server, closing(RedisStore(server.url())) as store:
        key, token = new_key(), new_token()
        ask(store, key, token)
        with redis.Redis.from_url(server.url()) as client:
            client.config_set("maxmemory", "1")
        with pytest.raises(StoreError, match="maxmemory"):
            ask(store, new_key(), new_token())
        assert store.leases.renew([lease_of(key, token)], timeout=TIMEOUT) == [RENEWED]
        assert give(store, key, token) is ReleaseReply.OURS


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost:nan/0",
        "redis://localhost/0?no_such_option=1",
        "redis://localhost/0?socket_keepalive_options=nonsense&db=x",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_before_its_first_use(url: str) -> None:
    with pytest.raises(SettingsError, match="can't be read"):
        RedisStore(url)


# --- connections ---------------------------------------------------------------------------------


def test_a_cut_connection_costs_the_locker_one_more_try_and_no_grant(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    locker = locker_on(redis_store)
    for _ in range(3):
        lease = locker.acquire(call_for(new_key()))
        assert isinstance(lease, Lease)
        raw.client_kill_filter(_type="normal", skipme=True)
        reply = locker.release(lease, Release(keys=(lease.key,), token=lease.token))
        assert reply is ReleaseReply.OURS
        raw.client_kill_filter(_type="normal", skipme=True)
    locker.heartbeat.close()


def test_after_a_cut_no_other_idle_connection_is_tried() -> None:
    # Only greenlets have several idle connections on one thread, so this needs a process of its
    # own: gevent can't be undone.
    program = """
        import gevent.monkey; gevent.monkey.patch_all()
        import gevent, redis
        from celery_singleton_lock.core.lease import Lease
        from celery_singleton_lock.stores.redis.store import RedisStore
        from celery_singleton_lock.testing.contract import ask, new_key, new_token
        from example_project.private_server import PrivateServer
        from tests.contract.test_redis import call_for, locker_on

        with PrivateServer() as server:
            store = RedisStore(server.url())
            locker = locker_on(store)
            calls = [call_for(new_key()) for _ in range(10)]
            first = [gevent.spawn(locker.acquire, call) for call in calls]
            gevent.joinall(first, raise_error=True)
            with redis.Redis.from_url(server.url()) as client:
                assert len(client.client_list()) > 5
                client.client_kill_filter(_type="normal", skipme=True)
            assert isinstance(locker.acquire(call_for(new_key())), Lease)
            print("granted")
    """
    pytest.importorskip("gevent")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "granted\n", done.stderr


def test_close_ends_all_connections_and_the_next_call_opens_one(
    server: PrivateServer, raw: redis.Redis
) -> None:
    key, clock = new_key(), SystemClock()
    store = RedisStore(f"{server.url()}?client_name=closing")

    def connections() -> int:
        return sum(client["name"] == "closing" for client in raw.client_list())

    fence(store, key)
    assert connections() == 1
    store.close()
    deadline = clock.now() + TIMEOUT
    while connections() and clock.now() < deadline:
        pass  # the server notices a moment later
    assert connections() == 0
    assert fence(store, key)
    store.close()


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_a_native_thread_leaves_no_socket_to_the_next_one_where_threads_are_patched(
    server: PrivateServer, library: str
) -> None:
    """The next thread has the number of the one that ended, and a hub of its own."""
    # In a process of its own: they can't be undone.
    script = textwrap.dedent(f"""
        import {library}
        if "{library}" == "gevent":
            import gevent.monkey; gevent.monkey.patch_all()
        else:
            eventlet.monkey_patch()
        import os, sys
        from {library} import sleep
        from celery_singleton_lock.core import native_threads
        from celery_singleton_lock.stores.redis.store import RedisStore

        store = RedisStore("{server.url()}")
        said = []

        def ask():
            try:
                # The reply takes long enough for the thread to wait for it.
                said.append(store.runner.connections.run([("BLPOP", "nothing", "0.02")], 5.0)[0])
            except BaseException as exc:
                said.append(exc)

        for number in range(6):
            native_threads.start_new_thread(ask, "asks")
            while len(said) <= number:
                sleep(0.01)
            if number == 2:
                sleep(0.2)
                files = len(os.listdir("/proc/self/fd"))
        sleep(0.2)
        print(said, len(os.listdir("/proc/self/fd")) - files)
    """)
    pytest.importorskip(library)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == f"{[None] * 6} 0", done.stdout + done.stderr
