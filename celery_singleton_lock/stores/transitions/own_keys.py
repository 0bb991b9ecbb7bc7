"""The keys that this process keeps alive in a store whose server can't expire them one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

#: A key and its owner: the token of a lease or the task of a claim. Two acquires of one key may
#: both lack a reply, and either may have been carried out. So each has a note of its own.
Name = tuple[str, str]


class _Own(Protocol):
    until: float


Own = TypeVar("Own", bound=_Own)


class OwnKeys(Generic[Own]):
    """The notes of one process on keys that it wrote, or may have written, by name.

    ``until`` of a note is the end of the key's ttl, unless the key is renewed. Any thread may
    change notes; each change is one step of the interpreter.
    """

    def __init__(self) -> None:
        self.all: dict[Name, Own] = {}
        # The owner of the last write of each key that was acknowledged.
        self._written: dict[str, str] = {}

    def add(self, notes: Mapping[Name, Own]) -> dict[Name, Own | None]:
        """Add notes before the write is sent; return the notes that they replace."""
        before = {name: self.all.get(name) for name in notes}
        self.all.update(notes)
        return before

    def restore(self, notes: Mapping[Name, Own], before: Mapping[Name, Own | None]) -> None:
        """Undo :meth:`add` after the store has refused the write."""
        for name, note in notes.items():
            old = before[name]
            if self.all.get(name) is not note:
                continue  # Another thread has written the key meanwhile.
            if old is None:
                self.all.pop(name, None)
            else:
                self.all[name] = old

    def acknowledge(self, name: Name) -> None:
        """Note that the store has acknowledged the write."""
        self._written[name[0]] = name[1]

    def written(self, key: str) -> Own | None:
        """The note on the last write of ``key`` that was acknowledged."""
        return self.all.get((key, self._written.get(key, "")))

    def forget(self, name: Name) -> None:
        """Remove the note: this process no longer has to expire the key."""
        self.all.pop(name, None)
        if self._written.get(name[0]) == name[1]:
            self._written.pop(name[0], None)
