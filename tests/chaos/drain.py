"""The end of a campaign: all jobs come to their ends, and nothing is left."""

from __future__ import annotations

import time
from collections.abc import Callable

import redis

from tests.chaos.bodies import bodies
from tests.chaos.broker_log import Message, newest_copies
from tests.chaos.jobs import under_way
from tests.chaos.site import Site, now
from tests.chaos.stacks import dumps
from tests.harness.deliveries import RedisBroker
from tests.harness.processes import TIMEOUT

#: Seconds that a drain may take: redeliveries, requeues up to a third of the visibility timeout.
PATIENCE = 120.0
#: Seconds between two looks.
_PAUSE = 0.5
#: Seconds without the end of a job, before the broker's file is read for those that are left.
_STILL = 5.0


class Drain:
    """Waits until nothing is under way, and writes down what does not end.

    Args:
        site: Whole again.
        look_after_workers: Called every now and then.
        patience: Seconds that it may take.
    """

    def __init__(
        self, site: Site, look_after_workers: Callable[[], None], patience: float = PATIENCE
    ) -> None:
        self._patience = patience
        self._ttl, self._site = site.plan.ttl, site
        self._look_after_workers = look_after_workers
        self._open: set[str] = set()
        self._open_since = 0.0
        #: What the broker's file said of each job when it was read last, and what was written down.
        self._read: dict[str, tuple[str, str]] = {}
        self._traced: dict[str, tuple[str, str]] = {}

    def run(self) -> None:
        """Returns when all is done, or has had its time."""
        deadline = now() + self._patience
        while now() < deadline and not self._all_settled():
            self._look_after_workers()
            time.sleep(_PAUSE)  # the pause between two looks at the history
        self._empty_broker()
        self._free_keys()
        self._ended_bodies()

    def _all_settled(self) -> bool:
        records = self._site.history.records()
        still_open = under_way(records, bodies(records), self._ttl)
        if still_open != self._open:
            self._open, self._open_since = still_open, now()
        elif still_open and now() > self._open_since + _STILL:
            self._trace(still_open)
            self._open_since = now()
        return not still_open

    def _trace(self, jobs: set[str]) -> None:
        """Write down what the broker's file says of these jobs.

        Each twice: a message that was popped a moment ago is about to be noted.
        """
        newest = newest_copies(self._site.broker.directory)
        for job in jobs:
            message = newest.get(job, Message())
            found = (str(message.place), ", ".join(message.steps))
            if self._read.get(job) == found != self._traced.get(job):
                self._traced[job] = found
                place, steps = found
                self._site.history.write("traced", task_id=job, place=place, steps=steps)
            self._read[job] = found

    def _empty_broker(self) -> None:
        url = self._site.broker.url(0)
        with redis.Redis.from_url(url, decode_responses=True) as client:
            broker = RedisBroker(client)
            try:
                broker.wait_until_empty(timeout=self._patience)
            except AssertionError:
                left = dict(broker.messages())
                self._never_ends(f"messages are still in the broker: {left}")

    def _free_keys(self) -> None:
        """Leases of the dead end with their ttl; what is there after it was left."""
        deadline = now() + 2 * self._ttl + min(TIMEOUT, self._patience)
        while (left := self._left()) and now() < deadline:
            time.sleep(_PAUSE)
        for key, what in left.items():
            self._site.history.write("key-left", key=key, text=f"{key}: {what}")

    def _left(self) -> dict[str, str]:
        return self._site.keys_left()

    def _ended_bodies(self) -> None:
        # A delivery of a job that has ended may be in a process yet: its message was acknowledged
        # before, so neither the jobs nor the broker say so.
        deadline = now() + self._patience
        while (inside := self._inside()) and now() < deadline:
            time.sleep(_PAUSE)
        for pid, job in inside:
            self._never_ends(f"process {pid} is still at {job}")

    def _inside(self) -> list[tuple[int, str]]:
        """The living processes that are in a task, each with its job."""
        living = {
            worker.number_of(pid) for worker in self._site.workers() for pid in worker.group()
        }
        inside: dict[tuple[int, str], None] = {}
        for record in self._site.history.records():
            if record.event == "taken":
                inside[record.pid, record.task_id] = None
            elif record.event == "left":
                inside.pop((record.pid, record.task_id), None)
        return [(pid, job) for pid, job in inside if pid in living]

    def _never_ends(self, what: str) -> None:
        directory = self._site.history.directory
        living = [worker for worker in self._site.workers() if worker.alive]
        where = "\n".join(dumps(worker, directory) for worker in living)
        self._site.history.write("never-ends", text=f"{what}; the workers are at:\n{where}")
