"""Tasks whose queued message runs with the newest call's arguments.

Each body notes the ``value`` that it got; one that is given a gate (`tests.apps.gate`) ends when
its test opens that.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; VISIBILITY_TIMEOUT in seconds; ACCEPT: the content
types that are accepted, by blanks.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import redis
from celery import Celery
from celery.signals import task_postrun

from celery_singleton_lock import OnConflict, singleton_task
from tests.apps.gate import Gate
from tests.apps.serializer import SETS
from tests.harness.journal import Journal

SOON = OnConflict.retry(0.1, 0.3, None)

app = Celery("newest", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_publish_retry=False,
    accept_content=os.environ.get("ACCEPT", f"json {SETS}").split(),
)
if "VISIBILITY_TIMEOUT" in os.environ:
    app.conf.broker_transport_options = {
        "visibility_timeout": float(os.environ["VISIBILITY_TIMEOUT"]),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 5,
    }


@cache
def _client(pid: int) -> redis.Redis:
    return redis.Redis.from_url(os.environ["RESULT_URL"], socket_timeout=None)


def work(task: Any, name: str, value: Any, gate: str | None) -> Any:
    value = sum(value) if isinstance(value, set) else value  # the journal is JSON
    request = task.request
    seen = [list(request.args), dict(request.kwargs)]
    data = {"value": value, "seen": repr(seen), "retries": request.retries}
    with Journal.from_env().run(name, task_id=request.id, **data):
        if gate is not None:
            Gate(_client(os.getpid()), gate).wait()
    return value


@task_postrun.connect
def ended(args: Any = None, kwargs: Any = None, state: Any = None, **_: Any) -> None:
    if state == "SUCCESS" and args:
        Journal.from_env().note("ended", key=args[0], args=[list(args), kwargs])


NEWEST: Any = {
    "app": app,
    "bind": True,
    "key": "{name}",
    "unique": "until_start",
    "on_duplicate": "replace",
    "on_conflict": SOON,
}


@singleton_task(**NEWEST)
def newest(self: Any, name: str, value: Any = None, gate: str | None = None) -> Any:
    return work(self, name, value, gate)


@singleton_task(**NEWEST, acks_late=True, ttl=1)
def newest_late(self: Any, name: str, value: Any = None, gate: str | None = None) -> Any:
    return work(self, name, value, gate)


@singleton_task(**NEWEST, acks_late=True, ttl=1, reject_on_worker_lost=True)
def fragile(self: Any, name: str, value: Any = None, gate: str | None = None) -> Any:
    return work(self, name, value, gate)


@singleton_task(**NEWEST, max_retries=3)
def flaky(self: Any, name: str, value: Any = None, countdown: float = 0, own: Any = None) -> Any:
    """Fails once; its retry has the value ``own`` if that is given."""
    work(self, name, value, None)
    if self.request.retries == 0:
        kwargs = {"value": value if own is None else own, "countdown": countdown}
        raise self.retry(args=(name,), kwargs=kwargs, countdown=countdown)
    return value


@singleton_task(app=app, bind=True, key="{name}", unique="until_start", on_conflict=SOON)
def first(self: Any, name: str, value: Any = None, gate: str | None = None) -> Any:
    """Runs with the arguments of the first call."""
    return work(self, name, value, gate)


@singleton_task(**NEWEST, ttl=1, default_retry_delay=1, max_retries=3)
def revived(self: Any, name: str, value: Any = None, gate: str | None = None) -> Any:
    """Retried by the worker parent if its child dies; acknowledged early."""
    return work(self, name, value, gate)


revived.retry_on_worker_lost = True  # as a keyword it is refused where Celery lacks it


DEBOUNCED: Any = {
    "app": app,
    "bind": True,
    "key": "{name}",
    "on_conflict": SOON,
    "debounce": 1,
    "debounce_max": 3,
}


@singleton_task(**DEBOUNCED)
def debounced(self: Any, name: str, value: Any = None, gate: str | None = None) -> Any:
    return work(self, name, value, gate)


@singleton_task(**DEBOUNCED, ttl=1, default_retry_delay=1, max_retries=3)
def debounced_revived(self: Any, name: str, value: Any = None, gate: str | None = None) -> Any:
    return work(self, name, value, gate)


debounced_revived.retry_on_worker_lost = True


@singleton_task(**DEBOUNCED, acks_late=True, ttl=1)
def debounced_late(self: Any, name: str, value: Any = None, gate: str | None = None) -> Any:
    return work(self, name, value, gate)
