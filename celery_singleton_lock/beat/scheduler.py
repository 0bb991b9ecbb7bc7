"""Schedulers for Celery Beat that tick only while they lead an election.

``celery beat --scheduler singleton`` is :class:`LeaderScheduler`. For schedules in Django's
database or in Redis see :mod:`~celery_singleton_lock.beat.django` and
:mod:`~celery_singleton_lock.beat.redbeat`; for the guarantees,
:mod:`~celery_singleton_lock.beat.election`. The steps of one tick of the leader::

    is_due        set the entry's stored last run; after a late tick the next tick is on the grid
    reserve       ask the broker; defer signals; authorize the tick (swap the last run)
    apply_entry   send the message, with the tick's moment in a header; deliver deferred signals

The due times of an entry are in :mod:`~celery_singleton_lock.beat.due_time`.
"""

from __future__ import annotations

import logging
import shelve
import signal
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cached_property
from types import FrameType
from typing import Any, Final, NoReturn

from celery.beat import PersistentScheduler, ScheduleEntry, Scheduler, SchedulingError
from celery.schedules import schedstate
from redis.exceptions import ResponseError

from ..celery_compat import rebuild_heap
from ..core import observers
from ..core.outages import Outages
from ..errors import SettingsError, StoreError
from ..message.header import SCHEDULED_AT_HEADER
from ..message.times import utc
from ..publish.by_name import claim_and_send
from ..runtime import Runtime
from ..worker.bootstep import exit_on_wrong_settings, why_no_leases
from ..worker.other_prefix import PAGE, leases_elsewhere, text_of
from .broker_check import Broker
from .due_time import (
    CLOCK_TOLERANCE,
    believable,
    interval_of,
    latest_point,
    like,
    now_of,
    period_of,
    tick_of,
)
from .election import Election, check_leader_ttl
from .entry import checked_entries

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

logger = logging.getLogger("celery_singleton_lock")


class _NoTick(Exception):
    """Raised if a tick can't be sent now. Ends this round of :meth:`LeaderMixin.tick`."""


