"""Tasks of an app with a time zone of its own: ZONE, beside BROKER_URL and RESULT_URL."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Celery

from celery_singleton_lock import singleton_task

app = Celery("zones", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(broker_connection_retry_on_startup=True, timezone=os.environ["ZONE"])


def naive_in(seconds: float) -> datetime:
    """What ``datetime.utcnow()`` returns after ``seconds``, in any time zone."""
    return datetime.now(UTC).replace(tzinfo=None) + timedelta(seconds=seconds)


@singleton_task(app=app, bind=True, key="{name}", ttl=3, unique="until_done", unique_for=100)
def work(self: Any, name: str, retry_in: float | None = None) -> str:
    """Retries once, at a time without a time zone."""
    if retry_in is not None and self.request.retries == 0:
        raise self.retry(eta=naive_in(retry_in))
    return name
