"""A line of the log about an event, read back into its parts; the form is this module's to know."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from celery_singleton_lock.core.events import DATA, EventName

__all__ = ["LoggedEvent", "events_in", "read_event"]

_LINE: Final = re.compile(r"singleton (?P<event>[a-z-]+): ?(?P<rest>.*)")
# The subject is a task with its id, or the id of a block; of a server's event it is empty.
_SUBJECT: Final = re.compile(
    r"(?:(?P<task>[^\s=\[]+)\[(?P<id>[^\]]*)\]|(?P<block>[^\s=]+))(?:\s|$)"
)
_NAMES: Final = frozenset(map(str, EventName))
_FIELD: Final = re.compile(r'(?P<name>\w+)=(?P<value>"(?:[^"\\]|\\.)*"|\S*)')


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """What a line says.

    Attributes:
        name: The event.
        task: Its task; empty for a block and for the events of a server.
        task_id: The id of the task or the block.
        fields: The rest, as text.
        line: The whole line.
    """

    name: EventName
    task: str
    task_id: str
    fields: Mapping[str, str]
    line: str

    def has(self, **wanted: Any) -> bool:
        """Whether the fields are so; a ``reason`` or a ``why`` begins so, as both are sentences."""
        return all(
            self.fields.get(name, "").startswith(value)
            if name in ("reason", "why")
            else self.fields.get(name) == str(value)
            for name, value in wanted.items()
        )


def read_event(line: str) -> LoggedEvent | None:
    """The event that ``line`` is about, with no fields but its own; None if it is about none."""
    match = _LINE.search(line)
    if match is None or match["event"] not in _NAMES:
        return None
    rest = match["rest"]
    subject = _SUBJECT.match(rest)
    fields = {one["name"]: _text(one["value"]) for one in _FIELD.finditer(rest)}
    task, task_id = ("", "") if subject is None else (subject["task"] or "", subject["id"])
    task_id = task_id or (subject["block"] if subject and subject["block"] else "")
    name = EventName(match["event"])
    assert fields.keys() <= {"key", "lease", "holder", *DATA[name]}, line
    return LoggedEvent(name, task, task_id, fields, line)


def events_in(lines: Iterable[str], *names: EventName, **fields: Any) -> Iterator[LoggedEvent]:
    """The events of these names (of all, without one) whose fields are so."""
    for line in lines:
        event = read_event(line)
        if event and (not names or event.name in names) and event.has(**fields):
            yield event


def _text(value: str) -> str:
    return str(json.loads(value)) if value.startswith('"') else value
