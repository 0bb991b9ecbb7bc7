"""Rolling migrations: the real old packages on one side, this library on the other.

MIGRATION_CALLS is the number of calls of each kind in each switch; 500 is the acceptance's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Self

import pytest
import redis

from example_project.private_server import tied_to_parent
from tests.harness.deliveries import wait_until
from tests.harness.journal import Journal
from tests.harness.processes import ROOT
from tests.harness.worker import CeleryWorker

pytestmark = pytest.mark.slow

APP = "tests.apps.migrating"
KINDS = ("once", "singleton", "heimdall", "recipe")
CALLS = int(os.environ.get("MIGRATION_CALLS", "60"))
NAMES = 3
#: How long bodies take. Each call of the recipe is published.
SECONDS = {"recipe": 0.02}
OLD_KEYS = ("qo_*", "SINGLETONLOCK_*", "h-lock:*", ":1:*-lock-*")


class Publisher:
    """A process that publishes for one side."""

    def __init__(self, side: str, environment: dict[str, str]) -> None:
        self._popen = subprocess.Popen(
            tied_to_parent([sys.executable, "-m", APP]),
            cwd=ROOT,
            env={**os.environ, **environment, "SIDE": side, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == side

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.kill()
        self._popen.communicate()

    def send(self, calls: list[tuple[str, str, float]]) -> list[dict[str, Any]]:
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{json.dumps(calls)}\n")
        self._popen.stdin.flush()
        answers: list[dict[str, Any]] = self._answer()
        return answers

    def _answer(self) -> Any:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        assert line, "the publisher has ended; its traceback is on standard error"
        return json.loads(line)


class Switch:
    """One rolling deploy, with calls in each of its steps."""

    def __init__(
        self,
        start: Callable[..., CeleryWorker],
        environment: dict[str, str],
        client: redis.Redis,
    ) -> None:
        self._start, self._environment, self._client = start, environment, client
        self.stack = ExitStack()
        self.answers: list[dict[str, Any]] = []
        self._count = 0

    def worker(self, side: str) -> CeleryWorker:
        return self._start(APP, env={"SIDE": side}, concurrency=3)

    def stop(self, worker: CeleryWorker) -> None:
        """A warm shutdown of an idle worker: under load, Celery may deliver messages again."""
        self.wait_until_idle()
        worker.terminate()
        assert worker.wait() == 0

    def wait_until_idle(self) -> None:
        wait_until(lambda: not self._client.exists("celery", "unacked"), "all is done", timeout=60)

    def publisher(self, side: str) -> Publisher:
        return self.stack.enter_context(Publisher(side, self._environment))

    def send(self, *publishers: Publisher, share: float) -> None:
        """Publish this share of the calls, by all ``publishers`` at the same time."""
        count = round(CALLS * share / len(publishers))
        threads = [threading.Thread(target=self._send, args=(p, count)) for p in publishers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._count += count * len(publishers) * len(KINDS)
        assert len(self.answers) == self._count, "a publisher has ended"

    def _send(self, publisher: Publisher, count: int) -> None:
        for number in range(count):
            name = f"n{number % NAMES}"
            calls = [(kind, name, SECONDS.get(kind, 0.1)) for kind in KINDS]
            self.answers += publisher.send(calls)


@pytest.fixture
def switch(
    worker: Callable[..., CeleryWorker], environment: dict[str, str], redis_client: redis.Redis
) -> Iterator[Switch]:
    found = Switch(worker, environment, redis_client)
    with found.stack:
        yield found


Fleet = tuple[CeleryWorker, Publisher]


def roll(switch: Switch, old: Fleet, side: str, *, workers_first: bool) -> Fleet:
    """Replace the worker and the publisher of ``old``, one after the other."""
    old_worker, old_publisher = old
    switch.send(old_publisher, share=0.1)
    if workers_first:
        new_worker = switch.worker(side)
        switch.send(old_publisher, share=0.1)
        new_publisher = switch.publisher(side)
        switch.send(old_publisher, new_publisher, share=0.4)
        switch.stop(old_worker)
        switch.send(old_publisher, new_publisher, share=0.1)
    else:
        new_publisher = switch.publisher(side)
        switch.send(old_publisher, new_publisher, share=0.1)
        switch.send(new_publisher, share=0.1)
        new_worker = switch.worker(side)
        switch.send(old_publisher, new_publisher, share=0.4)
        switch.stop(old_worker)
    switch.send(new_publisher, share=0.3)
    return new_worker, new_publisher


def problems(journal: Journal, answers: list[dict[str, Any]]) -> list[str]:
    """Overlaps, and calls that are lost."""
    ends = {note.task_id: note.at for note in journal.records() if note.event == "note"}
    last_of_key: dict[str, float] = {}
    for run in journal.runs():
        end = max(ends.get(run.task_id, 0), run.end if run.finished else 0)
        last_of_key[run.key] = max(last_of_key.get(run.key, 0), end)
    found = [f"overlap of {one} and {two}" for one, two in journal.overlaps()]
    for answer in answers:
        known, began = answer["task_id"], answer["began"]
        if known is not None and ends.get(known, 0) < began:
            found.append(f"its message did not run: {answer}")
        if last_of_key.get(answer["key"], 0) < began:
            found.append(f"no body ended after it: {answer}")
    return found


def old_keys(client: redis.Redis) -> list[str]:
    return [key for pattern in OLD_KEYS for key in client.scan_iter(pattern)]


def left_behind(client: redis.Redis) -> list[str]:
    """The keys of leases, claims and wait queues; markers and fences are no locks."""
    return old_keys(client) + [
        key
        for key in client.scan_iter("csl:*")
        if "}:done|" not in key and not key.endswith(("}:fence", ":0}:shards"))
    ]


def assert_all_went_well(switch: Switch, journal: Journal, client: redis.Redis) -> None:
    switch.wait_until_idle()
    wait_until(lambda: not left_behind(client), "all keys are free", timeout=20)
    found = problems(journal, switch.answers)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("workers_first", [True, False], ids=["workers first", "publishers first"])
def test_each_step_of_the_migration(
    switch: Switch, journal: Journal, redis_client: redis.Redis, workers_first: bool
) -> None:
    fleet = switch.worker("old"), switch.publisher("old")
    for side in ("bridge", "finish", "done"):
        before = len(switch.answers)
        fleet = roll(switch, fleet, side, workers_first=workers_first)
        assert_all_went_well(switch, journal, redis_client)
        sides = Counter((run.data["side"], run.key.split()[0]) for run in journal.runs())
        print(f"{len(switch.answers) - before} calls, bodies up to here: {dict(sides)}")
        assert all(sides[side, kind] for kind in KINDS)


def test_without_a_bridge_the_old_publishers_keys_stay(
    switch: Switch, redis_client: redis.Redis
) -> None:
    switch.worker("done")
    publisher = switch.publisher("old")
    publisher.send([(kind, "n", 0.0) for kind in KINDS])
    switch.wait_until_idle()
    assert len(old_keys(redis_client)) == 3
