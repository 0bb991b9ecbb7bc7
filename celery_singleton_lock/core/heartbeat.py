"""The heartbeat: one thread per process renews all leases of the process and declares losses.

Overview
    Each lease is renewed three times in the time that the store guarantees (`interval_of`): every
    ttl/3, or sooner where `Capabilities.trusted` is less than the whole ttl. The first renewal
    comes up to a tenth early. Leases that are due before the next sweep are renewed together, in
    batches of `Capabilities.renewal_batch`. Between two sweeps the thread sleeps on an `Alarm`.
    When a connection to the store ends, all leases are renewed soon (`hasten`), because a server
    that has lost its data has lost its connections too.

Guarantees
    A lease that the store no longer has is lost at its next renewal. On Linux that renewal is early
    in two cases. If the connections ended with the data (a restart, a failover), it is less than a
    second after the store answers again. If the machine was suspended, it is when it resumes.
    A renewal without a reply is repeated until the deadline; then the lease is lost, and a later
    reply does not revive it.
    A loss is reported once, and before another client can hold the key, unless this thread starves.
    The replies of one batch take effect before the next batch is sent.
    This thread runs no log handler and no receiver of a signal: see `core.observers`. The body of a
    lost lease is interrupted before any observer of the loss runs.

Non-guarantees
    The loss of a single key, or of all keys of a server that keeps its connections (FLUSHALL), is
    found at the next renewal by the clock. So is each loss if the store does not report its
    connections (`Store.watch_connections`).
    This thread does not run while a C call in the body holds the GIL. In a prefork worker the
    parent then renews (see ``parent_heartbeat``), and the later of the two deadlines counts. In
    other pools ``lease.check()`` after the C call detects the loss by the clock.

State model::

    add() -> renewing --"not yours"----------------------> lost (gone, replaced, operator)
               |  ^ \\--no reply--> retrying --deadline--> lost (unreachable)
               |  |
               |  +--a connection has ended: due within 0.3 s, at random
               |  +--------reply--------/
               +--"dying"--> removed: the worker parent has reported the end of this process
               +--max_hold reached--> ending --deadline--> lost (expired)
    stop() from any state: removed, a late reply is ignored
    let_go() from any state: as stop(), for an asynchronous release. The store is drained at the
    time of the next renewal, or of the release's event, unless the release was confirmed before

Failure handling
    Connections that end one after the other cause one renewal per `_MAX_RETRY_PAUSE`. While the
    store does not answer, the retries continue at their own pace, whatever connections end.
    A failed sweep is logged and repeated: the thread never ends before close(). ``add``,
    ``stop`` and ``lose`` run on the threads of the bodies, ``sweep`` on the heartbeat's own.
    They share the registry of leases without a lock: each of its changes is one step of the
    interpreter. A forked child creates a new heartbeat (see `Runtime.of`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from random import random, uniform
from typing import Any, Final, TypeAlias

from ..errors import StoreError
from . import native_threads, observers
from .alarm import make_alarm
from .clock import Clock
from .events import EventName, Events
from .keyspace import Keyspace
from .lease import Lease, Loss, LossReason, Token, reason_of_loss, trust_of
from .newest_call_polls import NewestCallPolls
from .outages import Outages
from .store import Store
from .store_requests import NewestCall, Renewal

logger = logging.getLogger("celery_singleton_lock")

# Spreads the renewals of processes that started together: the first renewal of each lease is up to
# a tenth early. Later renewals have no jitter: in a batch of a thousand leases the earliest one
# would always determine the time.
_JITTER: Final = 0.1
_EARLIEST: Final = 1 - _JITTER
#: Seconds to wait for the reply that explains a loss. Renewals, and the body, wait meanwhile.
NOTES_TIMEOUT: Final = 0.2
# The replies for a lease that is not in the store any more.
_TAKEN: Final = (LossReason.GONE, LossReason.REPLACED)
# Seconds until the next sweep after a sweep that raised an unexpected exception.
_PAUSE_AFTER_FAILURE: Final = 1.0
# Seconds between two looks of a closed heartbeat for the end of its last lease.
_PAUSE_WHEN_CLOSED: Final = 1.0
_FOREVER: Final = float("inf")
# Getters for a sweep, which reads each lease: they need no Python frame per item.
_SWEEP_AT, _TTL = attrgetter("sweep_at"), attrgetter("ttl")
_VALID_UNTIL = attrgetter("valid_until")
# The number of replies that draining may wait for in sequence while the store does not answer: the
# pending reply, and the replies to two tries to resend the release.
_WAITS: Final = 3

_SILENT_PART: Final = "its part of the store doesn't answer"

# Three renewals fit in a ttl: two may fail before the lease is at risk.
_RENEWALS_PER_TTL: Final = 3
# A reply that takes longer than ttl/6 leaves no time for another try; 2 s is long for any store.
# Timeouts are rounded to steps, because a store pools its connections by timeout: each exact
# remaining time would need its own connection.
_TIMEOUTS_PER_TTL: Final = 6
_TIMEOUT_STEPS: Final = (2.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
MAX_TIMEOUT: Final = _TIMEOUT_STEPS[0]
_MIN_TIMEOUT: Final = 0.05
# Pauses while the store does not answer: short enough to notice its return soon, long enough not to
# overload it.
_RETRY_RATIO: Final = 0.05
# This and the time of a renewal are less than a second together: a loss is reported within a second
# after the store answers again.
_MAX_RETRY_PAUSE: Final = 0.95
_MIN_RETRY_PAUSE: Final = 0.01
# The share of a pause that is random. All processes notice the end of a server at once, and must
# not ask its successor at once.
_RETRY_JITTER: Final = 0.1
# The end of a connection causes a renewal after this number of seconds, at random. Not at once: the
# other connections of the server end one after the other, and the store may use one that was in use
# a moment ago without a check whether it has ended.
_SPREAD: Final = (0.02, 0.3)


#: Called on the heartbeat's thread if a lease is lost before its release. Returns what becomes of
#: the body, for the event; None: it goes on until it checks its lease.
LossHandler: TypeAlias = Callable[[Lease], str | None]


class Heartbeat:
    """Renews the leases of one process and declares losses.

    Attributes:
        renews_by_thread: Whether a thread of its own does so; else only calls of `sweep`.
    """

    renews_by_thread = True

    def __init__(
        self, store: Store, clock: Clock, events: Events, outages: Outages | None = None
    ) -> None:
        self._store = store
        self._trusted = store.capabilities.trusted
        self._clock = clock
        self._events = events
        #: The outages of the store, which the locker notes too.
        self.outages = outages or Outages(events, clock)
        # The leases that are renewed, each with the function that is called if it is lost.
        self._leases: dict[Lease, LossHandler] = {}
        # Asynchronous releases without a reply, each with the time at which to drain the store.
        self._let_go: dict[Lease, float] = {}
        # When the thread wakes for the event of an asynchronous release. It keeps this time if the
        # release is confirmed before: then a busy process wakes it once, not for each release.
        self._report_at = _FOREVER
        self._polls = NewestCallPolls(store, clock)
        self._alarm = make_alarm()
        store.watch_connections(self._alarm)
        # The time of the last renewal that the end of a connection caused.
        self._hastened_to = 0.0
        self._wakes_at = 0.0
        # The shortest interval, in seconds, of the leases that were added since the last sweep.
        self._shortest = _FOREVER
        self._running = False
        self._start: Any = native_threads.allocate_lock()  # held by the thread that runs
        self._closed = False

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, lease: Lease, on_lost: LossHandler) -> None:
        """Renew ``lease`` until :meth:`stop`; ``on_lost`` is called on the heartbeat's
        thread."""
        interval = interval_of(lease.ttl, self._trusted)
        lease.due = due = lease.acquired_at + interval * (1 - _JITTER * random())
        lease.sweep_at = sweep_at = due if due < lease.valid_until else lease.valid_until
        lease.failures = 0
        if interval < self._shortest:
            self._shortest = interval
        self._leases[lease] = on_lost  # before _wakes_at is read: see sweep()
        if not self._running:
            if not self.renews_by_thread:
                return
            # The new thread sets _running. If this method set it, a start that failed or was
            # interrupted would leave every later lease of the process without a heartbeat.
            native_threads.start_new_thread(self._run, "singleton-heartbeat")
        elif sweep_at < self._wakes_at:
            self._alarm.ring()

    def stop(self, lease: Lease) -> None:
        """Stop renewing ``lease``; the reply to a renewal in flight is ignored."""
        # One dictionary operation needs no lock, and an exception thrown into this thread (a soft
        # time limit) must not find it held.
        self._leases.pop(lease, None)
        lease.end()

    def watch(self, lease: Lease, within: float, on_newest: Callable[[NewestCall], None]) -> None:
        """Poll every ``within`` seconds for the newest call of the key, until the lease ends.

        Args:
            lease: A lease that is being renewed.
            within: Seconds.
            on_newest: Called on the heartbeat's thread with the newest call, at each poll.
        """
        if self._polls.watch(lease, within, on_newest) < self._wakes_at:
            self._alarm.ring()

    def lose(self, lease: Lease) -> None:
        """Declare ``lease`` lost if its deadline has passed; its holder may notice that first."""
        if lease in self._leases:
            self._lose_overdue(lease, self._clock.now())

    def let_go(self, lease: Lease) -> bool:
        """As :meth:`stop`, for an asynchronous release, whose reply is still to be read.

        The store is drained at the time of the lease's next renewal, unless the release is
        confirmed before. The thread would wake then for the renewal. To wake it for the release
        would cost the body as much as a round trip.

        Returns:
            Whether the lease was being renewed; if not, the store is not drained.
        """
        if lease not in self._leases:
            return False
        # The earliest time of the first renewal of such a lease, so that the next lease does not
        # wake the thread either. The release is added before the lease is removed from _leases, so
        # that a sweep in between finds one of them.
        interval = interval_of(lease.ttl, self._trusted)
        self._let_go[lease] = lease.acquired_at + _EARLIEST * interval
        self._leases.pop(lease, None)
        lease.end()
        return True

    def sent(self, lease: Lease) -> None:
        """The asynchronous release of ``lease`` was sent.

        With a short ttl, the drain may have run between :meth:`let_go` and this call, before there
        was a release to drain. In that case it is repeated now.
        """
        if lease not in self._let_go:
            self._let_go[lease] = self._clock.now()
            self._alarm.ring()

    def report_by(self, lease: Lease, by: float) -> None:
        """Drain the store at the time ``by`` at the latest, unless the release is confirmed before.

        For an asynchronous release whose event is awaited; call this after :meth:`sent`.
        """
        due = self._let_go.get(lease, by)
        if by < due:
            self._let_go[lease] = by  # before _wakes_at is read: see sweep()
            if by < self._wakes_at:
                self._report_at = by
                self._alarm.ring()

    def confirmed(self, lease: Lease) -> None:
        """The asynchronous release was acknowledged, or a synchronous release replaces it."""
        self._let_go.pop(lease, None)

    def find(self, token: Token) -> Lease | None:
        """The lease with this token, if it is being renewed."""
        return next((lease for lease in self._snapshot() if lease.token == token), None)

    def ask(self, lease: Lease) -> None:
        """Renew ``lease`` now, on the calling thread; declare it lost if the store lost it."""
        if lease in self._leases:
            self._renew([lease])

    def close(self) -> None:
        """End the thread, within a second after the last lease has ended.

        The store is drained before, if there are asynchronous releases without a reply.
        """
        self._closed = True
        for lease in list(self._let_go):
            self._let_go[lease] = self._clock.now()
        self._alarm.ring()

    def sweep(self) -> float | None:
        """Renew the leases that are due and declare the lost ones.

        The heartbeat's thread calls this; a test with a manual clock may call it too.

        Returns:
            Seconds until the next sweep is needed; None: no sweep is needed.
        """
        self._declare_overdue()
        batch = self._due()
        if batch:
            self._renew(batch)
            self._declare_overdue()
        self._collect()
        if self._polls.poll(self._leases, self._patience):
            self._declare_overdue()
        now = self._clock.now()
        # A lease that is added from here on wakes the thread, unless the snapshot below has it: its
        # sweep_at is compared with _wakes_at after the lease is in _leases.
        self._wakes_at = _FOREVER
        shortest, self._shortest = self._shortest, _FOREVER
        leases = self._snapshot()
        if min(map(_SWEEP_AT, leases), default=_FOREVER) <= now:
            for lease in leases:
                # The worker parent has extended the deadline, or max_hold has ended renewal.
                _plan(lease, lease.due, now)
        times = [*self._let_go.values(), *self._polls.due_times(), *map(_SWEEP_AT, leases)]
        if now < self._report_at < _FOREVER:
            times.append(self._report_at)
        # If there is no lease, this thread wakes once more, when the renewal of a lease that is
        # added now would be due, if its interval is no shorter than those before. So adding it does
        # not have to wake this thread, which would cost the body as much as a round trip. After an
        # interval without a lease, the thread sleeps until it is woken.
        self._wakes_at = wakes_at = min(times) if times else now + shortest * _EARLIEST
        return None if wakes_at == _FOREVER else max(0.0, wakes_at - now)

    def hasten(self) -> None:
        """Renew all leases soon: a connection has ended, and the store's data may have with it.

        The heartbeat's thread calls this; a test with a manual clock may call it too.
        """
        now = self._clock.now()
        # A restart ends the connections of all processes at once, hence the random part. The pause
        # bounds the renewals that a server causes by ending each connection.
        at = max(now + uniform(*_SPREAD), self._hastened_to + _MAX_RETRY_PAUSE)
        # A renewal that has failed is repeated soon in any case.
        hastened = [one for one in self._snapshot() if at < one.due and not one.failures]
        for lease in hastened:
            _plan(lease, at, now)
        for lease, due in list(self._let_go.items()):
            self._let_go[lease] = min(at, due)  # the reply to the release may be lost
        if hastened:
            self._hastened_to = at

    def _collect(self) -> None:
        now = self._clock.now()
        overdue = [lease for lease, due in list(self._let_go.items()) if due <= now]
        if not overdue:
            return
        for lease in overdue:
            self._let_go.pop(lease, None)  # once
        try:
            if (releases := self._store.async_releases) is not None:
                releases.drain(timeout=self._patience(now, overdue, _WAITS))
        except Exception:
            logger.exception("singleton: draining asynchronous releases failed")
        self._declare_overdue()

    def _snapshot(self) -> list[Lease]:
        # list() is one step of the interpreter. A body may add or release a lease between any
        # two steps of a loop over the dictionary.
        return list(self._leases)

    def _due(self) -> list[Lease]:
        """The leases that are due, and those due before the next sweep: one pipeline, not two."""
        now = self._clock.now()
        leases = self._snapshot()
        if not any(lease.due <= now < lease.hold_until for lease in leases):
            return []
        horizon = now + interval_of(min(map(_TTL, leases)), self._trusted)
        return [lease for lease in leases if now < lease.hold_until and lease.due <= horizon]

    def _renew(self, batch: list[Lease]) -> None:
        sent = self._clock.now()
        timeout = considered = -_FOREVER
        size = self._store.capabilities.renewal_batch or len(batch)
        others: list[tuple[Lease, Renewal]] = []
        for start in range(0, len(batch), size):
            part = batch[start : start + size]
            now = self._clock.now()
            if now - considered > _MIN_TIMEOUT:
                # Again behind a slow batch: the first deadline of all leases has come closer.
                considered, timeout = now, self._patience(now)
            try:
                replies = self._store.leases.renew(part, timeout=timeout)
                others += self._apply(zip(part, replies, strict=True), sent)
                if self.outages.since:
                    self._end_outages(zip(part, replies, strict=True))
            except Exception as exc:
                if not isinstance(exc, StoreError):
                    logger.exception("singleton: unexpected error of the store; it is asked again")
                else:
                    self._begin_outage(part[0], exc)
                now = self._clock.now()
                for lease in batch[start:]:
                    _postpone(lease, str(exc), now)
                break
        # Losses come last: on_lost may take time, and no renewal should wait for it.
        lost = [lease for lease, reply in others if reply in _TAKEN]
        notes: dict[Lease, str | None] = {}
        try:
            notes.update(zip(lost, release_notes_on(self._store, lost, NOTES_TIMEOUT), strict=True))
        except Exception:
            logger.exception(
                "singleton: unexpected error of the store; losses are reported without it"
            )
        for lease, reply in others:
            self._take(lease, reply, notes.get(lease))

    def _apply(
        self, batch: Iterable[tuple[Lease, Renewal]], sent: float
    ) -> list[tuple[Lease, Renewal]]:
        """Note the leases that a request sent at ``sent`` renewed; return the others' replies.

        Leases of the same ttl share two number objects: creating thousands of numbers costs time
        and space in the processor's cache.
        """
        clock, leases, trusted = self._clock.now, self._leases, self._trusted
        others: list[tuple[Lease, Renewal]] = []
        ttl = due = until = 0.0
        for lease, reply in batch:
            if reply is not None:
                others.append((lease, reply))
                continue
            if lease not in leases:
                continue  # released meanwhile
            now = clock()
            if now >= lease.valid_until and now >= lease.deadline:
                continue  # a lost lease stays lost, whatever the store replies
            if lease.ttl != ttl:
                ttl = lease.ttl
                due, until = sent + interval_of(ttl, trusted), sent + trust_of(ttl, trusted)
            lease.renewed(until)
            lease.failures = 0
            if now < due < until:
                lease.due = lease.sweep_at = due  # _plan(), inlined
            else:
                _plan(lease, due, now)
        return others

    def _begin_outage(self, lease: Lease, error: object) -> None:
        holder = lease.holder
        task, task_id = holder.task, holder.task_id
        self.outages.report(
            error, "renewed-later", key=lease.key, task=task, task_id=task_id, holder=holder
        )

    def _end_outages(self, batch: Iterable[tuple[Lease, Renewal]]) -> None:
        for lease, reply in batch:
            if reply is not LossReason.UNREACHABLE:
                self.outages.end(lease.key)

    def _patience(self, now: float, others: list[Lease] | None = None, waits: int = 1) -> float:
        """Seconds to wait for each of ``waits`` replies.

        Args:
            now: The time.
            others: The leases whose deadlines count; None: all that are being renewed.
            waits: The number of replies that this thread waits for in sequence.
        """
        # A loss is reported at the deadline. This thread serves all leases, also those that are not
        # due yet, so no wait goes beyond the first deadline of any of them.
        leases = self._snapshot()
        left = min(map(_VALID_UNTIL, leases), default=_FOREVER) - now
        if left < waits * MAX_TIMEOUT:  # else extended deadlines do not matter
            left = min([lease.deadline for lease in leases]) - now
        return patience(min(map(_TTL, chain(leases, others or ())), default=_FOREVER), left / waits)

    def _take(self, lease: Lease, reply: Renewal, note: str | None) -> None:
        """Act on a reply other than RENEWED."""
        if lease not in self._leases:
            return  # released meanwhile
        if reply is LossReason.DYING:
            self.stop(lease)
        elif reply is LossReason.UNREACHABLE:
            _postpone(lease, _SILENT_PART, self._clock.now())
            self._begin_outage(lease, _SILENT_PART)
        else:
            self._lose(lease, *reason_of_loss(lease, reply is LossReason.REPLACED, note))

    def _declare_overdue(self) -> None:
        now = self._clock.now()
        leases = self._snapshot()
        if min(map(_SWEEP_AT, leases), default=_FOREVER) > now:
            return
        overdue = [one for one in leases if one.sweep_at <= now and now >= one.valid_until]
        for lease in [one for one in overdue if now >= one.deadline]:
            self._lose_overdue(lease, now)

    def _lose_overdue(self, lease: Lease, now: float) -> None:
        if lease.failures:
            detail = f"{lease.failures} renewals failed: {lease.error}"
            self._lose(lease, LossReason.UNREACHABLE, detail)
        elif now >= lease.hold_until:
            detail = f"max_hold of {round(lease.hold_until - lease.acquired_at, 3)} s reached"
            self._lose(lease, LossReason.EXPIRED, detail)
        else:
            self._lose(lease, LossReason.EXPIRED, "the process was stopped or starved")

    def _lose(self, lease: Lease, reason: LossReason, detail: str) -> None:
        on_lost = self._leases.pop(lease, None)
        if on_lost is None:
            return  # released meanwhile; the releasing thread reports the end
        lease.reported = True
        lease.loss = Loss(reason=reason, at=min(self._clock.now(), lease.deadline), detail=detail)
        lease.end()
        # The body is notified first, because it may be writing. The event can wait, and on the
        # thread of a body that called check(), its observers may block.
        action = None
        try:
            action = on_lost(lease)
        except Exception:
            logger.exception(
                "singleton: the loss of %r could not be reported to its task", lease.key
            )
        self.report_loss(lease, lease.loss, action or "none")

    def report_loss(self, lease: Lease, loss: Loss, action: str) -> None:
        """Emit the event of a loss; ``action``: what becomes of the body."""
        store, name = self.outages.url, EventName.LEASE_LOST
        data = {"reason": str(loss.reason), "detail": loss.detail, "store": store, "action": action}
        self._events.emit_for(lease, name, **data)

    def _run(self) -> None:
        # If two bodies added the first lease at once, each has started a thread, and one is left.
        while self._start.acquire(blocking=False):
            self._running = True
            with observers.elsewhere():
                while not self._closed or self._leases or self._let_go:
                    try:
                        pause = self.sweep()
                    except Exception:
                        # This thread renews every lease of the process; it must not end.
                        logger.exception("singleton: the heartbeat failed; it goes on")
                        pause = _PAUSE_AFTER_FAILURE
                    if self._closed:  # the end of a lease does not wake this thread
                        pause = min(_FOREVER if pause is None else pause, _PAUSE_WHEN_CLOSED)
                    self._rest(pause)
            self._running = False
            self._start.release()
            # A body that has added a lease meanwhile may have seen _running, and started no thread.
            if not self._leases:
                return

    def _rest(self, seconds: float | None) -> None:
        try:
            if self._alarm.sleep(seconds):
                self.hasten()
        except Exception:
            logger.exception("singleton: the heartbeat can't sleep; it checks once a second")
            self._clock.sleep(_PAUSE_AFTER_FAILURE)


def release_notes_on(store: Store, leases: Sequence[Lease], timeout: float) -> list[str | None]:
    """The operators' notes on the keys of lost ``leases``; None where there is none.

    One request for all of them. If the store does not answer, all losses are reported without
    a note.
    """
    if leases and store.operators is not None:
        try:
            keys = [Keyspace.release_note(lease.key) for lease in leases]
            return store.operators.release_notes(keys, timeout=timeout)
        except StoreError:
            pass
    return [None] * len(leases)


def _plan(lease: Lease, due: float, now: float) -> None:
    """Set the time of the next renewal."""
    lease.due = due
    deadline = lease.deadline
    lease.sweep_at = due if due < deadline and now < lease.hold_until else deadline


def _postpone(lease: Lease, error: str, now: float) -> None:
    """Repeat a renewal that failed with ``error`` after a pause."""
    lease.error = error  # first: another thread may see the failure at once
    lease.failures += 1
    _plan(lease, now + retry_pause(lease.ttl, lease.deadline - now), now)


@lru_cache(maxsize=64)
def interval_of(ttl: float, trusted: float) -> float:
    """Seconds between renewals; a reply guarantees the share ``trusted`` of ``ttl``."""
    return ttl * trusted / _RENEWALS_PER_TTL


@lru_cache(maxsize=64)
def timeout_for(ttl: float) -> float:
    """Seconds to wait for one reply about a lease of ``ttl``."""
    return max(_step(ttl / _TIMEOUTS_PER_TTL), _MIN_TIMEOUT)


def patience(ttl: float, left: float) -> float:
    """As :func:`timeout_for`, but not beyond the ``left`` time until the deadline."""
    return min(timeout_for(ttl), _step(left))


def retry_pause(ttl: float, left: float) -> float:
    """Seconds until a renewal without a reply is repeated; shorter near the deadline."""
    longest = min(ttl * _RETRY_RATIO, _MAX_RETRY_PAUSE, max(left / 2, _MIN_RETRY_PAUSE))
    return longest * (1 - _RETRY_JITTER * random())


def _step(longest: float) -> float:
    return next((step for step in _TIMEOUT_STEPS if step <= longest), _TIMEOUT_STEPS[-1])
