"""Tasks whose calls of one key run one after another (``on_conflict="queue"``).

A body that is given a gate (`tests.apps.gate`) ends when its test opens that.

Its environment: BROKER_URL, RESULT_URL, LOCK_URL, JOURNAL; TTL, seconds; KEY, the template of the
keys; NO_KEY=1: no call has one; ON_STORE_ERROR;
DIES=1: a process dies before it publishes the call that follows its own, once; OFF=1: the option is
switched off;
WITHOUT=1: the task `gone` is not there; RESULTS: another result backend;
LIMITS: the arguments, as JSON, of the queue `limited` of RabbitMQ;
NO_JOIN=1: the store does not answer the join of a retry; NO_REPLY=1: the store's replies to the
ends of calls are lost, each once.
"""

from __future__ import annotations

import json
import os
import signal
from functools import cache
from typing import Any

import redis
from celery import Celery, signature
from celery.exceptions import Reject
from celery.signals import before_task_publish
from kombu import Queue

from celery_singleton_lock import OnConflict, SingletonTask, singleton_task
from celery_singleton_lock.core.store_requests import QueuedRelease
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.key_queue import join as publish
from celery_singleton_lock.stores.redis import scripts
from celery_singleton_lock.stores.redis.call_queue import RedisCallQueue
from celery_singleton_lock.task import run as module
from tests.apps.gate import Gate
from tests.harness.journal import Journal

results = os.environ.get("RESULTS") or os.environ["RESULT_URL"]
app = Celery("queue", broker=os.environ["BROKER_URL"], backend=results)
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    task_publish_retry=False,
    singleton_lock_url=os.environ.get("LOCK_URL") or os.environ["RESULT_URL"],
)
if os.environ.get("LIMITS"):
    app.conf.task_queues = [
        Queue("celery"),
        Queue("limited", queue_arguments=json.loads(os.environ["LIMITS"])),
    ]


def no_key(*args: Any, **kwargs: Any) -> None:
    return None


options: dict[str, Any] = {
    "app": app,
    "bind": True,
    "key": no_key if os.environ.get("NO_KEY") else os.environ.get("KEY", "{name}"),
    "scope": "queue",
    "ttl": float(os.environ.get("TTL", "3")),
    "on_conflict": "retry" if os.environ.get("OFF") else "queue",
    "on_store_error": os.environ.get("ON_STORE_ERROR", "retry"),
}


if os.environ.get("DIES"):

    def die_once(*args: Any) -> None:
        if _client(os.getpid()).set("died", "1", nx=True):
            os.kill(os.getpid(), signal.SIGKILL)
        publish_hint(*args)

    publish_hint = module.publish_hint
    module.publish_hint = die_once


if os.environ.get("DIES_AT_LINK"):

    @before_task_publish.connect
    def die_at_link(**_: Any) -> None:
        if _client(os.getpid()).set("died-at-link", "1", nx=True):
            os.kill(os.getpid(), signal.SIGKILL)


if os.environ.get("NO_JOIN"):

    def no_join(*args: Any) -> Any:
        raise StoreUnavailable("no reply")

    publish._join = no_join


if os.environ.get("NO_REPLY"):
    unanswered: set[Any] = set()

    def lose_first_reply(store: RedisCallQueue, request: QueuedRelease, *, timeout: float) -> Any:
        if request.token in unanswered:
            return release(store, request, timeout=timeout)
        unanswered.add(request.token)
        store._runner.run(scripts.queued_release_command(request), timeout)
        raise StoreUnavailable("no reply")

    release = RedisCallQueue.release
    RedisCallQueue.release = lose_first_reply  # type: ignore[method-assign]


@cache
def _client(pid: int) -> redis.Redis:
    return redis.Redis.from_url(os.environ["RESULT_URL"], socket_timeout=None)


def work(task: Any, name: str, number: int, gate: str | None) -> int:
    request = task.request
    with Journal.from_env().run(name, task_id=request.id, number=number, retries=request.retries):
        if gate is not None:
            Gate(_client(os.getpid()), gate).wait()
    return number


@singleton_task(**options)
def early(self: Any, name: str, number: int, gate: str | None = None) -> int:
    return work(self, name, number, gate)


@singleton_task(**options, unique="until_done")
def unique(self: Any, name: str, number: int, gate: str | None = None) -> int:
    return work(self, name, number, gate)


if not os.environ.get("WITHOUT"):

    @singleton_task(**options)
    def gone(self: Any, name: str, number: int, gate: str | None = None) -> int:
        return work(self, name, number, gate)


