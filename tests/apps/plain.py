"""An app without any lock: what the harness is tested with, and the must-fail variant of lock
tests.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; ACKS_LATE=1; TICK, seconds, for Beat.
"""

from __future__ import annotations

import os
import time

from celery import Celery, Task

from tests.harness.journal import Journal

app = Celery("plain", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_acks_late=os.environ.get("ACKS_LATE") == "1",
)
if "TICK" in os.environ:
    app.conf.beat_schedule = {
        "tick": {
            "task": "tests.apps.plain.occupy",
            "schedule": float(os.environ["TICK"]),
            "args": ("tick", 0),
        }
    }


@app.task(bind=True)
def occupy(self: Task[..., int], key: str = "k", seconds: float = 0.5) -> int:
    """Work on ``key`` for so long; returns the id of the process that did it."""
    with Journal.from_env().run(key, task_id=self.request.id or ""):
        time.sleep(seconds)
    return os.getpid()
