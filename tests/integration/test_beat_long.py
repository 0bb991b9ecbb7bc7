"""Minutes of beats that are killed and stopped; the short versions are in `test_beat_leader`."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness.deliveries import wait_until
from tests.harness.ticks import Beats, Ticks, faults, longest_gap
from tests.harness.worker import CeleryBeat

APP = "tests.apps.ticks"

StartBeat = Callable[..., CeleryBeat]
LoadApp = Callable[..., ModuleType]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Seconds.
TTL = 3.0
MINUTE = 60.0


@pytest.fixture
def environment(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    environment.update(
        AMBUSH=str(tmp_path / "ambush"),
        EVERY="1",
        SETTINGS=json.dumps({"singleton_lock_beat_ttl": TTL, "singleton_lock_beat_poll": 0.5}),
    )
    return environment


@pytest.fixture
def start(beat: StartBeat) -> Callable[..., CeleryBeat]:
    return partial(beat, APP)


@pytest.fixture
def beats(
    start: Callable[..., CeleryBeat], load_app: LoadApp, environment: dict[str, str]
) -> Beats:
    elected = partial(start, scheduler="singleton")
    return Beats(elected, load_app(APP).app, Path(environment["AMBUSH"]))


def wait_until_clock(moment: float) -> None:
    """Wait until the wall clock, which schedules go by, is at ``moment``."""
    wait_until(lambda: time.time() >= moment, "that moment has come", timeout=2 * MINUTE)


def test_two_minutes_of_leaders_killed_every_ten_seconds(
    beats: Beats, ticks: Ticks, record_property: Callable[[str, object], None]
) -> None:
    beats.add(3)
    ticks.wait_for(1)
    kills = 10
    for _ in range(kills):
        wait_until_clock(time.time() + 10)
        ticks.wait_for(1)  # so that what is measured is the gap that the kill made
        beats.kill(beats.leader())
        beats.add()
    ticks.wait_for(3)
    sent = ticks.of()
    record_property("kills", kills)
    record_property("ticks", len(sent))
    record_property("longest gap", round(longest_gap(sent), 3))
    print(f"{kills} kills, {len(sent)} ticks, longest gap {longest_gap(sent):.3f} s")
    assert faults(sent, 1) == []
    assert longest_gap(sent) < TTL + 1


def test_the_same_with_plain_schedulers_ticks_twice(
    start: Callable[..., CeleryBeat], ticks: Ticks
) -> None:
    plain = partial(start, scheduler="celery.beat:PersistentScheduler")
    running = [plain(name=f"plain{number}") for number in range(3)]
    for number in range(3):
        ticks.wait_for(4)
        running.pop(0).kill()
        running.append(plain(name=f"plain{3 + number}"))
    assert faults(ticks.of(), 1)


def test_leaders_stopped_for_longer_than_their_ttl_never_send_again(
    beats: Beats, ticks: Ticks
) -> None:
    beats.add(3)
    ticks.wait_for(1)
    for _ in range(8):
        stopped = beats.leader()
        stopped.stop()
        beats.leader(but=stopped)
        ticks.wait_for(2)
        beats.wake(stopped)
        ticks.wait_for(2)
    assert faults(ticks.of(), 1) == []


def test_a_crontab_and_a_seven_second_interval_keep_their_grid(
    beats: Beats, ticks: Ticks, environment: dict[str, str]
) -> None:
    environment.update(EVERY="7", CRONTAB="yes")
    beats.add(3)
    ticks.wait_for(1)
    begun = time.time()
    minutes = [(math.floor(begun / MINUTE) + number) * MINUTE for number in (1, 2, 3)]
    for minute in minutes:
        # The lease lasts over the full minute, so that one falls into the gap. The other beats of
        # this host would free the lease of a dead process at once, so the leader is stopped first.
        wait_until_clock(minute - 1)
        (stopped := beats.leader()).stop()
        beats.leader(but=stopped)
        beats.kill(stopped)
        beats.add()
    ticks.wait_for(1)
    sent = ticks.of("crontab")
    runs = Counter(math.floor(tick.sent_at / MINUTE) * MINUTE for tick in sent)
    assert set(runs.values()) == {1}
    assert set(minutes) <= set(runs)
    # Each of them fell into a gap, and was caught up with when that ended.
    late = [tick.sent_at % MINUTE for tick in sent if tick.sent_at >= minutes[0]]
    assert 0.5 < min(late) <= max(late) < TTL + 1
    intervals = ticks.of()
    assert faults(intervals, 7) == []
    assert longest_gap(intervals) < 7 + TTL + 1
