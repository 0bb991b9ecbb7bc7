"""What is special about etcd and ZooKeeper: dying members, silent holders, leftovers."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from kazoo.protocol.connection import ConnectionDropped

from celery_singleton_lock.core import observers
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.events import Events
from celery_singleton_lock.core.heartbeat import Heartbeat
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Holder, Kind, Lease, LossReason, Phase
from celery_singleton_lock.core.locker import Locker
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.core.store_requests import (
    RENEWED,
    Acquire,
    ClaimChange,
    CompletionState,
    Granted,
    Mark,
    Refused,
    Release,
    ReleaseReply,
)
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.stores.etcd.store import EtcdStore
from celery_singleton_lock.stores.zookeeper.store import ZooKeeperStore
from celery_singleton_lock.testing.contract import TIMEOUT, ask, lease_of, new_key, new_token
from celery_singleton_lock.testing.contract.steps import LONG
from celery_singleton_lock.testing.manual_clock import ManualClock
from example_project.private_server import free_port
from tests.harness.deliveries import wait_until
from tests.harness.etcd import EtcdCluster
from tests.harness.processes import Process
from tests.harness.zookeeper import ZooKeeperEnsemble

pytestmark = pytest.mark.slow

Cluster = EtcdCluster | ZooKeeperEnsemble

# Seconds: a server's own granularity, on a machine with other things to do.
GRANULARITY = 3.0

HOLDER = """
import sys, time
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.testing.contract import ask
from celery_singleton_lock.core.lease import Token
store = open_store(sys.argv[1])
print(ask(store, sys.argv[2], Token.parse(sys.argv[3]), ttl=float(sys.argv[4])), flush=True)
time.sleep(600)
"""


@contextmanager
def serving(consensus: Cluster) -> Iterator[Store]:
    """A store whose member writes.

    The test before may have stopped a member: for a moment that one reads for its clients still, or
    again, and then hangs up on them, for it has no part in the majority.
    """

    key, token = new_key(), new_token()

    def writes() -> bool:
        try:
            ask(store, key, token)
            return give(store, key, token) is ReleaseReply.OURS
        except StoreUnavailable:
            return False

    with closing(open_store(consensus.url("special"))) as opened:
        store: Store = opened
        wait_until(writes, "a member writes", timeout=30)
        yield store


@pytest.fixture
def store(consensus: Cluster) -> Iterator[Any]:
    with serving(consensus) as store:
        yield store


@pytest.fixture
def other(consensus: Cluster) -> Iterator[Any]:
    """Another process's, for all that the cluster knows."""
    with serving(consensus) as store:
        yield store


@pytest.fixture
def locker(store: Store) -> Iterator[Locker]:
    clock, events = SystemClock(), Events()
    heartbeat = Heartbeat(store, clock, events)
    yield Locker(store, clock, heartbeat, events)
    for lease in list(heartbeat._leases):
        heartbeat.stop(lease)
    heartbeat.close()


def acquire(locker: Locker, key: str, ttl: float, **options: Any) -> Lease:
    token = new_token()
    request = Acquire(slots=(key,), token=token, holder=lease_of(key, token).holder, ttl=ttl)
    lease = locker.acquire(request, **options)
    assert isinstance(lease, Lease), lease
    return lease


def give(store: Store, key: str, token: Any, **options: Any) -> ReleaseReply:
    return store.leases.release(Release(keys=(key,), token=token, **options), timeout=TIMEOUT)


def seconds_until(condition: Callable[[], Any], timeout: float) -> float:
    started = time.monotonic()
    wait_until(condition, "the condition holds", timeout=timeout)
    return time.monotonic() - started


# --- a holder that dies or falls silent ----------------------------------------------------------


def test_a_killed_holders_lease_ends_by_itself(consensus: Cluster, other: Store) -> None:
    key, token = new_key(), new_token()
    command = [sys.executable, "-c", HOLDER, consensus.url("special"), key, str(token), "3"]
    holder = Process(command, name="holder").start()
    try:
        holder.wait_for_log("Granted")
        assert isinstance(ask(other, key, new_token()), Refused)
    finally:
        holder.kill()
    took = seconds_until(lambda: other.leases.inspect(key) is None, 3 + GRANULARITY)
    print(f"free {took:.2f} s after the death")


