"""Formatting of records as tables, as text with one field per line, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

from celery_singleton_lock.core.lease import Kind, Record
from celery_singleton_lock.core.store import HANDOFF_TASK

# json.dumps(indent=2) runs in Python. This encoder runs in C, and its separators indent a flat
# object as a part of an array.
_encode: Final = json.JSONEncoder(separators=(",\n    ", ": ")).encode
# Records per piece of text.
_PIECE: Final = 200

_KINDS: Final = {
    Kind.LEASE: "running",
    Kind.RESERVED: "reserved for a retry",
    Kind.COOLING: "cooling down",
    Kind.DYING: "being killed",
}


def row_of(record: Record) -> dict[str, Any]:
    """The record as JSON data; ``ttl`` in seconds, ``since`` in ISO 8601.

    For a claim, ``worker``, ``pid`` and ``since`` are those of its message's publication.
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
    """The records as one JSON array, in pieces of text: memory may not hold all of them."""
    rows = (f"  {{\n    {_encode(row_of(record))[1:-1]}\n  }}" for record in records)
    before, after = "[\n", "[]"
    while some := [*islice(rows, _PIECE)]:
        yield before + ",\n".join(some)
        before, after = ",\n", "\n]"
    yield after


def table(records: Iterable[Record]) -> str:
    """The records as a table: one line per record, columns aligned."""
    rows = [["KEY", "STATE", "TTL", "HOLDER", "WORKER", "PID", "SINCE"]]
    for row in map(row_of, records):
        holder = f"{row['task']}[{row['task_id']}]" if row["task"] else row["task_id"]
        cells = [row["key"], row["state"], f"{row['ttl']:.1f}s", holder, row["worker"]]
        rows.append([*map(_shown, cells), str(row["pid"]), row["since"]])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def describe(record: Record) -> str:
    """The record as text, one field per line."""
    row = row_of(record)
    del row["phase"]  # the state contains it
    if record.kind is Kind.CLAIM:
        del row["fence"]
        # `worker` is the process that published the message, not the one that runs it.
        row = {"published by" if name == "worker" else name: value for name, value in row.items()}
    width = max(len(name) for name in row)
    return "\n".join(f"{name:>{width}}: {_shown(str(value))}" for name, value in row.items())


def _shown(text: str) -> str:
    """``text`` without control characters: a publisher may choose any text as a task's id."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _state(record: Record) -> str:
    if record.token.startswith(f"{HANDOFF_TASK}|"):
        return "reserved for a waiting client"
    return f"claim, {record.phase}" if record.phase else _KINDS[record.kind]


def _since(record: Record) -> str:
    if not record.holder.since:
        return ""  # no holder
    try:
        return datetime.fromtimestamp(record.holder.since, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return ""  # not a time: another program wrote this record
