"""The processor time of `singleton serve` while the events of many workers arrive."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.instrumentation.worker_events import EventPipe
from celery_singleton_lock.worker.event_sender import EventSender
from tests.benchmarks.processor import processor_seconds
from tests.harness.serve import ServeProcess

__all__ = ["RATE", "SCRAPE", "WORKERS", "share_of_a_core"]

#: The number of workers that send events.
WORKERS: Final = 10
#: Tasks a second of all of them together.
RATE: Final = 1000
#: Seconds between two scrapes of the metrics.
SCRAPE: Final = 15.0

_APP: Final = "tests.benchmarks.events.app"
# Seconds.
_WARM_UP: Final = 3.0
_STEP: Final = 0.02
_PATIENCE: Final = 30.0
_TASKS: Final = tuple(f"task-{number}" for number in range(10))
# The seconds for which leases are waited for, and held: each a bucket of the histogram.
_WAITED: Final = (0.001, 0.02)
_HELD: Final = (0.003, 0.04, 0.3)


def share_of_a_core(app: Any, environment: Mapping[str, str], seconds: float) -> float:
    """Processor time of a `singleton serve`, divided by ``seconds``.

    The events are sent by the threads that a worker's parent has for them.

    Raises:
        AssertionError: Its counters are not those of the tasks.
    """
    with ExitStack() as stack:
        server = ServeProcess(_APP, env=environment)
        stack.callback(server.end)
        server.start().wait_until_ready()
        _wait_until_it_listens(server)
        pipes = [stack.enter_context(_sent(app, f"w{number}@host")) for number in range(WORKERS)]
        written = _feed(pipes, server, _WARM_UP)
        began, before = time.monotonic(), processor_seconds(server.pid)
        written += _feed(pipes, server, seconds)
        share = (processor_seconds(server.pid) - before) / (time.monotonic() - began)
        _check(server, written)
        assert not any(pipe.dropped for pipe in pipes)
    return share


@contextmanager
def _sent(app: Any, hostname: str) -> Iterator[EventPipe]:
    """A pipe whose lines are sent as a worker's."""
    pipe = EventPipe()
    sender = EventSender(app, pipe, hostname)
    sender.start()
    try:
        yield pipe
    finally:
        sender.end()


def _feed(pipes: list[EventPipe], server: ServeProcess, seconds: float) -> int:
    """Write the lines of the tasks of some seconds; returns their number."""
    began, scraped, written = time.monotonic(), 0.0, 0
    while (passed := time.monotonic() - began) < seconds:
        for number in range(written, int(passed * RATE)):
            task, pipe = _TASKS[number // WORKERS % len(_TASKS)], pipes[number % WORKERS]
            pipe.write(_line(EventName.ACQUIRED, task, _WAITED[number % len(_WAITED)]))
            pipe.write(_line(EventName.RELEASED, task, _HELD[number % len(_HELD)]))
            written += 1
        if passed - scraped > SCRAPE:
            scraped = passed
            server.get("metrics")
        time.sleep(_STEP)
    return written


def _line(event: str, task: str, seconds: float) -> bytes:
    """The line of an event that is counted, as a pool process writes it."""
    return json.dumps([event, task, seconds]).encode() + b"\n"


def _wait_until_it_listens(server: ServeProcess) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not server.sample("events_up"):
        assert time.monotonic() < deadline, f"no events are received:\n{server.tail()}"
        time.sleep(_STEP)


def _check(server: ServeProcess, written: int) -> None:
    """Wait until the counters have all tasks."""
    deadline = time.monotonic() + _PATIENCE
    for name in ("acquisitions_total", "releases_total"):
        while (found := _total(server, name)) != written:
            assert time.monotonic() < deadline, f"{name}: {found:g} of {written}"
            time.sleep(_STEP)


def _total(server: ServeProcess, name: str) -> float:
    return sum(value for (found, _), value in server.samples().items() if found == name)
