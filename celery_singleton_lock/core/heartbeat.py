"""The heartbeat: one thread of a process renews all of its leases at once.

Promises
    Each registered lease is renewed every ttl/3, all of them in one pipeline; of a store that can
    answer piece by piece, some are noted while it has the others. A renewal answered "not yours" is
    a loss at once. No answer means try again until ``valid_until``; then the lease is lost for
    good, whatever the store says later. A loss is reported once, before anybody else can hold the
    key, unless this thread starves.

Does not promise
    To run while a C call in the body holds the GIL. In a prefork worker the parent renews then (see
    ``parent_heartbeat``), and its renewals count here too: a lease is lost at the later one of
    both deadlines. Elsewhere ``lease.check()`` after the call tells, by the clock.

States of a lease here::

    add() -> renewing --"not yours"----------------------> lost (gone, replaced)
               |  ^ \\--no answer--> retrying --deadline--> lost (unreachable)
               |  +--------answer-------/
               +--"dying"--> gone: the worker parent has told the outcome, and ends this process
               +--max_hold reached--> ending --deadline--> lost (expired)
    discard() from any state: a late reply is ignored
    let_go() from any state: as discard(); but when the lease's next turn would have come, the store
    is asked what it has heard of the release that nobody waited for

Threads
    ``add``, ``discard`` and ``declare`` run on the bodies' threads, ``sweep`` on the heartbeat's
    own. The guard is held for dictionary operations only, never over I/O. After a fork the child
    has none of this: its runtime makes a new heartbeat.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final

from celery_singleton_lock.core import native
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.entry import Entry, note_renewed
from celery_singleton_lock.core.events import Event, EventName, Events
from celery_singleton_lock.core.lease import Lease, Loss, LossReason, reason_of_loss
from celery_singleton_lock.core.pace import MAX_TIMEOUT, patience, timeout_for
from celery_singleton_lock.core.store import RENEWED, Renewal, Store
from celery_singleton_lock.errors import StoreError

__all__ = ["MAX_TIMEOUT", "Heartbeat", "timeout_for"]

logger = logging.getLogger("celery_singleton_lock")

# Renewals of many processes that started together shall not come together: the first of each lease
# is up to a tenth early. Only the first: of a thousand leases the earliest would always win.
_JITTER: Final = 0.1
# Seconds; of a failure that is a defect of ours.
_PAUSE_AFTER_FAILURE: Final = 1.0
_FOREVER: Final = float("inf")
# What a sweep reads of thousands, without a step of Python for each.
_TURN, _INTERVAL = attrgetter("turn"), attrgetter("interval")
_TTL, _VALID_UNTIL = attrgetter("ttl"), attrgetter("valid_until")
# The replies that a silent store is waited for, one after the other, where it is asked about posted
# releases: the one that it owes, and those to two tries to make the release again.
_WAITS: Final = 3
# Leases whose renewal is noted after one look at the clock: some tens of microseconds' work.
_PER_LOOK: Final = 64


class Heartbeat:
    """Renews the leases of one process and declares losses."""

    def __init__(self, store: Store, clock: Clock, events: Events) -> None:
        self._store = store
        self._clock = clock
        self._events = events
        self._entries: dict[int, Entry] = {}
        # Of leases whose release nobody waits for: when to ask, and how.
        self._let_go: dict[Lease, tuple[float, Callable[..., None]]] = {}
        self._guard: Any = native.allocate_lock()
        self._alarm: Any = native.allocate_lock()  # released to wake the thread; see _ring
        self._alarm.acquire()
        self._wakes_at = 0.0
        # The shortest interval, in seconds, of the leases that came since the last sweep.
        self._shortest = float("inf")
        self._running = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, lease: Lease, on_lost: Callable[[Lease], None]) -> None:
        """Renew ``lease`` until :meth:`discard`; ``on_lost`` is called on the heartbeat's
        thread."""
        entry = Entry(lease, on_lost, _JITTER * random.random())
        with self._guard:
            self._entries[id(lease)] = entry
            if entry.interval < self._shortest:
                self._shortest = entry.interval
            start = not self._running
            ring = entry.turn < self._wakes_at
        if start:
            # The thread itself says that it runs. Were it said here, a start that failed or was
            # interrupted would leave every later lease of the process without a heartbeat.
            native.start_new_thread(self._run, "singleton-heartbeat")
        elif ring:
            self._ring()

    def discard(self, lease: Lease) -> Entry | None:
        """Stop renewing ``lease``; a reply under way is ignored.

        Returns:
            What there was of it; None: it was renewed no more, or its loss is told already.
        """
        # One dictionary operation needs no guard, and an exception thrown into this thread (a soft
        # time limit) must not find it held.
        entry = self._entries.pop(id(lease), None)
        lease.end()
        return entry

    def declare(self, lease: Lease) -> None:
        """Declare ``lease`` lost, unless that is done: its holder saw it end before this thread."""
        entry = self._entries.get(id(lease))
        if entry is not None:
            self._lose_overdue(entry, self._clock.now())

    def let_go(self, lease: Lease, collect: Callable[..., None]) -> bool:
        """As :meth:`discard`; ``collect`` is called at its next turn, if it isn't confirmed before.

        The thread has planned that turn already: to be woken by each release would cost the body as
        much as a round trip. False: the lease isn't renewed, and has no turn.
        """
        entry = self._entries.get(id(lease))
        if entry is None:
            return False
        # As early as any lease of this kind has its turn, so that the next one doesn't wake the
        # thread either. Noted here before it is gone there: a sweep in between finds it in one.
        due = lease.acquired_at + entry.interval * (1 - _JITTER)
        self._let_go[lease] = due, collect
        self.discard(lease)
        return True

    def sent(self, lease: Lease, collect: Callable[..., None]) -> None:
        """The release of what was let go is on its way: its turn comes from now on.

        A short ttl's may have come since :meth:`let_go`, and found nothing to hear of.
        """
        if lease not in self._let_go:
            self._let_go[lease] = self._clock.now(), collect
            self._ring()

    def confirmed(self, lease: Lease) -> None:
        """Its release was heard of, or is waited for."""
        self._let_go.pop(lease, None)

    def ask(self, lease: Lease) -> None:
        """Renew ``lease`` now, on this thread, and declare it lost if it is."""
        entry = self._entries.get(id(lease))
        if entry is not None:
            self._renew([entry])

    def close(self) -> None:
        """End the thread; leases still registered are renewed no more."""
        self._closed = True
        self._ring()

    def sweep(self) -> float | None:
        """Renew what is due, declare what is lost; seconds until it is needed again, None if never.

        The thread calls this; a test with a manual clock may.
        """
        self._declare_overdue()
        batch = self._due()
        if batch:
            self._renew(batch)
            self._declare_overdue()
        self._collect()
        now = self._clock.now()
        with self._guard:
            shortest, self._shortest = self._shortest, float("inf")
            entries = self._snapshot()
            if min(map(_TURN, entries), default=_FOREVER) <= now:
                for entry in entries:
                    # Another process has put its deadline off, or its renewal has ended meanwhile.
                    entry.plan(entry.due, now)
            turns = [due for due, _ in list(self._let_go.values())]
            turns += map(_TURN, entries)
            if turns:
                self._wakes_at = min(turns)
            else:
                # The next short body's lease has likely no shorter interval, so it needn't wake
                # this thread: that costs each body as much as a round trip. Once nothing has come
                # for an interval, the thread sleeps on.
                self._wakes_at = now + shortest * (1 - _JITTER)
            return None if self._wakes_at == float("inf") else max(0.0, self._wakes_at - now)

    def _collect(self) -> None:
        now = self._clock.now()
        waiting = list(self._let_go.items())
        overdue = [(lease, collect) for lease, (due, collect) in waiting if due <= now]
        for lease, _ in overdue:
            self._let_go.pop(lease, None)  # asked once
        for collect in {collect for _, collect in overdue}:
            try:
                collect(timeout=self._patience(now, [lease for lease, _ in overdue], _WAITS))
            except Exception:
                logger.exception("nothing was heard of releases that nobody waited for")
        if overdue:
            self._declare_overdue()

    def _snapshot(self) -> list[Entry]:
        # One step of the interpreter: a release takes no guard, and may come between any two
        # entries of a loop over the dictionary.
        return list(self._entries.values())

    def _due(self) -> list[Entry]:
        """What is due, and with it what would be before the next sweep: one pipeline, not two."""
        now = self._clock.now()
        entries = self._snapshot()
        if not any(entry.due <= now < entry.ends for entry in entries):
            return []
        horizon = now + min(map(_INTERVAL, entries))
        return [entry for entry in entries if now < entry.ends and entry.due <= horizon]

    def _renew(self, batch: list[Entry]) -> None:
        leases = [entry.lease for entry in batch]
        sent = self._clock.now()
        others: list[tuple[Entry, Renewal]] = []
        known = 0
        try:
            for replies in self._ask(leases, self._patience(sent)):
                others += self._note(batch[known : known + len(replies)], replies, sent)
                known += len(replies)
        except Exception as exc:
            if not isinstance(exc, StoreError):
                logger.exception("the store failed as it should not; it is asked again")
            now = self._clock.now()
            for entry in batch[known:]:
                entry.postpone(str(exc), now)
        # Who hears of a loss may take time over it: nobody's renewal waits for that.
        for entry, reply in others:
            self._take(entry, reply)

    def _ask(self, leases: list[Lease], timeout: float) -> Iterator[Sequence[Renewal]]:
        size = self._store.capabilities.renewal_batch or len(leases)
        for start in range(0, len(leases), size):
            yield self._store.renew(leases[start : start + size], timeout=timeout)

    def _note(
        self, batch: list[Entry], replies: Sequence[Renewal], sent: float
    ) -> list[tuple[Entry, Renewal]]:
        """Note what was renewed; the others are returned, with what they are."""
        others: list[tuple[Entry, Renewal]] = []
        if replies.count(RENEWED) < len(replies):
            named = [*zip(batch, replies, strict=True)]
            others = [one for one in named if one[1] is not RENEWED]
            batch = [entry for entry, reply in named if reply is RENEWED]
        for start in range(0, len(batch), _PER_LOOK):
            some = batch[start : start + _PER_LOOK]
            # But for what was released meanwhile; and what is renewed too late is overdue.
            some = [entry for entry in some if id(entry.lease) in self._entries]
            note_renewed(some, sent, self._clock.now())
        return others

    def _patience(self, now: float, others: list[Lease] | None = None, waits: int = 1) -> float:
        """Seconds to wait for each of so many replies, about ``others`` or what is renewed."""
        # At its deadline a body is told of its loss, so nobody waits for a reply beyond that; and
        # not of who is asked about alone: who isn't due yet waits for this reply too.
        leases = [entry.lease for entry in self._snapshot()]
        left = min(map(_VALID_UNTIL, leases), default=_FOREVER) - now
        if left < waits * MAX_TIMEOUT:  # else it doesn't matter that others have put off a deadline
            left = min([lease.deadline for lease in leases]) - now
        return patience(min(map(_TTL, chain(leases, others or ())), default=_FOREVER), left / waits)

    def _take(self, entry: Entry, reply: Renewal) -> None:
        """What another reply than "renewed" means."""
        if id(entry.lease) not in self._entries:
            return  # released meanwhile
        if reply is LossReason.DYING:
            self.discard(entry.lease)
        elif reply is LossReason.UNREACHABLE:
            entry.postpone("its part of the store doesn't answer", self._clock.now())
        else:
            reason, detail = reason_of_loss(entry.lease, reply is LossReason.REPLACED)
            self._lose(entry, reason, detail)

    def _declare_overdue(self) -> None:
        now = self._clock.now()
        entries = self._snapshot()
        if min(map(_TURN, entries), default=_FOREVER) > now:
            return
        overdue = [one for one in entries if one.turn <= now and now >= one.lease.valid_until]
        for entry in [one for one in overdue if now >= one.lease.deadline]:
            self._lose_overdue(entry, now)

    def _lose_overdue(self, entry: Entry, now: float) -> None:
        if entry.failures:
            detail = f"{entry.failures} renewals failed: {entry.error}"
            self._lose(entry, LossReason.UNREACHABLE, detail)
        elif now >= entry.ends:
            detail = f"max_hold of {entry.lease.max_hold} s reached"
            self._lose(entry, LossReason.EXPIRED, detail)
        else:
            self._lose(entry, LossReason.EXPIRED, "the process was stopped or starved")

    def _lose(self, entry: Entry, reason: LossReason, detail: str) -> None:
        lease = entry.lease
        if self._entries.pop(id(lease), None) is None:
            return  # released meanwhile, and that thread reports how it ended
        lease.reported = True
        lease.loss = Loss(reason=reason, at=min(self._clock.now(), lease.deadline), detail=detail)
        lease.end()
        # The body first: it may be writing. Telling of it can wait.
        try:
            entry.on_lost(lease)
        except Exception:
            logger.exception("telling the holder of %r of its loss failed", lease.key)
        self._events.emit(
            Event(
                name=EventName.LOST,
                key=lease.key,
                task=lease.holder.task,
                task_id=lease.holder.task_id,
                holder=lease.holder,
                data={"reason": str(reason), "detail": detail},
            )
        )

    def _ring(self) -> None:
        try:
            self._alarm.release()
        except RuntimeError:
            pass  # rung already, and not heard yet: once is enough

    def _run(self) -> None:
        with self._guard:
            if self._running:
                return  # two bodies came first, and each started a thread
            self._running = True
        while not self._closed:
            try:
                pause = self.sweep()
            except Exception:
                # This thread is what keeps every lease of the process; it must not end.
                logger.exception("the heartbeat failed; it goes on")
                pause = _PAUSE_AFTER_FAILURE
            self._alarm.acquire(timeout=-1 if pause is None else min(pause, 3600.0))
