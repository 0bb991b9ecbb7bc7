"""The leases that the current thread, greenlet or coroutine holds, and ``hold()`` for more."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta

from celery import Celery

from ..celery_compat import real_app
from ..core.key import Keyspace
from ..core.lease import Holder, Lease, Token
from ..core.locker import Waiter
from ..core.store import Acquire, Refused, Release
from ..errors import LockConflict, LockKeyError, NoLease, StoreError
from ..policy import Policy, merge, seconds
from ..publish.header import mint_nonce
from ..runtime import Runtime

#: The innermost lease held in the current context; its `outer` leads to the others. None: none.
held_lease: ContextVar[Lease | None] = ContextVar("singleton_held_lease", default=None)


def current_lease() -> Lease:
    """The innermost lease held in the current context.

    Raises:
        NoLease: No lease is held here: the task was called directly, its key is None, or this is
            another thread.
    """
    lease = held_lease.get()
    if lease is None:
        raise NoLease(
            "no lease is held here: current_lease() works inside the body of a singleton task or a "
            "hold() block, on the same thread; a task that is called directly takes no lock"
        )
    return lease


def held_here(key: str) -> Lease | None:
    """The lease on ``key`` that the current context holds, such as that of a calling task."""
    lease = held_lease.get()
    while lease is not None:
        if Keyspace.is_slot_of(key, lease.key) and lease.held_here:
            return lease
        lease = lease.outer
    return None


@contextmanager
def hold(
    key: str,
    *,
    scope: str,
    ttl: float | timedelta = 60,
    wait: float | timedelta = 0,
    app: Celery | None = None,
) -> Iterator[Lease]:
    """Hold ``key`` while the ``with`` block runs. Excludes, and is excluded by, tasks of the scope.

    The block is never interrupted: call ``lease.check()`` before writes that matter. Inside a task
    that holds the same key, the task's own lease is re-entered, though not by a forked process.

    Args:
        key: The part after the scope: for ``key="account:{account_id}"``, ``"account:42"``.
        scope: The tasks' ``scope``, or a task's name.
        ttl: Seconds for which a dead holder can block other clients.
        wait: Seconds to wait for another holder.
        app: The app whose store is used; the current app by default.

    Raises:
        LockConflict: Another client holds the key, for the whole of ``wait``.
        RuntimeError: ``wait`` is given inside a running event loop.
        StoreUnavailable: The store doesn't answer; the block has not run.
        TypeError, ValueError: An argument is wrong.
    """
    if not isinstance(key, str) or not key:  # type: ignore[redundant-expr]
        raise LockKeyError(f"hold({key!r}): give a non-empty str")
    policy = merge(Policy(key=key), {"scope": scope, "ttl": ttl}, where=f"hold({key!r})")
    longest = seconds("wait", wait)
    if longest:
        _refuse_event_loop(key)
    chosen = real_app(app)
    runtime = Runtime.of(chosen, eager=bool(chosen.conf.task_always_eager))
    full_key = runtime.keyspace.lock(scope, key)
    if (held := held_here(full_key)) is not None:
        yield held
        return
    nonce = mint_nonce()
    request = Acquire(
        slots=runtime.keyspace.slots(full_key, runtime.limit_of(scope)),
        token=Token(f"hold-{nonce}", 0, 0, nonce),
        holder=Holder(
            task_id=f"hold-{nonce}",
            worker=runtime.worker,
            pid=os.getpid(),
            since=runtime.clock.wall(),
        ),
        ttl=policy.ttl,
    )
    try:
        lease = _acquire(runtime, request, longest)
    except (LockConflict, StoreError):
        raise
    except BaseException:
        # A signal handler may have raised after the grant and before this frame has the lease.
        runtime.locker.forget(request)
        raise
    # This frame lives as long as the block. With thousands of them, these objects would take a
    # quarter of the memory of all leases.
    del policy, full_key, nonce, request
    reset = None
    try:
        lease.outer = held_lease.get()
        reset = held_lease.set(lease)
        yield lease
    finally:
        # The release comes first, so that no failure below leaves the lease with the heartbeat.
        try:
            runtime.locker.release(lease, Release.of(lease))
        except BaseException:
            # A soft time limit or SIGTERM, perhaps before the heartbeat had discarded the lease.
            runtime.locker.release(lease, Release.of(lease))
            raise
        finally:
            if reset is not None:
                # Another context than the entered one (an async fixture) has ended by itself.
                with suppress(ValueError):
                    held_lease.reset(reset)


def _refuse_event_loop(key: str) -> None:
    """Raise inside a running event loop: waiting would block it, and the holder may need it."""
    # A process that has not imported asyncio runs no loop, and should not pay for the import.
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:
        return
    raise RuntimeError(
        f"hold({key!r}, wait=...) would block the running event loop, and the holder may need that "
        "loop to finish. Run the whole block in a thread, await asyncio.to_thread(work) with the "
        "hold() inside work(); or leave out wait=, catch LockConflict and await asyncio.sleep() "
        "before the next try."
    )


def _acquire(runtime: Runtime, request: Acquire, longest: float) -> Lease:
    """Try to acquire the lease for at most ``longest`` seconds."""
    locker, clock = runtime.locker, runtime.clock
    give_up_at = clock.now() + longest
    waiter = Waiter(locker, request) if longest else None
    reply: Lease | Refused | None = None
    try:
        while True:
            # The clock is read before the request, so the last request is sent after the whole
            # time.
            left = give_up_at - clock.now()
            if waiter is None:
                reply = locker.acquire(request)
            else:
                reply = waiter.acquire(request, waits=left > 0)
            if isinstance(reply, Lease):
                return reply
            if waiter is None or left <= 0:
                raise LockConflict(
                    f"{request.slots[0]!r} is held by {reply.holder}; waited {longest:g} s. Give a "
                    "longer wait=, or do the work later.",
                    request.slots[0],
                    reply.holder.for_error(),
                )
            waiter.wait(reply, left)
    finally:
        if waiter is not None:
            try:
                waiter.leave()
            except BaseException:
                if isinstance(reply, Lease):
                    locker.release(reply, Release.of(reply))  # the caller never gets the lease
                raise
