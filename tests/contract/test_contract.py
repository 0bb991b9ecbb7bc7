"""One contract over every store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.testing.clock import ManualClock
from celery_singleton_lock.testing.contract import StoreContract
from celery_singleton_lock.testing.server import PrivateServer


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


class TestRedisStoreOverASocketFile(StoreContract):
    @pytest.fixture
    def store(self, server: PrivateServer) -> Iterator[Store]:
        with closing(open_store(server.unix_url(db=1))) as store:
            yield store
