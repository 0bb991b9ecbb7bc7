"""What the apps of the worker benchmark have: where everything is, and how they report.

The environment, in the worker and in the process that publishes: BROKER_URL, also of the results;
LOCK_URL, a server of its own; COUNT, a port: what goes to that server is counted (and slowed down);
PARTS: the parts of ours are timed (and slowed down).
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from functools import cache
from typing import Any, Final

import redis
from celery import Celery

from tests.benchmarks.wire import Wire
from tests.benchmarks.worker.stage import MARKS

__all__ = [
    *("LOCK_URL", "TIMES_PARTS", "TTL"),
    *("listening_wire", "make_app", "report", "work"),
]

_BROKER_URL: Final = os.environ["BROKER_URL"]
LOCK_URL: Final = os.environ["LOCK_URL"]
TIMES_PARTS: Final = "PARTS" in os.environ

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


def report(**what: Any) -> None:
    """Say something to the process that measures."""
    _teller().rpush(MARKS, json.dumps(what))


@cache
def _teller() -> redis.Redis:
    # Carried over a fork, redis-py's pool makes new connections by itself.
    return redis.Redis.from_url(_BROKER_URL)


def listening_wire() -> Wire | None:
    """What counts, where the environment asks for it."""
    port = os.environ.get("COUNT")
    if not port:
        return None
    wire = Wire({int(port)})
    _LISTENING.enter_context(wire.listening())
    return wire
