"""TLS and logins of etcd and ZooKeeper."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from celery_singleton_lock.core.store_requests import RENEWED, Granted
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.testing.contract import TIMEOUT, ask, lease_of, new_key, new_token
from tests.harness.certificates import Certificates
from tests.harness.etcd import EtcdCluster, find_etcd
from tests.harness.zookeeper import ZooKeeperEnsemble, find_zookeeper

pytestmark = pytest.mark.slow

# In continuous integration they run, and fail.
CI = bool(os.environ.get("CI"))
needs_etcd = pytest.mark.skipif(find_etcd() is None and not CI, reason="etcd is not installed")
needs_zookeeper = pytest.mark.skipif(
    find_zookeeper() is None and not CI, reason="ZooKeeper isn't installed"
)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def with_login(url: str, login: str) -> str:
    return url.replace("://", f"://{login}@")


def assert_works(url: str) -> None:
    with closing(open_store(url)) as store:
        key, token = new_key(), new_token()
        assert isinstance(ask(store, key, token), Granted)
        assert store.leases.renew([lease_of(key, token)], timeout=TIMEOUT) == [RENEWED]


@needs_etcd
def test_etcd_is_spoken_to_over_tls(certificates: Certificates) -> None:
    with EtcdCluster(1, tls=certificates) as cluster:
        assert_works(cluster.url())
        without_ca = cluster.url().partition("?")[0]
        with closing(open_store(without_ca)) as store, pytest.raises(StoreError):
            ask(store, new_key(), new_token())


@needs_zookeeper
def test_zookeeper_is_spoken_to_over_tls(certificates: Certificates) -> None:
    with ZooKeeperEnsemble(1, tls=certificates) as ensemble:
        assert_works(ensemble.url())
        without_ca = ensemble.url().partition("?")[0]
        with closing(open_store(without_ca)) as store, pytest.raises(StoreUnavailable):
            ask(store, new_key(), new_token())


@pytest.fixture
def guarded() -> Iterator[EtcdCluster]:
    """A cluster in which ``worker`` may do everything, and a client without a login nothing."""
    with EtcdCluster(1) as cluster:
        cluster.post("auth/user/add", {"name": "root", "password": "top"})
        cluster.post("auth/role/add", {"name": "root"})
        cluster.post("auth/user/grant", {"user": "root", "role": "root"})
        cluster.post("auth/user/add", {"name": "worker", "password": "p@ss/word"})
        cluster.post("auth/role/add", {"name": "locks"})
        permission = {"permType": "READWRITE", "key": "bG9ja3Mv", "range_end": "bG9ja3Mw"}
        cluster.post("auth/role/grant", {"name": "locks", "perm": permission})
        cluster.post("auth/user/grant", {"user": "worker", "role": "locks"})
        cluster.post("auth/enable", {})
        yield cluster


@needs_etcd
def test_etcd_is_logged_in_to(guarded: EtcdCluster) -> None:
    assert_works(with_login(guarded.url("locks"), "worker:p%40ss%2Fword"))
    for url in (
        guarded.url("locks"),
        with_login(guarded.url("locks"), "worker:wrong"),
        with_login(guarded.url("others"), "worker:p%40ss%2Fword"),
    ):
        with closing(open_store(url)) as store, pytest.raises(StoreError) as caught:
            ask(store, new_key(), new_token())
        assert not isinstance(caught.value, StoreUnavailable)


@needs_etcd
def test_a_login_that_etcd_has_forgotten_is_done_again(guarded: EtcdCluster) -> None:
    with closing(open_store(with_login(guarded.url("locks"), "worker:p%40ss%2Fword"))) as store:
        ask(store, new_key(), new_token())
        guarded.kill(0)
        guarded.revive(0)
        try:
            reply = ask(store, new_key(), new_token())
        except StoreUnavailable:
            reply = ask(store, new_key(), new_token())  # the locker's second try
        assert isinstance(reply, Granted)


@needs_zookeeper
def test_what_is_written_to_zookeeper_with_a_login_is_closed_to_others(
    zookeeper: ZooKeeperEnsemble,
) -> None:
    url = zookeeper.url("guarded")
    key = new_key()
    with closing(open_store(with_login(url, "worker:p%40ss"))) as store:
        assert isinstance(ask(store, key, new_token()), Granted)
    for login in ("worker:wrong", "other:p%40ss"):
        with closing(open_store(with_login(url, login))) as store:
            # Each bucket belongs to the first client; here that is the one that was let in.
            with pytest.raises(StoreError) as caught:
                ask(store, key, new_token())
            assert not isinstance(caught.value, StoreUnavailable)
