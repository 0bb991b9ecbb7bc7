"""Links to Redlock's nodes, on real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery_singleton_lock.stores.exchange import Exchange
from celery_singleton_lock.stores.links import Link
from celery_singleton_lock.stores.redlock_url import Node, read_nodes
from celery_singleton_lock.stores.waiting import ready, wait
from celery_singleton_lock.testing.clock import ManualClock
from celery_singleton_lock.testing.server import PrivateServer
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
