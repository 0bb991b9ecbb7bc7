"""Times in a call's options, in a message and in a result, read as Celery's worker reads them.

Celery sends ``eta`` and ``expires`` as ISO text. A worker reads a time without a time zone as UTC,
whatever ``timezone`` and ``enable_utc`` say (Celery 5.5 to 5.7).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

from celery import Celery
from celery.utils.time import maybe_iso8601

from ..celery_compat import elapsed_seconds, keeps_local_time


def utc(when: datetime | str) -> datetime:
    """``when`` (a datetime or its ISO text) in UTC.

    Raises:
        ValueError: The text is no time.
    """
    moment = cast("datetime", maybe_iso8601(when))
    # A time zone may have no offset, too; then isoformat() writes none.
    return moment.replace(tzinfo=UTC) if moment.utcoffset() is None else moment.astimezone(UTC)


def seconds_until(when: Any, app: Celery) -> float | None:
    """Seconds from now until the time of an option, such as ``countdown``, ``eta`` or ``expires``.

    Args:
        when: Seconds, ISO text, or what has an ``isoformat()`` that returns it; None: now.
        app: The app that publishes the message, or runs it.

    Returns:
        0 for a time that has passed. None if it is no time: Celery refuses to publish such a
        message, or no worker can read it.
    """
    if not when:
        return 0.0
    try:
        if isinstance(when, (int, float)):
            return max(0.0, elapsed_seconds(app, float(when)))
        # Two times of one ZoneInfo are subtracted by their wall clock, so both are in UTC.
        moment = utc(when if isinstance(when, (datetime, str)) else when.isoformat())
        return max(0.0, (moment - utc(app.now())).total_seconds())
    except (AttributeError, TypeError, ValueError):
        return None


def done_at(date_done: Any, app: Celery) -> datetime | None:
    """When the app's result backend has stored a result, in UTC; None: unknown.

    Args:
        date_done: The value in the metadata of the result.
        app: The app.
    """
    if isinstance(date_done, datetime) and date_done.tzinfo is None and keeps_local_time(app):
        return date_done.astimezone(UTC)
    return utc(date_done) if date_done and isinstance(date_done, (datetime, str)) else None
