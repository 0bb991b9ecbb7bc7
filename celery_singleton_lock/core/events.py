"""Lease events as data, and their delivery to sinks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from .lease import Holder, Lease

logger = logging.getLogger("celery_singleton_lock")


class EventName(StrEnum):
    """The names of the events."""

    ACQUIRED = "acquired"
    # The four ends of a lease.
    RELEASED = "released"
    LEASE_LOST = "lease-lost"
    RELEASE_FAILED = "release-failed"
    FREED = "freed"  # the lease of a dead process, by its worker or another process of its host
    # Events of a call or a delivery.
    CONFLICT = "conflict"
    DUPLICATE = "duplicate"
    CANCELLED = "cancelled"
    REQUEUED = "requeued"
    DROPPED = "dropped"
    # Events of a call in the queue of its key.
    JOINED = "joined"
    PUBLISHED = "published"
    STALLED = "stalled"
    REMOVED = "removed"
    # Events of a pause of a key or a scope.
    PAUSED = "paused"
    RESUMED = "resumed"
    # Events of the store, as this process sees it.
    STORE_UNREACHABLE = "store-unreachable"
    STORE_BACK = "store-back"
    # Events of a beat's broker.
    BROKER_UNREACHABLE = "broker-unreachable"
    BROKER_BACK = "broker-back"
    # Events of the beat election; `holder` is the leader.
    LEADING = "leading"
    STANDING_BY = "standing-by"
    RESIGNED = "resigned"


#: What the data of each event contains, unless docs/reference/events.md says that it may be absent.
#: `core.lease_end` and `worker.dead_child` emit those of the end of a lease.
DATA: Final[Mapping[EventName, tuple[str, ...]]] = {
    EventName.ACQUIRED: ("waited", "fence", "ttl"),
    EventName.RELEASED: ("held",),
    EventName.LEASE_LOST: ("reason", "detail", "store", "action"),
    EventName.RELEASE_FAILED: ("error", "frees_in"),
    EventName.FREED: ("reason", "by", "detail"),
    EventName.CONFLICT: ("outcome", "reason", "again", "retry_after"),
    EventName.DUPLICATE: ("outcome", "phase", "arguments"),
    EventName.CANCELLED: ("by", "started", "later"),
    EventName.REQUEUED: ("delay", "reason", "sequence"),
    EventName.DROPPED: ("reason",),
    EventName.JOINED: ("position",),
    EventName.PUBLISHED: ("copies",),
    EventName.STALLED: ("copies", "routing_key", "advice"),
    EventName.REMOVED: ("reason",),
    EventName.PAUSED: ("seconds", "by", "reason"),
    EventName.RESUMED: ("by",),
    EventName.STORE_UNREACHABLE: ("store", "error", "action"),
    EventName.STORE_BACK: ("store", "lasted"),
    EventName.BROKER_UNREACHABLE: ("broker", "error", "action"),
    EventName.BROKER_BACK: ("broker", "lasted"),
    EventName.LEADING: ("fence", "ttl"),
    EventName.STANDING_BY: (),
    EventName.RESIGNED: ("why",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened.

    Attributes:
        name: The kind of event.
        key: The lock key. If a whole scope is paused or resumed, the scope.
        task: The task's name; empty for a ``hold()``.
        task_id: The task's id, or the id of the ``hold()``.
        lease: The lease, or empty if the event isn't about one. It's the same text in all events
            of one lease.
        holder: Who holds the key: this task, the other call after a conflict, or the leading Beat.
            Empty in other events.
        data: The data of the event, as the events page lists it. It never contains a task's
            arguments.
    """

    name: EventName
    key: str
    task: str = ""
    task_id: str = ""
    lease: str = ""
    holder: Holder = field(default_factory=Holder)
    data: Mapping[str, Any] = field(default_factory=dict)


Sink = Callable[[Event], None]


class Events:
    """Passes each event to every sink. An exception of a sink never affects a lock.

    Args:
        sinks: Called with each event, on its thread. One that may block is an `Observer`. The list
            is used as it is: a sink that is added to it later gets the events from then on.
        observes: Returns whether any sink currently uses events of a given name.
        record: A sink that never blocks; called first, on the thread of the event.
        reaches_sinks: Returns whether any of ``sinks`` currently uses events of a given name.
    """

    def __init__(
        self,
        sinks: list[Sink] | None = None,
        observes: Callable[[EventName], Any] = lambda name: True,
        *,
        record: Sink = lambda event: None,
        reaches_sinks: Callable[[EventName], Any] = lambda name: True,
    ) -> None:
        self.sinks: list[Sink] = [] if sinks is None else sinks
        #: Called before a per-task event is created. Most events have no listener, and creating an
        #: event costs more than this call.
        self.observes = observes
        #: Whether an event waits for a sink, so that its task should not be over before.
        self.reaches_sinks = reaches_sinks
        self._record = record

    def emit_for(self, lease: Lease, name: EventName, **data: Any) -> None:
        """Emit the grant of a lease, or its end, unless the worker parent has reported the end."""
        holder, shared = lease.holder, lease.shared
        if shared is not None:
            if name is EventName.ACQUIRED:
                shared.announce(lease.acquired_at)
            elif not shared.conclude():
                return
        self.emit(
            Event(
                name=name,
                key=lease.key,
                task=holder.task,
                task_id=holder.task_id,
                lease=lease.token.nonce,
                holder=holder,
                data=data,
            )
        )

    def emit(self, event: Event) -> None:
        _pass(event, self._record)
        if self.reaches_sinks(event.name):
            for sink in self.sinks[:]:  # another thread may add one
                _pass(event, sink)


def _pass(event: Event, sink: Sink) -> None:
    try:
        sink(event)
    except Exception:
        logger.exception("singleton: the sink %r failed on the event %r", sink, str(event.name))
