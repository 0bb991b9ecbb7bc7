"""Several beats of one schedule: one ticks, whatever befalls it, and no tick comes twice.

The short versions of what `test_beat_long` does for minutes. Messages stay in their queue and show
when, and by which process, they were sent.
"""

from __future__ import annotations

import dbm
import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import redis

from celery_singleton_lock.cli.commands import row_of
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.inspection import HeldKey
from example_project.private_server import PrivateServer
from tests.harness.keys import EVERY_NAME
from tests.harness.log import LoggedEvent
from tests.harness.processes import Process
from tests.harness.ticks import Beats, Ticks, faults, longest_gap
from tests.harness.worker import CeleryBeat, CeleryWorker

APP = "tests.apps.ticks"

StartBeat = Callable[..., CeleryBeat]
StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]

# Seconds. A leader that a busy machine keeps from renewing for two thirds of the ttl is another
# leader's victim: nothing breaks, but a test that counts its leaders would.
TTL = 1.5
EVERY = 0.5


def settings(**names: object) -> str:
    return json.dumps({f"singleton_lock_beat_{name}": value for name, value in names.items()})


@pytest.fixture
def environment(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    environment.update(
        AMBUSH=str(tmp_path / "ambush"), EVERY=str(EVERY), SETTINGS=settings(ttl=TTL, poll=0.2)
    )
    return environment


@pytest.fixture
def beats(beat: StartBeat, load_app: LoadApp, environment: dict[str, str]) -> Beats:
    start = partial(beat, APP, scheduler="singleton")
    return Beats(start, load_app(APP).app, Path(environment["AMBUSH"]))


@pytest.mark.slow
def test_killed_leaders_are_replaced_and_no_tick_comes_twice(beats: Beats, ticks: Ticks) -> None:
    beats.add(3)
    ticks.wait_for(2)
    for _ in range(3):
        beats.kill(leader := beats.leader())
        killed = time.time()
        beats.leader(but=leader)
        ticks.wait_for(2)
        assert min(tick.sent_at for tick in ticks.of() if tick.sent_at > killed) < killed + TTL + 1
        beats.add()
    sent = ticks.of()
    assert len({tick.beat for tick in sent}) == 4
    assert faults(sent, EVERY) == []
    assert longest_gap(sent) < TTL + 1


@pytest.mark.slow
def test_plain_schedulers_tick_twice(beat: StartBeat, ticks: Ticks) -> None:
    for number in range(3):
        beat(APP, scheduler="celery.beat:PersistentScheduler", name=f"plain{number}")
    ticks.wait_for(12)
    assert faults(ticks.of(), EVERY)


@pytest.mark.slow
def test_a_leader_that_stood_still_and_wakes_stands_by(beats: Beats, ticks: Ticks) -> None:
    beats.add(2)
    ticks.wait_for(2)
    stopped = beats.leader()
    stopped.stop()
    beats.leader(but=stopped)
    ticks.wait_for(2)
    woken = beats.wake(stopped)
    ticks.wait_for(3)
    sent = ticks.of()
    # The tick that was authorized before the stop, at most.
    assert sum(tick.beat == stopped.pid and tick.sent_at > woken for tick in sent) <= 1
    assert faults(sent, EVERY) == []


@pytest.mark.slow
def test_a_leader_stopped_before_it_asks_is_refused_by_the_store(
    beats: Beats, ticks: Ticks
) -> None:
    # It has looked at its lease, and looks at it no more before it sends.
    beats.add(2)
    ticks.wait_for(2)
    beats.prepare(stopped := beats.leader(), "SIGSTOP", "authorize")
    leader = beats.leader(but=stopped)
    ticks.wait_for(2)
    woken = beats.wake(stopped)
    ticks.wait_for(3)
    assert {tick.beat for tick in ticks.of() if tick.sent_at > woken} == {leader.pid}
    assert faults(ticks.of(), EVERY) == []


@pytest.mark.slow
def test_a_leader_stopped_between_authorization_and_send_sends_late_and_once(
    beats: Beats, ticks: Ticks
) -> None:
    beats.add(2)
    ticks.wait_for(2)
    beats.prepare(stopped := beats.leader(), "SIGSTOP", "send")
    beats.leader(but=stopped)
    ticks.wait_for(2)
    woken = beats.wake(stopped)
    ticks.wait_for(3)
    sent = ticks.of()
    # It carries the tick that was authorized, which no other's tick has.
    [late] = [tick for tick in sent if tick.beat == stopped.pid and tick.sent_at >= woken]
    assert late.due is not None
    assert late.due < woken - EVERY
    assert faults(sent, EVERY) == []


@pytest.mark.slow
def test_a_clean_stop_hands_over_at_once_and_loses_nothing(
    beats: Beats, ticks: Ticks, environment: dict[str, str]
) -> None:
    # The ttl is out of the question: the next leader was let in.
    environment["SETTINGS"] = settings(ttl=60, poll=0.2)
    beats.add(2)
    ticks.wait_for(2)
    stopped = beats.leader()
    beats.resign(stopped)
    beats.leader()
    ticks.wait_for(3)
    sent = ticks.of()
    assert faults(sent, EVERY) == []
    assert longest_gap(sent) < 0.2 + EVERY + 0.5


def test_a_beat_whose_schedule_file_is_overwritten_takes_over_all_the_same(
    beats: Beats, ticks: Ticks, tmp_path: Path
) -> None:
    """As by another beat in its folder, if Python has no better dbm than `dbm.dumb`."""
    [leader] = beats.add(1)
    [standby] = beats.add(1, schedule=tmp_path / "schedule")
    ticks.wait_for(2)
    # From Python 3.13 on, it is SQLite: another beat overwrites nothing.
    if dbm.whichdb(tmp_path / "schedule") != "dbm.dumb":
        pytest.skip("the dbm of this Python isn't overwritten by another beat")
    for file in tmp_path.glob("schedule*"):
        file.write_bytes(b"")
    beats.kill(leader)
    standby.wait_for_event(EventName.LEADING)
    ticks.wait_for(3)
    standby.wait_for_log(r"WARNING.* singleton beat: the schedule file .* can't be read any more")
    assert standby.alive
    assert faults(ticks.of(), EVERY) == []


@pytest.mark.slow
def test_a_tick_that_is_being_sent_at_the_stop_is_sent(beats: Beats, ticks: Ticks) -> None:
    beats.add(1)
    ticks.wait_for(1)
    beats.prepare(stopped := beats.leader(), "SIGTERM", "send")
    stopped.wait_for_event(EventName.RESIGNED)
    assert stopped.wait() == 0
    authorized = stopped.log.count("Sending due task interval")
    assert len(ticks.of()) == authorized


@pytest.fixture
def lock_store(private_redis: PrivateServer, environment: dict[str, str]) -> PrivateServer:
    """The lock store is a server of its own."""
    environment["LOCK_URL"] = private_redis.url()
    return private_redis


def logged_at(event: LoggedEvent) -> float:
    """When a beat wrote that line, by its own clock: seconds since the epoch."""
    written = event.line.removeprefix("[").partition(": ")[0]
    return datetime.strptime(written, "%Y-%m-%d %H:%M:%S,%f").timestamp()


@pytest.mark.slow
@pytest.mark.parametrize("outage", ["killed", "paused"])
def test_a_beat_outlives_its_store_and_does_not_tick_meanwhile(
    lock_store: PrivateServer, beats: Beats, ticks: Ticks, outage: str
) -> None:
    [process] = beats.add(1)
    ticks.wait_for(2)
    lock_store.kill() if outage == "killed" else lock_store.pause()
    at = time.time()
    process.wait_for_event(EventName.LEASE_LOST, reason="unreachable")
    seen, back = len(process.lines), time.time()
    lock_store.start() if outage == "killed" else lock_store.resume()
    leading = logged_at(process.wait_for_event(EventName.LEADING, since=seen))
    ticks.wait_for(3)
    assert process.alive
    # What the store authorized as it went may be sent in the first moment. A paused store still has
    # the lease when it is resumed, and then answers the request that was under way: one tick.
    meanwhile = [tick for tick in ticks.of() if at + 0.1 < tick.sent_at < leading]
    assert [tick for tick in meanwhile if tick.sent_at < back] == []
    assert len(meanwhile) <= (outage == "paused")
    assert all(tick.due is not None and tick.due < back for tick in meanwhile)
    assert faults(ticks.of(), EVERY) == []
    # Reported when it changes, not at each tick. On a busy machine a renewal may time out later.
    changes = (EventName.STORE_UNREACHABLE, EventName.STORE_BACK)
    said = [event.name for event in process.events(*changes)]
    assert said[:2] == [*changes]
    assert all(one != following for one, following in pairwise(said))


@pytest.mark.slow
def test_a_short_outage_loses_no_leader_and_no_tick_twice(
    lock_store: PrivateServer, beats: Beats, ticks: Ticks, environment: dict[str, str]
) -> None:
    environment["SETTINGS"] = settings(ttl=30, poll=0.2)
    [process] = beats.add(1)
    ticks.wait_for(2)
    lock_store.kill()
    process.wait_for_event(EventName.STORE_UNREACHABLE)
    lock_store.start()
    ticks.wait_for(3)
    assert not process.events(EventName.LEASE_LOST)
    assert faults(ticks.of(), EVERY) == []


@pytest.mark.slow
def test_a_store_that_comes_back_empty_finds_its_leader_on_the_grid(
    lock_store: PrivateServer, beats: Beats, ticks: Ticks
) -> None:
    [process] = beats.add(1)
    ticks.wait_for(2)
    seen = len(process.lines)
    lock_store.restart(keep_data=False)
    process.wait_for_event(EventName.LEASE_LOST, EventName.RESIGNED, since=seen)
    process.wait_for_event(EventName.LEADING, since=seen)
    ticks.wait_for(3)
    assert faults(ticks.of(), EVERY) == []


@pytest.mark.slow
def test_a_beat_that_starts_before_its_store_waits_for_it(
    lock_store: PrivateServer, beat: StartBeat, ticks: Ticks
) -> None:
    lock_store.kill()
    process = beat(APP, scheduler="singleton")
    process.wait_for_event(EventName.STORE_UNREACHABLE)
    lock_store.start()
    process.wait_for_event(EventName.LEADING)
    ticks.wait_for(2)
    outage = (EventName.STORE_UNREACHABLE, EventName.LEADING)
    assert [event.name for event in process.events(*outage)][:2] == [*outage]


@pytest.mark.slow
def test_ls_shows_the_leader_and_nothing_else(
    beats: Beats, ticks: Ticks, environment: dict[str, str]
) -> None:
    beats.add(1)
    ticks.wait_for(1)
    records = list(beats.store.operators.scan(EVERY_NAME))
    assert [record.key for record in records] == [beats.key]
    row = row_of(HeldKey.of(records[0]))
    assert (row["task"], row["task_id"]) == ("celery.beat", "ticks")
    assert row["pid"] == beats.leader().pid
    command = [sys.executable, "-m", "celery", "-A", APP, "singleton", "show", "celery.beat:ticks"]
    cli = Process(command, env=dict(environment)).start()
    assert cli.wait() == 0
    cli.wait_for_log(rf"pid: {row['pid']}")


@pytest.mark.slow
def test_freeing_the_leaders_key_deposes_it(beats: Beats, ticks: Ticks) -> None:
    beats.add(1)
    [process] = beats.running
    ticks.wait_for(1)
    seen = len(process.lines)
    assert beats.store.operators.free(beats.key, None)
    process.wait_for_event(EventName.LEASE_LOST, EventName.RESIGNED, since=seen)
    process.wait_for_event(EventName.LEADING, since=seen)
    ticks.wait_for(2)
    assert faults(ticks.of(), EVERY) == []


@pytest.mark.slow
def test_no_more_keys_are_left_than_one_per_entry(
    beats: Beats, ticks: Ticks, redis_client: redis.Redis
) -> None:
    beats.add(1)
    ticks.wait_for(5)
    beats.running[0].end()
    [last, shards, shard] = sorted(redis_client.keys(EVERY_NAME), key=len, reverse=True)
    assert last.endswith(":last|celery.beat:ticks|interval")
    assert shards.endswith(":shards")
    assert shard.endswith(":shard")
    assert 399 * 86400 < redis_client.ttl(last) <= 400 * 86400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"singleton_lock_beat_ttl": 0.1}, r"singleton_lock_beat_ttl=0\.1: at least 0\.3 seconds"),
        ({"singleton_lock_beat_pol": 1}, "unknown setting 'singleton_lock_beat_pol'.*beat_poll"),
        ({"singleton_lock_url": "http://x"}, "singleton_lock_url has the scheme 'http'"),
    ],
)
def test_a_wrong_setting_ends_beat_at_its_start_with_one_line(
    beat: StartBeat, environment: dict[str, str], wrong: dict[str, object], said: str
) -> None:
    environment["SETTINGS"] = json.dumps(wrong)
    process = beat(APP, scheduler="singleton", wait=False)
    assert process.wait() == 1
    process.wait_for_log(rf"CRITICAL.*singleton: {said}")
    assert "Traceback" not in process.log


