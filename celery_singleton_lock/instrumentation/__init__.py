"""Sinks of events: log lines, Celery signals, and worker events for Flower and other monitors.

A sink is a callable that takes one :class:`~celery_singleton_lock.core.events.Event`.
docs/reference/events.md describes the events.
"""

from __future__ import annotations

from typing import Any, Final

from ..core.events import Event, EventName
from ..core.lease import Holder
from .log import LEVELS, log_event, logger
from .signals import (
    SIGNALS,
    add_sink,
    beat_leading,
    beat_resigned,
    beat_standing_by,
    broker_back,
    broker_unreachable,
    call_cancelled,
    call_dropped,
    call_duplicate,
    call_joined,
    call_published,
    call_put_back,
    call_removed,
    call_stalled,
    lease_acquired,
    lease_conflict,
    lease_freed,
    lease_lost,
    lease_release_failed,
    lease_released,
    send_signal,
    store_back,
    store_unreachable,
)
from .worker_events import EventPipe, send_worker_event

__all__ = ["Event", "EventName", "EventPipe", "Holder"]
__all__ += ["add_sink", "has_observers", "is_observed"]
__all__ += ["log_event", "send_signal", "send_worker_event"]
__all__ += ["lease_acquired", "lease_conflict", "lease_freed", "lease_lost"]
__all__ += ["lease_release_failed", "lease_released"]
__all__ += ["call_cancelled", "call_dropped", "call_duplicate", "call_put_back"]
__all__ += ["call_joined", "call_published", "call_removed", "call_stalled"]
__all__ += ["beat_leading", "beat_resigned", "beat_standing_by", "store_back", "store_unreachable"]
__all__ += ["broker_back", "broker_unreachable"]


# The signal and the level of each event.
_OBSERVERS: Final = {name: (SIGNALS[name], LEVELS[name]) for name in EventName}


def is_observed(name: EventName) -> Any:
    """Whether any sink currently uses events of this name."""
    # One function for all sinks, because each task calls it several times.
    signal, level = _OBSERVERS[name]
    return signal.receivers or logger.isEnabledFor(level) or EventPipe.switch[0]


def has_observers(name: EventName) -> Any:
    """Whether a receiver of signals or the log, which may block, uses events of this name."""
    signal, level = _OBSERVERS[name]
    return signal.receivers or logger.isEnabledFor(level)
