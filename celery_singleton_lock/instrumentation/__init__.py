"""Sinks of events: log lines, Celery signals, and worker events for Flower and other monitors.

A sink is a callable that takes one :class:`~celery_singleton_lock.core.events.Event`.
"""

from __future__ import annotations

from ..core.events import EventName
from .log import is_logged, log_event
from .signals import (
    SIGNALS,
    add_sink,
    lease_acquired,
    lease_conflict,
    lease_lost,
    lease_released,
    send_signal,
)
from .worker_events import Monitor

__all__ = ["Monitor", "add_sink", "is_observed", "log_event", "send_signal"]
__all__ += ["lease_acquired", "lease_conflict", "lease_lost", "lease_released"]


def is_observed(name: EventName) -> bool:
    """Whether any sink currently uses events of this name."""
    if SIGNALS[name].receivers or is_logged(name):
        return True
    return bool(Monitor.worker) and (name is EventName.CONFLICT or name is EventName.CANCELLED)
