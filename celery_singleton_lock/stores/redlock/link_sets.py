"""Sets of links, one to each node, lent to one call at a time.

Promises
    What one task sends to a node arrives in the order in which it was sent, while the link lasts. A
    call doesn't wait for slow nodes, so the next call of the same task may overtake it if it goes
    by another link: a release before the acquire leaves a vote that nobody gives back, and an
    acquire before an earlier release is undone by it. So a set of links that owes replies to a task
    is kept for that task, and lent to others when all have come, or the silent link is given up:
    after a while, or because too many sets wait for it already. So a node that is slow or stopped
    costs a bounded number of connections, however many calls are made meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from celery_singleton_lock.core import native
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.stores.redlock.links import Link
from celery_singleton_lock.stores.redlock.url import Node

__all__ = ["LinkSets"]

# Sets that owe replies at most, beside those that calls use at the moment. A node that answers
# 50 ms late keeps up with 640 calls a second by these; five nodes have 160 sockets by them.
_MOST_OWING: Final = 32


class LinkSets:
    """Those of one store."""

    def __init__(self, nodes: Sequence[Node], clock: Clock) -> None:
        self._nodes = nodes
        self._clock = clock
        # Of this thread alone where a socket belongs to its thread's hub; else of whoever needs it.
        self._idle: dict[int, deque[list[Link]]] = {}
        self._owing: dict[tuple[int, str], list[Link]] = {}

    def take(self, task: str) -> list[Link]:
        """The set that owes replies to ``task``, else an idle one, else a new one."""
        thread = native.socket_owner()
        owing = self._owing.pop((thread, task), None) if task else None
        if owing is not None:
            return owing
        idle = self._idle.setdefault(thread, deque())
        if not idle:
            self._collect(thread)
        try:
            return idle.pop()
        except IndexError:
            return [Link(node, self._clock) for node in self._nodes]

    def give(self, task: str, links: list[Link]) -> None:
        """Take back a set after a call of ``task``; empty: of one whose order is no matter."""
        thread = native.socket_owner()
        if task and any(link.owes for link in links):
            other = self._owing.pop((thread, task), None)
            self._owing[thread, task] = links
            if other is None:
                return
            links = other  # two calls of one task at once: their order is open anyway
        self._idle.setdefault(thread, deque()).append(links)

    def any_idle(self) -> list[Link]:
        """Some set, without taking it; empty if there is none."""
        for idle in list(self._idle.values()):
            for links in list(idle):
                return links
        return []

    def close(self) -> None:
        """Close all that are not in use."""
        sets = [links for idle in self._idle.values() for links in idle]
        sets += self._owing.values()
        self._idle.clear()
        self._owing.clear()
        for links in sets:
            for link in links:
                link.close()

    def _collect(self, thread: int) -> None:
        """Find those that owe nothing any more; of too many that do, the oldest owe too long."""
        for owner, task in list(self._owing):
            links = self._owing.pop((owner, task), None) if owner == thread else None
            if links is None:
                continue
            for link in links:
                link.pump()
                link.give_up_if_silent()
            self.give(task, links)
        owing = [key for key in list(self._owing) if key[0] == thread]
        idle = self._idle.setdefault(thread, deque())
        while len(owing) >= _MOST_OWING and not idle:
            links = self._owing.pop(owing.pop(0), None) or []
            for link in links:
                if link.owes:
                    link.give_up("too many calls wait for it")
            if links:
                idle.append(links)
