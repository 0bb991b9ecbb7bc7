"""The schedulers of two beats, ticked by hand on a manual clock: grid, gaps, and what is sent."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.beat import PersistentScheduler, ScheduleEntry
from celery.schedules import crontab, schedule

from celery_singleton_lock import SettingsError, SingletonTask
from celery_singleton_lock.beat import SCHEDULED_AT_HEADER, LeaderScheduler
from celery_singleton_lock.beat.due_time import tick_of
from celery_singleton_lock.beat.scheduler import end_without
from celery_singleton_lock.core import native_threads, observers
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.testing import ManualClock
from tests.harness.keys import EVERY_NAME

# 2023-11-14 22:13:20 UTC, a Tuesday.
WALL = 1_700_000_000.0
TTL = 15.0

clock = ManualClock()


def now() -> datetime:
    """The schedules' clock: a module's function, because entries are pickled."""
    return datetime.fromtimestamp(clock.wall(), UTC)


def fail() -> None:
    raise ConnectionError("no broker")


def every(seconds: float) -> Any:
    return schedule(seconds, nowfun=now)


class _Recorded(LeaderScheduler):
    """Notes what it sends."""

    def send_task(self, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        # Seconds since the test began.
        due = datetime.fromisoformat(options["headers"][SCHEDULED_AT_HEADER]).timestamp()
        bench: Bench = self.app.bench
        bench.sent.append((name, round(clock.wall() - WALL, 3), round(due - WALL, 3)))
        if bench.broken_publisher:
            raise ConnectionError("no broker")


class Bench:
    """A schedule and its beats, each with an app of its own as in a process of its own."""

    def __init__(self, directory: Path, entries: dict[str, Any]) -> None:
        self.directory = directory
        self.schedule = {name: {"task": name, "schedule": each} for name, each in entries.items()}
        self.store = MemoryStore(clock)
        #: Name, when it was sent, when it was due; in seconds since the test began.
        self.sent: list[tuple[str, float, float]] = []
        self.broken_publisher = False
        self.count = 0

    def app(self) -> Any:
        app: Any = Celery("bench", broker="memory://", set_as_current=False)
        app.conf.beat_schedule = self.schedule
        app.conf.result_expires = None  # else Celery adds an entry of its own
        app.bench = self
        Runtime.install(app, Runtime(app, store=self.store, clock=clock))
        return app

    def beat(self) -> _Recorded:
        """A new process with a new schedule file."""
        return _Recorded(app=self.app(), schedule_filename=self.file(), max_interval=300)

    def file(self) -> str:
        self.count += 1
        return str(self.directory / f"schedule{self.count}")

    def run(self, seconds: float, *beats: _Recorded) -> None:
        """Run ``beats`` as Celery's service does; the others stand still or are dead."""
        end = clock.now() + seconds
        wakes = dict.fromkeys(beats, clock.now())
        while clock.now() < end:
            for each in beats:
                if clock.now() >= wakes[each]:
                    wait = each.tick()
                    # Celery wakes 10 ms too early, and then asks until these are over.
                    clock.advance(0.001)
                    wakes[each] = clock.now() + max(wait, 0)
                Runtime.of(each.app).locker.heartbeat.sweep()
                # As the thread of its election does.
                each._election.resign_if_stalled(each._election.term)
            next_time = min(*wakes.values(), clock.now() + TTL / 10, end)
            clock.advance(max(next_time - clock.now(), 0.0))
        observers.flush()


@pytest.fixture
def benches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    global clock
    clock = ManualClock(wall=WALL)
    monkeypatch.setattr(native_threads, "start_new_thread", lambda function, name: None)
    monkeypatch.setattr("celery.app.base.Celery.now", lambda self: now())
    return lambda **entries: Bench(tmp_path, entries)


def test_an_interval_comes_on_its_grid(benches: Any) -> None:
    bench = benches(seven=every(7))
    bench.run(30, bench.beat())
    assert [due for _, _, due in bench.sent] == [7, 14, 21, 28]
    assert all(0 <= at - due < 0.1 for _, at, due in bench.sent)


def test_a_tick_that_is_late_by_a_takeover_is_followed_by_one_on_the_grid(benches: Any) -> None:
    bench = benches(seven=every(7))
    first = bench.beat()
    bench.run(8, first)
    # It renewed at 5 s or so, and its ttl is 15.
    bench.run(30, bench.beat())
    ticks = [due for _, _, due in bench.sent]
    assert ticks == [7, 14, 21, 28, 35]
    late = {due: at - due for _, at, due in bench.sent}
    assert 5 < late[14] < 7
    assert max(late[21], late[28], late[35]) < 0.1


