"""Connections to several nodes: what one of them does, the others' callers don't wait for."""

from __future__ import annotations

import select
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from celery_singleton_lock.core.store import Release, ReleaseReply
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.redis.async_release import PendingReleases
from celery_singleton_lock.stores.redis.cluster import NodeConnections
from celery_singleton_lock.testing.contract import new_key, new_token
from tests.harness.redlock_nodes import RedlockNodes

pytestmark = pytest.mark.slow

PATIENCE = 0.4


class SlowNode(socketserver.StreamRequestHandler):
    """A node that names itself for all slots. It replies to each script after half of PATIENCE.

    A key like ``silent@7001`` is on the node with that port: another node replies MOVED. There, a
    script with a silent key gets no reply, and one with a fast key gets it at once.
    """

    def handle(self) -> None:
        port = self.server.server_address[1]
        while line := self.rfile.readline():
            words = [self._word() for _ in range(int(line[1:]))]
            if words[0] == b"CLUSTER":
                slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n"
                self.wfile.write(slots % port)
            elif words[0] == b"EVALSHA":
                name, _, home = words[3].partition(b"@")
                if home and int(home) != port:
                    self.wfile.write(b"-MOVED 1 127.0.0.1:%b\r\n" % home)
                    continue
                if name == b"silent":
                    continue
                time.sleep(0 if name == b"fast" else PATIENCE / 2)
                self.wfile.write(b"*0\r\n")
            else:
                self.wfile.write(b"+OK\r\n")

    def _word(self) -> bytes:
        length = int(self.rfile.readline()[1:])
        return self.rfile.read(length + 2)[:-2]


@contextmanager
def slow_node() -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), SlowNode) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_a_node_that_is_slow_with_each_reply_is_not_waited_for_beyond_the_timeout() -> None:
    with (
        slow_node() as port,
        closing(NodeConnections(f"redis+cluster://127.0.0.1:{port}")) as nodes,
    ):
        assert nodes.run([("EVALSHA", "sha", "1", "key")], PATIENCE, check=False) == [[]]
        begin = time.monotonic()
        replies = nodes.run([("EVALSHA", "sha", "1", "key")] * 20, PATIENCE, check=False)
        took = time.monotonic() - begin
        assert took < 3 * PATIENCE
        assert all(isinstance(reply, StoreUnavailable) for reply in replies)
        # What is late is not waited for, but later commands are.
        assert nodes.run([("EVALSHA", "sha", "1", "key")], PATIENCE, check=False) == [[]]


def test_a_slow_login_does_not_shorten_the_time_for_the_reply() -> None:
    def log_in_slowly(connection: Any) -> None:
        connection.on_connect()
        time.sleep(0.8 * PATIENCE)

    options = {"redis_connect_func": log_in_slowly}
    with (
        slow_node() as port,
        closing(NodeConnections(f"redis+cluster://127.0.0.1:{port}", options)) as nodes,
    ):
        nodes.masters(PATIENCE)
        nodes.close()  # the topology is known, and the command needs a new connection
        assert nodes.run([("EVALSHA", "sha", "1", "key")], PATIENCE) == [[]]


def test_an_unresponsive_node_fails_no_command_that_was_redirected_to_another_node() -> None:
    with (
        slow_node() as former,
        slow_node() as silent,
        slow_node() as other,
        closing(NodeConnections(f"redis+cluster://127.0.0.1:{former}")) as nodes,
    ):
        keys = [f"silent@{silent}", f"fast@{other}", f"silent@{silent}"]
        commands = [("EVALSHA", "sha", "1", key) for key in keys]
        begin = time.monotonic()
        first, second, third = nodes.run(commands, PATIENCE, check=False)
        assert time.monotonic() - begin < 2 * PATIENCE
        assert second == []
        assert isinstance(first, StoreUnavailable)
        assert isinstance(third, StoreUnavailable)


def test_unresponsive_nodes_are_waited_for_once_where_asynchronous_releases_are_drained() -> None:
    outcomes: list[object] = []
    pending = PendingReleases(lambda request, timeout: ReleaseReply.OURS)
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
            request = Release(keys=(new_key(),), token=new_token())
            begun = pending.begin(request, 5.0, lambda *outcome: outcomes.append(outcome))
            assert node.send_async(("GET", "reply"), 5.0, begun)
        (connection,) = node._idle[0, 5.0]
        assert select.select([connection.fileno()], [], [], 5.0)[0], "the fourth has replied"
        begin = time.monotonic()
        nodes.drain(PATIENCE)
        took = time.monotonic() - begin
    assert took < 2 * PATIENCE
    assert outcomes == [(ReleaseReply.OURS, False)], "it was read, behind those that are silent"
    assert len(pending.lost) == 3
