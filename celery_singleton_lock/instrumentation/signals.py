"""Celery signals: one for each event.

Each signal is sent in the process where the event happens, on the thread of the body that it is
about. What the heartbeat's thread detects, such as most losses, is sent on the thread of
`core.observers`. Receivers get ``sender`` (the
task's name) and ``event``, an :class:`~celery_singleton_lock.core.events.Event`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from celery.utils.dispatch import Signal

from ..core.events import Event, EventName


def _signal(name: str) -> Signal:
    return Signal(name=name, providing_args=["event"])


lease_acquired = _signal("lease_acquired")
lease_released = _signal("lease_released")
lease_lost = _signal("lease_lost")
lease_release_failed = _signal("lease_release_failed")
lease_freed = _signal("lease_freed")
lease_conflict = _signal("lease_conflict")
call_duplicate = _signal("call_duplicate")
call_cancelled = _signal("call_cancelled")
call_put_back = _signal("call_put_back")
call_dropped = _signal("call_dropped")
call_joined = _signal("call_joined")
call_published = _signal("call_published")
call_stalled = _signal("call_stalled")
call_removed = _signal("call_removed")
store_unreachable = _signal("store_unreachable")
store_back = _signal("store_back")
broker_unreachable = _signal("broker_unreachable")
broker_back = _signal("broker_back")
beat_leading = _signal("beat_leading")
beat_standing_by = _signal("beat_standing_by")
beat_resigned = _signal("beat_resigned")

#: The signal of each event.
SIGNALS: Final = {
    EventName.ACQUIRED: lease_acquired,
    EventName.RELEASED: lease_released,
    EventName.LEASE_LOST: lease_lost,
    EventName.RELEASE_FAILED: lease_release_failed,
    EventName.FREED: lease_freed,
    EventName.CONFLICT: lease_conflict,
    EventName.DUPLICATE: call_duplicate,
    EventName.CANCELLED: call_cancelled,
    EventName.PUT_BACK: call_put_back,
    EventName.DROPPED: call_dropped,
    EventName.JOINED: call_joined,
    EventName.PUBLISHED: call_published,
    EventName.STALLED: call_stalled,
    EventName.REMOVED: call_removed,
    EventName.STORE_UNREACHABLE: store_unreachable,
    EventName.STORE_BACK: store_back,
    EventName.BROKER_UNREACHABLE: broker_unreachable,
    EventName.BROKER_BACK: broker_back,
    EventName.LEADING: beat_leading,
    EventName.STANDING_BY: beat_standing_by,
    EventName.RESIGNED: beat_resigned,
}


def send_signal(event: Event) -> None:
    """Send the signal of an event. Celery logs exceptions of receivers and ignores them."""
    SIGNALS[event.name].send(sender=event.task, event=event)


def add_sink(sink: Callable[[Event], None]) -> None:
    """Call ``sink`` with each event of this process, and of the processes that it forks."""

    def receive(event: Event, **_: Any) -> None:
        sink(event)

    for signal in SIGNALS.values():
        signal.connect(receive, weak=False)
