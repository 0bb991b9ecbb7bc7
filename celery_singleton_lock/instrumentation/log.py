"""Log lines.

Log lines have the key and its holder as logfmt fields. Task arguments are never logged: a default
key is a digest of the arguments, and a template key contains only the arguments that its template
names.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from ..core.events import Event, EventName
from ..core.observers import log

logger = logging.getLogger("celery_singleton_lock")

#: The level at which each event is logged.
LEVELS: Final = dict.fromkeys(EventName, logging.INFO) | {
    EventName.ACQUIRED: logging.DEBUG,
    EventName.RELEASED: logging.DEBUG,
    EventName.LEASE_LOST: logging.WARNING,
    EventName.RELEASE_FAILED: logging.WARNING,
    EventName.FREED: logging.WARNING,
    EventName.PUBLISHED: logging.DEBUG,
    EventName.STALLED: logging.WARNING,
    EventName.STORE_UNREACHABLE: logging.WARNING,
    EventName.STORE_BACK: logging.WARNING,
    EventName.BROKER_UNREACHABLE: logging.WARNING,
    EventName.BROKER_BACK: logging.WARNING,
}


# In a value, these would end it or mislead a parser.
_NEEDS_QUOTES: Final = frozenset(' "=\\')


def logfmt(fields: Mapping[str, Any]) -> str:
    """The fields that are not empty as ``key=value`` pairs, with a blank between."""
    known = [(name, value) for name, value in fields.items() if value not in (None, "")]
    return " ".join(f"{name}={_field(value)}" for name, value in known)


def _field(value: Any) -> str:
    """``value`` in the form of ``key=value`` lines (logfmt), quoted if necessary."""
    text = str(value)
    plain = text and text.isprintable() and not _NEEDS_QUOTES & {*text}
    if plain:
        return text
    return _printable(json.dumps(text, ensure_ascii=False))


def _printable(text: str) -> str:
    """``text`` without what ends a line, reverses what follows, or is not seen: as JSON has it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def log_event(event: Event) -> None:
    """Log an event: now, or on the log's thread. ``extra`` contains its fields, prefixed
    ``singleton_``."""
    level = LEVELS[event.name]
    if not logger.isEnabledFor(level):
        return
    if log.is_due_later():
        # Not only the handlers: record factories are code of the user too.
        log.put(partial(_write, level, event))
    else:
        _write(level, event)


def _write(level: int, event: Event) -> None:
    # A publisher may choose any text as the id.
    subject = _printable(f"{event.task}[{event.task_id}]" if event.task else event.task_id)
    fields = {"key": event.key, "lease": event.lease, **event.data}
    fields["holder"] = event.holder.worker and event.holder
    logger.log(
        level,
        "singleton %s: %s",
        event.name,
        f"{subject} {logfmt(fields)}".lstrip(),
        extra={
            "singleton_event": str(event.name),
            "singleton_key": event.key,
            "singleton_task": event.task,
            "singleton_task_id": event.task_id,
            "singleton_lease": event.lease,
            "singleton_holder": str(event.holder),
            "singleton_data": dict(event.data),
        },
    )
