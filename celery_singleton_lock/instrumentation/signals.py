"""Celery signals for lease events.

Each signal is sent in the process where the event happens. ``lease_lost`` is sent on the thread of
the heartbeat, unless the body or the release detects the loss first. Receivers get ``sender`` (the
task's name) and ``event``, an :class:`~celery_singleton_lock.core.events.Event`.
"""

from __future__ import annotations

from typing import Final

from celery.utils.dispatch import Signal

from celery_singleton_lock.core.events import Event, EventName

__all__ = [
    "SIGNALS",
    "lease_acquired",
    "lease_conflict",
    "lease_lost",
    "lease_released",
    "send_signal",
]

lease_acquired = Signal(name="lease_acquired", providing_args=["event"])
lease_conflict = Signal(name="lease_conflict", providing_args=["event"])
lease_lost = Signal(name="lease_lost", providing_args=["event"])
lease_released = Signal(name="lease_released", providing_args=["event"])

#: The signal of each event that has one.
SIGNALS: Final = {
    EventName.ACQUIRED: lease_acquired,
    EventName.CONFLICT: lease_conflict,
    EventName.LOST: lease_lost,
    EventName.RELEASED: lease_released,
}


def send_signal(event: Event) -> None:
    """Send the signal of an event. Celery logs exceptions of receivers and ignores them."""
    signal = SIGNALS.get(event.name)
    if signal is not None:
        signal.send(sender=event.task, event=event)
