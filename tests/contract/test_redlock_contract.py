"""The one contract, on five nodes; and on five of which two are away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from celery_singleton_lock.core.store import Store
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.stores.redlock.store import RedlockStore
from celery_singleton_lock.testing.contract import StoreContract
from tests.harness.deliveries import wait_until
from tests.harness.redlock_nodes import RedlockNodes


class TestRedlockStore(StoreContract):
    # The votes of five nodes took 0.7 s on a busy machine: longer than the ttl, they are no grant.
    # So the ttl is long, and the keys of the nodes grow old by hand.
    SHORT = 20.0
    LONGER_THAN_SHORT = 21.0

    @pytest.fixture
    def store(self, nodes: RedlockNodes) -> Iterator[Store]:
        self.nodes = nodes
        with closing(open_store(nodes.url(db=1))) as self.redlock:
            yield self.redlock

    def elapse(self, seconds: float) -> None:
        # Nodes that were not needed for a decision may not have executed the request yet, and a key
        # that comes after this stays young.
        wait_until(self.all_have_executed, "all nodes have executed the requests")
        self.nodes.grow_old(seconds, db=1)

    def all_have_executed(self) -> bool:
        assert isinstance(self.redlock, RedlockStore)
        poll, _ = self.redlock._fanout.ask(lambda node: None, 5.0, lambda poll: False)
        return not poll.pending


@pytest.mark.slow
class TestRedlockStoreWithTwoNodesDown(TestRedlockStore):
    @pytest.fixture
    def store(self, three_of_five: RedlockNodes) -> Iterator[Store]:
        self.nodes = three_of_five
        with closing(open_store(three_of_five.url(db=1))) as self.redlock:
            yield self.redlock
