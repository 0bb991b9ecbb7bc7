"""Leader election: one of several beat processes at a time sends the due entries of a schedule.

Overview
    Candidates acquire one lease on the leader's key. The holder leads: it renews the lease and
    authorizes each tick, entry by entry, before it sends it. The others stand by and try again
    every ``poll`` seconds. The last run of each entry is stored next to the lease.

Guarantees
    At most one process is authorized to send an entry's tick. Before each send, one script compares
    the leader's token and replaces the entry's stored last run. A leader that was suspended at any
    line (SIGSTOP, a paused host) and resumes after another election is refused.
    A new leader reads the last runs after its election, so they include every authorized tick. A
    leader trusts its lease only until the lease's own deadline, which is before the store's expiry.
    A leader leads only while its scheduler works: if no round of the scheduler succeeds for ``ttl``
    seconds, it resigns, whatever its thread waits for.

Non-guarantees
    Delivery of an authorized tick: a crash or an outage between the swap and the send loses that
    one tick, because it is unknown whether the message was sent. A tick is never sent twice.
    Punctuality: the process may be suspended between the swap and the send. After the death of a
    leader, there is no leader until its lease expires, for up to ``ttl`` seconds.
    Order of ticks: a leader that resigned while a send was in progress may finish that send. Its
    tick is authorized, so no other process sends it, but the next leader may send a later tick
    before it.
    Durability beyond the store's: if the store loses acknowledged writes, the next leader continues
    from its own memory.

State model of one process::

                 granted              refused a tick, stopped, no progress
    standing by ---------> leading -------------------------------------> resigned
      ^   |  ^               | ^ |                                            |
      |   |  |               | | +--no reply to a tick--> leading, no reply   |
      |   |  |               | +----------reply-------------+  |              |
      |   |  |               +--lease lost-----------+         | deadline     |
      |   |  +---------------------------------------+---------+              |
      |   +--no reply--> no store --reply--> standing by, or leading          |
      +----------------------next campaign------------------------------------+

Failure handling
    The store does not reply: no tick is authorized, so nothing is sent. The heartbeat retries the
    renewal until the deadline. A lost reply may leave a new last run in the store. The process
    remembers that last run, and the next tick of the entry may replace it: a short outage loses no
    tick.
    The leader dies: its lease expires in the store. A refusal contains the remaining ttl, so the
    other candidates try again just after it.
    The broker does not reply to the leader: it authorizes no tick, and resigns after ``ttl``
    seconds. No candidate stands without a reply of its broker. If none has one, there is no leader.
    The broker replies and refuses the messages, as a demoted Redis does: these ticks are lost. The
    leader connects again before the next one, and resigns if none is taken for ``ttl`` seconds.
    The scheduler's thread is blocked (a server of the schedule, a receiver of a Celery signal): the
    leader resigns after the same time.
    The leader stops cleanly: it releases the lease, and another candidate wins the next campaign.
    A stored last run was deleted or changed by another client: the leader resigns. The next leader
    reads all last runs again.

Threads: methods run on the scheduler's thread. A signal handler on it may call
:meth:`Election.resign` at any line. A second thread, one for each term, calls
:meth:`Election.resign_if_stalled`. The heartbeat thread renews the lease and marks it as lost.
No observer of an event runs on any of them (`core.observers`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from ..core import native_threads, observers
from ..core.events import Event, EventName
from ..core.heartbeat import interval_of, timeout_for
from ..core.keyspace import Keyspace
from ..core.lease import Holder, Lease, Token
from ..core.outages import Outages
from ..core.store import Schedule, Store
from ..core.store_requests import Acquire, Authorization, AuthorizeRun, Refused, Release
from ..errors import SettingsError, StoreError, StoreUnavailable
from ..runtime import Runtime

# Seconds. A yearly entry must find its last run. The last run of a deleted entry must expire.
_LAST_RUN_TTL: Final = 400 * 86400.0
_YEAR_9999: Final = 253e9
# Seconds between the expiry of the leader's lease and the next try. Redis expires keys with a
# precision of a millisecond.
_AFTER_EXPIRY: Final = 0.005

Reply = TypeVar("Reply")


class Election:
    """One candidate, with the settings of an app.

    Attributes:
        key: The key of the leader's lease.
        ttl: Seconds for which a dead leader blocks the other candidates.
        poll: Seconds between two tries of a candidate that does not lead.
        interval: Seconds between two renewals of the leader's lease.
    """

    def __init__(self, runtime: Runtime) -> None:
        settings, name = runtime.settings, runtime.settings.beat_name
        self.key = runtime.keyspace.leader(name)
        self.ttl = settings.beat_ttl
        self.poll = settings.beat_poll
        self.interval = interval_of(self.ttl, runtime.store.capabilities.trusted)
        #: The number of elections that this process has won. A leader's caches are valid for one.
        self.term = 0
        self._locker = runtime.locker
        self._schedule = schedule_of(runtime.store)
        self._clock = runtime.clock
        self._events = runtime.events
        # `celery singleton ls` shows the holder.
        pid, worker = os.getpid(), runtime.worker
        self._holder = Holder(
            task="celery.beat", task_id=name, worker=worker, pid=pid, process=runtime.process
        )
        # The lease of the current term; empty if this process does not lead. Removing an item is
        # one step of the interpreter: of two threads that resign, one releases the lease.
        self._leases: list[Lease] = []
        # Time of the last successful round of the scheduler.
        self._progress_at = self._clock.now()
        self._next_try = self._clock.now()
        #: For each entry that has a stored last run and was recalled: the last run, seconds since
        #: the epoch. A value that the scheduler corrects is used until the next tick replaces it.
        self.last_runs: dict[str, float] = {}
        # For each entry that was recalled, the text of its last run; None: the store has none.
        self._stored: dict[str, str | None] = {}
        # For each entry, texts that requests with a lost reply may have stored. No message was sent
        # for them.
        self._unsure: dict[str, set[str | None]] = {}
        # The last event that was logged, and for STANDING_BY the leader that it named.
        self._logged = ("", "")

    @property
    def leading(self) -> bool:
        """Whether this process leads now. Asks no store; reads the clock."""
        lease = self._lease
        return lease is not None and not lease.lost

    @property
    def _lease(self) -> Lease | None:
        return next(iter(self._leases[:1]), None)

    def campaign(self) -> bool:
        """Try to lead, unless the last try was a moment ago. Return whether this process leads.

        An error of the store is logged, not raised.
        """
        if self.leading:
            return True
        self._leases.clear()  # the heartbeat has logged the loss
        now = self._clock.now()
        if now < self._next_try:
            return False
        self._next_try = now + self.poll
        try:
            reply = self._locker.acquire(self._request())
        except StoreError as exc:
            self.fail(exc)
            return False
        if isinstance(reply, Refused):
            if reply.record is not None:
                expiry = self._clock.now() + reply.record.ttl + _AFTER_EXPIRY
                self._next_try = min(self._next_try, expiry)
            self._log(EventName.STANDING_BY, reply.holder)
            return False
        self._progress_at = self._clock.now()
        self.term += 1
        self._leases.append(reply)
        native_threads.start_new_thread(
            partial(self._watch_progress, self.term), "singleton-election"
        )
        # Another process may have led since the last term, so the cached last runs may be old.
        self._stored.clear()
        self.last_runs.clear()
        self._unsure.clear()
        # A new term is always logged. The heartbeat has logged the loss that preceded it, so this
        # object has not.
        self._logged = ("", "")
        self._log_leading(reply)
        return True

    def pause(self) -> float:
        """Seconds until :meth:`campaign` tries again, or until the leader checks its lease."""
        if self.leading:
            # A leader that has lost its lease unnoticed becomes a candidate again before the next
            # leader's lease can expire.
            return self.interval
        return max(self._next_try - self._clock.now(), 0.001)

    def recall(self, entries: Iterable[str]) -> list[str]:
        """Read the last runs of entries that are not known yet, in one round trip.

        Returns:
            The names of these entries.

        Raises:
            StoreError: The store refuses or doesn't reply.
        """
        unknown = [entry for entry in entries if entry not in self._stored]
        if unknown:
            for entry, text in zip(unknown, self._read(unknown), strict=True):
                self._stored[entry] = text
                if (at := _moment_of(text)) is not None:
                    self.last_runs[entry] = at
        return unknown

    def authorize_run(self, entry: str, at: float) -> bool:
        """Whether this process may send the tick of ``entry`` that was due ``at``; at most once.

        False: this process does not lead, or has resigned just now.

        Args:
            entry: The name of the entry.
            at: The new last run, seconds since the epoch.

        Raises:
            StoreError: The store refuses or doesn't reply; send nothing.
        """
        lease = self._lease
        if lease is None or lease.lost:
            return False
        self.recall([entry])
        # Microseconds, the resolution of datetime: rounding must not move the grid. The random part
        # distinguishes two ticks of the same time.
        new = f"{at:.6f} {secrets.token_hex(4)}"
        unsure = self._unsure.setdefault(entry, set())
        reply = self._swap(lease, entry, self._stored[entry], new)
        if reply is Authorization.CHANGED:
            stored = self._read([entry])[0]
            if stored in unsure:
                reply = self._swap(lease, entry, stored, new)
        if reply is Authorization.AUTHORIZED:
            self._stored[entry], self.last_runs[entry] = new, at
            del self._unsure[entry]
            return True
        why = f"another client changed the last run of {entry!r}"
        if reply is Authorization.DEPOSED:
            why = "the store has another leader's token"
        self.resign(why, deposed=reply is Authorization.DEPOSED)
        return False

    def resign(self, why: str, *, deposed: bool = False) -> None:
        """Stop leading and release the lease; do nothing if this process does not lead.

        Args:
            why: The reason, for the log.
            deposed: Whether the store has said that this process does not hold the lease.
        """
        try:
            lease = self._leases.pop()
        except IndexError:
            return
        if lease.lost:
            return
        self._next_try = self._clock.now() + self.poll
        if deposed:
            # A renewal reports the loss. A release whose first reply is lost could not tell a loss
            # from its own success.
            self._locker.heartbeat.ask(lease)
        self._locker.release(lease, Release(keys=(lease.key,), token=lease.token))
        self._log(EventName.RESIGNED, self._holder, why=why)

    def progress(self) -> None:
        """Note that the scheduler works: a round has sent what was due, or nothing was due."""
        self._progress_at = self._clock.now()

    def resign_if_stalled(self, term: int) -> float | None:
        """Resign if the scheduler has made no progress for ``ttl`` seconds.

        Returns:
            Seconds until the next check; None: the ``term`` is over.
        """
        if term != self.term or not self.leading:
            return None
        left = self._progress_at + self.ttl - self._clock.now()
        if left > 0:
            return left
        self.resign(f"it could send nothing for {self.ttl:g} s")
        return None

    @observers.elsewhere()
    def _watch_progress(self, term: int) -> None:
        while (pause := self.resign_if_stalled(term)) is not None:
            self._clock.sleep(pause)

    def fail(self, error: Exception, outages: Outages | None = None) -> None:
        """Log, once per outage, that nothing is sent until the server replies.

        Args:
            error: The error.
            outages: The outages of the server; None: of the store.
        """
        task, task_id = self._holder.task, self._holder.task_id
        (outages or self._locker.heartbeat.outages).report(
            error, "nothing-sent", key=self.key, task=task, task_id=task_id, holder=self._holder
        )

    def _request(self) -> Acquire:
        # A token names one try. The locker releases by its token what a try without a reply may
        # have acquired, and repeats that release.
        nonce = secrets.token_hex(8)
        token = Token(f"beat-{nonce}", 0, 0, nonce)
        holder = replace(self._holder, since=self._clock.wall())
        return Acquire(slots=(self.key,), token=token, holder=holder, ttl=self.ttl)

    def _swap(self, lease: Lease, entry: str, expected: str | None, new: str) -> Authorization:
        tick = AuthorizeRun(
            leader=lease.key,
            token=lease.token,
            entry=Keyspace.last_run(lease.key, entry),
            expected=expected,
            new=new,
            ttl=_LAST_RUN_TTL,
        )
        self._unsure[entry].add(new)  # until a reply shows the stored text
        return self._ask(self._schedule.authorize, tick)

    def _read(self, entries: list[str]) -> list[str | None]:
        keys = [Keyspace.last_run(self.key, entry) for entry in entries]
        return self._ask(self._schedule.last_runs, keys)

    def _ask(self, operation: Callable[..., Reply], request: object) -> Reply:
        timeout = timeout_for(self.ttl)
        try:
            try:
                reply = operation(request, timeout=timeout)
            except StoreUnavailable:
                # A restart of the server breaks all idle connections. The second try opens a new
                # one.
                reply = operation(request, timeout=timeout)
        except StoreError as exc:
            self.fail(exc)
            raise
        self._locker.heartbeat.outages.end(self.key)
        return reply

    def _log_leading(self, lease: Lease) -> None:
        self._log(EventName.LEADING, lease.holder, fence=lease.fence_number, ttl=lease.ttl)

    def _log(self, name: EventName, holder: Holder, **data: object) -> None:
        """Emit the event, unless it equals the last one: a standby candidate tries every second."""
        news = (str(name), str(holder) if name is EventName.STANDING_BY else "")
        if news == self._logged:
            return
        self._logged = news
        task, task_id = self._holder.task, self._holder.task_id
        event = Event(name=name, key=self.key, task=task, task_id=task_id, holder=holder, data=data)
        self._events.emit(event)


def _moment_of(text: str | None) -> float | None:
    """The time in a stored last run, ``<seconds since the epoch> <random part>``.

    None if another client wrote the text and it contains no valid time.
    """
    try:
        at = float((text or "").partition(" ")[0])
    except ValueError:
        return None
    return at if 0 <= at < _YEAR_9999 else None


def schedule_of(store: Store) -> Schedule:
    """The part of the store that keeps the last runs.

    Raises:
        SettingsError: The store has none.
    """
    if store.schedule is None:
        raise SettingsError(
            f"the store ({store.capabilities.name}) can't keep the last runs of Beat's entries: "
            "use another store, or Celery's own scheduler"
        )
    return store.schedule


def check_leader_ttl(runtime: Runtime) -> None:
    """Refuse a leader's ttl that the store can't keep.

    Raises:
        SettingsError: The ttl is shorter than the store's minimum.
    """
    ttl, capabilities = runtime.settings.beat_ttl, runtime.store.capabilities
    if ttl < capabilities.min_ttl:
        raise SettingsError(
            f"singleton_lock_beat_ttl={ttl:g} s, but the store ({capabilities.name}) keeps no "
            f"lease for less than {capabilities.min_ttl:g} s: set a longer one, or choose another "
            "store"
        )
