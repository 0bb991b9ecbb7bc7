"""A worker that runs blocks of messages: published without a consumer, released at once, timed.

A block's messages go to a queue without a consumer; then that queue gets the name of the one that
the worker waits for, and the worker reports when it took each. Meanwhile nothing is published.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import redis

from celery_singleton_lock import hold
from example_project.private_server import PrivateServer, find_binary
from tests.benchmarks.worker.contenders import CELERY, Contender
from tests.benchmarks.worker.timekeeper import MARK, MARKS
from tests.harness.app_module import fresh_module
from tests.harness.worker import CeleryWorker

__all__ = ["APP", "Seen", "Stage", "staged"]

#: The module of the app.
APP: Final = "tests.benchmarks.worker.app"

_QUEUE: Final = "field"
_STAGING: Final = "staged"
# Seconds; a block takes a few.
_PATIENCE: Final = 120
# The number of the calls that are all alike, and the seconds that their bodies would take.
_ALIKE: Final = (0, 0.0)
_CONCURRENCY: Final = {"solo": 1, "prefork": 2}


@dataclass(frozen=True, slots=True)
class Seen:
    """What one block gave, in the order of its messages.

    Attributes:
        taken: When a process took each, in seconds of some clock.
        processor: Seconds of processor time that the worker and its children had had then.
    """

    taken: list[float]
    processor: list[float]


class Stage:
    """The servers, the app in this process, and the worker of a while."""

    def __init__(self, app: Any, environment: dict[str, str]) -> None:
        self._app, self._environment = app, environment
        # A client with a timeout would ask again, and lose what came for its first question.
        self._client = redis.Redis.from_url(environment["BROKER_URL"], socket_timeout=None)
        self._number = 0

    @contextmanager
    def worker(self, pool: str) -> Iterator[None]:
        """A fresh one, solo or prefork."""
        worker = CeleryWorker(
            APP,
            pool=pool,
            concurrency=_CONCURRENCY[pool],
            queues=[_QUEUE],
            env=self._environment,
            # What the parent does ahead of its children falls on the tasks that run then: one each.
            args=["--without-heartbeat", "--prefetch-multiplier", "1"],
            loglevel="WARNING",
        )
        try:
            worker.start()
            yield
        finally:
            worker.end()

    def block(self, contenders: Sequence[Contender], seconds: float) -> Seen:
        """Publish a message of each, and wait until all are done.

        Args:
            contenders: In the order of their messages.
            seconds: That each body sleeps.
        """
        # The first message of a block finds a worker that has slept; it isn't looked at.
        for one in (CELERY, *contenders):
            self._number += 1
            arguments = _ALIKE if one.alike else (self._number, seconds)
            self._app.tasks[one.task].apply_async(arguments, queue=_STAGING)
        self._app.tasks[MARK].apply_async(queue=_STAGING)
        self._client.rename(_STAGING, _QUEUE)
        answer: Any = self._client.blpop([MARKS], _PATIENCE)
        assert answer, f"no worker has reported anything for {_PATIENCE} s"
        seen = {name: moments[1:-1] for name, moments in json.loads(answer[1]).items()}
        return Seen(**seen)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock of the calls that are all alike."""
        locked = self._app.tasks["locked"]
        with hold(locked.singleton_key_suffix(_ALIKE, {}), scope=locked.name, app=self._app):
            yield


@contextmanager
def staged() -> Iterator[Stage]:
    """Private servers, and the app in this process."""
    with ExitStack() as stack:
        broker, locks = (stack.enter_context(PrivateServer(binary=find_binary())) for _ in range(2))
        environment = {"BROKER_URL": broker.url(), "LOCK_URL": locks.url()}
        module = stack.enter_context(fresh_module(APP, {**os.environ, **environment}))
        stage = Stage(module.app, environment)
        with stage.held():
            yield stage
