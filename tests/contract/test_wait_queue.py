"""Waiting for a key: a release wakes the client that waited longest; no wake-up is relied on."""

from __future__ import annotations

import logging
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery import Celery

from celery_singleton_lock import LockConflict, hold
from celery_singleton_lock.core import waiter as module
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.store_requests import (
    RENEWED,
    Granted,
    Refused,
    Relation,
    ReleaseReply,
)
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.redis.scripts import pack
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.testing.contract import TIMEOUT, ask, lease_of, new_key, new_token
from celery_singleton_lock.testing.contract.steps import give, take
from example_project.private_server import PrivateServer
from tests.harness import keys
from tests.harness.keys import EVERY_NAME
from tests.integration.stage import PATIENCE, wait_until

SCOPE = "queue"
# What docs/reference/settings.md lists: without what wakes the waiting clients, and with it.
LOCKING = (f"~{EVERY_NAME}", "resetchannels", "-@all", *keys.LOCKING)
WAKING = ("+blpop", "+rpush", "+zadd", "+zcount", "+zrem")


class Desk:
    """A key, the clients that wait for it in threads of their own, and those that have had it."""

    def __init__(self, url: str, raws: list[redis.Redis]) -> None:
        self.app = Celery(f"queue-{uuid4().hex[:8]}", broker="memory://", set_as_current=False)
        self.app.conf.singleton_lock_url = url
        self.runtime = Runtime.of(self.app)
        self.name = uuid4().hex[:12]
        self.key = self.runtime.keyspace.lock(SCOPE, self.name)
        self.wait_queue = Keyspace.wait_queue(self.key)
        self.had: list[str] = []
        self._raws = raws
        self._threads = ThreadPoolExecutor(32)

    def hold(self, wait: float = 20 * PATIENCE) -> Any:
        return hold(self.name, scope=SCOPE, wait=wait, ttl=20 * PATIENCE, app=self.app)

    def queue(self, name: str = "") -> Future[None]:
        """One more that waits, blocked when this returns."""
        before = self.blocked()
        waiting = self._threads.submit(self.hold_once, name)
        wait_until(lambda: self.blocked() > before or waiting.done(), f"{name} is blocked")
        return waiting

    def hold_once(self, name: str) -> None:
        with self.hold():
            self.had.append(name)

    def blocked(self) -> int:
        return sum(raw.info("clients")["blocked_clients"] for raw in self._raws)

    def left(self) -> list[str]:
        """What is in the store of this key; no completion record, because no task runs."""
        found = [key for raw in self._raws for key in raw.scan_iter(EVERY_NAME)]
        return [key.decode() for key in found if self.name in key.decode()]

    def close(self) -> None:
        for raw in self._raws:  # a client that still waits, where a test has failed, polls then
            for client in raw.client_list() if self.blocked() else ():
                if client["cmd"] == "blpop":
                    raw.client_kill_filter(_id=client["id"])
        self._threads.shutdown()
        self.runtime.close()


@contextmanager
def desk_at(url: str, *ports: int) -> Iterator[Desk]:
    raws = [redis.Redis(port=port) for port in ports]
    desk = Desk(url, raws)
    try:
        yield desk
    finally:
        desk.close()
        for raw in raws:
            raw.close()


@pytest.fixture
def desk(server: PrivateServer) -> Iterator[Desk]:
    with desk_at(server.url(), server.port) as found:
        yield found


@pytest.fixture(params=["redis", "valkey", "sentinel", "cluster"])
def any_desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    if request.param == "sentinel":
        sentinels = request.getfixturevalue("sentinels")
        where = (sentinels.url, *(server.port for server in sentinels.servers))
    elif request.param == "cluster":
        cluster = request.getfixturevalue("cluster")
        where = (cluster.url, *(node.port for node in cluster.nodes))
    else:
        server = request.getfixturevalue("server" if request.param == "redis" else "valkey")
        where = (server.url(), server.port)
    with desk_at(*where) as found:
        yield found


@pytest.fixture
def only_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """No client polls within a test: one that gets the key was woken."""
    monkeypatch.setattr(module, "_LONGEST_POLL", 20 * PATIENCE)
    monkeypatch.setattr(module, "_COUNTED", 60 * PATIENCE)


# Wake-ups.