def test_a_dead_holders_lease_is_released_by_its_token_from_elsewhere(
    consensus: Cluster, other: Store
) -> None:
    key, token = new_key(), new_token()
    command = [sys.executable, "-c", HOLDER, consensus.url("special"), key, str(token), "60"]
    holder = Process(command, name="holder").start()
    try:
        holder.wait_for_log("Granted")
    finally:
        holder.kill()
    assert give(other, key, new_token()) is ReleaseReply.NOT_OURS
    assert give(other, key, token) is ReleaseReply.OURS
    assert isinstance(ask(other, key, new_token()), Granted)


def test_a_dead_holders_lease_may_be_turned_into_a_dying_key(
    consensus: Cluster, store: Store, other: Store
) -> None:
    key, token = new_key(), new_token()
    ask(store, key, token, ttl=60)
    assert give(other, key, token, become=Kind.DYING, become_ttl=1.0) is ReleaseReply.OURS
    assert store.leases.renew([lease_of(key, token, 60)], timeout=TIMEOUT) == [LossReason.DYING]
    seconds_until(lambda: other.leases.inspect(key) is None, 1 + GRANULARITY)


def test_a_stopped_holder_is_notified_before_another_starts_with_a_higher_fence(
    consensus: Cluster, other: Store
) -> None:
    program = """
import sys, time
from tests.contract.test_consensus import *
store = open_store(sys.argv[1])
clock, events = SystemClock(), Events()
locker = Locker(store, clock, Heartbeat(store, clock, events), events)
lease = acquire(locker, sys.argv[2], 3.0)
print("fence", lease.fence, flush=True)
while not lease.lost:
    time.sleep(0.01)
print("lost", flush=True)
time.sleep(600)
"""
    key = new_key()
    command = [sys.executable, "-c", program, consensus.url("special"), key]
    holder = Process(command, name="holder").start()
    try:
        fence = int(holder.wait_for_log(r"fence (\d+)")[1])
        holder.stop()
        reply = None

        def granted() -> bool:
            nonlocal reply
            reply = ask(other, key, new_token(), ttl=60)
            return isinstance(reply, Granted)

        seconds_until(granted, 3 + GRANULARITY)
        assert isinstance(reply, Granted)
        assert reply.fence is not None
        assert reply.fence > fence
        assert "lost" not in holder.log
        holder.cont()
        holder.wait_for_log("lost")
    finally:
        holder.send_signal(signal.SIGCONT)
        holder.kill()


# --- what is renewed no more while its process lives ---------------------------------------------


def test_a_lease_beyond_its_max_hold_ends_though_its_neighbours_are_renewed(
    locker: Locker, other: Store
) -> None:
    kept, bounded = new_key(), new_key()
    lease = acquire(locker, kept, 2.0)
    acquire(locker, bounded, 2.0, max_hold=1.0)
    seconds_until(lambda: other.leases.inspect(bounded) is None, 3 + GRANULARITY)
    assert not lease.lost
    assert other.leases.inspect(kept) is not None


def test_a_lease_that_is_not_renewed_ends_though_the_process_has_no_other(
    store: Store, other: Store
) -> None:
    key = new_key()
    ask(store, key, new_token(), ttl=2.0)
    seconds_until(lambda: other.leases.inspect(key) is None, 2 + GRANULARITY)


def test_a_claim_ends_though_its_process_still_renews_the_lease_that_it_lost(
    store: Store, other: Store
) -> None:
    key, token = new_key(), new_token()
    claim = Keyspace.claim("app.task", key)
    change = ClaimChange(key=claim, phase=Phase.RUNNING)
    kept, lost = (lease_of(new_key(), new_token(), 2.0), lease_of(key, token, 2.0, claim))
    ask(store, kept.key, kept.token, ttl=2.0)
    ask(store, key, token, ttl=2.0, claim=change)
    assert other.operators.free(key, str(token))

    def has_ended() -> bool:
        replies = store.leases.renew([kept, lost], timeout=TIMEOUT)
        assert replies == [RENEWED, LossReason.GONE]
        return other.leases.inspect(claim) is None

    assert other.leases.inspect(claim) is not None
    seconds_until(has_ended, 2 + GRANULARITY)


