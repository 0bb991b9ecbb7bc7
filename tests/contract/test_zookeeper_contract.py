"""The contract on an ensemble of three members."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from celery_singleton_lock.core.store import Store
from celery_singleton_lock.stores.zookeeper.store import ZooKeeperStore
from celery_singleton_lock.testing.contract import StoreContract
from tests.harness.zookeeper import ZooKeeperEnsemble


@pytest.fixture(scope="module")
def one_store(zookeeper: ZooKeeperEnsemble) -> Iterator[Store]:
    with closing(ZooKeeperStore(zookeeper.url("contract"))) as store:
        yield store


@pytest.mark.slow
class TestZooKeeperStore(StoreContract):
    # A session lasts two ticks of half a second at least, and ends with a tick.
    SHORT, LONGER_THAN_SHORT = 1.0, 2.5

    @pytest.fixture
    def store(self, one_store: Store) -> Store:
        return one_store
