"""Bodies whose end is reported late, and calls that resemble others. All write the journal.

A body's first argument is its name, and that is its key, in one scope for all. What waits, waits at
a gate (`tests.apps.gate`) until its test opens that.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; SLOW_OBSERVER=1: a receiver of `lease_freed` waits
at the gate of the key; LOCK_URL, another way to the store.
"""

from __future__ import annotations

import os
import time
from typing import Any

import redis
from celery import Celery

from celery_singleton_lock import OnConflict, SingletonTask, singleton_task
from celery_singleton_lock.instrumentation import lease_freed
from tests.apps.gate import Gate
from tests.harness.journal import Journal

NAMES = "names"

app = Celery("ends", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(broker_connection_retry_on_startup=True)
if "LOCK_URL" in os.environ:
    app.conf.singleton_lock_url = os.environ["LOCK_URL"]

journal = Journal.from_env()

#: Seconds between two signs of life of a body that a time limit ends.
BREATH = 0.05


def pass_gate(name: str) -> None:
    # A client for each time: some wait in the worker parent, and children must not share those.
    with redis.Redis.from_url(os.environ["RESULT_URL"], socket_timeout=None) as client:
        Gate(client, name).wait()


# Hard time limits.


class SlowToTell(SingletonTask):
    """Celery calls on_failure in the worker parent, while the child that is too slow runs on."""

    abstract = True

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        journal.note("on_failure", key=args[0], task_id=task_id)
        pass_gate(args[0])


def breathe(task: Any, name: str) -> None:
    """Show that it lives until it is killed."""
    with journal.run(name, task_id=task.request.id):
        while True:
            journal.note("breath", key=name, task_id=task.request.id)
            time.sleep(BREATH)


@singleton_task(
    app=app, base=SlowToTell, bind=True, key="{name}", scope=NAMES, ttl=60, time_limit=1
)
def limited(self: Any, name: str) -> None:
    """Its child is notified of nothing before it is killed: the next heartbeat is too far away."""
    breathe(self, name)


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES, ttl=60, time_limit=1)
def limited_plainly(self: Any, name: str) -> None:
    breathe(self, name)


if os.environ.get("SLOW_OBSERVER") == "1":

    @lease_freed.connect
    def _observe(event: Any, **_: Any) -> None:
        name = event.key.rpartition(":")[2]
        journal.note("observing", key=name)
        pass_gate(name)


@singleton_task(
    app=app,
    base=SlowToTell,
    bind=True,
    key="{name}",
    scope=NAMES,
    # Heartbeats at 2 s and 4 s, the limit in between, and more than a second before the latter.
    ttl=6,
    time_limit=2,
    acks_late=True,
)
def limited_late(self: Any, name: str) -> None:
    breathe(self, name)


@singleton_task(
    app=app, bind=True, key="{name}", scope=NAMES, on_conflict=OnConflict.retry(0.1, 0.2)
)
def patient(self: Any, name: str) -> str:
    """Requeue on a conflict."""
    with journal.run(name, task_id=self.request.id):
        return name


# Retries.


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES, ttl=30)
def punctual(self: Any, name: str, eta: str) -> int:
    """Retries once, at a time that it has as text."""
    with journal.run(name, task_id=self.request.id):
        if self.request.retries == 0:
            raise self.retry(eta=eta)
        return int(self.request.retries)


# Calls.


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES)
def skipping(self: Any, name: str) -> str:
    with journal.run(name, task_id=self.request.id):
        return name
