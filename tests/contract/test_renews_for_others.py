"""A process can renew what another was granted: the parent heartbeat relies on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from celery_singleton_lock.core.lease import LossReason
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.core.store_requests import RENEWED
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.testing.contract import TIMEOUT, ask, lease_of, new_key, new_token
from example_project.private_server import PrivateServer
from tests.harness.cluster import Cluster
from tests.harness.etcd import EtcdCluster
from tests.harness.redlock_nodes import RedlockNodes
from tests.harness.zookeeper import ZooKeeperEnsemble

TTL = 30.0


@pytest.fixture(
    params=[
        "redis",
        "redlock",
        pytest.param("cluster", marks=pytest.mark.slow),
        pytest.param("etcd", marks=pytest.mark.slow),
    ]
)
def url(request: pytest.FixtureRequest) -> str:
    """The URL of a store that can."""
    if request.param == "redis":
        server: PrivateServer = request.getfixturevalue("server")
        return server.url()
    if request.param == "redlock":
        nodes: RedlockNodes = request.getfixturevalue("nodes")
        return nodes.url(db=1)
    if request.param == "cluster":
        cluster: Cluster = request.getfixturevalue("cluster")
        return cluster.url
    etcd: EtcdCluster = request.getfixturevalue("etcd")
    return etcd.url("others")


@pytest.fixture
def two(url: str) -> Iterator[tuple[Store, Store]]:
    """The same store, as two processes see it: nothing is known to one but by the server."""
    with ExitStack() as stack:
        yield (
            stack.enter_context(closing(open_store(url))),
            stack.enter_context(closing(open_store(url))),
        )


def test_a_store_that_says_so_renews_by_key_and_token_alone(two: tuple[Store, Store]) -> None:
    childs, parents = two
    assert parents.capabilities.renews_for_others
    key, token = new_key(), new_token()
    ask(childs, key, token, ttl=TTL)
    assert parents.leases.renew([lease_of(key, token, TTL)], timeout=TIMEOUT) == [RENEWED]
    assert parents.leases.renew([lease_of(key, token, 2 * TTL)], timeout=TIMEOUT) == [RENEWED]
    record = childs.leases.inspect(key)
    assert record is not None
    assert record.ttl > TTL
    assert record.token == str(token)
    # And the child goes on as if nothing had been.
    assert childs.leases.renew([lease_of(key, token, 2 * TTL)], timeout=TIMEOUT) == [RENEWED]
    childs.operators.free(key, None)
    assert parents.leases.renew([lease_of(key, token, TTL)], timeout=TIMEOUT) == [LossReason.GONE]
    assert childs.leases.inspect(key) is None


@pytest.mark.slow
def test_a_renewal_for_another_does_not_end_its_lease_later(two: tuple[Store, Store]) -> None:
    childs, parents = two
    key, other, token = new_key(), new_key(), new_token()
    ask(childs, key, token, ttl=2.0)
    ask(childs, other, token, ttl=TTL)
    # A ttl that the key has not: in etcd, it moves to a lease of this process.
    late = replace(lease_of(key, token, 3.0), process=None)
    assert parents.leases.renew([late], timeout=TIMEOUT) == [RENEWED]
    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        assert childs.leases.renew([lease_of(key, token, 3.0)], timeout=TIMEOUT) == [RENEWED]
        time.sleep(0.5)  # the child's heartbeat
    # Now the parent has not renewed it for longer than its ttl, and renews something else.
    another = replace(lease_of(other, token, TTL), process=None)
    assert parents.leases.renew([another], timeout=TIMEOUT) == [RENEWED]
    assert childs.leases.renew([lease_of(key, token, 3.0)], timeout=TIMEOUT) == [RENEWED]


@pytest.mark.slow
def test_zookeeper_says_that_it_does_not(zookeeper: ZooKeeperEnsemble) -> None:
    with closing(open_store(zookeeper.url("others"))) as store:
        assert not store.capabilities.renews_for_others


def test_memory_says_that_it_does_not() -> None:
    assert not open_store("memory://").capabilities.renews_for_others
