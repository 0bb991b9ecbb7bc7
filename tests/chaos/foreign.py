"""The same bodies under other people's locks, taken in a plain task as their manuals show it.

They have no deadline that the body could ask for, so a section lasts from its check to the end of
its step. The environment is that of `tests.chaos.app`, whose recording is used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import redis
import redis_lock

from tests.chaos.app import TTL, app
from tests.chaos.body import run_body
from tests.chaos.history import History


class ForeignGuard:
    """Asks the store: no other part knows.

    Args:
        is_ours: Whether the store still has it as ours; raises if the store is away.
        asked: When it was asked for, CLOCK_MONOTONIC.
    """

    fence = None

    def __init__(self, is_ours: Callable[[], bool], asked: float) -> None:
        self._is_ours = is_ours
        self._asked = asked

    def check(self) -> None:
        if not self._is_ours():
            raise RuntimeError("the lock is gone")

    def remaining(self) -> float:
        return float("inf")

    def holds(self) -> bool:
        return True

    def asked(self) -> float:
        return self._asked


def _client() -> redis.Redis:
    return redis.Redis.from_url(os.environ["LOCK_URL"])


@app.task(bind=True, acks_late=True)
def redis_py(self: Any, key: str, steps: int, seconds: float) -> str:
    """redis-py's Lock, with a timeout, or it would never be free again after a crash."""
    asked = time.monotonic()
    lock = _client().lock(f"foreign:{key}", timeout=TTL)
    if not lock.acquire(blocking=False):
        History.from_env().write("skip", task_id=self.request.id)
        return "skipped"
    try:
        return run_body(self, ForeignGuard(lock.owned, asked), key, steps, seconds)
    finally:
        try:
            lock.release()
        except redis.exceptions.RedisError:
            pass  # it is gone, or the store is


@app.task(bind=True, acks_late=True)
def python_redis_lock(self: Any, key: str, steps: int, seconds: float) -> str:
    """python-redis-lock, which renews in a thread of its own."""
    asked = time.monotonic()
    lock = redis_lock.Lock(_client(), f"foreign:{key}", expire=round(TTL), auto_renewal=True)
    if not lock.acquire(blocking=False):
        History.from_env().write("skip", task_id=self.request.id)
        return "skipped"
    try:
        guard = ForeignGuard(lambda: bool(lock._held), asked)
        return run_body(self, guard, key, steps, seconds)
    finally:
        try:
            lock.release()
        except (redis.exceptions.RedisError, redis_lock.NotAcquired):
            pass  # it is gone, or the store is
