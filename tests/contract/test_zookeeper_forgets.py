"""A member that forgets a request until another one comes, as ZooKeeper 3.6.0 to 3.8.0 does.

ZOOKEEPER-4537: a commit that arrives just when the thread that applies them goes to sleep wakes
no other. It takes thousands of writes to meet that, so here the last step of it is provoked: a real
member, behind a proxy that keeps each reply back until the client sends something more.
"""

from __future__ import annotations

from contextlib import closing

import pytest

from celery_singleton_lock.core.store_requests import Granted, Release, ReleaseReply
from celery_singleton_lock.stores.zookeeper.store import ZooKeeperStore
from celery_singleton_lock.testing.contract import TIMEOUT, ask, new_key, new_token
from tests.chaos.proxy import Kind, Mode, Proxy
from tests.harness.zookeeper import ZooKeeperEnsemble


@pytest.mark.slow
def test_a_forgotten_request_is_answered_behind_the_next_one(zookeeper: ZooKeeperEnsemble) -> None:
    """A session of 600 s sends its own next ping after 200 s."""
    with (
        Proxy(zookeeper.ports[0]) as proxy,
        closing(ZooKeeperStore(f"zk://127.0.0.1:{proxy.port}/forgets")) as store,
    ):
        key, token = new_key(), new_token()
        # The first time, connections and buckets are made.
        for kind in (Kind.PASS, Kind.FORGET):
            proxy.set(Mode(kind=kind))
            assert isinstance(ask(store, key, token), Granted)
            request = Release(keys=(key,), token=token)
            assert store.leases.release(request, timeout=TIMEOUT) is ReleaseReply.OURS
        proxy.set(Mode())
