"""Tasks of celery-once, celery-singleton, celery-heimdall and the recipe, before or after.

The side is named by SIDE: ``old`` imports the packages themselves, ``bridge`` this library's bases,
``finish`` these with ``singleton_lock_old_locks = False``, ``done`` declares singleton tasks. Run
as a program, it publishes as its standard input says: one JSON list of calls per line, answered
with one list of answers.

Its environment: SIDE, BROKER_URL, RESULT_URL, JOURNAL.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import md5
from typing import Any

from celery import Celery, Task
from celery.result import EagerResult
from celery.signals import task_postrun
from django.conf import settings
from django.core.cache import cache

from tests.harness.journal import Journal

SIDE = os.environ["SIDE"]
URL = os.environ["BROKER_URL"]
LOCK_EXPIRE = 60 * 10

if SIDE == "old":
    from celery_heimdall import AlreadyQueuedError, HeimdallTask
    from celery_once import AlreadyQueued, QueueOnce
    from celery_singleton import Singleton
else:
    from celery_singleton_lock.migration import (
        AlreadyQueued,
        AlreadyQueuedError,
        HeimdallTask,
        QueueOnce,
        Singleton,
    )

if not settings.configured:
    backend = "django.core.cache.backends.redis.RedisCache"
    settings.configure(CACHES={"default": {"BACKEND": backend, "LOCATION": URL}})

app = Celery("migrating", broker=URL, backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    ONCE={"backend": "celery_once.backends.Redis", "settings": {"url": URL}},
    singleton_lock_expiry=600,
    # Else each body of celery-heimdall waits a second for a key that its own call has.
    heimdall_unique_lock_blocking=False,
)
if SIDE == "finish":
    app.conf.singleton_lock_old_locks = False


def body(task: Any, kind: str, name: str, seconds: float) -> None:
    """Journal a body; two at once would overlap for ``seconds``."""
    with Journal.from_env().run(f"{kind} {name}", task_id=task.request.id, side=SIDE):
        time.sleep(seconds)


@task_postrun.connect
def ended(task_id: str = "", **_: Any) -> None:
    """Note the end of a task: the packages free its key just before."""
    Journal.from_env().note("ended", task_id=task_id)


@contextmanager
def memcache_lock(lock_id: str, oid: str) -> Iterator[bool]:
    """The recipe of Celery's documentation."""
    timeout_at = time.monotonic() + LOCK_EXPIRE - 3
    status = cache.add(lock_id, oid, LOCK_EXPIRE)
    try:
        yield status
    finally:
        if time.monotonic() < timeout_at and status:
            cache.delete(lock_id)


def import_feed(self: Any, name: str, seconds: float) -> str:
    lock_id = f"{self.name}-lock-{md5(name.encode()).hexdigest()}"
    with memcache_lock(lock_id, self.app.oid) as acquired:
        if acquired:
            body(self, "recipe", name, seconds)
            return "ran"
    return "skipped"


def task(
    kind: str, base: type[Task] | None, *, unique: str = "until_done", **options: Any
) -> Callable[..., Any]:
    """A task of ``kind`` whose calls are equal if their names are."""

    def run(self: Any, name: str, seconds: float = 0.01) -> None:
        body(self, kind, name, seconds)

    name = f"{__name__}.{kind}"
    if SIDE == "done":
        from celery_singleton_lock import singleton_task

        ours = {"unique": unique, "unique_for": 600, "on_conflict": "retry"}
        key = None if "heimdall" in options else ("name",)
        ours |= {"key": key, "on_duplicate": "raise"}
        return singleton_task(app=app, bind=True, name=name, **ours)(run)
    return app.task(run, bind=True, name=name, base=base, **options)


once = task("once", QueueOnce, once={"keys": ["name"]})
once_until_start = task(
    "once_until_start",
    QueueOnce,
    unique="until_start",
    once={"keys": ["name"], "unlock_before_run": True},
)
singleton = task("singleton", Singleton, unique_on=["name"])
heimdall = task("heimdall", HeimdallTask, heimdall={"unique": True})
heimdall_period = task(
    "heimdall_period",
    HeimdallTask,
    unique="until_expired",
    heimdall={"unique": True, "unique_wait_for_expiry": True},
)
recipe_name = f"{__name__}.recipe"
if SIDE == "old":
    recipe = app.task(import_feed, bind=True, name=recipe_name)
else:
    from celery_singleton_lock import singleton_task

    recipe = singleton_task(app=app, bind=True, name=recipe_name, key="{name}")(import_feed)


def publish(kind: str, name: str, seconds: float, queue: str = "celery") -> dict[str, Any]:
    """Publish one call; say which call now has the work, or None if that is not said."""
    began = time.monotonic()
    try:
        result = app.tasks[f"{__name__}.{kind}"].apply_async((name, seconds), queue=queue)
    except AlreadyQueued:
        result = None
    except AlreadyQueuedError:
        # celery-heimdall raises this if the key of the other call has gone meanwhile.
        return publish(kind, name, seconds, queue)
    except Exception as exc:
        if type(exc).__name__ != "DuplicateTask":
            raise
        result = None
    known = None if result is None or isinstance(result, EagerResult) else result.id
    return {"key": f"{kind} {name}", "began": began, "task_id": known}


def main() -> None:
    print(json.dumps(SIDE), flush=True)
    for line in sys.stdin:
        print(json.dumps([publish(*call) for call in json.loads(line)]), flush=True)


if __name__ == "__main__":
    # Under its own name, so that its tasks have the names which they have in the workers.
    from tests.apps import migrating

    migrating.main()
