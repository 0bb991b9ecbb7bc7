"""A plain task, a singleton task, and a task that reports the end of a lap.

The environment: BROKER_URL, also of the results; LOCK_URL, a server of its own.
"""

from __future__ import annotations

import os

import redis
from celery import Celery

from celery_singleton_lock import singleton_task
from tests.benchmarks.events.report import LOCKED, PLAIN

__all__ = ["ENDS", "LAP_END", "app"]

#: The list in the broker's server with an entry for the end of each lap.
ENDS = "benchmark-ends"
#: The name of the task that ends a lap.
LAP_END = "lap_end"

_BROKER_URL = os.environ["BROKER_URL"]

app = Celery("events", broker=_BROKER_URL, backend=_BROKER_URL, set_as_current=False)
app.conf.update(broker_connection_retry_on_startup=True)
app.conf.singleton_lock_url = os.environ["LOCK_URL"]

_client = redis.Redis.from_url(_BROKER_URL)


@app.task(name=PLAIN)
def plain(number: int) -> None:
    """Do nothing."""


@singleton_task(app=app, name=LOCKED)
def locked(number: int) -> None:
    """Do nothing."""


@app.task(name=LAP_END, ignore_result=True)
def lap_end() -> None:
    """Report that all tasks before it have ended."""
    _client.rpush(ENDS, 1)