def test_a_store_that_may_evict_ends_beat_at_its_start(
    lock_store: PrivateServer, beat: StartBeat
) -> None:
    with redis.Redis.from_url(lock_store.url()) as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "volatile-ttl")
    process = beat(APP, scheduler="singleton", wait=False)
    assert process.wait() == 1
    process.wait_for_log("CRITICAL.*maxmemory-policy is volatile-ttl")


@pytest.mark.slow
def test_a_store_that_may_evict_elects_no_leader_though_it_was_away_at_the_start(
    environment: dict[str, str], beat: StartBeat
) -> None:
    arguments = ("--maxmemory", "50mb", "--maxmemory-policy", "volatile-ttl")
    with PrivateServer(arguments=arguments) as evicting:
        environment["LOCK_URL"] = evicting.url()
        evicting.kill()
        process = beat(APP, scheduler="singleton")
        process.wait_for_event(EventName.STORE_UNREACHABLE, action="nothing-sent")
        evicting.start()
        process.wait_for_log("ERROR.*no locks: .*maxmemory-policy is volatile-ttl")
        assert not process.events(EventName.LEADING)
        with redis.Redis.from_url(evicting.url()) as client:
            client.config_set("maxmemory-policy", "noeviction")
        process.wait_for_event(EventName.LEADING)


