"""Real servers of our own: these tests flush them, cut their connections and restart them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import redis

pytest.register_assert_rewrite("celery_singleton_lock.testing.contract")

from celery_singleton_lock.core.clock import SystemClock  # noqa: E402
from celery_singleton_lock.core.store import Store  # noqa: E402
from celery_singleton_lock.stores import open_store  # noqa: E402
from celery_singleton_lock.stores.memory import MemoryStore  # noqa: E402
from celery_singleton_lock.stores.redis.store import RedisStore  # noqa: E402
from example_project.private_server import (  # noqa: E402
    PrivateServer,
    ServerNotFound,
    ServerStartFailed,
    find_binary,
    find_valkey,
    free_port,
)
from tests.conftest import missing  # noqa: E402
from tests.harness.certificates import Certificates, find_openssl  # noqa: E402
from tests.harness.redlock_nodes import RedlockNodes  # noqa: E402


def program(find: Callable[[], str]) -> str:
    """What ``find`` finds, or no test."""
    try:
        return find()
    except ServerNotFound as exc:
        missing(str(exc))


@pytest.fixture(scope="package")
def server() -> Iterator[PrivateServer]:
    with PrivateServer(binary=program(find_binary), unixsocket=True) as private:
        yield private


@pytest.fixture(scope="package")
def valkey() -> Iterator[PrivateServer]:
    with PrivateServer(binary=program(find_valkey)) as private:
        yield private


@pytest.fixture(scope="package")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if find_openssl() is None:
        missing("openssl is not installed, and nothing else here makes certificates")
    return Certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="package")
def tls_url(certificates: Certificates) -> Iterator[str]:
    port = free_port()
    arguments = certificates.redis_arguments(port)
    private = PrivateServer(binary=program(find_binary), arguments=arguments)
    try:
        private.start()
    except ServerStartFailed as exc:
        missing(f"the server here was built without TLS: {exc}")
    with private:
        yield f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificates.ca}"


@pytest.fixture(params=["memory", "server", "valkey", "sentinels", "cluster"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Each store that keeps queues of calls."""
    if request.param == "memory":
        yield MemoryStore(SystemClock())
        return
    place: Any = request.getfixturevalue(request.param)
    url = place.url if isinstance(place.url, str) else place.url()
    with closing(open_store(url)) as store:
        yield store


@pytest.fixture
def redis_store(server: PrivateServer) -> Iterator[RedisStore]:
    with closing(RedisStore(server.url())) as store:
        yield store


@pytest.fixture
def raw(server: PrivateServer) -> Iterator[redis.Redis]:
    """A client that goes around the store."""
    with redis.Redis.from_url(server.url()) as client:
        yield client


@pytest.fixture(scope="package")
def _five_nodes(server: PrivateServer) -> Iterator[RedlockNodes]:
    with RedlockNodes(5) as nodes:  # where there is a `server`, there is a program to start
        yield nodes


@pytest.fixture
def nodes(_five_nodes: RedlockNodes) -> Iterator[RedlockNodes]:
    """Five nodes, running and empty whatever the test before did to them."""
    yield _five_nodes
    _five_nodes.restore()


@pytest.fixture(scope="package")
def three_of_five(server: PrivateServer) -> Iterator[RedlockNodes]:
    """Five nodes of which two are down."""
    with RedlockNodes(5) as nodes:
        nodes[1].kill()
        nodes[4].kill()
        yield nodes
