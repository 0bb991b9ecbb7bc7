"""Round trips are counted as a client waits for them; tests of costs and of stores rely on it."""

from __future__ import annotations

import socket
import threading

import pytest

from tests.harness.wire import Count, Happening, Wire, count


def sent(server: int, *, thread: int = 1, blocking: bool = True) -> Happening:
    return Happening(True, thread, server, server, blocking)


def received(server: int, *, thread: int = 1, blocking: bool = True) -> Happening:
    return Happening(False, thread, server, server, blocking)


EARLY = [happening(n, blocking=False) for n in range(5) for happening in (sent, received)]


@pytest.mark.parametrize(
    ("happenings", "found"),
    [
        ([one for n in range(5) for one in (sent(n), received(n))], Count(5, 5)),  # in turn
        (EARLY, Count(5, 1)),  # asked at once, though replies come early
        (EARLY * 2, Count(10, 2)),
        ([one for n in range(3) for one in (sent(n, thread=n), received(n))], Count(3, 1)),
        ([sent(1), sent(1), received(1), received(1)], Count(1, 1)),  # a pipeline
    ],
)
def test_a_client_waits_as_often_as_it_asks_after_a_reply(
    happenings: list[Happening], found: Count
) -> None:
    assert count(happenings) == found


def test_the_wire_counts_what_real_sockets_do_and_only_with_the_servers_named() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as named,
        socket.create_server(("127.0.0.1", 0)) as unnamed,
    ):
        for server in (named, unnamed):
            threading.Thread(target=echo, args=(server,), daemon=True).start()
        wire = Wire({named.getsockname()[1]})
        with wire.listening():
            for server in (named, unnamed):
                with socket.create_connection(server.getsockname(), timeout=20) as client:
                    for _ in range(2):
                        client.sendall(b"x")
                        assert client.recv(1) == b"x"
        assert wire.take() == Count(requests=2, round_trips=2)


def echo(server: socket.socket) -> None:
    client, _ = server.accept()
    with client:
        while data := client.recv(1):
            client.sendall(data)
