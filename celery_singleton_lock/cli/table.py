"""Records as text for people and as plain data for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

from celery_singleton_lock.core.lease import Kind, Phase, Record
from celery_singleton_lock.core.wait_queue import HANDOFF_TASK

__all__ = ["describe", "json_array", "row_of", "table"]

# The encoder that indents by itself is of Python: this one writes flat objects, indented as a part
# of an array but for the lines between two of them. Inside of a text no line ever breaks.
_encode: Final = json.JSONEncoder(separators=(",\n    ", ": ")).encode
_BETWEEN_AS_ENCODED: Final = "},\n    {"
_BETWEEN: Final = "\n  },\n  {\n    "
# Records in one piece of the text.
_PIECE: Final = 200

_KINDS: Final = {
    Kind.LEASE: "running",
    Kind.RESERVED: "reserved for a retry",
    Kind.COOLING: "cooling down",
    Kind.DYING: "being killed",
}
_PHASES: Final = {
    Phase.QUEUED: "claim, queued",
    Phase.RUNNING: "claim, running",
    Phase.RETRYING: "claim, retrying",
}


def row_of(record: Record) -> dict[str, Any]:
    """The record as JSON data; ``ttl`` in seconds, ``since`` in ISO 8601.

    Of a claim, ``worker``, ``pid`` and ``since`` tell who published its message, and when.
    """
    return {
        "key": record.key,
        "state": _state(record),
        "phase": record.phase,
        "task": record.holder.task,
        "task_id": record.holder.task_id,
        "worker": record.holder.worker,
        "pid": record.holder.pid,
        "since": _since(record),
        "ttl": round(record.ttl, 3),
        "fence": record.fence,
        "token": record.token,
    }


def json_array(records: Iterable[Record]) -> Iterator[str]:
    """The records as one JSON array, in pieces of text: a million need not be held at once."""
    rows = map(row_of, records)
    before, after = "[\n", "[]"
    for some in iter(lambda: [*islice(rows, _PIECE)], []):
        piece = _encode(some)[2:-2].replace(_BETWEEN_AS_ENCODED, _BETWEEN)
        yield f"{before}  {{\n    {piece}\n  }}"
        before, after = ",\n", "\n]"
    yield after


def table(records: Iterable[Record]) -> str:
    """One line a record, columns aligned."""
    head = ("KEY", "STATE", "TTL", "HOLDER", "WORKER", "PID", "SINCE")
    rows = [head]
    for record in records:
        row = row_of(record)
        rows.append(
            (
                _shown(row["key"]),
                row["state"],
                f"{row['ttl']:.1f}s",
                _shown(f"{row['task']}[{row['task_id']}]" if row["task"] else row["task_id"]),
                _shown(row["worker"]),
                str(row["pid"]),
                row["since"],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def describe(record: Record) -> str:
    """One field a line."""
    row = row_of(record)
    del row["phase"]  # the state says it
    if record.kind is Kind.CLAIM:
        del row["fence"]
        # Nobody works on it yet, or the lease tells who.
        row = {"published by" if name == "worker" else name: value for name, value in row.items()}
    width = max(len(name) for name in row)
    return "\n".join(f"{name:>{width}}: {_shown(str(value))}" for name, value in row.items())


def _shown(text: str) -> str:
    """``text`` as a terminal may have it: a task's id is its publisher's, and may be anything."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _state(record: Record) -> str:
    if record.token.startswith(f"{HANDOFF_TASK}|"):
        return "kept for who waits"
    return _PHASES[record.phase] if record.phase else _KINDS[record.kind]


def _since(record: Record) -> str:
    if not record.holder.since:
        return ""  # nobody has it
    try:
        return datetime.fromtimestamp(record.holder.since, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return ""  # no moment: whoever may write to the store wrote something else
