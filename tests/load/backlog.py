"""Many calls that wait in the queues of keys: what they cost the store, workers, and each other.

The worker's processes are occupied while the calls are made. So one message of each key is in the
broker, and the other calls wait in the store. Or the scope of the calls is paused: then all of them
wait in the store, until it is resumed.
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil
import redis

from celery_singleton_lock import inspection, pause, resume
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.testing.contract import new_token
from example_project.private_server import PrivateServer
from tests.apps.gate import Gate
from tests.harness.app_module import fresh_module
from tests.harness.calls import Calls
from tests.harness.deliveries import wait_until
from tests.harness.journal import VARIABLE, Journal
from tests.harness.worker import CeleryWorker
from tests.load.memory import MIB

APP = "tests.apps.load_backlog"

# So that a message has 1.1 KB in a Redis broker.
_TEXT: Final = "x" * 30
_PROCESSES: Final = 2
_ROUNDS: Final = 300
_FEW: Final = 10
_SECONDS_OF_LS: Final = 2.0
_LEAST_LISTS: Final = 5


@dataclass(frozen=True, kw_only=True)
class BacklogReport:
    """What was measured.

    Attributes:
        calls, keys: How many calls waited, of how many keys.
        bytes_per_call: What the store needed for each.
        bytes_in_broker: What the message of one has in the broker.
        grown: MiB by which the worker's parent grew while they were made.
        prefetch: The worker's prefetch count before and after.
        in_broker: The calls that have messages in the broker, of all these calls.
        copies: The most messages that one of them has there.
        join, end, ls: The time of a join, of an acquire with its end, and of a list of all keys,
            with this backlog: as a multiple of the time with ten calls of each key.
        resumed: Seconds for which `resume` took.
        ping: The longest time for which a PING of the store took from then on, in seconds.
        per_second: The most calls that began within a second.
        drained: Seconds until all had run.
        disorder: Keys whose calls ran out of order, or not all of them once.
    """

    calls: int
    keys: int
    bytes_per_call: float
    bytes_in_broker: int
    grown: float
    prefetch: tuple[int, int]
    in_broker: int
    copies: int
    join: float
    end: float
    ls: float
    resumed: float
    ping: float
    per_second: int
    drained: float
    disorder: list[str]

    @property
    def ok(self) -> bool:
        return not self.disorder and self.prefetch[0] == self.prefetch[1]

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.calls} calls of {self.keys} keys: {self.bytes_per_call:.0f} bytes each, "
                f"of messages of {self.bytes_in_broker}",
                f"worker {self.grown:+.1f} MiB, prefetch count {self.prefetch}, calls in the "
                f"broker {self.in_broker}, copies of one {self.copies}",
                f"as a multiple of ten calls of a key: join {self.join:.2f}, end {self.end:.2f}, "
                f"ls {self.ls:.2f}",
                f"resumed in {self.resumed:.2f} s, then the longest PING took "
                f"{1000 * self.ping:.0f} ms, and at most {self.per_second} calls began in a second",
                f"drained in {self.drained:.0f} s, out of order {self.disorder}",
            ]
        )


def run(
    calls: int, keys: int, directory: Path, *, paused: bool = False, timeout: float = 3600.0
) -> BacklogReport:
    """Make the calls, measure, and let them run; ``paused``: their scope is meanwhile."""
    occupied = 0 if paused else _PROCESSES
    with ExitStack() as stack:
        store, broker = (stack.enter_context(PrivateServer()) for _ in range(2))
        journal = Journal(directory / "journal.jsonl")
        env = {
            "BROKER_URL": broker.url(),
            "LOCK_URL": store.url(),
            VARIABLE: str(journal.path),
        }
        app = stack.enter_context(fresh_module(APP, env))
        client: Any = stack.enter_context(redis.Redis.from_url(broker.url()))
        in_store: Any = stack.enter_context(redis.Redis.from_url(store.url()))
        worker = CeleryWorker(APP, concurrency=_PROCESSES, env=env)
        stack.callback(worker.kill_group)
        worker.start().wait_until_ready()
        for number in range(occupied):
            app.work.delay(f"gate-{number}", 0, gate="gate")
        wait_until(lambda: len(journal.records()) == occupied, "the processes are occupied")
        if paused:
            pause(scope=app.work.name, app=app.app)

        publish = _publisher(app, keys)
        publish(0, min(_FEW * keys, calls))
        ls_few = _time_of_ls(app)
        prefetch, parent = _prefetch_count(app), psutil.Process(worker.pid)
        memory, used = parent.memory_info().rss, in_store.info("memory")["used_memory"]
        made = publish(min(_FEW * keys, calls), calls)
        bytes_per_call = (in_store.info("memory")["used_memory"] - used) / max(made, 1)
        grown = (parent.memory_info().rss - memory) / MIB
        messages = client.lrange("celery", 0, -1)
        copies = Counter(json.loads(text)["headers"]["id"] for text in messages)
        ls = _time_of_ls(app) / ls_few
        prefetch_after = _prefetch_count(app)
        join, end = _times_beside(store, _depth_of(app))
        began = time.monotonic()
        Gate(client, "gate").open()
        with _longest_ping(in_store) as pings:
            if paused:
                resume(scope=app.work.name, app=app.app)
            resumed = time.monotonic() - began
            wait_until(
                lambda: len(journal.records()) >= calls + occupied, "all have run", timeout=timeout
            )
        drained = time.monotonic() - began
    records = journal.records()
    starts = sorted(record.at for record in records)
    numbers: dict[str, list[int]] = defaultdict(list)
    for record in records:
        numbers[record.key].append(record.data["number"])
    return BacklogReport(
        calls=calls,
        keys=keys,
        bytes_per_call=bytes_per_call,
        bytes_in_broker=len(messages[0]) if messages else 0,
        grown=grown,
        prefetch=(prefetch, prefetch_after),
        in_broker=len(copies),
        copies=max(copies.values(), default=0),
        join=join,
        end=end,
        ls=ls,
        resumed=resumed,
        ping=max(pings, default=0.0),
        per_second=max(bisect_left(starts, at + 1) - n for n, at in enumerate(starts)),
        drained=drained,
        disorder=[key for key, found in numbers.items() if found != sorted(set(found))],
    )


def _publisher(app: Any, keys: int) -> Callable[[int, int], int]:
    def publish(first: int, last: int) -> int:
        with app.app.producer_pool.acquire(block=True) as producer:
            for number in range(first, last):
                arguments = (f"a-{number % keys}", number, _TEXT)
                app.work.apply_async(arguments, producer=producer)
        return last - first

    return publish


@contextmanager
def _longest_ping(client: Any) -> Iterator[list[float]]:
    """The times that PINGs of a store take, one every 20 ms."""
    times: list[float] = []
    ends = threading.Event()

    def ping() -> None:
        while not ends.wait(0.02):
            began = time.perf_counter()
            client.ping()
            times.append(time.perf_counter() - began)

    thread = threading.Thread(target=ping)
    thread.start()
    try:
        yield times
    finally:
        ends.set()
        thread.join()


def _prefetch_count(app: Any) -> int:
    (stats,) = app.app.control.inspect(timeout=5.0).stats().values()
    return int(stats["prefetch_count"])


def _depth_of(app: Any) -> int:
    return max(held.calls or 0 for held in inspection.held_keys(app.app, counts_calls=True))


def _time_of_ls(app: Any) -> float:
    times: list[float] = []
    until = time.perf_counter() + _SECONDS_OF_LS  # a list of one key takes a few milliseconds
    while len(times) < _LEAST_LISTS or time.perf_counter() < until:
        began = time.perf_counter()
        list(inspection.held_keys(app.app, counts_calls=True))
        times.append(time.perf_counter() - began)
    return median(times)


def _times_beside(server: PrivateServer, depth: int) -> tuple[float, float]:
    """A join and an end in a queue of ``depth`` calls, as multiples of those in one of ten."""
    with closing(open_store(server.url())) as store:
        queues = {number: Calls(store) for number in (_FEW, depth)}
        waiting = {number: calls.joined(number) for number, calls in queues.items()}
        joins: dict[int, list[float]] = defaultdict(list)
        ends: dict[int, list[float]] = defaultdict(list)
        for _ in range(_ROUNDS):
            for number, calls in queues.items():
                token = new_token()
                began = time.perf_counter()
                calls.join(token)
                joins[number].append(time.perf_counter() - began)
                waiting[number].append(token)
                first = waiting[number].pop(0)
                began = time.perf_counter()
                calls.begin(first)
                calls.end(first)
                ends[number].append(time.perf_counter() - began)
        for number, calls in queues.items():
            for token in waiting[number]:
                calls.begin(token)
                calls.end(token)
    join, end = (median(times[depth]) / median(times[_FEW]) for times in (joins, ends))
    return join, end
