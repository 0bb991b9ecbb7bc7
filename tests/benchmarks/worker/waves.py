"""Waves of messages through real workers: published while nobody looks, released at once, timed.

A wave's messages go to a queue that nobody consumes, each publishing timed; then that queue gets
the name of the one that the worker waits for. The worker's own clock tells how long each took, from
its arrival to that of the next; where several processes run them, how long all took together,
between a mark before them and one behind. Meanwhile nobody publishes.

Each app has one worker, which waits idle while the other's turn is on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from types import ModuleType
from typing import Any, Final

import redis

from celery_singleton_lock import hold
from celery_singleton_lock.testing.server import PrivateServer, find_binary
from tests.benchmarks.wire import Count
from tests.benchmarks.worker.contenders import Contender
from tests.harness.app_module import fresh_module
from tests.harness.worker import CeleryWorker

__all__ = ["MARKS", "Course", "Stage", "Wave", "staged"]

#: The list in the broker's server where workers tell what they saw.
MARKS: Final = "benchmark-marks"

_APPS: Final = ("other", "own")
_STAGING: Final = "staged"
# Seconds; a wave takes one or two.
_PATIENCE: Final = 120
# The number of the calls that are all alike, and the seconds that their bodies would take.
_HELD: Final = 0


@dataclass(frozen=True, slots=True)
class Course:
    """What the workers are, and what the bodies do."""

    pool: str
    seconds: float  # that a body sleeps

    def __str__(self) -> str:
        work = f"{self.seconds * 1000:g} ms" if self.seconds else "no-op"
        return f"{self.pool}, {work}"


@dataclass(frozen=True, slots=True)
class Wave:
    """What was seen of one.

    Attributes:
        task: Seconds that the worker needs for one of its tasks, everything included.
        processor: Seconds of processor time that the worker's process had for one; of a worker with
            children, nothing of use.
        publishing: Seconds that each call took in the process that published.
        tasks: How many there were.
        sent: To the locks' server, by workers that count.
    """

    task: float
    processor: float
    publishing: list[float]
    tasks: int
    sent: Count


class Stage:
    """The servers, the apps in this process, and the workers of a while.

    Args:
        broker: Also of the results.
        locks: Of all locks.
        apps: The modules by name.
    """

    def __init__(
        self, broker: PrivateServer, locks: PrivateServer, apps: Mapping[str, ModuleType]
    ) -> None:
        self._locks_port = locks.port
        self._environment = {"BROKER_URL": broker.url(), "LOCK_URL": locks.url()}
        self._apps = apps
        # A client with a timeout would ask again, and lose what came for its first question.
        self._client = redis.Redis.from_url(broker.url(), socket_timeout=None)
        self._number = _HELD

    @contextmanager
    def workers(self, pool: str, concurrency: int, *, counting: bool = False) -> Iterator[None]:
        """One of each app, fresh; with ``counting`` they count what they send, and are slow."""
        environment = dict(self._environment)
        if counting:
            environment["COUNT"] = str(self._locks_port)
        with ExitStack() as stack:
            for name in _APPS:
                worker = CeleryWorker(
                    f"tests.benchmarks.worker.{name}_app",
                    pool=pool,
                    concurrency=concurrency,
                    queues=[name],
                    env=environment,
                    args=["--without-heartbeat"],
                    loglevel="WARNING",
                )
                stack.callback(worker.end)
                worker.start()
            yield

    def wave(self, contender: Contender, tasks: int, seconds: float) -> Wave:
        """Publish one and wait for its end.

        Raises:
            AssertionError: Its end was not told.
        """
        module = self._apps[contender.app]
        task, mark = getattr(module, contender.task), module.mark
        publishing = []
        mark.apply_async(queue=_STAGING)
        for _ in range(tasks):
            arguments = (_HELD, 0.0) if contender.alike else (self._next(), seconds)
            begin = time.perf_counter()
            task.apply_async(arguments, queue=_STAGING)
            publishing.append(time.perf_counter() - begin)
        mark.apply_async(queue=_STAGING)
        self._client.rename(_STAGING, contender.app)
        first, last = self._told(), self._told()
        # Of the wave, between those of the marks; a worker with children receives ahead.
        received = last["received"][1:]
        one = (
            median(later - earlier for earlier, later in pairwise(received))
            if received
            else (last["at"] - first["at"]) / (tasks + 1)
        )
        processor = (last["processor"] - first["processor"]) / (tasks + 1)
        return Wave(one, processor, publishing, tasks, Count(last["requests"], last["round_trips"]))

    def pairs(self, count: int) -> list[float]:
        """Seconds of each of ``count`` raw pairs in the process that runs the bodies."""
        module = self._apps["other"]
        module.pairs.apply_async((count,), queue="other")
        times: list[float] = self._told()["pairs"]
        return times

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock of the calls that are all alike."""
        module = self._apps["own"]
        rest = module.locked.singleton_rest((_HELD, 0.0), {}, as_sent=True)
        with hold(rest, scope=module.locked.name, app=module.app):
            yield

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _told(self) -> dict[str, Any]:
        answer: Any = self._client.blpop([MARKS], _PATIENCE)
        assert answer, f"no worker has told anything for {_PATIENCE} s"
        what: dict[str, Any] = json.loads(answer[1])
        return what


@contextmanager
def staged() -> Iterator[Stage]:
    """Private servers, and both apps in this process."""
    with ExitStack() as stack:
        broker = stack.enter_context(PrivateServer(binary=find_binary()))
        locks = stack.enter_context(PrivateServer(binary=find_binary()))
        environment = {**os.environ, "BROKER_URL": broker.url(), "LOCK_URL": locks.url()}
        apps = {
            name: stack.enter_context(
                fresh_module(f"tests.benchmarks.worker.{name}_app", environment)
            )
            for name in _APPS
        }
        stage = Stage(broker, locks, apps)
        with stage.held():
            yield stage
