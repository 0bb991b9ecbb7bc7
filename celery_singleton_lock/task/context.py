"""The leases that the current thread, greenlet or coroutine holds, and the steps to one more."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Generator
from contextvars import ContextVar
from functools import cache
from typing import Final, TypeAlias
from weakref import WeakSet

from celery import Celery

from ..core import native_threads, observers
from ..core.heartbeat import LossHandler
from ..core.keyspace import Keyspace
from ..core.lease import Holder, Lease, Token
from ..core.locker import Locker
from ..core.store_requests import Acquire, Refused, Relation, Release, rated
from ..core.waiter import Waiter
from ..errors import LeaseLost, LockConflict, NoLease, StoreError
from ..message.header import mint_nonce
from ..runtime import Runtime

#: The innermost lease held in the current context; its `outer` leads to the others. None: none.
held_lease: ContextVar[Lease | None] = ContextVar("singleton_held_lease", default=None)


def current_lease() -> Lease:
    """Return the lease of the innermost task or block that this code runs in.

    Raises:
        NoLease: This code holds no lease. Perhaps the task was called as a plain function, or its
            key is None, or this is another thread.
    """
    lease = held_lease.get()
    if lease is None:
        raise NoLease(
            "no lease is held here: current_lease() works inside a singleton task or a "
            "hold() block, on the same thread; a task that is called directly takes no lock: call "
            "its .delay(...), or .apply((...)).get() in a test"
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


#: One wait of a client: the arguments of `Waiter.wait`, and the waiter.
Wait: TypeAlias = tuple[Waiter, Refused, float]
Steps: TypeAlias = Generator[Wait, None, None]


class Block:
    """The lease of one block of ``hold()``, from its acquisition to its release.

    The owner iterates :meth:`acquire` and :meth:`release`, and waits as each step says; both may
    run on any thread. :meth:`enter` and :meth:`leave` must run in the block's own `contextvars`
    context.

    Args:
        key: The part after the scope.
        scope: The scope.
        ttl: Seconds; None: the app's ``singleton_lock_ttl``.
        longest: Seconds to wait for another holder.
    """

    __slots__ = (
        *("__weakref__", "_locker", "_thread", "_unused"),
        *("key", "lease", "longest", "scope", "ttl"),
    )

    def __init__(self, key: str, scope: str, ttl: float | None, longest: float) -> None:
        # That of the lease to release, if there is one. The runtime has another one after close().
        self._locker: Locker | None = None
        # The thread that has entered the block with a lease of its own.
        self._thread: int | None = None
        self._unused = True
        self.key, self.scope, self.ttl, self.longest = key, scope, ttl, longest

    def begin(self) -> None:
        """Begin, once.

        Raises:
            RuntimeError: The block has begun before.
        """
        try:
            del self._unused  # one step of the interpreter: two threads can't both succeed
        except AttributeError:
            raise RuntimeError(
                f"hold({self.key!r}) is good for one block, and was entered before. Create one "
                "for each block; as a decorator it does so for each call."
            ) from None

    def acquire(self, app: Celery, on_lost: LossHandler = lambda lease: None) -> Steps:
        """Acquire the lease, or re-enter it; yields before each wait for another holder."""
        runtime = Runtime.of(app, eager=bool(app.conf.task_always_eager))
        full_key = runtime.keyspace.lock(self.scope, self.key)
        if (held := held_here(full_key)) is not None:
            self.lease = held
            return
        request, locker = self._request(runtime, full_key), runtime.locker
        try:
            self.lease = yield from _acquire(locker, request, self.longest, on_lost)
            self._locker = locker
        except (LockConflict, StoreError):
            raise
        except BaseException:
            # A signal handler may have raised after the grant and before this frame has the lease.
            locker.undo(request)
            raise

    def _request(self, runtime: Runtime, full_key: str) -> Acquire:
        nonce = mint_nonce()
        request = Acquire(
            slots=runtime.keyspace.slots(full_key, runtime.limit_of(self.scope)),
            token=Token(f"hold-{nonce}", 0, 0, nonce),
            holder=Holder(
                task_id=f"hold-{nonce}",
                worker=runtime.worker,
                pid=os.getpid(),
                since=runtime.clock.wall(),
                process=runtime.process,
            ),
            ttl=self.ttl or runtime.settings.policy.ttl,
        )
        rate = runtime.rate_of(self.scope)
        return request if rate is None else rated(request, rate)

    def enter(self) -> Lease:
        """Make the lease the innermost one of this context."""
        lease = self.lease
        if self.owns:
            self._thread = threading.get_ident()
            _entered.add(self)
            _register_exit()
            lease.outer = held_lease.get()
            held_lease.set(lease)
        return lease

    @property
    def owns(self) -> bool:
        """Whether the lease is this block's own, and not released."""
        return self._locker is not None

    @property
    def entered_here(self) -> bool:
        """Whether this thread, or greenlet, has entered the block."""
        return self._thread == threading.get_ident()

    def loss(self) -> LeaseLost | None:
        """The error for the loss of the lease, before :meth:`release`; None: it is not lost."""
        return self.lease.lost_error() if self.lease.lost else None

    def leave(self) -> None:
        """Take the lease out of the leases of this context.

        It need not be the innermost one: two suspended generators end in any order. In another
        context than the entered one (an async fixture) it may be absent.
        """
        if self._thread is None:
            return  # the lease is that of a block or task around this one
        lease, inner = self.lease, held_lease.get()
        if inner is lease:
            held_lease.set(lease.outer)
            return
        while inner is not None and inner.outer is not lease:
            inner = inner.outer
        if inner is not None:
            inner.outer = lease.outer

    def release(self) -> None:
        """Release the lease, unless it is that of a block or task around this one."""
        locker = self._locker
        # While the interpreter is finalized, the modules of clients are gone already.
        if locker is not None and not sys.is_finalizing():
            locker.release(self.lease, Release.of(self.lease))
            self._locker = None
            _entered.discard(self)

    def __del__(self) -> None:
        locker = self._locker
        if locker is None or sys.is_finalizing():
            return
        # The block was abandoned: an ExitStack was never closed. The garbage collector may run this
        # on any thread, such as the heartbeat's, or one that is using a connection to the store.
        self.leave()
        lease = self.lease

        def release() -> None:
            with observers.elsewhere():  # this thread has no hub that runs
                locker.release(lease, Release.of(lease))

        try:
            native_threads.start_new_thread(release, "singleton-abandoned")
        except RuntimeError:  # no thread can be started now
            locker.abandon(lease)