# Embedded in workers.


@pytest.fixture
def embedded(worker: StartWorker, tmp_path: Path) -> Iterator[Callable[[str], CeleryWorker]]:
    def start(name: str) -> CeleryWorker:
        # It consumes another queue: the ticks must stay in theirs.
        args = ["-B", "--scheduler", "singleton", "--schedule", str(tmp_path / name)]
        return worker(APP, name=name, concurrency=1, queues=["other"], args=args)

    return start


@pytest.mark.slow
def test_beats_embedded_in_workers_elect_a_leader_and_hand_over(
    embedded: Callable[[str], CeleryWorker],
    ticks: Ticks,
    environment: dict[str, str],
    load_app: LoadApp,
) -> None:
    environment["SETTINGS"] = settings(ttl=60, poll=0.2)
    first = embedded("first")
    first.wait_for_event(EventName.LEADING)
    second = embedded("second")
    second.wait_for_event(EventName.STANDING_BY)
    ticks.wait_for(2)
    first.terminate()
    second.wait_for_event(EventName.LEADING)
    ticks.wait_for(2)
    sent = ticks.of()
    assert faults(sent, EVERY) == []
    assert len({tick.beat for tick in sent}) == 2


def test_a_wrong_setting_ends_the_embedded_beat_with_one_line(
    embedded: Callable[[str], CeleryWorker], environment: dict[str, str]
) -> None:
    environment["SETTINGS"] = settings(ttl=0.1)
    process = embedded("first")
    process.wait_for_log(r"CRITICAL.*singleton: singleton_lock_beat_ttl=0\.1")
    assert "Traceback" not in process.log
