"""Keys as rows of text: the table that `ls` and `release` print, and the one that `watch` draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Final, TypeAlias

from ..inspection import HeldKey
from ..typed_keys import without_prefix

#: By the head of each column, its text for a key.
Columns: TypeAlias = Mapping[str, Callable[[HeldKey], str]]

#: The last columns, left out where all are empty: the numbers of waiting clients, and of the calls
#: that wait in the queue of the key.
COUNTS: Final[Columns] = {
    "WAITING": lambda key: "" if key.waiting is None else str(key.waiting),
    "CALLS": lambda key: str(key.calls or ""),
}


def rows_of(found: Iterable[HeldKey], columns: Columns) -> list[list[str]]:
    """The heads, and a row for each key."""
    every = {**columns, **COUNTS}
    rows = [[shown(text(key)) for text in every.values()] for key in found]
    columns_of_text = zip(*rows, strict=True) if rows else [()] * len(every)
    kept = [
        [head, *texts]
        for head, texts in zip(every, columns_of_text, strict=True)
        if head in columns or any(texts)
    ]
    return [list(row) for row in zip(*kept, strict=True)]


def aligned(rows: Iterable[list[str]]) -> str:
    """The rows as lines, with aligned columns."""
    rows = [*rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def holder_of(key: HeldKey) -> str:
    """The call that holds the key, or takes it next; a lease of `hold` has no task."""
    return f"{key.task}[{key.task_id}]" if key.task else key.task_id


def since_of(key: HeldKey) -> str:
    """When the key was taken, in ISO 8601; empty: unknown."""
    return key.since.isoformat(timespec="seconds") if key.since else ""


def state_of(key: HeldKey) -> str:
    """Its state, or that the process that holds it is dead."""
    return "process is dead" if key.is_dead else key.state


def shown(text: str) -> str:
    """``text`` without control characters: a publisher may choose any text as a task's id."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


#: The columns of `ls` and `release`.
COLUMNS: Final[Columns] = {
    "KEY": lambda held: held.key,
    "STATE": state_of,
    "TTL": lambda held: "" if held.is_free else f"{held.ttl:.1f}s",
    "HOLDER": holder_of,
    "WORKER": lambda held: held.worker,
    "PID": lambda held: "" if held.is_free else str(held.pid),
    "SINCE": since_of,
}


def columns_at(at: datetime) -> Columns:
    """The columns of `watch`, without the key's prefix and a task of the scope's name."""

    def age(held: HeldKey) -> str:
        return "" if held.since is None else _duration((at - held.since).total_seconds())

    return {
        "KEY": lambda held: without_prefix(held.key),
        "STATE": state_of,
        "TTL": lambda held: "" if held.is_free else f"{held.ttl:.0f}s",
        "AGE": age,
        "HOLDER": lambda held: held.task_id if held.task == held.scope else holder_of(held),
        "WORKER": lambda held: held.worker,
    }


def _duration(seconds: float) -> str:
    """As the option --older-than takes it; whole units."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"
