"""What each pool child holds, in memory that its worker parent can read, also after its death.

The parent can't compute callable keys and knows nothing of ``hold()``, so a child writes key and
token here before it asks the store. Anonymous memory, mapped before the fork; one row per pool
index, which is unique among the living and kept through recycling and autoscale.

A row has several cells: a dead child's successor gets its index, and may write before the parent
has heard of the death. So a child takes a cell in which nothing is held, and the parent empties the
cell of a child it has settled; one that ended well has emptied its own.

A cell has two parts. The text says what is held, or asked for; it ends with a checksum, so that
what is read while it is written, or was left by a child killed in between, counts as empty. Behind
it are the deadlines of what was granted, which child and parent both move (see ``deadline_slots``).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from celery_singleton_lock.celery_compat import pool_index
from celery_singleton_lock.core.lease import Lease
from celery_singleton_lock.worker import deadline_cells as deadline_slots
from celery_singleton_lock.worker.deadline_cells import (
    SLOTS,
    ChildsSlot,
    Share,
    sealed,
    stamp_of,
    unsealed,
)
from celery_singleton_lock.worker.process_identity import lives, start_time_of

__all__ = ["Held", "HeldByLiving", "SharedMemory"]

_ROWS: Final = 512  # pool children with a higher index are covered by the ttl alone
_CELLS: Final = 4
_TEXT_BYTES: Final = 2048  # five leases with the longest keys
_MAX_ENTRY_BYTES: Final = 1024
_CELL_BYTES: Final = _TEXT_BYTES + deadline_slots.BYTES
_ROW_BYTES: Final = _CELLS * _CELL_BYTES
_HEADER: Final = struct.Struct("=IIQ")  # pid, length of the JSON that follows, the pid's birth
_SEAL_BYTES: Final = len(sealed(b""))
_NO_SLOTS: Final = bytes(deadline_slots.BYTES)


@dataclass(frozen=True, slots=True)
class Held:
    """One lease, or one that was asked for: the token decides."""

    keys: tuple[str, ...]
    token: str
    ttl: float
    claim: str = ""  # key of the message's claim, if it has one

    def encode(self) -> bytes:
        return json.dumps([self.keys, self.token, self.ttl, self.claim]).encode()


@dataclass(frozen=True, slots=True)
class HeldByLiving:
    """One lease that a child, unless it has died since, renews."""

    pid: int
    birth: int
    share: Share
    _cell: int


@dataclass(slots=True)
class _Cell:
    """The one that this process writes; its offset is None where it has no row."""

    offset: int | None
    birth: int
    #: By token; encoded, for it is written as often as anything here changes.
    held: dict[str, bytes] = field(default_factory=dict)
    slots: dict[str, ChildsSlot] = field(default_factory=dict)
    free: deque[int] = field(default_factory=lambda: deque(range(SLOTS)))
    #: Another object after each change of ``held``.
    version: object = None

    def encode(self) -> bytes:
        # A list first, in one step: hold() in a thread of the body may note at the same time.
        return b"[" + b",".join(list(self.held.values())) + b"]"


@dataclass(slots=True)
class SharedMemory:
    """The memory of one worker; only Linux and macOS fork pools have one."""

    #: First a byte per row, which says whether it was ever used: the parent looks at those alone.
    _memory: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, _ROWS + _ROWS * _ROW_BYTES))
    #: By process: what a fork copied is the parent's.
    _cells: dict[int, _Cell] = field(default_factory=dict)

    #: The one of this worker, in the parent and its children; set before the pool forks.
    current: ClassVar[SharedMemory | None] = None

    def note(self, keys: Sequence[str], token: str, ttl: float, claim: str = "") -> None:
        """Child: write down what is about to be held."""
        pid = os.getpid()
        # Of two threads that come first at once, the second uses what the first put there.
        cell = self._cells.get(pid) or self._cells.setdefault(pid, self._new_cell())
        held = Held(tuple(keys), token, ttl, claim).encode()
        if len(held) > _MAX_ENTRY_BYTES:
            return  # all slots of a wide limit: the one that is granted is written down then
        cell.held[token] = held
        self._write(pid, cell)

    def share(self, lease: Lease) -> ChildsSlot | None:
        """Child: let the parent renew what was granted; None where there is no room for it."""
        cell = self._cells.get(os.getpid())
        if cell is None or cell.offset is None:
            return None
        for known, old in list(cell.slots.items()):
            if old.closed:  # its release failed, so nobody has struck it
                cell.slots.pop(known, None)
        try:
            number = cell.free.popleft()
        except IndexError:
            return None
        token = str(lease.token)
        slot = cell.slots[token] = ChildsSlot(
            self._memory,
            cell.offset + _TEXT_BYTES,
            number,
            cell.free,
            lease,
            stamp_of(lease.key, token),
        )
        slot.tell(lease.valid_until)
        return slot

    def strike(self, token: str) -> None:
        """Child: it is held no more."""
        cell = self._cells.get(os.getpid())
        if cell is None:
            return
        slot = cell.slots.pop(token, None)
        if slot is not None:
            slot.close()
        if cell.held.pop(token, None) is not None:
            self._write(os.getpid(), cell)

    def of_dead(self, pid: int) -> list[Held]:
        """Parent: what the child ``pid`` held when it died."""
        return [held for offset in self._cells_of(pid) for held in self._read(offset)]

    def settle(self, pid: int) -> None:
        """Parent: empty the cell of ``pid``, for its leases are taken care of."""
        for offset in self._cells_of(pid):
            self._empty(offset)

    def of_living(self) -> list[HeldByLiving]:
        """Parent: what the children hold; whether each still lives is to be asked before use."""
        return [
            HeldByLiving(pid, birth, share, offset)
            for offset in self._used_cells()
            for pid, birth in [self._owner(offset)]
            if pid
            for share in deadline_slots.shares(self._memory, offset + _TEXT_BYTES)
        ]

    def name(self, one: HeldByLiving) -> Held | None:
        """Parent: key and token of what it read; None if it is given back, or can't be read now."""
        for held in self._read(one._cell):
            if stamp_of(held.keys[0], held.token) == one.share.stamp:
                return held
        return None

    def advance(self, one: HeldByLiving, valid_until: float) -> None:
        """Parent: tell the child that its lease was renewed for it; seconds on the host's clock."""
        one.share.advance(self._memory, valid_until)

    def _new_cell(self) -> _Cell:
        offset = self._free_offset()
        if offset is not None:
            self._empty(offset)
        return _Cell(offset, start_time_of(os.getpid()))

    def _free_offset(self) -> int | None:
        index = pool_index()
        if index is None or index >= _ROWS:
            return None
        self._memory[index] = 1
        cells = list(self._cells_of_row(index))
        # A fork of the body has its parent's index, and must not write where its parent does.
        free = [cell for cell in cells if not self._read(cell) and not lives(*self._owner(cell))]
        # All taken: four children of this row died unheard. The first one's ttl has to do.
        return (free or cells)[0]

    def _empty(self, offset: int) -> None:
        _HEADER.pack_into(self._memory, offset, 0, 0, 0)
        start = offset + _TEXT_BYTES
        self._memory[start : start + len(_NO_SLOTS)] = _NO_SLOTS

    def _write(self, pid: int, cell: _Cell) -> None:
        if cell.offset is None:
            return
        cell.version = version = object()
        while True:
            text = cell.encode()
            while len(text) > _TEXT_BYTES - _HEADER.size - _SEAL_BYTES:
                # The oldest first: releases that failed stay here, and the ttl has freed those.
                cell.held.pop(next(iter(cell.held)))
                text = cell.encode()
            data = sealed(_HEADER.pack(pid, len(text), cell.birth) + text)
            self._memory[cell.offset : cell.offset + len(data)] = data
            if cell.version is version:
                return
            # Another thread has changed what is held: of two writers, the last one is complete.
            version = cell.version

    def _used_cells(self) -> Iterator[int]:
        for index, used in enumerate(self._memory[:_ROWS].rstrip(b"\0")):
            if used:
                yield from self._cells_of_row(index)

    def _cells_of_row(self, index: int) -> range:
        start = _ROWS + index * _ROW_BYTES
        return range(start, start + _ROW_BYTES, _CELL_BYTES)

    def _cells_of(self, pid: int) -> Iterator[int]:
        return (offset for offset in self._used_cells() if self._owner(offset)[0] == pid)

    def _owner(self, offset: int) -> tuple[int, int]:
        """The process that wrote there: id and birth; 0, 0: nobody, or it is settled."""
        pid, _, birth = _HEADER.unpack_from(self._memory, offset)
        return pid, birth

    def _read(self, offset: int) -> list[Held]:
        length = _HEADER.unpack_from(self._memory, offset)[1]
        end = offset + min(_HEADER.size + length + _SEAL_BYTES, _TEXT_BYTES)
        data = unsealed(self._memory[offset:end])
        if data is None:
            return []
        rows: list[Any] = json.loads(data[_HEADER.size :] or b"[]")
        return [Held(tuple(keys), token, ttl, claim) for keys, token, ttl, claim in rows]
