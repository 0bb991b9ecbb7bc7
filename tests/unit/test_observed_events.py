"""Which events have an observer, asked before one is made."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from celery import Celery

from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.instrumentation import EventPipe, lease_released
from celery_singleton_lock.instrumentation.signals import SIGNALS
from celery_singleton_lock.runtime import Runtime

LOGGER = "celery_singleton_lock"
Observed = Callable[[EventName], bool]


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Observed:
    monkeypatch.setattr(EventPipe, "switch", b"\0")
    for signal in SIGNALS.values():  # of other tests' apps in this process
        monkeypatch.setattr(signal, "receivers", [])
    caplog.set_level(logging.ERROR, LOGGER)
    return Runtime(Celery(set_as_current=False)).events.observes


def test_without_an_observer_no_event_is_observed(observed: Observed) -> None:
    assert not [name for name in EventName if observed(name)]


def test_a_receiver_counts_from_the_moment_it_is_connected_to_when_it_is_not(
    observed: Observed,
) -> None:
    def receive(**_: object) -> None: ...

    lease_released.connect(receive)
    assert [name for name in EventName if observed(name)] == [EventName.RELEASED]
    lease_released.disconnect(receive)
    assert not observed(EventName.RELEASED)


def test_a_log_that_is_turned_on_observes_everything_of_its_level(
    observed: Observed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    assert observed(EventName.LEASE_LOST)
    assert not observed(EventName.CONFLICT)
    caplog.set_level(logging.DEBUG, LOGGER)
    assert all(map(observed, EventName))


def test_a_monitor_observes_all_events_where_the_worker_sends_events(
    observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventPipe, "switch", b"\1")
    assert all(map(observed, EventName))
