"""The clocks of the operating system."""

from __future__ import annotations

import time

import pytest

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.testing import ManualClock


def test_the_wall_clock_is_the_one_that_a_test_has_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SystemClock()
    monkeypatch.setattr(time, "time", lambda: 7.0)
    assert clock.wall() == 7.0


def test_leases_do_not_follow_a_replaced_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    before = SystemClock().now()
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    assert SystemClock().now() >= before


def test_leases_do_not_follow_the_clock_that_an_operator_sets() -> None:
    # It counts from the start of the machine. The other one counts from 1970.
    assert abs(SystemClock().now() - time.time()) > 86_400


def test_a_wait_on_the_manual_clock_ends_whatever_rounding_leaves_of_it() -> None:
    clock = ManualClock()
    until = clock.now() + 0.05
    clock.sleep(0.05)
    assert clock.now() >= until
    before = clock.now()
    clock.sleep(1e-17)  # 0.05 minus the difference of the two times
    assert clock.now() > before
