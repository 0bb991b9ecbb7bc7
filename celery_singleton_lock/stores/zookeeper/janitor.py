"""Sees to the end of what nothing else ends, on a thread of its own.

A ZooKeeper session lives as long as its process, so a lease that is renewed no more (``max_hold``
is reached, its release failed, the reply to its acquire was lost) would stand that long too. The
janitor deletes it when its ttl is over. It also goes through a bucket now and then, for nodes whose
time is over: once per as many writes as the last one held. So each write costs about one read, and
there is about as much to delete as there is alive, at most.

Threads
    The thread starts with the first key that is watched. What is watched is changed by single steps
    of the interpreter, on any thread.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from celery_singleton_lock.core import native
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.zookeeper.sessions import Session
from celery_singleton_lock.stores.zookeeper.znodes import BUCKETS, Seen

__all__ = ["Janitor", "Kept", "Watched"]

logger = logging.getLogger("celery_singleton_lock")

_MIN_WRITES: Final = 64
# While the store is silent.
_RETRY_PAUSE: Final = 1.0
_MIN_PAUSE: Final = 0.05


@dataclass(slots=True, eq=False)
class Kept:
    """A node that lives with a session of this process, or may.

    Attributes:
        ttl: Seconds, as long as the server allows.
        until: When its time is over unless it is renewed, on the clock.
        session: Its session.
        expected: What stood in the keys of its operation afterwards, and the buckets' versions.
    """

    ttl: float
    until: float
    session: Session
    expected: tuple[dict[str, Seen], dict[str, int]] | None = None


#: By key and name (the lease's token, or the claim's task): another acquire of a key may have had
#: no answer while a lease of this process stands there, and neither may be forgotten for the other.
Watched = dict[tuple[str, str], Kept]


def _is_lasting(seen: Seen) -> bool:
    """Whether it is the same some time later."""
    return seen.entry is None or seen.entry.kept


class Janitor:
    """Watches what this process keeps.

    Args:
        clock: Of the times that things are over.
        expire: Deletes a key, if a name still has it.
        sweep: Deletes what has ended in a bucket, by its number; how much was there.
    """

    def __init__(
        self,
        clock: Clock,
        expire: Callable[[str, str], None],
        sweep: Callable[[int], int],
    ) -> None:
        self.kept: Watched = {}
        # By key, the name that it was written for last, of what was answered.
        self._written: dict[str, str] = {}
        self._clock = clock
        self._expire = expire
        self._sweep = sweep
        self._writes = 0
        self._writes_per_sweep = _MIN_WRITES
        self._alarm: Any = native.allocate_lock()
        self._alarm.acquire()
        self._turn: Any = native.allocate_lock()  # of the one thread; never given back
        self._closed = False

    def watch(self, kept: Watched) -> dict[tuple[str, str], Kept | None]:
        """See to their end from now on; returns what was there."""
        before = {what: self.kept.get(what) for what in kept}
        self.kept.update(kept)
        if kept:
            self._ring()
        return before

    def restore(self, kept: Watched, before: Mapping[tuple[str, str], Kept | None]) -> None:
        """Nothing was written after all."""
        for what, ours in kept.items():
            old = before[what]
            if self.kept.get(what) is not ours:
                continue  # another thread has written it since
            if old is None:
                self.kept.pop(what, None)
            else:
                self.kept[what] = old

    def note(self, kept: Watched, view: dict[str, Seen], versions: dict[str, int]) -> None:
        """They were written, and this is what stood there afterwards."""
        for (key, name), one in kept.items():
            one.expected = (view, versions)
            self._written[key] = name

    def forget(self, key: str, name: str) -> None:
        """It lives with no session any more."""
        self.kept.pop((key, name), None)
        if self._written.get(key) == name:
            self._written.pop(key, None)

    def expected(self, keys: Sequence[str]) -> tuple[dict[str, Seen], dict[str, int]] | None:
        """What stands in ``keys`` if nothing has changed since this process wrote one of them."""
        for key in keys:
            kept = self.kept.get((key, self._written.get(key, "")))
            if kept is not None and kept.expected is not None:
                view, versions = kept.expected
                if all(key in view and _is_lasting(view[key]) for key in keys):
                    return {key: view[key] for key in keys}, versions
        return None

    def watches(self, session: Session) -> bool:
        """Whether something lives with ``session``."""
        return any(kept.session is session for kept in list(self.kept.values()))

    def count(self, writes: int) -> None:
        """Nodes were written that end by the time in their text."""
        self._writes += writes
        if self._writes >= self._writes_per_sweep:
            self._ring()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._ring(start=False)

    def _ring(self, start: bool = True) -> None:
        if start and not self._turn.locked() and not self._closed:
            # The thread itself says that it runs. Were it said here, a start that failed or was
            # interrupted would leave all that this process keeps without a janitor.
            native.start_new_thread(self._run, "singleton-janitor")
        try:
            self._alarm.release()
        except RuntimeError:
            pass  # rung already, and not heard yet

    def _run(self) -> None:
        if not self._turn.acquire(blocking=False):
            return  # two writes came first, and each started a thread
        while not self._closed:
            pause = -1.0
            try:
                self._clean()
                if self.kept:
                    soonest = min(kept.until for kept in list(self.kept.values()))
                    pause = max(soonest - self._clock.now(), _MIN_PAUSE)
            except StoreError:
                pause = _RETRY_PAUSE
            except Exception:
                logger.exception("the janitor of the lock store failed; it goes on")
                pause = _RETRY_PAUSE
            self._alarm.acquire(timeout=pause if pause < 0 else min(pause, 3600.0))

    def _clean(self) -> None:
        now = self._clock.now()
        for (key, name), kept in list(self.kept.items()):
            if now >= kept.until:
                self._expire(key, name)
                if self.kept.get((key, name)) is kept:
                    self.forget(key, name)
        if self._writes >= self._writes_per_sweep:
            self._writes = 0
            self._writes_per_sweep = max(_MIN_WRITES, self._sweep(random.randrange(BUCKETS)))
