"""Bodies of `tests.apps.crash`: begun, delivered again, killed with their worker, done once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.harness.deliveries import received, wait_until
from tests.harness.journal import Journal, Record, events
from tests.harness.worker import CeleryWorker


def ids(results: Iterable[Any]) -> set[str]:
    """The ids of the tasks whose results these are."""
    return {result.id for result in results}


def wait_for_starts(journal: Journal, results: Iterable[Any], count: int) -> None:
    """Wait until each of the tasks has begun ``count`` bodies."""
    wanted = ids(results)

    def all_begun(records: list[Record]) -> bool:
        begun = [record.task_id for record in events(records, "start")]
        return all(begun.count(task_id) >= count for task_id in wanted)

    journal.wait_for(all_begun, what=f"each of {wanted} has begun {count} bodies")


def wait_until_received(
    workers: Iterable[CeleryWorker], results: Iterable[Any], count: int
) -> None:
    """Wait until each of the tasks was delivered ``count`` times."""
    workers, wanted = list(workers), ids(results)
    wait_until(
        lambda: all(received(workers)[task_id] >= count for task_id in wanted),
        f"all were delivered {count} times",
        timeout=60,
    )


def power_cut(worker: CeleryWorker, journal: Journal) -> float:
    """SIGKILL the worker and its pool, and write down which processes died; when that was."""
    pids = worker.group()
    at = worker.kill_group()
    for pid in pids:
        journal.death(pid, at)
    return at


def assert_one_run_each(journal: Journal, results: list[Any], marks: list[str]) -> None:
    """Each task ran once and to its end; its result was ``marks`` and still is."""
    assert [run.finished for run in journal.runs()] == [True] * len(results)
    assert {run.data["mark"] for run in journal.runs()} == set(marks)
    assert [result.app.AsyncResult(result.id).result for result in results] == marks
    assert journal.overlaps() == []
