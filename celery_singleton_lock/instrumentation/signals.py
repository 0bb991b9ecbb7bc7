"""Celery signals: one for each event.

Each signal is sent in the process where the event happens, on the thread of the body that it is
about. What the heartbeat's thread detects, such as most losses, is sent on the thread of
`RECEIVERS` (see `core.observers`). Receivers get ``sender`` (the
task's name) and ``event``, an :class:`~celery_singleton_lock.core.events.Event`.
"""

from __future__ import annotations

import logging
from typing import Final

from celery.utils.dispatch import Signal

from ..celery_compat import live_receivers
from ..core.events import Event, EventName
from ..core.observers import Observer

logger = logging.getLogger("celery_singleton_lock")


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
call_requeued = _signal("call_requeued")
call_dropped = _signal("call_dropped")
call_joined = _signal("call_joined")
call_published = _signal("call_published")
call_stalled = _signal("call_stalled")
call_removed = _signal("call_removed")
calls_paused = _signal("calls_paused")
calls_resumed = _signal("calls_resumed")
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
    EventName.REQUEUED: call_requeued,
    EventName.DROPPED: call_dropped,
    EventName.JOINED: call_joined,
    EventName.PUBLISHED: call_published,
    EventName.STALLED: call_stalled,
    EventName.REMOVED: call_removed,
    EventName.PAUSED: calls_paused,
    EventName.RESUMED: calls_resumed,
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


class _Receivers(Observer):
    """The receivers of all signals. They share one queue, so each gets the events in order."""

    def deliver(self, event: Event) -> None:
        """Call the receivers one by one, so that one that blocks can be named."""
        signal, sender = SIGNALS[event.name], event.task
        for receiver in live_receivers(signal, sender):
            self.begin(receiver)
            try:
                receiver(signal=signal, sender=sender, event=event)
            except Exception:
                logger.exception("singleton: the receiver %r failed", receiver)


#: The sink that sends the signals.
RECEIVERS: Final = _Receivers(
    send_signal,
    "singleton-receivers",
    what="receivers of signals",
    wants=lambda event: SIGNALS[event.name].receivers,
)
