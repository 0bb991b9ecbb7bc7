"""Entries of a schedule whose options have to be converted, are wrong, or can't be read."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from celery_singleton_lock import PER_TASK, OnConflict, singleton_task
from celery_singleton_lock.beat import entry as entries
from celery_singleton_lock.beat.election import Election
from celery_singleton_lock.beat.redbeat import LeaderRedBeatScheduler, RedBeatEntry
from celery_singleton_lock.beat.scheduler import LeaderMixin, LeaderScheduler
from celery_singleton_lock.core import observers
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.message.header import HEADER
from tests.harness.processes import ROOT

RICH: dict[str, Any] = {
    "ttl": timedelta(seconds=20),
    "on_conflict": OnConflict.retry(timedelta(seconds=1), 2),
}
RULE = {"action": "retry", "delay": 1.0, "max_delay": 2.0, "max_wait": None}
PLAIN = {"ttl": 20.0, "on_conflict": RULE}

Start = Callable[..., LeaderMixin]


def entry(task: str, **options: Any) -> dict[str, Any]:
    return {"task": task, "schedule": 0.01, "options": options}


def app_of(url: str, schedule: dict[str, Any]) -> Celery:
    app = Celery("entries", broker=url, backend=url, set_as_current=False)
    app.conf.update(redbeat_redis_url=url, beat_schedule=schedule, result_expires=None)

    @singleton_task(app=app, name="known", key=PER_TASK)
    def known() -> None:
        """Runs nowhere."""

    return app


@pytest.fixture(autouse=True)
def _nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "_logged", {})


@pytest.fixture(autouse=True)
def _nothing_watches_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that does notices up to a ttl later that its beat is closed."""
    monkeypatch.setattr(Election, "_watch_progress", lambda election, term: None)


@pytest.fixture(params=["singleton", "singleton_redbeat"])
def start(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> Iterator[Start]:
    """``start(name=entry, ...)``: a beat of one of the two schedulers, which leads."""
    started: list[LeaderMixin] = []

    def start(**schedule: Any) -> LeaderMixin:
        app = app_of(redis_url, schedule)
        if request.param == "singleton":
            file = str(tmp_path / f"schedule{len(started)}")
            beat: LeaderMixin = LeaderScheduler(app, schedule_filename=file)
        else:
            beat = LeaderRedBeatScheduler(app)
        started.append(beat)
        return beat

    yield start
    for beat in started:
        beat.close()
        beat.app.close()


@pytest.fixture
def redbeat(redis_url: str) -> Iterator[LeaderRedBeatScheduler]:
    beat = LeaderRedBeatScheduler(app_of(redis_url, {"good": entry("known")}))
    yield beat
    beat.close()
    beat.app.close()


def sent(client: redis.Redis, beat: LeaderMixin, *tasks: str) -> dict[str, Any]:
    """The headers of the first message of each task, when all ``tasks`` were sent.

    What was logged meanwhile has been written: a tick leaves it to a thread.
    """
    found: dict[str, Any] = {}
    for _ in range(1000):
        beat.tick()
        while (message := client.lpop("celery")) is not None:
            headers = json.loads(message)["headers"]
            found.setdefault(headers["task"], headers)
        if found.keys() >= {*tasks}:
            observers.flush(30)
            return found
    raise AssertionError(f"sent: {[*found]}")


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_an_entry_has_plain_options_and_its_task_gets_them(
    start: Start, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    beat = start(known=entry("known", singleton=RICH), other=entry("other"))
    assert sent(redis_client, beat, "known", "other")["known"][HEADER]["options"] == PLAIN
    for each in beat.schedule.values():
        assert each.options.get("singleton", PLAIN) == PLAIN
    assert errors(caplog) == []


def test_an_entry_of_an_unknown_task_keeps_its_key(
    start: Start, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    singleton = {"unique": "until_done", "unique_for": timedelta(minutes=1), "key": "k"}
    beat = start(unknown=entry("unknown", singleton=singleton))
    claim = sent(redis_client, beat, "unknown")["unknown"][HEADER]["claim"]
    assert claim["key"].endswith("unknown:k")
    assert claim["unique_for"] == 60
    assert errors(caplog) == []


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"singleton": {"tll": 5}}, "did you mean 'ttl'"),
        ({"singleton": {"ttl": "long"}}, "ttl='long'"),
        ({"singleton": True}, "give a dict"),
        ({"headers": "none"}, "dictionary update sequence"),
    ],
    ids=repr,
)
def test_a_wrong_entry_is_named_once_and_the_others_tick(
    start: Start,
    redis_client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    why: str,
) -> None:
    beat = start(wrong=entry("bad", **options), good=entry("known"))
    for _ in range(3):
        assert "bad" not in sent(redis_client, beat, "known")
    [error] = errors(caplog)
    assert "the entry 'wrong' is left out" in error
    assert why in error


