"""An app without any lock: what the harness is tested with, and the must-fail twin of lock tests."""

from __future__ import annotations

import os
import time

from celery import Celery, Task

from tests.harness.journal import Journal

app = Celery("plain", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.broker_connection_retry_on_startup = True


@app.task(bind=True)
def occupy(self: Task, key: str = "k", seconds: float = 0.5) -> int:
    """Work on ``key`` for so long; returns the id of the process that did it."""
    with Journal.from_env().run(key, task_id=self.request.id):
        time.sleep(seconds)
    return os.getpid()
