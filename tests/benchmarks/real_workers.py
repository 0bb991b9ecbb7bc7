"""An app of a benchmark with real workers, whose bodies leave marks in a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from example_project.private_server import PrivateServer, find_binary
from tests.harness.app_module import fresh_module
from tests.harness.worker import CeleryWorker

__all__ = ["Running", "running"]


@dataclass(frozen=True, slots=True)
class Running:
    """An app, the file in which its bodies leave marks, and its workers."""

    app: Any
    marks: Path
    workers: list[CeleryWorker]


@contextmanager
def running(
    path: str,
    workers: Callable[[ModuleType], Iterable[tuple[int, list[str]]]],
    **environment: str,
) -> Iterator[Running]:
    """Run the app of a module with a broker and a lock store of their own.

    Args:
        path: The module's. Its environment has BROKER_URL, LOCK_URL, MARKS and ``environment``.
        workers: The pool processes and the queues of each worker, from the module.
        environment: What else the module reads.
    """
    with ExitStack() as stack:
        broker, locks = (stack.enter_context(PrivateServer(binary=find_binary())) for _ in range(2))
        marks = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "marks"
        environment |= {"BROKER_URL": broker.url(), "LOCK_URL": locks.url(), "MARKS": str(marks)}
        module = stack.enter_context(fresh_module(path, {**os.environ, **environment}))
        started = []
        for concurrency, queues in workers(module):
            worker = CeleryWorker(
                path,
                concurrency=concurrency,
                queues=queues,
                env=environment,
                args=["--without-heartbeat"],
                loglevel="INFO",
            )
            stack.callback(worker.end)
            started.append(worker)
            worker.start()
        for worker in started:
            worker.wait_until_ready()
        yield Running(module.app, marks, started)
