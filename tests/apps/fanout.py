"""Messages that reach several queues, or a queue by a pattern; beside each lock a plain task.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; QUEUE_TYPE, if wanted.
"""

from __future__ import annotations

import os
from typing import Any

import redis
from celery import Celery
from kombu import Exchange, Queue
from kombu.common import Broadcast

from celery_singleton_lock import OnConflict, singleton_task
from tests.apps.gate import Gate
from tests.harness.journal import Journal

app = Celery("fanout", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
_PAIR = Exchange("pair", "topic")
_TYPE = {"x-queue-type": os.environ["QUEUE_TYPE"]} if "QUEUE_TYPE" in os.environ else {}
NEWS = Exchange("news", "fanout")
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_ignore_result=True,
    broker_transport_options={"confirm_publish": True},
    task_queues=[
        Queue("celery", Exchange("celery"), "celery"),
        # Each worker has one of its own, which ends with it.
        Broadcast("news", exchange=NEWS),
        # One message goes to both.
        Queue("left", _PAIR, "pair.#", queue_arguments=_TYPE),
        Queue("right", _PAIR, "pair.*", queue_arguments=_TYPE),
        Queue("all", Exchange("any", "topic"), "any.#", queue_arguments=_TYPE),
    ],
)
# Where these tasks go by default. A test sends them elsewhere, and their copies must go there too.
_DEFAULT = {"queue": "left", "exchange": "pair", "routing_key": "pair.one"}
app.conf.task_routes = {"routed": _DEFAULT}
SOON = OnConflict.retry(delay=0.1, max_delay=0.5)


def occupy(task: Any, name: str, gate: str | None) -> None:
    request = task.request
    with Journal.from_env().run(name, task_id=request.id, worker=request.hostname):
        if gate is not None:
            with redis.Redis.from_url(os.environ["RESULT_URL"], socket_timeout=None) as client:
                Gate(client, gate).wait()


@app.task(bind=True)
def hello(self: Any) -> None:
    Journal.from_env().note("received", key=self.request.hostname)


@app.task(bind=True)
def plain(self: Any, name: str, gate: str | None = None) -> None:
    occupy(self, name, gate)


@singleton_task(app=app, bind=True, key="{name}", on_conflict=SOON)
def patient(self: Any, name: str, gate: str | None = None) -> None:
    occupy(self, name, gate)


@singleton_task(app=app, bind=True, key="{name}", on_conflict=SOON, name="routed")
def routed(self: Any, name: str, gate: str | None = None) -> None:
    occupy(self, name, gate)


@singleton_task(app=app, bind=True, key="{name}", on_conflict=SOON, **_DEFAULT)
def addressed(self: Any, name: str, gate: str | None = None) -> None:
    occupy(self, name, gate)


@singleton_task(app=app, bind=True, key="{name}", on_conflict=SOON, acks_late=True)
def late(self: Any, name: str, gate: str | None = None) -> None:
    occupy(self, name, gate)


@singleton_task(app=app, bind=True, key="{name}", on_conflict="queue")
def queued(self: Any, name: str, gate: str | None = None) -> None:
    occupy(self, name, gate)


@singleton_task(app=app, bind=True, key="{name}", on_conflict="wait")
def waiting(self: Any, name: str, gate: str | None = None) -> None:
    occupy(self, name, gate)


@singleton_task(app=app, bind=True, key="{name}", unique="until_done", on_conflict=SOON)
def unique(self: Any, name: str, gate: str | None = None) -> None:
    occupy(self, name, gate)


@singleton_task(app=app, bind=True, key="{name}")
def skipping(self: Any, name: str, gate: str | None = None) -> None:
    occupy(self, name, gate)
