"""The worker parent's pulse: it renews what its children hold and can't renew themselves.

A C call that keeps the GIL starves every thread of its process, the heartbeat too (3 to 7 s
measured), but no thread of another process. So one thread of the worker parent looks at what the
children have written into the shared record, renews with the child's own token what the child is
late with, and notes there how long that vouches for. The child's ``check()`` and its heartbeat
read the note.

Promises
    A lease is renewed whatever its body does to the GIL, while parent and child live, until its
    ``max_hold``. A body that is shorter than ttl/3 and one whose heartbeat is on time cost no round
    trip here. One thread a worker, whatever it runs, and a second one while releases are retried.

Does not promise
    Anything in other pools, where the body's process is the worker itself, or in a store that ties
    a lease to its holder's connection (ZooKeeper). Anything for a child's ninth lease at once.

What it must not do, and why it doesn't
    *Keep a dead child's lease.* Before each renewal the child is looked up by id and birth, and a
    zombie is dead. What was sent at that very moment prolongs the key once, and the release on
    proof of death (see ``request``) doesn't mind. A stopped child (SIGSTOP) lives: its body isn't
    over, and would wake up believing in its lease.
    *Bring back a lost lease.* The child declares losses, at the deadline that both have noted;
    behind that, here too, nothing is renewed or noted. The store's renewal writes no key anew.
    *Renew what was released.* The child erases its half of the note before it asks for the
    release, so a release that never reached the store isn't undone here. A renewal that is under
    way meanwhile meets another kind of key, or none: "not yours", as for the heartbeat.
    *Decide.* "Not yours" is ignored, for the child hears it too, and may know why.

States of a lease here::

    young --1.1 ttl/3 without a renewal--> late --answer--> kept --ttl/3--> late
      ^                                     |  ^             |
      |                                     |  +--no answer--+ (again after a pause)
      +--the child's heartbeat renews it-------+----------------+
    gone from any state: deadline, max_hold, death, released, lost

Threads and forks
    ``sweep`` runs on the pulse's own thread, ``start`` and ``finish`` on the main one, which is the
    event loop of Celery: nothing here blocks it but a fork, see
    :meth:`ParentHeartbeat._before_fork`. The store is the pulse's own, so no release of the parent
    waits for a renewal. The parent releases a dead child's leases itself, until the store does not
    answer. Then ``catch_up`` retries them on a thread that runs only while some are left: one part
    of the store (a shard, a node) may be silent, and no look at the children waits for its timeout.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import ClassVar, Final
from weakref import WeakSet

from celery_singleton_lock.core import native
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lease import Holder, Lease, LossReason, Token, trust_of
from celery_singleton_lock.core.pace import interval_of, patience, retry_pause
from celery_singleton_lock.core.store import RENEWED, Renewal, Store
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.worker.deadline_cells import Share
from celery_singleton_lock.worker.process_identity import lives
from celery_singleton_lock.worker.shared_memory import Held, HeldByLiving, SharedMemory

__all__ = ["ParentHeartbeat"]

logger = logging.getLogger("celery_singleton_lock")

# Seconds from one look at the record to the next. A child can't wake this thread without a system
# call per lease, and the shortest ttl, 0.3 s, is due after 0.1 s. A look costs some microseconds.
_LOOK_EVERY: Final = 0.1
# Of the interval: how late a child has to be. Its heartbeat comes first whenever it can.
_GRACE: Final = 0.1
# Seconds that a fork waits for an answer of the store: forks are rare, and the store answers within
# a millisecond, or it is away.
_FORK_PATIENCE: Final = 0.2
# Seconds; of a failure that is a defect of ours.
_PAUSE_AFTER_FAILURE: Final = 1.0
# Seconds from a request that the store did not answer to the next one.
_PAUSE_AFTER_SILENCE: Final = 1.0
# Most requests that wait for the store; what comes on top of them is left to its ttl.
_MAX_LEFT: Final = 1000

#: A request to the store, and until when it is retried.
_Left = tuple[Callable[[Store], object], float]


class ParentHeartbeat:
    """Renews, in the worker parent, what starving children hold.

    Args:
        record: What the children write.
        store: For the pulse alone.
        clock: The children's, which is one for all processes of a host.
    """

    #: The one of this worker's parent; set after the pool's first fork.
    running: ClassVar[ParentHeartbeat | None] = None

    def __init__(self, record: SharedMemory, store: Store, clock: Clock) -> None:
        self._record = record
        self._store = store
        self._clock = clock
        #: When it is this pulse's turn again, by stamp, whatever the store answered last.
        self._again_at: dict[int, float] = {}
        #: What this pulse has renewed, by stamp.
        self._kept: set[int] = set()
        self._is_over: Callable[[], bool] = lambda: False
        # Each is held while its thread is inside the store's client, and by a fork.
        self._renewing, self._retrying = threading.Lock(), threading.Lock()
        self._held_by_fork: list[threading.Lock] = []
        # What this pulse has not asked yet, which comes first, and what it got no answer to.
        self._left: deque[_Left] = deque()
        self._unanswered: deque[_Left] = deque()
        self._retry_at = 0.0
        self._has_retry_thread = False

    def start(self) -> None:
        """Start the thread; after the pool has forked its first children."""
        _watch_forks()
        _running.add(self)
        native.start_new_thread(self._run, "singleton-pulse")

    def finish(self, is_over: Callable[[], bool]) -> None:
        """End the thread once ``is_over()``; until then children may run."""
        self._is_over = is_over

    @property
    def has_left(self) -> bool:
        """Whether releases wait to be retried, because the store did not answer."""
        # The thread takes out what it asks: it may be asking the only one.
        return self._has_retry_thread or bool(self._left or self._unanswered)

    def leave(self, ask: Callable[[Store], object], ttl: float) -> bool:
        """Have ``ask`` retried until the store answers, for ``ttl`` seconds at most.

        Returns:
            False if too many wait already: then ``ask`` is not carried out.
        """
        if len(self._left) + len(self._unanswered) >= _MAX_LEFT:
            return False
        self._left.append((ask, self._clock.now() + ttl))
        return True

    def catch_up(self) -> None:
        """Retry what was left, until one request gets no answer; a thread of its own calls this.

        That one goes to the end, since the others may be for parts of the store that answer.
        """
        while (queue := self._left or self._unanswered) and self._clock.now() >= self._retry_at:
            ask, until = queue.popleft()
            now = self._clock.now()
            if now >= until:
                continue
            try:
                with self._retrying:
                    ask(self._store)
            except StoreUnavailable:
                self._unanswered.append((ask, until))
                self._retry_at = now + _PAUSE_AFTER_SILENCE
                return
            except StoreError as exc:
                logger.warning("singleton: the store refused a dead child's release: %s", exc)
            except Exception:
                logger.exception("a dead child's release failed as it should not; it is dropped")

    def sweep(self) -> float:
        """Renew what children are late with; seconds until the next look.

        The thread calls this; a test with a manual clock may.
        """
        now = self._clock.now()
        held = [one for one in self._record.of_living() if now < _end(one.share)]
        stamps = {one.share.stamp for one in held}
        self._kept &= stamps
        self._again_at = {stamp: at for stamp, at in self._again_at.items() if stamp in stamps}
        late = [one for one in held if self._due(one.share) <= now]
        if late:
            # With it what is starving too and would be late before the next turn: one pipeline.
            horizon = now + min(interval_of(one.share.ttl, one.share.trusted) for one in late)
            late += [
                one
                for one in held
                if one.share.parents > one.share.childs and now < self._due(one.share) <= horizon
            ]
            self._renew(late)
        now = self._clock.now()
        coming = [at - now for one in held if (at := self._due(one.share)) > now]
        return min([_LOOK_EVERY, *coming])

    def _due(self, share: Share) -> float:
        trust = trust_of(share.ttl, share.trusted)
        interval = interval_of(share.ttl, share.trusted)
        # A deadline lies that much behind the sending of the renewal that it comes from.
        childs_turn = share.childs - trust + interval * (1 + _GRACE)
        return max(childs_turn, self._again_at.get(share.stamp, 0.0))

    def _renew(self, late: list[HeldByLiving]) -> None:
        named = [
            (one.share, one, held)
            for one in late
            if lives(one.pid, one.birth) and (held := self._record.name(one))
        ]
        if not named:
            return
        leases = [_lease(one.pid, share, held, self._clock) for share, one, held in named]
        sent = self._clock.now()
        try:
            replies = self._ask(leases, sent)
        except Exception as exc:
            if not isinstance(exc, StoreError):
                logger.exception("the store failed as it should not; it is asked again")
            replies = [LossReason.UNREACHABLE] * len(leases)
        for (share, one, held), reply in zip(named, replies, strict=True):
            self._take(share, one, held, reply, sent)

    def _ask(self, leases: list[Lease], now: float) -> list[Renewal]:
        left = min(lease.valid_until for lease in leases) - now
        timeout = patience(min(lease.ttl for lease in leases), left)
        with self._renewing:
            return self._store.renew(leases, timeout=timeout)

    def _take(
        self, share: Share, one: HeldByLiving, held: Held, reply: Renewal, sent: float
    ) -> None:
        now = self._clock.now()
        if reply is LossReason.UNREACHABLE:
            self._again_at[share.stamp] = now + retry_pause(share.ttl, share.deadline - now)
        elif reply is not RENEWED:
            self._again_at[share.stamp] = sent + interval_of(share.ttl, share.trusted)
        elif now < share.deadline:
            self._record.advance(one, sent + trust_of(share.ttl, share.trusted))
            self._again_at[share.stamp] = sent + interval_of(share.ttl, share.trusted)
            if share.stamp not in self._kept:
                self._kept.add(share.stamp)
                logger.info(
                    "singleton: pid %s doesn't renew %s; its worker does (a call that keeps the "
                    "GIL, or a stopped process)",
                    one.pid,
                    held.keys[0],
                )
        # Else the reply came after the deadline: lost for good, as the child sees it.

    def _run(self) -> None:
        while not self._is_over():
            try:
                pause = self.sweep()
                if self.has_left and not self._has_retry_thread:
                    self._start_retry_thread()
            except Exception:
                # This thread is what keeps the leases of all starving children; it must not end.
                logger.exception("the pulse failed; it goes on")
                pause = _PAUSE_AFTER_FAILURE
            self._clock.sleep(pause)

    def _start_retry_thread(self) -> None:
        self._has_retry_thread = True
        try:
            native.start_new_thread(self._retry, "singleton-pulse-retry")
        except RuntimeError:  # no more threads for this process now: the next look tries again
            self._has_retry_thread = False

    def _retry(self) -> None:
        try:
            while (self._left or self._unanswered) and not self._is_over():
                self.catch_up()
                self._clock.sleep(max(0.0, self._retry_at - self._clock.now()))
        finally:
            self._has_retry_thread = False

    def _before_fork(self) -> None:
        """The forking thread: no child is made while the pulse is inside the store's client.

        What its threads hold there (the locks of the import system, of the resolver, of OpenSSL)
        would stay held in the child for ever.
        """
        locks = (self._renewing, self._retrying)
        self._held_by_fork = [lock for lock in locks if lock.acquire(timeout=_FORK_PATIENCE)]

    def _after_fork(self) -> None:
        while self._held_by_fork:
            self._held_by_fork.pop().release()


# Python can't unregister a fork hook. So the hooks are functions of this module, with weak
# references to the pulses: a pulse and its shared memory are freed when its thread has ended.
_running: WeakSet[ParentHeartbeat] = WeakSet()


@cache
def _watch_forks() -> None:
    # A child has no pulse. Its copy of the lock stays held, and its own forks would wait for it.
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_running.clear
    )


def _before_fork() -> None:
    for pulse in list(_running):
        pulse._before_fork()


def _after_fork() -> None:
    for pulse in list(_running):
        pulse._after_fork()


def _end(share: Share) -> float:
    """When nobody may renew it any more."""
    return min(share.deadline, share.hold_until)


def _lease(pid: int, share: Share, held: Held, clock: Clock) -> Lease:
    """The child's lease as far as a store needs it."""
    return Lease(
        key=held.keys[0],
        token=Token.parse(held.token),
        ttl=share.ttl,
        holder=Holder(),
        valid_until=share.deadline,
        acquired_at=0.0,
        clock=clock,
        claim_key=held.claim if share.with_claim else "",
        trusted=share.trusted,
        process=pid,
    )
