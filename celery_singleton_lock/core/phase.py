"""When a run was due: the arithmetic that keeps an interval on its grid. All moments are in UTC.

In UTC because two moments of one local zone are subtracted by their wall times: twice a year that
is an hour off.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

__all__ = ["believable", "latest_slot"]

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
