"""Calls of few keys that run one after another, while everything around them fails.

Publishers call tasks with ``on_conflict="queue"``, half of them acknowledged early. Meanwhile pool
processes and whole workers are killed, the broker's queue is purged, and broker and store restart
with their data, the broker once without.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from celery import states
from celery.exceptions import WorkerLostError
from kombu import Connection

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.stores import open_store
from example_project.private_server import PrivateServer
from tests.harness.app_module import fresh_module
from tests.harness.deliveries import wait_until
from tests.harness.journal import VARIABLE, Journal, Run, overlaps, runs
from tests.harness.processes import kill_process
from tests.harness.rabbit import RabbitServer
from tests.harness.worker import CeleryWorker

APP = "tests.apps.load_queue"

# Seconds between two faults.
_PAUSE: Final = (1.0, 3.0)


@dataclass(frozen=True, kw_only=True)
class QueueLoad:
    """What to run.

    Attributes:
        calls: How many calls that are accepted, and more until enough has failed.
        keys: Over how many keys.
        publishers: Threads that publish.
        workers: `celery worker` processes.
        processes: Pool processes of each.
        rabbit: Whether RabbitMQ is the broker.
        faults: How many things fail at least; 0: nothing fails.
        pause: Seconds between two calls of a publisher, at most.
        seed: The seed of keys, tasks and faults.
        timeout: Seconds after the last call until all have ended.
        without_queue: Let the tasks retry instead; then the run has to fail.
    """

    calls: int = 5000
    keys: int = 20
    publishers: int = 4
    workers: int = 3
    processes: int = 4
    rabbit: bool = False
    faults: int = 4
    pause: float = 0.08
    seed: int = 1
    timeout: float = 300.0
    without_queue: bool = False


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call; times of CLOCK_MONOTONIC.

    Attributes:
        task_id: Its id.
        key: The key.
        late: Whether it is acknowledged late.
        entered: When ``apply_async`` was entered.
        returned: When it returned; None: it raised.
        unknown: Whether the error said that the outcome is unknown.
    """

    task_id: str
    key: str
    late: bool
    entered: float
    returned: float | None
    unknown: bool = False


@dataclass(frozen=True, kw_only=True)
class QueueReport:
    """What became of it.

    Attributes:
        seconds: From the first call until the queues were empty.
        faults: How often each of them was injected.
        accepted: Calls that were accepted.
        refused: Calls whose ``apply_async`` raised.
        overlaps: Pairs of bodies of one key that ran at the same time.
        disorder: Bodies that began before an earlier call of their key had ended.
        lost: Calls that were accepted and never ran to their end. Those that were acknowledged
            early and died with their process, and have that for a result, are not lost: no more
            than processes have died.
        repeated: Bodies that were acknowledged early and began twice, or began after the success of
            their call was stored.
        unasked: Bodies of calls that were refused.
        killed: Bodies that were killed, and calls that died with their process before that.
    """

    seconds: float
    faults: dict[str, int]
    accepted: int
    refused: int
    overlaps: int
    disorder: list[str]
    lost: list[str]
    repeated: list[str]
    unasked: list[str]
    killed: int

    @property
    def ok(self) -> bool:
        return not (self.overlaps or self.disorder or self.lost or self.repeated or self.unasked)

    def __str__(self) -> str:
        faults = ", ".join(f"{name} {times}" for name, times in self.faults.items())
        return "\n".join(
            [
                f"{self.accepted} calls in {self.seconds:.0f} s, {self.refused} refused",
                f"faults: {faults}; bodies killed: {self.killed}",
                f"at once {self.overlaps}, out of order {self.disorder}, lost {self.lost}, "
                f"repeated {self.repeated}, refused and yet run {self.unasked}",
            ]
        )


