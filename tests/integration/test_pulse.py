"""A body that keeps the GIL longer than its ttl keeps its lease: its worker parent renews it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from celery_singleton_lock import is_skipped
from tests.harness.journal import Journal
from tests.harness.worker import CeleryWorker

GIL = "tests.apps.gil"

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]


@pytest.fixture
def gil(load_app: LoadApp) -> ModuleType:
    return load_app(GIL)


def send_duplicates(journal: Journal, task: Any, keys: list[str], every: float) -> list[Any]:
    """Call ``task`` for each key again and again until the first body of each has ended."""
    results = []
    while not all(journal.runs(key)[0].finished for key in keys):
        results += [task.delay(key, 0.0) for key in keys]
        time.sleep(every)  # the pace of the calls; nothing waits for it
    return results


@pytest.mark.slow
def test_ten_bodies_that_keep_the_gil_for_9_seconds_of_a_ttl_of_2_keep_their_leases(
    worker: StartWorker, gil: ModuleType, journal: Journal
) -> None:
    worker(GIL, concurrency=10, queues=["first"])
    worker(GIL, concurrency=2)
    keys = [f"k{number}" for number in range(10)]
    firsts = [gil.early.apply_async((key, 9.0), queue="first") for key in keys]
    journal.wait_for_starts(10)
    duplicates = send_duplicates(journal, gil.early, keys, every=0.5)
    results = [first.get(timeout=60) for first in firsts]
    assert [first.state for first in firsts] == ["SUCCESS"] * 10
    assert [result["lost"] for result in results] == [False] * 10
    for duplicate in duplicates:
        duplicate.get(timeout=60)
    assert journal.overlaps() == []
    for first, key in zip(firsts, keys, strict=True):
        [run, *later] = journal.runs(key)
        assert run.task_id == first.id
        assert run.end - run.begin >= 9
        assert all(other.begin > run.end for other in later)
    skipped = [is_skipped(duplicate.result) for duplicate in duplicates]
    assert sum(skipped) >= 10 * 10, "the duplicates met the leases"
