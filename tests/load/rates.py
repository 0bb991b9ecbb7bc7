"""Calls of many keys with a rate, on workers that are killed, over a store that restarts.

All calls are published at once and wait in the store, which keeps its data (an append-only file,
written at each command). A start counts by the store's clock: the fence of its lease.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Set
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import redis

from example_project.private_server import PrivateServer
from tests.harness.app_module import fresh_module
from tests.harness.journal import VARIABLE, Journal, Run
from tests.harness.worker import CeleryWorker

APP = "tests.apps.load_rates"

#: Seconds: a rate and a fence are read one after the other.
_MOMENT = 0.003


@dataclass(frozen=True, kw_only=True)
class RateLoad:
    """What to run.

    Attributes:
        calls, keys: How many calls, of how many keys.
        rate: Starts a second and key.
        workers, processes: The `celery worker` processes, and the pool processes of each.
        kills: How often a worker is killed with its processes, and replaced.
        timeout: Seconds without any start, after which the run is given up.
    """

    calls: int = 1000
    keys: int = 20
    rate: float = 5.0
    workers: int = 3
    processes: int = 2
    kills: int = 2
    timeout: float = 120.0


@dataclass(frozen=True, kw_only=True)
class RateReport:
    """What became of it.

    Attributes:
        seconds: From the start of the workers to the last start of a call.
        early: Starts that came too soon after the one before, by the store's clock.
        overtaken: Starts before an older call of the key had started.
        lost: Calls without a run that ended.
        doubled: Calls with more than one run that ended, although the store knew of the first.
    """

    calls: int
    seconds: float
    kills: int
    early: int
    overtaken: int
    lost: int
    doubled: int

    @property
    def ok(self) -> bool:
        return not (self.early or self.overtaken or self.lost or self.doubled)

    def __str__(self) -> str:
        return (
            f"{self.calls} calls in {self.seconds:.0f} s, workers killed {self.kills}, the store "
            f"restarted once: too early {self.early}, before an older call {self.overtaken}, lost "
            f"{self.lost}, run twice {self.doubled}"
        )


def run(load: RateLoad, directory: Path) -> RateReport:
    """Publish all, start the workers, kill some, restart the store, and look."""
    with ExitStack() as stack:
        store = stack.enter_context(PrivateServer(appendonly=True))
        broker = stack.enter_context(PrivateServer())
        journal = Journal(directory / "journal.jsonl")
        env = {
            "BROKER_URL": broker.url(),
            "LOCK_URL": store.url(),
            "RATE": str(load.rate),
            VARIABLE: str(journal.path),
        }
        app = stack.enter_context(fresh_module(APP, env))
        with app.app.producer_pool.acquire(block=True) as producer:
            for number in range(load.calls):
                arguments = (f"key-{number % load.keys}", number)
                app.work.apply_async(arguments, producer=producer)

        def start() -> CeleryWorker:
            worker = CeleryWorker(APP, concurrency=load.processes, env=env)
            stack.callback(worker.kill_group)
            return worker.start()

        unrecorded: set[str] = set()  # runs that the store doesn't know to have ended
        workers = [start() for _ in range(load.workers)]
        for worker in workers:
            worker.wait_until_ready()
        began = time.monotonic()
        steps = load.kills + 1  # the store restarts in the middle
        for step in range(steps):
            _wait(journal, load, round(load.calls * (step + 1) / (steps + 1)))
            if step == steps // 2:
                store.restart(keep_data=True)
            else:
                killed = workers.pop(0)
                pids = killed.group()
                killed.kill_group()
                unrecorded |= _unrecorded(journal, pids, store.url())
                workers.append(start().wait_until_ready())
        _wait(journal, load, load.calls)
        runs = journal.runs()
    return _judge(load, runs, unrecorded, max(one.begin for one in runs) - began)


def _wait(journal: Journal, load: RateLoad, wanted: int) -> None:
    last, moved = -1, time.monotonic()
    while True:
        ended = {one.data["number"] for one in journal.runs() if one.finished}
        if len(ended) >= wanted:
            return
        if len(ended) > last:
            last, moved = len(ended), time.monotonic()
        late = time.monotonic() - moved > load.timeout
        assert not late, f"{last} of {load.calls} calls ended, and no more"
        time.sleep(0.5)


def _unrecorded(journal: Journal, pids: list[int], url: str) -> set[str]:
    """The ids of tasks that ended in these processes, and have no completion record."""
    with closing(redis.Redis.from_url(url, decode_responses=True)) as client:
        records = [key.partition(":done|")[2] for key in client.scan_iter("*:done|*")]
    ended = {one.task_id for one in journal.runs() if one.finished and one.pid in pids}
    return {task_id for task_id in ended if not any(task_id in record for record in records)}


def _judge(load: RateLoad, runs: list[Run], unrecorded: Set[str], seconds: float) -> RateReport:
    starts: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for one in runs:
        starts[one.key].append((one.fence or 0, one.data["number"]))
    early = overtaken = 0
    for of_key in starts.values():
        of_key.sort()
        early += sum(
            (two[0] - one[0]) / 1e6 < 1 / load.rate - _MOMENT for one, two in pairwise(of_key)
        )
        overtaken += sum(two[1] < one[1] for one, two in pairwise(of_key))
    ended = [one for one in runs if one.finished and one.error is None]
    # A job whose worker was killed before it had recorded the end of the run runs again.
    ends = Counter(one.data["number"] for one in ended if one.task_id not in unrecorded)
    return RateReport(
        calls=load.calls,
        seconds=seconds,
        kills=load.kills,
        early=early,
        overtaken=overtaken,
        lost=load.calls - len({one.data["number"] for one in ended}),
        doubled=sum(count > 1 for count in ends.values()),
    )