def test_ticks_missed_in_a_gap_make_one_run(benches: Any) -> None:
    bench = benches(one=every(1))
    bench.run(5.5, bench.beat())
    before = len(bench.sent)
    bench.run(TTL + 1, bench.beat())
    ticks = [due for _, _, due in bench.sent]
    assert ticks == sorted(set(ticks))
    assert ticks[:before] == [1, 2, 3, 4, 5]
    # One for the gap, then one a second.
    assert ticks[before] > 6
    assert [later - ticks[before] for later in ticks[before:]] == list(range(len(ticks) - before))


def test_a_crontab_minute_that_fell_into_the_gap_runs_once(benches: Any) -> None:
    bench = benches(cron=crontab(nowfun=now))  # 22:14 is at 40 s
    bench.run(39, bench.beat())
    assert bench.sent == []
    second = bench.beat()
    bench.run(140, second)
    assert len(bench.sent) == 3
    at = [at for _, at, _ in bench.sent]
    assert 40 < at[0] < 39 + TTL + 1
    assert (at[1], at[2]) == pytest.approx((100, 160), abs=0.1)


def test_a_crontab_that_ran_just_before_the_takeover_does_not_run_again(benches: Any) -> None:
    bench = benches(cron=crontab(nowfun=now))
    first = bench.beat()
    bench.run(40.5, first)
    assert len(bench.sent) == 1
    # Its own schedule file begins before that minute.
    bench.run(59, bench.beat())
    assert len(bench.sent) == 1


def test_a_schedule_that_never_ran_keeps_its_grid_over_restarts(benches: Any) -> None:
    # In a container the schedule file is gone with each deploy, and a plain beat begins again.
    hours = 3600.0
    bench = benches(rare=every(4 * hours))
    for _ in range(5):
        beat = bench.beat()
        bench.run(hours, beat)
        beat.close()
    assert [due for _, _, due in bench.sent] == [4 * hours]


def test_a_leader_that_has_nothing_to_send_for_hours_leads_on(benches: Any) -> None:
    hours = 3600.0
    bench = benches(rare=every(4 * hours))
    first, second = bench.beat(), bench.beat()
    bench.run(4 * hours + 1, first, second)
    assert [due for _, _, due in bench.sent] == [4 * hours]
    assert (first._election.term, second._election.term) == (1, 0)


