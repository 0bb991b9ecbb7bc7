"""Tasks whose leases begin and end in each way, for workers that send events.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; LOCK_URL, a store of its own; TTL, seconds;
UNOBSERVED=1: no receiver is connected, as in most workers.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from celery import Celery

from celery_singleton_lock import current_lease, hold, instrumentation, singleton_task
from celery_singleton_lock.core.events import Event, EventName
from tests.harness.journal import Journal

TTL = float(os.environ.get("TTL", "60"))

app = Celery("reporting", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.broker_connection_retry_on_startup = True
if "LOCK_URL" in os.environ:
    app.conf.singleton_lock_url = os.environ["LOCK_URL"]

#: The ends of a lease; each `acquired` is followed by one of them.
ENDS = (EventName.RELEASED, EventName.LEASE_LOST, EventName.RELEASE_FAILED, EventName.FREED)


def gate(key: str) -> Path:
    """The file whose appearance ends the bodies of ``key``; beside the journal."""
    return Path(os.environ["JOURNAL"]).with_name(f"open-{key}")


def note(sender: str, event: Event, **_: Any) -> None:
    """A receiver of signals, as in code that counts leases by them."""
    if event.name is EventName.ACQUIRED or event.name in ENDS:
        Journal.from_env().note(str(event.name), key=event.key, lease=event.lease)


if "UNOBSERVED" not in os.environ:  # a release waits for its reply if a receiver observes it
    instrumentation.lease_acquired.connect(note)
    instrumentation.lease_released.connect(note)
    instrumentation.lease_lost.connect(note)
    instrumentation.lease_release_failed.connect(note)
    instrumentation.lease_freed.connect(note)


@singleton_task(app=app, bind=True, key="{key}", ttl=TTL, on_lost="fail")
def body(self: Any, key: str, how: str = "") -> None:
    """End as asked: return, raise, be killed, or wait for the gate."""
    with Journal.from_env().run(key, task_id=self.request.id, fence=current_lease().fence_number):
        if how == "raise":
            raise ValueError
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        while how == "wait" and not gate(key).exists():
            time.sleep(0.02)


@singleton_task(app=app, bind=True, key="{key}", ttl=TTL, on_conflict="cancel_running")
def newest(self: Any, key: str) -> None:
    """Be interrupted by the next call."""
    with Journal.from_env().run(key, task_id=self.request.id):
        while not gate(key).exists():
            time.sleep(0.02)


@singleton_task(app=app, bind=True, key="{key}", ttl=TTL)
def holds(self: Any, key: str, times: int, until: str = "", how: str = "") -> int:
    """Hold and release ``times`` other keys, or until the gate ``until`` opens; the number."""
    number = 0
    while number < times or (until and not gate(until).exists()):
        with hold(f"{key}-{number}", scope="others"):
            number += 1
        if number % 10 == 0:
            Journal.from_env().note("held", key=key, number=number)
    if how == "killed":
        Journal.from_env().note("killed", key=key, number=number)
        os.kill(os.getpid(), signal.SIGKILL)
    return number
