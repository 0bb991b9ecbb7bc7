"""Plain Celery, other people's packages, and recipes in a task's body, in one app.

None of the packages does anything to tasks that don't use it. Ours does: it connects a signal. So
ours has an app, and a worker, of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import redis
from celery_heimdall import HeimdallTask
from celery_once import QueueOnce
from celery_singleton import Singleton

from tests.benchmarks import peers
from tests.benchmarks.contest import Contender
from tests.benchmarks.worker.wiring import LOCK_URL, TTL, PairTimes, add_mark, make_app, work

app = make_app("other")
app.conf.ONCE = {
    "backend": "celery_once.backends.Redis",
    "settings": {"url": LOCK_URL, "default_timeout": TTL},
}
app.conf.singleton_backend_url = LOCK_URL

_times: PairTimes = []
_client = redis.Redis.from_url(LOCK_URL)

mark = add_mark(app, _times)


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


@app.task(name="heimdall", base=_Heimdall, heimdall={"unique": True, "unique_timeout": TTL})
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

_raw = peers.raw_pair(_client)


@app.task(name="timed_pair")
def timed_pair(number: int, seconds: float) -> None:
    """A raw pair, timed where a task needs it: between all that Celery does."""
    begin = time.perf_counter()
    _raw.release(_raw.acquire(f"timed:{number}"))
    _times.append(time.perf_counter() - begin)


@app.task(name="pairs_in_a_row")
def pairs_in_a_row(count: int) -> None:
    """Raw pairs, one after the other, as the other benchmarks time them."""
    for number in range(count):
        timed_pair(number, 0)
