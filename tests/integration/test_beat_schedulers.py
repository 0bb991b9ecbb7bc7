"""The same promises with schedules in Django's database and in RedBeat's keys."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from celery_singleton_lock.core.events import EventName
from tests.chaos.proxy import Kind, Mode, Proxy
from tests.harness.deliveries import wait_until
from tests.harness.processes import ROOT
from tests.harness.ticks import Beats, Ticks, faults, longest_gap
from tests.harness.worker import CeleryBeat

TICKS, SITE = "tests.apps.ticks", "tests.apps.beat_site"

StartBeat = Callable[..., CeleryBeat]
LoadApp = Callable[..., ModuleType]

# Seconds. RedBeat looks for what is due by whole seconds.
TTL, EVERY = 1.5, 1.0


# Each starts several beats, and waits for what they tick.
pytestmark = pytest.mark.slow


@pytest.fixture
def environment(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    environment.update(
        AMBUSH=str(tmp_path / "ambush"),
        EVERY=str(EVERY),
        SETTINGS=json.dumps({"singleton_lock_beat_ttl": TTL, "singleton_lock_beat_poll": 0.2}),
        DATABASE=str(tmp_path / "db.sqlite3"),
    )
    return environment


@pytest.fixture
def ticks(redis_client: redis.Redis) -> Ticks:
    return Ticks(redis_client)


@pytest.fixture
def database(environment: dict[str, str]) -> Path:
    """The Django project's database, with its tables."""
    command = [sys.executable, "-m", "django", "migrate", "--verbosity", "0"]
    env = {**os.environ, **environment, "DJANGO_SETTINGS_MODULE": f"{SITE}.settings"}
    subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=100)
    return Path(environment["DATABASE"])


@pytest.fixture(params=["singleton_django", "singleton_redbeat"])
def beats(
    request: pytest.FixtureRequest,
    beat: StartBeat,
    load_app: LoadApp,
    environment: dict[str, str],
) -> Beats:
    """Beats of each of the two schedulers, in turn."""
    django = request.param == "singleton_django"
    if django:
        request.getfixturevalue("database")
    start = partial(beat, SITE if django else TICKS, scheduler=request.param)
    return Beats(start, load_app(TICKS).app, Path(environment["AMBUSH"]))


