"""The contract on a cluster of three members."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from celery_singleton_lock.core.store import Store
from celery_singleton_lock.stores.etcd.store import EtcdStore
from celery_singleton_lock.testing.contract import StoreContract
from tests.harness.etcd import EtcdCluster


@pytest.mark.slow
class TestEtcdStore(StoreContract):
    # An etcd lease has two whole seconds at least, and is looked at twice a second.
    SHORT, LONGER_THAN_SHORT = 1.0, 4.0

    @pytest.fixture
    def store(self, etcd: EtcdCluster) -> Iterator[Store]:
        with closing(EtcdStore(etcd.url("contract"))) as store:
            yield store
