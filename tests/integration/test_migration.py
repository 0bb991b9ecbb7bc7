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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import pytest
import redis
from celery import Celery

from example_project.private_server import tied_to_parent
from tests.harness.deliveries import wait_until
from tests.harness.journal import VARIABLE, Journal
from tests.harness.keys import EVERY_NAME
from tests.harness.processes import ROOT, TIMEOUT
from tests.harness.worker import CeleryWorker

pytestmark = pytest.mark.slow

APP = "tests.apps.migrating"
SIDES = ("old", "bridge", "finish", "done")
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

    def send(self, calls: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
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
    """The keys of leases, claims and wait queues; completion records and fences are no locks."""
    return old_keys(client) + [
        key
        for key in client.scan_iter(EVERY_NAME)
        if "}:done|" not in key and not key.endswith(("}:shard", ":0}:shards"))
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


PAIRS = [("old", "bridge"), ("bridge", "finish"), ("finish", "done")]


class Releases(NamedTuple):
    """A publisher and a worker of each release, for all tests of this module.

    Attributes:
        publishers: By side.
        workers: By side; they consume what `run` names.
        client: A client of their database.
        journal: The journal of their bodies.
        app: Controls the workers.
    """

    publishers: dict[str, Publisher]
    workers: dict[str, CeleryWorker]
    client: redis.Redis
    journal: Journal
    app: Celery

    def run(self, side: str, queue: str, task_ids: Iterable[str]) -> None:
        """Let the worker of ``side`` run the messages ``task_ids`` in ``queue``."""
        worker = self.workers[side].hostname
        replies = self.app.control.add_consumer(
            queue, destination=[worker], reply=True, limit=1, timeout=TIMEOUT
        )
        assert [*replies[0][worker]] == ["ok"]
        self.journal.wait_for(
            lambda records: {*task_ids} <= {r.task_id for r in records if r.event == "note"},
            what="all messages have ended",
        )


@pytest.fixture(scope="module")
def releases(
    redis_server: Any, _databases: Iterator[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Releases]:
    url = redis_server.url(next(_databases))
    journal = Journal(tmp_path_factory.mktemp("releases") / "journal.jsonl")
    environment = {"BROKER_URL": url, "RESULT_URL": url, VARIABLE: str(journal.path)}
    publishers: dict[str, Publisher] = {}
    workers: dict[str, CeleryWorker] = {}
    with ExitStack() as stack:
        client = stack.enter_context(redis.Redis.from_url(url, decode_responses=True))
        client.flushdb()
        stack.callback(client.flushdb)
        for side in SIDES:
            env = {**environment, "SIDE": side}
            worker = CeleryWorker(APP, queues=[f"idle-{side}"], concurrency=1, env=env)
            workers[side] = worker.start()
            stack.callback(worker.kill_group)
            publishers[side] = stack.enter_context(Publisher(side, environment))
        app = Celery(broker=url, set_as_current=False)
        for worker in workers.values():
            worker.wait_until_ready().wait_until_it_answers(app)
        yield Releases(publishers, workers, client, journal, app)


@pytest.mark.parametrize(
    "kind", ["once", "once_until_start", "singleton", "heimdall", "heimdall_period"]
)
@pytest.mark.parametrize(
    ("first", "second", "worker"),
    [(*order, worker) for pair in PAIRS for order in (pair, pair[::-1]) for worker in pair],
    ids=lambda side: side,
)
def test_each_accepted_call_of_two_releases_runs(
    releases: Releases, kind: str, first: str, second: str, worker: str
) -> None:
    queue = f"{kind} {first} {second} {worker}"
    call = (kind, queue, 0.01, queue)
    answers = [releases.publishers[side].send([call])[0]["task_id"] for side in (first, second)]
    accepted = dict.fromkeys(task_id for task_id in answers if task_id)
    # The releases 1 and 2 do not know each other's claims; the lease keeps their bodies apart.
    assert len(accepted) == (2 if {first, second} == {"bridge", "finish"} else 1)
    releases.run(worker, queue, accepted)
    runs = [run for run in releases.journal.runs() if run.key == f"{kind} {queue}"]
    assert [run.task_id for run in runs] == list(accepted)
    assert not releases.journal.overlaps()
    if kind != "heimdall_period":  # its keys outlive their calls
        wait_until(lambda: queue not in str(left_behind(releases.client)), "its keys are free")
