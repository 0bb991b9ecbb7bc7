"""Tasks of which the newest call runs (`on_conflict="cancel_running"`); bodies write the journal.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; LOCK_URL, a store of its own.
"""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery

from celery_singleton_lock import OnConflict, current_lease, singleton_task
from tests.harness.journal import Journal, events

WITHIN = 0.2

app = Celery("latest", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    result_extended=True,
    broker_transport_options={
        "visibility_timeout": 20,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
    task_reject_on_worker_lost=True,
)
if "LOCK_URL" in os.environ:
    app.conf.singleton_lock_url = os.environ["LOCK_URL"]


def is_told(name: str) -> bool:
    """Whether the test has noted something for ``name``: that a body may end."""
    return bool(events(Journal.from_env().records(), "note", key=name))


def work(task: Any, name: str, number: int, how: str, seconds: float) -> int:
    fence, request = current_lease().fence, task.request
    with Journal.from_env().run(name, task_id=request.id, fence=fence, number=number):
        until = time.monotonic() + seconds
        if how == "retry" and request.retries == 0:
            raise task.retry(countdown=seconds)
        while time.monotonic() < until and not (how == "told" and is_told(name)):
            try:
                time.sleep(0.02)
            except BaseException:
                if how != "swallow":
                    raise
    return number


LATEST: Any = {"bind": True, "key": "{name}", "scope": "latest", "ttl": 3, "max_retries": 5}
NEWEST = OnConflict.cancel_running(within=WITHIN, timeout=60)


@singleton_task(app=app, on_conflict=NEWEST, acks_late=True, **LATEST)
def build(self: Any, name: str, number: int = 0, how: str = "wait", seconds: float = 60) -> int:
    """The newest call of ``name`` runs; acknowledged late."""
    return work(self, name, number, how, seconds)


@singleton_task(app=app, on_conflict=NEWEST, min_hold=1.5, **LATEST)
def early(self: Any, name: str, number: int = 0, how: str = "wait", seconds: float = 60) -> int:
    """The same, acknowledged early, and its key stays taken for a moment."""
    return work(self, name, number, how, seconds)


@singleton_task(app=app, on_conflict=NEWEST, unique="until_start", **LATEST)
def unique(self: Any, name: str, number: int = 0, how: str = "wait", seconds: float = 60) -> int:
    """The same, with a claim until it starts."""
    return work(self, name, number, how, seconds)


@singleton_task(
    app=app,
    on_conflict=OnConflict.cancel_running(WITHIN, 1.5),
    unique="until_expired",
    unique_for=60,
    **LATEST,
)
def periodic(self: Any, name: str, number: int = 0, how: str = "wait", seconds: float = 60) -> int:
    """One call per minute."""
    return work(self, name, number, how, seconds)


@singleton_task(app=app, on_conflict=OnConflict.cancel_running(WITHIN, 1.5), **LATEST)
def hasty(self: Any, name: str, number: int = 0, how: str = "wait", seconds: float = 60) -> int:
    """The same, but it waits for a moment only."""
    return work(self, name, number, how, seconds)


@singleton_task(app=app, **LATEST)
def steady(self: Any, name: str, number: int = 0, how: str = "wait", seconds: float = 60) -> int:
    """In the same scope, without the option: never cancelled."""
    return work(self, name, number, how, seconds)


@app.task
def after(value: Any) -> Any:
    """A link."""
    Journal.from_env().note("after", key=str(value))
    return value
