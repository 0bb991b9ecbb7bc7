"""The number of shards of a prefix, written down in the store so that no two apps disagree.

It is part of every key (``csl:{prefix:shard}:...``): apps that count differently would each lock
keys of their own, and two bodies would run. That happens when one app names a node of a cluster as
a plain server, or when data were moved from the one sort to the other.
"""

from __future__ import annotations

from collections.abc import Callable

from celery_singleton_lock.core.key import Keyspace

__all__ = ["Shards"]


class Shards:
    """What one process knows of it.

    Args:
        number: The shards of this store's sort.
        write_down: Called with the name of a note and the number, where no note is written yet;
            returns what the note says.
    """

    def __init__(self, number: int, write_down: Callable[[str, int, float], int]) -> None:
        self._number = number
        self._write_down = write_down
        self._agreed: set[str] = set()
        # What the names of shards begin with whose note is among those: asked for in each call.
        self._known: set[str] = set()
        self._just_asked = False

    def disagreement(self, key: str, timeout: float) -> str:
        """What is wrong with the prefix of ``key``; empty if nothing is. Asks the store once.

        Raises:
            StoreError, StoreUnavailable: As of the store.
        """
        shard = Keyspace.shard(key)
        self._just_asked = False
        if shard in self._known:
            return ""
        note = Keyspace.shards_note(key)
        if note in self._agreed:
            self._known.add(shard)
            return ""
        self._just_asked = True
        written = self._write_down(note, self._number, timeout)
        if written == self._number:
            self._agreed.add(note)
            return ""
        return (
            f"the locks here are kept in {written} shard(s), says {note!r}, and this app looks for "
            f"them in {self._number}: two apps would not see each other's locks. Name the store "
            "alike everywhere (a cluster is redis+cluster://, in every app); if no worker of the "
            "other sort is left, delete that key"
        )

    def forget(self) -> None:
        """The store may have lost its notes, unless the one for this call was read just now."""
        if not self._just_asked:
            self._agreed.clear()
            self._known.clear()
