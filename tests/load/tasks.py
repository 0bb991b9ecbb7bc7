"""Short tasks over few keys, on real workers whose processes are killed in the midst of bodies.

A share of the tasks (chosen by a seed) kills the process that runs it, once, between start and end
of its body: of 5000 tasks and a share of 10 %, about 500 kills, each one of a body at work. The
worker parents live on. A kill costs a pool process about a second of Celery's time, so the share
says more about the duration of a run than the number of tasks does.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import redis

from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.keyspace import Keyspace
from example_project.private_server import PrivateServer
from tests.harness.app_module import fresh_module
from tests.harness.deliveries import RedisBroker
from tests.harness.journal import VARIABLE, Journal
from tests.harness.keys import EVERY_NAME
from tests.harness.log import events_in
from tests.harness.worker import CeleryWorker
from tests.load.memory import MIB, Sample, sample

APP = "tests.apps.load"
#: Where the bodies that ended are counted, so that the journal need not be read meanwhile.
DONE = "load:done"

_SHARES = (0.2, 0.6)
# Markers, of which the mean is taken.
_WEIGHED = 200
# Seconds: three times the ttl of the tasks.
_EXPIRY = 30.0


@dataclass(frozen=True, kw_only=True)
class TaskLoad:
    """What to run.

    Attributes:
        tasks: How many.
        keys: Over how many keys.
        workers: `celery worker` processes.
        processes: Pool processes of each.
        kills: Share of the tasks whose first run is killed.
        seed: The seed of keys and kills.
        timeout: Seconds without any task ending, after which the run is given up.
        without_lock: Take the lock out; then the run has to fail.
    """

    tasks: int = 5000
    keys: int = 500
    workers: int = 2
    processes: int = 4
    kills: float = 0.1
    seed: int = 1
    timeout: float = 120.0
    without_lock: bool = False


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """What became of it.

    Attributes:
        seconds: From the workers' start until the broker was empty.
        kills: Bodies that were killed.
        lost: Tasks without a run that ended.
        doubled: Tasks with more than one run that ended.
        overlaps: Pairs of bodies of one key that ran at the same time.
        unlocked: Bodies without a fence.
        falls: Bodies whose fence was not above that of the body before, of the same key.
        left: Keys of leases and claims in the store, afterwards.
        marker_bytes: What the store needs for a marker.
        empty: Memory before anything was published.
        requeue: Messages that met another holder, or their own duplicate, and waited.
        samples: Memory over the run.
    """

    tasks: int
    seconds: float
    kills: int
    lost: int
    doubled: int
    overlaps: int
    unlocked: int
    falls: int
    left: list[str]
    requeue: int
    marker_bytes: float
    empty: Sample
    samples: list[Sample] = field(default_factory=list)

    @property
    def grown(self) -> float:
        """MiB by which a worker parent grew between the first and the last sample."""
        return self.samples[-1].parents - self.samples[0].parents

    @property
    def unexplained(self) -> float:
        """MiB by which the store grew, but for its new keys: markers, which expire after an hour.

        From before the first message until after the last: in between, there is the queue.
        """
        first, last = self.empty, self.samples[-1]
        return last.server - first.server - (last.keys - first.keys) * self.marker_bytes / MIB

    @property
    def ok(self) -> bool:
        wrong = (self.lost, self.doubled, self.overlaps, self.unlocked, self.falls)
        return not any(wrong) and not self.left

    def __str__(self) -> str:
        lines = [
            f"{self.tasks} tasks in {self.seconds:.0f} s: {self.tasks / self.seconds:.0f} a second",
            f"killed bodies {self.kills}, requeued {self.requeue}",
            f"lost {self.lost}, run twice {self.doubled}, at once {self.overlaps}, without a lease "
            f"{self.unlocked}, fences that did not rise {self.falls}, keys left {self.left}",
            *map(str, [self.empty, *self.samples]),
            f"worker grew by {self.grown:+.1f} MiB; store by {self.unexplained:+.1f} MiB beside "
            f"its markers, of {self.marker_bytes:.0f} bytes each",
        ]
        return "\n".join(lines)


def run(load: TaskLoad, directory: Path) -> TaskReport:
    """Publish all, start the workers, wait until everything has ended, and look.

    Raises:
        AssertionError: Nothing moves any more.
    """
    with _servers_and_workers(load, directory) as stage:
        client, journal, workers, ids, began, empty = stage
        samples = [
            _wait(client, share, load, workers, ids) for share in _SHARES if load.tasks * share >= 1
        ]
        samples.append(_wait(client, 1.0, load, workers, ids))
        RedisBroker(client).wait_until_empty(timeout=load.timeout)
        seconds = time.monotonic() - began
        logs = [worker.log for worker in workers]
        left = _wait_for_expiry(client)
        bytes_each = _bytes_of_a_marker(client)
    return _judge(load, journal, ids, seconds, logs, left, bytes_each, empty, samples)


@contextmanager
def _servers_and_workers(
    load: TaskLoad, directory: Path
) -> Iterator[tuple[redis.Redis, Journal, list[CeleryWorker], list[str], float, Sample]]:
    with ExitStack() as stack:
        server = stack.enter_context(PrivateServer())
        journal = Journal(directory / "journal.jsonl")
        url = server.url(1)
        env = {"BROKER_URL": url, "RESULT_URL": url, VARIABLE: str(journal.path)}
        client = stack.enter_context(redis.Redis.from_url(url, decode_responses=True))
        app = stack.enter_context(fresh_module(APP, env))
        empty = sample(0.0, [], client)
        ids = _publish(app, load)
        workers = []
        began = time.monotonic()
        for _ in range(load.workers):
            without = {"WITHOUT": "lock"} if load.without_lock else {}
            worker = CeleryWorker(APP, concurrency=load.processes, env={**env, **without})
            stack.callback(worker.kill_group)
            workers.append(worker.start())
        for worker in workers:
            worker.wait_until_ready()
        yield client, journal, workers, ids, began, empty


def _publish(app: object, load: TaskLoad) -> list[str]:
    chance = random.Random(load.seed)
    ids = []
    with app.app.producer_pool.acquire(block=True) as producer:  # type: ignore[attr-defined]
        for _ in range(load.tasks):
            arguments = (chance.randrange(load.keys), chance.random() < load.kills)
            ids.append(app.work.apply_async(arguments, producer=producer).id)  # type: ignore[attr-defined]
    return ids


def _wait(
    client: redis.Redis, share: float, load: TaskLoad, workers: list[CeleryWorker], ids: list[str]
) -> Sample:
    wanted, seen, moved = round(load.tasks * share), -1, time.monotonic()
    while True:
        done = int(client.get(DONE) or 0)
        if done >= wanted:
            return sample(share, [worker.pid for worker in workers], client)
        if done != seen:
            seen, moved = done, time.monotonic()
        late = time.monotonic() - moved > load.timeout
        tails = "\n".join(worker.tail(20) for worker in workers) if late else ""
        assert not late, f"{done} of {load.tasks} tasks ended, and no more since:\n{tails}"
        time.sleep(0.2)


def _wait_for_expiry(client: redis.Redis) -> list[str]:
    """The leases and claims that are still there once every ttl is over."""
    # A dead process's lease is freed by its parent, or, where the death was noticed too early, by
    # its ttl (see request.py).
    deadline = time.monotonic() + _EXPIRY
    while True:
        late = time.monotonic() > deadline
        keys = [key for key in client.scan_iter(EVERY_NAME, 1000) if "}:done|" not in key]
        left = [key for key in keys if not Keyspace.stays(key)]
        if not left or late:
            return left
        time.sleep(0.2)


def _bytes_of_a_marker(client: redis.Redis) -> float:
    markers = list(islice(client.scan_iter(f"{EVERY_NAME}done|*", 1000), _WEIGHED))
    return sum(client.memory_usage(marker) or 0 for marker in markers) / max(1, len(markers))


def _judge(
    load: TaskLoad,
    journal: Journal,
    ids: list[str],
    seconds: float,
    logs: list[str],
    left: list[str],
    marker_bytes: float,
    empty: Sample,
    samples: list[Sample],
) -> TaskReport:
    runs = journal.runs()
    ended = Counter(run.task_id for run in runs if run.finished and run.error is None)
    highest: dict[str, int] = {}
    falls = 0
    for one in runs:  # in the order of their starts
        if one.fence is not None:
            falls += one.fence <= highest.get(one.key, 0)
            highest[one.key] = max(one.fence, highest.get(one.key, 0))
    return TaskReport(
        tasks=load.tasks,
        seconds=seconds,
        kills=sum(record.event == "death" for record in journal.records()),
        lost=len(set(ids) - set(ended)),
        doubled=sum(count > 1 for count in ended.values()),
        overlaps=len(journal.overlaps()),
        unlocked=sum(one.fence is None for one in runs),
        falls=falls,
        left=left,
        requeue=sum(len([*events_in(log.splitlines(), EventName.REQUEUED)]) for log in logs),
        marker_bytes=marker_bytes,
        empty=empty,
        samples=samples,
    )
