"""What each pool child holds, in memory that its worker parent can read after the child's death.

The parent can't compute callable keys and knows nothing of ``hold()``, so a child writes key and
token here before it asks the store. Anonymous memory, mapped before the fork; one row per pool
index, which is unique among the living and kept through recycling and autoscale.

A row has several cells: a dead child's successor gets its index, and may write before the parent
has heard of the death. So a child takes a cell in which nothing is held, and the parent empties the
cell of a child it has settled; one that ended well has emptied its own.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["Held", "SharedRecord"]

_ROWS: Final = 512  # pool children with a higher index are covered by the ttl alone
_CELLS: Final = 4
_CELL_BYTES: Final = 2048  # five leases with the longest keys
_MAX_ENTRY_BYTES: Final = 1024
_HEADER: Final = struct.Struct("=II")  # pid, length of the JSON that follows


@dataclass(frozen=True, slots=True)
class Held:
    """One lease, or one that was asked for: the token decides."""

    keys: tuple[str, ...]
    token: str
    ttl: float
    claim: str = ""  # key of the message's claim, if it has one

    def encode(self) -> bytes:
        return json.dumps([self.keys, self.token, self.ttl, self.claim]).encode()


@dataclass(slots=True)
class _Cell:
    """The one that this process writes; None where it has no row."""

    offset: int | None
    held: dict[str, Held] = field(default_factory=dict)

    def encode(self) -> bytes:
        # A list first, in one step: hold() in a thread of the body may note at the same time.
        return b"[" + b",".join(held.encode() for held in list(self.held.values())) + b"]"


@dataclass(slots=True)
class SharedRecord:
    """The memory of one worker; only Linux and macOS fork pools have one."""

    _memory: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, _ROWS * _CELLS * _CELL_BYTES))
    #: By process: what a fork copied is the parent's.
    _cells: dict[int, _Cell] = field(default_factory=dict)

    def note(self, keys: Sequence[str], token: str, ttl: float, claim: str = "") -> None:
        """Child: write down what is about to be held."""
        pid = os.getpid()
        # Of two threads that come first at once, the second uses what the first put there.
        cell = self._cells.get(pid) or self._cells.setdefault(pid, _Cell(self._free_offset()))
        held = Held(tuple(keys), token, ttl, claim)
        if len(held.encode()) > _MAX_ENTRY_BYTES:
            return  # all slots of a wide limit: the one that is granted is written down then
        cell.held[token] = held
        self._write(pid, cell)

    def strike(self, token: str) -> None:
        """Child: it is held no more."""
        cell = self._cells.get(os.getpid())
        if cell is not None and cell.held.pop(token, None) is not None:
            self._write(os.getpid(), cell)

    def of_dead(self, pid: int) -> list[Held]:
        """Parent: what the child ``pid`` held when it died."""
        return [held for offset in self._cells_of(pid) for held in self._read(offset)]

    def settle(self, pid: int) -> None:
        """Parent: empty the cell of ``pid``, for its leases are taken care of."""
        for offset in self._cells_of(pid):
            _HEADER.pack_into(self._memory, offset, 0, 0)

    def _free_offset(self) -> int | None:
        index = _pool_index()
        if index is None or index >= _ROWS:
            return None
        row = index * _CELLS * _CELL_BYTES
        offsets = [row + cell * _CELL_BYTES for cell in range(_CELLS)]
        free = [offset for offset in offsets if not self._read(offset)]
        # All taken: four children of this row died unheard. The first one's ttl has to do.
        return (free or offsets)[0]

    def _write(self, pid: int, cell: _Cell) -> None:
        if cell.offset is None:
            return
        text = cell.encode()
        while len(text) > _CELL_BYTES - _HEADER.size:
            # The oldest first: releases that failed stay here, and the ttl has freed those keys.
            cell.held.pop(next(iter(cell.held)))
            text = cell.encode()
        start = cell.offset + _HEADER.size
        # Length 0 first and the true one last: a child killed in between leaves an empty cell, not
        # a torn one.
        _HEADER.pack_into(self._memory, cell.offset, pid, 0)
        self._memory[start : start + len(text)] = text
        _HEADER.pack_into(self._memory, cell.offset, pid, len(text))

    def _cells_of(self, pid: int) -> Iterator[int]:
        for offset in range(0, len(self._memory), _CELL_BYTES):
            if _HEADER.unpack_from(self._memory, offset)[0] == pid:
                yield offset

    def _read(self, offset: int) -> list[Held]:
        length = _HEADER.unpack_from(self._memory, offset)[1]
        start = offset + _HEADER.size
        try:
            rows: list[Any] = json.loads(self._memory[start : start + length] or b"[]")
        except ValueError:
            return []
        return [Held(tuple(keys), token, ttl, claim) for keys, token, ttl, claim in rows]


def _pool_index() -> int | None:
    from billiard.process import current_process

    return getattr(current_process(), "index", None)
