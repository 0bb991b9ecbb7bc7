"""Tasks of each ``on_conflict``, whose keys and scopes tests pause.

A body that is given a gate (`tests.apps.gate`) ends when its test opens that. Its environment:
WITHOUT_QUEUE=1: no task has ``on_conflict="queue"``; SLOW_SUCCESS: seconds between a result and the
release of the lease.
"""

from __future__ import annotations

import os
import time
from functools import cache
from typing import Any

import redis
from celery import Celery
from celery.signals import task_success

from celery_singleton_lock import OnConflict, current_lease, pause, singleton_task
from tests.apps.gate import Gate
from tests.harness.journal import Journal

app = Celery("pauses", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    singleton_lock_url=os.environ.get("LOCK_URL") or os.environ["RESULT_URL"],
)


if os.environ.get("SLOW_SUCCESS"):

    @task_success.connect
    def be_slow(**_: Any) -> None:
        time.sleep(float(os.environ["SLOW_SUCCESS"]))


@cache
def client(pid: int) -> redis.Redis:
    return redis.Redis.from_url(os.environ["RESULT_URL"], socket_timeout=None)


def run(self: Any, name: str, number: int) -> Any:
    request = self.request
    return Journal.from_env().run(
        name, task_id=request.id, number=number, retries=request.retries, task=self.name
    )


def body(self: Any, name: str, number: int = 0, gate: str = "") -> int:
    with run(self, name, number):
        if gate:
            Gate(client(os.getpid()), gate).wait()
    return number


def task(name: str, **options: Any) -> Any:
    given = {"app": app, "bind": True, "name": f"pauses.{name}", "key": "{name}", "ttl": 3}
    return singleton_task(**given, **options)(body)


rules = {
    rule: task(rule, on_conflict=rule)
    for rule in ("skip", "revoke", "raise", "wait", "retry", "cancel_running", "queue")
    if rule != "queue" or not os.environ.get("WITHOUT_QUEUE")
}
late = task("late", on_conflict="skip", acks_late=True, reject_on_worker_lost=True)
unsafe = {rule: task(f"store-{rule}", on_store_error=rule) for rule in ("run", "raise", "retry")}
limited = task("limited", limit=2, on_conflict="retry")
unique = task("unique", unique="until_done")
newest = task("newest", on_conflict=OnConflict.cancel_running(within=0.2))
debounced = task("debounced", debounce=0.5)


@singleton_task(app=app, bind=True, key="{name}", ttl=3, on_conflict="retry")
def limited_by_partner(self: Any, name: str, seconds: float = 0.1) -> int:
    """The first attempt is answered with 429: nobody's calls of this key begin until then."""
    with run(self, name, self.request.retries):
        pass
    if not self.request.retries:
        pause(current_lease().key, duration=seconds, reason="429", app=app)
        raise self.retry(countdown=0.1)
    return int(self.request.retries)


@singleton_task(app=app, bind=True, key="{name}", ttl=3, acks_late=False)
def retried(self: Any, name: str, number: int = 0, countdown: float = 0.2) -> int:
    """Fails once, and is retried."""
    with run(self, name, number):
        pass
    if not self.request.retries:
        raise self.retry(countdown=countdown)
    return number
