"""Events of leases as data, and their delivery to sinks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from celery_singleton_lock.core.lease import Holder

logger = logging.getLogger("celery_singleton_lock")


class EventName(StrEnum):
    ACQUIRED = "acquired"
    CONFLICT = "conflict"
    DUPLICATE = "duplicate"
    LOST = "lost"
    RELEASED = "released"
    RELEASE_FAILED = "release-failed"
    PUT_BACK = "put-back"
    DROPPED = "dropped"
    STORE_FAILED = "store-failed"
    # Of beats that elect a leader; `holder` is who leads.
    LEADING = "leading"
    STANDING_BY = "standing-by"
    RESIGNED = "resigned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened.

    Attributes:
        name: What happened.
        key: The lock key.
        task: Name of the task it happened to; empty for a ``hold()``.
        task_id: Its id, or the id of the ``hold()``.
        holder: Who has the key: oneself, or on a conflict the other.
        data: What else is known; seconds, numbers and words, never task arguments.
    """

    name: EventName
    key: str
    task: str = ""
    task_id: str = ""
    holder: Holder = field(default_factory=Holder)
    data: Mapping[str, Any] = field(default_factory=dict)


Sink = Callable[[Event], None]


class Events:
    """Hands each event to every sink; a sink that raises never breaks a lock.

    Args:
        sinks: Called with each event.
        observes: Whether any sink uses an event of this name at the moment.
    """

    def __init__(
        self,
        sinks: list[Sink] | None = None,
        observes: Callable[[EventName], bool] = lambda name: True,
    ) -> None:
        self.sinks: list[Sink] = list(sinks or [])
        #: Called before an event of each task is created: most have no listener, and creating an
        #: event costs more than this call.
        self.observes = observes

    def emit(self, event: Event) -> None:
        for sink in self.sinks:
            try:
                sink(event)
            except Exception:
                logger.exception("the sink %r failed on the event %r", sink, str(event.name))
