"""A tick is skipped while the previous run is queued or running: one word in the entry."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from celery import Celery

from celery_singleton_lock import pause, resume
from tests.apps.gate import Gate
from tests.harness.deliveries import wait_until
from tests.harness.journal import Journal
from tests.harness.processes import ROOT
from tests.harness.worker import CeleryBeat, CeleryWorker

APP, SITE = "tests.apps.unique_ticks", "tests.apps.unique_site"

StartWorker = Callable[..., CeleryWorker]
StartBeat = Callable[..., CeleryBeat]


@pytest.fixture
def environment(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    environment.update(EVERY="0.5", DATABASE=str(tmp_path / "db.sqlite3"))
    return environment


def sent(process: CeleryBeat) -> int:
    return process.log.count("Sending due task unique")


def test_the_runs_of_a_paused_task_wait_as_one(
    worker: StartWorker,
    beat: StartBeat,
    environment: dict[str, str],
    redis_client: redis.Redis,
    journal: Journal,
) -> None:
    with Celery("operator", broker="memory://", set_as_current=False) as app:
        app.conf.singleton_lock_url = environment["RESULT_URL"]
        pause(scope="unique.tick", app=app)
        worker(APP, env={"REGISTERED": "yes"})
        process = beat(APP, scheduler="singleton", env={"REGISTERED": "yes"})
        wait_until(lambda: sent(process) >= 6, "some ticks are due")
        assert redis_client.llen("celery") == 0
        assert journal.runs("tick") == []
        Gate(redis_client, "tick").open()
        resume(scope="unique.tick", app=app)
        journal.wait_for_ends(2, key="tick")
    first = [text for text in process.log.splitlines() if "singleton duplicate" in text]
    assert len(first) >= 4, "it has waited as one"
    assert journal.overlaps() == []


@pytest.mark.parametrize(
    "registered", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["registered", "by name"]
)
@pytest.mark.parametrize(
    "scheduler",
    [
        "singleton",
        pytest.param("singleton_django", marks=pytest.mark.slow),
        pytest.param("singleton_redbeat", marks=pytest.mark.slow),
    ],
)
def test_ticks_are_skipped_while_one_is_queued_or_runs(
    worker: StartWorker,
    beat: StartBeat,
    environment: dict[str, str],
    redis_client: redis.Redis,
    journal: Journal,
    scheduler: str,
    registered: bool,
) -> None:
    known: dict[str, str | None] = {"REGISTERED": "yes" if registered else None}
    app = APP
    if scheduler == "singleton_django":
        app = SITE
        command = [sys.executable, "-m", "django", "migrate", "--verbosity", "0"]
        settings = {"DJANGO_SETTINGS_MODULE": "tests.apps.beat_site.settings"}
        env = {**os.environ, **environment, **settings}
        subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=100)
    process = beat(app, scheduler=scheduler, env=known)
    # Queued: no worker consumes it.
    wait_until(lambda: sent(process) >= 4, "some ticks are due")
    assert redis_client.llen("celery") == 1
    worker(APP, env={"REGISTERED": "yes"})
    journal.wait_for_starts(1, key="tick")
    # Running.
    ticks = sent(process)
    wait_until(lambda: sent(process) >= ticks + 4, "more ticks are due")
    assert redis_client.llen("celery") == 0
    assert len(journal.runs("tick")) == 1
    Gate(redis_client, "tick").open()
    # Done: the next tick is sent again.
    journal.wait_for_ends(2, key="tick")
    assert journal.overlaps() == []
    assert "Message Error" not in process.log
