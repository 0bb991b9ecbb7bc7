"""Memory in which pool children note their leases for the worker's parent process.

The parent reads the notes for two purposes: to release the leases of a dead child, and to renew
leases that a living child cannot renew. It can compute neither callable keys nor the names of
``hold()``, so a child writes keys and token before it sends the request to the store.

The memory is anonymous and is mapped before the fork. It has one row per pool index, which is
unique among living children and is reused by a child's successor. A row has several blocks, because
the successor may write before the parent knows of the death. A child takes a block whose owner is
dead and has no note. The parent empties the blocks of a child once it has released its leases.

A block has the identity of its owner and ``NOTES`` notes. A note has four parts, each with one
writer at a time:

* the child's deadline: the deadline of the child's own renewals;
* the parent's deadline: the deadline of the parent's renewals;
* the report: written by the child, that an event has reported the grant; by the parent, that an
  event has reported the end; or by another child, that it frees the lease of this child, which is
  dead;
* the text: keys, token and claim, written by the child.

The lease's deadline is the later of the two. There are no locks, because a child that is killed
would never release one. Each part is written at once, with its length and a checksum. These rules
replace locks:

* A part that is read while it is written has a wrong checksum and counts as empty. The child reads
  the parent's deadline a second time, because it may be about to declare a loss.
* Both deadlines carry a stamp, a hash of key and token. A renewal by the parent that is written
  after the note was given to another lease has another stamp, and is ignored.
* The child erases its deadline when renewal ends, and then ignores the parent's deadline.

PID plus start time identifies a process, because PIDs are reused.
"""

from __future__ import annotations

import marshal
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from struct import Struct
from typing import Any, Final, TypeAlias
from zlib import crc32

from ..celery_compat import pool_index
from ..core.lease import Lease
from ..core.process import Process, lives, processes, start_time_of

#: The number of leases of one process that are noted. The parent does not know of further ones.
NOTES: Final = 16

_ROWS: Final = 512  # the ttl frees leases of dead children with a higher index
_BLOCKS: Final = 4

# The parts of the memory are marshalled tuples, with a head each: length and checksum. The sizes
# are in bytes, with the head. The owner and the deadlines have numbers only and never take more.
# 4 bytes of length: `note` measures the text of 1000 slots, 100 kB, to see that it does not fit.
_HEAD: Final = Struct("=II")
_NOTHING: Final = bytes(_HEAD.size)
_OWNER_BYTES: Final = 40  # pid, start time
_Fields = tuple[float, int, float, float, bool]
_CHILDS_BYTES: Final = 64  # _Fields: valid until, stamp, hold until, ttl, with claim
_PARENTS_BYTES: Final = 40  # stamp, valid until
_MAX_TEXT: Final = 1024
_REPORT_BYTES: Final = 40  # stamp, time of the grant
# The times in the report of a lease whose end the parent has reported, and of one that another
# child is about to free.
_CONCLUDED: Final = -inf
_FREEING: Final = inf
_REPORT: Final = _CHILDS_BYTES + _PARENTS_BYTES  # offset of the report in a note
_TEXT: Final = _REPORT + _REPORT_BYTES  # offset of the text in a note
_NOTE_BYTES: Final = _TEXT + _MAX_TEXT
_BLOCK_BYTES: Final = _OWNER_BYTES + NOTES * _NOTE_BYTES
_ROW_BYTES: Final = _BLOCKS * _BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class LeaseNote:
    """The text of a note: a lease that is held or was requested.

    Attributes:
        keys: The key, or all slots that were requested.
        token: The lease's token, as text.
        ttl: Seconds.
        claim: Key of the message's claim; empty: none.
    """

    keys: tuple[str, ...]
    token: str
    ttl: float
    claim: str = ""


@dataclass(frozen=True, slots=True)
class DeadLease:
    """A note of a dead or dying child.

    Attributes:
        note: The text of the note.
        running: Whether the child held the lease: it was granted, and neither lost nor released.
        acquired_at: The time of a grant whose event needs an event of its end; None: there is none.
        concluded: Whether the parent has reported the end.
        offset: Of the note in the memory.
    """

    note: LeaseNote
    offset: int
    running: bool
    acquired_at: float | None
    concluded: bool