@pytest.mark.usefixtures("only_woken")
def test_a_release_wakes_a_waiter(any_desk: Desk) -> None:
    with any_desk.hold():
        waiting = any_desk.queue("first")
        assert any_desk.had == []
    waiting.result(PATIENCE)
    assert any_desk.had == ["first"]
    assert any_desk.left() == []


@pytest.mark.usefixtures("only_woken")
def test_the_client_that_has_waited_longest_is_woken_first(desk: Desk) -> None:
    names = [f"waiter-{number}" for number in range(8)]
    with desk.hold():
        waiting = [desk.queue(name) for name in names]
    for one in waiting:
        one.result(PATIENCE)
    assert desk.had == names
    assert desk.left() == []


def asked(raw: redis.Redis, *also: str) -> int:
    """How many scripts clients have run, and other commands that no script runs."""
    stats = raw.info("commandstats")
    names = ("eval", "evalsha", *also)
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in names)


@pytest.mark.usefixtures("only_woken")
def test_a_handoff_costs_four_commands_however_many_wait(desk: Desk, raw: redis.Redis) -> None:
    with desk.hold():
        pass  # the scripts are known
    with desk.hold():
        before = asked(raw, "blpop")
        waiting = [desk.queue(str(number)) for number in range(8)]
    for one in waiting:
        one.result(PATIENCE)
    # Each waiter: refused, blocked, granted, released; and the release of the one that they met.
    assert asked(raw, "blpop") - before == 4 * len(waiting) + 1


