"""Tasks for workers and publishers of two versions of the package, side by side.

This module runs with the present version and with the oldest one that a rolling deploy has to work
with, so it uses only names that both have. Run as a program, it publishes what its standard input
asks for: one JSON object per line, answered with one JSON value per line.

Its environment: BROKER_URL, RESULT_URL, LOCK_URL, JOURNAL; in seconds VISIBILITY_TIMEOUT, TTL,
BEAT_TTL and EVERY (of its beats' entry ``interval``).
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import redis
from celery import Celery
from celery.signals import before_task_publish

import celery_singleton_lock
from celery_singleton_lock import PER_TASK, OnConflict, singleton_task
from tests.apps.gate import Gate
from tests.harness.journal import Journal

#: The directory that this process imported the package from.
ROOT = str(Path(celery_singleton_lock.__file__).parents[1])
TTL = float(os.environ.get("TTL", "30"))
SOON = OnConflict.retry(0.1, 0.4, None)
#: The deployed version does not know of queues.
IN_ORDER = OnConflict.queue() if hasattr(OnConflict, "queue") else SOON

app = Celery("rolling", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=10,
    singleton_lock_url=os.environ["LOCK_URL"],
)
if "VISIBILITY_TIMEOUT" in os.environ:
    app.conf.broker_transport_options = {
        "visibility_timeout": float(os.environ["VISIBILITY_TIMEOUT"]),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        # A worker that is killed during the sweep would delay all redeliveries by 5 minutes.
        "unacked_mutex_expire": 5,
    }
if "EVERY" in os.environ:
    app.conf.update(
        beat_schedule={"interval": {"task": "interval", "schedule": float(os.environ["EVERY"])}},
        singleton_lock_beat_ttl=float(os.environ["BEAT_TTL"]),
        singleton_lock_beat_poll=0.2,
    )


@before_task_publish.connect
def stamp(headers: dict[str, Any], **_: Any) -> None:
    """Say when and by which process a tick was sent, as `tests.harness.ticks` reads it."""
    if "singleton_tick" in headers:
        headers.update(sent_at=time.time(), beat=os.getpid())


@cache
def _client(pid: int) -> redis.Redis:
    # Without a timeout: it waits at gates.
    return redis.Redis.from_url(os.environ["RESULT_URL"], socket_timeout=None)


def body(task: Any, name: str, gate: str | None = None, seconds: float = 0.01) -> str:
    """Journal a body, with the version that runs it; return that version's directory."""
    request = task.request
    data = {"task": task.name.rpartition(".")[2], "retries": request.retries, "root": ROOT}
    with Journal.from_env().run(name, task_id=request.id, **data):
        if gate is not None:
            Gate(_client(os.getpid()), gate).wait()
        time.sleep(seconds)  # two bodies at once would overlap for that long
    return ROOT


SHARED: dict[str, Any] = {"app": app, "bind": True, "key": "{name}", "scope": "rolling", "ttl": TTL}


@singleton_task(**SHARED)
def work(self: Any, name: str, gate: str | None = None) -> str:
    """Skipped on a conflict."""
    return body(self, name, gate)


@singleton_task(**SHARED, on_conflict=SOON)
def patient(self: Any, name: str, gate: str | None = None) -> str:
    """Requeue on a conflict."""
    return body(self, name, gate)


@singleton_task(**SHARED, on_conflict=OnConflict.wait(timeout=90))
def waiting(self: Any, name: str, gate: str | None = None) -> str:
    """Waits in the worker, in the key's wait queue."""
    return body(self, name, gate)


@singleton_task(**SHARED, on_conflict=SOON, acks_late=True)
def late(self: Any, name: str, gate: str | None = None) -> str:
    """Runs again if its worker dies."""
    return body(self, name, gate)


@singleton_task(**SHARED, on_conflict=SOON, unique="until_start")
def soon(self: Any, name: str, gate: str | None = None) -> str:
    return body(self, name, gate)


@singleton_task(**SHARED, on_conflict=SOON, unique="until_done")
def once(self: Any, name: str, gate: str | None = None) -> str:
    return body(self, name, gate)


@singleton_task(**SHARED, on_conflict=SOON, unique="until_done", acks_late=True)
def once_late(self: Any, name: str, gate: str | None = None) -> str:
    return body(self, name, gate)


@singleton_task(**{**SHARED, "scope": "pairs"}, on_conflict=SOON, limit=2)
def pair(self: Any, name: str, gate: str | None = None) -> str:
    """Two at a time."""
    return body(self, f"pair {name}", gate)


@singleton_task(**SHARED, on_conflict=SOON, max_retries=1)
def retried(self: Any, name: str, again_on: str, countdown: float) -> str:
    """Its second attempt comes by the queue ``again_on``."""
    return retry_once(self, name, again_on, countdown)


@singleton_task(**SHARED, on_conflict=SOON, max_retries=1, unique="until_done", acks_late=True)
def retried_once(self: Any, name: str, again_on: str, countdown: float) -> str:
    return retry_once(self, name, again_on, countdown)


def retry_once(task: Any, name: str, again_on: str, countdown: float) -> str:
    ran_on = body(task, name)
    if task.request.retries == 0:
        raise task.retry(countdown=countdown, queue=again_on)
    return ran_on


@singleton_task(**{**SHARED, "scope": "in order"}, on_conflict=IN_ORDER)
def queued(self: Any, name: str, gate: str | None = None) -> str:
    return body(self, name, gate)


@singleton_task(**{**SHARED, "scope": "in order"}, on_conflict=IN_ORDER, acks_late=True)
def queued_late(self: Any, name: str, gate: str | None = None) -> str:
    return body(self, name, gate)


# Keys, of which both versions have to make the same.


@singleton_task(app=app)
def by_arguments(name: str, value: Any = None, *, flag: bool = False, **options: Any) -> None:
    pass


@singleton_task(app=app)
def by_plain_arguments(name: str, value: Any = None, *, flag: bool = False) -> None:
    pass


@singleton_task(app=app, key="{name}:{value}")
def by_template(name: str, value: Any = None) -> None:
    pass


@singleton_task(app=app, key=("name", "value"))
def by_names(name: str, value: Any = None, flag: bool = False) -> None:
    pass


@singleton_task(app=app, key=PER_TASK)
def by_nothing(name: str, value: Any = None) -> None:
    pass


@singleton_task(app=app, key=lambda name, value=None: f"{name}/{value}")
def by_callable(name: str, value: Any = None) -> None:
    pass


def answer(request: dict[str, Any]) -> Any:
    """Publish what ``request`` asks for and return its id; with ``"key": true`` only its key."""
    task = app.tasks[f"{__name__}.{request['task']}"]
    args, kwargs = request.get("args", []), request.get("kwargs", {})
    if request.get("key"):
        return task.lock_key(*args, **kwargs)
    return task.apply_async(args, kwargs, **request.get("options", {})).id


def main() -> None:
    print(json.dumps(ROOT), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    # Under its own name, so that its tasks have the names which they have in the workers.
    from tests.apps import rolling

    rolling.main()