@dataclass(frozen=True, slots=True)
class RunningLease:
    """The deadlines of a note, as the parent reads them; times on the clock of the host.

    Attributes:
        pid: The process that wrote the note.
        start_time: The start time of that process. PID and start time identify it.
        note: Offset of the note in the memory.
        childs: The deadline of the child's own renewals.
        stamp: Identifies the grant.
        hold_until: The time at which renewal must stop; inf: there is no limit.
        ttl: Seconds.
        with_claim: Whether the message's claim is renewed too.
        parents: The deadline of the parent's renewals; -inf if there are none.
    """

    pid: int
    start_time: int
    note: int
    childs: float
    stamp: int
    hold_until: float
    ttl: float
    with_claim: bool
    parents: float

    @property
    def deadline(self) -> float:
        return max(self.childs, self.parents)


class SharedLease:
    """A child's handle of one note. It is the ``SharedDeadline`` of a granted lease.

    The body's thread and the heartbeat's thread may call its methods at the same time.
    """

    __slots__ = ("_memory", "_owner", "_terms", "closed", "note")

    # Stamp, hold until, ttl, with claim. Set by open(), and not read before.
    _terms: tuple[int, float, float, bool]

    def __init__(self, memory: mmap.mmap, note: int, owner: Process) -> None:
        self._memory = memory
        self._owner = owner
        #: Offset of the note in the memory.
        self.note = note
        #: Whether the parent must not renew the lease, before the grant and after the end.
        self.closed = True

    def open(self, lease: Lease, token: str) -> None:
        """Let the parent renew ``lease``."""
        stamp = _stamp_of(lease.key, token)
        self._terms = (stamp, lease.hold_until, lease.ttl, bool(lease.claim_key))
        self.closed = False
        self.write(lease.valid_until)

    def write(self, valid_until: float) -> None:
        """See `SharedDeadline.write`."""
        start = self.note
        if not self.closed:
            data = sealed((valid_until, *self._terms))
            self._memory[start : start + len(data)] = data
        if self.closed:
            # The body's thread has closed this handle meanwhile. The note is the last in the queue
            # of free notes, so no other lease uses it yet.
            self._memory[start : start + _HEAD.size] = _NOTHING

    def parents(self) -> float:
        """See `SharedDeadline.parents`."""
        return -inf if self.closed else _parents(self._memory, self.note, self._terms[0])

    def announce(self, acquired_at: float) -> None:
        """See `SharedDeadline.announce`."""
        _write(self._memory, self.note + _REPORT, (self._terms[0], acquired_at))

    def conclude(self) -> bool:
        """See `SharedDeadline.conclude`."""
        start = self.note + _REPORT
        stamp, at = _report(self._memory, self.note)
        if stamp != self._terms[0]:
            return True  # no event has reported the grant
        if at == _CONCLUDED:
            return False
        self._memory[start : start + _HEAD.size] = _NOTHING
        return True

    def close(self) -> None:
        """See `SharedDeadline.close`."""
        if self.closed or processes[os.getpid()] is not self._owner:
            return  # a fork of the holder may read the note, but must not change it
        self.closed = True
        self._memory[self.note : self.note + _HEAD.size] = _NOTHING


