"""When the run of an entry was due, from Celery's entries and schedules; all moments in UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from celery.beat import ScheduleEntry
from celery.schedules import schedule

__all__ = [
    "believable",
    "interval_of",
    "latest_slot",
    "like",
    "now_of",
    "period_of",
    "slot_of",
    "utc",
]

# What a schedule's period is taken for that can't tell it: one of a user's own.
_UNKNOWN_PERIOD: Final = timedelta(days=1)


def slot_of(entry: ScheduleEntry) -> datetime:
    """When the run that is due now was due; for a crontab: now, which is its minute or later."""
    now, every = now_of(entry), interval_of(entry)
    if every is None or entry.last_run_at is None:
        return now
    last = utc(entry.last_run_at)
    return latest_slot(last, every, now) if last + every <= now else now


def interval_of(entry: ScheduleEntry) -> timedelta | None:
    """The interval of an entry that has a grid; None for crontabs and the like.

    Not for subclasses, whose moments aren't on it, nor for ``relative`` ones: these are rounded to
    the clock, and so keep their phase by themselves.
    """
    found: Any = entry.schedule
    if type(entry.schedule) is not schedule or found.relative or found.run_every <= timedelta(0):
        return None
    every: timedelta = found.run_every
    return every


def period_of(entry: ScheduleEntry, last: datetime, now: datetime) -> timedelta:
    """How long after ``last`` the next run is due."""
    every, found = interval_of(entry), entry.schedule
    if every is not None:
        return every
    try:
        remaining: Any = found and found.remaining_estimate(like(last, entry.default_now()))
        period: timedelta = now + remaining - last
    except Exception:
        return _UNKNOWN_PERIOD  # a user's own schedule, which was never asked for a future date
    return period if period > timedelta(0) else _UNKNOWN_PERIOD


def now_of(entry: ScheduleEntry) -> datetime:
    """By the clock of the entry's schedule."""
    return utc(entry.default_now())


def utc(moment: datetime) -> datetime:
    """``moment`` in UTC, which is what Celery takes one without a zone for."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def like(moment: datetime, sample: datetime) -> datetime:
    """``moment``, in UTC, in the zone of ``sample``; without a zone if that has none."""
    if sample.tzinfo is None:
        return moment.replace(tzinfo=None)
    return moment.astimezone(sample.tzinfo)


# Clocks kept by NTP are within a second of each other, neglected ones within a minute.
_CLOCK_TOLERANCE: Final = timedelta(minutes=1)


def latest_slot(last: datetime, every: timedelta, now: datetime) -> datetime:
    """The last point of the grid ``last + k * every`` that isn't after ``now``.

    A tick that comes late is of this slot, so the next one is on the grid again, and of several
    slots that were missed one is run.
    """
    return last + every * ((now - last) // every)


def believable(last: datetime, period: timedelta, now: datetime) -> datetime:
    """``last``, or something not after ``now`` if a clock that was wrong must have written it.

    A last run in the future comes from a host whose clock is ahead. Waiting until this one gets
    there keeps a slot from being run twice, so up to a minute or one ``period`` is waited for. A
    last run further ahead would silence the entry for as long as that clock was off.
    """
    if last - now <= max(period, _CLOCK_TOLERANCE):
        return last
    return latest_slot(last, period, now) if period > timedelta(0) else now