def test_a_lease_outlives_its_ttl_by_its_heartbeat_alone(locker: Locker, other: Store) -> None:
    lease = acquire(locker, new_key(), 2.0)
    fence = lease.fence
    time.sleep(5)  # the subject of the test: time
    record = other.leases.inspect(lease.key)
    assert record is not None
    assert (record.token, record.fence) == (str(lease.token), fence)
    assert not lease.lost


# --- members that die ----------------------------------------------------------------------------


def test_a_held_lease_survives_the_loss_of_the_leader(
    consensus: Cluster, locker: Locker, other: Store
) -> None:
    leases = [acquire(locker, new_key(), 8.0) for _ in range(3)]
    leader = consensus.leader()
    consensus.kill(leader)
    try:
        granted = 0
        deadline = time.monotonic() + 12
        while time.monotonic() < deadline:
            for lease in leases:
                assert not lease.lost, lease.loss
                try:
                    granted += isinstance(ask(other, lease.key, new_token(), ttl=8), Granted)
                except StoreUnavailable:
                    pass  # an election
            time.sleep(0.1)
        assert granted == 0
        request = Release(keys=(leases[0].key,), token=leases[0].token)
        assert locker.release(leases[0], request) is ReleaseReply.OURS
        reply = ask(other, leases[0].key, new_token(), ttl=8)
        assert isinstance(reply, Granted)
        assert reply.fence is not None
        assert reply.fence > leases[0].fence
    finally:
        consensus.revive(leader)


def test_a_member_that_is_away_is_passed_over(consensus: Cluster) -> None:
    first, _, rest = consensus.url("special").partition("://")
    with closing(open_store(f"{first}://127.0.0.1:{free_port()},{rest}")) as store:
        for _ in range(6):
            assert isinstance(ask(store, new_key(), new_token()), Granted)


def test_a_member_that_says_nothing_is_passed_over_however_long_the_ttl(
    consensus: Cluster,
) -> None:
    leader = consensus.leader()
    silent, other = [number for number in range(3) if number != leader]
    consensus.pause(silent)
    try:
        # ZooKeeper's client goes to them in any order: of so many, some meet the silent one first.
        for _ in range(8):
            with closing(open_store(consensus.url("special", members=(silent, other)))) as store:

                def granted(store: Store = store) -> bool:
                    key, token = new_key(), new_token()
                    request = Acquire(
                        slots=(key,), token=token, holder=lease_of(key, token).holder, ttl=60.0
                    )
                    try:
                        return isinstance(store.leases.acquire(request, timeout=5), Granted)
                    except StoreUnavailable:
                        return False

                # Waiting for a share of the session takes 30 s.
                assert seconds_until(granted, timeout=20) < 20
    finally:
        consensus.resume(silent)


def test_without_members_nothing_is_granted_and_the_time_is_kept(consensus: Cluster) -> None:
    scheme, key, token = consensus.url().partition("://")[0], new_key(), new_token()
    request = Acquire(slots=(key,), token=token, holder=lease_of(key, token).holder, ttl=6)
    url = f"{scheme}://127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    with closing(open_store(url)) as store:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            store.leases.acquire(request, timeout=0.5)
        assert time.monotonic() - started < 5


# --- fences --------------------------------------------------------------------------------------


def test_fences_are_above_the_base_and_rise_over_keys(consensus: Cluster) -> None:
    base = 2**51
    with closing(open_store(consensus.url("based"), fence_base=base)) as store:
        replies = [ask(store, new_key(), new_token()) for _ in range(10)]
    fences = [reply.fence for reply in replies if isinstance(reply, Granted) and reply.fence]
    assert len(fences) == 10
    assert base < fences[0]
    assert fences == sorted(set(fences))


