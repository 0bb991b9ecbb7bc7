"""Celery signals for lease events, and worker events for Flower and other monitors.

Each signal is sent in the process where the event happens. ``lease_lost`` is sent on the thread of
the heartbeat, unless the body or the release detects the loss first. Receivers get ``sender`` (the
task's name) and ``event``, an :class:`~celery_singleton_lock.core.events.Event`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final
from weakref import ref

from celery import Celery
from celery.utils.dispatch import Signal

from celery_singleton_lock.core.events import Event, EventName

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
    if signal := SIGNALS.get(event.name):
        signal.send(sender=event.task, event=event)


class Monitor:
    """Sends a worker event for a call that ends by a conflict, if this worker sends events.

    ``task-skipped`` has the fields uuid, name, key and holder. ``task-revoked`` has the fields of
    the event that Celery's worker sends for its own revocations.

    A pool child can't see whether its worker was started with ``-E``, so the worker's bootstep sets
    ``worker`` before the fork. It is a class variable, because runtimes may already exist then.
    """

    #: Name of this process's worker if it sends events, else empty. Monitors group events by it;
    #: without it, every process would appear as a worker, ``gen<pid>@<host>``.
    worker: ClassVar[str] = ""

    def __init__(self, app: Celery) -> None:
        # The heartbeat's thread refers to this object, and must not keep the app alive.
        self._app = ref(app)

    def __call__(self, event: Event) -> None:
        app, outcome = self._app(), event.data.get("outcome")
        if event.name is not EventName.CONFLICT or not Monitor.worker or app is None:
            return
        fields: dict[str, Any]
        if outcome == "skip":
            kind = "task-skipped"
            fields = {"name": event.task, "key": event.key, "holder": str(event.holder)}
        elif outcome == "revoke":
            kind = "task-revoked"
            fields = {"terminated": False, "signum": None, "expired": False}
        else:
            return
        with app.events.default_dispatcher(Monitor.worker) as dispatcher:
            dispatcher.send(kind, uuid=event.task_id, **fields)
