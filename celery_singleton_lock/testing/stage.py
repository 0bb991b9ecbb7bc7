"""Staging of conflicts and losses for tests: a manual clock, a held key, a lost lease."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery

from ..celery_compat import real_app
from ..core.lease import Kind, Lease, Record
from ..publish.values import is_skipped
from ..runtime import Runtime
from ..stores.memory import MemoryStore
from ..task.context import current_lease, held_lease
from ..task.hold import hold

__all__ = ["ManualClock", "SingletonStore", "hold_lock", "is_skipped", "lose_lease"]


class ManualClock:
    """A :class:`~celery_singleton_lock.core.clock.Clock` for tests; ``sleep`` returns at once.

    Args:
        now: The start of the clock for deadlines, in seconds.
        wall: The start of the wall clock, in seconds since the epoch.
    """

    def __init__(self, now: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._now = now
        self._wall = wall

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._wall

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    async def pause(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Advance both clocks by ``seconds``.

        Raises:
            ValueError: ``seconds`` is negative: the clock for deadlines never steps back.
        """
        if seconds < 0:
            raise ValueError(f"advance({seconds!r}): time doesn't run backwards")
        self._now += seconds
        self._wall += seconds


class SingletonStore:
    """An in-memory store with a manual clock that replaces the store of an app.

    Eager and real calls in this process use it. It needs no server and no waiting.

    Attributes:
        clock: The clock; only ``clock.advance(seconds)`` advances it.
        store: The store.
    """

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self._apps: list[Any] = []

    def install(self, app: Celery | None = None) -> None:
        """Use this store for ``app`` (the current app by default) until :meth:`uninstall`."""
        chosen = real_app(app)
        self._apps.append(chosen)
        for eager in (False, True):
            runtime = Runtime(chosen, store=self.store, clock=self.clock)
            Runtime.install(chosen, runtime, eager=eager)

    def uninstall(self) -> None:
        """Restore the original store of every app."""
        for app in self._apps:
            for eager in (False, True):
                Runtime.of(app, eager=eager).close()
                Runtime.install(app, None, eager=eager)
        self._apps.clear()

    def held(self) -> list[Record]:
        """The records of all held keys, without claims, which belong to messages."""
        records = self.store.scan("csl:*")
        return [record for record in records if record.kind is not Kind.CLAIM]


@contextmanager
def hold_lock(task: Any, /, *args: Any, **kwargs: Any) -> Iterator[Lease]:
    """Hold the key of ``task.delay(*args, **kwargs)`` as another worker would.

    Raises:
        LockConflict: The key is held already.
        ValueError: The task's key function returns "no lock" for these arguments.
    """
    rest = task.singleton_rest(args, kwargs, as_sent=True)
    if rest is None:
        raise ValueError(f"{task.name} takes no lock for these arguments")
    scope = task.singleton_policy().scope or task.name
    # The caller's thread must not count as the holder. Otherwise its eager calls would re-enter the
    # lock, and so would this hold() if the caller holds the key.
    callers = held_lease.get()
    reset = held_lease.set(None)
    try:
        with hold(rest, scope=scope, app=task.app) as lease:
            held_lease.set(callers)
            yield lease
    finally:
        held_lease.reset(reset)


def lose_lease(lease: Lease | None = None, *, app: Celery | None = None) -> Lease:
    """Delete ``lease`` (by default the current one) from the store, as an operator would.

    The holder detects the loss as in production, by its deadline or by a renewal, and its body is
    interrupted according to its ``on_lost``.
    """
    lost = lease or current_lease()
    chosen = real_app(app)
    runtime = Runtime.of(chosen, eager=bool(chosen.conf.task_always_eager))
    runtime.store.free(lost.key, None)
    runtime.locker.heartbeat.ask(lost)
    return lost
