"""One leader among the processes that would do the same work: campaign, lead, ask, resign.

The work here is sending what a schedule says is due; it fits whatever is done entry by entry.

Promises
    At most one process is permitted to send an entry's run. Before each send one script compares
    the leader's token and swaps the entry's stored last run, so a leader that was stopped (SIGSTOP,
    a suspended machine, a long pause of its host) and wakes after another was elected is refused,
    at whatever line it was stopped. Who is elected reads the last runs after its election, so it
    sees every run that was ever permitted. A leader trusts its lease until the lease's own deadline
    only, which lies before the store's expiry.

Does not promise
    That a permitted run is sent: a crash between swap and send loses that one run, and so does an
    outage there (nobody can know whether the message left). Never the other way round.
    That it is sent in time: the process may be stopped between swap and send, and sends when it
    wakes; or, while a dead leader's lease stands, nobody leads for up to ``ttl`` seconds.
    Anything when the store loses acknowledged writes: with the last runs gone, whoever leads goes
    on from its own memory.

States of a process::

                 granted                        refused a permit, asked to stop
    standing by ---------> leading ----------------------------------------------> resigned
      ^   |  ^               | ^ |                                                     |
      |   |  |               | | +--no answer to a permit--> cut off while leading     |
      |   |  |               | +------------answer------------------+  |               |
      |   |  |               +--lease lost (expired, replaced,      |  |               |
      |   |  |                  unreachable), by its deadline ----+ |  | deadline      |
      |   |  +----------------------------------------------------+-|--+               |
      |   +--no answer--> cut off --answer--> standing by, or leading                  |
      +--------------------------next campaign-----------------------------------------+

Failure handling
    The store doesn't answer: no permit, so nothing is sent; the heartbeat tries to renew until the
    deadline. What a permit's lost reply left in the store is remembered, and swapped by the next
    permit of that entry: a short outage loses no run.
    The leader dies: its lease expires in the store. Others know from the refusal how long it still
    stands, and come just after it.
    The leader stops cleanly: it releases its lease, and others come at their next poll.
    Somebody deleted or changed a last run: the leader resigns, and reads all of them again when
    it, or another, is elected.

Threads
    All methods run on the scheduler's thread (a signal handler on it may call :meth:`resign` at any
    line); the heartbeat's thread renews and declares the lease lost, by assignments to the lease.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from celery_singleton_lock.core.events import Event, EventName, Events
from celery_singleton_lock.core.heartbeat import timeout_for
from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Holder, Lease, Token
from celery_singleton_lock.core.locker import Locker
from celery_singleton_lock.core.store import Acquire, Authorization, AuthorizeTick, Refused, Release
from celery_singleton_lock.errors import StoreError, StoreUnavailable

__all__ = ["Election"]

# A yearly entry must find its last run; an entry that was deleted shall not stay for ever.
_LAST_RUN_TTL: Final = 400 * 86400.0
# The second try meets a fresh connection: a server restart leaves every idle one broken.
_TRIES: Final = 2
_YEAR_9999: Final = 253e9
# Just after the other's lease has expired, not just before: Redis expires by the millisecond.
_AFTER_EXPIRY: Final = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class _LastRun:
    """What the store has of one entry: ``<seconds since the epoch> <permit's name>``.

    ``at`` is what is believed of it: None where nothing is stored, or nothing that can be read.
    """

    text: str | None = None
    at: float | None = None

    @classmethod
    def of(cls, at: float) -> _LastRun:
        # Microseconds, as datetime has them: the grid must not move by rounding.
        return cls(text=f"{at:.6f} {secrets.token_hex(4)}", at=at)

    @classmethod
    def parse(cls, text: str | None) -> _LastRun:
        try:
            at = float((text or "").partition(" ")[0])
        except ValueError:
            return cls(text=text)
        # Somebody's data, which no datetime can be made of, must not end a beat.
        return cls(text=text, at=at if 0 <= at < _YEAR_9999 else None)


class Election:
    """One candidate.

    Args:
        locker: Of this process.
        events: Told of every change, once.
        key: Of the leader's lease.
        ttl: Seconds that a dead leader blocks the others.
        poll: Seconds between two tries of who doesn't lead.
        holder: This process, for people.
    """

    def __init__(
        self, locker: Locker, events: Events, *, key: str, ttl: float, poll: float, holder: Holder
    ) -> None:
        self.key = key
        self.ttl = ttl
        self.poll = poll
        #: How often this process was elected: whoever caches what a leader knows compares it.
        self.tenure = 0
        self._locker = locker
        self._clock = locker.clock
        self._events = events
        self._holder = holder
        self._lease: Lease | None = None
        self._token: Token | None = None
        self._next_try = self._clock.now()
        self._last_runs: dict[str, _LastRun] = {}
        # What permits may have put there whose replies were lost: nothing was sent for them.
        self._unsure: dict[str, set[str | None]] = {}
        self._told: tuple[EventName, str] | None = None

    @property
    def leading(self) -> bool:
        """Whether this process leads now. No I/O; reads the clock."""
        return self._lease is not None and not self._lease.lost

    def campaign(self) -> bool:
        """Try to lead, unless the last try was a moment ago; whether this process leads.

        A store that doesn't answer is told of, not raised.
        """
        if self.leading:
            return True
        if self._lease is not None:
            # The heartbeat tells of the loss. A token names one grant: the next one gets its own.
            self._lease = self._token = None
        now = self._clock.now()
        if now < self._next_try:
            return False
        self._next_try = now + self.poll
        try:
            reply = self._locker.acquire(self._call())
        except StoreError as exc:
            self.fail(exc)
            return False
        if isinstance(reply, Refused):
            self._stand_by(reply)
            return False
        self._lead(reply)
        return True

    def pause(self) -> float:
        """Seconds until :meth:`campaign` tries again, or the leader should look at its lease."""
        if self.leading:
            # A third of the ttl: who has lost its lease unheard is back before another's is over.
            return self.ttl / 3
        return max(self._next_try - self._clock.now(), 0.001)

    def recall(self, entries: Iterable[str]) -> list[str]:
        """Read the last runs of the entries that aren't known yet, in one round trip; name them.

        Raises:
            StoreError: The store refuses or doesn't answer.
        """
        unknown = [entry for entry in entries if entry not in self._last_runs]
        if unknown:
            for entry, text in zip(unknown, self._read(unknown), strict=True):
                self._last_runs[entry] = _LastRun.parse(text)
        return unknown

    def last_run(self, entry: str) -> float | None:
        """Seconds since the epoch, as far as it was recalled; None if there was none."""
        return self._last_runs.get(entry, _LastRun()).at

    def doubt(self, entry: str, at: float) -> None:
        """Believe ``at`` instead of what is stored, until the next permit overwrites that."""
        self._last_runs[entry] = replace(self._last_runs[entry], at=at)

    def authorize_tick(self, entry: str, at: float) -> bool:
        """Whether this process may send the run of ``entry`` that was due ``at``; at most once.

        False: it leads no more, or has resigned just now.

        Args:
            entry: Its name.
            at: The new last run, seconds since the epoch.

        Raises:
            StoreError: The store refuses or doesn't answer; send nothing.
        """
        lease = self._lease
        if lease is None or lease.lost:
            return False
        self.recall([entry])
        new = _LastRun.of(at)
        reply = self._swap(lease, entry, self._last_runs[entry].text, new)
        if reply is Authorization.CHANGED:
            stored = self._read([entry])[0]
            if stored in self._unsure.get(entry, ()):
                reply = self._swap(lease, entry, stored, new)
        if reply is Authorization.AUTHORIZED:
            self._last_runs[entry] = new
            self._unsure.pop(entry, None)
            return True
        if reply is Authorization.DEPOSED:
            self.resign("the store says that its token leads no more")
        else:
            self.resign(f"somebody changed the last run of {entry!r}")
        return False

    def resign(self, why: str) -> None:
        """Stop leading, and let another lead at once; nothing where this process doesn't."""
        lease, self._lease, self._token = self._lease, None, None
        if lease is None or lease.lost:
            return
        self._next_try = self._clock.now() + self.poll
        self._locker.release(lease, Release(keys=(lease.key,), token=lease.token))
        self._tell(EventName.RESIGNED, self._holder, why=why)

    def fail(self, error: Exception) -> None:
        """Tell, once per outage, that nothing is sent until the store answers."""
        self._tell(
            EventName.STORE_FAILED,
            self._holder,
            about="no ticks until it answers",
            error=str(error),
        )

    def _call(self) -> Acquire:
        if self._token is None:
            # Kept over tries that end in silence: what such a try may have been granted is ours.
            nonce = secrets.token_hex(8)
            self._token = Token(f"beat-{nonce}", 0, 0, nonce)
        holder = replace(self._holder, since=self._clock.wall())
        return Acquire(slots=(self.key,), token=self._token, holder=holder, ttl=self.ttl)

    def _lead(self, lease: Lease) -> None:
        self._lease = lease
        self.tenure += 1
        # Another may have led meanwhile: what was true in an earlier tenure is only a memory.
        self._last_runs.clear()
        self._unsure.clear()
        # News also where nothing was told since the last tenure: the heartbeat tells of losses.
        self._told = None
        self._tell(EventName.LEADING, lease.holder, fence=lease.fence_number, ttl=lease.ttl)

    def _stand_by(self, refused: Refused) -> None:
        record = refused.record
        if record is not None:
            now = self._clock.now()
            self._next_try = min(self._next_try, now + record.ttl + _AFTER_EXPIRY)
        self._tell(EventName.STANDING_BY, refused.holder)

    def _swap(self, lease: Lease, entry: str, expected: str | None, new: _LastRun) -> Authorization:
        call = AuthorizeTick(
            leader=lease.key,
            token=lease.token,
            entry=Keyspace.last_run(lease.key, entry),
            expected=expected,
            new=new.text or "",
            ttl=_LAST_RUN_TTL,
        )
        store = self._locker.store
        for attempt in range(1, _TRIES + 1):
            try:
                reply = store.authorize_tick(call, timeout=timeout_for(self.ttl))
            except StoreUnavailable as exc:
                self._unsure.setdefault(entry, set()).add(new.text)
                if attempt == _TRIES:
                    self.fail(exc)
                    raise
            except StoreError as exc:
                self.fail(exc)
                raise
            else:
                self._answered(lease)
                return reply
        raise AssertionError("unreachable")

    def _read(self, entries: list[str]) -> list[str | None]:
        keys = [Keyspace.last_run(self.key, entry) for entry in entries]
        store = self._locker.store
        for attempt in range(1, _TRIES + 1):
            try:
                return store.last_runs(keys, timeout=timeout_for(self.ttl))
            except StoreError as exc:
                if attempt == _TRIES or not isinstance(exc, StoreUnavailable):
                    self.fail(exc)
                    raise
        raise AssertionError("unreachable")

    def _answered(self, lease: Lease) -> None:
        if self._told is not None and self._told[0] is EventName.STORE_FAILED:
            self._tell(EventName.LEADING, lease.holder, fence=lease.fence_number, ttl=lease.ttl)

    def _tell(self, name: EventName, holder: Holder, **data: object) -> None:
        """Emit the event, unless the last one said the same: a standby asks every second."""
        news = (name, f"{holder}" if name is EventName.STANDING_BY else "")
        if news == self._told:
            return
        self._told = news
        self._events.emit(
            Event(
                name=name,
                key=self.key,
                task=self._holder.task,
                task_id=self._holder.task_id,
                holder=holder,
                data=data,
            )
        )
