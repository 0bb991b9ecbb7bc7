"""Idle connections: how long they are kept, and what happens when one was dropped on its way.

The proxy drops them as a NAT does, without notifying either end.
"""

from __future__ import annotations

import socket
import socketserver
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import psutil
import pytest
import redis

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.native_threads import socket_owner
from celery_singleton_lock.core.store_requests import (
    ClaimChange,
    ClaimRequest,
    CompletionState,
    Mark,
    Release,
    ReleaseReply,
)
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.etcd.gateway import Gateway
from celery_singleton_lock.stores.idle_connections import MAX_IDLE, IdleSweep
from celery_singleton_lock.stores.redis.connection import Connections
from celery_singleton_lock.stores.redis.scripts import pack
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.stores.redis.wait_queue import RedisTicket, RedisWaitQueue
from celery_singleton_lock.stores.store_url import StoreUrl
from celery_singleton_lock.testing.contract import TIMEOUT, ask, new_key, new_token
from celery_singleton_lock.testing.contract.steps import LONG, PUBLISHER, new_claim
from example_project.private_server import PrivateServer
from tests.chaos.proxy import Kind, Mode, Proxy
from tests.harness.deliveries import wait_until, wait_until_collected
from tests.harness.etcd import EtcdCluster

# Seconds that a test waits for a reply which can't come.
# What a ticket tells the other tickets of its store.
NO_QUEUE: Any = RedisWaitQueue(Any, Any)  # type: ignore[arg-type]
SHORT = 1.0


class AheadClock(SystemClock):
    """The system's clock, advanced by some time."""

    __slots__ = ("ahead",)

    def __init__(self) -> None:
        self.ahead = 0.0

    def now(self) -> float:  # type: ignore[override]
        return SystemClock.now() + self.ahead