def test_a_leader_whose_broker_is_away_loses_no_tick_and_resigns(
    benches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = benches(hourly=every(3600))
    first, second = bench.beat(), bench.beat()
    bench.run(3590, first, second)
    # Nothing is due, and it notices all the same.
    monkeypatch.setattr(first._broker, "_ask", fail)
    bench.run(20, first)
    assert not first._election.leading
    bench.run(60, first, second)
    assert second._election.leading
    assert [due for _, _, due in bench.sent] == [3600]


def test_a_closed_beat_ends_though_the_exception_of_its_signal_was_lost(benches: Any) -> None:
    bench = benches(one=every(1))
    beat = bench.beat()
    bench.run(1.5, beat)
    beat.close()
    with pytest.raises(SystemExit):
        beat.tick()


def test_a_plain_scheduler_without_its_file_begins_again(benches: Any) -> None:
    bench = benches(daily=every(86400))
    for _ in range(5):
        plain = PersistentScheduler(bench.app(), schedule_filename=bench.file())
        clock.advance(6 * 3600)
        assert plain.tick() > 0
        plain.close()


def test_a_standby_does_not_tick_and_one_that_lost_its_lead_neither(benches: Any) -> None:
    bench = benches(one=every(1))
    first, second = bench.beat(), bench.beat()
    bench.run(3.5, first, second)
    bench.run(TTL + 2, second)  # the first is stopped
    count = len(bench.sent)
    assert first.tick() > 0
    assert len(bench.sent) == count
    bench.run(3, first, second)
    ticks = [due for _, _, due in bench.sent]
    assert ticks == sorted(set(ticks))


def test_a_leader_whose_store_is_away_does_not_tick_and_lives(
    benches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = benches(one=every(1))
    beat = bench.beat()
    bench.run(3.5, beat)

    def away(*args: Any, **kwargs: Any) -> Any:
        raise StoreUnavailable("connection refused")

    with monkeypatch.context() as outage:
        for name in ("acquire", "renew", "release"):
            outage.setattr(bench.store.leases, name, away)
        for name in ("authorize", "last_runs"):
            outage.setattr(bench.store.schedule, name, away)
        bench.run(20, beat)
    assert [due for _, _, due in bench.sent] == [1, 2, 3]
    bench.run(3, beat)
    assert [due for _, _, due in bench.sent][3:] == [24, 25, 26]


def test_a_refused_leader_that_is_elected_again_ticks_on(benches: Any) -> None:
    bench = benches(one=every(1), two=every(2))
    beat = bench.beat()
    bench.run(3.5, beat)
    # Freed by an operator; the heartbeat has not noticed yet.
    [record] = bench.store.operators.scan(EVERY_NAME)
    bench.store.operators.free(record.key, None)
    clock.advance(1)
    count = len(bench.sent)
    assert beat.tick() > 0
    assert len(bench.sent) == count
    bench.run(4, beat)
    assert [due for name, _, due in bench.sent if name == "one"] == [1, 2, 3, 5, 6, 7, 8]
    assert [due for name, _, due in bench.sent if name == "two"] == [2, 4, 6, 8]


@pytest.mark.parametrize("singleton", [True, False])
def test_an_entry_of_a_plain_task_that_says_unique_is_reported_once(
    benches: Any, caplog: pytest.LogCaptureFixture, singleton: bool
) -> None:
    bench = benches(one=every(1))
    bench.schedule["one"]["options"] = {"singleton": {"unique": "until_done"}}
    beat = bench.beat()

    @beat.app.task(name="one", base=SingletonTask if singleton else None, shared=False)
    def one() -> None: ...

    bench.run(3.5, beat)
    assert caplog.text.count("'one' is no singleton task") == (0 if singleton else 1)


def test_a_run_that_cannot_be_sent_is_lost_and_the_next_is_on_the_grid(benches: Any) -> None:
    # As with Celery's own: it is not known whether the message left.
    bench = benches(one=every(1))
    beat = bench.beat()
    bench.run(1.5, beat)
    bench.broken_publisher = True
    bench.run(1, beat)
    bench.broken_publisher = False
    bench.run(1, beat)
    assert [due for _, _, due in bench.sent] == [1, 2, 3]


def test_the_tick_in_the_header_does_not_change_the_schedule(benches: Any) -> None:
    bench = benches(one=every(1))
    bench.schedule["one"]["options"] = {"headers": {"mine": 1}}
    beat = bench.beat()
    bench.run(3.5, beat)
    assert len(bench.sent) == 3
    assert beat.schedule["one"].options == {"headers": {"mine": 1}}
    assert beat.schedules_equal(beat.old_schedulers, beat.schedule)


def test_a_last_run_a_little_ahead_is_waited_for(benches: Any) -> None:
    bench = benches(seven=every(7))
    bench.run(8, bench.beat())
    clock._wall -= 5  # the next host's clock is behind
    bench.run(40, bench.beat())
    ticks = [due for _, _, due in bench.sent]
    assert ticks[0] == 7
    assert ticks == sorted(set(ticks))
    assert all((due - 7) % 7 == 0 for due in ticks)


@pytest.mark.parametrize("period", ["interval", "crontab"])
def test_a_last_run_far_ahead_does_not_silence_its_entry(
    benches: Any, caplog: pytest.LogCaptureFixture, period: str
) -> None:
    bench = benches(e=every(7) if period == "interval" else crontab(nowfun=now))
    clock._wall += 86_403.5  # a clock that is a day ahead
    first = bench.beat()
    bench.run(70, first)
    ahead = len(bench.sent)
    assert ahead
    first.close()
    clock._wall -= 86_403.5
    with caplog.at_level(logging.WARNING):
        bench.run(130, bench.beat())
    assert "a clock was wrong" in caplog.text
    assert len(bench.sent) - ahead >= (130 // 7 - 1 if period == "interval" else 2)
    if period == "interval":
        assert len({round(due % 7, 3) for _, _, due in bench.sent}) == 1


@pytest.mark.parametrize("ahead", [3600, 86_403.5])
def test_a_clock_that_is_set_back_silences_no_entry_of_a_leader(
    benches: Any, caplog: pytest.LogCaptureFixture, ahead: float
) -> None:
    schedules = {"seven": every(7), "long": every(120), "minute": crontab(nowfun=now)}
    bench = benches(**schedules)
    beat = bench.beat()
    clock._wall += ahead
    bench.run(300, beat)
    assert {name for name, _, _ in bench.sent} == schedules.keys()
    bench.sent.clear()
    clock._wall -= ahead
    with caplog.at_level(logging.WARNING):
        bench.run(300, beat)
    assert "the clock was set back" in caplog.text
    counts = Counter(name for name, _, _ in bench.sent)
    assert 41 <= counts["seven"] <= 43
    assert 2 <= counts["long"] <= 3
    assert 4 <= counts["minute"] <= 6
    for name in ("seven", "long"):
        period = 7 if name == "seven" else 120
        ticks = [due for task, _, due in bench.sent if task == name]
        assert [later - tick for tick, later in pairwise(ticks)] == [period] * (len(ticks) - 1)


def test_small_steps_back_of_the_clock_add_up(benches: Any) -> None:
    bench = benches(seven=every(7), long=every(120))
    beat = bench.beat()
    clock._wall += 3600
    bench.run(300, beat)
    bench.sent.clear()
    for _ in range(72):
        clock._wall -= 50
        bench.run(0.5, beat)
    bench.run(300, beat)
    counts = Counter(name for name, _, _ in bench.sent)
    assert counts["seven"] >= 40
    assert counts["long"] >= 2


def test_a_schedule_file_that_a_wrong_clock_wrote_silences_no_entry(
    benches: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bench = benches(seven=every(7))
    clock._wall += 86_403.5
    first = bench.beat()
    bench.run(30, first)
    first.close()
    clock._wall -= 86_403.5
    bench.store = MemoryStore(clock)  # it came back empty
    bench.sent.clear()
    bench.count -= 1  # the same file
    with caplog.at_level(logging.WARNING):
        bench.run(30, bench.beat())
    assert "a clock was wrong" in caplog.text
    assert len(bench.sent) == 5


@pytest.mark.parametrize("make", ["relative", "subclass"])
def test_schedules_without_a_grid_are_left_to_themselves(benches: Any, make: str) -> None:
    class Own(schedule):
        pass

    each: Any = schedule(2, relative=True, nowfun=now) if make == "relative" else Own(2, nowfun=now)
    bench = benches(e=each)
    beat = bench.beat() if make == "relative" else None
    if beat is None:
        # A class of a function can't be pickled: without a file.
        from celery.beat import Scheduler

        from celery_singleton_lock.beat import LeaderMixin

        class InMemory(LeaderMixin, Scheduler):
            send_task = _Recorded.send_task

        beat = InMemory(app=bench.app())  # type: ignore[assignment]
        for name, entry in bench.schedule.items():
            beat.add(name=name, **entry)
    bench.run(9, beat)
    ticks = [due for _, _, due in bench.sent]
    assert len(ticks) == 4
    assert ticks == sorted(set(ticks))


def test_a_wrong_setting_is_raised_to_a_program_that_embeds_a_beat(tmp_path: Path) -> None:
    app = Celery("wrong", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_beat_ttl = 0
    with pytest.raises(SettingsError, match="singleton_lock_beat_ttl=0: at least"):
        LeaderScheduler(app=app, schedule_filename=str(tmp_path / "schedule"))
    # The banner's, which is made before there is a log, leaves it to the other.
    assert LeaderScheduler(app=app, lazy=True, schedule_filename="s").info == "    . db -> s"


def test_what_is_sent_names_its_tick_as_the_task_reads_it(benches: Any) -> None:
    bench = benches(seven=every(7))
    bench.run(8, bench.beat())
    assert bench.sent[0][2] == 7
    assert json.loads(json.dumps(SCHEDULED_AT_HEADER)) == "singleton_scheduled_at"


@pytest.mark.parametrize("minute", [0, 10, 29, 31, 59])
def test_a_beat_that_comes_back_in_the_hour_that_comes_twice_ticks_once(minute: int) -> None:
    """Celery's own sends until the minute comes again, as fast as it can."""
    zone, now = ZoneInfo("America/New_York"), datetime(2026, 11, 1, 6, minute, tzinfo=UTC)
    app = Celery("fall", set_as_current=False)
    app.conf.timezone = str(zone)
    nightly = crontab(minute="30", hour="1", nowfun=lambda: now.astimezone(zone), app=app)
    last = datetime(2026, 10, 31, 1, 30, tzinfo=zone)
    entry = ScheduleEntry(name="nightly", schedule=nightly, last_run_at=last, app=app)
    ticks = []
    while now < datetime(2026, 11, 2, 12, tzinfo=UTC):
        if entry.is_due()[0]:
            ticks.append(tick_of(entry))
            entry.last_run_at = ticks[-1].astimezone(zone)
        now += timedelta(seconds=20)
    assert [tick.astimezone(zone).strftime("%d %H:%M") for tick in ticks] == [
        "01 01:30",
        "02 01:30",
    ]
    app.close()


@pytest.mark.parametrize(
    ("extra", "package"), [("django", "django_celery_beat"), ("redbeat", "redbeat")]
)
def test_a_scheduler_without_its_package_says_in_one_line_what_to_install(
    extra: str, package: str
) -> None:
    without = f"import sys; sys.modules[{package!r}] = None; from celery.bin.celery import main; "
    program = f"{without}sys.argv[1:] = ['beat', '--scheduler', 'singleton_{extra}']; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done
    assert f"pip install 'celery-singleton-lock[{extra}]'" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_scheduler_does_not_hide_what_else_is_missing() -> None:
    missing = ModuleNotFoundError("No module named 'proj'", name="proj")
    with pytest.raises(ModuleNotFoundError, match="proj"):
        end_without("django", "django_celery_beat", missing)
