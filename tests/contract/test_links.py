"""Links to Redlock's nodes, on real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from celery_singleton_lock.stores.redis.exchange import Exchange
from celery_singleton_lock.stores.redlock import links
from celery_singleton_lock.stores.redlock.link_sets import LinkSets
from celery_singleton_lock.stores.redlock.links import Link
from celery_singleton_lock.stores.redlock.url import Node, read_nodes
from celery_singleton_lock.stores.redlock.waiting import ready, wait
from celery_singleton_lock.testing.clock import ManualClock
from example_project.private_server import PrivateServer
from tests.harness.deliveries import wait_until

LONG = 60.0


@pytest.fixture
def node(server: PrivateServer) -> Node:
    return read_nodes(f"redlock://127.0.0.1:{server.port},127.0.0.2,127.0.0.3/9").members[0]


@pytest.fixture
def raw(server: PrivateServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url(db=9)) as raw:
        raw.flushdb()
        yield raw


@pytest.fixture
def first_says_nothing(
    server: PrivateServer, node: Node, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The node has two addresses, and the first swallows every packet."""
    with ExitStack() as stack:
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(2):  # as many as it keeps until somebody accepts them
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        addresses = [silent.getsockname(), (node.host, node.port)]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]

        def getaddrinfo(*args: Any, **options: Any) -> Any:
            return list(found)

        monkeypatch.setattr(links.socket, "getaddrinfo", getaddrinfo)
        yield


def asked(link: Link, *words: Any) -> Exchange:
    exchange = Exchange([words])
    link.send(exchange)
    return exchange


def answered(link: Link, exchange: Exchange) -> bool:
    def is_done() -> bool:
        wait([link], 0.1)
        return exchange.done

    wait_until(is_done, "the node answers")
    return exchange.error is None


def test_what_a_link_was_asked_before_it_was_given_up_never_arrives(
    node: Node, raw: redis.Redis, first_says_nothing: None
) -> None:
    link = Link(node, ManualClock())
    given_up = asked(link, "SET", "given-up", "1")
    assert link.owes
    link.give_up("for a test")
    assert given_up.error is not None
    assert given_up.confirmed, "it never left"
    assert not link.owes
    assert answered(link, asked(link, "SET", "later", "1")), "the next address is tried"
    assert raw.keys() == [b"later"]
    link.close()


def test_a_link_to_a_silent_address_goes_on_with_the_next_one(
    node: Node, first_says_nothing: None
) -> None:
    clock = ManualClock()
    link = Link(node, clock)
    asked(link, "PING")
    clock.advance(2.1)  # once: the next address has all its time to answer
    assert answered(link, asked(link, "PING"))
    link.close()


def test_a_set_that_was_given_up_is_lent_without_what_others_asked(
    node: Node, first_says_nothing: None
) -> None:
    sets = LinkSets([node], ManualClock())
    for number in range(32):
        one = sets.take(f"task-{number}")
        asked(one[0], "SET", f"of-{number}", "1")
        sets.give(f"task-{number}", one)
    lent = sets.take("another")
    assert not lent[0].owes
    sets.give("another", lent)
    sets.close()


def test_a_reply_that_came_and_was_not_read_is_no_silence(node: Node, raw: redis.Redis) -> None:
    clock = ManualClock()
    link = Link(node, clock)
    assert answered(link, asked(link, "PING"))
    first, _ = link.interest()
    # Sent without a look at what has come: send() would read a reply that is there at once.
    unread = Exchange([("SET", "unread", "1")])
    link._put(unread)
    link._flush()
    unread.awaited = False
    assert ready([(first.fileno(), False)], 5.0), "its reply has come"
    clock.advance(LONG)
    assert answered(link, asked(link, "PING"))
    assert unread.error is None
    assert link.interest()[0] is first, "the link was closed"
    link.close()
