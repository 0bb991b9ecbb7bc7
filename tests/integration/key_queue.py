"""The queues of ``tests.apps.queue``, as its tests see them: what waits, has begun, or is due."""

from __future__ import annotations

from functools import partial
from typing import Any

from kombu import Connection

from celery_singleton_lock.core.call_queue import CallQueue
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.key_queue.sweep import QueueSweep
from celery_singleton_lock.runtime import Runtime
from tests.harness.app_module import fresh_module
from tests.harness.calls import Calls
from tests.harness.cli import run_here
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, wait_until

APP = "tests.apps.queue"


def bodies(stage: Stage, *names: str) -> list[tuple[str, int]]:
    """Key and number of the bodies on the keys ``names``, in the order of their begins."""
    starts = [r for r in stage.journal.records() if r.event == "start" and r.key in names]
    return [(start.key, start.data["number"]) for start in starts]


def numbers(stage: Stage, name: str) -> list[int]:
    """The calls of ``name`` whose bodies have begun, in that order."""
    return [number for _, number in bodies(stage, name)]


def begun(stage: Stage, name: str, number: int) -> int:
    """Wait until the body of a call begins; its process."""
    starts = wait_until(
        lambda: [s for s in stage.starts(name) if s.data["number"] == number],
        f"the body of {number} begins",
    )
    return starts[-1].pid


def running(stage: Stage, name: str, task: Any = None) -> Any:
    """A call whose body has begun, and ends when the gate ``name`` is opened."""
    result = (task or stage.app.early).delay(name, 0, gate=name)
    begun(stage, name, 0)
    return result


def also_consume(stage: Stage, worker: CeleryWorker, queue: str) -> None:
    """Have a worker that runs consume one more queue."""
    add = stage.app.app.control.add_consumer
    assert add(queue, destination=[worker.hostname], reply=True, limit=1, timeout=60)


def unconsumed(stage: Stage, name: str, count: int) -> list[Any]:
    """Calls in the broker's queue ``name``, which no worker consumes yet."""
    task = stage.app.early
    return [task.apply_async((name, number), queue=name) for number in range(count)]


def ended(results: list[Any]) -> list[Any]:
    """What the calls return."""
    return [result.get(timeout=60) for result in results]


def call_queue(stage: Stage) -> CallQueue:
    """The store's part for queues, as this process uses it."""
    queue = Runtime.of(stage.app.app).store.call_queue
    assert queue is not None
    return queue


def calls_of(stage: Stage, name: str, task: Any = None) -> Calls:
    """The calls of ``name`` in the store."""
    calls = Calls(Runtime.of(stage.app.app).store)
    calls.key = (task or stage.app.early).lock_key(name, 0)
    return calls


def make_due(stage: Stage, name: str) -> None:
    """The deadline of the last hint passes."""
    key, queue = stage.app.early.lock_key(name, 0), call_queue(stage)
    queue.defer(key, seconds=0.0, timeout=5.0)


def sweep(stage: Stage, name: str) -> None:
    """A sweep of this process, after the deadline of the hint of ``name``; no worker may look."""
    make_due(stage, name)
    key, queue = stage.app.early.lock_key(name, 0), call_queue(stage)
    due = partial(queue.due, Keyspace.shard(key), limit=1000, timeout=5.0)
    wait_until(lambda: key in due(), "the deadline has passed")
    store = Runtime.of(stage.app.app).store
    QueueSweep(stage.app.app, lambda: store, lambda: False).sweep()


def unreachable_broker() -> Connection:
    """A connection to a broker that refuses it."""
    return Connection("redis://127.0.0.1:1/0", transport_options={"max_retries": 1})


def cli(stage: Stage, *arguments: str, answer: str = "", **env: str) -> tuple[int, str]:
    """Run ``celery singleton``: its exit status, and what it says.

    For the app of the stage; for a copy of its own if ``env`` is added to its environment.
    """
    if not env:
        answered = run_here(stage.app.app, *arguments, answers=answer)
    else:
        with fresh_module(APP, {**stage.environment, **env}) as copy:
            answered = run_here(copy.app, *arguments, answers=answer)
    return answered.status, answered.all
