"""Staging of conflicts and losses for tests: a held key or claim, a lost lease."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from celery import Celery

from ..celery_compat import real_app
from ..core.heartbeat import MAX_TIMEOUT
from ..core.lease import Holder, Kind, Lease, Record, Token
from ..core.store import operators_of
from ..core.store_requests import ClaimChange, ClaimRequest
from ..errors import DuplicateTask
from ..message.header import mint_nonce
from ..message.skipped import is_skipped
from ..runtime import Runtime
from ..stores.memory import MemoryStore
from ..task.context import current_lease, held_lease
from .manual_clock import ManualClock

if TYPE_CHECKING:
    from celery.result import AsyncResult

__all__ = ["SingletonStore", "hold_claim", "hold_lock", "is_skipped", "lose_lease"]


class SingletonStore:
    """An in-memory store with a manual clock that replaces the store of an app.

    Eager and real calls in this process use it, without a server.

    Attributes:
        clock: The clock. Real time doesn't advance it, but ``clock.advance(seconds)`` does, and so
            does a call that waits.
        store: The store.
    """

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self._apps: list[Any] = []
        self.clock.meanwhile = self._renew

    def install(self, app: Celery | None = None) -> None:
        """Use this store for ``app`` (the current app by default) until :meth:`uninstall`."""
        chosen = real_app(app)
        self._apps.append(chosen)
        for eager in (False, True):
            runtime = Runtime(chosen, store=self.store, clock=self.clock)
            # A thread would wake in real time, and renew what the clock was advanced to let expire.
            runtime.renews_by_thread = False
            Runtime.install(chosen, runtime, eager=eager)

    def uninstall(self) -> None:
        """Restore the original store of every app."""
        for app in self._apps:
            for eager in (False, True):
                Runtime.of(app, eager=eager).close()
                Runtime.install(app, None, eager=eager)
        self._apps.clear()

    def _renew(self) -> None:
        """Renew what is due, as the heartbeats do in real time."""
        for app in self._apps:
            for eager in (False, True):
                Runtime.of(app, eager=eager).locker.heartbeat.sweep()

    def held(self) -> list[Record]:
        """Return the records of all held keys, without claims."""
        records = operators_of(self.store).scan("*")
        return [record for record in records if record.kind is not Kind.CLAIM]


@contextmanager
def hold_lock(task: Any, /, *args: Any, **kwargs: Any) -> Iterator[Lease]:
    """Hold the key of ``task.delay(*args, **kwargs)`` as another worker would, with the task's ttl.

    Yields:
        The lease.

    Raises:
        LockConflict: The key is held already.
        LockKeyError: The task's key function returns None for these arguments: they have no lock.
    """
    holding = task.hold(*args, **kwargs)
    # The caller's thread must not count as the holder. Otherwise its eager calls would re-enter the
    # lock, and so would this hold() if the caller holds the key.
    callers = held_lease.get()
    reset = held_lease.set(None)
    try:
        with holding as lease:
            held_lease.set(callers)
            yield lease
    finally:
        held_lease.reset(reset)


@contextmanager
def hold_claim(task: Any, /, *args: Any, **kwargs: Any) -> Iterator[AsyncResult[Any]]:
    """Claim the key of ``task.delay(*args, **kwargs)`` as a queued, equal call would.

    Inside the block, every equal call with ``unique`` is a duplicate. The claim ends with the
    block, or when the task's ``unique_for`` has passed on the clock.

    Yields:
        The result of the queued call, which a duplicate gets with ``"return_existing"``. It never
        becomes ready.

    Raises:
        DuplicateTask: An equal call has the claim already.
        ValueError: The task's key function returns None for these arguments: they have no lock.
    """
    suffix, app, nonce = _key_suffix(task, args, kwargs), task.app, mint_nonce()
    runtime = Runtime.of(app, eager=bool(app.conf.task_always_eager))
    store, keyspace = runtime.store, runtime.keyspace
    key, token = keyspace.lock(task.singleton_scope, suffix), Token(f"claim-{nonce}", 0, 0, nonce)
    holder = Holder(
        task=task.name,
        task_id=token.task_id,
        worker=runtime.worker,
        pid=os.getpid(),
        since=runtime.clock.wall(),
    )
    ttl = task.singleton_policy().unique_for
    with ExitStack() as stack:
        for name in (keyspace.claim(task.name, key), keyspace.period(task.name, key)):
            request = ClaimRequest(key=name, token=token, holder=holder, ttl=ttl)
            if (existing := store.claims.take(request, timeout=MAX_TIMEOUT)) is not None:
                task_id = Token.task_id_of(existing.token)
                raise DuplicateTask(f"{task_id} has the claim {name!r}", task_id, existing.ttl)
            freed = ClaimChange(key=name, phase=None)
            stack.callback(store.claims.change, token, freed, timeout=MAX_TIMEOUT)
        yield task.AsyncResult(token.task_id)


def _key_suffix(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    suffix: str | None = task.singleton_key_suffix(args, kwargs)
    if suffix is None:
        raise ValueError(f"{task.name} takes no lock for these arguments")
    return suffix


def lose_lease(lease: Lease | None = None, *, app: Celery | None = None) -> Lease:
    """Delete ``lease`` (by default the current one) from the store, as an operator would.

    The holder notices the loss as in production, and ``on_lost`` applies. An eager run can't be
    requeued, so it fails instead.
    """
    lost = lease or current_lease()
    chosen = real_app(app)
    runtime = Runtime.of(chosen, eager=bool(chosen.conf.task_always_eager))
    operators_of(runtime.store).free(lost.key, None)
    runtime.locker.heartbeat.ask(lost)
    return lost