class LeaderMixin(Scheduler):
    """Makes a scheduler tick only while it leads. Precedes the scheduler's class in the bases."""

    Producer: Any
    _closed = False

    def __init__(self, app: Any, *, lazy: bool = False, **kwargs: Any) -> None:
        self._runtime = Runtime.of(app)
        # `celery beat` creates a lazy scheduler for its banner, before its log is set up.
        if not lazy:
            self._election = _candidate(self._runtime)
            self._signals = SignalDeferral()
            self._term = 0
            # The latest time of a round: seconds since the epoch, on the clock of this host.
            self._latest = 0.0
            self._tick_at: datetime | None = None
            self._warned: set[str] = set()
            if records := leases_elsewhere(self._runtime, self._runtime.store):
                text = text_of(records, self._runtime)
                logger.warning("singleton beat: %s: see %s", text, PAGE)
        # By keyword, as `celery beat` passes it: sqlalchemy-celery-beat reads kwargs["app"].
        super().__init__(app=app, lazy=lazy, **kwargs)
        if not lazy:
            events, clock = self._runtime.events, self._runtime.clock
            self._broker = Broker(self.connection, self.producer, clock, self._election.ttl)
            self._broker_outages = Outages(events, clock, self._broker.url, server="broker")

    # A receiver of a signal that waits for longer than the ttl must not cost the leadership.
    @observers.elsewhere()
    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Tick if this process leads, else stand by. Return the seconds to sleep."""
        if self._closed:
            # Celery's signal handler closes the scheduler and raises SystemExit. If the handler
            # interrupts a finalizer (`__del__`), the exception is lost.
            raise SystemExit
        election = self._election
        if not self.leads():
            return min(election.pause(), election.poll)
        try:
            self._look_again()
            wait = super().tick(*args, **kwargs)
        except (_NoTick, StoreError) as exc:
            # The reason was logged. The exception interrupted a tick, so the heap has to be built
            # again.
            rebuild_heap(self)
            if isinstance(exc, StoreError):
                # The heartbeat decides for how long the lease outlives an outage of the store.
                election.progress()
            return min(election.pause(), election.poll)
        finally:
            self._signals.end()
        if not self._broker.refuses:
            election.progress()
        return min(wait, election.pause())

    def _look_again(self) -> None:
        """Check all entries again, after an election and after the clock was set back."""
        wall, tolerance = self._runtime.clock.wall(), CLOCK_TOLERANCE.total_seconds()
        if self._term != self._election.term:
            self._broker.refuses = False
            self.elected()
            self._term = self._election.term
        elif wall < self._latest - tolerance:
            logger.warning(
                f"singleton beat: the clock was set back by {self._latest - wall:.0f} s or more. "
                "All entries are checked again."
            )
            self.reload()
        else:
            wall = max(wall, self._latest)
        self._latest = wall

    def leads(self) -> bool:
        """Whether this process could send a tick, and leads; it stands for election if need be."""
        # The broker is asked as often as the leader renews its lease.
        election = self._election
        return self._reaches_broker(within=election.interval) and election.campaign()

    def _reaches_broker(self, *, within: float = 0.0) -> bool:
        try:
            self._broker.ask(within=within)
        except Exception as exc:
            self._election.fail(exc, self._broker_outages)
            return False
        self._broker_outages.end(self._election.key)
        return True

    @cached_property
    def producer(self) -> Any:
        """As Celery's, but not yet connected: kombu would try until the broker is there."""
        return self.Producer(self.connection, auto_declare=False)

    def close(self) -> None:
        """Save the schedule, then resign, so that the next leader reads the saved schedule."""
        self._closed = True
        try:
            super().close()
        finally:
            self._election.resign("it was stopped")

    @property
    def info(self) -> str:
        """The lines for the banner of ``celery beat``."""
        lines = [super().info]
        try:
            settings = self._runtime.settings
            key = self._runtime.keyspace.leader(settings.beat_name)
            lines.append(f"    . leader -> {key} (ttl {settings.beat_ttl:g}s)")
        except SettingsError:
            pass  # creating the scheduler that ticks raises this error again
        return "\n".join(filter(None, lines))

    def update_from_dict(self, dict_: Any) -> None:
        """Add the entries of a configuration; a wrong one is left out."""
        super().update_from_dict(checked_entries(dict_))

    def merge_inplace(self, b: Any) -> None:
        """Make the schedule that of a configuration; a wrong entry is left out."""
        super().merge_inplace(checked_entries(b))

    def populate_heap(self, *args: Any, **kwargs: Any) -> None:
        """Build the heap from the stored last runs."""
        self.restore(self.schedule.values())
        super().populate_heap(*args, **kwargs)

    def is_due(self, entry: ScheduleEntry) -> tuple[bool, float]:
        """Whether the entry is due by its stored last run, and seconds until the next check."""
        try:
            self.restore([entry])
        except (StoreError, _NoTick):
            # The entry is newer than the heap. Celery would treat the exception as an error of the
            # entry's schedule, and check the entry again minutes later.
            return schedstate(False, self._election.poll)
        due, wait = super().is_due(entry)
        every = interval_of(entry)
        if due and every is not None and entry.last_run_at is not None:
            now = now_of(entry)
            following = latest_point(utc(entry.last_run_at), every, now) + every
            wait = (following - now).total_seconds()
        return schedstate(due, wait)

    def reserve(self, entry: ScheduleEntry) -> Any:
        """Authorize the tick, and return the entry after it. The caller must send the message."""
        # Ask first: an outage of the broker must be met here, not between the swap and the send.
        if not self._reaches_broker():
            raise _NoTick
        tick_at = tick_of(entry)
        self._signals.begin()
        self.authorize(entry, tick_at)
        self._tick_at = tick_at
        return self.advance(entry, tick_at)

    def authorize(self, entry: ScheduleEntry, at: datetime) -> None:
        """Make ``at`` the stored last run of ``entry``, or end this round of :meth:`tick`."""
        if not self._election.authorize_run(_name(entry), at.timestamp()):
            raise _NoTick

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        """Send the message of the entry, with the tick's moment in a header."""
        options = entry.options or {}
        if options.get("singleton"):
            self._warn_of_plain_task(entry)
        tick_at, self._tick_at = self._tick_at, None
        if tick_at is not None:
            headers = {**(options.get("headers") or {}), SCHEDULED_AT_HEADER: tick_at.isoformat()}
            # kombu repeats a send whose reply was lost. The broker may have the message already.
            entry.options = {"retry": False, **options, "headers": headers}
        try:
            super().apply_entry(entry, producer=producer)
        finally:
            # With the header, the entry would differ from its successor, which Celery would treat
            # as a changed schedule.
            entry.options = options
            self._signals.end()

    def apply_async(self, entry: ScheduleEntry, *args: Any, **options: Any) -> Any:
        """As Celery's, and note whether the broker takes the message."""
        try:
            result = super().apply_async(entry, *args, **options)
        except SchedulingError as exc:
            if _is_refusal(exc):
                self._broker.note_refusal()
            raise
        self._broker.refuses = False
        return result

    def send_task(self, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Send a task whose class isn't registered here, with a claim if the entry requests it."""
        singleton: Any = dict(options.pop("singleton", None) or {})
        if not singleton:
            return super().send_task(name, args, kwargs, **options)
        # Only the task's class can compute its key, so the entry may contain the key.
        key, scope = singleton.pop("key", None), singleton.pop("scope", None)
        return claim_and_send(
            self.app, name, args, kwargs, singleton=singleton, key=key, scope=scope, **options
        )

    def elected(self) -> None:
        """Discard cached state. Called when this process starts to lead."""
        self.reload()

    def reload(self) -> None:
        """Compute again when each entry is due: its last run may be corrected."""
        rebuild_heap(self)

    def restore(self, entries: Iterable[ScheduleEntry]) -> None:
        """Set the last runs of ``entries``: the stored ones, unless they are wrong.

        Raises:
            StoreError: The last runs can't be read.
        """
        entries = list(entries)
        new = set(self._election.recall(map(_name, entries)))
        for entry in entries:
            own = utc(entry.last_run_at) if entry.last_run_at is not None else None
            at = self._election.last_runs.get(_name(entry))
            stored = datetime.fromtimestamp(at, UTC) if at is not None else None
            keeps = self.keeps_last_run(entry)
            candidates = (stored, own if keeps or stored is None else None)
            runs = [run for run in candidates if run is not None]
            if runs:
                last = self._believed(entry, runs)
                if stored is not None or last != own:
                    self.set_last_run(entry, last)
                if keeps and own is not None and last < own:
                    self.store_last_run(entry)
            if stored is None and _name(entry) in new:
                self.never_ran(entry)

    def keeps_last_run(self, entry: ScheduleEntry) -> bool:
        """Whether ``entry.last_run_at`` was stored by a run, and isn't the entry's start."""
        return False

    def never_ran(self, entry: ScheduleEntry) -> None:
        """Handle an ``entry`` without a stored last run: its own is the first point of its grid."""

    def set_last_run(self, entry: ScheduleEntry, at: datetime) -> None:
        """Make ``at`` (in UTC) the last run of ``entry``, in the entry's own time zone."""
        entry.last_run_at = like(at, entry.default_now())

    def store_last_run(self, entry: ScheduleEntry) -> None:
        """Overwrite the wrong last run in the schedule's own storage, if it has one."""

    def advance(self, entry: ScheduleEntry, tick_at: datetime) -> Any:
        """The entry after its tick at ``tick_at``."""
        following: Any = super().reserve(entry)
        self.set_last_run(following, tick_at)
        return following

    def _warn_of_plain_task(self, entry: ScheduleEntry) -> None:
        task = self.app.tasks.get(str(entry.task))
        if task is None or hasattr(task, "singleton_policy") or _name(entry) in self._warned:
            return
        self._warned.add(_name(entry))
        logger.warning(
            f"singleton beat: the entry {entry.name!r} has options['singleton'], but {entry.task!r}"
            " is no singleton task: it is sent as if the entry didn't say so. Decorate the task "
            "with @singleton_task."
        )

    def _believed(self, entry: ScheduleEntry, runs: list[datetime]) -> datetime:
        """The latest of the last ``runs`` that can be right; a corrected one if none can."""
        now = now_of(entry)
        if (latest := max(runs)) <= now:
            return latest
        by_run = {run: believable(run, period_of(entry, run, now), now) for run in runs}
        right = [run for run, believed in by_run.items() if believed == run]
        last = max(right or by_run.values())
        if by_run[latest] != latest:
            logger.warning(
                f"singleton beat: the last run of {entry.name!r} is stored as {latest}, "
                f"{(latest - now).total_seconds():.0f} s ahead of this host's clock; a clock was "
                f"wrong. Continuing from {last}."
            )
            self._election.last_runs[_name(entry)] = last.timestamp()
        return last


class _Memory:
    """What a schedule is kept in without a file, in place of the module shelve."""

    @staticmethod
    def open(filename: str, *, writeback: bool) -> shelve.Shelf[Any]:
        return shelve.Shelf({}, writeback=writeback)


class LeaderScheduler(LeaderMixin, PersistentScheduler):
    """Celery's own scheduler with an election. Each process has its own schedule file.

    Where two share one, and dbm is `dbm.dumb`, each overwrites what the other reads. A process that
    can't read its file continues without one, because the last runs are in the store.
    """

    persistence: Any = shelve
    schedule_filename: str

    def get_schedule(self) -> Any:
        """The entries by name; from the configuration, if the file can't be read."""
        try:
            return super().get_schedule()
        except Exception as exc:
            if self.persistence is _Memory:
                raise
            logger.warning(
                f"singleton beat: the schedule file {self.schedule_filename!r} can't be read any "
                f"more ({exc!r}). If another beat runs in this folder, give each a --schedule FILE "
                "of its own. This one continues without a file."
            )
            self.persistence = _Memory
            self.setup_schedule()
            return super().get_schedule()

    schedule = property(get_schedule, PersistentScheduler.set_schedule)

    def never_ran(self, entry: ScheduleEntry) -> None:
        """Store the first point of the grid, so that it outlives this process and its file."""
        if entry.last_run_at is not None:
            self.authorize(entry, utc(entry.last_run_at))


class SignalDeferral:
    """Defers SIGTERM and SIGINT from the swap of a last run until the message is sent.

    Beat's signal handler raises SystemExit at any line; between the two steps it would lose that
    tick. A second signal is delivered at once, because the send itself may hang. Python runs
    handlers on the main thread only, so on other threads there is nothing to defer.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._deferred: int | None = None

    def begin(self) -> None:
        """Defer signals until :meth:`end`."""
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):  # else the default action, which raises no exception
                self._handlers[number] = handler
                signal.signal(number, self._defer)

    def end(self) -> None:
        """Restore the handlers, then deliver the signal that was deferred."""
        while self._handlers:
            signal.signal(*self._handlers.popitem())
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            signal.raise_signal(deferred)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if self._deferred is None:
            self._deferred = number
        else:
            self.end()


def _name(entry: ScheduleEntry) -> str:
    return str(entry.name)


def _is_refusal(error: BaseException | None) -> bool:
    """Whether a Redis broker refused the message: it was demoted, or is full.

    Other brokers that take no messages do not reply.
    """
    while error is not None and not isinstance(error, StoreError):
        if isinstance(error, ResponseError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _candidate(runtime: Runtime) -> Election:
    """The election of this process. A wrong setting ends ``celery beat`` with one log line."""
    with exit_on_wrong_settings():
        try:
            reason = why_no_leases(runtime)
        except StoreError:  # the first campaign reports it
            runtime.refuse_evictable_leases(is_known=False)
        else:
            if reason:
                raise SettingsError(reason)
        check_leader_ttl(runtime)
        return Election(runtime)


def end_without(extra: str, package: str, exc: ModuleNotFoundError) -> NoReturn:
    """End ``celery beat`` with one log line, because ``package`` isn't installed.

    Raises:
        SettingsError: The scheduler is imported by another program, which may catch the error.
        ModuleNotFoundError: Something else is missing, such as a module of Django's settings.
    """
    if (exc.name or "").partition(".")[0] != package:
        raise exc
    with exit_on_wrong_settings():
        raise SettingsError(
            f"this scheduler needs {package}: pip install 'celery-singleton-lock[{extra}]'"
        ) from exc
