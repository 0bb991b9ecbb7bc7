"""Bodies of every sort that hold a lease while something takes it away, and a schedule for Beat.

Each waits at its gate, so that the test decides what happens between its start and its end. Its
environment: BROKER_URL, RESULT_URL, JOURNAL; LOCK_URL, the lock store.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import redis
from celery import Celery

from celery_singleton_lock import OnConflict, hold, singleton_task
from tests.apps.gate import Gate
from tests.harness.journal import Journal

#: Seconds. No renewal is due before a third of it, so the release detects the loss.
TTL = 12.0

app = Celery("losses", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    beat_schedule={"tick": {"task": "losses.tick", "schedule": 0.5, "options": {"queue": "ticks"}}},
    broker_connection_retry_on_startup=True,
    singleton_lock_beat_poll=0.2,
    singleton_lock_beat_ttl=TTL,
    singleton_lock_url=os.environ["LOCK_URL"],
    worker_prefetch_multiplier=1,
)

SHARED: dict[str, Any] = {
    "app": app,
    "key": "{key}",
    "on_lost": "continue",  # each body ends once, and its release comes
    "scope": "losses",
    "ttl": TTL,
}


def body(key: str, gate: str) -> None:
    # redis-py 8 gives up reading after 5 s by itself.
    client = redis.Redis.from_url(os.environ["BROKER_URL"], socket_timeout=None)
    with Journal.from_env().run(key), client:
        Gate(client, gate).wait()


@singleton_task(**SHARED)
def early(key: str, gate: str) -> None:
    body(key, gate)


@singleton_task(acks_late=True, **SHARED)
def late(key: str, gate: str) -> None:
    body(key, gate)


@singleton_task(on_conflict=OnConflict.wait(timeout=60), **SHARED)
def waiting(key: str, gate: str) -> None:
    body(key, gate)


@app.task
def holding(key: str, gate: str) -> None:
    with hold(key, scope="losses", ttl=TTL, app=app):
        body(key, gate)


@app.task
def tick() -> None:
    """Sent by Beat, and received by no worker."""


KINDS: dict[str, Callable[..., Any]] = {
    task.__name__: task for task in (early, late, waiting, holding)
}
