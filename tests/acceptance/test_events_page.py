"""The examples of docs/reference/events.md, run as they are printed."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.instrumentation.log import LEVELS
from celery_singleton_lock.instrumentation.signals import SIGNALS
from tests.harness.deliveries import wait_until
from tests.harness.pages import Page, block_with, run
from tests.harness.processes import ROOT, Process
from tests.harness.worker import CeleryWorker

NAME = "reference/events.md"


@pytest.fixture
def page(tmp_path: Path, redis_url: str) -> Page:
    """The page's files beside the README's tasks.py, on this test's server."""
    code = block_with((ROOT / "README.md").read_text(), "# tasks.py")
    (tmp_path / "tasks.py").write_text(re.sub(r"redis://localhost:6379/\d", redis_url, code))
    return Page(NAME, tmp_path, redis_url).write()


def test_the_session_about_a_gauge_goes_as_printed(page: Page) -> None:
    page.check()


def test_the_page_lists_each_event_with_its_signal_and_level() -> None:
    text = (ROOT / "docs" / NAME).read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| `(\w+)` \| ([A-Z]+) \|", text, re.MULTILINE)
    levels = {name: logging.getLevelName(LEVELS[name]) for name in EventName}
    assert rows == [(str(name), SIGNALS[name].name, levels[name]) for name in EventName]


@pytest.mark.slow
@pytest.mark.usefixtures("page")
def test_the_monitor_prints_the_events_of_a_worker(
    tmp_path: Path, worker: Callable[..., CeleryWorker]
) -> None:
    worker("tasks", args=["-E"], env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    monitor = Process(
        [sys.executable, "monitor.py"], env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path
    ).start()

    def is_shown() -> bool:  # the monitor may not have subscribed yet
        done = run("-c", "from tasks import sync; sync.delay(42).get(timeout=30)", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        return "singleton-counts" in monitor.log

    try:
        wait_until(is_shown, "the monitor prints events")
        monitor.wait_for_log(
            rf"^singleton-counts \[\['{EventName.ACQUIRED}', 'tasks.sync', [\d.]+, 1\].* None$"
        )
        monitor.wait_for_log(
            rf"^singleton-counts \[.*\['{EventName.RELEASED}', 'tasks.sync', [\d.]+, 1\].* None$"
        )
    finally:
        monitor.end()
