"""The loads of `make load`, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.load import backlog, leases, rates, tasks

# The loads have servers of their own; this one says whether there can be any.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("redis_server"),
]

# MiB. A worker parent that kept anything of each task would grow by more: it has seen each message.
_FLAT = 20.0
# A completion record's name, its value and what Redis needs for a key; measured: 250.
_MARKER_BYTES = 600


def test_nothing_is_lost_nor_run_twice_at_once_while_processes_are_killed(
    tmp_path: Path,
) -> None:
    report = tasks.run(tasks.TaskLoad(tasks=600, keys=60, kills=0.02), tmp_path)
    print(report)
    assert report.ok, report
    assert report.kills > 0
    assert report.grown < _FLAT
    assert report.unexplained < _FLAT
    assert 0 < report.marker_bytes < _MARKER_BYTES


def test_without_the_lock_the_same_load_is_caught(tmp_path: Path) -> None:
    load = tasks.TaskLoad(tasks=400, keys=4, kills=0.0, without_lock=True)
    report = tasks.run(load, tmp_path)
    assert not report.ok
    assert report.overlaps > 0
    assert report.unlocked == 400


def test_leases_of_one_process_outlive_a_server_that_restarts() -> None:
    report = leases.run(leases.LeaseLoad(leases=500, seconds=15, restarts=1))
    print(report)
    assert report.ok, report
    assert report.restarts == 1
    assert report.asked > 0
    assert report.grown < _FLAT


def test_a_server_that_forgets_is_noticed_by_the_same_load() -> None:
    load = leases.LeaseLoad(leases=100, seconds=12, ttl=6, restarts=1, keeps=False)
    report = leases.run(load)
    assert report.lost > 0


@pytest.mark.parametrize("paused", [False, True])
def test_calls_that_wait_in_the_store_cost_no_worker_anything_and_run_in_order(
    tmp_path: Path, paused: bool
) -> None:
    report = backlog.run(2000, 20, tmp_path, paused=paused)
    print(report)
    assert report.ok, report
    assert report.in_broker <= 20, "one call of each key"
    assert report.copies <= 2, "the second after a minute: the calls take no longer than five"
    assert report.bytes_per_call < 2048
    assert report.grown < 5


def test_calls_start_in_order_and_no_faster_than_their_rate_while_workers_are_killed(
    tmp_path: Path,
) -> None:
    report = rates.run(rates.RateLoad(calls=200, keys=10, kills=1), tmp_path)
    print(report)
    assert report.ok, report
