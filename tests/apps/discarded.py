"""Unique tasks whose messages a worker discards before they become tasks.

Its environment: BROKER_URL, LOCK_URL, JOURNAL; RESULT_URL, the result backend; WITHOUT=1: the task
`gone` is not there.
"""

from __future__ import annotations

import json
import os
from typing import Any

import billiard.process
from celery import Celery
from kombu import serialization

from celery_singleton_lock import singleton_task
from tests.harness.journal import Journal

app = Celery("discarded", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    singleton_lock_url=os.environ["LOCK_URL"],
    accept_content=["json", "one-way", "not-in-children"],
)
journal = Journal.from_env()


def _refuse(data: Any) -> Any:
    raise ValueError("encoded, but not to be decoded")


def _refuse_in_children(data: Any) -> Any:
    if billiard.process.current_process().name != "MainProcess":
        _refuse(data)
    return json.loads(data)


# As msgpack: it writes integers as keys of a map, and refuses to read them.
serialization.register("one-way", json.dumps, _refuse, "application/x-one-way", "utf-8")
serialization.register(
    "not-in-children", json.dumps, _refuse_in_children, "application/x-not-in-children", "utf-8"
)

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