# RedBeat.


def test_an_entry_that_redbeat_can_not_store_is_left_out(
    redis_url: str, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    odd = {"task": "odd", "schedule": 0.01, "kwargs": {"within": timedelta(seconds=1)}}
    beat = LeaderRedBeatScheduler(app_of(redis_url, {"odd": odd, "good": entry("known")}))
    assert "odd" not in sent(redis_client, beat, "known")
    [error] = errors(caplog)
    assert "'odd' is left out" in error
    assert "timedelta is not JSON serializable" in error
    beat.close()
    beat.app.close()


DEFINITION: dict[str, Any] = {
    "name": "stored",
    "task": "stored",
    "args": [],
    "kwargs": {},
    "options": {},
    "schedule": {"__type__": "interval", "every": 0.01, "relative": False},
    "enabled": True,
}


@pytest.mark.parametrize(
    "stored",
    [
        {"definition": "{"},
        {"definition": "[]"},
        {"definition": json.dumps({**DEFINITION, "options": {"singleton": {"tll": 1}}})},
        {"definition": json.dumps({**DEFINITION, "options": [1]})},
        {"definition": json.dumps({**DEFINITION, "schedule": "often"})},
        {"definition": json.dumps({**DEFINITION, "schedule": {"__type__": "interval"}})},
        {"definition": json.dumps({**DEFINITION, "unknown": 1})},
        {"definition": json.dumps(DEFINITION), "meta": "{}"},
        {"definition": json.dumps(DEFINITION), "meta": '{"last_run_at": "yesterday"}'},
    ],
    ids=repr,
)
def test_a_stored_entry_that_can_not_be_read_costs_only_itself(
    redbeat: LeaderRedBeatScheduler,
    redis_client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    stored: dict[str, str],
) -> None:
    redis_client.hset("redbeat:stored", mapping=stored)
    redis_client.zadd("redbeat::schedule", {"redbeat:stored": 1})
    for _ in range(3):
        assert "stored" not in sent(redis_client, redbeat, "known")
    [error] = errors(caplog)
    assert "'stored' is left out" in error
    # It is not deleted, and ticks as soon as it can be read.
    assert redis_client.zscore("redbeat::schedule", "redbeat:stored") == 1
    redis_client.hset("redbeat:stored", "definition", json.dumps(DEFINITION))
    redis_client.hdel("redbeat:stored", "meta")
    sent(redis_client, redbeat, "stored")


def test_an_entry_that_is_gone_is_removed_as_by_redbeat(
    redbeat: LeaderRedBeatScheduler, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    redis_client.zadd("redbeat::schedule", {"redbeat:gone": 1})
    sent(redis_client, redbeat, "known")
    assert redis_client.zscore("redbeat::schedule", "redbeat:gone") is None
    assert errors(caplog) == []


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets this process's clock to so many seconds after the right time."""
    ahead = 0.0
    celery_now = Celery.now

    def set_clock(seconds: float) -> None:
        nonlocal ahead
        ahead = seconds

    monkeypatch.setattr(Celery, "now", lambda app: celery_now(app) + timedelta(seconds=ahead))
    monkeypatch.setattr(SystemClock, "wall", lambda self: time.time() + ahead)
    return set_clock


@pytest.mark.parametrize("restarted", [False, True], ids=["leads on", "restarted"])
def test_a_clock_that_is_set_back_silences_no_entry_of_redbeat(
    redis_url: str,
    redis_client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    set_clock: Callable[[float], None],
    restarted: bool,
) -> None:
    app = app_of(redis_url, {"good": entry("known")})
    set_clock(86_400)
    beat = LeaderRedBeatScheduler(app)
    sent(redis_client, beat, "known")
    runs = RedBeatEntry.load_meta("redbeat:good", app=app)["total_run_count"]
    set_clock(0)
    if restarted:
        beat.close()
        beat = LeaderRedBeatScheduler(app)
    redis_client.delete("celery")
    sent(redis_client, beat, "known")
    assert "the last run of 'good' is stored as" in caplog.text
    meta = RedBeatEntry.load_meta("redbeat:good", app=app)
    assert meta["last_run_at"] <= datetime.now(UTC)
    assert meta["total_run_count"] > runs
    beat.close()
    app.close()


# Django. Its settings are those of a process.

DJANGO = """
import json, logging, os
from datetime import timedelta
from tests.apps.beat_site import app
import django
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from celery_singleton_lock import OnConflict
from celery_singleton_lock.beat.django import LeaderDatabaseScheduler
from django_celery_beat.models import IntervalSchedule, PeriodicTask
logging.basicConfig(format="%(levelname)s %(message)s")
app.conf.beat_schedule = {
    name: {"task": name, "schedule": 1.0, "options": {"singleton": singleton}}
    for name, singleton in {
        "rich": {"ttl": timedelta(seconds=20), "on_conflict": OnConflict.retry(1, 2)},
        "wrong": {"tll": 5},
        "unclaimed": False,
    }.items()
}
every, _ = IntervalSchedule.objects.get_or_create(every=1, period="seconds")
for name, headers in {
    "row": '{"singleton": {"ttl": 5}}',
    "wrong row": '{"singleton": {"ttl": "long"}}',
    "no mapping": '{"singleton": "until_done"}',
    "list": "[1]",
    "no JSON": "{",
}.items():
    PeriodicTask.objects.create(name=name, task=name, interval=every, headers=headers)
beat = LeaderDatabaseScheduler(app)
beat._initial_read = True
beat._schedule = None
print(json.dumps({name: entry.options.get("singleton") for name, entry in beat.schedule.items()}))
"""


def run_django(
    script: str, redis_url: str, tmp_path: Path, *args: str
) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "BROKER_URL": redis_url,
        "RESULT_URL": redis_url,
        "DATABASE": str(tmp_path / "db.sqlite3"),
    }
    command = [sys.executable, "-c", script, *args]
    return subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )


