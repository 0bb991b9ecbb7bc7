"""The parts of a campaign: the guarded resource, the timetable, the proxy."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from tests.chaos.promises import PROMISES
from tests.chaos.proxy import Kind, Mode, Proxy
from tests.chaos.resource import Resource
from tests.chaos.schedule import SORTS, sorts_for, timetable


def test_the_resource_refuses_what_is_older_than_the_newest_it_has_seen(tmp_path: Path) -> None:
    resource = Resource(tmp_path, "k")
    answers = [resource.write("a", 5), resource.write("b", 7), resource.write("a", 5)]
    assert [*answers, resource.write("b", 7)] == [True, True, False, True]
    assert [write.accepted for write in resource.writes()] == [True, True, False, True]


def test_one_seed_gives_one_timetable() -> None:
    sorts = sorts_for((), clock=False)
    first, again, other = (timetable(sorts, seconds=300, seed=seed, ttl=2.0) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_the_faults_of_a_lane_never_meet_and_all_of_them_come() -> None:
    known = [sorts_for((), clock=False, churn=True, hosts=True, store=s) for s in PROMISES]
    sorts = list(dict.fromkeys(sort for sorts in known for sort in sorts))
    lanes = timetable(sorts, seconds=900, seed=1, ttl=2.0)
    for faults in lanes.values():
        for fault, following in pairwise(faults):
            assert fault.at + fault.seconds <= following.at
    struck = {fault.name for faults in lanes.values() for fault in faults}
    assert struck == {sort.name for sort in SORTS} - {"clock-step"}


# The proxy.


class Echo:
    """A server that answers each line with the same line, and remembers what it has read."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.news = threading.Condition()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # ends accept() in the other thread
        self._socket.close()

    def wait_until_received(self, line: bytes) -> None:
        with self.news:
            assert self.news.wait_for(lambda: line in self.received, timeout=30)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        try:
            with client, client.makefile("rwb") as stream:
                for line in stream:
                    with self.news:
                        self.received.append(line)
                        self.news.notify_all()
                    stream.write(line)
                    stream.flush()
        except OSError:
            pass  # the proxy has cut it


@contextmanager
def proxied() -> Iterator[tuple[Echo, Proxy]]:
    with closing(Echo()) as echo, Proxy(echo.port) as proxy:
        yield echo, proxy


@contextmanager
def connected(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=30.0) as client:
        yield client


def answer(client: socket.socket, line: bytes) -> bytes:
    """What comes when the line was sent; empty if the connection is cut."""
    try:
        client.sendall(line)
        return client.recv(100)
    except ConnectionError:
        return b""


@pytest.mark.parametrize(
    ("kind", "is_executed", "comes"),
    [
        (Kind.STALL, False, b"two\n"),
        (Kind.CUT, False, b""),
        (Kind.NO_REQUESTS, False, b""),
        (Kind.NO_REPLIES, True, b""),
    ],
)
def test_a_stalled_network_delivers_late_and_what_a_partition_swallows_never_comes(
    kind: Kind, is_executed: bool, comes: bytes
) -> None:
    with proxied() as (echo, proxy), connected(proxy) as client:
        assert answer(client, b"one\n") == b"one\n"
        proxy.set(Mode(kind=kind))
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            answer(client, b"two\n")
        if is_executed:
            echo.wait_until_received(b"two\n")
        assert (b"two\n" in echo.received) == is_executed
        proxy.set(Mode())
        client.settimeout(30)
        assert answer(client, b"") == comes


@pytest.mark.parametrize("always", [True, False])
def test_a_lost_reply_is_that_of_a_request_that_was_executed(always: bool) -> None:
    with proxied() as (echo, proxy):
        if always:
            proxy.set(Mode(kind=Kind.LOSE_REPLIES, probability=1.0))
        else:
            proxy.lose_next_reply()
        with connected(proxy) as client:
            assert answer(client, b"one\n") == b""
        echo.wait_until_received(b"one\n")
        with connected(proxy) as client:
            assert answer(client, b"two\n") == (b"" if always else b"two\n")


def test_a_network_that_refuses_closes_what_comes() -> None:
    with proxied() as (echo, proxy):
        proxy.set(Mode(kind=Kind.REFUSE))
        with connected(proxy) as client:
            assert answer(client, b"one\n") == b""
        assert echo.received == []


def test_a_change_of_the_server_cuts_the_connections_to_the_old_one() -> None:
    with proxied() as (_, proxy), closing(Echo()) as other:
        with connected(proxy) as client:
            assert answer(client, b"one\n") == b"one\n"
            proxy.lead_to(other.port)
            assert answer(client, b"lost\n") == b""
        with connected(proxy) as client:
            assert answer(client, b"two\n") == b"two\n"
        assert other.received == [b"two\n"]
