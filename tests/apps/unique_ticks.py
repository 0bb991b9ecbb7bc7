"""A task that Beat sends at most once at a time, by one word in its entry.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; EVERY, seconds; REGISTERED, of any value: the
task's class is known here, as in a worker; else it is sent by name.
"""

from __future__ import annotations

import os

import redis
from celery import Celery

from celery_singleton_lock import PER_TASK, singleton_task
from tests.apps.gate import Gate
from tests.harness.journal import Journal

NAME = "unique.tick"

app = Celery("unique", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.broker_connection_retry_on_startup = True
app.conf.redbeat_redis_url = os.environ["BROKER_URL"]
app.conf.singleton_lock_beat_ttl = 3
app.conf.beat_schedule = {
    "unique": {
        "task": NAME,
        "schedule": float(os.environ.get("EVERY", "1")),
        "options": {"singleton": {"unique": "until_done"}},
    }
}

if "REGISTERED" in os.environ:

    @singleton_task(app=app, name=NAME, key=PER_TASK, ttl=3, bind=True)
    def tick(self: object) -> None:
        """Wait at the gate."""
        task_id: str = self.request.id  # type: ignore[attr-defined]
        with (
            redis.Redis.from_url(os.environ["BROKER_URL"]) as client,
            Journal.from_env().run("tick", task_id=task_id),
        ):
            Gate(client, "tick").wait()