@dataclass(slots=True)
class SharedMemory:
    """The memory of one worker; only prefork pools have one."""

    #: The memory begins with one byte per row: whether the row was ever used. The parent skips
    #: unused rows.
    _memory: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, _ROWS + _ROWS * _ROW_BYTES))
    #: By process, because a fork copies this object: the notes by token, and the offsets of free
    #: notes.
    _processes: dict[Process, _Notes] = field(default_factory=dict)

    # The child's side.

    def note(self, keys: Sequence[str], token: str, ttl: float, claim: str = "") -> None:
        """Note a lease that is about to be requested from the store."""
        process = processes[os.getpid()]
        # setdefault() is atomic: two concurrent first callers get the same notes.
        notes, free = self._processes.get(process) or self._processes.setdefault(
            process, ({}, deque(self._take_notes()))
        )
        text = sealed((tuple(keys), token, ttl, claim))
        if len(text) > _MAX_TEXT:
            return  # too long: all slots of a high limit; the granted slot is noted after the grant
        shared = notes.get(token)
        if shared is None:
            note = _free_note(notes, free)
            if note is None:
                return
            shared = notes[token] = SharedLease(self._memory, note, process)
        start = shared.note + _TEXT
        self._memory[start : start + len(text)] = text

    def share(self, lease: Lease) -> SharedLease | None:
        """Let the parent renew a granted lease; None if the lease is not noted."""
        token = lease.token.text
        notes, _ = self._processes.get(processes[os.getpid()], _NO_NOTES)
        shared = notes.get(token)
        if shared is not None:
            shared.open(lease, token)
        return shared

    def erase(self, token: str) -> None:
        """Erase the note of a lease that is no longer held."""
        notes, free = self._processes.get(processes[os.getpid()], _NO_NOTES)
        if shared := notes.pop(token, None):
            shared.close()
            start = shared.note + _TEXT
            self._memory[start : start + _HEAD.size] = _NOTHING
            free.append(shared.note)

    def freeing(self, token: str) -> None:
        """Note that this child frees the lease of a dead child, and reports it if it succeeds."""
        for note, text in self._noted():
            if text.token == token:
                self._mark(note, text, _FREEING)

    # The parent's side.

    def of_dead(self, pid: int) -> list[DeadLease]:
        """The notes of the leases that the child ``pid`` held when it died."""
        return [self._dead(note, text) for note, text in self._noted(pid)]

    def conclude(self, pid: int) -> None:
        """Keep the child ``pid``, which is being killed, from reporting the ends of its leases."""
        for note, text in self._noted(pid):
            self._mark(note, text, _CONCLUDED)

    def is_freeing(self, lease: DeadLease) -> bool:
        """Whether another child has tried to free ``lease``."""
        return _report(self._memory, lease.offset)[1] == _FREEING

    def empty(self, pid: int) -> None:
        """Empty the blocks of ``pid``, whose leases are released."""
        for block, owner, _ in self._owned_blocks():
            if owner == pid:
                self._empty(block)

    def of_living(self) -> list[RunningLease]:
        """The leases of all children. The caller checks that a child lives before a renewal."""
        memory, found = self._memory, []
        for block, pid, start_time in self._owned_blocks():
            for note in _notes_of(block):
                fields: _Fields | None = unsealed(memory[note : note + _CHILDS_BYTES])
                if fields is not None:
                    parents = _parents(memory, note, stamp=fields[1])
                    found.append(RunningLease(pid, start_time, note, *fields, parents))
        return found

    def note_of(self, lease: RunningLease) -> LeaseNote | None:
        """Keys and token of ``lease``; None if it was released, or if the note is being written."""
        note = self._text(lease.note)
        return note if note and _stamp_of(note.keys[0], note.token) == lease.stamp else None

    def advance(self, lease: RunningLease, valid_until: float) -> None:
        """Write the new deadline of a lease that the parent renewed."""
        _write(self._memory, lease.note + _CHILDS_BYTES, (lease.stamp, valid_until))

    def _noted(self, pid: int | None = None) -> list[tuple[int, LeaseNote]]:
        """The notes of one child, or of all, that have a text, each with its offset."""
        blocks = [block for block, owner, _ in self._owned_blocks() if pid in (None, owner)]
        notes = [note for block in blocks for note in _notes_of(block)]
        return [(note, text) for note in notes if (text := self._text(note))]

    def _dead(self, note: int, text: LeaseNote) -> DeadLease:
        stamp = _stamp_of(text.keys[0], text.token)
        fields: _Fields | None = unsealed(self._memory[note : note + _CHILDS_BYTES])
        whose, at = _report(self._memory, note)
        return DeadLease(
            note=text,
            offset=note,
            running=fields is not None and fields[1] == stamp,
            acquired_at=at if whose == stamp and at not in (_CONCLUDED, _FREEING) else None,
            concluded=whose == stamp and at == _CONCLUDED,
        )

    def _mark(self, note: int, text: LeaseNote, at: float) -> None:
        stamp = _stamp_of(text.keys[0], text.token)
        _write(self._memory, note + _REPORT, (stamp, at))

    # Blocks.

    def _take_notes(self) -> Sequence[int]:
        """Take a block for this process; the offsets of its notes, none if there is no block."""
        index = pool_index()
        if index is None or index >= _ROWS:
            return ()
        self._memory[index] = 1
        # A fork of the body has its parent's index, and must not write to its parent's block.
        dead = [block for block in _blocks_of(index) if not lives(*self._owner(block))]
        if not dead:
            return ()  # all four blocks belong to the child and to forks of its bodies
        # If all blocks have notes, several processes of this row have died and the parent has not
        # noticed yet. The first block is taken; the ttl frees the leases that were noted there.
        block = next((block for block in dead if not any(self._texts(block))), dead[0])
        self._empty(block)
        owner = sealed((os.getpid(), start_time_of(os.getpid())))
        self._memory[block : block + len(owner)] = owner
        return _notes_of(block)

    def _empty(self, block: int) -> None:
        self._memory[block : block + _BLOCK_BYTES] = bytes(_BLOCK_BYTES)

    def _owned_blocks(self) -> Iterator[tuple[int, int, int]]:
        """The blocks that have an owner, each with its owner's PID and start time."""
        for index, used in enumerate(self._memory[:_ROWS].rstrip(b"\0")):
            if used:
                owned = ((block, *self._owner(block)) for block in _blocks_of(index))
                yield from (one for one in owned if one[1])

    def _owner(self, block: int) -> tuple[int, int]:
        """PID and start time of the process that owns the block; 0, 0: none, or emptied."""
        return unsealed(self._memory[block : block + _OWNER_BYTES]) or (0, 0)

    def _texts(self, block: int) -> Iterator[LeaseNote]:
        return filter(None, map(self._text, _notes_of(block)))

    def _text(self, note: int) -> LeaseNote | None:
        text = unsealed(self._memory[note + _TEXT : note + _NOTE_BYTES])
        return LeaseNote(*text) if text else None


