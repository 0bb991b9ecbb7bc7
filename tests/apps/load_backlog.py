"""Calls of few keys that wait in the store; the first of them ends when its gate is opened.

Its environment: BROKER_URL, LOCK_URL, JOURNAL.
"""

from __future__ import annotations

import os
from functools import cache

import redis
from celery import Celery

from celery_singleton_lock import singleton_task
from tests.apps.gate import Gate
from tests.harness.journal import Journal

app = Celery("load_backlog", broker=os.environ["BROKER_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    task_ignore_result=True,
    singleton_lock_url=os.environ["LOCK_URL"],
)


@cache
def _client(pid: int) -> redis.Redis:
    return redis.Redis.from_url(os.environ["BROKER_URL"], socket_timeout=None)


@singleton_task(app=app, key="{account}", ttl=30, on_conflict="queue")
def work(account: str, number: int, text: str = "", gate: str | None = None) -> None:
    Journal.from_env().note("ran", key=account, number=number)
    if gate is not None:
        Gate(_client(os.getpid()), gate).wait()
