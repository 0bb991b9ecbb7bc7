"""One contract over every store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import redis

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.core.store_requests import Granted
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.testing import ManualClock
from celery_singleton_lock.testing.contract import StoreContract, ask, new_key, new_token
from example_project.private_server import PrivateServer
from tests.harness.cluster import Cluster
from tests.harness.sentinels import Sentinels


def connected(store: Store) -> Store:
    """With all its connections: some tests have 0.1 s to look at what expires."""
    for _ in range(16):
        key = new_key()
        ask(store, key, new_token())
        store.leases.inspect(key)
        store.operators.free(key, None)
    return store


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return open_store("memory://", clock=SystemClock())


class TestMemoryStoreWithManualClock(StoreContract):
    clock: ManualClock

    @pytest.fixture
    def store(self) -> Store:
        self.clock = ManualClock()
        return open_store("memory://", clock=self.clock)

    def elapse(self, seconds: float) -> None:
        self.clock.advance(seconds)


class TestRedisStore(StoreContract):
    @pytest.fixture
    def store(self, server: PrivateServer) -> Iterator[Store]:
        with closing(open_store(server.url())) as store:
            yield store


@pytest.mark.slow
class TestRedisStoreOverASocketFile(StoreContract):
    @pytest.fixture
    def store(self, server: PrivateServer) -> Iterator[Store]:
        with closing(open_store(server.unix_url(db=1))) as store:
            yield store


class TestValkeyStore(StoreContract):
    @pytest.fixture
    def store(self, valkey: PrivateServer) -> Iterator[Store]:
        with closing(open_store(valkey.url().replace("redis://", "valkey://"))) as store:
            yield store

    def test_it_is_valkey(self, valkey: PrivateServer) -> None:
        with redis.Redis.from_url(valkey.url()) as client:
            assert client.info("server")["server_name"] == "valkey"


@pytest.mark.slow
class TestRedisStoreOverTLS(StoreContract):
    @pytest.fixture
    def store(self, tls_url: str) -> Iterator[Store]:
        with closing(open_store(tls_url)) as store:
            yield connected(store)

    def test_a_server_of_another_authority_is_refused(self, tls_url: str) -> None:
        url, _, _ = tls_url.partition("?")
        with closing(open_store(url)) as store, pytest.raises(StoreUnavailable, match="verify"):
            ask(store, new_key(), new_token())


@pytest.mark.slow
class TestSentinelStore(StoreContract):
    @pytest.fixture
    def store(self, sentinels: Sentinels) -> Iterator[Store]:
        with closing(open_store(sentinels.url)) as store:
            yield connected(store)


@pytest.mark.slow
class TestClusterStore(StoreContract):
    @pytest.fixture
    def store(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        # The suite's keys are in one shard. Here they are in all.
        spread = property(lambda keyspace: 256, lambda keyspace, value: None)
        monkeypatch.setattr(Keyspace, "shards", spread)
        with closing(open_store(cluster.url)) as store:
            yield connected(store)

    def test_its_keys_are_on_every_node(self, store: Store, cluster: Cluster) -> None:
        keys = [new_key() for _ in range(64)]
        assert all(isinstance(ask(store, key, new_token()), Granted) for key in keys)
        assert {cluster.master_of(key).port for key in keys} == {
            node.port for node in cluster.masters()
        }
