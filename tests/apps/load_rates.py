"""Calls of keys with a rate; each notes the fence of its lease, the store's time of its start.

Its environment: BROKER_URL, LOCK_URL, JOURNAL; RATE, starts a second and key.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from celery_singleton_lock import current_lease, singleton_task
from tests.harness.journal import Journal

app = Celery("load_rates", broker=os.environ["BROKER_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": 20},
    worker_prefetch_multiplier=1,
    task_ignore_result=True,
    singleton_lock_url=os.environ["LOCK_URL"],
)


@singleton_task(
    app=app,
    bind=True,
    key="{key}",
    rate=float(os.environ["RATE"]),
    on_conflict="queue",
    acks_late=True,
    reject_on_worker_lost=True,
    ttl=5,
)
def work(self: Any, key: str, number: int) -> None:
    fence = current_lease().fence_number
    with Journal.from_env().run(key, task_id=self.request.id, number=number, fence=fence):
        pass
