"""What a lease costs, counted by the lock server itself: it has nothing else to do."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import redis

from celery_singleton_lock import is_skipped
from celery_singleton_lock.core.events import EventName
from example_project.private_server import PrivateServer
from tests.harness.journal import Journal, Record
from tests.harness.keys import EVERY_NAME
from tests.harness.processes import ROOT, Process
from tests.harness.worker import CeleryWorker

POOLS = "tests.apps.pools"

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]


class Counted:
    """A lock server that counts.

    Its own connection is not counted: CONFIG RESETSTAT and INFO are left out, and nothing else of
    it is sent.
    """

    def __init__(self, server: PrivateServer) -> None:
        self.url = server.url()
        self.client = redis.Redis.from_url(self.url, decode_responses=True)
        self.client.ping()

    def reset(self) -> None:
        self.client.config_resetstat()

    def calls(self) -> Counter[str]:
        """Commands as clients sent them; what a script calls is not a round trip."""
        stats: Any = self.client.info("commandstats")
        by_scripts = ("get", "set", "del", "pttl", "pexpire", "time", "hmget", "hset")
        return Counter(
            {
                name.removeprefix("cmdstat_"): values["calls"]
                for name, values in stats.items()
                if not name.startswith(("cmdstat_config", "cmdstat_info"))
                and name.removeprefix("cmdstat_") not in by_scripts
            }
        )


@pytest.fixture
def counted(environment: dict[str, str]) -> Iterator[Counted]:
    with PrivateServer() as server:
        environment["LOCK_URL"] = server.url()
        yield Counted(server)


def released(records: list[Record]) -> int:
    return len([record for record in records if record.data.get("text") == EventName.RELEASED])


def warm(worker: StartWorker, pools: ModuleType, journal: Journal, counted: Counted) -> None:
    """A worker of one process whose connection stands and whose scripts are loaded."""
    worker(POOLS, concurrency=1)
    pools.gate("k").touch()
    pools.brief.delay("k").get(timeout=20)
    journal.wait_for(lambda records: released(records) == 1)
    counted.reset()


@pytest.mark.slow
@pytest.mark.parametrize("acks_late", [False, True])
def test_an_uncontended_task_costs_two_round_trips(
    acks_late: bool,
    environment: dict[str, str],
    worker: StartWorker,
    load_app: LoadApp,
    journal: Journal,
    counted: Counted,
) -> None:
    if acks_late:
        environment["SETTINGS"] = '{"task_acks_late": true}'
    pools = load_app(POOLS)
    warm(worker, pools, journal, counted)
    for result in [pools.brief.delay("k") for _ in range(20)]:
        assert not is_skipped(result.get(timeout=20))
    journal.wait_for(lambda records: released(records) == 21)
    assert counted.calls() == {"evalsha": 40}


@pytest.mark.slow
def test_a_skip_costs_one_round_trip(
    worker: StartWorker, load_app: LoadApp, journal: Journal, counted: Counted
) -> None:
    pools = load_app(POOLS)
    warm(worker, pools, journal, counted)
    other = worker(POOLS, concurrency=1, queues=["other"])
    pools.brief.apply_async(("held", True), queue="other")
    journal.wait_for_starts(1, key="held")
    counted.reset()
    results = [pools.brief.delay("held") for _ in range(20)]
    assert all(is_skipped(result.get(timeout=20)) for result in results)
    assert counted.calls() == {"evalsha": 20}
    pools.gate("held").touch()
    journal.wait_for_ends(1, key="held")
    assert other.alive


@pytest.mark.slow
def test_a_worker_without_work_sends_nothing(
    worker: StartWorker, load_app: LoadApp, journal: Journal, counted: Counted
) -> None:
    pools = load_app(POOLS)
    warm(worker, pools, journal, counted)
    # Whatever a renewal that goes on after the release would send, it would within this second.
    deadline = time.monotonic() + 1
    pools.app.control.ping(timeout=deadline - time.monotonic())
    assert counted.calls() == {}


# Renewal.


@dataclass(frozen=True, slots=True)
class Renewal:
    """One EVALSHA as MONITOR shows it."""

    at: float  # seconds, the server's clock
    keys: int


def renewals(client: redis.Redis, count: int) -> Iterator[Renewal]:
    with client.monitor() as monitor:
        while count:
            event = monitor.next_command()
            words = event["command"].split()
            if words[0].upper() == "EVALSHA":
                yield Renewal(event["time"], int(words[2]))
                count -= 1


TTL = 3.0
LEASES = 1000
SIZES = [64] * 15 + [40]
HOLDER = f"""
import signal, sys, threading
from contextlib import ExitStack
from pathlib import Path
from celery import Celery
from celery_singleton_lock import hold

app = Celery("holder", broker="memory://")
app.conf.singleton_lock_url = sys.argv[1]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with ExitStack() as leases:
    held = [
        leases.enter_context(hold(f"key {{number}}", scope="many", ttl={TTL}, app=app))
        for number in range({LEASES})
    ]
    threads = [thread.name for thread in threading.enumerate()]
    print("held by", len(list(Path("/proc/self/task").iterdir())), threads, flush=True)
    signal.sigwait([signal.SIGTERM])
    print("lost", sum(lease.lost for lease in held), flush=True)
"""


@pytest.mark.slow
def test_a_thousand_leases_cost_one_thread_and_a_pipeline_every_third_of_the_ttl(
    counted: Counted,
) -> None:
    process = Process(
        [sys.executable, "-c", HOLDER, counted.url], env={"PYTHONPATH": str(ROOT)}
    ).start()
    held = process.wait_for_log("held by .*").group()
    assert held == "held by 2 ['MainThread', 'singleton-heartbeat']"
    # The first one may have begun before MONITOR did.
    _, *pipelines = pipelines_of(renewals(counted.client, 6 * len(SIZES)), 5)
    for pipeline in pipelines:
        assert [renewal.keys for renewal in pipeline] == SIZES
    begins = [pipeline[0].at for pipeline in pipelines]
    pauses = [later - earlier for earlier, later in pairwise(begins)]
    # A single pause may look shorter on the server's clock, if the pipeline before it was late.
    assert sum(pauses) / len(pauses) > 0.98 * TTL / 3
    assert min(pauses) > 0.5 * TTL / 3
    process.terminate()
    assert process.wait_for_log("lost .*").group() == "lost 0"
    assert process.wait() == 0
    assert counted.client.keys(f"{EVERY_NAME}:many:*") == []


def pipelines_of(stream: Iterator[Renewal], count: int) -> list[list[Renewal]]:
    """The stream cut where nothing came for a while."""
    pipelines: list[list[Renewal]] = []
    for renewal in stream:
        if not pipelines or renewal.at - pipelines[-1][-1].at > 0.3 * TTL / 3:
            if len(pipelines) == count:
                break
            pipelines.append([])
        pipelines[-1].append(renewal)
    return pipelines
