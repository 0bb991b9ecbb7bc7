"""When a run was due: the grid of an interval, and last runs from clocks that were ahead."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_singleton_lock.beat.due_time import believable, latest_point

START = datetime(2026, 3, 29, 0, 0, 0, 250_000, tzinfo=UTC)


def after(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("now", "point"), [(7, 7), (7.001, 7), (13.9, 7), (14, 14), (70_000, 70_000), (0, 0), (6.9, 0)]
)
def test_a_late_run_is_of_the_last_point_of_the_grid(now: float, point: float) -> None:
    assert latest_point(START, timedelta(seconds=7), after(now)) == after(point)


@given(st.integers(1, 10**9), st.lists(st.integers(1, 10**10), min_size=1, max_size=30))
def test_points_stay_on_the_first_grid_however_late_each_run_is(
    every_us: int, delays_us: list[int]
) -> None:
    every, last, now = timedelta(microseconds=every_us), START, START
    for delay in delays_us:
        now += timedelta(microseconds=delay)
        if last + every > now:
            continue  # not due
        point = latest_point(last, every, now)
        assert last < point <= now < point + every
        assert (point - START) % every == timedelta(0)
        last = point


def test_a_last_run_that_is_a_little_ahead_is_waited_for() -> None:
    assert believable(after(50), timedelta(seconds=1), START) == after(50)
    # A daily run of a clock two minutes ahead would be run again otherwise.
    assert believable(after(120), timedelta(days=1), START) == after(120)
    assert believable(after(-5), timedelta(seconds=1), START) == after(-5)


def test_a_last_run_far_ahead_is_pulled_back_onto_its_grid() -> None:
    far = after(86_400.5)
    pulled = believable(far, timedelta(seconds=7), START)
    assert START - timedelta(seconds=7) < pulled <= START
    assert (far - pulled) % timedelta(seconds=7) == timedelta(0)
    assert believable(far, timedelta(0), START) == START
