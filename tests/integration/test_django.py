"""Django: settings in its namespace, its own task class kept, shared tasks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.journal import Journal
from tests.harness.keys import name_in_store
from tests.harness.processes import ROOT, Process
from tests.harness.worker import CeleryWorker

SITE = "tests.apps.django_site"
GREET = f"{SITE}.tasks.greet"

StartWorker = Callable[..., CeleryWorker]
Publish = Callable[..., dict[str, Any]]

pytest.importorskip("django")


@pytest.fixture(autouse=True)
def database(environment: dict[str, str], tmp_path: Path) -> None:
    environment["DATABASE"] = str(tmp_path / "db.sqlite3")


@pytest.fixture
def publish(environment: dict[str, str]) -> Publish:
    """Runs what a view would do, in a process of its own; returns what it reports."""

    def run(module: str = "publish") -> dict[str, Any]:
        process = Process([sys.executable, "-m", f"{SITE}.{module}"], env=environment).start()
        assert process.wait(60) == 0, process.log
        return dict(json.loads(process.lines[-1]))

    return run


def test_a_django_task_is_a_singleton_and_waits_for_the_commit_beside_settings_of_others(
    worker: StartWorker,
    publish: Publish,
    journal: Journal,
    redis_client: Any,
) -> None:
    # The settings of others do not stop it. One process: what was sent first is done first.
    others = {"CELERY_TASK_TIME_LIMIT": 60, "OTHER_SINGLETON_LOCK_SIZE": 1, "SINGLETON": 1}
    worker(SITE, concurrency=1, env={"SETTINGS": json.dumps(others)})
    report = publish()
    assert report["is both"]
    assert report["key"] == report["now"]["key"] == name_in_store(f"{GREET}:now", prefix="site")
    assert report["ttl"] == report["now"]["ttl"] == 7
    assert report["now"]["fence"] > 0
    assert "is held by hold-" in report["conflict"]
    assert [run.key for run in journal.runs()] == [
        *("now", "at once", "in other words", "committed", "committed too", "last")
    ]
    assert report["claimed"] == [False, False, True], "rolled back, before and after the commit"
    assert redis_client.llen("idle") == 1


def test_a_duplicate_whose_result_is_in_the_database_leaves_no_connection_open(
    environment: dict[str, str], publish: Publish
) -> None:
    """The first call's result is asked for on a thread, which has a connection of its own."""
    settings = {
        "INSTALLED_APPS": ["tests.apps.django_site", "django_celery_results"],
        "CELERY_RESULT_BACKEND": "django-db",
    }
    environment["SETTINGS"] = json.dumps(settings)
    assert publish("duplicates") == {"calls": 1, "opened": 5, "open": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("CELERY_SINGLETON_LOCK_TLL", 5, r"'CELERY_SINGLETON_LOCK_TLL'.*singleton_lock_ttl"),
        ("CELERY_SINGLETON_LOCK_TTL", "x", r"ttl='x': give seconds"),
    ],
)
def test_a_wrong_setting_in_djangos_namespace_stops_the_worker(
    setting: str, value: Any, message: str, worker: StartWorker
) -> None:
    process = worker(SITE, env={"SETTINGS": json.dumps({setting: value})}, wait=False)
    assert process.wait() == 1
    assert "Traceback" not in process.log
    process.wait_for_log(f"CRITICAL.*{message}")


def test_the_cli_reads_djangos_settings(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "celery", "-A", SITE, "singleton", "ls"]
    process = Process(command, env=environment, cwd=ROOT).start()
    assert process.wait() == 0, process.log
    assert process.lines[-1] == "nothing is held"
