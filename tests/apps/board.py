"""A shop whose tasks give each panel of the Grafana board something to show.

Its environment: BROKER_URL, RESULT_URL; LOCK_URL, the lock store.
"""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery

from celery_singleton_lock import PER_TASK, OnConflict, singleton_task

app = Celery("shop", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    singleton_lock_url=os.environ["LOCK_URL"],
    singleton_lock_beat_ttl=10,
    worker_prefetch_multiplier=1,
    beat_scheduler="singleton",
    beat_schedule={"orders": {"task": "orders.poll", "schedule": 4.0}},
)
# Short, because the lock of a dead holder is shown too.
options: dict[str, Any] = {"app": app, "ttl": 6}
survives: dict[str, Any] = {"acks_late": True, "reject_on_worker_lost": True}


@singleton_task(**options, **survives, name="accounts.sync", key="account:{account}", min_hold=2)
def sync(account: int, seconds: float) -> None:
    time.sleep(seconds)


@singleton_task(**options, **survives, name="cards.charge", key="{card}", on_conflict="queue")
def charge(card: int, seconds: float) -> None:
    """One after another, in the order of the calls."""
    time.sleep(seconds)


@singleton_task(
    **options, name="search.reindex", key=PER_TASK, on_conflict=OnConflict.wait(timeout=20)
)
def reindex(seconds: float) -> None:
    """Waits in its process."""
    time.sleep(seconds)


@singleton_task(
    **options, name="reports.build", key="{report}", on_conflict=OnConflict.retry(delay=1)
)
def build(report: str, seconds: float) -> None:
    time.sleep(seconds)


@singleton_task(**options, name="pages.preview", key="{page}", on_conflict="cancel_running")
def preview(page: str, seconds: float) -> None:
    """The newest call ends the others."""
    time.sleep(seconds)


@singleton_task(**options, name="mail.digest", key="{user}", unique="until_done", unique_for=60)
def digest(user: int, seconds: float) -> None:
    time.sleep(seconds)


@singleton_task(**options, name="orders.poll", key=PER_TASK)
def poll() -> None:
    """Published by Beat; publishes duplicates."""
    for user in (1, 2, 2):
        digest.delay(user, 2.0)
