"""What both apps of the worker benchmark have: where everything is, and tasks that mark moments.

The environment, in the worker and in the process that publishes: BROKER_URL, also of the results;
LOCK_URL, a server of its own; COUNT, a port: what goes to that server is counted (and slowed down).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import redis
from celery import Celery

from tests.benchmarks.wire import Count, Wire

__all__ = ["BROKER_URL", "LOCK_URL", "MARKS", "TTL", "PairTimes", "add_mark", "make_app", "work"]

BROKER_URL: Final = os.environ["BROKER_URL"]
LOCK_URL: Final = os.environ["LOCK_URL"]

#: Seconds: of every lock, and of every claim.
TTL: Final = 3600

#: The list in the broker's server that the marks go to.
MARKS: Final = "benchmark-marks"

#: Seconds that lock operations took in this process since the last mark, one by one.
PairTimes = list[float]


def make_app(name: str) -> Celery:
    """An app as most are: results are kept, messages acknowledged early, defaults otherwise."""
    app = Celery(name, broker=BROKER_URL, backend=BROKER_URL, set_as_current=False)
    app.conf.update(broker_connection_retry_on_startup=True)
    return app


def work(seconds: float) -> None:
    """What every body does; nothing at 0."""
    if seconds:
        time.sleep(seconds)


def add_mark(app: Celery, times: PairTimes) -> Callable[..., Any]:
    """The task that begins and ends a wave: it tells when it ran, and hands over ``times``."""
    # In the process that runs the body: a redis-py client may be carried over a fork.
    client = redis.Redis.from_url(BROKER_URL)
    wire = _listening_wire()

    @app.task(name=f"{app.main}.mark", ignore_result=True)
    def mark(wave: str) -> None:
        at = time.monotonic()
        count = wire.take() if wire else Count(0, 0)
        line = {"wave": wave, "at": at, "pairs": list(times), **asdict(count)}
        times.clear()
        client.rpush(MARKS, json.dumps(line))

    return mark


def _listening_wire() -> Wire | None:
    port = os.environ.get("COUNT")
    if not port:
        return None
    wire = Wire({int(port)})
    wire.listening().__enter__()  # for as long as the process lives
    return wire
