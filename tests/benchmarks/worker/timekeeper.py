"""In the worker: how long each message took, and whose signals are received meanwhile.

In a solo worker a message's time goes from the end of the one before it to its own end, so it holds
everything: fetching, decoding, lock, body, result, release. (Celery may acknowledge a message in
the beginning of the next one's time; that costs all of them the same.) Where children run the
bodies, the parent notes when a child took each: as many are done in between as were taken. It
also notes the processor time that it and its children have had until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, ClassVar, Final

from celery import bootsteps
from celery.signals import task_postrun, worker_process_init

from tests.benchmarks.processor import processor_seconds
from tests.benchmarks.worker import parts
from tests.benchmarks.worker.wiring import TIMES_PARTS, listening_wire, report

__all__ = ["MARK", "Timekeeper"]

#: The name of the task that ends a block.
MARK: Final = "mark"

_Handler = Callable[[Any], None]


class Timekeeper(bootsteps.StartStopStep):
    """Added to the steps of the app's consumer.

    Attributes:
        with_receivers: Names of the tasks that the receivers of `task_postrun` belong to; for the
            others there are none.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)
    with_receivers: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._wire = listening_wire()
        worker_process_init.connect(lambda **_: self._switch(consumer.app), weak=False)

    def start(self, consumer: Any) -> None:
        """Celery's: before the loop asks for what handles a message."""
        self._switch(consumer.app)  # of a pool without children
        make = consumer.create_task_handler
        children = consumer.pool.__module__ == "celery.concurrency.prefork"
        if children:
            consumer.create_task_handler = lambda: self._as_taken(make(), consumer.pool)
        else:
            consumer.create_task_handler = lambda: self._as_ended(make())

    def _switch(self, app: Any) -> None:
        """Let each task that is traced in this process say whether there are receivers."""
        receivers = task_postrun.receivers
        ours = list(receivers)
        for name, task in app.tasks.items():
            wanted = ours if name in self.with_receivers else []
            # Celery's tracers look into this very list.
            task.__trace__ = _received_by(receivers, wanted, task.__trace__)

    def _as_ended(self, handle: _Handler) -> _Handler:
        ends: list[float] = []
        processors: list[float] = []
        spent: list[dict[str, float]] = []

        def timed(message: Any) -> None:
            handle(message)
            ends.append(time.perf_counter())
            processors.append(time.process_time())
            if TIMES_PARTS:
                spent.append(parts.take())
            if _is_mark(message):
                sent = asdict(self._wire.take()) if self._wire else {}
                report(ends=ends, processors=processors, parts=spent, sent=sent)
                for noted in (ends, processors, spent):
                    noted.clear()

        return timed

    def _as_taken(self, handle: _Handler, pool: Any) -> _Handler:
        processor = _ProcessorTime(pool)
        block = _Block(processor)

        def timed(message: Any) -> None:
            nonlocal block
            message.ack_log_error = block.noting(message.ack_log_error)
            if _is_mark(message):
                # What comes from now on is the next block's, though this one isn't done.
                block.whole, block = True, _Block(processor)
            handle(message)

        return timed


class _Block:
    """Messages until a mark, acknowledged when a child takes them.

    Attributes:
        whole: Whether all have arrived.
    """

    def __init__(self, processor: _ProcessorTime) -> None:
        self.whole = False
        self._processor = processor
        self._taken: list[float] = []
        self._processors: list[float] = []
        self._missing = 0

    def noting(self, acknowledge: Callable[..., Any]) -> Callable[..., Any]:
        number = len(self._taken)
        self._taken.append(0.0)
        self._processors.append(0.0)
        self._missing += 1

        def noted(*args: Any, **options: Any) -> Any:
            self._taken[number] = time.perf_counter()
            self._processors[number] = self._processor.seconds()
            result = acknowledge(*args, **options)
            self._missing -= 1
            if self.whole and not self._missing:
                report(taken=self._taken, processors=self._processors)
            return result

        return noted


class _ProcessorTime:
    """The processor time of this process and of its pool's children, all threads included."""

    def __init__(self, pool: Any) -> None:
        self._children = [process.pid for process in pool._pool._pool]

    def seconds(self) -> float:
        """Since the processes were started."""
        return time.process_time() + sum(map(processor_seconds, self._children))


def _received_by(receivers: list[Any], wanted: Iterable[Any], trace: Callable[..., Any]) -> Any:
    def received(*args: Any, **options: Any) -> Any:
        receivers[:] = wanted
        return trace(*args, **options)

    return received


def _is_mark(message: Any) -> bool:
    return bool(message.headers["task"] == MARK)
