"""Calls of a key at a rate: ours, the recipe that is written by hand, and plain countdowns.

The environment: BROKER_URL, also of the counters of the recipe; LOCK_URL, a server of its own;
MARKS, the file to which each body appends a line; RATE, in starts a second.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final

import redis
from celery import Celery, Task

from celery_singleton_lock import singleton_task

__all__ = ["KINDS", "app"]

#: The names of the tasks and of their queues.
KINDS: Final = ("ours", "by hand", "countdown")

_RATE: Final = int(os.environ["RATE"])
_BROKER_URL = os.environ["BROKER_URL"]
_MARKS = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_counters: Any = redis.Redis.from_url(_BROKER_URL)

app = Celery("rate", broker=_BROKER_URL, set_as_current=False)
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_ignore_result=True,
    singleton_lock_url=os.environ["LOCK_URL"],
)


def _mark(kind: str, key: str, number: int, due: float) -> None:
    os.write(_MARKS, f"{kind.replace(' ', '-')} {key} {number} {due!r} {time.time()!r}\n".encode())


@singleton_task(app=app, name="ours", key="{key}", rate=_RATE, on_conflict="queue")
def ours(key: str, number: int) -> None:
    """The store reserves the time of the start."""
    _mark("ours", key, number, 0.0)


@app.task(name="by hand", bind=True, max_retries=None)
def by_hand(self: Task, key: str, number: int) -> None:
    """A counter for each key and second; what is above the rate tries again a second later."""
    counter = f"rate:{key}:{int(time.time())}"
    with _counters.pipeline() as both:
        count, _ = both.incr(counter).expire(counter, 10).execute()
    if count > _RATE:
        raise self.retry(countdown=1)
    _mark("by hand", key, number, 0.0)


@app.task(name="countdown")
def countdown(key: str, number: int, due: float) -> None:
    """Celery's own: how late is a message that has a time?"""
    _mark("countdown", key, number, due)
