"""What the other tests rely on: the journal's arithmetic, servers, and an overlap that is seen."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import redis

from example_project.private_server import PrivateServer
from tests.harness.journal import Journal, Record, most_at_once, overlaps
from tests.harness.processes import Process
from tests.harness.worker import CeleryWorker

PLAIN = "tests.apps.plain"


def line(event: str, at: float, run: str, *, key: str = "k", pid: int = 1) -> Record:
    return Record(event=event, at=at, pid=pid, run=run, key=key)


def body(run: str, begin: float, end: float, key: str = "k") -> list[Record]:
    return [line("start", begin, run, key=key), line("end", end, run, key=key)]


@pytest.mark.parametrize(
    ("records", "count"),
    [
        (body("a", 1, 2) + body("b", 2, 3), 0),
        (body("a", 1, 3) + body("b", 2, 4), 1),
        (body("a", 1, 3, "x") + body("b", 2, 4, "y"), 0),
        ([line("start", 1, "a"), *body("b", 1000, 1001)], 1),  # without an end: for ever
        ([line("start", 1, "a"), line("death", 2, ""), line("start", 9, "b", pid=2)], 0),
        ([line("start", 1, "a"), line("death", 9.5, ""), line("start", 9, "b", pid=2)], 1),
        # An earlier process of the same number.
        ([line("death", 1, ""), line("start", 5, "a"), line("start", 9, "b", pid=2)], 1),
    ],
)
def test_runs_of_one_key_that_cross_overlap(records: list[Record], count: int) -> None:
    assert len(overlaps(records)) == count
    assert most_at_once(records, "k") <= 1 + count


def test_a_body_that_raises_leaves_its_error_in_the_journal(journal: Journal) -> None:
    with pytest.raises(ZeroDivisionError), journal.run("k", task_id="t", fence=7):
        raise ZeroDivisionError
    [run] = journal.runs()
    assert (run.error, run.finished, run.fence, run.task_id) == ("ZeroDivisionError", True, 7, "t")


def test_waiting_for_what_never_comes_fails(journal: Journal) -> None:
    journal.note("here")
    with pytest.raises(AssertionError, match=r"without success.*\n.*here"):
        journal.wait_for(lambda records: len(records) > 1, timeout=0.05)


def test_a_private_server_keeps_its_data_only_when_asked(private_redis: PrivateServer) -> None:
    client = redis.Redis.from_url(private_redis.url())
    client.set("a", "1")
    private_redis.kill()
    private_redis.start()
    assert client.get("a") == b"1"
    private_redis.restart(keep_data=True)
    assert client.get("a") == b"1"
    private_redis.restart(keep_data=False)
    assert client.get("a") is None


def test_without_a_lock_two_bodies_of_one_key_overlap(
    worker: Callable[..., CeleryWorker], load_app: Callable[..., ModuleType], journal: Journal
) -> None:
    plain = load_app(PLAIN)
    worker(PLAIN, concurrency=2)
    for _ in range(2):
        plain.occupy.delay("k", 60)
    journal.wait_for_starts(2)
    assert len(journal.overlaps()) == 1


def test_a_log_line_that_never_comes_fails_with_the_log() -> None:
    process = Process([sys.executable, "-c", "print('only this')"]).start()
    with pytest.raises(AssertionError, match="only this"):
        process.wait_for_log("something else")
    assert process.wait_for_log("only (this)").group(1) == "this"
    process.wait()
