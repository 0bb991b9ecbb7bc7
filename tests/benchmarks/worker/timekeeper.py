"""In the worker: when each message was taken, and whose signals are received meanwhile.

A message is acknowledged when a process takes it. Between two of them, as much is done as is done
for one: fetching, decoding, lock, body, result, release. The processor time of the worker and of
its children is noted at the same moments.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Final

import redis
from celery import bootsteps
from celery.signals import task_postrun, worker_process_init

from tests.benchmarks.worker.contenders import CONTENDERS

__all__ = ["MARK", "MARKS", "Timekeeper"]

#: The name of the task that ends a block.
MARK: Final = "mark"
#: The list in the broker's server where a worker reports a block.
MARKS: Final = "benchmark-marks"
_RECEIVED: Final = {one.task for one in CONTENDERS if one.has_receivers}

_Handler = Callable[[Any], None]


class Timekeeper(bootsteps.StartStopStep):
    """Added to the steps of the app's consumer."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._block = _Block(consumer)
        worker_process_init.connect(lambda **_: _switch(consumer.app), weak=False)

    def start(self, consumer: Any) -> None:
        """Celery's: before the loop asks for what handles a message."""
        _switch(consumer.app)  # of a pool without children
        make = consumer.create_task_handler
        consumer.create_task_handler = lambda: self._noting(make(), consumer)

    def _noting(self, handle: _Handler, consumer: Any) -> _Handler:
        def noted(message: Any) -> None:
            message.ack_log_error = self._block.noting(message.ack_log_error)
            if message.headers["task"] == MARK:
                # What comes from now on is the next block's, though this one isn't done.
                self._block.whole, self._block = True, _Block(consumer)
            handle(message)

        return noted


class _Block:
    """Messages until a mark.

    Attributes:
        whole: Whether all have arrived.
    """

    def __init__(self, consumer: Any) -> None:
        self.whole = False
        self._consumer = consumer
        self._taken: list[float] = []
        self._processor: list[float] = []
        self._missing = 0

    def noting(self, acknowledge: Callable[..., Any]) -> Callable[..., Any]:
        number = len(self._taken)
        self._taken.append(0.0)
        self._processor.append(0.0)
        self._missing += 1

        def noted(*args: Any, **options: Any) -> Any:
            self._taken[number] = time.perf_counter()
            self._processor[number] = self._processor_time()
            result = acknowledge(*args, **options)
            self._missing -= 1
            if self.whole and not self._missing:
                self._report()
            return result

        return noted

    def _processor_time(self) -> float:
        """Of this process and of its pool's children, all threads included."""
        pool = getattr(self._consumer.pool, "_pool", None)
        children = [process.pid for process in getattr(pool, "_pool", ())]
        # The clock of another process: clock_getcpuclockid(3), as Linux makes it.
        theirs = [time.clock_gettime((~pid << 3) | 2) for pid in children]
        return time.process_time() + sum(theirs)

    def _report(self) -> None:
        text = json.dumps({"taken": self._taken, "processor": self._processor})
        with redis.Redis.from_url(self._consumer.app.conf.broker_url) as client:
            client.rpush(MARKS, text)


def _switch(app: Any) -> None:
    """Let each task that is traced in this process say whether there are receivers."""
    # Celery's tracers look into this very list.
    receivers = task_postrun.receivers
    ours = list(receivers)
    for name, task in app.tasks.items():
        wanted = ours if name in _RECEIVED else []
        task.__trace__ = _received_by(receivers, wanted, task.__trace__)


def _received_by(receivers: list[Any], wanted: list[Any], trace: Callable[..., Any]) -> Any:
    def received(*args: Any, **options: Any) -> Any:
        receivers[:] = wanted
        return trace(*args, **options)

    return received
