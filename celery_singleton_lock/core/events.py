"""Lease events as data, and their delivery to sinks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .lease import Holder, Lease

logger = logging.getLogger("celery_singleton_lock")


class EventName(StrEnum):
    ACQUIRED = "acquired"
    CONFLICT = "conflict"
    DUPLICATE = "duplicate"
    CANCELLED = "cancelled"
    LEASE_LOST = "lease-lost"
    RELEASED = "released"
    RELEASE_FAILED = "release-failed"
    FREED = "freed"  # the lease of a dead process, by another process of its host
    PUT_BACK = "put-back"
    DROPPED = "dropped"
    STORE_UNREACHABLE = "store-unreachable"
    # Events of the beat election; `holder` is the leader.
    LEADING = "leading"
    STANDING_BY = "standing-by"
    RESIGNED = "resigned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened.

    Attributes:
        name: The kind of event.
        key: The lock key.
        task: The task's name; empty for a ``hold()``.
        task_id: The task's id, or the id of the ``hold()``.
        holder: The holder of the key: this task, or on a conflict the other holder.
        data: Further details: seconds, numbers and words, never task arguments.
    """

    name: EventName
    key: str
    task: str = ""
    task_id: str = ""
    holder: Holder = field(default_factory=Holder)
    data: Mapping[str, Any] = field(default_factory=dict)


Sink = Callable[[Event], None]


class Events:
    """Passes each event to every sink. An exception of a sink never affects a lock.

    Args:
        sinks: Called with each event.
        observes: Returns whether any sink currently uses events of a given name.
    """

    def __init__(
        self,
        sinks: list[Sink] | None = None,
        observes: Callable[[EventName], bool] = lambda name: True,
    ) -> None:
        self.sinks: list[Sink] = list(sinks or [])
        #: Called before a per-task event is created. Most events have no listener, and creating an
        #: event costs more than this call.
        self.observes = observes

    def emit_for(self, lease: Lease, name: EventName, **data: Any) -> None:
        """Emit an event of a lease."""
        holder = lease.holder
        task, task_id = holder.task, holder.task_id
        self.emit(
            Event(name=name, key=lease.key, task=task, task_id=task_id, holder=holder, data=data)
        )

    def emit(self, event: Event) -> None:
        for sink in self.sinks:
            try:
                sink(event)
            except Exception:
                logger.exception("the sink %r failed on the event %r", sink, str(event.name))
