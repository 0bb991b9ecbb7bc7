"""The events that a worker's parent has read from the pipe and has not sent yet.

Overview
    Single events are kept in order, and go out as lists, one for each group of event types, as
    Celery buffers its own task events. Receivers of Celery 4 or newer know such lists. The list of
    this library's events begins with the counts of the others.

Guarantees
    The memory is bounded: events that exceed it are dropped, and their number is an event. Counts
    are never dropped.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from celery.events import group_from
from kombu.utils.uuid import uuid

from ..instrumentation.counts import COUNTS, Counts
from ..instrumentation.worker_events import dropped_events

logger = logging.getLogger("celery_singleton_lock")

# Bytes of single events, which have about 400 each.
_MOST_BYTES: Final = 1 << 20

#: Gives an event the fields that Celery's events have: takes its type and its own fields.
Stamp = Callable[[str, dict[str, Any]], dict[str, Any]]


class Outbox:
    """Events that are to be sent. Its owner calls it on one thread at a time."""

    def __init__(self) -> None:
        self._counts = Counts()
        self._singles: list[tuple[str, dict[str, Any]]] = []
        self._bytes = self._dropped = 0

    def __bool__(self) -> bool:
        return bool(self._singles or self._counts or self._dropped)

    def add(self, lines: Iterable[bytes]) -> None:
        """Add lines of the pipe."""
        # Many lines are equal: tasks of one kind that take some milliseconds.
        for line, times in Counter(lines).items():
            try:
                self._add(line, times)
            except Exception:
                logger.exception("singleton: can't read the worker event %.200r", line)

    def _add(self, line: bytes, times: int) -> None:
        values = json.loads(line)
        if len(values) > 2:
            event, task, seconds = values
            self._counts.add(event, task, seconds, times)
            return
        kind, fields = values
        if self._bytes + len(line) > _MOST_BYTES:
            self._dropped += times
        else:
            self._bytes += len(line) * times
            self._singles += [(kind, fields)] * times

    def messages(self, stamp: Stamp) -> Iterator[tuple[str, str]]:
        """The routing key and the JSON of each message."""
        dropped = [dropped_events(self._dropped)] if self._dropped else []
        groups: dict[str, list[str]] = {}
        rows = list(self._counts.rows())
        for kind, fields in [(COUNTS, {"uuid": uuid(), "counts": rows}), *self._singles, *dropped]:
            groups.setdefault(group_from(kind), []).append(json.dumps(stamp(kind, fields)))
        for group, events in groups.items():
            yield f"{group}.multi", f"[{','.join(events)}]"
