"""What both apps of the worker benchmark have: where everything is, and a task that marks moments.

The environment, in the worker and in the process that publishes: BROKER_URL, also of the results;
LOCK_URL, a server of its own; COUNT, a port: what goes to that server is counted (and slowed down).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from typing import Any, Final

import redis
from celery import Celery
from celery.signals import task_received

from tests.benchmarks.wire import Count, Wire
from tests.benchmarks.worker.waves import MARKS

__all__ = ["LOCK_URL", "TTL", "add_mark", "make_app", "tell", "work"]

_BROKER_URL: Final = os.environ["BROKER_URL"]
LOCK_URL: Final = os.environ["LOCK_URL"]

#: Seconds: of every lock, and of every claim.
TTL: Final = 3600

# As long as the process lives.
_LISTENING: Final = ExitStack()


def make_app(name: str) -> Celery:
    """An app as most are: results are kept, messages acknowledged early, defaults otherwise."""
    app = Celery(name, broker=_BROKER_URL, backend=_BROKER_URL, set_as_current=False)
    app.conf.update(broker_connection_retry_on_startup=True)
    return app


def work(seconds: float) -> None:
    """What every body does; nothing at 0."""
    if seconds:
        time.sleep(seconds)


def tell(**what: Any) -> None:
    """Say something to the process that measures."""
    _teller().rpush(MARKS, json.dumps(what))


def add_mark(app: Celery) -> Callable[..., Any]:
    """The task that begins and ends a wave.

    It tells when it ran, and when this process received each message since the last mark, that one
    and its own included: in a solo worker, which receives a message when it is done with the one
    before.
    """
    wire = _listening_wire()
    received: list[float] = []

    @task_received.connect(weak=False)
    def note(**_: Any) -> None:
        received.append(time.monotonic())

    @app.task(name=f"{app.main}.mark", ignore_result=True)
    def mark() -> None:
        at, processor = time.monotonic(), time.process_time()
        count = wire.take() if wire else Count(0, 0)
        tell(at=at, processor=processor, received=received, **asdict(count))
        del received[:-1]

    return mark


@cache
def _teller() -> redis.Redis:
    # Carried over a fork, redis-py's pool makes new connections by itself.
    return redis.Redis.from_url(_BROKER_URL)


def _listening_wire() -> Wire | None:
    port = os.environ.get("COUNT")
    if not port:
        return None
    wire = Wire({int(port)})
    _LISTENING.enter_context(wire.listening())
    return wire