# By token, and the offsets of free notes.
_Notes: TypeAlias = tuple[dict[str, SharedLease], deque[int]]
# The notes of a process that has noted nothing.
_NO_NOTES: Final[_Notes] = ({}, deque())


def _free_note(notes: dict[str, SharedLease], free: deque[int]) -> int | None:
    """The offset of a note for a new lease; None: there is none.

    If no note is free, the oldest one that is in use but closed is taken. Its lease has ended
    without a confirmed release, so the ttl frees that key. Or, in a child with more leases than
    notes, its lease is about to be acquired; then that lease goes without a note.
    """
    try:
        return free.popleft()
    except IndexError:
        ended = next((token for token, shared in list(notes.items()) if shared.closed), None)
        replaced = None if ended is None else notes.pop(ended, None)
        return None if replaced is None else replaced.note


def _blocks_of(index: int) -> range:
    start = _ROWS + index * _ROW_BYTES
    return range(start, start + _ROW_BYTES, _BLOCK_BYTES)


def _notes_of(block: int) -> range:
    return range(block + _OWNER_BYTES, block + _BLOCK_BYTES, _NOTE_BYTES)


def _write(memory: mmap.mmap, start: int, values: tuple[Any, ...]) -> None:
    data = sealed(values)
    memory[start : start + len(data)] = data


def _report(memory: mmap.mmap, note: int) -> tuple[int | None, float]:
    """The stamp and the time in the report of a note."""
    return unsealed(memory[note + _REPORT : note + _TEXT]) or (None, 0.0)


def _parents(memory: mmap.mmap, note: int, stamp: int) -> float:
    start, end = note + _CHILDS_BYTES, note + _REPORT
    # If the parent is writing it, which takes some nanoseconds, it is read once more. Without the
    # parent's renewal the child would declare a loss, and that is final.
    if found := unsealed(memory[start:end]) or unsealed(memory[start:end]):
        whose, valid_until = found
        return float(valid_until) if whose == stamp else -inf
    return -inf


def sealed(values: tuple[Any, ...]) -> bytes:
    """The bytes of a part of the memory: ``values``, after their length and checksum."""
    content = marshal.dumps(values, 2)
    return _HEAD.pack(len(content), crc32(content)) + content


def unsealed(data: bytes) -> Any:
    """The argument of :func:`sealed`; None if ``data`` is torn, or was erased or never written."""
    length, checksum = _HEAD.unpack_from(data)
    content = data[_HEAD.size : _HEAD.size + length]
    return marshal.loads(content) if length and checksum == crc32(content) else None


def _stamp_of(key: str, token: str) -> int:
    # The parent and its forks have the same hash seed.
    return hash((key, token))
