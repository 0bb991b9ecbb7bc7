"""From the outcome of a body to what becomes of its key."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry

from celery_singleton_lock import LeaseLost
from celery_singleton_lock.celery_compat import fail_as_body
from celery_singleton_lock.core.lease import Holder, Kind, Lease, Token
from celery_singleton_lock.core.store_requests import Release
from celery_singleton_lock.message.times import seconds_until
from celery_singleton_lock.task.ending import is_done
from celery_singleton_lock.testing import ManualClock

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def lease(clock: ManualClock) -> Lease:
    return Lease(
        key="k",
        token=Token("t", 0, 2, "n"),
        ttl=60,
        holder=Holder(),
        valid_until=clock.now() + 60,
        acquired_at=clock.now(),
        clock=clock,
    )


@pytest.mark.parametrize(
    ("state", "retval", "options", "done"),
    [
        ("SUCCESS", 1, {}, True),
        ("FAILURE", ValueError(), {}, True),
        ("RETRY", Retry(), {}, True),
        ("IGNORED", Ignore(), {}, True),
        (None, None, {}, False),
        ("REJECTED", Reject(requeue=True), {}, False),
        ("REJECTED", Reject(requeue=False), {}, False),
        ("FAILURE", ValueError(), {"acks_late": True}, True),
        ("FAILURE", ValueError(), {"acks_late": True, "acks_on_failure_or_timeout": False}, False),
        ("FAILURE", ValueError(), {"acks_on_failure_or_timeout": False}, True),
        ("SUCCESS", 1, {"acks_late": True, "acks_on_failure_or_timeout": False}, True),
    ],
    ids=repr,
)
def test_an_attempt_is_done_when_its_message_will_not_come_again(
    state: str | None, retval: Any, options: dict[str, Any], done: bool
) -> None:
    task = SimpleNamespace(acks_late=False, acks_on_failure_or_timeout=True)
    task.__dict__.update(options)
    assert is_done(task, state, retval) is done


def test_a_key_is_freed_when_min_hold_is_over() -> None:
    clock = ManualClock()
    held = lease(clock)
    clock.advance(5)
    call = Release.of(held, min_hold=5)
    assert (call.keys, call.token, call.become) == (("k",), held.token, None)


def test_a_key_cools_until_min_hold_after_its_acquisition() -> None:
    clock = ManualClock()
    held = lease(clock)
    clock.advance(2)
    call = Release.of(held, min_hold=5)
    assert call.become is Kind.COOLING
    assert call.become_ttl == pytest.approx(3)


@pytest.mark.parametrize(
    ("when", "countdown"),
    [
        (None, 0),
        (30, 30),
        (0.5, 0.5),
        (NOW + timedelta(seconds=30), 30),
        ((NOW + timedelta(seconds=30)).replace(tzinfo=None), 30),
        (NOW - timedelta(seconds=30), 0),
        ((NOW + timedelta(seconds=30)).astimezone(timezone(timedelta(hours=9))), 30),
    ],
    ids=str,
)
def test_a_key_is_reserved_through_the_countdown_and_a_ttl_of_queueing(
    when: Any, countdown: float
) -> None:
    held = lease(ManualClock())
    call = Release.of(held)
    seconds = seconds_until(when, SimpleNamespace(now=lambda: NOW))
    assert seconds is not None
    call.reserve(seconds + 60)
    assert call.become is Kind.RESERVED
    assert call.become_ttl == pytest.approx(countdown + 60)
    assert call.next_token == Token("t", 0, 3, "-")
    assert call.token == held.token


def test_a_reservation_is_never_shorter_than_min_hold() -> None:
    held = lease(ManualClock())
    call = Release.of(held, min_hold=500)
    call.reserve(61)
    assert call.become is Kind.RESERVED
    assert call.become_ttl == pytest.approx(500)


# --- a lost lease as the task's failure ----------------------------------------------------------


@pytest.fixture
def app() -> Celery:
    return Celery(
        "app", broker="memory://", backend="cache+memory://", set_as_current=False, changes={}
    )


def run_lost(app: Celery, **options: Any) -> tuple[str, list[int]]:
    attempts: list[int] = []

    @app.task(bind=True, shared=False, **options)
    def lost(self: Any) -> Any:
        attempts.append(self.request.retries)
        return fail_as_body(self, LeaseLost("lost", "k", "expired"))

    return lost.apply().state, attempts


def test_a_lost_lease_is_a_failure(app: Celery) -> None:
    assert run_lost(app) == ("FAILURE", [0])


def test_an_autoretry_that_names_a_lost_lease_is_honoured(app: Celery) -> None:
    options = {"autoretry_for": (LeaseLost,), "retry_kwargs": {"max_retries": 2, "countdown": 0}}
    assert run_lost(app, **options) == ("FAILURE", [0, 1, 2])
    assert run_lost(app, **options, name="again") == ("FAILURE", [0, 1, 2])


def test_an_autoretry_that_excepts_a_lost_lease_is_honoured_too(app: Celery) -> None:
    options = {"autoretry_for": (Exception,), "dont_autoretry_for": (LeaseLost,)}
    assert run_lost(app, **options) == ("FAILURE", [0])


def test_the_bodies_own_wrapping_is_left_alone(app: Celery) -> None:
    @app.task(bind=True, shared=False, autoretry_for=(LeaseLost,))
    def task(self: Any) -> None: ...

    before = task.run, task._orig_run
    with pytest.raises((Retry, LeaseLost)):
        fail_as_body(task, LeaseLost("lost", "k", "expired"))
    assert (task.run, task._orig_run) == before
