"""Tasks that are acknowledged late; on Redis a pop takes as long as it needs.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; VISIBILITY_TIMEOUT, seconds.
"""

from __future__ import annotations

import os
from typing import Any

import redis
from celery import Celery

from celery_singleton_lock import singleton_task
from tests.apps.gate import Gate
from tests.harness.journal import Journal

app = Celery("prefetch", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    singleton_lock_url=os.environ["RESULT_URL"],
    worker_prefetch_multiplier=1,
)
if os.environ["BROKER_URL"].startswith("redis"):
    app.conf.broker_transport_options = {
        # Seconds that one pop waits for a message; 1 by default, which would be a race here.
        "polling_interval": 60,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        "visibility_timeout": float(os.environ.get("VISIBILITY_TIMEOUT", "3600")),
    }

#: Seconds.
UNIQUE_FOR = 15.0


@singleton_task(app=app, acks_late=True, bind=True, key="{name}")
def work(self: Any, name: str) -> None:
    """Waits at the gate of its name."""
    # redis-py 8 gives up reading after 5 s by itself.
    client = redis.Redis.from_url(os.environ["BROKER_URL"], socket_timeout=None)
    with client, Journal.from_env().run(name, task_id=self.request.id):
        Gate(client, name).wait()


@app.task(acks_late=True)
def plain(name: str) -> str:
    """No task of this package."""
    return name


@singleton_task(app=app, acks_late=True, key="{name}", unique="until_done", unique_for=UNIQUE_FOR)
def once(name: str) -> str:
    """Equal calls are answered with the message that has the claim."""
    return name