# --- leftovers -----------------------------------------------------------------------------------


def test_many_bodies_need_few_etcd_leases(etcd: EtcdCluster) -> None:
    # By this clock all 200 come at once, however busy the machine is: what the store grants as time
    # goes by does not count. The leases outlive the test by the server's clock.
    leases = set[str]()
    with closing(EtcdStore(etcd.url("few"), clock=ManualClock())) as store:
        for _ in range(200):
            key, token = new_key(), new_token()
            ask(store, key, token, ttl=LONG)
            leases |= etcd.leases_under("few")
            give(store, key, token, completion=CompletionState.DONE, completion_ttl=3600)
    leases |= etcd.leases_under("few")
    assert len(leases) == 2, "one for the leases, one for the markers"


def test_a_log_handler_that_blocks_delays_no_renewal_in_etcd(etcd: EtcdCluster) -> None:
    entered, gate, main = threading.Event(), threading.Event(), threading.current_thread()

    class Blocking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if threading.current_thread() is not main:
                entered.set()
                gate.wait()

    logger, handler, clock, events = (
        logging.getLogger("urllib3"),
        Blocking(),
        SystemClock(),
        Events(),
    )
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with closing(EtcdStore(etcd.url("logs"))) as store:
            heartbeat = Heartbeat(store, clock, events)
            lease = acquire(Locker(store, clock, heartbeat, events), new_key(), 3)
            assert entered.wait(30), "the first renewal is logged"
            blocked_at = lease.valid_until
            wait_until(lambda: lease.valid_until > blocked_at + 3, "further ones follow")
            heartbeat.stop(lease)
            heartbeat.close()
    finally:
        gate.set()
        observers.flush(30)
        logger.setLevel(level)
        logger.removeHandler(handler)


