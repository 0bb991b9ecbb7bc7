"""The one contract, on five nodes; and on five of which two are away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from celery_singleton_lock.core.store import Store
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.testing.contract import StoreContract
from tests.harness.redlock_nodes import RedlockNodes


class TestRedlockStore(StoreContract):
    # The votes of five nodes took 0.7 s on a busy machine: longer than the ttl, they are no grant.
    SHORT = 1.0
    LONGER_THAN_SHORT = 1.1

    @pytest.fixture
    def store(self, nodes: RedlockNodes) -> Iterator[Store]:
        with closing(open_store(nodes.url(db=1))) as store:
            yield store


@pytest.mark.slow
class TestRedlockStoreWithTwoNodesDown(TestRedlockStore):
    @pytest.fixture
    def store(self, three_of_five: RedlockNodes) -> Iterator[Store]:
        with closing(open_store(three_of_five.url(db=2))) as store:
            yield store
