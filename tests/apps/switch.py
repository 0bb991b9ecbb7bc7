"""Tasks with every use of the store, for workers and producers that are switched off.

Its environment: BROKER_URL, RESULT_URL, LOCK_URL (empty: no setting), JOURNAL; ENABLED=0: the
setting is False; REMOVED=1: the same tasks as plain ones, as if the package were gone.
A body that is given a gate (`tests.apps.gate`) ends when its test opens that.
"""

from __future__ import annotations

import os
from typing import Any

import redis
from celery import Celery

from celery_singleton_lock import singleton_task
from tests.apps.gate import Gate
from tests.harness.journal import Journal

app = Celery("switch", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(broker_connection_retry_on_startup=True, worker_prefetch_multiplier=1)
if os.environ.get("LOCK_URL"):
    app.conf.singleton_lock_url = os.environ["LOCK_URL"]
if os.environ.get("ENABLED") == "0":
    app.conf.singleton_lock_enabled = False
if os.environ.get("ON_STORE_ERROR"):
    app.conf.singleton_lock_on_store_error = os.environ["ON_STORE_ERROR"]


def task(name: str, **options: Any) -> Any:
    """A decorator: a singleton task, or a plain one of the same name."""
    if os.environ.get("REMOVED"):
        return app.task(bind=True, name=f"switch.{name}")
    return singleton_task(app=app, bind=True, name=f"switch.{name}", **options)


def work(task: Any, key: str, number: int, gate: str | None) -> int:
    with Journal.from_env().run(key, task_id=task.request.id, number=number):
        if gate is not None:
            Gate(redis.Redis.from_url(os.environ["RESULT_URL"], socket_timeout=None), gate).wait()
    return number


@task("locked", key="{key}")
def locked(self: Any, key: str, number: int = 0, gate: str | None = None) -> int:
    return work(self, key, number, gate)


@task("off", key="{key}", enabled=False)
def off(self: Any, key: str, number: int = 0, gate: str | None = None) -> int:
    return work(self, key, number, gate)


@task("queued", key="{key}", on_conflict="queue", ttl=3)
def queued(self: Any, key: str, number: int = 0, gate: str | None = None) -> int:
    return work(self, key, number, gate)


@task("once", key="{key}", unique="until_done")
def once(self: Any, key: str, number: int = 0, gate: str | None = None) -> int:
    return work(self, key, number, gate)


@task("debounced", key="{key}", debounce=1)
def debounced(self: Any, key: str, number: int = 0, gate: str | None = None) -> int:
    return work(self, key, number, gate)


@task("retrying", key="{key}", on_conflict="queue", unique="until_done", max_retries=2, ttl=3)
def retrying(self: Any, key: str, number: int = 0) -> int:
    work(self, key, self.request.retries, None)
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    return number