def test_a_resolver_that_blocks_delays_no_renewal_by_the_other_members_of_etcd(
    etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked on the heartbeat's thread when a connection has ended."""
    entered, gate, clock, events = threading.Event(), threading.Event(), SystemClock(), Events()
    resolve = socket.getaddrinfo

    def blocks(host: Any, *rest: Any, **options: Any) -> Any:
        if host == "localhost" and threading.current_thread() is not threading.main_thread():
            entered.set()
            gate.wait()
        return resolve(host, *rest, **options)

    url = etcd.url("names").replace("127.0.0.1", "localhost", 1)
    try:
        with closing(EtcdStore(url)) as store:
            heartbeat = Heartbeat(store, clock, events)
            lease = acquire(Locker(store, clock, heartbeat, events), new_key(), 6)
            monkeypatch.setattr(socket, "getaddrinfo", blocks)
            store._gateway.close()
            assert entered.wait(30), "the heartbeat connects again"
            blocked_at = lease.valid_until
            wait_until(lambda: lease.valid_until > blocked_at + 6, "further renewals follow")
            heartbeat.stop(lease)
            heartbeat.close()
    finally:
        gate.set()


def test_round_trips_to_etcd(etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(EtcdStore(etcd.url("trips"))) as store:
        key, token = new_key(), new_token()
        ask(store, new_key(), new_token())  # the etcd lease is there
        calls: list[str] = []
        request = store._gateway.request

        def counted(path: str, *args: Any, **kwargs: Any) -> Any:
            calls.append(path)
            return request(path, *args, **kwargs)

        monkeypatch.setattr(store._gateway, "request", counted)
        ask(store, key, token)
        assert calls == ["kv/txn"]
        ask(store, key, new_token())  # refused
        assert calls == ["kv/txn"] * 2
        leases = [lease_of(key, token)]
        for _ in range(99):
            leases.append(lease_of(new_key(), new_token()))
            ask(store, leases[-1].key, leases[-1].token)
        calls.clear()
        assert store.leases.renew(leases, timeout=TIMEOUT) == [RENEWED] * 100
        assert calls == ["lease/keepalive", "kv/txn", "kv/txn"]
        calls.clear()
        assert give(store, key, token) is ReleaseReply.OURS
        assert calls == ["kv/txn"]


def test_of_two_acquires_without_an_answer_neither_is_kept_for_ever_in_etcd(
    etcd: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(EtcdStore(etcd.url("unknown"))) as store:
        key, neighbour, neighbours = new_key(), new_key(), new_token()
        ask(store, neighbour, neighbours, ttl=3.0)
        request, carried_out = store._gateway.request, [True, False]

        def unanswered(path: str, *args: Any, **kwargs: Any) -> Any:
            if path != "kv/txn" or carried_out.pop(0):
                reply = request(path, *args, **kwargs)
            if path == "kv/txn":
                raise StoreUnavailable("the reply was lost")
            return reply

        with monkeypatch.context() as patched:
            patched.setattr(store._gateway, "request", unanswered)
            for _ in range(2):
                with pytest.raises(StoreUnavailable):
                    ask(store, key, new_token(), ttl=3.0)
        assert store.leases.inspect(key) is not None
        ends_beside(store, key, lease_of(neighbour, neighbours, 3.0))


def test_what_is_not_renewed_ends_in_etcd_though_new_keys_are_bound_elsewhere(
    etcd: EtcdCluster,
) -> None:
    with closing(EtcdStore(etcd.url("elsewhere"))) as store:
        key, neighbour, neighbours = new_key(), new_key(), new_token()
        ask(store, neighbour, neighbours, ttl=3.0)
        ask(store, key, new_token(), ttl=3.0)
        ask(store, new_key(), new_token(), ttl=30.0)
        gone = {"ID": store._leases._renewed[30].id}
        deadline = SystemClock().now() + TIMEOUT
        store._gateway.request("lease/revoke", gone, deadline, repeatable=True)
        assert isinstance(ask(store, new_key(), new_token(), ttl=30.0), Granted)
        ends_beside(store, key, lease_of(neighbour, neighbours, 3.0))


def ends_beside(store: Store, key: str, neighbour: Lease) -> None:
    """``key`` ends, though a neighbour that shares its etcd lease is renewed."""

    def ended() -> bool:
        assert store.leases.renew([neighbour], timeout=TIMEOUT) == [RENEWED]
        return store.leases.inspect(key) is None

    wait_until(ended, "it ends", timeout=3 + GRANULARITY)


def test_an_acquire_without_an_answer_leaves_zookeepers_janitor_the_lease_that_stands(
    zookeeper: ZooKeeperEnsemble,
) -> None:
    with closing(ZooKeeperStore(zookeeper.url("unknown"))) as store:
        key = new_key()
        ask(store, key, new_token(), ttl=3.0)
        request = Acquire(slots=(key,), token=new_token(), holder=Holder(), ttl=3.0)
        with pytest.raises(StoreUnavailable):
            store.leases.acquire(request, timeout=0)
        wait_until(lambda: not store._own.all, "the janitor has done", timeout=10)
        assert store.leases.inspect(key) is None


def test_what_a_session_sends_late_to_zookeeper_is_not_kept_for_ever() -> None:
    # Sessions last 8 s, so a ttl of 2 s is over before the session is.
    with (
        ZooKeeperEnsemble(1, tick=4.0) as ensemble,
        closing(ZooKeeperStore(ensemble.url("late"))) as store,
    ):
        key, token = new_key(), new_token()
        ask(store, key, token, ttl=2.0)
        give(store, key, token)
        deadline = SystemClock().now() + 30
        common = store._ensemble.session(deadline)
        for path in store.buckets:  # else the write would fail for want of one
            common.client.ensure_path(path)
        with store._ensemble.using(2.0, deadline) as session:
            pass
        connection, away = session.client._connection, [True]
        connect = connection._connect

        def connect_later(*args: Any) -> Any:
            if away:
                raise ConnectionDropped("not yet")
            return connect(*args)

        connection._connect = connect_later
        session._hang_up()
        wait_until(lambda: not session.client.connected, "it has lost its connection")
        request = Acquire(slots=(key,), token=new_token(), holder=Holder(), ttl=2.0)
        with pytest.raises(StoreUnavailable):
            store.leases.acquire(request, timeout=0.1)
        time.sleep(3)  # longer than its ttl
        away.clear()
        wait_until(lambda: session.client.connected, "it is connected again")
        wait_until(lambda: not store._own.all, "the janitor has done", timeout=10)
        behind = session.client.set_async(store._ensemble.clock_node, b"")
        session.collect([behind], SystemClock().now() + 5)
        assert store.leases.inspect(key) is None


def test_what_has_ended_in_zookeeper_is_swept(zookeeper: ZooKeeperEnsemble) -> None:
    with closing(ZooKeeperStore(zookeeper.url("sweep"))) as store:
        key = new_key()
        for _ in range(50):
            request = Mark(key=key, token=new_token(), state=CompletionState.DONE, ttl=0.2)
            store.leases.mark(request, timeout=TIMEOUT)
        time.sleep(0.5)  # their ttl
        deadline = SystemClock().now() + 10
        session = store._ensemble.session(deadline)

        def nodes() -> int:
            lists = [session.client.get_children_async(path) for path in store.buckets]
            return sum(len(names or ()) for names in session.collect(lists, deadline))

        assert nodes() == 50
        for bucket in store.buckets:
            store._sweep(bucket)
        assert nodes() == 0


def test_an_ensemble_with_short_sessions_gives_shorter_leases() -> None:
    with (
        ZooKeeperEnsemble(1, max_session=6.0) as ensemble,
        closing(ZooKeeperStore(ensemble.url("short"))) as store,
    ):
        clock, events = SystemClock(), Events()
        heartbeat = Heartbeat(store, clock, events)
        lease = acquire(Locker(store, clock, heartbeat, events), new_key(), 60.0)
        assert lease.ttl == pytest.approx(6.0)
        assert lease.remaining() <= 3.0
        time.sleep(9)  # longer than that session
        assert not lease.lost
        heartbeat.stop(lease)
        heartbeat.close()


def test_ttls_of_single_calls_do_not_add_up_to_sessions(zookeeper: ZooKeeperEnsemble) -> None:
    with closing(ZooKeeperStore(zookeeper.url("many"))) as store:
        for number in range(20):
            key, token = new_key(), new_token()
            ask(store, key, token, ttl=30 + number)
            give(store, key, token)
        assert len(store._ensemble._sessions) <= 9


def test_a_session_in_which_a_lease_is_acquired_is_no_spare_one(
    zookeeper: ZooKeeperEnsemble,
) -> None:
    """Another thread acquires a lease while this one looks for a session to end."""
    key, token = new_key(), new_token()
    with closing(ZooKeeperStore(zookeeper.url("spare"))) as store:
        for number in range(7):  # and the common session
            once = new_token()
            ask(store, f"{key}-{number}", once, ttl=30 + number)
            give(store, f"{key}-{number}", once)
        ensemble = store._ensemble
        is_used, acquired = ensemble._is_used, threading.Event()

        def acquire() -> None:
            assert isinstance(ask(store, key, token, ttl=30), Granted)
            acquired.set()

        other = threading.Thread(target=acquire)

        def looks(session: Any) -> bool:
            used = is_used(session)
            if not other.ident:
                other.start()
                acquired.wait(0.5)  # it may wait until the session has ended
            return used

        ensemble._is_used = looks
        ask(store, f"{key}-more", new_token(), ttl=60)
        other.join()
        assert acquired.is_set()
        assert store.leases.renew([lease_of(key, token, ttl=30)], timeout=TIMEOUT) == [RENEWED]


def test_a_fork_has_sessions_of_its_own(zookeeper: ZooKeeperEnsemble) -> None:
    with closing(ZooKeeperStore(zookeeper.url("fork"))) as store:
        ask(store, new_key(), new_token())
        child = os.fork()
        if child == 0:
            ok = isinstance(ask(store, new_key(), new_token()), Granted)
            os._exit(0 if ok and len(store._own.all) == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
