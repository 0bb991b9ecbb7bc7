"""Celery signals for what happens to leases.

Each is sent in the process where it happens, ``lease_lost`` on the heartbeat's thread unless the
body or its release is the first to meet the loss. Receivers get ``sender`` (the task's name) and
``event``, an :class:`~celery_singleton_lock.core.events.Event`.
"""

from __future__ import annotations

from typing import Final

from celery.utils.dispatch import Signal

from celery_singleton_lock.core.events import Event, EventName

__all__ = [
    "has_receivers",
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

_SIGNALS: Final = {
    EventName.ACQUIRED: lease_acquired,
    EventName.CONFLICT: lease_conflict,
    EventName.LOST: lease_lost,
    EventName.RELEASED: lease_released,
}


def has_receivers(name: EventName) -> bool:
    """Whether somebody has connected to the signal of such an event."""
    signal = _SIGNALS.get(name)
    return signal is not None and bool(signal.receivers)


def send_signal(event: Event) -> None:
    """The sink. Celery logs and swallows what a receiver raises."""
    if has_receivers(event.name):
        _SIGNALS[event.name].send(sender=event.task, event=event)
