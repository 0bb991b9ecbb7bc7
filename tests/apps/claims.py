"""Every way in which a claimed message can end. All bodies write the journal.

A body's first argument is its name, and that is its key, in one scope for all. The second says how
it ends; a third names a gate (`tests.apps.gate`) at which it waits before that.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; LOCK_URL, the lock store (else the result
backend); VISIBILITY_TIMEOUT, seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import redis
from celery import Celery, signals
from celery.exceptions import Ignore, Reject

from celery_singleton_lock import OnConflict, SingletonTask, singleton_task
from celery_singleton_lock.core.store_requests import Acquire, Granted, Refused
from celery_singleton_lock.stores.redis.leases import RedisLeases
from tests.apps.gate import Gate
from tests.harness.journal import Journal

NAMES = "names"
#: Seconds. No test lasts that long: what is free earlier, was freed.
TTL, UNIQUE_FOR = 60.0, 600.0
#: Seconds: for a test to look at all its bodies while they run, on a busy machine too.
TIME_LIMIT = 4

app = Celery("claims", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    singleton_lock_url=os.environ.get("LOCK_URL"),
)
if "VISIBILITY_TIMEOUT" in os.environ:
    app.conf.broker_transport_options = {
        "visibility_timeout": float(os.environ["VISIBILITY_TIMEOUT"]),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }

journal = Journal.from_env()

SHARED: dict[str, Any] = {
    "app": app,
    "bind": True,
    "key": "{name}",
    "scope": NAMES,
    "ttl": TTL,
    "unique": "until_done",
    "unique_for": UNIQUE_FOR,
    "on_conflict": OnConflict.retry(0.05, 0.2),
}
#: What is to be distinguished from "in the test's own process".
IN_WORKER: list[bool] = []


@signals.worker_init.connect
def _prepare_worker(**_: Any) -> None:
    IN_WORKER.append(True)
    RedisLeases.acquire = _acquire_slowly  # type: ignore[method-assign]


def pass_gate(gate: str | None) -> None:
    if gate is not None:
        with redis.Redis.from_url(os.environ["RESULT_URL"], socket_timeout=None) as client:
            Gate(client, gate).wait()


# How a body ends.


def succeed(task: Any) -> None:
    pass


def fail(task: Any) -> None:
    raise ArithmeticError(task.request.id)


def ignore(task: Any) -> None:
    raise Ignore


def reject(task: Any) -> None:
    raise Reject("as asked")


def requeue(task: Any) -> None:
    """Back to the queue, once."""
    if not came_again(task):
        raise Reject("as asked", requeue=True)


def leave(task: Any) -> None:
    """The process; a second run stays."""
    if not came_again(task):
        raise SystemExit


def interrupt(task: Any) -> None:
    """Like Ctrl+C; a second run stays."""
    if not came_again(task):
        raise KeyboardInterrupt


def cancel(task: Any) -> None:
    """As a coroutine does that was cancelled and run by asyncio.run()."""
    raise asyncio.CancelledError


def retry(task: Any) -> None:
    """Once, in half a second."""
    if task.request.retries == 0:
        raise task.retry(countdown=0.5)


def retry_now(task: Any) -> None:
    if task.request.retries < 2:
        raise task.retry(countdown=0)


def retry_without_success(task: Any) -> None:
    raise task.retry(countdown=0, max_retries=1, exc=ArithmeticError("no success"))


def move(task: Any) -> None:
    """Its retry has another key, and comes in a minute."""
    name, *rest = task.request.args
    raise task.retry(args=(f"{name}-2", *rest), countdown=60)


def replace(task: Any) -> None:
    """By itself, once."""
    if task.request.replaced_task_nesting == 0:
        raise task.replace(task.si(task.request.args[0], "replace", f"{task.request.args[0]}-2"))


def replace_by_another(task: Any) -> None:
    raise task.replace(other.si(task.request.args[0], "succeed", f"{task.request.args[0]}-2"))


def sleep(task: Any) -> None:
    """Until it is killed or interrupted; a second run of it ends at once."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not came_again(task):
        time.sleep(0.02)


