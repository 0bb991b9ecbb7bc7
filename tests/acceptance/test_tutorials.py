"""The tutorials, followed step by step."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

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
    first.wait_for_log("singleton conflict: .* outcome=skip")
    first.wait_for_log("account 42: body starts", since=len(first.lines) - 3)
    for command in page.commands("celery -A tasks singleton"):
        shown = run("-m", *command, folder=tmp_path)
        assert "account:42" in shown.stdout, shown.stdout + shown.stderr
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    second = worker("tasks", concurrency=4)
    page.check(after)
    second.wait_for_log("singleton freed: .*its process no longer exists on this host")


def test_two_beats_send_no_tick_twice(
    tmp_path: Path,
    redis_url: str,
    worker: Callable[..., CeleryWorker],
    beat: Callable[..., CeleryBeat],
) -> None:
    page = Page("tutorials/beat.md", tmp_path, redis_url).write()
    consumer = worker("reports")
    one = beat("reports", scheduler="singleton", wait=False)
    one.wait_for_log("singleton leading")
    two = beat("reports", scheduler="singleton", wait=False)
    two.wait_for_log("singleton standing-by")
    one.wait_for_log("Sending due task report")
    [command] = page.commands("celery -A reports singleton")
    assert f"pid: {one.pid}" in run("-m", *command, folder=tmp_path).stdout
    consumer.wait_for_log("report of 2")
    os.kill(one.pid, signal.SIGKILL)
    two.wait_for_log("singleton leading")
    since = len(two.lines)
    two.wait_for_log("Sending due task report", since=since)
    consumer.wait_for_log("report of 2", since=len(consumer.lines))
    ticks = re.findall(r"report of (\S+)", consumer.log)
    assert len(ticks) == len(set(ticks)) >= 2
