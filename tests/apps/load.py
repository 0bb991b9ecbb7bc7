"""Short tasks over a few hundred keys, some of which are killed in the midst of their first run.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; WITHOUT=lock takes the lock out.
"""

from __future__ import annotations

import os
import signal
import time
from functools import cache
from typing import Any

import redis
from celery import Celery, Task

from celery_singleton_lock import NoLease, OnConflict, current_lease, singleton_task
from celery_singleton_lock.task.base import SingletonTask
from tests.harness.journal import Journal
from tests.load.tasks import DONE

#: Seconds that a body takes, so that bodies of one key would meet.
WORK = 0.002

app = Celery("load", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=4,
)

if os.environ.get("WITHOUT") == "lock":
    SingletonTask.__call__ = Task.__call__  # type: ignore[method-assign]


@cache
def _client(pid: int) -> redis.Redis:
    return redis.Redis.from_url(os.environ["RESULT_URL"])


@singleton_task(
    app=app,
    bind=True,
    key="{account}",
    ttl=10,
    on_conflict=OnConflict.retry(0.05, 1, None),
)
def work(self: Any, account: int, dies: bool = False) -> None:
    """Work on ``account``; with ``dies``, the process is killed in the midst of the first run."""
    try:
        fence = current_lease().fence
    except NoLease:
        fence = None
    client, journal = _client(os.getpid()), Journal.from_env()
    with journal.run(str(account), task_id=self.request.id, fence=fence):
        time.sleep(WORK)
        if dies and client.set(f"load:died:{self.request.id}", 1, nx=True):
            journal.death(os.getpid(), time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
    client.incr(DONE)
