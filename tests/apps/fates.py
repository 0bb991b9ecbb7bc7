"""One task per fate that `explain` can report, on any store.

Its environment: BROKER_URL, RESULT_URL, LOCK_URL, PREFIX. All tasks have the key ``{name}`` in one
scope. A body that is given a gate (`tests.apps.gate`) ends when its test opens that.
"""

from __future__ import annotations

import os
from typing import Any

import redis
from celery import Celery

from celery_singleton_lock import OnConflict, singleton_task
from tests.apps.gate import Gate

app = Celery("fates", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    singleton_lock_url=os.environ["LOCK_URL"],
    singleton_lock_prefix=os.environ["PREFIX"],
)
SCOPE: dict[str, Any] = {"app": app, "key": "{name}", "scope": "fates", "ttl": 10}


@singleton_task(**SCOPE)
def work(name: str, gate: str = "") -> str:
    """Skipped on a conflict."""
    if gate:
        Gate(redis.Redis.from_url(os.environ["RESULT_URL"], socket_timeout=None), gate).wait()
    return name


@singleton_task(**SCOPE, on_conflict=OnConflict.wait(timeout=300))
def waiting(name: str) -> None: ...


@singleton_task(**SCOPE, on_conflict=OnConflict.retry(60))
def sleepy(name: str) -> None: ...


@singleton_task(**SCOPE, on_conflict="raise")
def refusing(name: str) -> None: ...


@singleton_task(**SCOPE, acks_late=True, ignore_result=True)
def late(name: str, gate: str = "") -> None:
    if gate:
        Gate(redis.Redis.from_url(os.environ["RESULT_URL"], socket_timeout=None), gate).wait()


@singleton_task(**SCOPE, bind=True)
def flaky(self: Any, name: str) -> None:
    raise self.retry(countdown=300)
