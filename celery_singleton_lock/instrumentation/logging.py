"""One structured log line per event: what happened to which key, and who holds it.

Never task arguments: a default key is a digest of them, a template shows what its author put in.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final

from celery_singleton_lock.core.events import Event, EventName

__all__ = ["is_logged", "log_event", "logger"]

logger = logging.getLogger("celery_singleton_lock")

_LEVELS: Final = {
    EventName.ACQUIRED: logging.DEBUG,
    EventName.RELEASED: logging.DEBUG,
    EventName.CONFLICT: logging.INFO,
    EventName.DUPLICATE: logging.INFO,
    EventName.PUT_BACK: logging.INFO,
    EventName.DROPPED: logging.INFO,
    EventName.LOST: logging.WARNING,
    EventName.RELEASE_FAILED: logging.WARNING,
    EventName.STORE_FAILED: logging.WARNING,
    EventName.LEADING: logging.INFO,
    EventName.STANDING_BY: logging.INFO,
    EventName.RESIGNED: logging.INFO,
}


def is_logged(name: EventName) -> bool:
    """Whether such an event makes a line."""
    return logger.isEnabledFor(_LEVELS[name])


def _field(value: Any) -> str:
    """``value`` in the form that parsers of ``key=value`` lines (logfmt) read: quoted if needed."""
    text = str(value)
    plain = text and text.isprintable() and not {" ", '"'} & {*text}
    return text if plain else json.dumps(text, ensure_ascii=False)


def log_event(event: Event) -> None:
    """The sink. ``extra`` carries the fields for structured handlers, prefixed ``singleton_``."""
    if not is_logged(event.name):
        return
    who = f"{event.task}[{event.task_id}]" if event.task else event.task_id
    fields = {"key": event.key, **event.data}
    if event.holder.worker:
        fields["holder"] = event.holder
    logger.log(
        _LEVELS[event.name],
        "singleton %s: %s %s",
        event.name,
        who,
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
