"""Real beats on every other store: the leader is killed, one takes over, no tick comes twice."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness.redlock_nodes import RedlockNodes
from tests.harness.ticks import Beats, Ticks, faults
from tests.harness.worker import CeleryBeat

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

APP = "tests.apps.ticks"
EVERY = 0.5

# Seconds. A leader that a busy machine keeps from renewing for half of it (ZooKeeper's share) makes
# way for another: nothing breaks, but a test that counts its leaders would.
TTL = 5.0

StartBeat = Callable[..., CeleryBeat]


@pytest.fixture(params=["sentinel", "cluster", "redlock", "etcd", "zookeeper"])
def lock_url(request: pytest.FixtureRequest) -> str:
    fixtures = {"sentinel": "sentinels", "cluster": "cluster", "redlock": "redlock_nodes"}
    servers = request.getfixturevalue(fixtures.get(request.param, request.param))
    url: str = servers.url() if callable(servers.url) else servers.url
    return url


@pytest.fixture
def redlock_nodes(sentinels: object) -> RedlockNodes:
    """Five masters; where there are sentinels, there is a program to start."""
    with RedlockNodes(5) as nodes:
        yield nodes


@pytest.fixture
def environment(environment: dict[str, str], lock_url: str, tmp_path: Path) -> dict[str, str]:
    settings = {
        "singleton_lock_beat_ttl": TTL,
        "singleton_lock_beat_poll": 0.2,
        "singleton_lock_prefix": f"t-{secrets.token_hex(4)}",  # the servers are shared
    }
    environment.update(
        LOCK_URL=lock_url,
        AMBUSH=str(tmp_path / "ambush"),
        EVERY=str(EVERY),
        SETTINGS=json.dumps(settings),
    )
    return environment


@pytest.fixture
def beats(
    beat: StartBeat, load_app: Callable[..., ModuleType], environment: dict[str, str]
) -> Beats:
    start = partial(beat, APP, scheduler="singleton")
    return Beats(start, load_app(APP).app, Path(environment["AMBUSH"]))


def test_a_killed_leader_is_replaced_by_one_and_no_tick_comes_twice(
    beats: Beats, ticks: Ticks
) -> None:
    beats.add(3)
    ticks.wait_for(3)
    beats.kill(leader := beats.leader())
    killed = time.time()
    successor = beats.leader(but=leader)
    ticks.wait_for(4)
    sent = ticks.of()
    after = {tick.beat for tick in sent if tick.sent_at > killed}
    assert after == {successor.pid}, "exactly one took over"
    assert len({tick.beat for tick in sent}) == 2
    assert faults(sent, EVERY) == []


def test_a_leader_that_stood_still_and_wakes_sends_nothing_twice(
    beats: Beats, ticks: Ticks
) -> None:
    beats.add(2)
    ticks.wait_for(2)
    stopped = beats.leader()
    stopped.stop()
    beats.leader(but=stopped)
    ticks.wait_for(2)
    beats.wake(stopped)
    ticks.wait_for(3)
    assert faults(ticks.of(), EVERY) == []


def test_a_leader_that_resigns_hands_over_at_once(beats: Beats, ticks: Ticks) -> None:
    beats.add(2)
    ticks.wait_for(2)
    stopped = beats.leader()
    beats.resign(stopped)
    beats.leader()
    ticks.wait_for(3)
    assert faults(ticks.of(), EVERY) == []


@pytest.mark.parametrize("lock_url", ["etcd://127.0.0.1:1/", "zk://127.0.0.1:1/"])
def test_a_ttl_that_the_store_cannot_keep_ends_beat_at_its_start(
    beat: StartBeat, environment: dict[str, str], lock_url: str
) -> None:
    environment["SETTINGS"] = json.dumps({"singleton_lock_beat_ttl": 0.5})
    process = beat(APP, scheduler="singleton", wait=False)
    assert process.wait() == 1
    process.wait_for_log(
        r"CRITICAL.*singleton: singleton_lock_beat_ttl=0\.5 s, but the store "
        r"\((etcd|zookeeper)\) keeps no lease for less than 1 s"
    )
    assert "Traceback" not in process.log
