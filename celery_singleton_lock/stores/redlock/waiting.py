"""Waiting for sockets, without blocking in one of them."""

from __future__ import annotations

import select
import selectors
from collections.abc import Sequence

from celery_singleton_lock.stores.redlock.links import Link

__all__ = ["ready", "wait"]


def wait(links: Sequence[Link], seconds: float) -> None:
    """Wait until one of ``links`` can go on, at most ``seconds``; each that can does so."""
    interests = [(link, *link.interest()) for link in links]
    can_go_on = ready([(sock.fileno(), write) for _, sock, write in interests if sock], seconds)
    for link, sock, _ in interests:
        if sock is not None and sock.fileno() in can_go_on:
            link.pump()


def ready(interests: Sequence[tuple[int, bool]], seconds: float) -> set[int]:
    """The descriptors that bytes have come for, or where the flag says so, that take bytes."""
    # Looked up at each call: gevent replaces it, and eventlet takes it away.
    if hasattr(select, "poll"):
        poll = select.poll()
        for descriptor, write in interests:
            poll.register(descriptor, select.POLLIN | (select.POLLOUT if write else 0))
        # Up to the next millisecond: a rest of 0.4 ms must not become a busy loop.
        return {descriptor for descriptor, _ in poll.poll(int(seconds * 1000) + 1)}
    with selectors.DefaultSelector() as selector:
        for descriptor, write in interests:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
            selector.register(descriptor, events)
        return {key.fd for key, _ in selector.select(seconds)}
