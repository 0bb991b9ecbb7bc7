"""Sinks of events: log lines, Celery signals, and worker events for Flower and other monitors.

Log lines have the key and its holder as logfmt fields. Task arguments are never logged: a default
key is a digest of the arguments, and a template key contains only the arguments that its template
names.

Each signal is sent in the process where the event happens. ``lease_lost`` is sent on the thread of
the heartbeat, unless the body or the release detects the loss first. Receivers get ``sender`` (the
task's name) and ``event``, an :class:`~celery_singleton_lock.core.events.Event`.
"""

from __future__ import annotations

import json
import logging
from typing import Any, ClassVar, Final
from weakref import ref

from celery import Celery
from celery.utils.dispatch import Signal

from .core.events import Event, EventName

logger = logging.getLogger("celery_singleton_lock")

lease_acquired = Signal(name="lease_acquired", providing_args=["event"])
lease_conflict = Signal(name="lease_conflict", providing_args=["event"])
lease_lost = Signal(name="lease_lost", providing_args=["event"])
lease_released = Signal(name="lease_released", providing_args=["event"])

# The signal of each event; most have one that cannot be received.
_SIGNALS: Final = dict.fromkeys(EventName, Signal()) | {
    EventName.ACQUIRED: lease_acquired,
    EventName.CONFLICT: lease_conflict,
    EventName.LEASE_LOST: lease_lost,
    EventName.RELEASED: lease_released,
}
# The level at which each event is logged.
_LEVELS: Final = dict.fromkeys(EventName, logging.INFO) | {
    EventName.ACQUIRED: logging.DEBUG,
    EventName.RELEASED: logging.DEBUG,
    EventName.LEASE_LOST: logging.WARNING,
    EventName.RELEASE_FAILED: logging.WARNING,
    EventName.FREED: logging.WARNING,
    EventName.STORE_UNREACHABLE: logging.WARNING,
}


def is_observed(name: EventName) -> bool:
    """Whether any sink currently uses events of this name."""
    # One function for all sinks, because each task calls it several times.
    if _SIGNALS[name].receivers or logger.isEnabledFor(_LEVELS[name]):
        return True
    return bool(Monitor.worker) and (name is EventName.CONFLICT or name is EventName.CANCELLED)


def _field(value: Any) -> str:
    """``value`` in the form of ``key=value`` lines (logfmt), quoted if necessary."""
    text = str(value)
    plain = text and text.isprintable() and not {" ", '"'} & {*text}
    return text if plain else json.dumps(text, ensure_ascii=False)


def log_event(event: Event) -> None:
    """Log an event. ``extra`` contains its fields, prefixed ``singleton_``."""
    level = _LEVELS[event.name]
    if not logger.isEnabledFor(level):
        return
    subject = f"{event.task}[{event.task_id}]" if event.task else event.task_id
    fields = {"key": event.key, **event.data}
    if event.holder.worker:
        fields["holder"] = event.holder
    logger.log(
        level,
        "singleton %s: %s %s",
        event.name,
        subject,
        " ".join(f"{name}={_field(value)}" for name, value in fields.items()),
        extra={
            "singleton_event": str(event.name),
            "singleton_key": event.key,
            "singleton_task": event.task,
            "singleton_task_id": event.task_id,
            "singleton_holder": str(event.holder),
            "singleton_data": dict(event.data),
        },
    )


def send_signal(event: Event) -> None:
    """Send the signal of an event. Celery logs exceptions of receivers and ignores them."""
    _SIGNALS[event.name].send(sender=event.task, event=event)


class Monitor:
    """Sends a worker event for a call that a conflict ends, if this worker sends events.

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
        if not Monitor.worker or app is None:
            return
        fields: dict[str, Any]
        if event.name is EventName.CONFLICT and outcome == "skip":
            kind = "task-skipped"
            fields = {"name": event.task, "key": event.key, "holder": str(event.holder)}
        elif event.name is EventName.CANCELLED or outcome == "revoke":
            kind = "task-revoked"
            fields = {"terminated": False, "signum": None, "expired": False}
        else:
            return
        with app.events.default_dispatcher(Monitor.worker) as dispatcher:
            dispatcher.send(kind, uuid=event.task_id, **fields)