class PausedClock(AheadClock):
    """Its sleepers wake when a test lets time pass."""

    __slots__ = ("_changed", "_sleepers")

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._sleepers = 0

    def let_pass(self, seconds: float) -> None:
        """Once a thread sleeps: its sleep must not begin afterwards."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._sleepers, timeout=60)
            self.ahead += seconds
            self._changed.notify_all()

    def sleep(self, seconds: float) -> None:
        with self._changed:
            until = self.now() + seconds
            self._sleepers += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.now() >= until, timeout=60)
            self._sleepers -= 1


@pytest.fixture
def clock() -> AheadClock:
    return AheadClock()


@pytest.fixture
def nat(server: PrivateServer) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def connections(nat: Proxy, clock: AheadClock) -> Iterator[Connections]:
    with closing(Connections(f"redis://127.0.0.1:{nat.port}", clock=clock)) as connections:
        yield connections


@pytest.fixture
def store(connections: Connections) -> RedisStore:
    return RedisStore("redis://unused", connect=lambda url, options: connections)


def plain(key: str, token: Any) -> Release:
    return Release(keys=(key,), token=token)


def test_a_connection_that_was_idle_for_long_is_not_used(
    store: RedisStore, nat: Proxy, clock: AheadClock
) -> None:
    ask(store, key := new_key(), token := new_token())
    nat.forget_connections()
    clock.ahead += MAX_IDLE + 1
    assert store.leases.release(plain(key, token), timeout=TIMEOUT) is ReleaseReply.OURS


def test_nor_are_those_that_were_idle_for_longer(
    connections: Connections, nat: Proxy, clock: AheadClock
) -> None:
    def ping_on_two() -> None:
        both = [connections.take(TIMEOUT) for _ in range(2)]
        for connection in both:
            connection.send(pack(("PING",)), 1)
            assert connection.replies() == [b"PONG"]
        for connection in both:
            connection.end()

    ping_on_two()
    nat.forget_connections()
    clock.ahead += MAX_IDLE + 1
    ping_on_two()


def test_threads_whose_connections_break_at_once_close_the_others_together(
    connections: Connections,
) -> None:
    class Idle:
        pending = None

        def close_idle(self) -> None:
            pass

    idle: Any = connections._idle[socket_owner(), TIMEOUT]
    errors: list[Exception] = []

    def drop_often() -> None:
        end = time.monotonic() + 1
        while time.monotonic() < end and not errors:
            idle.extend([Idle(), Idle(), Idle()])
            try:
                connections.drop()
            except Exception as exc:
                errors.append(exc)

    threads = [threading.Thread(target=drop_often) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        idle.clear()
    assert not errors


def test_a_release_is_not_asynchronous_over_a_connection_that_was_idle_for_long(
    store: RedisStore, clock: AheadClock
) -> None:
    ask(store, key := new_key(), token := new_token())
    assert store.leases.release(plain(key, token), timeout=TIMEOUT) is ReleaseReply.OURS
    clock.ahead += MAX_IDLE + 1
    assert not store.async_releases.send(
        plain(key, token), timeout=TIMEOUT, on_reply=lambda error: None
    )


def test_a_failure_says_whether_its_connection_had_been_idle(
    connections: Connections, nat: Proxy
) -> None:
    connections.run([("PING",)], SHORT)
    nat.set(Mode(kind=Kind.STALL))
    with pytest.raises(StoreUnavailable) as caught:
        connections.run([("PING",)], SHORT)
    assert caught.value.was_idle
    with pytest.raises(StoreUnavailable) as caught:
        connections.run([("PING",)], SHORT)
    assert not caught.value.was_idle, "the failure before has closed all that were idle"


@pytest.mark.slow
def test_what_may_be_done_twice_is_sent_again_on_a_new_connection(
    store: RedisStore, nat: Proxy, raw: redis.Redis
) -> None:
    (key, claim), token = new_claim(), new_token()
    call = ClaimRequest(key=claim, token=token, holder=PUBLISHER, ttl=LONG)
    assert store.claims.take(call, timeout=SHORT) is None
    for wants_ttl in (False, True):  # by one command, and by the script
        nat.forget_connections()
        call = replace(call, token=new_token(), wants_ttl=wants_ttl)
        existing = store.claims.take(call, timeout=SHORT)
        assert existing is not None
        assert existing.token == token.call_id
    nat.forget_connections()
    store.claims.change(token, ClaimChange(key=claim, phase=None), timeout=SHORT)
    assert not raw.exists(claim)
    nat.forget_connections()
    store.leases.mark(
        Mark(key=key, token=token, state=CompletionState.DONE, ttl=LONG), timeout=SHORT
    )
    assert raw.exists(Keyspace.completion(key, token.attempt))


def test_idle_connections_are_probed_by_the_kernel(connections: Connections) -> None:
    connection = connections.new(TIMEOUT)
    connection.connect()
    with closing(connection._sock) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        if hasattr(socket, "TCP_KEEPIDLE"):
            idle = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            assert idle < MAX_IDLE


def test_a_url_may_do_without_the_probes(server: PrivateServer) -> None:
    connections = Connections(f"{server.url()}?socket_keepalive=false")
    connection = connections.new(TIMEOUT)
    connection.connect()
    with closing(connection._sock) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0


def test_a_wait_queue_is_joined_over_a_connection_that_was_not_idle_for_long(
    connections: Connections, nat: Proxy, clock: AheadClock, raw: redis.Redis
) -> None:
    queue = Keyspace.wait_queue(new_key())
    for number in range(2):
        raw.rpush(f"{queue}!", f"nonce-{number}")
        ticket = RedisTicket(NO_QUEUE, queue, "waiter", lambda: connections, TIMEOUT, clock)
        assert ticket.wait(TIMEOUT) == f"nonce-{number}"
        nat.forget_connections()
        clock.ahead += MAX_IDLE + 1


def test_a_wait_queue_whose_server_does_not_even_end_the_wait_is_joined_again(
    connections: Connections, nat: Proxy, clock: AheadClock, raw: redis.Redis
) -> None:
    queue = Keyspace.wait_queue(new_key())
    ticket = RedisTicket(NO_QUEUE, queue, "waiter", lambda: connections, TIMEOUT, clock)
    assert ticket.wait(0) == ""
    nat.forget_connections()
    clock.ahead += 60 + TIMEOUT + 1
    assert ticket.wait(0) == "", "it hangs up"
    # Else the server may still give the nonce to the connection that has ended.
    wait_until(lambda: "blpop" not in [one["cmd"] for one in raw.client_list()], "the server knows")
    raw.rpush(f"{queue}!", "nonce")
    assert ticket.wait(TIMEOUT) == "nonce"


def test_a_connection_to_etcd_that_was_idle_for_long_is_not_used(
    etcd: EtcdCluster, clock: AheadClock
) -> None:
    with Proxy(etcd.ports[0]) as nat:
        url = StoreUrl.parse(f"etcd://127.0.0.1:{nat.port}", port=2379)
        with closing(Gateway(url, clock)) as gateway:
            for _ in range(2):
                body = {"key": "a2V5"}
                gateway.request("kv/range", body, clock.now() + TIMEOUT, repeatable=False)
                nat.forget_connections()
                clock.ahead += MAX_IDLE + 1


class HalfReplies(socketserver.BaseRequestHandler):
    """Replies to BLPOP in two parts, each when it may."""

    part = threading.Event()
    rest = threading.Event()

    def handle(self) -> None:
        while data := self.request.recv(65536):
            if b"BLPOP" in data:
                self.part.wait(TIMEOUT)
                self.request.sendall(b"*2\r\n$5\r\nqueue\r\n$5\r\nno")
                self.rest.wait(TIMEOUT)
                self.request.sendall(b"nce\r\n")
            else:
                self.request.sendall(b"+OK\r\n" * data.count(b"*"))


@pytest.fixture
def paused() -> PausedClock:
    return PausedClock()


def woken(connections: Connections, raw: redis.Redis, count: int) -> list[RedisTicket]:
    """Tickets of clients that have waited at the same time and were woken."""
    queue = Keyspace.wait_queue(new_key())
    tickets = [
        RedisTicket(NO_QUEUE, queue, "w", lambda: connections, TIMEOUT) for _ in range(count)
    ]
    for ticket in tickets:
        assert ticket.wait(0) == ""
    raw.rpush(f"{queue}!", *map(str, range(count)))
    for number, ticket in enumerate(tickets):
        assert ticket.wait(TIMEOUT) == str(number)
    return tickets


def test_the_connections_of_a_burst_are_closed_when_they_were_idle_for_long(
    server: PrivateServer, raw: redis.Redis, paused: PausedClock
) -> None:
    before = len(raw.client_list())
    with closing(Connections(server.url(), clock=paused)) as connections:
        woken(connections, raw, 40)
        queue = Keyspace.wait_queue(new_key())
        waiting = RedisTicket(NO_QUEUE, queue, "w", lambda: connections, TIMEOUT)
        assert waiting.wait(0) == ""
        assert len(raw.client_list()) == before + 40
        paused.let_pass(MAX_IDLE - 1)
        connections.run([("PING",)], TIMEOUT)  # over the connection that was used last
        paused.let_pass(2)
        wait_until(lambda: len(raw.client_list()) == before + 2, "the others are closed")
        raw.rpush(f"{queue}!", "still there")
        assert waiting.wait(TIMEOUT) == "still there"


def test_connections_that_are_opened_after_a_burst_are_closed_too(
    server: PrivateServer, raw: redis.Redis, paused: PausedClock
) -> None:
    before = len(raw.client_list())
    with closing(Connections(server.url(), clock=paused)) as connections:
        for _ in range(2):
            woken(connections, raw, 40)
            paused.let_pass(MAX_IDLE + 1)
            wait_until(lambda: len(raw.client_list()) == before, "all are closed")
            wait_until(lambda: not threads_of(connections._sweep), "no thread is left")


def test_a_process_with_few_connections_starts_no_thread_for_them(
    connections: Connections, raw: redis.Redis
) -> None:
    woken(connections, raw, 8)
    assert not threads_of(connections._sweep)


def test_no_thread_keeps_unused_connections_alive(
    server: PrivateServer, raw: redis.Redis, paused: PausedClock
) -> None:
    connections = Connections(server.url(), clock=paused)
    woken(connections, raw, 9)
    sweep = connections._sweep
    assert len(threads_of(sweep)) == 1
    found = weakref.ref(connections)
    del connections
    wait_until_collected(lambda: found() is None, "they are collected")
    paused.let_pass(MAX_IDLE + 1)
    wait_until(lambda: not threads_of(sweep), "the thread has ended")


def threads_of(sweep: IdleSweep) -> list[threading.Thread]:
    """Its threads only: those of the stores of other tests end up to a minute after them."""
    targets = ((thread, getattr(thread, "_target", None)) for thread in threading.enumerate())
    return [thread for thread, target in targets if getattr(target, "__self__", None) is sweep]


def test_the_connections_to_etcd_of_a_burst_are_closed_when_they_were_idle_for_long(
    etcd: EtcdCluster, paused: PausedClock
) -> None:
    here, port = psutil.Process(), etcd.ports[0]
    # Other tests share the members.
    others = {one.laddr for one in here.net_connections()}

    def established() -> int:
        found = [one for one in here.net_connections() if one.raddr and one.raddr.port == port]
        return len([one for one in found if one.laddr not in others])

    url = StoreUrl.parse(f"etcd://127.0.0.1:{port}", port=2379)
    with closing(Gateway(url, paused)) as gateway, ThreadPoolExecutor(20) as threads:

        def ask_etcd() -> None:
            deadline = paused.now() + 10
            gateway.request("kv/range", {"key": "a2V5"}, deadline, repeatable=False)

        # The member answers nothing until the requests have connections of their own.
        with etcd.paused([0]):
            asked = [threads.submit(ask_etcd) for _ in range(20)]
            wait_until(lambda: established() > 8, "many connections")
        for one in asked:
            one.result()
        assert established() > 8
        paused.let_pass(MAX_IDLE + 1)
        wait_until(lambda: established() == 0, "all are closed")


def test_a_part_of_a_reply_to_a_ticket_breaks_no_other_connection() -> None:
    HalfReplies.part.clear()
    HalfReplies.rest.clear()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), HalfReplies) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with closing(Connections(f"redis://127.0.0.1:{server.server_address[1]}")) as connections:
            ticket = RedisTicket(NO_QUEUE, "queue", "n", lambda: connections, TIMEOUT)
            assert ticket.wait(0.1) == ""
            connections.run([("PING",)], TIMEOUT)
            assert connections.has_idle(TIMEOUT)
            HalfReplies.part.set()
            assert ticket.wait(0.2) == ""
            assert connections.has_idle(TIMEOUT)
            HalfReplies.rest.set()
            assert ticket.wait(TIMEOUT) == "nonce"
            ticket.leave(counted=False)
        server.shutdown()
