"""`python -m tests.benchmarks events`: what a task adds in a worker with `-E`, and at `serve`."""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, Final

import redis

from example_project.private_server import PrivateServer, find_binary
from tests.benchmarks.events import report
from tests.benchmarks.events.report import KINDS, Lap, Round
from tests.benchmarks.events.serving import RATE, SCRAPE, WORKERS, share_of_a_core
from tests.benchmarks.machine import conditions, seeded
from tests.benchmarks.processor import other_threads_seconds, processor_seconds
from tests.benchmarks.publication import publish
from tests.harness.app_module import fresh_module
from tests.harness.worker import CeleryWorker

__all__ = ["add_options", "benchmark"]

_PACKAGES: Final = ("celery-singleton-lock", "celery", "kombu", "redis")
_APP: Final = "tests.benchmarks.events.app"
_STAGING: Final = "staged"
_QUEUES: Final = {False: "without-events", True: "with-events"}
# Seconds until a worker has sent the events of a lap: Celery and this library send once a second.
_AFTERMATH: Final = 1.3
# Seconds; a lap takes a few.
_PATIENCE: Final = 120


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of this benchmark."""
    parser.add_argument("--starts", type=int, default=4, help="of the workers")
    parser.add_argument("--rounds", type=int, default=10, help="of each start")
    parser.add_argument("--tasks", type=int, default=500, help="of a lap")
    parser.add_argument("--seconds", type=float, default=60.0, help="that serve is watched")
    parser.add_argument("--seed", type=int, help="of the order of the laps; printed")
    parser.add_argument("--save", action="store_true", help="write docs/dev/benchmarks.md")


def benchmark(options: argparse.Namespace) -> None:
    """Run it; the table goes to standard output, and with ``--save`` into the docs."""
    seed = seeded(options.seed)
    how = (
        f"{options.starts} starts of the workers, {options.rounds} rounds each, with laps of "
        f"{options.tasks} tasks; serve for {options.seconds:g} s; seed {seed}"
    )
    about = conditions(_PACKAGES, how)
    order = random.Random(seed)
    with ExitStack() as stack:
        broker, locks = (stack.enter_context(PrivateServer(binary=find_binary())) for _ in range(2))
        environment = {"BROKER_URL": broker.url(), "LOCK_URL": locks.url()}
        module = stack.enter_context(fresh_module(_APP, {**os.environ, **environment}))
        # A client with a timeout would ask again, and lose the answer to its first question.
        client = redis.Redis.from_url(broker.url(), socket_timeout=None)
        starts = []
        for start in range(options.starts):
            with _workers(environment) as workers:
                stage = _Stage(module, client, workers)
                stage.round(options.tasks, order)  # caches and connections
                starts.append([stage.round(options.tasks, order) for _ in range(options.rounds)])
            print(f"start {start + 1} of {options.starts} is done", flush=True)
        share = share_of_a_core(module.app, environment, options.seconds)
    rounds = [one for start in starts for one in start]
    text = (
        f"{report.as_table(rounds)}\n`singleton serve` takes {share:.1%} of a core while "
        f"{WORKERS} workers send the events of {RATE:,} tasks a second together, with a scrape "
        f"every {SCRAPE:g} s.\n"
    )
    print(f"\n{text}\n" + "\n".join(report.verdicts(starts, share)))
    if options.save:
        data = {**report.as_data(rounds), "serve_share_of_a_core": share}
        publish("events", f"{text}\n{about}\n", data, [])


class _Stage:
    """Two workers, one of which sends events, and laps of one task at one of them."""

    def __init__(
        self, module: ModuleType, client: redis.Redis, workers: dict[bool, CeleryWorker]
    ) -> None:
        self._module, self._client, self._workers = module, client, workers
        self._children = {events: worker.children() for events, worker in workers.items()}
        self._number = 0

    def round(self, tasks: int, order: random.Random) -> Round:
        """A lap of each kind, in a new order."""
        return {kind: self._lap(*kind, tasks) for kind in order.sample(KINDS, len(KINDS))}

    def _lap(self, name: str, events: bool, tasks: int) -> Lap:
        """The messages are published to a queue without a consumer, and handed over at once."""
        app = self._module.app
        for _ in range(tasks):
            self._number += 1
            app.tasks[name].apply_async((self._number,), queue=_STAGING)
        app.tasks[self._module.LAP_END].apply_async(queue=_STAGING)
        parent, threads, child = self._processor(events)
        began = time.perf_counter()
        self._client.rename(_STAGING, _QUEUES[events])
        answer: Any = self._client.blpop([self._module.ENDS], _PATIENCE)
        assert answer, f"the lap has not ended after {_PATIENCE} s"
        took = time.perf_counter() - began
        time.sleep(_AFTERMATH)
        parent_after, threads_after, child_after = self._processor(events)
        return Lap(
            time=took / tasks,
            parent=(parent_after - parent) / tasks,
            threads=(threads_after - threads) / tasks,
            child=(child_after - child) / tasks,
        )

    def _processor(self, events: bool) -> tuple[float, float, float]:
        """Seconds of the worker's parent, of its threads beside the main one, and of its pool."""
        parent = self._workers[events].pid
        children = sum(processor_seconds(pid) for pid in self._children[events])
        return processor_seconds(parent), other_threads_seconds(parent), children


@contextmanager
def _workers(environment: dict[str, str]) -> Iterator[dict[bool, CeleryWorker]]:
    """One without events and one with them, each with a process and a queue of its own."""
    with ExitStack() as stack:
        workers = {}
        for events, queue in _QUEUES.items():
            workers[events] = CeleryWorker(
                _APP,
                concurrency=1,
                queues=[queue],
                env=environment,
                args=["--without-heartbeat", *(["-E"] if events else [])],
                loglevel="INFO",
            )
            stack.callback(workers[events].end)
            workers[events].start()
        for worker in workers.values():
            worker.wait_until_ready()
        yield workers
