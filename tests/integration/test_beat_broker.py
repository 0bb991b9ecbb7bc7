"""Beats that are cut off from their broker: leadership goes to one that can send, and comes back.

The lock store is reached directly; each beat may reach its broker through a proxy of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import psutil
import pytest
import redis

from celery_singleton_lock.core.events import EventName
from example_project.private_server import PrivateServer
from tests.chaos.proxy import Kind, Mode, Proxy
from tests.harness.deliveries import wait_until
from tests.harness.ticks import Beats, RabbitTicks, Ticks, faults, longest_gap
from tests.harness.worker import CeleryBeat

APP = "tests.apps.ticks"

StartBeat = Callable[..., CeleryBeat]
LoadApp = Callable[..., ModuleType]

# Seconds.
TTL, POLL, EVERY = 3.0, 0.2, 0.5

# Each starts several beats, and waits until one of them has been cut off for the ttl.
pytestmark = pytest.mark.slow


@pytest.fixture(params=["redis", "amqp"])
def broker_url(request: pytest.FixtureRequest, redis_url: str) -> str:
    """The URL of each broker, in turn."""
    return redis_url if request.param == "redis" else request.getfixturevalue("rabbit_url")


@pytest.fixture
def environment(
    environment: dict[str, str], broker_url: str, redis_url: str, tmp_path: Path
) -> dict[str, str]:
    settings = {"singleton_lock_beat_ttl": TTL, "singleton_lock_beat_poll": POLL}
    environment.update(
        AMBUSH=str(tmp_path / "ambush"),
        EVERY=str(EVERY),
        SETTINGS=json.dumps(settings),
        BROKER_URL=broker_url,
        LOCK_URL=redis_url,
    )
    return environment


@pytest.fixture
def ticks(broker_url: str, redis_client: redis.Redis) -> Iterator[Ticks]:
    if broker_url.startswith("redis"):
        yield Ticks(redis_client)
    else:
        with RabbitTicks(broker_url) as ticks:
            yield ticks


@pytest.fixture
def beats(beat: StartBeat, load_app: LoadApp, environment: dict[str, str]) -> Beats:
    start = partial(beat, APP, scheduler="singleton")
    return Beats(start, load_app(APP).app, Path(environment["AMBUSH"]))


Link = Callable[[], tuple[Proxy, dict[str, str]]]

of_redis = pytest.mark.parametrize("broker_url", ["redis"], indirect=True)


@pytest.fixture
def link(broker_url: str) -> Iterator[Link]:
    """A new proxy to the broker, and the environment of a beat that uses it."""
    port = str(urlsplit(broker_url).port)
    with ExitStack() as proxies:

        def add() -> tuple[Proxy, dict[str, str]]:
            proxy = proxies.enter_context(Proxy(int(port)))
            return proxy, {"BROKER_URL": broker_url.replace(f":{port}/", f":{proxy.port}/")}

        yield add


@pytest.mark.parametrize("outage", [Kind.STALL, Kind.NO_REPLIES, Kind.REFUSE])
def test_a_leader_cut_off_from_its_broker_resigns_and_stands_again_when_it_answers(
    beats: Beats, ticks: Ticks, link: Link, outage: Kind
) -> None:
    proxy, through = link()
    [cut_off] = beats.add(env=through)
    [standby] = beats.add()
    ticks.wait_for(2)
    assert beats.leader() is cut_off
    proxy.set(Mode(kind=outage))
    cut_off.wait_for_event(EventName.RESIGNED, why="it could send nothing")
    assert beats.leader() is standby
    ticks.wait_for(3)
    seen = len(cut_off.lines)
    proxy.set(Mode())
    cut_off.wait_for_event(EventName.BROKER_BACK, since=seen)
    cut_off.wait_for_event(EventName.STANDING_BY, since=seen)
    beats.kill(standby)
    assert beats.leader() is cut_off
    ticks.wait_for(3)
    sent = ticks.of()
    assert faults(sent, EVERY) == []
    assert longest_gap(sent) < TTL + 3
    assert len(cut_off.events(EventName.BROKER_UNREACHABLE)) == 1


@of_redis
def test_a_leader_whose_broker_refuses_its_messages_resigns(
    beats: Beats, ticks: Ticks, link: Link, broker_url: str
) -> None:
    # As a server that was demoted does: it answers.
    with PrivateServer(arguments=("--min-replicas-to-write", "1")) as refusing:
        proxy, through = link()
        [refused] = beats.add(env=through)
        [standby] = beats.add()
        ticks.wait_for(2)
        assert beats.leader() is refused
        proxy.lead_to(refusing.port)
        refused.wait_for_event(EventName.RESIGNED, why="it could send nothing")
        assert beats.leader() is standby
        ticks.wait_for(3)
        assert "Not enough good replicas" in refused.log
        proxy.lead_to(int(urlsplit(broker_url).port or 0))
        beats.kill(standby)
        assert beats.leader() is refused
        ticks.wait_for(3)
    assert faults(ticks.of(), EVERY) == []
    assert longest_gap(ticks.of()) < TTL + 3


@of_redis
@pytest.mark.parametrize("outage", [Kind.NO_REPLIES, Kind.REFUSE])
def test_no_beat_leads_while_all_are_cut_off_and_each_says_so_once(
    beats: Beats, ticks: Ticks, link: Link, outage: Kind
) -> None:
    links = [link() for _ in range(2)]
    for _, through in links:
        beats.add(env=through)
    ticks.wait_for(2)
    for proxy, _ in links:
        proxy.set(Mode(kind=outage))
    for process in beats.running:
        process.wait_for_event(EventName.BROKER_UNREACHABLE)
    leader, standby = beats.running
    leader.wait_for_event(EventName.RESIGNED)
    wait_until(lambda: beats.record is None, "no beat leads")
    for proxy, _ in links:
        proxy.set(Mode())
    beats.leader()
    ticks.wait_for(3)
    assert faults(ticks.of(), EVERY) == []
    outage = standby.events(EventName.LEADING, EventName.BROKER_BACK)
    assert [event.name for event in outage][:1] != [EventName.LEADING]
    for process in beats.running:
        assert len(process.events(EventName.BROKER_UNREACHABLE)) == 1


def test_a_slow_broker_changes_no_leader(beats: Beats, ticks: Ticks, link: Link) -> None:
    links = [link() for _ in range(2)]
    for _, through in links:
        beats.add(env=through)
    ticks.wait_for(2)
    for proxy, _ in links:
        # A round trip takes about a sixth of the ttl.
        proxy.set(Mode(kind=Kind.SLOW, delay=TTL / 12))
    ticks.wait_for(12)
    assert faults(ticks.of(), EVERY) == []
    assert [len(process.events(EventName.LEADING)) for process in beats.running] == [1, 0]
    assert not any(process.events(EventName.RESIGNED) for process in beats.running)


@of_redis
def test_a_leader_whose_send_blocks_is_replaced_and_its_tick_comes_late_and_once(
    beats: Beats, ticks: Ticks, environment: dict[str, str]
) -> None:
    # The tick is authorized, and a receiver of before_task_publish waits for another server.
    beats.add(2)
    ticks.wait_for(2)
    beats.prepare(blocked := beats.leader(), "BLOCK", "send")
    blocked.wait_for_log("blocked$")
    assert beats.leader(but=blocked).wait_for_event(EventName.LEADING)
    ticks.wait_for(3)
    before = len([tick for tick in ticks.of() if tick.beat == blocked.pid])
    Path(environment["AMBUSH"]).unlink()
    blocked.wait_for_event(EventName.STANDING_BY)
    sent = ticks.of()
    assert len([tick for tick in sent if tick.beat == blocked.pid]) == before + 1
    assert faults(sent, EVERY) == []
    assert longest_gap(sent) < TTL + 3


@of_redis
def test_a_slow_observer_of_the_election_delays_no_tick(
    beats: Beats, ticks: Ticks, environment: dict[str, str]
) -> None:
    environment["SLOW_OBSERVER"] = "60"
    [process] = beats.add(decided=False)
    ticks.wait_for(2 * round(TTL / EVERY))
    assert faults(ticks.of(), EVERY) == []
    assert beats.leader() is process
    assert not process.events(EventName.RESIGNED)


@of_redis
def test_a_tick_whose_reply_is_lost_is_not_sent_again(
    beats: Beats, ticks: Ticks, link: Link
) -> None:
    proxy, through = link()
    [process] = beats.add(env=through)
    ticks.wait_for(2)
    beats.prepare(process, "SIGSTOP", "send")
    stopped = psutil.STATUS_STOPPED
    wait_until(lambda: psutil.Process(process.pid).status() == stopped, "it stands still")
    count = len(ticks.of())
    proxy.set(Mode(kind=Kind.LOSE_REPLIES, probability=1.0))
    process.cont()
    wait_until(lambda: len(ticks.of()) > count, "the broker has the tick")
    proxy.set(Mode())
    ticks.wait_for(3)
    assert faults(ticks.of(), EVERY) == []


def test_a_connection_that_broke_since_the_last_tick_costs_no_tick(
    beats: Beats, ticks: Ticks, link: Link
) -> None:
    proxy, through = link()
    [process] = beats.add(env=through)
    ticks.wait_for(2)
    proxy.cut_connections()
    ticks.wait_for(4)
    due = [tick.due for tick in ticks.of() if tick.due is not None]
    assert [later - earlier for earlier, later in pairwise(due)] == pytest.approx(
        [EVERY] * (len(due) - 1)
    )
    assert not process.events(EventName.BROKER_UNREACHABLE)
