"""All that contend, in one app: singleton tasks, plain Celery, other people's packages, and recipes
in a task's body. So one worker runs them in any order.

None of the packages does anything to tasks that don't use it. Ours does: it connects a receiver to
a signal. `Timekeeper` takes it away while other people's tasks run.

The environment, in the worker and in the process that publishes: BROKER_URL, also of the results;
LOCK_URL, a server of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Final

import redis
from celery import Celery
from celery.signals import task_postrun
from celery_once import QueueOnce
from celery_singleton import Singleton

from celery_singleton_lock import singleton_task
from tests.benchmarks import peers
from tests.benchmarks.contest import Contender
from tests.benchmarks.worker.timekeeper import MARK, Timekeeper

_BROKER_URL: Final = os.environ["BROKER_URL"]
_LOCK_URL: Final = os.environ["LOCK_URL"]
# Seconds: of every lock, and of every claim.
_TTL: Final = 3600

# As most are: results are kept, messages acknowledged early, defaults otherwise.
app = Celery("field", broker=_BROKER_URL, backend=_BROKER_URL, set_as_current=False)
app.conf.broker_connection_retry_on_startup = True
app.conf.singleton_lock_url = app.conf.singleton_backend_url = _LOCK_URL
app.conf.ONCE = {
    "backend": "celery_once.backends.Redis",
    "settings": {"url": _LOCK_URL, "default_timeout": _TTL},
}
_client = redis.Redis.from_url(_LOCK_URL)


def _body(number: int, seconds: float) -> None:
    """What every task does; nothing at 0."""
    if seconds:
        time.sleep(seconds)


def _in_body(name: str, lock: Contender) -> Callable[..., Any]:
    """What takes ``lock`` in its body, as people write it."""

    def locked(number: int, seconds: float) -> None:
        held = lock.acquire(f"{name}:{number}")
        try:
            _body(number, seconds)
        finally:
            lock.release(held)

    return locked


def _mark() -> None:
    """Ends a block, for the `Timekeeper`."""


app.task(name="plain")(_body)
app.task(name="beside")(_body)
app.task(name="once", base=QueueOnce, once={"graceful": True, "timeout": _TTL})(_body)
app.task(name="singleton", base=Singleton, lock_expiry=_TTL)(_body)
app.task(name="raw_pair")(_in_body("raw_pair", peers.raw_pair(_client)))
app.task(name="redis_py_lock")(_in_body("redis_py_lock", peers.redis_py_lock(_client)))
app.task(name=MARK, ignore_result=True)(_mark)
singleton_task(app=app, name="locked")(_body)
singleton_task(app=app, name="claimed", unique="until_done")(_body)

# Ours and no others.
assert len(task_postrun.receivers) == 1, task_postrun.receivers
app.steps["consumer"].add(Timekeeper)
