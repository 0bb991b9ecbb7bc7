"""What foreign publishers shoot at: a body of every sort, each of which says what it ran under.

All tasks share the scope ``guarded``, so that each key excludes all bodies of its name.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; WITHOUT=sieve takes out what keeps foreign headers
from passing for what this library says of a running task.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from celery import Celery

from celery_singleton_lock import NoLease, OnConflict, current_lease, singleton_task
from celery_singleton_lock.task.run import TaskRun
from celery_singleton_lock.worker.request import SingletonRequestMixin
from tests.harness.journal import Journal

app = Celery("hostile", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=4,
    result_expires=600,
)

GUARDED: dict[str, Any] = {"app": app, "bind": True, "key": "{name}", "scope": "guarded", "ttl": 20}
#: Comes back soon, and gives up by itself: what waits for a key that is never freed must end.
SOON = OnConflict.retry(0.05, 0.1, 1)

if os.environ.get("WITHOUT") == "sieve":
    SingletonRequestMixin._sift = lambda self: None  # type: ignore[method-assign]
    BEGUN = SimpleNamespace(entered=True, finish=lambda *_: None)
    of: Any = TaskRun.of
    # A header of this name passes for a run whose body has begun.
    TaskRun.of = lambda request: (  # type: ignore[method-assign,assignment,return-value]
        of(request) or ("singleton_begun" in vars(request) and BEGUN) or None
    )


def run(task: Any, name: str) -> str:
    """The body of all tasks."""
    try:
        held = current_lease().key
    except NoLease:
        held = None
    with Journal.from_env().run(name, task_id=str(task.request.id), held=held, task=task.name):
        return name


@singleton_task(**GUARDED)
def skipping(self: Any, name: str) -> str:
    return run(self, name)


@singleton_task(**GUARDED, on_conflict="raise")
def raising(self: Any, name: str) -> str:
    return run(self, name)


@singleton_task(**GUARDED, on_conflict=SOON)
def waiting(self: Any, name: str) -> str:
    return run(self, name)


@singleton_task(**GUARDED, on_conflict=SOON, acks_late=True, reject_on_worker_lost=True)
def late(self: Any, name: str) -> str:
    return run(self, name)


@singleton_task(**GUARDED, on_conflict=SOON, unique="until_done")
def unique(self: Any, name: str) -> str:
    return run(self, name)


@singleton_task(**GUARDED, on_conflict=SOON, max_retries=1, default_retry_delay=0)
def retrying(self: Any, name: str) -> str:
    """Calls ``retry`` once, from inside the body, as users do."""
    value = run(self, name)
    if self.request.retries == 0:
        raise self.retry(countdown=0)
    return value