@singleton_task(**options, acks_late=True)
def late(self: Any, name: str, number: int, gate: str | None = None) -> int:
    return work(self, name, number, gate)


three = {**options, "scope": "three", "limit": 3}


@singleton_task(**three)
def three_early(self: Any, name: str, number: int, gate: str | None = None) -> int:
    return work(self, name, number, gate)


@singleton_task(**three, acks_late=True, reject_on_worker_lost=True, max_retries=1)
def three_late(
    self: Any, name: str, number: int, gate: str | None = None, again: bool = False
) -> int:
    work(self, name, number, gate)
    if again and not self.request.retries:
        raise self.retry(countdown=0.5)
    return number


@singleton_task(**options, acks_late=True, reject_on_worker_lost=True)
def requeued(self: Any, name: str, number: int, gate: str | None = None) -> int:
    return work(self, name, number, gate)


class NeverBegun(SingletonTask):
    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        raise RuntimeError(args[1])


@singleton_task(**options, base=NeverBegun)
def never_begun(self: Any, name: str, number: int) -> int:
    return work(self, name, number, None)


@singleton_task(**options, acks_late=True)
def exiting(self: Any, name: str, number: int) -> int:
    work(self, name, number, None)
    raise SystemExit(3)


# Celery may need five seconds to notice the death of a child: longer than the ttl of the others.
# No test waits for this one.
patient = {**options, "ttl": 300}


@singleton_task(**patient)
def patient_early(self: Any, name: str, number: int, gate: str | None = None) -> int:
    return work(self, name, number, gate)


@singleton_task(**patient, acks_late=True)
def patient_late(self: Any, name: str, number: int, gate: str | None = None) -> int:
    return work(self, name, number, gate)


@singleton_task(**patient, default_retry_delay=2)
def retried(self: Any, name: str, number: int, gate: str | None = None) -> int:
    return work(self, name, number, gate)


retried.retry_on_worker_lost = True  # as a keyword it is refused where Celery lacks it


@singleton_task(**options, max_retries=4)
def moving(self: Any, name: str, number: int, names: list[str]) -> int:
    """Each retry is in another queue."""
    work(self, name, number, None)
    if names:
        raise self.retry(args=(names[0], number, names[1:]), countdown=0)
    return number


@singleton_task(**options, max_retries=2)
def retrying(self: Any, name: str, number: int, countdown: float = 0.0, fail: bool = False) -> int:
    work(self, name, number, None)
    if self.request.retries < 2:
        raise self.retry(countdown=countdown)
    if fail:
        raise ValueError(number)
    return number


@singleton_task(**options)
def replacing_early(self: Any, name: str, number: int, canvas: Any, gate: str) -> None:
    """A canvas in its place."""
    work(self, name, number, gate)
    raise self.replace(signature(canvas, app=app))


@singleton_task(**options, acks_late=True)
def replacing_late(self: Any, name: str, number: int, canvas: Any, gate: str) -> None:
    """A canvas in its place."""
    work(self, name, number, gate)
    raise self.replace(signature(canvas, app=app))


@app.task(bind=True)
def unlocked(self: Any, name: str, number: int, gate: str | None = None) -> int:
    """A task without a key."""
    return work(self, name, number, gate)


@singleton_task(**options)
def rejecting(self: Any, name: str, number: int) -> int:
    work(self, name, number, None)
    raise Reject("no")


bounded = options["on_conflict"] if os.environ.get("OFF") else OnConflict.queue(max_crashes=3)


@singleton_task(
    **{**options, "on_conflict": bounded, "scope": "poison"},
    acks_late=True,
    reject_on_worker_lost=True,
)
def poison(self: Any, name: str, number: int, gate: str | None = None) -> int:
    """The call 0 kills its process each time it runs."""
    work(self, name, number, gate)
    if number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


limited = options["on_conflict"] if os.environ.get("OFF") else OnConflict.queue(max_waiting=2)


@singleton_task(**{**options, "on_conflict": limited, "scope": "few"})
def few(
    self: Any, name: str, number: int, gate: str | None = None, retry_as: str | None = None
) -> int:
    work(self, name, number, gate)
    if retry_as is not None:
        raise self.retry(args=(retry_as, number), kwargs={}, countdown=0)
    return number


@app.task
def error_callback(task_id: str) -> None:
    with Journal.from_env().run(task_id, number=0):
        pass
