"""When the scheduled runs of an entry are due.

An interval entry has a grid: the points ``last run + k * interval``. All times are in UTC.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from celery.beat import ScheduleEntry
from celery.schedules import crontab, schedule

from ..message.times import utc

# The period of a schedule that can't compute one, such as a user's own class.
_UNKNOWN_PERIOD: Final = timedelta(days=1)
#: Clocks with NTP differ by less than a second, neglected clocks by less than a minute.
CLOCK_TOLERANCE: Final = timedelta(minutes=1)
_MINUTE: Final = timedelta(minutes=1)
# How far back the due time of a late crontab is looked for: a day and an hour.
_CRON_MINUTES: Final = 25 * 60


def tick_of(entry: ScheduleEntry) -> datetime:
    """The due time of the tick that is due now; without due times: the current time."""
    now, every = now_of(entry), interval_of(entry)
    last = utc(entry.last_run_at) if entry.last_run_at is not None else None
    if isinstance(entry.schedule, crontab):
        return _cron_point(entry, last, now)
    if every is None or last is None:
        return now
    return latest_point(last, every, now) if last + every <= now else now


def _cron_point(entry: ScheduleEntry, last: datetime | None, now: datetime) -> datetime:
    """The latest minute up to ``now`` that the crontab of ``entry`` names; else ``now``.

    Not the time at which it is sent: in the hour that comes twice at the end of summer time, Celery
    takes the entry for due again and again if its last run was between two of its minutes.
    """
    fields: Any = entry.schedule
    point = now.replace(second=0, microsecond=0)
    for _ in range(_CRON_MINUTES):
        if last is not None and point <= last:
            break
        local = point.astimezone(fields.tz)
        if (
            local.minute in fields.minute
            and local.hour in fields.hour
            and local.isoweekday() % 7 in fields.day_of_week
            and local.day in fields.day_of_month
            and local.month in fields.month_of_year
        ):
            return point
        point -= _MINUTE
    return now


def interval_of(entry: ScheduleEntry) -> timedelta | None:
    """The interval of an entry that has a grid; None for crontabs and similar schedules.

    None also for subclasses of ``schedule``, whose due times may be off the grid, and for
    ``relative`` schedules, which are rounded to the clock and need no grid.
    """
    found: Any = entry.schedule
    is_plain = type(entry.schedule) is schedule and not found.relative
    return found.run_every if is_plain and found.run_every > timedelta(0) else None


def now_of(entry: ScheduleEntry) -> datetime:
    """The time of the clock that the entry's schedule uses."""
    return utc(entry.default_now())


def like(moment: datetime, sample: datetime) -> datetime:
    """Convert ``moment`` from UTC to the time zone of ``sample``; naive if ``sample`` is naive."""
    zone = sample.tzinfo
    return moment.astimezone(zone) if zone else moment.replace(tzinfo=None)


def latest_point(last: datetime, every: timedelta, now: datetime) -> datetime:
    """The last point of the grid ``last + k * every`` that isn't after ``now``.

    A late tick belongs to this point, so the next tick is on the grid again. If several points were
    missed, only the last one is run.
    """
    return last + every * ((now - last) // every)


def period_of(entry: ScheduleEntry, last: datetime, now: datetime) -> timedelta:
    """The time from ``last`` until the next tick is due."""
    if every := interval_of(entry):
        return every
    found = entry.schedule
    try:
        remaining: Any = found and found.remaining_estimate(like(last, entry.default_now()))
        period: timedelta = now + remaining - last
    except Exception:
        return _UNKNOWN_PERIOD  # a user's own schedule that does not support future dates
    return period if period > timedelta(0) else _UNKNOWN_PERIOD


def believable(last: datetime, period: timedelta, now: datetime) -> datetime:
    """``last``, or a time not after ``now`` if a host with a wrong clock wrote ``last``.

    A host whose clock is ahead stores a last run in the future. If this host waits until its own
    clock reaches that time, no tick is run twice, so up to one minute or one ``period`` is
    accepted. A last run further ahead would stop the entry for as long as that clock was ahead.
    """
    if last - now <= max(period, CLOCK_TOLERANCE):
        return last
    return latest_point(last, period, now) if period > timedelta(0) else now
