"""Singleton tasks that say what happens to them, for every pool, for Beat and for the CLI.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; LOCK_URL, a store of its own; SETTINGS, a JSON
object of further settings; TTL, seconds; EARLY=1; TICK, seconds, for Beat; UNOBSERVED=1: nothing
is connected to `lease_released`; SLOW, an observer of losses that blocks until the gate
``observer`` opens: ``signal``, or ``log``; COUNTED=1: one that uses the client of the bodies.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from celery import Celery
from celery.signals import worker_init

from celery_singleton_lock import (
    PER_TASK,
    current_lease,
    hold,
    singleton_task,
)
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.lease import Lease
from celery_singleton_lock.instrumentation import (
    lease_acquired,
    lease_conflict,
    lease_lost,
    lease_released,
)
from tests.harness.journal import Journal

#: Seconds; a body that outlives it needs the heartbeat.
TTL = float(os.environ.get("TTL", "1"))

#: A body that outlived its ttl this often is not there by luck.
OUTLIVED = 2.5

app = Celery(
    "pools",
    broker=os.environ["BROKER_URL"],
    backend=os.environ["RESULT_URL"],
    broker_connection_retry_on_startup=True,
)
if "LOCK_URL" in os.environ:
    app.conf.singleton_lock_url = os.environ["LOCK_URL"]
app.conf.update(json.loads(os.environ.get("SETTINGS", "{}")))
if "TICK" in os.environ:
    app.conf.beat_schedule = {
        "tick": {"task": "tests.apps.pools.tick", "schedule": float(os.environ["TICK"])}
    }

#: As applications have one: bodies and receivers share its connections.
client = redis.Redis.from_url(os.environ["RESULT_URL"])


def gate(key: str) -> Path:
    """The file whose appearance ends the bodies of ``key``; beside the journal."""
    return Path(os.environ["JOURNAL"]).with_name(f"open-{key}")


@singleton_task(app=app, bind=True, key="{key}", ttl=TTL, on_lost="continue")
def work(self: Any, key: str) -> int:
    """Sleep, in short naps, until the gate opens; notes ``outlived`` after some ttls."""
    _occupy(self.request.id, key, pause=lambda: time.sleep(0.02))
    return os.getpid()


@singleton_task(app=app, bind=True, key="{key}", ttl=TTL, on_lost="continue")
def nested(self: Any, key: str) -> None:
    """Holds two leases in one process."""
    outer = current_lease()
    with hold(key, scope="inner", ttl=TTL, app=app):
        _occupy(self.request.id, key, pause=lambda: time.sleep(0.02), lease=outer)


@singleton_task(
    app=app, bind=True, key="{key}", scope="tests.apps.pools.work", ttl=TTL, on_lost="continue"
)
def spin(self: Any, key: str) -> int:
    """As `work`, and excluded by it, but never yields: a greenlet that loops."""
    _occupy(self.request.id, key, pause=lambda: None)
    return os.getpid()


@singleton_task(app=app, bind=True, key="{key}", ttl=60)
def brief(self: Any, key: str, until_open: bool = False) -> int:
    """A body whose key would stand for a minute if the release forgot it."""
    with Journal.from_env().run(key, task_id=self.request.id, fence=current_lease().fence_number):
        while until_open and not gate(key).exists():
            time.sleep(0.02)
    return os.getpid()


@singleton_task(app=app, bind=True, key="{key}", limit=3, ttl=60)
def limited(self: Any, key: str) -> None:
    """Up to three at a time, until the gate opens."""
    with Journal.from_env().run(key, task_id=self.request.id):
        while not gate(key).exists():
            time.sleep(0.02)


@singleton_task(app=app, bind=True, key=PER_TASK, ttl=TTL)
def tick(self: Any) -> None:
    """What Beat sends: longer than the time between two ticks, and than the ttl."""
    with Journal.from_env().run("tick", task_id=self.request.id):
        time.sleep(1.5 * TTL)


@singleton_task(app=app, bind=True, key="{key}")
def fail_first(self: Any, key: str) -> int:
    """Reserves its key through the countdown of one retry."""
    if not self.request.retries:
        raise self.retry(countdown=30)
    return os.getpid()


@singleton_task(app=app, key="{key}", min_hold=60)
def cooling(key: str) -> None:
    """Keeps its key for a minute after it has returned."""


@singleton_task(app=app, bind=True, key="{key}", ttl=TTL)
def interruptible(self: Any, key: str) -> None:
    """Sleeps for a minute, in one call, unless it is interrupted."""
    with Journal.from_env().run(key, task_id=self.request.id, fence=current_lease().fence_number):
        time.sleep(0 if gate(key).exists() else 60)


@singleton_task(
    app=app,
    bind=True,
    key="{key}",
    **{"unique": "until_done", "unique_for": 600, "acks_late": True, "ignore_result": True},
)
def unique_late(self: Any, key: str) -> None:
    """Without a result: only the claim shows whether the call has ended."""
    with Journal.from_env().run(key, task_id=self.request.id):
        time.sleep(60)


@app.task
def count() -> int:
    """A task that has nothing to do with locks."""
    return int(client.incr("counted"))


def _occupy(task_id: str, key: str, pause: Callable[[], None], lease: Lease | None = None) -> None:
    journal, begin, noted = Journal.from_env(), time.monotonic(), False
    lease = lease or current_lease()
    with journal.run(key, task_id=task_id, fence=lease.fence_number):
        while not gate(key).exists():
            if not noted and time.monotonic() - begin > OUTLIVED * TTL:
                journal.note("outlived", key=key, task_id=task_id, lost=lease.lost)
                noted = True
            pause()


def _write(event: Any, **_: Any) -> None:
    Journal.from_env().note(
        str(event.name),
        key=event.key,
        task_id=event.task_id,
        holder=str(event.holder),
        thread=threading.current_thread().name,
        **event.data,
    )


def _block(event: Any = None, **_: Any) -> None:
    Journal.from_env().note("observing", key="observer")
    while not gate("observer").exists():
        time.sleep(0.02)


def _count(event: Any, **_: Any) -> None:
    client.incr(f"counted:{event.name}")


class _BlockingHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "singleton_event", "") == EventName.LEASE_LOST:
            _block()


@worker_init.connect
def _listen(**_: Any) -> None:
    # In workers alone: in the test's process, copies of this module would get each other's events.
    for signal in (lease_acquired, lease_conflict, lease_lost):
        signal.connect(_write)
    if "COUNTED" in os.environ:
        lease_lost.connect(_count)
    if os.environ.get("SLOW") == "signal":
        lease_lost.connect(_block)
    if os.environ.get("SLOW") == "log":
        logging.getLogger("celery_singleton_lock").addHandler(_BlockingHandler())
    if "UNOBSERVED" not in os.environ:  # a release waits for its reply if it is observed
        lease_released.connect(_write)


if "EARLY" in os.environ:
    # As users' modules may: now there is a runtime that is older than the worker's bootstep.
    brief.lock_key("at import")
