"""Short tasks whose calls of one key run one after another.

Its environment: BROKER_URL, RESULT_URL, LOCK_URL, JOURNAL; WITHOUT=queue: the calls retry instead.
"""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery

from celery_singleton_lock import OnConflict, singleton_task
from tests.harness.hints import hasten_hints
from tests.harness.journal import Journal

_RETRY = OnConflict.retry(delay=0.02, max_delay=0.1)
#: Seconds that a body takes.
WORK = 0.02

hasten_hints()
app = Celery("load_queue", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    # A worker that has lost its broker goes on at once when that is there again.
    broker_connection_retry_delay=0.2,
    worker_prefetch_multiplier=1,
    task_publish_retry=False,
    # A process that dies between the result and the release has run its call, and the broker
    # delivers the message again.
    worker_deduplicate_successful_tasks=True,
    singleton_lock_url=os.environ["LOCK_URL"],
)
options: dict[str, Any] = {
    "app": app,
    "bind": True,
    "key": "{account}",
    "scope": "load",
    "ttl": 6,
    "on_conflict": "queue" if os.environ.get("WITHOUT") != "queue" else _RETRY,
}


def work(task: Any, account: int) -> None:
    with Journal.from_env().run(str(account), task_id=task.request.id):
        time.sleep(WORK)


@singleton_task(**options)
def early(self: Any, account: int) -> None:
    work(self, account)


@singleton_task(**options, acks_late=True, reject_on_worker_lost=True)
def late(self: Any, account: int) -> None:
    work(self, account)
