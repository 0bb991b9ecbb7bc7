"""Tasks whose calls claim: what is published, what is answered, what runs. All write the journal.

A body that is given a gate (`tests.apps.gate`) ends when its test opens that. Each task has the key
``{name}`` in a scope of its own.

Its environment: BROKER_URL, RESULT_URL, LOCK_URL (else the result backend's), JOURNAL;
OTHER_KEY, what `keyed` makes of its key here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import redis
from celery import Celery

from celery_singleton_lock import OnConflict, is_skipped, singleton_task
from tests.apps.gate import Gate
from tests.harness.journal import Journal

SOON = OnConflict.retry(0.1, 0.3, None)

app = Celery("unique", broker=os.environ["BROKER_URL"], backend=os.environ.get("RESULT_URL"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    # A publisher that meets a dead broker says so at once.
    task_publish_retry=False,
)
if "LOCK_URL" in os.environ:
    app.conf.singleton_lock_url = os.environ["LOCK_URL"]


@cache
def _client(pid: int) -> redis.Redis:
    # Without a timeout: it waits at gates.
    return redis.Redis.from_url(os.environ["RESULT_URL"], socket_timeout=None)


@contextmanager
def body(task: Any, name: str, **data: Any) -> Iterator[None]:
    request = task.request
    data |= {"task": task.name.rpartition(".")[2], "retries": request.retries}
    with Journal.from_env().run(name, task_id=request.id, **data):
        yield


def work(task: Any, name: str, gate: str | None) -> str:
    with body(task, name):
        if gate is not None:
            Gate(_client(os.getpid()), gate).wait()
    return name


@singleton_task(app=app, bind=True, key="{name}", unique="until_start", on_conflict=SOON)
def soon(self: Any, name: str, gate: str | None = None) -> str:
    """Requeued on a conflict, and back soon, for as long as it takes."""
    return work(self, name, gate)


@singleton_task(app=app, bind=True, key="{name}", unique="until_done")
def once(self: Any, name: str, gate: str | None = None) -> str:
    return work(self, name, gate)


@singleton_task(app=app, bind=True, key="{name}", unique="until_done", acks_late=True)
def once_late(self: Any, name: str, gate: str | None = None) -> str:
    return work(self, name, gate)


@singleton_task(
    app=app,
    bind=True,
    key="{name}",
    unique="until_start",
    on_store_error="run",
    ttl=3,
    ignore_result=True,
)
def regardless(self: Any, name: str, gate: str | None = None) -> str:
    """Runs without a lock where the store is away."""
    return work(self, name, gate)


# Canvas and children.


@app.task
def collect(values: Any) -> Any:
    return values


@app.task
def flag(value: Any) -> Any:
    """Whether the link before it was skipped."""
    return "skipped" if is_skipped(value) else value


@app.task(bind=True)
def note(self: Any, text: str) -> None:
    """A link or an errback: says that it came."""
    Journal.from_env().note(text, key=text, task_id=self.request.id)


@singleton_task(app=app, bind=True, key="{name}", unique="until_done", on_duplicate="skip")
def skipping(self: Any, name: str, gate: str | None = None) -> str:
    return work(self, name, gate)


# Keys.


def elsewhere(name: str) -> str:
    """An error where OTHER_KEY is "error"."""
    other = os.environ.get("OTHER_KEY", "")
    if other == "error":
        raise ArithmeticError(name)
    return name + other


@singleton_task(app=app, bind=True, key=elsewhere, unique="until_start", ignore_result=True)
def keyed(self: Any, name: str) -> str:
    """Its publisher and its worker may disagree on the key."""
    return work(self, name, None)


@singleton_task(app=app, bind=True, key="{name}", unique="until_done", on_conflict=SOON)
def again(self: Any, name: str, left: int = 2) -> int:
    """Publishes its own successor, as a poller does; that may come before this one has ended."""
    with body(self, name):
        if left:
            self.apply_async((name,), {"left": left - 1})
    return left
