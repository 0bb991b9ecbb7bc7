"""All that contend, in one app: singleton tasks, plain Celery, other people's packages, and recipes
in a task's body. So one worker runs them in any order.

None of the packages does anything to tasks that don't use it. Ours does: it connects a receiver to
a signal. `Timekeeper` takes it away while other people's tasks run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import redis
from celery.signals import task_postrun
from celery_heimdall import HeimdallTask
from celery_once import QueueOnce
from celery_singleton import Singleton

from tests.benchmarks import ours, peers
from tests.benchmarks.contest import Contender
from tests.benchmarks.worker import own_app, parts
from tests.benchmarks.worker.own_app import app
from tests.benchmarks.worker.timekeeper import MARK, Timekeeper
from tests.benchmarks.worker.wiring import LOCK_URL, TIMES_PARTS, TTL, report, work

app.conf.ONCE = {
    "backend": "celery_once.backends.Redis",
    "settings": {"url": LOCK_URL, "default_timeout": TTL},
}
app.conf.singleton_backend_url = LOCK_URL

_client = redis.Redis.from_url(LOCK_URL)


class _Heimdall(HeimdallTask):
    abstract = True

    def setup_redis(self) -> Any:
        return redis.Redis.from_url(LOCK_URL)


@app.task(name="plain")
def plain(number: int, seconds: float) -> None:
    work(seconds)


@app.task(name="once", base=QueueOnce, once={"graceful": True, "timeout": TTL})
def once(number: int, seconds: float) -> None:
    work(seconds)


@app.task(name="singleton", base=Singleton, lock_expiry=TTL)
def singleton(number: int, seconds: float) -> None:
    work(seconds)


# By default it waits a second in the worker, for the lock that the publisher of the same task took.
@app.task(
    name="heimdall",
    base=_Heimdall,
    heimdall={"unique": True, "unique_timeout": TTL, "unique_lock_blocking": False},
)
def heimdall(number: int, seconds: float) -> None:
    work(seconds)


def _in_body(name: str, lock: Contender) -> Callable[..., Any]:
    """A task that takes ``lock`` in its body, as people write it."""

    @app.task(name=name)
    def locked(number: int, seconds: float) -> None:
        held = lock.acquire(f"{name}:{number}")
        try:
            work(seconds)
        finally:
            lock.release(held)

    return locked


redis_py_lock = _in_body("redis_py_lock", peers.redis_py_lock(_client))
python_redis_lock = _in_body("python_redis_lock", peers.python_redis_lock(_client))
pottery = _in_body("pottery", peers.pottery_redlock([LOCK_URL]))
raw_pair = _in_body("raw_pair", peers.raw_pair(_client))
store_alone = _in_body("store_alone", ours.store_alone(LOCK_URL))
through_redis_py = _in_body("through_redis_py", ours.through_redis_py(_client))


@app.task(name="pairs", ignore_result=True)
def pairs(count: int) -> None:
    """Raw pairs, one after the other, each timed: the unit."""
    lock, times = peers.raw_pair(_client), []
    for number in range(count):
        begin = time.perf_counter()
        lock.cycle(number)
        times.append(time.perf_counter() - begin)
    report(pairs=times)


@app.task(name=MARK, ignore_result=True)
def mark() -> None:
    """Ends a block, for the `Timekeeper`."""


_OURS = {name for name, task in app.tasks.items() if task.__module__ == own_app.__name__}
if TIMES_PARTS:
    parts.install()
# Ours and no others; with an earlier revision beside it, its own too.
assert len(task_postrun.receivers) == 1 + ("BEFORE" in os.environ), task_postrun.receivers
Timekeeper.with_receivers = frozenset(_OURS)
app.steps["consumer"].add(Timekeeper)