@dataclass
class _Stage:
    """The servers, the workers, and the faults that they meet."""

    load: QueueLoad
    broker: PrivateServer | RabbitServer
    store: PrivateServer
    app: Any
    journal: Journal
    start_worker: Callable[[], CeleryWorker]
    workers: list[CeleryWorker]
    chance: random.Random
    faults: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    killed: list[CeleryWorker] = field(default_factory=list)

    def fail(self) -> None:
        """One fault, chosen by chance."""
        kinds = [self.kill_child] * 6 + [self.kill_worker] * 2 + [self.purge] * 2
        kinds += [self.restart_broker, self.restart_store]
        kind = self.chance.choice(kinds)
        self.faults[kind.__name__] += 1
        kind()

    def kill_child(self) -> None:
        children = self.chance.choice(self.workers).children()
        if children:
            pid = self.chance.choice(children)
            self.journal.death(pid, kill_process(pid))

    def kill_worker(self) -> None:
        worker = self.workers.pop(0)
        group = worker.group()
        at = worker.kill_group()
        for pid in group:
            self.journal.death(pid, at)
        self.killed.append(worker)
        self.workers.append(self.start_worker())

    def purge(self) -> None:
        with Connection(self.app.app.conf.broker_url) as connection:
            connection.default_channel.queue_purge("celery")

    def restart_broker(self, *, keep_data: bool = True) -> None:
        if isinstance(self.broker, PrivateServer):
            self.broker.restart(keep_data=keep_data)
        else:
            self.broker.ctl("stop_app")
            if not keep_data:
                self.broker.ctl("reset")
            self.broker.ctl("start_app")

    def restart_store(self) -> None:
        self.store.restart(keep_data=True)


def run(load: QueueLoad, directory: Path) -> QueueReport:
    """Publish all while things fail, wait until the queues are empty, and look.

    Raises:
        AssertionError: The queues are not empty in time.
    """
    with _stage(load, directory) as stage:
        began = time.monotonic()
        calls = _publish_while_all_fails(stage)
        wait_until(lambda: _is_over(stage, calls), "all have ended", timeout=load.timeout)
        seconds = time.monotonic() - began
        time.sleep(1.0)  # results are stored
        successes, died = _successes(stage, calls), _died(stage, calls)
        tails = [worker.log for worker in [*stage.killed, *stage.workers]]
    (directory / "workers.log").write_text("\n".join(tails))
    return _judge(stage, calls, successes, died, seconds)


@contextmanager
def _stage(load: QueueLoad, directory: Path) -> Iterator[_Stage]:
    with ExitStack() as stack:
        store = stack.enter_context(PrivateServer(appendonly=True))
        broker: PrivateServer | RabbitServer
        broker = RabbitServer() if load.rabbit else PrivateServer(appendonly=True)
        stack.enter_context(broker)
        journal = Journal(directory / "journal.jsonl")
        env = {
            "BROKER_URL": broker.url(),
            "RESULT_URL": store.url(2),
            "LOCK_URL": store.url(1),
            VARIABLE: str(journal.path),
            **({"WITHOUT": "queue"} if load.without_queue else {}),
        }
        app = stack.enter_context(fresh_module(APP, env))
        numbers = count()

        def start() -> CeleryWorker:
            name = f"load{next(numbers)}"
            worker = CeleryWorker(APP, name=name, concurrency=load.processes, env=env)
            stack.callback(worker.kill_group)
            return worker.start()

        workers = [start() for _ in range(load.workers)]
        for worker in workers:
            worker.wait_until_ready()
        yield _Stage(load, broker, store, app, journal, start, workers, random.Random(load.seed))


