"""Renewal of the leases of pool children by the worker's parent process.

Overview
    A C call that keeps the GIL stops every thread of its process, including the heartbeat (3 to 7 s
    measured), but no thread of another process. So one thread of the parent reads the deadlines
    that children write to shared memory. It renews, with the child's own token, each lease that the
    child has not renewed in time, and writes the new deadline to shared memory. The child's
    ``check()`` and heartbeat read that deadline. The parent also releases the leases of dead
    children: see `worker.dead_child`.

Guarantees
    A lease is renewed while parent and child live and until its ``max_hold``, even if its body
    keeps the GIL. A body shorter than ttl/3, and a child whose heartbeat is on time, cost no round
    trip here. There is one thread per worker.

Non-guarantees
    Renewal in other pools, where the body runs in the worker's own process; in a store that ties a
    lease to its holder's connection (ZooKeeper); of more leases of one child at once than shared
    memory has notes.

State model
    A lease here is::

        young --1.1 ttl/3 without a renewal--> late --reply--> kept --ttl/3--> late
          ^                                     |  ^             |
          |                                     |  +--no reply---+ (again after a pause)
          +----the child's heartbeat renews it--+----------------+
        from any state to the end: deadline, max_hold, death, release, loss

Failure handling
    A dead child's lease is not renewed: before each renewal the child is looked up by pid and start
    time, and a zombie counts as dead. A renewal in flight at the child's death prolongs the key
    once, and the release follows. A stopped child (SIGSTOP) is alive: its body may continue.

    A lost lease is not revived: the child declares the loss at the deadline that both processes
    read. After it, the parent neither renews nor writes, and the store's renewal creates no key.

    A released lease is not renewed: the child erases its deadline before it sends the release. A
    renewal in flight finds a key of another kind, or no key.

    The parent never declares a loss: it ignores the reply "not ours", which the child also gets.

    Threads and forks: ``sweep`` runs on this module's thread, ``start`` on the main thread. This
    class has its own store object, so the parent's releases do not wait for renewals. A fork waits
    until the thread is outside of the store's client: locks that it holds there (import, resolver,
    OpenSSL) would stay locked in the child.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from typing import Final

from ..core import native_threads, observers
from ..core.clock import Clock
from ..core.fork_locks import FORK_LOCKS
from ..core.heartbeat import interval_of, patience, retry_pause
from ..core.lease import Holder, Lease, LossReason, Token, trust_of
from ..core.process import lives
from ..core.store import Store
from ..core.store_requests import RENEWED, Renewal
from ..errors import StoreError
from .shared_memory import LeaseNote, RunningLease, SharedMemory

logger = logging.getLogger("celery_singleton_lock")

# Seconds between two reads of shared memory. A child can't wake this thread without a system call
# per lease, and a lease with the shortest ttl, 0.3 s, is due after 0.1 s.
_POLL_EVERY: Final = 0.1
# The share of the interval by which a child must be late, so that its own heartbeat usually renews.
_GRACE: Final = 0.1
# Seconds until the next sweep after an unexpected exception.
_PAUSE_AFTER_FAILURE: Final = 1.0


class ParentHeartbeat:
    """Renews the leases of starving children.

    Args:
        memory: The shared memory that the children write.
        store: A store that only this object uses.
        clock: The clock, which all processes of a host share.
    """

    def __init__(self, memory: SharedMemory, store: Store, clock: Clock) -> None:
        self._memory = memory
        self._store = store
        self._trusted = store.capabilities.trusted
        self._clock = clock
        #: By stamp, the time at which a lease may be renewed again after the last request.
        self._again_at: dict[int, float] = {}
        self._is_over: Callable[[], bool] = lambda: False

    def start(self, is_over: Callable[[], bool]) -> None:
        """Start the thread, which ends when ``is_over()`` is true; until then children may run.

        Called after the pool has forked its first children.
        """
        self._is_over = is_over
        native_threads.start_new_thread(self._run, "singleton-parent-heartbeat")

    def sweep(self) -> float:
        """Renew the leases that children are late with; return seconds until the next sweep.

        Called by the thread, and by tests with a manual clock.
        """
        now = self._clock.now()
        leases = [
            one for one in self._memory.of_living() if now < min(one.deadline, one.hold_until)
        ]
        stamps = {one.stamp for one in leases}
        self._again_at = {stamp: at for stamp, at in self._again_at.items() if stamp in stamps}
        late = [one for one in leases if self._due(one) <= now]
        if late:
            # Starving leases that would be due before the next renewal join the same pipeline.
            horizon = now + min(interval_of(one.ttl, self._trusted) for one in late)
            starving = [one for one in leases if one.parents > one.childs]
            self._renew(late + [one for one in starving if now < self._due(one) <= horizon])
        now = self._clock.now()
        coming = [at - now for one in leases if (at := self._due(one)) > now]
        return min([_POLL_EVERY, *coming])

    def _due(self, lease: RunningLease) -> float:
        # A deadline is trust_of() seconds after the time at which its renewal was sent.
        sent = lease.childs - trust_of(lease.ttl, self._trusted)
        childs_turn = sent + interval_of(lease.ttl, self._trusted) * (1 + _GRACE)
        return max(childs_turn, self._again_at.get(lease.stamp, 0.0))

    def _renew(self, late: list[RunningLease]) -> None:
        living = [one for one in late if lives(one.pid, one.start_time)]
        noted = [(one, note) for one in living if (note := self._memory.note_of(one))]
        if not noted:
            return
        leases = [_lease(one, note, self._clock) for one, note in noted]
        sent = self._clock.now()
        left = min(lease.valid_until for lease in leases) - sent
        timeout = patience(min(lease.ttl for lease in leases), left)
        try:
            with FORK_LOCKS["renewal"]:
                replies = self._store.leases.renew(leases, timeout=timeout)
        except Exception as exc:
            if not isinstance(exc, StoreError):
                logger.exception("singleton: unexpected error of the store; renewal is retried")
            replies = [LossReason.UNREACHABLE] * len(leases)
        for (one, note), reply in zip(noted, replies, strict=True):
            self._record(one, note, reply, sent)

    def _record(self, lease: RunningLease, note: LeaseNote, reply: Renewal, sent: float) -> None:
        """Process the reply to a renewal that was sent at ``sent``."""
        now = self._clock.now()
        if reply is LossReason.UNREACHABLE:
            self._again_at[lease.stamp] = now + retry_pause(lease.ttl, lease.deadline - now)
            return
        self._again_at[lease.stamp] = sent + interval_of(lease.ttl, self._trusted)
        if reply is RENEWED and now < lease.deadline:
            self._memory.advance(lease, sent + trust_of(lease.ttl, self._trusted))
            if lease.parents == -inf:  # the first renewal by the parent
                logger.info(
                    "singleton: pid %s doesn't renew %s; its worker does (a call that keeps the "
                    "GIL, or a stopped process)",
                    *(lease.pid, note.keys[0]),
                )
        # A reply after the deadline has no effect: the child has declared the loss.

    def _run(self) -> None:
        with observers.elsewhere():
            while not self._is_over():
                try:
                    pause = self.sweep()
                except Exception:
                    # This thread renews the leases of all starving children, so it must not end.
                    logger.exception("singleton: the parent heartbeat failed; it continues")
                    pause = _PAUSE_AFTER_FAILURE
                self._clock.sleep(pause)


def _lease(running: RunningLease, note: LeaseNote, clock: Clock) -> Lease:
    """The child's lease, with the fields that a store needs for a renewal."""
    return Lease(
        key=note.keys[0],
        token=Token.parse(note.token),
        ttl=running.ttl,
        holder=Holder(),
        valid_until=running.deadline,
        acquired_at=0.0,
        clock=clock,
        claim_key=note.claim if running.with_claim else "",
        process=None,
    )
