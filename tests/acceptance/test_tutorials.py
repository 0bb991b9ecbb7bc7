"""The tutorials, followed step by step."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from celery_singleton_lock.core.events import EventName
from tests.harness.pages import Page, run
from tests.harness.processes import ROOT
from tests.harness.worker import CeleryBeat, CeleryWorker

pytestmark = pytest.mark.slow


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def test_the_first_lock_goes_as_printed(
    tmp_path: Path, redis_url: str, worker: Callable[..., CeleryWorker]
) -> None:
    page = Page("tutorials/first-lock.md", tmp_path, redis_url).write()
    *before, long, after = page.sessions
    first = worker("tasks", concurrency=4)
    page.check(*before, long)
    first.wait_for_event(EventName.CONFLICT, outcome="skip")
    first.wait_for_log("account 42: sync starts", since=len(first.lines) - 3)
    for command in page.commands("celery -A tasks singleton"):
        shown = run("-m", *command, folder=tmp_path)
        assert "account:42" in shown.stdout, shown.stdout + shown.stderr
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert "process is dead" in run("-m", *command, folder=tmp_path).stdout
    second = worker("tasks", concurrency=4)
    page.check(after)
    second.wait_for_event(EventName.FREED, reason="its process no longer exists")


def test_the_rate_goes_as_printed(
    tmp_path: Path, redis_url: str, worker: Callable[..., CeleryWorker]
) -> None:
    page = Page("how-to/rate.md", tmp_path, redis_url).write()
    partners = worker("partners", concurrency=4)
    page.check(*page.sessions)
    partners.wait_for_event(EventName.CONFLICT, outcome="skip", reason="rate")


def test_one_account_at_a_time_goes_as_printed(
    tmp_path: Path, redis_url: str, worker: Callable[..., CeleryWorker]
) -> None:
    page = Page("how-to/in-order.md", tmp_path, redis_url).write()
    sessions = [one for one in page.sessions if "outbox" not in one and "tenants" not in one]
    [queue, _] = page.commands("celery -A transfers singleton queue")
    first = worker("transfers", concurrency=4, wait=False)
    with ThreadPoolExecutor(1) as executor:
        session = executor.submit(page.check, *sessions)
        first.wait_for_log("ann 4 begins")
        before = run("-m", *queue, folder=tmp_path).stdout
        # Not between two calls: it may have the message of the next one, which then waits longer.
        first.wait_for_log(r"ann \d+ begins", since=len(first.lines))
        first.kill_group()
        after = run("-m", *queue, folder=tmp_path).stdout
        second = worker("transfers", concurrency=4, wait=False)
        session.result()
    assert "running" in before
    assert "waiting" in after
    printed = [re.findall(r"(ann|bob) (\d+) (begins|ends)", one.log) for one in (first, second)]
    assert len({name for name, *_ in printed[0][:3]}) == 2, "the accounts run in parallel"
    bobs, anns = (
        [
            (int(number), what)
            for of_worker in printed
            for name, number, what in of_worker
            if name == one
        ]
        for one in ("bob", "ann")
    )
    assert bobs == [(number, what) for number in range(1, 4) for what in ("begins", "ends")]
    interrupted = printed[1][0]
    assert interrupted == printed[0][-1], "it begins again"
    anns.remove((int(interrupted[1]), "begins"))
    assert anns == [(number, what) for number in range(1, 24) for what in ("begins", "ends")]


def test_a_tenant_with_many_calls_leaves_workers_to_the_others_as_printed(
    tmp_path: Path, redis_url: str, worker: Callable[..., CeleryWorker]
) -> None:
    page = Page("how-to/in-order.md", tmp_path, redis_url).write()
    worker("tenants", concurrency=4)
    page.check(*(one for one in page.sessions if "from tenants" in one))


def test_two_beats_send_no_tick_twice(
    tmp_path: Path,
    redis_url: str,
    worker: Callable[..., CeleryWorker],
    beat: Callable[..., CeleryBeat],
) -> None:
    page = Page("how-to/beat.md", tmp_path, redis_url).write()
    consumer = worker("reports")
    one = beat("reports", scheduler="singleton", wait=False)
    one.wait_for_event(EventName.LEADING)
    two = beat("reports", scheduler="singleton", wait=False)
    two.wait_for_event(EventName.STANDING_BY)
    one.wait_for_log("Sending due task report")
    [command] = page.commands("celery -A reports singleton")
    assert f"pid: {one.pid}" in run("-m", *command, folder=tmp_path).stdout
    consumer.wait_for_log("report of 2")
    os.kill(one.pid, signal.SIGKILL)
    two.wait_for_event(EventName.LEADING)
    since = len(two.lines)
    two.wait_for_log("Sending due task report", since=since)
    consumer.wait_for_log("report of 2", since=len(consumer.lines))
    ticks = re.findall(r"report of (\S+)", consumer.log)
    assert len(ticks) == len(set(ticks)) >= 2