def rows(database: Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    with sqlite3.connect(database, timeout=20) as connection:
        return list(connection.execute(query, values))


def test_killed_and_stopped_leaders_are_replaced_and_no_tick_comes_twice(
    beats: Beats, ticks: Ticks
) -> None:
    beats.add(3)
    ticks.wait_for(2)
    beats.kill(killed := beats.leader())
    stopped = beats.leader(but=killed)
    ticks.wait_for(2)
    # There, and not anywhere: else it might stand still with the lock on the SQLite file.
    beats.prepare(stopped, "SIGSTOP", "authorize")
    beats.leader(but=stopped)
    ticks.wait_for(2)
    seen = len(stopped.lines)
    stopped.cont()
    stopped.wait_for_event(EventName.STANDING_BY, EventName.LEASE_LOST, since=seen)
    ticks.wait_for(3)
    sent = ticks.of()
    assert len({tick.beat for tick in sent}) == 3
    assert faults(sent, EVERY) == []
    assert longest_gap(sent) < TTL + EVERY + 1


@pytest.mark.parametrize("outage", [Kind.NO_REPLIES, Kind.REFUSE])
def test_a_leader_cut_off_from_its_broker_is_replaced_and_stands_again_when_it_answers(
    beats: Beats, ticks: Ticks, environment: dict[str, str], outage: Kind
) -> None:
    # RedBeat's keys are cut off too: they are on the same server.
    url = environment["LOCK_URL"] = environment["BROKER_URL"]
    port = str(urlsplit(url).port)
    with Proxy(int(port)) as proxy:
        [cut_off] = beats.add(env={"BROKER_URL": url.replace(port, str(proxy.port))})
        [standby] = beats.add()
        ticks.wait_for(2)
        assert beats.leader() is cut_off
        proxy.set(Mode(kind=outage))
        cut_off.wait_for_event(EventName.RESIGNED, why="it could send nothing")
        assert beats.leader() is standby
        ticks.wait_for(2)
        seen = len(cut_off.lines)
        proxy.set(Mode())
        cut_off.wait_for_event(EventName.STANDING_BY, since=seen)
        beats.kill(standby)
        assert beats.leader() is cut_off
        ticks.wait_for(2)
    assert faults(ticks.of(), EVERY) == []
    assert longest_gap(ticks.of()) < TTL + EVERY + 3


@pytest.mark.parametrize("outage", [Kind.NO_REPLIES, Kind.REFUSE])
def test_a_leader_cut_off_from_redbeats_server_is_replaced(
    beat: StartBeat,
    load_app: LoadApp,
    ticks: Ticks,
    environment: dict[str, str],
    outage: Kind,
) -> None:
    url = environment["BROKER_URL"]
    port = str(urlsplit(url).port)
    start = partial(beat, TICKS, scheduler="singleton_redbeat")
    beats = Beats(start, load_app(TICKS).app, Path(environment["AMBUSH"]))
    with Proxy(int(port)) as proxy:
        [cut_off] = beats.add(env={"REDBEAT_URL": url.replace(port, str(proxy.port))})
        [standby] = beats.add()
        ticks.wait_for(2)
        assert beats.leader() is cut_off
        proxy.set(Mode(kind=outage))
        cut_off.wait_for_event(EventName.RESIGNED, why="it could send nothing")
        assert beats.leader() is standby
        ticks.wait_for(2)
        seen = len(cut_off.lines)
        proxy.set(Mode())
        cut_off.wait_for_event(EventName.STANDING_BY, since=seen)
    assert faults(ticks.of(), EVERY) == []


@pytest.mark.parametrize(
    "scheduler", ["django_celery_beat.schedulers:DatabaseScheduler", "redbeat:RedBeatScheduler"]
)
def test_plain_schedulers_tick_twice(
    beat: StartBeat,
    ticks: Ticks,
    environment: dict[str, str],
    request: pytest.FixtureRequest,
    scheduler: str,
) -> None:
    django = "django" in scheduler
    if django:
        request.getfixturevalue("database")
    else:
        # Else its own lock would keep the second from starting; that of a stalled leader does not.
        environment["SETTINGS"] = json.dumps({"redbeat_lock_key": None})
    for number in range(3):
        beat(SITE if django else TICKS, scheduler=scheduler, name=f"plain{number}")
    ticks.wait_for(20, timeout=60)
    assert faults(ticks.of(), EVERY)


def test_a_clean_stop_hands_over_at_once_and_on_the_grid(beats: Beats, ticks: Ticks) -> None:
    beats.add(2)
    ticks.wait_for(2)
    stopped = beats.leader()
    beats.running.remove(stopped)
    stopped.terminate()
    assert stopped.wait() == 0
    assert "Traceback" not in stopped.log
    beats.leader()
    ticks.wait_for(3)
    assert faults(ticks.of(), EVERY) == []
    assert longest_gap(ticks.of()) < EVERY + 1


def test_a_leader_stopped_between_authorization_and_send_sends_late_and_once(
    beats: Beats, ticks: Ticks
) -> None:
    beats.add(2)
    ticks.wait_for(2)
    beats.prepare(stopped := beats.leader(), "SIGSTOP", "send")
    beats.leader(but=stopped)
    ticks.wait_for(2)
    seen = len(stopped.lines)
    stopped.cont()
    stopped.wait_for_event(EventName.STANDING_BY, since=seen)
    ticks.wait_for(3)
    assert faults(ticks.of(), EVERY) == []


def test_a_leader_killed_between_authorization_and_send_loses_that_tick_alone(
    beats: Beats, ticks: Ticks
) -> None:
    beats.add(2)
    ticks.wait_for(2)
    beats.prepare(killed := beats.leader(), "SIGKILL", "send")
    killed.wait()
    beats.leader(but=killed)
    ticks.wait_for(3)
    assert faults(ticks.of(), EVERY) == []


# Django.


@pytest.fixture
def django_beats(
    database: Path, beat: StartBeat, load_app: LoadApp, environment: dict[str, str]
) -> Beats:
    start = partial(beat, SITE, scheduler="singleton_django")
    return Beats(start, load_app(TICKS).app, Path(environment["AMBUSH"]))


def last_run(database: Path) -> tuple[float, int]:
    """What the row of the interval has: seconds since the epoch, and how many runs."""
    query = (
        "select last_run_at, total_run_count from django_celery_beat_periodictask where name = ?"
    )
    [(last, count)] = rows(database, query, "interval")
    return datetime.fromisoformat(last).replace(tzinfo=UTC).timestamp(), count


def test_rows_keep_their_last_run(django_beats: Beats, ticks: Ticks, database: Path) -> None:
    django_beats.add(1)
    ticks.wait_for(3)
    [process] = django_beats.running
    process.terminate()
    process.wait()
    assert last_run(database) == (ticks.of()[-1].due, len(ticks.of()))


def test_a_leader_that_stood_still_does_not_set_a_row_back(
    django_beats: Beats, ticks: Ticks, database: Path
) -> None:
    django_beats.add(2)
    ticks.wait_for(3)
    stopped = django_beats.leader()  # it has runs that it has not written yet
    django_beats.prepare(stopped, "SIGSTOP", "authorize")
    other = django_beats.leader(but=stopped)
    ticks.wait_for(2)
    other.terminate()
    other.wait()
    written, _ = last_run(database)
    seen = len(stopped.lines)
    stopped.cont()
    stopped.wait_for_log("Sending due task interval", since=seen)
    assert last_run(database)[0] >= written


def add_row(database: Path, name: str, **columns: object) -> None:
    """Add a periodic task, as Django's admin does it while beats run."""
    now = datetime.now(UTC).replace(tzinfo=None).isoformat(" ")
    values: dict[str, object] = {
        "name": name,
        "task": name,
        "args": "[]",
        "kwargs": "{}",
        "headers": "{}",
        "enabled": 1,
        "one_off": 0,
        "total_run_count": 0,
        "date_changed": now,
        "description": "",
        **columns,
    }
    marks = ", ".join("?" * len(values))
    table = f"django_celery_beat_periodictask ({', '.join(values)})"
    rows(database, f"insert into {table} values ({marks})", *values.values())
    rows(database, "update django_celery_beat_periodictasks set last_update = ?", now)


def add_clocked_row(database: Path, name: str, due_in: float) -> None:
    due = (datetime.now(UTC) + timedelta(seconds=due_in)).replace(tzinfo=None).isoformat(" ")
    clocked = "django_celery_beat_clockedschedule (clocked_time)"
    rows(database, f"insert into {clocked} values (?)", due)
    add_row(database, name, one_off=1, clocked_id=1)


@pytest.mark.parametrize("known", [True, False], ids=["known to the standby", "added later"])
def test_a_clocked_task_runs_once_though_its_leader_is_killed_as_it_sends_it(
    django_beats: Beats, ticks: Ticks, database: Path, known: bool
) -> None:
    if known:
        add_clocked_row(database, "once", due_in=5)
    django_beats.add(2)
    ticks.wait_for(1)
    if not known:
        add_clocked_row(database, "once", due_in=1)
    wait_until(lambda: ticks.of("once"), "the clocked task is sent")
    django_beats.kill(killed := django_beats.leader())
    django_beats.leader(but=killed)
    ticks.wait_for(3)
    assert len(ticks.of("once")) == 1


def test_the_next_leader_knows_the_rows_that_were_added_while_it_stood_by(
    django_beats: Beats, ticks: Ticks, database: Path
) -> None:
    django_beats.add(2)
    ticks.wait_for(1)
    [(interval,)] = rows(database, "select id from django_celery_beat_intervalschedule")
    add_row(database, "added", interval_id=interval)
    wait_until(lambda: ticks.of("added"), "the new entry is sent")
    django_beats.kill(killed := django_beats.leader())
    leader = django_beats.leader(but=killed)
    wait_until(
        lambda: [tick for tick in ticks.of("added") if tick.beat == leader.pid],
        "the next leader sends it",
    )
    assert faults(ticks.of("added"), EVERY) == []


# RedBeat.


def test_redbeats_own_lock_is_off(
    beat: StartBeat, ticks: Ticks, redis_client: redis.Redis, environment: dict[str, str]
) -> None:
    settings = json.loads(environment["SETTINGS"])
    environment["SETTINGS"] = json.dumps({**settings, "redbeat_lock_key": "redbeat::lock"})
    process = beat(TICKS, scheduler="singleton_redbeat")
    ticks.wait_for(2)
    assert redis_client.exists("redbeat::lock") == 0
    assert "Acquired lock" not in process.log


def test_redbeat_outlives_the_server_that_everything_is_on(
    beat: StartBeat, environment: dict[str, str], private_redis: Any
) -> None:
    url = private_redis.url()
    environment.update(BROKER_URL=url, RESULT_URL=url)
    process = beat(TICKS, scheduler="singleton_redbeat")
    with redis.Redis.from_url(url, decode_responses=True) as client:
        client.config_set("appendfsync", "always")
        Ticks(client).wait_for(2)
    private_redis.kill()
    process.wait_for_event(EventName.STORE_UNREACHABLE)
    process.wait_for_event(EventName.LEASE_LOST)
    seen = len(process.lines)
    private_redis.start()
    process.wait_for_event(EventName.LEADING, since=seen)
    with redis.Redis.from_url(url, decode_responses=True) as client:
        Ticks(client).wait_for(3)
        sent = Ticks(client).of()
    assert process.alive
    assert faults(sent, EVERY) == []
    assert time.time() - sent[-1].sent_at < TTL


# A rolling deploy beside RedBeat's own scheduler. MIGRATION_CALLS is the number of its ticks.

REDBEATS = "redbeat:RedBeatScheduler"
ENTRIES = 10
# RedBeat's own scheduler lets go in the handler of the signal, and the tick goes on.
SIGTERM_IN_A_TICK = "'NoneType' object has no attribute 'extend'"
ROUNDS = max(2, int(os.environ.get("MIGRATION_CALLS", "60")) // ENTRIES // 3)


@pytest.mark.parametrize(
    "schedulers",
    [(REDBEATS, "singleton_redbeat"), ("singleton_redbeat", REDBEATS)],
    ids=["RedBeat first", "ours first"],
)
def test_the_bridge_and_a_plain_redbeat_exclude_each_other(
    beat: StartBeat,
    ticks: Ticks,
    redis_client: redis.Redis,
    environment: dict[str, str],
    schedulers: tuple[str, str],
) -> None:
    settings = json.loads(environment["SETTINGS"])
    environment["SETTINGS"] = json.dumps(
        {**settings, "singleton_lock_old_locks": True, "redbeat_lock_timeout": 300}
    )
    environment["ENTRIES"] = str(ENTRIES)
    first = beat(TICKS, scheduler=schedulers[0], name="first")
    ticks.wait_for(ROUNDS)
    second = beat(TICKS, scheduler=schedulers[1], name="second", wait=False)
    second.wait_for_log("nothing is sent until it stops|beat: Starting")
    ticks.wait_for(ROUNDS)
    first.terminate()
    assert first.wait() == 0 or (schedulers[0] == REDBEATS and SIGTERM_IN_A_TICK in first.log)
    ticks.wait_for(ROUNDS)  # long before the lock would have expired
    second.terminate()
    assert second.wait() == 0 or (schedulers[1] == REDBEATS and SIGTERM_IN_A_TICK in second.log)
    # A RedBeat that is stopped in a tick releases its lock, and sends what is left of that tick.
    left = int(schedulers[0] == REDBEATS and SIGTERM_IN_A_TICK in first.log)
    for number in range(ENTRIES):
        sent = ticks.of(f"interval{number or ''}")
        senders = [tick.beat for tick in sent]
        assert senders[senders.index(second.pid) :].count(first.pid) <= left
        assert {*senders} == {first.pid, second.pid}
        assert faults(sent, EVERY) == []
    assert not redis_client.exists("redbeat::lock")


def test_a_leader_that_dies_leaves_redbeats_lock_until_it_expires(
    beat: StartBeat, ticks: Ticks, environment: dict[str, str]
) -> None:
    settings = json.loads(environment["SETTINGS"])
    environment["SETTINGS"] = json.dumps(
        {**settings, "singleton_lock_old_locks": True, "redbeat_lock_timeout": 4}
    )
    first = beat(TICKS, scheduler="singleton_redbeat", name="first")
    ticks.wait_for(2)
    second = beat(TICKS, scheduler="singleton_redbeat", name="second")
    first.kill()
    second.wait_for_log("nothing is sent until it stops")
    ticks.wait_for(3)
    sent = ticks.of()
    assert {tick.beat for tick in sent} == {first.pid, second.pid}
    assert faults(sent, EVERY) == []
