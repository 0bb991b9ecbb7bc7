"""What is special about Sentinel: finding the master, following it, and what a failover loses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from celery_singleton_lock.core.lease import LossReason
from celery_singleton_lock.core.store_requests import (
    RENEWED,
    Granted,
    QueuedAcquire,
    Refused,
    Release,
    ReleaseReply,
)
from celery_singleton_lock.errors import SettingsError, StoreError, StoreUnavailable
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.testing.contract import TIMEOUT, ask, lease_of, new_key, new_token
from celery_singleton_lock.testing.contract.steps import HOLDER
from example_project.private_server import PrivateServer, free_port
from tests.harness.deliveries import wait_until
from tests.harness.sentinels import MASTER, Sentinels, client_of, cut_replication

from .test_redis import call_for, fence, give

# Several servers each: `make test` keeps memory, Redis and Valkey.
pytestmark = pytest.mark.slow

slow = pytest.mark.slow


@pytest.fixture
def store(sentinels: Sentinels) -> Iterator[RedisStore]:
    with closing(store_of(sentinels.url)) as store:
        yield store


def store_of(url: str, **options: object) -> RedisStore:
    store = open_store(url, **options)
    assert isinstance(store, RedisStore)
    return store


def calls(server: PrivateServer, command: str) -> int:
    with client_of(server) as client:
        return client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"]


def granted_again(store: RedisStore, key: str) -> bool:
    try:
        return isinstance(ask(store, key, token := new_token()), Granted) and bool(
            give(store, key, token)
        )
    except StoreUnavailable:
        return False


# --- finding the master --------------------------------------------------------------------------


@slow
def test_one_round_trip_each_once_the_master_is_known(
    store: RedisStore, sentinels: Sentinels
) -> None:
    key, token = new_key(), new_token()
    ask(store, key, token)  # the sentinels asked, the connection open, the scripts known
    give(store, key, token)
    master = sentinels.master()
    before, roles = calls(master, "evalsha"), calls(master, "role")
    ask(store, key, token)
    ask(store, key, new_token())
    give(store, key, token)
    assert calls(master, "evalsha") - before == 3
    assert calls(master, "role") == roles


@slow
def test_kombus_url_with_its_options_leads_to_the_same_master(
    store: RedisStore, sentinels: Sentinels
) -> None:
    options = {"master_name": MASTER, "sentinel_kwargs": {"socket_keepalive": True}}
    with closing(store_of(sentinels.kombu_url, options=options)) as other:
        key, token = new_key(), new_token()
        ask(store, key, token)
        assert isinstance(ask(other, key, new_token()), Refused)
        give(store, key, token)


@slow
def test_a_dead_sentinel_is_passed_over(sentinels: Sentinels) -> None:
    url = sentinels.url.replace("//", f"//127.0.0.1:{free_port()},", 1)
    with closing(store_of(url)) as store:
        assert fence(store, new_key())


@slow
def test_a_name_that_no_sentinel_knows_is_refused(sentinels: Sentinels) -> None:
    url = sentinels.url.replace(MASTER, "another")
    with closing(store_of(url)) as store, pytest.raises(StoreError, match="'another'") as caught:
        ask(store, new_key(), new_token())
    assert not isinstance(caught.value, StoreUnavailable)


def test_no_sentinel_is_store_unavailable() -> None:
    url = f"sentinel://127.0.0.1:{free_port()},127.0.0.1:{free_port()}?master_name=m"
    unavailable = pytest.raises(StoreUnavailable, match="no sentinel")
    with closing(store_of(url)) as store, unavailable as caught:
        ask(store, new_key(), new_token())
    assert not caught.value.was_sent


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("sentinel://h:26379", "master_name"),
        ("sentinel://h:x?master_name=m", "can't be read"),
        ("sentinel://h?master_name=m&no_such_option=1", "can't be read"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused_before_its_first_use(url: str, remedy: str) -> None:
    with pytest.raises(SettingsError, match=remedy):
        open_store(url)


@slow
def test_what_the_sentinels_name_is_refused_while_it_is_a_replica(sentinels: Sentinels) -> None:
    """As in the moment of a failover in which a sentinel still names the old master."""
    named = iter([sentinels.replicas()[0].port, sentinels.master().port])
    with closing(store_of(sentinels.url)) as store:
        store.runner.connections._discovered = lambda timeout: ("127.0.0.1", next(named))
        with pytest.raises(StoreUnavailable, match="is no master") as caught:
            ask(store, new_key(), new_token())
        assert not caught.value.was_sent
        assert fence(store, new_key())


# --- a failover ----------------------------------------------------------------------------------


@slow
def test_a_lease_that_was_replicated_outlives_its_master(private_sentinels: Sentinels) -> None:
    sentinels = private_sentinels
    with closing(store_of(sentinels.url)) as store:
        key, token, other = new_key(), new_token(), new_key()
        before = fence(store, other)
        with closing(store_of(sentinels.url, wait_replicas=2)) as waiting:
            ask(waiting, key, token)
        old = sentinels.master()
        old.kill()
        new = sentinels.wait_until_promoted(old)
        assert new is not old
        lease = lease_of(key, token)

        def renewed() -> bool:
            try:
                return store.leases.renew([lease], timeout=TIMEOUT) == [RENEWED]
            except StoreUnavailable:
                return False

        wait_until(renewed, "the new master is found")
        assert isinstance(ask(store, key, new_token()), Refused)
        assert fence(store, other) > before
        assert give(store, key, token) is ReleaseReply.OURS


@slow
def test_a_master_that_comes_back_without_data_is_not_taken_for_the_promoted_one(
    private_sentinels: Sentinels,
) -> None:
    """A supervisor starts it again at once; it is a master until a sentinel demotes it."""
    sentinels = private_sentinels
    with closing(store_of(sentinels.url)) as store:
        ask(store, new_key(), new_token())
        old = sentinels.master()
        old.kill()
        new = sentinels.wait_until_promoted(old)
        old.start()
        key = new_key()
        ask(store, key, new_token())
    with client_of(new) as client:
        assert client.exists(key)


@slow
def test_a_lease_that_was_not_replicated_is_lost_and_the_fences_still_rise(
    private_sentinels: Sentinels,
) -> None:
    sentinels = private_sentinels
    with closing(store_of(sentinels.url)) as store:
        key, token = new_key(), new_token()
        old = sentinels.master()
        cut_replication(old, sentinels.replicas())
        stale = ask(store, key, token)
        assert isinstance(stale, Granted)
        old.kill()
        sentinels.wait_until_promoted(old)
        wait_until(lambda: granted_again(store, new_key()), "the new master is found")
        successor = ask(store, key, new_token())
        assert isinstance(successor, Granted), "the lease was not lost: nothing is shown here"
        assert stale.fence is not None
        assert successor.fence is not None
        assert successor.fence > stale.fence
        assert store.leases.renew([lease_of(key, token)], timeout=TIMEOUT) == [LossReason.REPLACED]


# --- wait_replicas -------------------------------------------------------------------------------


@slow
def test_a_grant_that_enough_replicas_have_takes_the_same_round_trip(
    sentinels: Sentinels,
) -> None:
    with closing(store_of(sentinels.url, wait_replicas=2)) as store:
        key = new_key()
        fence(store, key)
        master = sentinels.master()
        before, waits = calls(master, "evalsha"), calls(master, "wait")
        fence(store, key)
        assert (calls(master, "evalsha") - before, calls(master, "wait") - waits) == (2, 1)


@slow
def test_a_grant_that_too_few_replicas_have_is_given_back(sentinels: Sentinels) -> None:
    with closing(store_of(sentinels.url, wait_replicas=3)) as store:
        key = new_key()
        with pytest.raises(StoreUnavailable, match="2 replica"):
            store.leases.acquire(call_for(key), timeout=1.0)
        assert store.leases.inspect(key) is None


def test_a_server_without_replicas_grants_nothing_that_waits_for_them(
    server: PrivateServer,
) -> None:
    with closing(RedisStore(server.url(), wait_replicas=1)) as store:
        key, token = new_key(), new_token()
        with pytest.raises(StoreUnavailable, match=r"0 replica.*given back"):
            store.leases.acquire(call_for(key), timeout=1.0)
        assert store.leases.inspect(key) is None
    with closing(RedisStore(server.url())) as store:
        ask(store, key, token)
        with closing(RedisStore(server.url(), wait_replicas=1)) as waiting:
            assert isinstance(ask(waiting, key, new_token()), Refused)
        store.leases.release(Release(keys=(key,), token=token), timeout=TIMEOUT)


def test_a_call_of_a_queue_that_too_few_replicas_have_has_not_begun(server: PrivateServer) -> None:
    """Acknowledged early, it would be taken for lost, though it never ran."""
    slots, token = (new_key(),), new_token()
    request = QueuedAcquire(slots=slots, token=token, holder=HOLDER, ttl=60.0, late=False)
    with closing(RedisStore(server.url(), wait_replicas=1)) as store:
        for _ in range(2):  # the locker asks twice with one token
            with pytest.raises(StoreUnavailable, match=r"0 replica.*given back"):
                store.leases.acquire(request, timeout=0.5)
