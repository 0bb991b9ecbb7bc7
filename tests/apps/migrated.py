"""Tasks with the bases of `celery_singleton_lock.migration`, and their old options.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; CONF, JSON of more settings.
"""

from __future__ import annotations

import json
import os
from typing import Any

import redis
from celery import Celery

from celery_singleton_lock.migration import HeimdallTask, QueueOnce, Singleton
from tests.apps.gate import Gate
from tests.harness.journal import Journal

URL = os.environ["BROKER_URL"]
app = Celery("migrated", broker=URL, backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    ONCE={"backend": "celery_once.backends.Redis", "settings": {"url": URL}},
    heimdall_unique_lock_blocking=False,
    **json.loads(os.environ.get("CONF", "{}")),
)


def body(task: Any, name: str, gate: str | None = None) -> str:
    with Journal.from_env().run(name, task_id=task.request.id):
        if gate is not None:
            with redis.Redis.from_url(URL, socket_timeout=None) as client:
                Gate(client, gate).wait()
    return "ran"


class Hooked(Singleton):
    abstract = True

    def on_duplicate(self, existing_task_id: str) -> Any:
        return f"duplicate of {existing_task_id}"


@app.task(base=QueueOnce, bind=True, once={"keys": ["name"], "timeout": 50})
def once(self: Any, name: str, gate: str | None = None) -> str:
    return body(self, name, gate)


@app.task(base=QueueOnce, bind=True, once={"graceful": True, "unlock_before_run": True})
def until_start(self: Any, name: str, gate: str | None = None) -> str:
    return body(self, name, gate)


@app.task(base=Singleton, bind=True, unique_on="name", max_retries=2)
def singleton(self: Any, name: str, gate: str | None = None, end: str = "") -> str:
    result = body(self, name, gate)
    if end == "retry":
        raise self.retry(countdown=0.1)
    if end == "fail":
        raise ValueError(end)
    return result


@app.task(base=Singleton, bind=True, raise_on_duplicate=True, lock_expiry=60)
def raising(self: Any, name: str) -> str:
    return body(self, name)


@app.task(base=Hooked, bind=True)
def hooked(self: Any, name: str) -> str:
    return body(self, name)


@app.task(base=HeimdallTask, bind=True, heimdall={"unique": True, "unique_timeout": 70})
def heimdall(self: Any, name: str, gate: str | None = None) -> str:
    return body(self, name, gate)


@app.task(
    base=HeimdallTask,
    bind=True,
    heimdall={
        "unique": True,
        "key": lambda args, kwargs: f"own-{args[0]}",
        "unique_wait_for_expiry": True,
        "unique_raises": True,
    },
)
def periodic(self: Any, name: str) -> bool:
    body(self, name)
    return bool(self.only_after(f"after {name}", 60))
