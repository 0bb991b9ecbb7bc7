"""Unique tasks whose messages a worker discards before they become tasks.

Its environment: BROKER_URL, LOCK_URL, JOURNAL; RESULT_URL, the result backend; WITHOUT=1: the task
`gone` is not there.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from celery_singleton_lock import singleton_task
from tests.harness.journal import Journal
from tests.harness.refused import NOT_IN_CHILDREN, ONE_WAY

app = Celery("discarded", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    singleton_lock_url=os.environ["LOCK_URL"],
    accept_content=["json", ONE_WAY, NOT_IN_CHILDREN],
)
journal = Journal.from_env()

UNIQUE: dict[str, Any] = {
    "app": app,
    "bind": True,
    "key": "{name}",
    "unique": "until_start",
    "unique_for": 600.0,
}


@singleton_task(**UNIQUE)
def known(self: Any, name: str, value: object = None) -> str:
    with journal.run(name, task_id=self.request.id):
        return name


if os.environ.get("WITHOUT") != "1":

    @singleton_task(**UNIQUE)
    def gone(self: Any, name: str, value: object = None) -> str:
        return name
