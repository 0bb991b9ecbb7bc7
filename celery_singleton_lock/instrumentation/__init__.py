"""Sinks of events: log lines, Celery signals, and worker events for Flower and other monitors.

A sink is a callable that takes one :class:`~celery_singleton_lock.core.events.Event`.
docs/reference/events.md describes the events.
"""

from __future__ import annotations

from ..core.events import Event, EventName
from ..core.lease import Holder
from .log import log_event
from .signals import (
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
    call_removed,
    call_requeued,
    call_stalled,
    calls_paused,
    calls_resumed,
    lease_acquired,
    lease_conflict,
    lease_freed,
    lease_lost,
    lease_release_failed,
    lease_released,
    store_back,
    store_unreachable,
)
from .sinks import SINKS, add_sink, has_observers, is_observed
from .worker_events import EventPipe, send_worker_event

__all__ = ["Event", "EventName", "EventPipe", "Holder"]
__all__ += ["SINKS", "add_sink", "has_observers", "is_observed", "log_event", "send_worker_event"]
__all__ += ["lease_acquired", "lease_conflict", "lease_freed", "lease_lost"]
__all__ += ["lease_release_failed", "lease_released"]
__all__ += ["call_cancelled", "call_dropped", "call_duplicate", "call_requeued"]
__all__ += ["call_joined", "call_published", "call_removed", "call_stalled"]
__all__ += ["calls_paused", "calls_resumed"]
__all__ += ["beat_leading", "beat_resigned", "beat_standing_by", "store_back", "store_unreachable"]
__all__ += ["broker_back", "broker_unreachable"]
