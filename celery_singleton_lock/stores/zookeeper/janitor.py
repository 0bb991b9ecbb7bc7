"""The janitor: a thread that deletes nodes that the server doesn't expire.

A ZooKeeper session lives as long as its process, and so would a lease that is no longer renewed
(``max_hold`` is reached, its release failed, or the reply to its acquire was lost). The janitor
deletes such a lease when its ttl is over. It also sweeps a random bucket from time to time for
expired nodes: once per as many writes as the last bucket had nodes. So each write costs about one
read, and there are at most about as many expired nodes as living ones.

The thread starts with the first own key.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from celery_singleton_lock.core import native
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.consensus import Name, OwnKeys
from celery_singleton_lock.stores.zookeeper.ensemble import BUCKETS, Versions, View
from celery_singleton_lock.stores.zookeeper.sessions import Session

logger = logging.getLogger("celery_singleton_lock")

_MIN_WRITES: Final = 64
# Seconds, while the store doesn't answer.
_RETRY_PAUSE: Final = 1.0
_MIN_PAUSE: Final = 0.05
_MAX_PAUSE: Final = 3600.0


@dataclass(slots=True, eq=False)
class Own:
    """A note on a node that this process has created, or may have created, in one of its sessions.

    Attributes:
        ttl: Seconds, limited to the maximum that the server allows.
        until: The end of the ttl, on the clock, unless the node is renewed.
        session: The session of the node.
        expected: The content of the operation's keys after the write, and the versions of their
            buckets. None until the write is acknowledged.
    """

    ttl: float
    until: float
    session: Session
    expected: tuple[View, Versions] | None = None


class Janitor:
    """Expires own keys and sweeps buckets.

    Args:
        own: The notes on own keys.
        clock: The clock of the notes.
        expire: Deletes a key if its owner is unchanged.
        sweep: Deletes the expired nodes of a bucket, by its number; returns the number of nodes.
    """

    def __init__(
        self,
        own: OwnKeys[Own],
        clock: Clock,
        expire: Callable[[Name], None],
        sweep: Callable[[int], int],
    ) -> None:
        self._own = own
        self._clock = clock
        self._expire = expire
        self._sweep = sweep
        self._writes = 0
        self._writes_per_sweep = _MIN_WRITES
        self._alarm: Any = native.allocate_lock()
        self._alarm.acquire()
        self._running: Any = native.allocate_lock()  # Held by the thread, and never released.
        self._closed = False

    def wake(self) -> None:
        """Wake the thread, because the own keys have changed."""
        if not self._running.locked() and not self._closed:
            # The thread itself acquires the lock. If this method acquired it and the start failed
            # or was interrupted, all own keys would be without a janitor.
            native.start_new_thread(self._run, "singleton-janitor")
        self._ring()

    def count(self, writes: int) -> None:
        """Count new nodes that expire by the ttl in their text."""
        self._writes += writes
        if self._writes >= self._writes_per_sweep:
            self.wake()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._ring()

    def _ring(self) -> None:
        try:
            self._alarm.release()
        except RuntimeError:
            pass  # The thread hasn't handled the last alarm yet.

    def _run(self) -> None:
        if not self._running.acquire(blocking=False):
            return  # Two threads were started by concurrent first writes.
        while not self._closed:
            pause = -1.0
            try:
                self._clean()
                if self._own.all:
                    soonest = min(own.until for own in list(self._own.all.values()))
                    pause = min(max(soonest - self._clock.now(), _MIN_PAUSE), _MAX_PAUSE)
            except StoreError:
                pause = _RETRY_PAUSE
            except Exception:
                logger.exception("the janitor of the lock store failed; it goes on")
                pause = _RETRY_PAUSE
            self._alarm.acquire(timeout=pause)

    def _clean(self) -> None:
        now = self._clock.now()
        for name, own in list(self._own.all.items()):
            if now >= own.until:
                self._expire(name)
                if self._own.all.get(name) is own:
                    self._own.forget(name)
        if self._writes >= self._writes_per_sweep:
            self._writes = 0
            self._writes_per_sweep = max(_MIN_WRITES, self._sweep(random.randrange(BUCKETS)))
