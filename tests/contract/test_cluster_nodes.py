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

from celery_singleton_lock.core.native_threads import socket_owner
from celery_singleton_lock.core.store_requests import Release, ReleaseReply
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.redis.async_release import PendingReleases
from celery_singleton_lock.stores.redis.cluster import NodeConnections
from celery_singleton_lock.testing.contract import new_key, new_token
from celery_singleton_lock.testing.manual_clock import ManualClock
from tests.harness.redlock_nodes import RedlockNodes
from tests.harness.waited import waited

pytestmark = pytest.mark.slow

# Seconds that a node is waited for that does not reply.
PATIENCE = 1.0
# Seconds for a reply that comes: none waits that long. The tests' own clock counts them, and moves
# only where a test moves it.
LONG = 60.0
# Seconds that a late reply takes.
LATE = 0.2
# Seconds after which a reply that is withheld comes after all, if the client still waits for it.
WITHHELD = 5.0


class SlowNode(socketserver.StreamRequestHandler):
    """A node that names itself for all slots. What it replies to a script depends on its key.

    ========== ====================================================================================
    fast       at once
    late       after `LATE` seconds
    half       at once, and the clock moves by half of `LONG`; the third comes after `WITHHELD`
    silent     nothing
    ========== ====================================================================================

    A key like ``silent@7001`` is on the node with that port: another node replies MOVED.
    """

    server: Node

    def handle(self) -> None:
        port, halves = self.server.port, 0
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
                if name == b"late":
                    time.sleep(LATE)  # the time of the reply is the subject
                if name == b"half" and (halves := halves + 1) <= 2:
                    self.server.clock.advance(LONG / 2)
                elif name == b"half":
                    self.server.go_on.wait(WITHHELD)
                    self.server.go_on.set()
                self.wfile.write(b"*0\r\n")
            else:
                self.wfile.write(b"+OK\r\n")

    def _word(self) -> bytes:
        length = int(self.rfile.readline()[1:])
        return self.rfile.read(length + 2)[:-2]


class Node(socketserver.ThreadingTCPServer):
    """Such a node, with the clock of the client that asks it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), SlowNode)
        self.port = self.server_address[1]
        self.clock = ManualClock()
        self.go_on = threading.Event()

    def connections(self, **options: Any) -> NodeConnections:
        return NodeConnections(f"redis+cluster://127.0.0.1:{self.port}", options, self.clock)


@contextmanager
def slow_node() -> Iterator[Node]:
    with Node() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.go_on.set()
            server.shutdown()


def script(key: str) -> tuple[str, ...]:
    return ("EVALSHA", "sha", "1", key)


def test_a_node_that_is_slow_with_each_reply_is_not_waited_for_beyond_the_timeout() -> None:
    with slow_node() as node, closing(node.connections()) as nodes:
        assert nodes.run([script("fast")], LONG, check=False) == [[]]
        # The second reply comes at the end of the timeout. A client that gave each reply a timeout
        # of its own would wait for the third.
        replies = nodes.run([script("half")] * 20, LONG, check=False)
        assert not node.go_on.is_set()
        assert all(isinstance(reply, StoreUnavailable) for reply in replies)
        # What is late is not waited for, but later commands are.
        assert nodes.run([script("late")], LONG, check=False) == [[]]


def test_a_slow_login_does_not_shorten_the_time_for_the_reply() -> None:
    def log_in_slowly(connection: Any) -> None:
        connection.on_connect()
        node.clock.advance(LONG - LATE / 20)  # less than the reply takes is left

    with (
        slow_node() as node,
        closing(node.connections(redis_connect_func=log_in_slowly)) as nodes,
    ):
        nodes.masters(LONG)
        nodes.close()  # the topology is known, and the command needs a new connection
        assert nodes.run([script("late")], LONG) == [[]]


def test_an_unresponsive_node_fails_no_command_that_was_redirected_to_another_node() -> None:
    with (
        slow_node() as former,
        slow_node() as silent,
        slow_node() as other,
        closing(NodeConnections(f"redis+cluster://127.0.0.1:{former.port}")) as nodes,
    ):
        keys = [f"silent@{silent.port}", f"fast@{other.port}", f"silent@{silent.port}"]
        with waited() as seconds:
            replies = nodes.run([script(key) for key in keys], PATIENCE, check=False)
        first, second, third = replies
        assert seconds[0] < 2 * PATIENCE
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
            node.run([("SET", "reply", "released")], LONG)
            if number < 3:
                server.pause()
            request = Release(keys=(new_key(),), token=new_token())
            begun = pending.begin(request, LONG, lambda *outcome: outcomes.append(outcome))
            assert node.send_async(("GET", "reply"), LONG, begun)
        (connection,) = node._idle[socket_owner(), LONG]
        poll = select.poll()  # select() refuses descriptors above 1,023
        poll.register(connection.fileno(), select.POLLIN)
        assert poll.poll(LONG * 1000), "the fourth has replied"
        with waited() as seconds:
            nodes.drain(PATIENCE)
    assert seconds[0] < 2 * PATIENCE
    assert outcomes == [(ReleaseReply.OURS, False)], "it was read, behind those that are silent"
    assert len(pending.lost) == 3