def test_rows_of_django_are_converted_or_left_out_by_name(redis_url: str, tmp_path: Path) -> None:
    done = run_django(DJANGO, redis_url, tmp_path)
    assert done.returncode == 0, done.stderr
    schedule = json.loads(done.stdout.splitlines()[-1])
    schedule.pop("celery.backend_cleanup", None)
    assert schedule == {"rich": PLAIN, "unclaimed": False, "row": {"ttl": 5.0}}
    lines = [line for line in done.stderr.splitlines() if "is left out" in line]
    assert len(lines) == 5
    for name in ("wrong", "wrong row", "no mapping", "list", "no JSON"):
        [line] = [line for line in lines if f"the entry {name!r} is left out" in line]
        assert line.startswith("ERROR")


SET_BACK = """
import logging, sys, time
from datetime import timedelta
from tests.apps.beat_site import app
import django
django.setup()
from celery import Celery
from django.core.management import call_command
from django_celery_beat import models
call_command("migrate", verbosity=0)
from celery_singleton_lock.beat.django import LeaderDatabaseScheduler
from celery_singleton_lock.core.clock import SystemClock

app.conf.result_expires = None  # else an entry is added that does not use the clock below
ahead = 86_400.0
celery_now, row_now = Celery.now, models.now
Celery.now = lambda app: celery_now(app) + timedelta(seconds=ahead)
models.now = lambda: row_now() + timedelta(seconds=ahead)
logging.basicConfig()
SystemClock.wall = lambda clock: time.time() + ahead

def tick_until_sent():
    with app.connection() as connection:
        client = connection.default_channel.client
        client.delete("celery")
        for _ in range(300):
            time.sleep(min(max(beat.tick(), 0), 0.1))
            if client.llen("celery"):
                return
    raise AssertionError("no tick")

every, _ = models.IntervalSchedule.objects.get_or_create(every=1, period="seconds")
models.PeriodicTask.objects.create(name="row", task="row", interval=every)
beat = LeaderDatabaseScheduler(app)
tick_until_sent()
beat.sync()
written = models.PeriodicTask.objects.get(name="row").last_run_at
assert written > row_now() + timedelta(hours=23), written
ahead = 0.0
if sys.argv[1] == "restarted":
    beat.close()
    beat = LeaderDatabaseScheduler(app)
tick_until_sent()
beat.close()
row = models.PeriodicTask.objects.get(name="row")
assert row.last_run_at <= row_now(), row.last_run_at
assert row.total_run_count >= 2, row.total_run_count
"""


@pytest.mark.parametrize("case", ["leads on", pytest.param("restarted", marks=pytest.mark.slow)])
def test_a_clock_that_is_set_back_silences_no_row_of_django(
    redis_url: str, tmp_path: Path, case: str
) -> None:
    done = run_django(SET_BACK, redis_url, tmp_path, case)
    assert done.returncode == 0, done.stderr
    assert "the last run of 'row' is stored as" in done.stderr
