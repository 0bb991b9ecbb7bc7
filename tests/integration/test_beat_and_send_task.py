"""Any program may send the message: the worker takes the lock.

Beat with the task class and without, `send_task`, and an app that knows nothing of us.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from celery_singleton_lock import is_skipped
from celery_singleton_lock.core.events import EventName
from tests.harness.journal import Journal, Record
from tests.harness.processes import ROOT
from tests.harness.worker import CeleryBeat, CeleryWorker

POOLS = "tests.apps.pools"
FOREIGN = "tests.apps.foreign"

StartWorker = Callable[..., CeleryWorker]
StartBeat = Callable[..., CeleryBeat]
LoadApp = Callable[..., ModuleType]


def conflicts(records: list[Record]) -> list[Record]:
    return [record for record in records if record.data.get("text") == EventName.CONFLICT]


def test_the_foreign_app_knows_nothing_of_us(environment: dict[str, str]) -> None:
    program = (
        "import sys, tests.apps.foreign\n"
        "assert not [name for name in sys.modules if 'singleton' in name], sys.modules\n"
        "assert not [name for name in tests.apps.foreign.app.tasks if 'pools' in name]\n"
    )
    command = [sys.executable, "-c", program]
    # Not the environment of the test run: a tracer or coverage may import what it likes.
    env = {"PATH": "/usr/bin:/bin", **environment}
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("sender", [POOLS, FOREIGN], ids=["registered", "by name"])
def test_a_tick_is_skipped_while_the_last_one_still_runs(
    sender: str,
    worker: StartWorker,
    beat: StartBeat,
    environment: dict[str, str],
    journal: Journal,
) -> None:
    environment["TICK"] = "0.3"
    workers = [worker(POOLS, concurrency=2, wait=False) for _ in range(2)]
    for process in workers:
        process.wait_until_ready()
    beat(sender)
    journal.wait_for_ends(3, key="tick")
    journal.wait_for(lambda records: len(conflicts(records)) >= 6)
    # More than one process took part, or there would be nothing to exclude.
    journal.wait_for(lambda records: len({record.pid for record in conflicts(records)}) > 1)
    assert journal.overlaps() == []


def test_calls_by_name_from_a_foreign_app_exclude_each_other(
    worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    foreign, pools = load_app(FOREIGN), load_app(POOLS)
    worker(POOLS, concurrency=3)
    results: list[Any] = [
        foreign.app.send_task(f"{POOLS}.brief", ("k",), {"until_open": True}) for _ in range(6)
    ]
    # And the same call by the class, spelled otherwise.
    results.append(pools.brief.delay(until_open=True, key="k"))
    journal.wait_for(lambda records: len(conflicts(records)) == 6)
    journal.wait_for_starts(1, key="k")  # the run has its lease, and may begin after the six
    [run] = journal.runs("k")
    pools.gate("k").touch()
    assert not is_skipped(pools.app.AsyncResult(run.task_id).get(timeout=20))
    skipped = [result for result in results if is_skipped(result.get(timeout=20))]
    assert len(skipped) == 6
    assert {result.get()["holder"]["task_id"] for result in skipped} == {run.task_id}
    assert len(journal.runs("k")) == 1


def test_a_call_by_name_and_one_by_the_class_exclude_each_other(
    worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    foreign, pools = load_app(FOREIGN), load_app(POOLS)
    worker(POOLS, concurrency=3)
    pools.gate("k").touch()
    for number in range(6):
        if number % 2:
            result = pools.brief.delay("k")
        else:
            result = foreign.app.send_task(f"{POOLS}.brief", kwargs={"key": "k"})
        result.get(timeout=20)
        journal.wait_for(
            lambda records, done=number + 1: (
                done  # type: ignore[misc]
                <= len(
                    [record for record in records if record.data.get("text") == EventName.RELEASED]
                )
            )
        )
    fences = [run.fence for run in journal.runs("k")]
    assert len(fences) == 6
    assert fences == sorted(set(fences))  # type: ignore[type-var]
    assert journal.overlaps() == []
