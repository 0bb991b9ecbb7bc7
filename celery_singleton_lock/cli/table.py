"""Keys as rows of text: the table that `ls` and `release` print, and the one that `watch` draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

from ..inspection import HeldKey

#: By the head of each column, its text for a key.
Columns: TypeAlias = Mapping[str, Callable[[HeldKey], str]]

#: The last column: the number of waiting clients.
WAITING: Final[Columns] = {"WAITING": lambda key: "" if key.waiting is None else str(key.waiting)}


def rows_of(found: Iterable[HeldKey], columns: Columns) -> list[list[str]]:
    """The heads, and a row for each key; the column `WAITING` only if a store counts clients."""
    texts = [*columns.values(), *WAITING.values()]
    rows = [[shown(text(key)) for text in texts] for key in found]
    rows.insert(0, [*columns, *WAITING])
    return rows if any(row[-1] for row in rows[1:]) else [row[:-1] for row in rows]


def holder_of(key: HeldKey) -> str:
    """The call that holds the key; a lease of `hold` has no task."""
    return f"{key.task}[{key.task_id}]" if key.task else key.task_id


def since_of(key: HeldKey) -> str:
    """When the key was taken, in ISO 8601; empty: unknown."""
    return key.since.isoformat(timespec="seconds") if key.since else ""


def shown(text: str) -> str:
    """``text`` without control characters: a publisher may choose any text as a task's id."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()