def test_a_client_that_comes_in_between_does_not_overtake(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    def in_time() -> bool:
        """Whether all this came before the half second was over; then what it saw is asserted."""
        (key, holder), first = take_new(redis_store), new_token()
        list_name = f"{Keyspace.wait_queue(key)}!"
        assert in_queue(redis_store, key, first)
        assert give(redis_store, key, holder) is ReleaseReply.OURS
        late = ask(redis_store, key, new_token())
        if not (raw.persist(key) and raw.persist(list_name)):
            return False
        assert isinstance(late, Refused)
        assert late.relation is Relation.OTHER
        [_, handoff] = raw.blpop([list_name], 1)
        for _ in range(2):  # twice, because a reply may be lost
            granted = ask(redis_store, key, first, wait_ttl=1.5, handoff=handoff.decode())
            assert isinstance(granted, Granted)
        assert give(redis_store, key, first) is ReleaseReply.OURS
        assert names_of(raw, key) == []
        return True

    wait_until(in_time, "this machine did it within half a second")


def take_new(store: RedisStore) -> tuple[str, Any]:
    key = new_key()
    return key, take(store, key)


def in_queue(store: RedisStore, key: str, token: Any, seconds: float = PATIENCE) -> bool:
    reply = ask(store, key, token, wait_ttl=seconds)
    return isinstance(reply, Refused) and reply.relation is Relation.OTHER


def names_of(raw: redis.Redis, key: str) -> list[bytes]:
    """The key, its wait queue and its list, as far as they are there."""
    queue = Keyspace.wait_queue(key)
    return [name for name in (key, queue, f"{queue}!") if raw.exists(name)]


def test_a_release_has_no_command_for_waiters_where_there_are_none(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    def commands(waiter: Any = None) -> set[str]:
        """What a release has the server do."""
        key, holder = take_new(redis_store)
        assert waiter is None or in_queue(redis_store, key, waiter)
        raw.config_resetstat()
        give(redis_store, key, holder)
        return {name.removeprefix("cmdstat_") for name in raw.info("commandstats")}

    commands()  # a server that hasn't seen the script yet is taught it
    # Redis 6.2 counts subcommands under their command.
    assert commands() - {"info", "config", "config|resetstat"} == {"evalsha", "get", "del"}
    assert {"zcount", "rpush"} <= commands(new_token())


def test_a_waiter_leaves_the_ttl_of_a_lease_alone(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    key, holder = take_new(redis_store)
    before = redis_store.leases.inspect(key)
    raw.pexpire(key, 500_000)
    assert in_queue(redis_store, key, new_token())
    assert 400_000 < raw.pttl(key) <= 500_000
    after = redis_store.leases.inspect(key)
    assert before is not None
    assert after is not None
    assert (after.token, after.fence, after.holder) == (before.token, before.fence, before.holder)
    lease = lease_of(key, holder)
    assert redis_store.leases.renew([lease], timeout=TIMEOUT) == [RENEWED]


@pytest.mark.parametrize("text", ["l 42", "l a|0.0|n 1 x", "q t-1 queued {}", "r t|0.0|n 1 {}"])
def test_a_waiter_does_not_touch_what_is_no_running_lease(
    redis_store: RedisStore, raw: redis.Redis, text: str
) -> None:
    key = new_key()
    raw.set(key, text, px=600_000)
    for _ in range(2):
        assert in_queue(redis_store, key, new_token())
    assert raw.get(key) == text.encode()


def test_a_key_without_a_waiter_is_free_at_once(redis_store: RedisStore, raw: redis.Redis) -> None:
    key, holder = take_new(redis_store)
    waiter = new_token()
    assert in_queue(redis_store, key, waiter)
    assert not isinstance(ask(redis_store, key, waiter, wait_ttl=0.0), Granted)  # it gives up
    assert give(redis_store, key, holder) is ReleaseReply.OURS
    assert names_of(raw, key) == []
    take(redis_store, key)


def test_a_key_is_reserved_for_the_woken_client_for_half_a_second_only(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    def in_time() -> bool:
        key, holder = take_new(redis_store)
        assert in_queue(redis_store, key, new_token())
        give(redis_store, key, holder)
        ttls = [raw.pttl(name) for name in (key, f"{Keyspace.wait_queue(key)}!")]
        refused = ask(redis_store, key, new_token())
        assert all(ttl <= 500 for ttl in ttls)
        assert -1 not in ttls
        if isinstance(refused, Granted):
            return False
        assert refused.record is not None
        assert 0 < refused.record.ttl <= 0.5
        return True

    assert any(in_time() for _ in range(20)), "it was free each time, or after half a second"


def test_a_waiter_is_counted_no_longer_than_it_said(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    key, holder = take_new(redis_store)
    assert in_queue(redis_store, key, new_token(), 0.001)
    wait_until(lambda: not raw.exists(Keyspace.wait_queue(key)), "the wait queue is gone")
    give(redis_store, key, holder)
    assert names_of(raw, key) == []


def test_a_dead_waiter_is_counted_no_longer_though_others_came_after(
    redis_store: RedisStore, raw: redis.Redis
) -> None:
    key, holder = take_new(redis_store)
    dead, living = new_token(), new_token()
    assert in_queue(redis_store, key, dead, 0.1)
    assert in_queue(redis_store, key, living)
    [(_, until)] = raw.zrange(Keyspace.wait_queue(key), 0, 0, withscores=True)

    def is_over() -> bool:
        seconds, micros = raw.time()
        return seconds * 1000 + micros / 1000 > until + 1

    wait_until(is_over, "the dead one's time is over")
    ask(redis_store, key, living, wait_ttl=0.0)
    give(redis_store, key, holder)
    assert not raw.exists(key)


@pytest.mark.usefixtures("only_woken")
def test_a_waiter_for_one_of_several_slots_is_woken_by_the_first_that_is_free(
    desk: Desk,
) -> None:
    store, slots = desk.runtime.store, Keyspace.slots(desk.key, 3)
    tokens = [take(store, slots) for _ in slots]
    first, second = new_token(), new_token()
    for token in (first, second):
        assert isinstance(ask(store, slots, token, wait_ttl=PATIENCE), Refused)
    tickets = [
        store.wait_queue.ticket(slots[0], token.nonce, timeout=TIMEOUT) for token in (first, second)
    ]
    for ticket in tickets:
        assert ticket.wait(0.01) == ""
    give(store, slots[2], tokens[2])
    handoff = tickets[0].wait(PATIENCE)
    assert handoff
    granted = ask(store, slots, first, wait_ttl=PATIENCE, handoff=handoff)
    assert granted == Granted(key=slots[2], fence=None)
    give(store, slots[0], tokens[0])
    handoff = tickets[1].wait(PATIENCE)
    assert handoff
    assert isinstance(ask(store, slots, second, wait_ttl=PATIENCE, handoff=handoff), Granted)
    for ticket in tickets:
        ticket.leave(counted=False)


# A lost wake-up costs one poll.


def test_a_lost_wake_up_costs_no_more_than_a_poll(desk: Desk, server: PrivateServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as thief:
        thief.settimeout(PATIENCE)
        with desk.hold():
            # Stands in for a host that stopped: it is first in the queue and gets the wake-up.
            before = desk.blocked()
            thief.sendall(pack(("BLPOP", f"{desk.wait_queue}!", 0)))
            wait_until(lambda: desk.blocked() > before, "the thief is first")
            waiting = desk.queue("second")
            desk.had.append("released")
        assert b"!" in thief.recv(1000)
    waiting.result(PATIENCE)
    assert desk.had == ["released", "second"]


@pytest.mark.usefixtures("only_woken")
def test_a_client_that_died_while_waiting_is_passed_over(desk: Desk, server: PrivateServer) -> None:
    with desk.hold():
        before = desk.blocked()
        with socket.create_connection(("127.0.0.1", server.port)) as dead:
            dead.sendall(pack(("BLPOP", f"{desk.wait_queue}!", 0)))
            wait_until(lambda: desk.blocked() > before, "it is first")
            waiting = desk.queue("second")
        wait_until(lambda: desk.blocked() == before + 1, "the server knows")
    waiting.result(PATIENCE)
    assert desk.had == ["second"]


def test_a_waiter_survives_the_loss_of_its_connection(desk: Desk, raw: redis.Redis) -> None:
    with desk.hold():
        waiting = desk.queue("first")
        for client in raw.client_list():
            if client["cmd"] == "blpop":
                raw.client_kill_filter(_id=client["id"])
        wait_until(lambda: desk.blocked() == 0, "it is cut")
        assert not waiting.done()
    waiting.result(PATIENCE)
    assert desk.left() == []


def test_a_waiter_that_lost_its_connection_joins_the_queue_again(
    desk: Desk, raw: redis.Redis
) -> None:
    stop = threading.Event()

    def again_and_again() -> None:
        while not stop.is_set():
            desk.hold_once("other")

    with desk.hold():
        waiting = desk.queue("first")
        for client in raw.client_list():
            if client["cmd"] == "blpop":
                raw.client_kill_filter(_id=client["id"])
        wait_until(lambda: desk.blocked() == 0, "it is cut")
        others = [desk._threads.submit(again_and_again) for _ in range(3)]
        wait_until(lambda: desk.blocked() >= 3, "the queue is never empty")
    try:
        waiting.result(PATIENCE)  # a client that only polled would never meet a free key
    finally:
        stop.set()
    for other in others:
        other.result(PATIENCE)


@pytest.mark.usefixtures("only_woken")
def test_the_end_of_a_dead_holders_ttl_is_noticed_without_a_wake_up(desk: Desk) -> None:
    take(desk.runtime.store, desk.key, ttl=0.3)
    desk.queue("after it").result(PATIENCE)
    assert desk.had == ["after it"]
    assert desk.left() == []


def test_a_key_without_an_expiry_is_polled_no_more_often(desk: Desk, raw: redis.Redis) -> None:
    """After a PERSIST: what is left of its ttl is no time to wait for."""

    def waits() -> None:
        with desk.hold(wait=1):
            pass

    with desk.hold(), ThreadPoolExecutor(1) as thread:
        raw.persist(desk.key)
        before = asked(raw)
        with pytest.raises(LockConflict):
            thread.submit(waits).result(PATIENCE)
        assert asked(raw) - before <= 5


# Leaving.


class Struck(Exception):
    """As Celery's SoftTimeLimitExceeded."""


class Late(TimeoutError):
    """As raised by users' own handlers: an OSError, like those of a connection that breaks."""


@pytest.fixture(params=[Struck])
def alarm(request: pytest.FixtureRequest) -> Iterator[Callable[[float], None]]:
    def strike(signum: int, frame: object) -> None:
        raise request.param

    previous = signal.signal(signal.SIGALRM, strike)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


@pytest.mark.usefixtures("only_woken", "alarm")
@pytest.mark.parametrize("error", [Struck, Late])
def test_a_waiter_that_is_interrupted_leaves_nothing_behind(
    desk: Desk, error: type[Exception]
) -> None:
    holder, has_struck = take(desk.runtime.store, desk.key), threading.Event()

    def strike(signum: int, frame: object) -> None:
        if not has_struck.is_set():
            has_struck.set()
            raise error

    def interrupt() -> None:
        wait_until(lambda: desk.blocked() == 1, "it waits")
        # Python delivers a signal that comes just before a system call after it.
        while not has_struck.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            has_struck.wait(0.1)

    signal.signal(signal.SIGALRM, strike)
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    # What has struck keeps the frames, so nothing is closed by being collected.
    with pytest.raises(error) as kept, desk.hold():
        pytest.fail("the key was not given back")
    assert kept.tb is not None
    interrupting.join()
    wait_until(lambda: desk.blocked() == 0, "the server has forgotten it")
    assert desk.left() == [desk.key]
    give(desk.runtime.store, desk.key, holder)
    assert desk.left() == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_waiters_struck_anywhere_never_share_the_key_and_leave_nothing_behind(
    desk: Desk, alarm: Callable[[float], None]
) -> None:
    inside: list[str] = []
    stop = threading.Event()

    def enter(name: str) -> None:
        inside.append(name)
        assert inside == [name]
        inside.remove(name)

    def others() -> None:
        while not stop.is_set():
            with desk.hold():
                enter("other")

    busy = [desk._threads.submit(others) for _ in range(2)]
    struck = entered = 0
    try:
        while struck < 200:
            try:
                alarm(random.uniform(1e-6, 0.02))
                with desk.hold():
                    alarm(0)
                    enter("struck")
                    entered += 1
            except Struck:
                struck += 1
            finally:
                alarm(0)
    finally:
        stop.set()
    for one in busy:
        one.result(PATIENCE)
    assert entered
    wait_until(lambda: desk.blocked() == 0, "the server has forgotten them")
    wait_until(lambda: desk.left() == [], "nothing is left")


def test_a_waiter_that_gives_up_leaves_nothing_behind(desk: Desk) -> None:
    holder = take(desk.runtime.store, desk.key)
    with pytest.raises(LockConflict) as kept, desk.hold(wait=0.1):
        pytest.fail("the key was not given back")
    assert kept.tb is not None
    wait_until(lambda: desk.blocked() == 0, "the server has forgotten it")
    assert desk.left() == [desk.key]
    give(desk.runtime.store, desk.key, holder)
    assert desk.left() == []


@pytest.mark.usefixtures("only_woken")
def test_connections_are_used_again(desk: Desk, raw: redis.Redis) -> None:
    ids: list[set[str]] = []
    for _ in range(5):
        with desk.hold():
            waiting = desk.queue()
        waiting.result(PATIENCE)
        ids.append({client["id"] for client in raw.client_list()})
    assert ids[-1] == ids[0]


# Rights.


@pytest.fixture
def login(server: PrivateServer, raw: redis.Redis) -> Iterator[Callable[..., str]]:
    """Make a user; the URL of its login."""
    made = []

    def make(*rights: str) -> str:
        made.append(f"user-{uuid4().hex[:8]}")
        raw.execute_command("ACL", "SETUSER", made[-1], "on", ">pw", *rights)
        return server.url().replace("redis://", f"redis://{made[-1]}:pw@")

    yield make
    for name in made:
        raw.acl_deluser(name)


@pytest.mark.usefixtures("only_woken")
def test_the_rights_that_the_docs_list_are_enough(
    login: Callable[..., str], server: PrivateServer
) -> None:
    with desk_at(login(*LOCKING, *WAKING), server.port) as desk:
        with desk.hold():
            waiting = desk.queue("first")
        waiting.result(PATIENCE)
        assert desk.left() == []


@pytest.mark.parametrize(
    "missing",
    [pytest.param(right, marks=() if right == "+blpop" else pytest.mark.slow) for right in WAKING],
)
def test_without_a_right_waiting_is_polling(
    login: Callable[..., str],
    server: PrivateServer,
    raw: redis.Redis,
    missing: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rights = [right for right in WAKING if right != missing]
    with (
        caplog.at_level(logging.INFO, "celery_singleton_lock"),
        desk_at(login(*LOCKING, *rights), server.port) as desk,
    ):
        for _ in range(2):
            with desk.hold():
                before = asked(raw)
                waiting = [desk._threads.submit(desk.hold_once, "one") for _ in range(2)]
                wait_until(lambda: asked(raw) >= before + 2, "both were refused")  # noqa: B023
            for one in waiting:
                one.result(PATIENCE)
        assert desk.had == ["one"] * 4
        wait_until(lambda: desk.left() == [], "what was counted has expired")
    said = [line for line in caplog.messages if "ask every half second" in line]
    assert len(said) == (missing == "+blpop")
