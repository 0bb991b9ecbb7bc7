"""A real server of our own: these tests flush it, cut its connections and restart it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest
import redis

pytest.register_assert_rewrite("celery_singleton_lock.testing.contract")

from celery_singleton_lock.stores.redis import RedisStore  # noqa: E402
from celery_singleton_lock.testing.server import PrivateServer, ServerNotFound  # noqa: E402


@pytest.fixture(scope="package")
def server() -> Iterator[PrivateServer]:
    try:
        private = PrivateServer(unixsocket=True).start()
    except ServerNotFound as exc:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(exc))
    with private:
        yield private


@pytest.fixture
def redis_store(server: PrivateServer) -> Iterator[RedisStore]:
    with closing(RedisStore(server.url())) as store:
        yield store


@pytest.fixture
def raw(server: PrivateServer) -> Iterator[redis.Redis]:
    """A client that goes around the store."""
    with redis.Redis.from_url(server.url()) as client:
        yield client
