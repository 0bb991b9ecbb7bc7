"""One body under each way of running calls of a key one after another.

The environment: BROKER_URL, also of the results; LOCK_URL, a server of its own; MARKS, the file to
which each body appends a line; LIMIT, of a key.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final

from celery import Celery

from celery_singleton_lock import OnConflict, singleton_task

__all__ = ["CONCURRENCY", "KINDS", "app"]

_LIMIT = int(os.environ["LIMIT"])
#: The pool processes of the worker of each kind.
CONCURRENCY: Final = {"plain": _LIMIT, "queue": _LIMIT + 3, "wait": _LIMIT + 3}
#: The names of the tasks and of their queues, and their policies.
KINDS: Final[dict[str, Any]] = {
    "plain": None,
    "queue": "queue",
    "wait": OnConflict.wait(timeout=60),
}

_BROKER_URL = os.environ["BROKER_URL"]
_MARKS = os.open(os.environ["MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

app = Celery("key_queue", broker=_BROKER_URL, backend=_BROKER_URL, set_as_current=False)
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    task_ignore_result=True,
    singleton_lock_url=os.environ["LOCK_URL"],
)


def work(key: str, number: int, seconds: float, published: float) -> None:
    """Sleep, and write down key, number, when it was published, the begin and the end."""
    began = time.monotonic()
    time.sleep(seconds)
    line = f"{key} {number} {published!r} {began!r} {time.monotonic()!r}\n"
    os.write(_MARKS, line.encode())


for _name, _policy in KINDS.items():
    if _policy is None:
        app.task(name=_name)(work)
    else:
        singleton_task(app=app, name=_name, key="{key}", limit=_LIMIT, on_conflict=_policy)(work)
