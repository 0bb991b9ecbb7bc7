"""Celery signals.

Each signal is sent in the process where the event happens. ``lease_lost`` is sent on the thread of
the heartbeat, unless the body or the release detects the loss first. Receivers get ``sender`` (the
task's name) and ``event``, an :class:`~celery_singleton_lock.core.events.Event`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from celery.utils.dispatch import Signal

from ..core.events import Event, EventName

lease_acquired = Signal(name="lease_acquired", providing_args=["event"])
lease_conflict = Signal(name="lease_conflict", providing_args=["event"])
lease_lost = Signal(name="lease_lost", providing_args=["event"])
lease_released = Signal(name="lease_released", providing_args=["event"])

#: The signal of each event; most have one that cannot be received.
SIGNALS: Final = dict.fromkeys(EventName, Signal()) | {
    EventName.ACQUIRED: lease_acquired,
    EventName.CONFLICT: lease_conflict,
    EventName.LEASE_LOST: lease_lost,
    EventName.RELEASED: lease_released,
}


def send_signal(event: Event) -> None:
    """Send the signal of an event. Celery logs exceptions of receivers and ignores them."""
    SIGNALS[event.name].send(sender=event.task, event=event)


def add_sink(sink: Callable[[Event], None]) -> None:
    """Call ``sink`` with each event of this process, and of the processes that it forks."""

    def receive(event: Event, **_: Any) -> None:
        sink(event)

    # Several events may share a signal, which no receiver can be connected to from outside.
    for signal in {id(signal): signal for signal in SIGNALS.values()}.values():
        signal.connect(receive, weak=False)