def defy(task: Any) -> None:
    """Until SIGKILL; a second run of it ends at once."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if came_again(task):
                return
            time.sleep(0.05)
        except SystemExit:
            pass


def stay(task: Any) -> None:
    """Against one attempt to end it; then until its second gate is opened."""
    try:
        sleep(task)
    except SystemExit:
        journal.note("stayed", key=task.request.args[0])
        pass_gate(f"{task.request.args[0]}-2")


WAYS: dict[str, Callable[[Any], None]] = {
    way.__name__: way
    for way in (
        succeed,
        fail,
        ignore,
        reject,
        requeue,
        leave,
        interrupt,
        cancel,
        retry,
        retry_now,
        retry_without_success,
        move,
        replace,
        replace_by_another,
        sleep,
        defy,
        stay,
    )
}


def came_again(task: Any) -> bool:
    """Whether an earlier body of this very task began."""
    return [record.task_id for record in journal.records() if record.event == "start"].count(
        task.request.id
    ) > 1


def body(task: Any, name: str, way: str, gate: str | None) -> str:
    with journal.run(name, task_id=task.request.id, retries=task.request.retries):
        pass_gate(gate)
        WAYS[way](task)
    return name


# The tasks.


@singleton_task(**SHARED)
def early(self: Any, name: str, way: str = "succeed", gate: str | None = None) -> str:
    """Acknowledged before it runs."""
    return body(self, name, way, gate)


@singleton_task(**SHARED, acks_late=True)
def late(self: Any, name: str, way: str = "succeed", gate: str | None = None) -> str:
    return body(self, name, way, gate)


@singleton_task(**SHARED, acks_late=True, ignore_result=True)
def silent(self: Any, name: str, way: str = "succeed", gate: str | None = None) -> str:
    """Its result does not show that it has ended."""
    return body(self, name, way, gate)


@singleton_task(**SHARED, acks_late=True, reject_on_worker_lost=True)
def requeued(self: Any, name: str, way: str = "succeed", gate: str | None = None) -> str:
    return body(self, name, way, gate)


@singleton_task(**SHARED, default_retry_delay=0)
def retried(self: Any, name: str, way: str = "succeed", gate: str | None = None) -> str:
    """Celery publishes its retry when its child is lost, where it can do that."""
    return body(self, name, way, gate)


retried.retry_on_worker_lost = True


@singleton_task(**SHARED, hold_on_retry=False)
def generous(self: Any, name: str, way: str = "succeed", gate: str | None = None) -> str:
    """Others may have its key through a countdown."""
    return body(self, name, way, gate)


@singleton_task(**SHARED)
def other(self: Any, name: str, way: str = "succeed", gate: str | None = None) -> str:
    """A task of the same keys, with claims of its own."""
    return body(self, name, way, gate)


@singleton_task(**SHARED, time_limit=TIME_LIMIT)
def limited(self: Any, name: str, way: str = "succeed", gate: str | None = None) -> str:
    return body(self, name, way, gate)


@singleton_task(**SHARED, time_limit=TIME_LIMIT, acks_late=True)
def limited_late(self: Any, name: str, way: str = "succeed", gate: str | None = None) -> str:
    """Comes back after its hard time limit, where Celery can do that."""
    return body(self, name, way, gate)


limited_late.acks_on_timeout = False


@singleton_task(**SHARED)
def unanswered(self: Any, name: str, way: str = "succeed", gate: str | None = None) -> str:
    """Its worker does not get the reply to its first acquire in time; see below."""
    return body(self, name, way, gate)


@singleton_task(**SHARED, acks_late=True, reject_on_worker_lost=True)
def unanswered_late(self: Any, name: str, way: str = "succeed", gate: str | None = None) -> str:
    return body(self, name, way, gate)


_acquire = RedisLeases.acquire


def _acquire_slowly(store: RedisLeases, request: Acquire, *, timeout: float) -> Granted | Refused:
    """As with a network that delays a reply: the store has granted, the worker does not know."""
    reply = _acquire(store, request, timeout=timeout)
    if "unanswered" in request.holder.task and isinstance(reply, Granted):
        granted = {r.key for r in journal.records() if r.data.get("text") == "granted"}
        if reply.key not in granted:
            journal.note("granted", key=reply.key, task_id=request.holder.task_id)
            time.sleep(TTL)
    return reply


class Failing(SingletonTask):
    """Its hooks fail."""

    abstract = True

    def on_success(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("on_success fails")

    def on_failure(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("on_failure fails")

    def after_return(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("after_return fails, without super()")


class Mortal(SingletonTask):
    """Its process dies once, after its result is stored."""

    abstract = True

    def on_success(self, *args: Any, **kwargs: Any) -> None:
        if not came_again(self):
            os.kill(os.getpid(), signal.SIGKILL)


class NeverBegun(SingletonTask):
    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        if args[1] == "fail":
            raise RuntimeError("before_start fails")


@singleton_task(**SHARED, base=Failing)
def failing(self: Any, name: str, way: str = "succeed", gate: str | None = None) -> str:
    return body(self, name, way, gate)


@singleton_task(**SHARED, base=Mortal, acks_late=True, reject_on_worker_lost=True)
def mortal(self: Any, name: str, way: str = "succeed", gate: str | None = None) -> str:
    """Since 5.7, Celery acknowledges it: it has its result."""
    return body(self, name, way, gate)


@singleton_task(**SHARED, base=NeverBegun)
def never_begun(self: Any, name: str, way: str = "succeed", gate: str | None = None) -> str:
    return body(self, name, way, gate)


def _only_here(name: str, way: str = "succeed", gate: str | None = None) -> str | None:
    return None if IN_WORKER else name


@singleton_task(**{**SHARED, "key": _only_here})
def free_in_workers(self: Any, name: str, way: str = "succeed", gate: str | None = None) -> str:
    """Its publisher sees a key where its worker sees none, as in the middle of a deploy."""
    return body(self, name, way, gate)


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES, unique="until_done")
def skipping(self: Any, name: str, way: str = "succeed", gate: str | None = None) -> str:
    return body(self, name, way, gate)
