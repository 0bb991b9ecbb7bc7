"""Many calls of one key under on_conflict="cancel_running": the last one runs."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pytest

from tests.harness.journal import Run
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, wait_until

APP = "tests.apps.latest"
WORKERS = 3
CALLS = 200
SECONDS = 20.0
# A body takes longer than any pause between two calls, so that only the last one can finish.
BODY = 3.0
# With kills, a pause includes the start of a worker.
LONG_BODY = 12.0


@dataclass
class Storm:
    """Workers of one queue, the calls for one key, and what became of them."""

    stage: Stage
    name: str = field(default_factory=lambda: uuid4().hex[:12])
    results: list[Any] = field(default_factory=list)
    workers: list[CeleryWorker] = field(default_factory=list)
    all_workers: list[CeleryWorker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workers += [self.start() for _ in range(WORKERS)]

    def start(self) -> CeleryWorker:
        worker = self.stage.worker(concurrency=2, queues=[self.name])
        self.all_workers.append(worker)
        return worker

    def kill(self, victim: int) -> None:
        """A power cut, and a worker that takes the place of the lost one."""
        worker = self.workers[victim]
        pids = worker.group()
        at = worker.kill_group()
        for pid in pids:
            self.stage.journal.death(pid, at)
        self.workers[victim] = self.start()

    def call(self, how: str = "wait", seconds: float = BODY) -> None:
        number = len(self.results)
        options = {"queue": self.name}
        call = self.stage.app.build.apply_async((self.name, number, how, seconds), **options)
        self.results.append(call)

    def blow(self, how: str, seconds: float, kills: int = 0) -> None:
        """All calls at random times, and SIGKILLs in between."""
        times = sorted(random.uniform(0, SECONDS) for _ in range(CALLS))
        deaths = sorted(random.uniform(1, SECONDS) for _ in range(kills))
        began = time.monotonic()
        for at in times:
            while deaths and deaths[0] <= at:
                deaths.pop(0)
                self.kill(random.randrange(WORKERS))
            time.sleep(max(0.0, began + at - time.monotonic()))
            self.call(how, seconds)

    def settle(self, timeout: float = 90.0) -> None:
        """Wait until no message is left, and each call that a worker has received has ended."""
        wait_until(self.is_over, "all calls have ended", timeout)

    def is_over(self) -> bool:
        client = self.stage.redis
        waiting = client.llen(self.name) or client.hlen("unacked")
        return not waiting and all(result.ready() for result in self.results if self.came(result))

    def came(self, result: Any) -> bool:
        """Whether a worker has received the call.

        kombu's Redis transport pops a message in one step and notes it in another. A message that a
        killed worker had just popped never starts.
        """
        return any(f"[{result.id}] received" in worker.log for worker in self.all_workers)

    def runs(self) -> list[Run]:
        return self.stage.journal.runs(self.name)

    def overlaps(self) -> list[Any]:
        return [pair for pair in self.stage.journal.overlaps() if pair[0].key == self.name]

    def states(self) -> Counter[str]:
        return Counter(result.state for result in self.results)

    def assert_the_last_one_won(self, kills: int) -> None:
        assert self.overlaps() == []
        last, runs = self.results[-1], self.runs()
        vanished = sum(not self.came(result) for result in self.results)
        assert vanished <= kills
        assert +self.states() == +Counter(REVOKED=CALLS - 1 - vanished, SUCCESS=1, PENDING=vanished)
        assert last.result == CALLS - 1
        final = max(runs, key=lambda run: run.begin)
        assert (final.task_id, final.data["number"], final.error) == (last.id, CALLS - 1, None)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "seconds", "kills"),
    [("wait", BODY, 0), ("wait", LONG_BODY, 5), ("swallow", 1.0, 0)],
    ids=["interrupted", "killed", "swallows"],
)
def test_the_last_of_many_calls_is_the_only_one_that_succeeds(
    stage: Stage, how: str, seconds: float, kills: int
) -> None:
    storm = Storm(stage)
    storm.blow(how, seconds, kills)
    storm.settle()
    print(storm.states(), len(storm.runs()), "runs")
    storm.assert_the_last_one_won(kills)
    for worker in storm.workers:
        worker.kill_group()
