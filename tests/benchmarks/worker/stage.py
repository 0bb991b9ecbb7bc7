"""A worker that runs blocks of messages: published without a consumer, released at once, timed.

A block's messages go to a queue without a consumer, each publishing timed; then that queue gets
the name of the one that the worker waits for, and the worker reports how long each took. Meanwhile
nothing is published.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any, Final

import redis

from celery_singleton_lock import hold
from example_project.private_server import PrivateServer, find_binary
from tests.benchmarks.before import exported
from tests.benchmarks.wire import Count
from tests.benchmarks.worker.contenders import BY_NAME, CELERY, Contender, contenders_of
from tests.harness.app_module import fresh_module
from tests.harness.worker import CeleryWorker

__all__ = ["MARKS", "Course", "Seen", "Stage", "staged"]

#: The list in the broker's server where workers report what they saw.
MARKS: Final = "benchmark-marks"

_APP: Final = "tests.benchmarks.worker.whole_app"
_QUEUE: Final = "field"
_STAGING: Final = "staged"
# Seconds; a block takes a few.
_PATIENCE: Final = 120
# The number of the calls that are all alike, and the seconds that their bodies would take.
_HELD: Final = 0
_CONCURRENCY: Final = {"solo": 1, "prefork": 2}


@dataclass(frozen=True, slots=True)
class Course:
    """What the worker is, and what the bodies do."""

    pool: str
    seconds: float  # that a body sleeps

    def __str__(self) -> str:
        work = f"{self.seconds * 1000:g} ms" if self.seconds else "no-op"
        return f"{self.pool}, {work}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one block gave. Lists are in the order of its messages; a pool lacks what isn't its own.

    Attributes:
        publishing: Seconds that each call took in the process that published.
        seconds: Solo: that the worker spent on each.
        processor: Solo: seconds of processor time that it had for each. Prefork: seconds that the
            worker and its children had had when each was taken.
        parts: Solo, where they are timed: seconds of each by part.
        taken: Prefork: when a child took each, in seconds of some clock.
        pairs: Seconds of raw pairs in a row, in the process that runs the bodies.
        sent: To the locks' server, by workers that count.
    """

    publishing: list[float]
    seconds: list[float]
    processor: list[float]
    parts: list[dict[str, float]]
    taken: list[float]
    pairs: list[float]
    sent: Count


class Stage:
    """The servers, the app in this process, and the worker of a while."""

    def __init__(
        self,
        broker: PrivateServer,
        locks: PrivateServer,
        app: ModuleType,
        environment: dict[str, str],
        only: Collection[str] = (),
    ) -> None:
        self.locks = locks
        #: The contenders where bodies take some seconds.
        self.contenders = partial(contenders_of, before="BEFORE" in environment, only=only)
        self._environment = environment
        self._app = app.app
        self._tasks = app.app.tasks
        # A client with a timeout would ask again, and lose what came for its first question.
        self._client = redis.Redis.from_url(broker.url(), socket_timeout=None)
        self._number = _HELD

    @contextmanager
    def worker(self, pool: str, *, counting: bool = False, parts: bool = False) -> Iterator[None]:
        """A fresh one.

        Args:
            pool: solo or prefork.
            counting: Whether it counts what it sends.
            parts: Whether it times the parts of ours.
        """
        environment = dict(self._environment)
        if counting:
            environment["COUNT"] = str(self.locks.port)
        if parts:
            environment["PARTS"] = "1"
        worker = CeleryWorker(
            _APP,
            pool=pool,
            concurrency=_CONCURRENCY[pool],
            queues=[_QUEUE],
            env=environment,
            # What the parent does ahead of its children falls on the tasks that run then: one each.
            args=["--without-heartbeat", "--prefetch-multiplier", "1"],
            loglevel="WARNING",
        )
        try:
            worker.start()
            yield
        finally:
            worker.end()

    def block(self, contenders: Sequence[Contender], seconds: float, *, pairs: int = 0) -> Seen:
        """Publish a message of each, and wait until all are done.

        Args:
            contenders: In the order of their messages.
            seconds: That each body sleeps.
            pairs: How many raw pairs are timed behind them.

        Raises:
            AssertionError: The worker did not report the end.
        """
        # The first message of a block finds a worker that has slept; it isn't looked at.
        publishing = [self._publish(one, seconds) for one in (BY_NAME[CELERY], *contenders)]
        if pairs:
            self._tasks["pairs"].apply_async((pairs,), queue=_STAGING)
        self._tasks["mark"].apply_async(queue=_STAGING)
        self._client.rename(_STAGING, _QUEUE)
        reported: dict[str, Any] = {}
        while ("pairs" not in reported and pairs) or not (
            "ends" in reported or "taken" in reported
        ):
            reported |= self._reported()
        past = slice(1, len(contenders) + 1)
        processors = reported.get("processors", [])
        solo = "ends" in reported
        return Seen(
            publishing=publishing[1:],
            seconds=_steps(reported.get("ends", ()))[: len(contenders)],
            processor=_steps(processors)[: len(contenders)] if solo else processors[past],
            parts=reported.get("parts", [])[past],
            taken=reported.get("taken", [])[past],
            pairs=reported.get("pairs", []),
            sent=Count(**reported["sent"]) if reported.get("sent") else Count(0, 0),
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock of the calls that are all alike."""
        locked = self._tasks["locked"]
        rest = locked.singleton_key_suffix((_HELD, 0.0), {})
        with hold(rest, scope=locked.name, app=self._app):
            yield

    def _publish(self, contender: Contender, seconds: float) -> float:
        """Seconds that it took."""
        task = self._tasks[contender.task]
        self._number += 1
        arguments = (_HELD, 0.0) if contender.alike else (self._number, seconds)
        begin = time.perf_counter()
        task.apply_async(arguments, queue=_STAGING)
        return time.perf_counter() - begin

    def _reported(self) -> dict[str, Any]:
        answer: Any = self._client.blpop([MARKS], _PATIENCE)
        assert answer, f"no worker has reported anything for {_PATIENCE} s"
        what: dict[str, Any] = json.loads(answer[1])
        return what


@contextmanager
def staged(before: str | None = None, only: Collection[str] = ()) -> Iterator[Stage]:
    """Private servers, and the app in this process; with a task of the revision ``before``."""
    with ExitStack() as stack:
        broker = stack.enter_context(PrivateServer(binary=find_binary()))
        locks = stack.enter_context(PrivateServer(binary=find_binary()))
        environment = {"BROKER_URL": broker.url(), "LOCK_URL": locks.url()}
        if before is not None:
            environment["BEFORE"] = str(stack.enter_context(exported(before)))
        app = stack.enter_context(fresh_module(_APP, {**os.environ, **environment}))
        stage = Stage(broker, locks, app, environment, only)
        with stage.held():
            yield stage


def _steps(moments: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(moments)]
