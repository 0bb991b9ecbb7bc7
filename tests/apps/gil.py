"""Bodies that keep the GIL, so that no other thread of their process runs.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; LOCK_URL, the lock store (else the result
backend); TTL, seconds; SETTINGS, a JSON object of further settings.
"""

from __future__ import annotations

import ctypes
import json
import os
from contextlib import ExitStack
from typing import Any

from celery import Celery, Task

from celery_singleton_lock import OnConflict, current_lease, hold, singleton_task
from tests.harness.journal import Journal

app = Celery("gil", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    singleton_lock_url=os.environ.get("LOCK_URL"),
    worker_prefetch_multiplier=1,
    **json.loads(os.environ.get("SETTINGS", "{}")),
)

TTL = float(os.environ.get("TTL", "2"))
SHARED: dict[str, Any] = {"app": app, "bind": True, "key": "{key}", "scope": "gil", "ttl": TTL}

# As CDLL, but a call keeps the GIL: what a C extension does that never releases it.
_LIBC = ctypes.PyDLL(None)


def keep_gil(seconds: float) -> None:
    """One C call of so long."""
    _LIBC.usleep(ctypes.c_uint(round(seconds * 1e6)))


def seize(task: Task, key: str, seconds: float, check: bool = True) -> dict[str, Any]:
    """Keep the GIL, between two lines in the journal, and look at the lease at once after it."""
    lease = current_lease()
    with Journal.from_env().run(key, task_id=task.request.id, fence=lease.fence_number):
        keep_gil(seconds)
        if check:
            lease.check()
        lost = lease.lost
    return {"lost": lost, "pid": os.getpid()}


@singleton_task(**SHARED)
def early(self: Task, key: str, seconds: float) -> Any:
    return seize(self, key, seconds)


@singleton_task(**SHARED, acks_late=True)
def late(self: Task, key: str, seconds: float) -> Any:
    return seize(self, key, seconds)


@singleton_task(**SHARED, on_lost="continue")
def deaf(self: Task, key: str, seconds: float) -> Any:
    """As `early`, but a loss is only reported."""
    return seize(self, key, seconds, check=False)


@singleton_task(**SHARED, on_conflict=OnConflict.retry(delay=0.05, max_delay=0.1))
def competitor(self: Task, key: str) -> Any:
    """Wants the key as soon as it can be had."""
    return seize(self, key, 0.0)


@singleton_task(**SHARED)
def brief(self: Task, key: str) -> int:
    """Nothing: shorter than ttl/3."""
    return os.getpid()


@app.task(bind=True)
def holding(self: Task, key: str, count: int, seconds: float) -> list[bool]:
    """No singleton: holds ``count`` keys while it keeps the GIL."""
    with ExitStack() as stack:
        leases = [
            stack.enter_context(hold(f"{key}-{number}", scope="gil", ttl=TTL))
            for number in range(count)
        ]
        with Journal.from_env().run(key, task_id=self.request.id):
            keep_gil(seconds)
            return [lease.lost for lease in leases]