def _publish_while_all_fails(stage: _Stage) -> list[Call]:
    load, calls = stage.load, list[Call]()
    left = [load.calls // load.publishers] * load.publishers
    threads = [
        threading.Thread(target=_publish, args=(stage, number, left[number], calls))
        for number in range(load.publishers)
    ]
    for thread in threads:
        thread.start()
    has_lost_broker = False
    while any(thread.is_alive() for thread in threads):
        time.sleep(stage.chance.uniform(*_PAUSE))
        if not load.faults:
            continue
        if not has_lost_broker and len(calls) > load.calls // 2:
            has_lost_broker = True
            stage.faults["lose_broker"] += 1
            stage.restart_broker(keep_data=False)
        else:
            stage.fail()
    for thread in threads:
        thread.join()
    return calls


def _publish(stage: _Stage, number: int, wanted: int, calls: list[Call]) -> None:
    load = stage.load
    chance = random.Random(f"{load.seed}-{number}")
    accepted = 0
    for index in count():
        if accepted >= wanted and sum(stage.faults.values()) >= load.faults:
            return
        late, key = chance.random() < 0.5, str(chance.randrange(load.keys))
        task = stage.app.late if late else stage.app.early
        task_id, entered = f"call-{number}-{index}", time.monotonic()
        returned, error = None, ""
        try:
            task.apply_async((key,), task_id=task_id)
            returned = time.monotonic()
            accepted += 1
        except Exception as exc:
            error = str(exc)
        calls.append(
            Call(
                task_id=task_id,
                key=key,
                late=late,
                entered=entered,
                returned=returned,
                unknown="unknown" in error,
            )
        )
        time.sleep(chance.uniform(0, load.pause if returned else 10 * load.pause))


def _is_over(stage: _Stage, calls: list[Call]) -> bool:
    if stage.load.without_queue:
        ended = sum(record.event == "end" for record in stage.journal.records())
        return ended >= len(calls)
    store = open_store(stage.store.url(1))
    try:
        assert store.call_queue is not None
        return not store.call_queue.keys(Keyspace().all_shards()[0], timeout=5.0)
    finally:
        store.close()


def _successes(stage: _Stage, calls: list[Call]) -> dict[str, float]:
    """When the success of each call was stored, in CLOCK_MONOTONIC."""
    offset = time.time() - time.monotonic()
    found = {}
    for call in calls:
        result = stage.app.app.AsyncResult(call.task_id)
        if result.state == states.SUCCESS:
            found[call.task_id] = result.date_done.timestamp() - offset
    return found


def _died(stage: _Stage, calls: list[Call]) -> set[str]:
    """The calls whose result is that their worker has died."""
    results = {call.task_id: stage.app.app.AsyncResult(call.task_id) for call in calls}
    return {task_id for task_id, one in results.items() if isinstance(one.result, WorkerLostError)}


def _judge(
    stage: _Stage,
    calls: list[Call],
    successes: dict[str, float],
    died: set[str],
    seconds: float,
) -> QueueReport:
    records = stage.journal.records()
    of_call: dict[str, list[Run]] = defaultdict(list)
    for one in runs(records):
        of_call[one.task_id].append(one)
    killed = {one.task_id for ones in of_call.values() for one in ones if not one.finished}
    # Killed before the body could write that it began.
    early = {call.task_id for call in calls if not call.late and not of_call[call.task_id]}
    killed |= early & died
    lost, repeated = [], []
    for call in calls:
        bodies = of_call[call.task_id]
        is_lost = call.returned is not None and not any(one.finished for one in bodies)
        if is_lost and (call.late or call.task_id not in killed):
            lost.append(call.task_id)
        if not call.late and len(bodies) > 1:
            repeated.append(call.task_id)
        success = successes.get(call.task_id, float("inf"))
        if any(one.begin > success for one in bodies):
            repeated.append(call.task_id)
    if len(killed) > sum(record.event == "death" for record in records):
        lost.extend(killed)  # each process ran one call at a time
    return QueueReport(
        seconds=seconds,
        faults=dict(stage.faults),
        accepted=sum(call.returned is not None for call in calls),
        refused=sum(call.returned is None for call in calls),
        overlaps=len(overlaps(records)),
        disorder=[*_disorder(calls, of_call)],
        lost=lost,
        repeated=repeated,
        unasked=[
            call.task_id
            for call in calls
            if call.returned is None and not call.unknown and of_call[call.task_id]
        ],
        killed=len(killed),
    )


def _disorder(calls: list[Call], of_call: dict[str, list[Run]]) -> Iterator[str]:
    """Calls whose first body began before an earlier call of their key had ended."""
    for key in {call.key for call in calls}:
        begun = [call for call in calls if call.key == key and of_call[call.task_id]]
        for call in begun:
            begin = min(one.begin for one in of_call[call.task_id])
            for other in begun:
                if other.returned is None or other.returned >= call.entered:
                    continue
                end = max(one.end for one in of_call[other.task_id])
                if end > begin:
                    yield f"{call.task_id} began before {other.task_id} had ended"