# The blocks whose leases are not released.
_entered: Final[WeakSet[Block]] = WeakSet()


@cache
def _register_exit() -> None:
    # Called after the store was opened: what is registered last runs first.
    atexit.register(_release_abandoned)


def _release_abandoned() -> None:
    """Release the blocks that this thread has entered and not left. Called when Python exits.

    The others belong to daemon threads, whose code still runs: their leases expire.
    """
    for block in list(_entered):
        if block.entered_here:
            block.release()


def _acquire(
    locker: Locker, request: Acquire, longest: float, on_lost: LossHandler
) -> Generator[Wait, None, Lease]:
    """Try to acquire the lease for at most ``longest`` seconds."""
    clock = locker.clock
    give_up_at = clock.now() + longest
    waiter = Waiter(locker, request) if longest else None
    reply: Lease | Refused | None = None
    try:
        while True:
            # The clock is read before the request, so the last request is sent after the whole
            # time.
            left = give_up_at - clock.now()
            if waiter is None:
                reply = locker.acquire(request, on_lost=on_lost)
            else:
                reply = waiter.acquire(request, waits=left > 0, on_lost=on_lost)
            if isinstance(reply, Lease):
                return reply
            is_rate = reply.relation is Relation.RATE
            if waiter is None or left <= (reply.due_in if is_rate else 0):
                key, limit = request.slots[0], len(request.slots)
                waited = round(longest - left, 1) if is_rate else longest
                tried = f"waited {waited:g} s. Give a longer wait=" if longest else "give a wait="
                raise LockConflict(
                    f"{reply.explain(key, limit)}; {tried}, or do the work later.",
                    key,
                    reply.holder_for_error(),
                    reply.retry_after,
                )
            yield waiter, reply, left
    finally:
        if waiter is not None:
            try:
                waiter.leave()
            except BaseException:
                if isinstance(reply, Lease):
                    locker.release(reply, Release.of(reply))  # the caller never gets the lease
                raise
