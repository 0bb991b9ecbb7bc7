"""Sentry's Crons: the check-in of a scheduled call that another call makes needless.

sentry-sdk opens a check-in when beat sends an entry, puts it into the headers, and closes it when
the task succeeds, fails or retries. A call that publishes nothing has no task, and REVOKED sends
none of these signals. Such a check-in would stay open, and Sentry would report a failure.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("celery_singleton_lock")


def close_check_in(headers: Mapping[str, Any] | None) -> None:
    """Report success for the check-in in the ``headers`` of a call, if there is one."""
    sdk: Any = sys.modules.get("sentry_sdk.crons")
    if sdk is None or not headers or not headers.get("sentry-monitor-check-in-id"):
        return
    try:
        sdk.capture_checkin(
            monitor_slug=headers["sentry-monitor-slug"],
            check_in_id=headers["sentry-monitor-check-in-id"],
            monitor_config=headers.get("sentry-monitor-config"),
            status="ok",
        )
    except Exception:
        logger.warning("singleton: could not close a check-in of Sentry's Crons", exc_info=True)
