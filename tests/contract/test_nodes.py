"""Connections to several nodes: what one of them does, the others' callers don't wait for."""

from __future__ import annotations

import select
import time
from contextlib import closing

import pytest

from celery_singleton_lock.core.store import Relation, Release
from celery_singleton_lock.stores.redis.async_release import PendingReleases
from celery_singleton_lock.stores.redis.nodes import NodeConnections
from celery_singleton_lock.testing.contract import new_key, new_token
from tests.harness.redlock_nodes import RedlockNodes

pytestmark = pytest.mark.slow

PATIENCE = 0.4


def test_nodes_that_are_silent_are_waited_for_once_where_posted_releases_are_collected() -> None:
    heard: list[object] = []
    posted = PendingReleases(lambda call, timeout: Relation.OURS)
    with (
        RedlockNodes(4) as servers,  # any servers will do
        closing(NodeConnections(f"redis+cluster://127.0.0.1:{servers[0].port}")) as nodes,
        servers.paused([0, 1, 2]),
    ):
        for number, server in enumerate(servers):
            if number < 3:
                server.resume()
            node = nodes._node(("127.0.0.1", server.port))
            node.run([("SET", "reply", "released")], 5.0)
            if number < 3:
                server.pause()
            call = Release(keys=(new_key(),), token=new_token())
            begun = posted.begin(call, 5.0, lambda *outcome: heard.append(outcome))
            assert node.send_async(("GET", "reply"), 5.0, begun)
        (connection,) = node._idle_for(5.0)
        assert select.select([connection.fileno()], [], [], 5.0)[0], "the fourth has replied"
        begin = time.monotonic()
        nodes.drain(PATIENCE)
        took = time.monotonic() - begin
    assert took < 2 * PATIENCE
    assert heard == [(Relation.OURS, False)], "it was read, behind those that are silent"
    assert len(posted.lost) == 3
