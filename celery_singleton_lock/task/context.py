"""A lease outside of tasks: the same keys, the same heartbeat, for a script or a web request."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Token as ContextToken
from datetime import timedelta

from celery import Celery

from celery_singleton_lock.celery_compat import real_app
from celery_singleton_lock.core.lease import Holder, Lease, Token
from celery_singleton_lock.core.store import Acquire, Refused, Release
from celery_singleton_lock.errors import LockConflict, LockKeyError, StoreError
from celery_singleton_lock.policy import Policy, merge, seconds
from celery_singleton_lock.publish.header import mint_nonce
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.task.tenure import HeldLeases, and_held, held_leases
from celery_singleton_lock.task.waiter import Waiter

__all__ = ["hold"]


@contextmanager
def hold(
    key: str,
    *,
    scope: str,
    ttl: float | timedelta = 60,
    wait: float | timedelta = 0,
    app: Celery | None = None,
) -> Iterator[Lease]:
    """Hold ``key`` while the ``with`` block runs; excludes tasks of that scope, and is excluded.

    Never interrupts the block: ask ``lease.check()`` before writes that matter. Inside a task that
    holds the same key, the task's own lease is re-entered; not by a fork of its process.

    Args:
        key: What comes after the scope: for ``key="account:{account_id}"``, ``"account:42"``.
        scope: The tasks' ``scope``, or a task's name.
        ttl: Seconds that a dead holder can block others.
        wait: Seconds to wait for another holder.
        app: Whose store; the current app's by default.

    Raises:
        LockConflict: Somebody else holds it, for the whole of ``wait``.
        RuntimeError: ``wait`` is given inside a running event loop.
        StoreUnavailable: The store doesn't answer; the block has not run.
        TypeError, ValueError: An argument is wrong.
    """
    if not isinstance(key, str) or not key:  # type: ignore[redundant-expr]
        raise LockKeyError(f"hold({key!r}): give a non-empty str")
    policy = merge(Policy(key=key), {"scope": scope, "ttl": ttl}, where=f"hold({key!r})")
    patience = seconds("wait", wait)
    if patience:
        _refuse_event_loop(key)
    chosen = real_app(app)
    runtime = Runtime.of(chosen, eager=bool(chosen.conf.task_always_eager))
    full_key = runtime.keyspace.lock(scope, key)
    for held in held_leases.get():
        if runtime.keyspace.is_slot_of(full_key, held.key) and held.held_here:
            yield held
            return
    nonce = mint_nonce()
    call = Acquire(
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
        lease = _acquire(runtime, call, patience)
    except (LockConflict, StoreError):
        raise
    except BaseException:
        # A signal's exception, after the grant and before we have it in hand.
        runtime.locker.forget(call)
        raise
    # This frame lives as long as the block: in thousands of them, what none needs any more would
    # take a quarter of all that the leases take.
    del policy, full_key, nonce, call
    reset = None
    try:
        reset = held_leases.set(and_held(lease))
        yield lease
    finally:
        # First of all: nothing that goes wrong below may leave the lease with the heartbeat.
        try:
            runtime.locker.release(lease, Release(keys=(lease.key,), token=lease.token))
        except BaseException:
            # A soft time limit, or SIGTERM, maybe before the heartbeat had let go.
            runtime.locker.release(lease, Release(keys=(lease.key,), token=lease.token))
            raise
        finally:
            if reset is not None:
                _leave(reset)


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


def _leave(reset: ContextToken[HeldLeases | tuple[()]]) -> None:
    try:
        held_leases.reset(reset)
    except ValueError:
        pass  # left in another context than entered (an async fixture): that one has ended


def _acquire(runtime: Runtime, call: Acquire, patience: float) -> Lease:
    reply: Lease | Refused | None = None
    if not patience:
        reply = runtime.locker.acquire(call)
        if isinstance(reply, Lease):
            return reply
        raise _conflict(call, reply, patience)
    clock = runtime.clock
    give_up_at = clock.now() + patience
    waiter = Waiter(runtime.locker, call, runtime.locker.acquire)
    try:
        while True:
            # Of the time before the look: the last one comes when all of it is over.
            left = give_up_at - clock.now()
            reply = waiter.ask(call, waits=left > 0)
            if isinstance(reply, Lease):
                return reply
            if left <= 0:
                raise _conflict(call, reply, patience)
            waiter.wait(reply, left)
    finally:
        try:
            waiter.leave()
        except BaseException:
            if isinstance(reply, Lease):
                # Nobody will hear of the grant.
                runtime.locker.release(reply, Release(keys=(reply.key,), token=reply.token))
            raise


def _conflict(call: Acquire, refused: Refused, patience: float) -> LockConflict:
    return LockConflict(
        f"{call.slots[0]!r} is held by {refused.holder}; waited {patience:g} s. Give a longer "
        "wait=, or do the work later.",
        call.slots[0],
        refused.holder.for_error(),
    )
