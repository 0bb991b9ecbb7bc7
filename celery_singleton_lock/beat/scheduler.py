"""Any Beat scheduler, ticking only while it leads: one leader among N beats, the others stand by.

``celery beat --scheduler singleton`` is :class:`LeaderScheduler`; for schedules in Django's
database or in Redis there are :mod:`~celery_singleton_lock.beat.django` and
:mod:`~celery_singleton_lock.beat.redbeat`. What is promised, :mod:`core.election` says.

One tick of the leader, and what each step of it is for::

    is_due    the entry's last run becomes the stored one; a late run's successor is on the grid
    reserve   broker connected -> signals held back -> permit (compare token, swap last run)
    apply_entry   sent, with the slot in a header -> signals let through
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from celery.beat import PersistentScheduler, ScheduleEntry, Scheduler
from celery.schedules import schedstate

from celery_singleton_lock.beat.candidacy import candidacy
from celery_singleton_lock.beat.defer_signals import Shield
from celery_singleton_lock.beat.schedule_grid import (
    believable,
    interval_of,
    latest_slot,
    like,
    now_of,
    period_of,
    slot_of,
    utc,
)
from celery_singleton_lock.celery_compat import rebuild_heap
from celery_singleton_lock.errors import SettingsError, StoreError
from celery_singleton_lock.publish.by_name import claim_and_send
from celery_singleton_lock.publish.header import TICK_HEADER
from celery_singleton_lock.runtime import Runtime

__all__ = ["TICK_HEADER", "LeaderMixin", "LeaderScheduler"]

logger = logging.getLogger("celery_singleton_lock")


class _NotPermitted(Exception):
    """This process leads no more; ends the tick, seen by nobody outside."""


class LeaderMixin(Scheduler):
    """Makes a scheduler tick only while it leads; stands before the scheduler's own class."""

    def __init__(self, app: Any, *, lazy: bool = False, **kwargs: Any) -> None:
        # `celery beat` makes a lazy one for its banner, before it has a log to write to.
        runtime = Runtime.of(app)
        if not lazy:
            self._election = candidacy(runtime)
            self._shield = Shield()
            self._tenure = 0
            self._slot: datetime | None = None
            self._warned: set[str] = set()
        self._runtime = runtime
        super().__init__(app, lazy=lazy, **kwargs)

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """As the scheduler's own, if this process leads; else stand by. Seconds to sleep."""
        election = self._election
        if not election.campaign():
            if self._tenure:
                self._tenure = 0
                self.deposed()
            return election.pause()
        try:
            if self._tenure != election.tenure:
                self._tenure = election.tenure
                self.elected()
            wait = super().tick(*args, **kwargs)
        except _NotPermitted:
            return election.pause()
        except StoreError:
            # The election has told of it. The heap was left in the middle of a tick.
            rebuild_heap(self)
            return election.poll
        finally:
            self._shield.lower()
        return min(wait, election.pause())

    def close(self) -> None:
        """As the scheduler's own; then another beat may lead, and reads what was just written."""
        try:
            super().close()
        finally:
            self._election.resign("it was stopped")

    @property
    def info(self) -> str:
        """For the banner of ``celery beat``."""
        try:
            settings = self._runtime.settings
            key = self._runtime.keyspace.leader(settings.beat_name)
            ours = f"    . leader -> {key} (ttl {settings.beat_ttl:g}s)"
        except SettingsError:
            ours = ""  # told where the scheduler is made in earnest
        return "\n".join(part for part in (super().info, ours) if part)

    def populate_heap(self, *args: Any, **kwargs: Any) -> None:
        """As the scheduler's own, from the stored last runs."""
        self.restore(self.schedule.values())
        super().populate_heap(*args, **kwargs)

    def is_due(self, entry: ScheduleEntry) -> tuple[bool, float]:
        """As the entry says, by its stored last run; a late run is followed by one on the grid."""
        try:
            self.restore([entry])
        except (StoreError, _NotPermitted):
            # An entry that is new since the heap was made. Celery would take the exception for one
            # of its schedule, and look at it again minutes later.
            return schedstate(False, self._election.poll)
        due, wait = super().is_due(entry)
        every = interval_of(entry)
        if due and every is not None and entry.last_run_at is not None:
            now = now_of(entry)
            wait = (latest_slot(utc(entry.last_run_at), every, now) + every - now).total_seconds()
        return schedstate(due, wait)

    def reserve(self, entry: ScheduleEntry) -> Any:
        """As the scheduler's own, if the store permits it; then the entry must be sent."""
        # First: a broker that is away is waited for here, and not between swap and send.
        _ = self.producer
        slot = slot_of(entry)
        self._shield.raise_()
        if not self._election.authorize_tick(_name(entry), slot.timestamp()):
            raise _NotPermitted
        self._slot = slot
        return self.advance(entry, slot)

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        """As the scheduler's own, with the slot in a header."""
        options = entry.options or {}
        if options.get("singleton"):
            self._warn_of_plain_task(entry)
        slot, self._slot = self._slot, None
        if slot is not None:
            headers = {**(options.get("headers") or {}), TICK_HEADER: slot.isoformat()}
            entry.options = {**options, "headers": headers}
        try:
            super().apply_entry(entry, producer=producer)
        finally:
            # Left in, the entry would differ from its successor, as if the schedule had changed.
            entry.options = options
            self._shield.lower()

    def send_task(self, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Send a task whose class isn't registered here; claimed, if its entry says so."""
        singleton: Any = dict(options.pop("singleton", None) or {})
        if not singleton:
            return super().send_task(name, args, kwargs, **options)
        # Without its class nobody here knows the task's key: the entry may name it.
        key, scope = singleton.pop("key", None), singleton.pop("scope", None)
        return claim_and_send(
            self.app, name, args, kwargs, singleton=singleton, key=key, scope=scope, **options
        )

    def elected(self) -> None:
        """This process leads from now on; forget what isn't known from the store."""
        rebuild_heap(self)

    def deposed(self) -> None:
        """This process leads no more."""

    def restore(self, entries: Iterable[ScheduleEntry]) -> None:
        """Give ``entries`` their stored last runs.

        Raises:
            StoreError: They can't be read.
        """
        entries = list(entries)
        new = set(self._election.recall(_name(entry) for entry in entries))
        for entry in entries:
            at = self._election.last_run(_name(entry))
            if at is None:
                if _name(entry) in new:
                    self.never_ran(entry)
                continue
            stored = datetime.fromtimestamp(at, UTC)
            if _name(entry) in new:
                stored = self._believed(entry, stored)
            if self.keeps_last_run(entry) and entry.last_run_at is not None:
                stored = max(stored, utc(entry.last_run_at))
            self.set_last_run(entry, stored)

    def keeps_last_run(self, entry: ScheduleEntry) -> bool:
        """Whether the last run that ``entry`` itself brings was stored, and isn't its start."""
        return False

    def never_ran(self, entry: ScheduleEntry) -> None:
        """``entry`` has no stored last run: it begins from its own."""

    def set_last_run(self, entry: ScheduleEntry, at: datetime) -> None:
        """Make ``at`` (in UTC) the last run of ``entry``, in the form that it has them."""
        entry.last_run_at = like(at, entry.default_now())

    def advance(self, entry: ScheduleEntry, slot: datetime) -> Any:
        """The entry after its run of ``slot``."""
        following: Any = super().reserve(entry)
        self.set_last_run(following, slot)
        return following

    def _warn_of_plain_task(self, entry: ScheduleEntry) -> None:
        task = self.app.tasks.get(str(entry.task))
        if task is None or hasattr(task, "singleton_policy") or entry.name in self._warned:
            return
        self._warned.add(_name(entry))
        logger.warning(
            "singleton beat: the entry %r has options['singleton'], but %r is no singleton task: "
            "it is sent as if the entry didn't say so. Decorate the task with @singleton_task.",
            entry.name,
            entry.task,
        )

    def _believed(self, entry: ScheduleEntry, stored: datetime) -> datetime:
        now = now_of(entry)
        if stored <= now:
            return stored
        believed = believable(stored, period_of(entry, stored, now), now)
        if believed != stored:
            logger.warning(
                "singleton beat: the last run of %r is stored as %s, %.0f s ahead of this host's "
                "clock; a clock was wrong. Going on from %s.",
                entry.name,
                stored.isoformat(),
                (stored - now).total_seconds(),
                believed.isoformat(),
            )
            self._election.doubt(_name(entry), believed.timestamp())
        return believed


class LeaderScheduler(LeaderMixin, PersistentScheduler):
    """Celery's own scheduler, elected. The schedule file is of this process alone."""

    def never_ran(self, entry: ScheduleEntry) -> None:
        """Store where ``entry`` begins: its phase outlives this process and its schedule file."""
        if entry.last_run_at is None:
            return
        if not self._election.authorize_tick(_name(entry), utc(entry.last_run_at).timestamp()):
            raise _NotPermitted


def _name(entry: ScheduleEntry) -> str:
    return str(entry.name)
