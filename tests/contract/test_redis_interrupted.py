"""An exception thrown between sending a command and reading its reply, a thousand times.

That is what Celery's soft time limit and SIGTERM do. A client that keeps such a connection reads
the earlier command's reply as the answer to the next: a grant that no server gave.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import FrameType

import pytest
import redis

from celery_singleton_lock.core.lease import Lease, LossReason
from celery_singleton_lock.core.store_requests import RENEWED, Granted, Refused, Relation, Release
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.stores.redis.connection import Connections
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.testing.contract import TIMEOUT, ask, lease_of, new_key, new_token
from example_project.private_server import PrivateServer

from .test_redis import call_for, locker_on

# Python drops what is raised in a __del__ or a callback of the garbage collector: no fault then.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

FAULTS = 1000
# A bound on the tries: a fault hits about every second one.
TRIES = 40_000


class SoftLimit(Exception):
    """As Celery's SoftTimeLimitExceeded: ``except Exception`` catches it."""


class Terminated(BaseException):
    """As SystemExit, which Celery's SIGTERM handler raises."""


class _Gun:
    """Whether a fault may strike.

    Beside the heartbeat's thread, Python may call a handler late: behind the block that it was
    meant for, or in the midst of the next one.
    """

    loaded = False


@pytest.fixture(params=[SoftLimit, Terminated])
def fault(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    def strike(signum: int, frame: FrameType | None) -> None:
        if _Gun.loaded:
            _Gun.loaded = False
            raise request.param

    previous = signal.signal(signal.SIGALRM, strike)
    yield request.param
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


@contextmanager
def struck_at_random(longest: float) -> Iterator[None]:
    """One fault at most, within ``longest`` seconds, somewhere inside the block."""
    try:
        _Gun.loaded = True
        # Above 0, which would switch the timer off.
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, longest))
        yield
    finally:
        _Gun.loaded = False
        signal.setitimer(signal.ITIMER_REAL, 0)


def thousand_times(fault: type[BaseException], once: Callable[[bool], None]) -> None:
    """Call ``once(fresh)`` under fire until it was hit often enough."""
    hits = 0
    for number in range(TRIES):
        try:
            once(number % 10 == 0)
        except fault:
            hits += 1
        if hits == FAULTS:
            return
    pytest.fail(f"{hits} hits only")


@pytest.fixture(
    params=["redis", *(pytest.param(n, marks=pytest.mark.slow) for n in ("sentinels", "cluster"))]
)
def url(request: pytest.FixtureRequest, server: PrivateServer) -> str:
    return (
        server.url(db=2) if request.param == "redis" else request.getfixturevalue(request.param).url
    )


@pytest.mark.slow
def test_an_interrupted_call_never_gives_its_reply_to_the_next(
    url: str, fault: type[BaseException]
) -> None:
    store = open_store(url)
    with closing(open_store(url)) as witness:
        holder = new_token()
        held, free, mine = new_key(), new_key(), new_key()
        ask(witness, held, holder)
        owner = new_token()

        def once(fresh: bool) -> None:
            if fresh:
                store.close()  # so that faults strike connecting and logging in, too
            try:
                with struck_at_random(0.0004):
                    ask(store, free, owner)
            finally:
                # Each of these has an answer that none of the others has.
                reply = ask(store, held, new_token())
                assert isinstance(reply, Refused), reply
                assert reply.relation is Relation.OTHER
                assert reply.record is not None
                assert reply.record.token == str(holder)
                granted = ask(store, mine, owner)
                assert isinstance(granted, Granted)
                assert granted.key == mine
                renewals = store.leases.renew(
                    [lease_of(mine, owner), lease_of(held, owner)], timeout=TIMEOUT
                )
                assert renewals == [RENEWED, LossReason.REPLACED]
                store.leases.release(Release(keys=(free,), token=owner), timeout=TIMEOUT)
                assert store.leases.inspect(free) is None

        thousand_times(fault, once)
        store.close()


@pytest.mark.slow
def test_an_interrupted_acquire_of_the_locker_leaves_no_lease_and_no_renewal(
    server: PrivateServer, fault: type[BaseException]
) -> None:
    with (
        closing(RedisStore(server.url(db=3))) as store,
        redis.Redis.from_url(server.url(db=3)) as raw,
    ):
        locker = locker_on(store)
        key = new_key()
        # The heartbeat's thread is started here: what strikes within threading's own start() comes
        # out of it as the RuntimeError of a lock.
        first = locker.acquire(call_for(new_key()))
        assert isinstance(first, Lease)
        locker.release(first, Release(keys=(first.key,), token=first.token))

        def once(fresh: bool) -> None:
            if fresh:
                store.close()
            lease = None
            try:
                with struck_at_random(0.0006):
                    lease = locker.acquire(call_for(key))
            except fault:
                if lease is None:
                    assert raw.get(key) is None, "the grant of an acquire that raised stands"
                    assert len(locker.heartbeat) == 0
                raise
            finally:
                if lease is not None:
                    assert isinstance(lease, Lease), "refused by a lease without a holder"
                    assert str(lease.token).encode() in (raw.get(key) or b"")
                    locker.release(lease, Release(keys=(key,), token=lease.token))

        thousand_times(fault, once)
        locker.heartbeat.close()


def test_the_test_can_fail(server: PrivateServer, fault: type[BaseException]) -> None:
    """Without the protection, the same fire gives a reply to the wrong command."""

    class Careless(Connections):
        only = None

        def run(self, commands, timeout):  # type: ignore[no-untyped-def]
            connection = self.only = self.only or self.new(timeout)
            for item in connection.pack_commands(commands):
                if not connection._sock:
                    connection.connect()
                connection._sock.sendall(item)
            return [connection.read_response(disconnect_on_error=False) for _ in commands]

    def careless_store() -> RedisStore:
        store = RedisStore(server.url(db=4))
        store.runner.connections = Careless(server.url(db=4))
        return store

    held = new_key()
    with closing(RedisStore(server.url(db=4))) as teacher:
        ask(teacher, held, new_token())  # the careless one can't teach the server its scripts
    store = careless_store()
    for _ in range(TRIES):
        try:
            with struck_at_random(0.0004):
                ask(store, new_key(), new_token())
        except fault:
            try:
                reply = ask(store, held, new_token())
            except (redis.exceptions.RedisError, ValueError):  # half a reply was read: luck
                store = careless_store()
                continue
            if isinstance(reply, Granted):
                return
        except (redis.exceptions.RedisError, ValueError):  # an earlier reply, read in part
            store = careless_store()
    pytest.fail("no false grant was seen")
