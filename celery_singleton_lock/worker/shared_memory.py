"""Memory in which pool children note their leases for the worker's parent process.

The parent reads the notes for two purposes: to release the leases of a dead child, and to renew
leases that a living child cannot renew. It can compute neither callable keys nor the names of
``hold()``, so a child writes keys and token before it sends the request to the store.

The memory is anonymous and is mapped before the fork. It has one row per pool index, which is
unique among living children and is reused by a child's successor. A row has several blocks, because
the successor may write before the parent knows of the death. A child takes a block whose owner is
dead and has no note. The parent empties the blocks of a child once it has settled its leases.

A block has the identity of its owner and ``NOTES`` notes. A note has three parts, each with a
checksum and one writer:

* the text: keys, token and claim, written by the child;
* the child's deadline: the deadline of the child's own renewals;
* the parent's deadline: the deadline of the parent's renewals.

The lease's deadline is the later of the two. There are no locks, because a child that is killed
would never release one. These rules replace locks:

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
from typing import ClassVar, Final
from zlib import crc32

from celery_singleton_lock.celery_compat import pool_index
from celery_singleton_lock.core.lease import Lease

#: The number of leases of one process that are noted. The parent does not know of further ones.
NOTES: Final = 16

_ROWS: Final = 512  # the ttl frees leases of dead children with a higher index
_BLOCKS: Final = 4
_MAX_TEXT: Final = 1024

_SEAL: Final = Struct("=I")
_OWNER: Final = Struct("=IQ")  # pid, start time
_CHILDS: Final = Struct("=Qddd?")  # stamp, valid until, hold until, ttl, with claim
_Fields = tuple[int, float, float, float, bool]
_PARENTS: Final = Struct("=Qd")  # stamp, valid until
_LENGTH: Final = Struct("=H")
_CHILDS_BYTES: Final = _CHILDS.size + _SEAL.size
_PARENTS_BYTES: Final = _PARENTS.size + _SEAL.size
_DEADLINE_BYTES: Final = _CHILDS_BYTES + _PARENTS_BYTES
# The deadlines come first and the texts follow. The parent reads all deadlines ten times a second,
# and memory that is never read or written takes no page.
_TEXTS: Final = _OWNER.size + NOTES * _DEADLINE_BYTES
_BLOCK_BYTES: Final = _TEXTS + NOTES * _MAX_TEXT
_ROW_BYTES: Final = _BLOCKS * _BLOCK_BYTES

_NO_DEADLINE: Final = bytes(_CHILDS_BYTES)
_NO_TEXT: Final = bytes(_LENGTH.size + _SEAL.size)
_STAMPS: Final = 2**64 - 1

# Indexes of the fields of /proc/<pid>/stat after the program's name, from their numbers in proc(5).
# The name is field 2 and may contain blanks and parentheses.
_STATE: Final = 3 - 3
_STARTTIME: Final = 22 - 3
# The states of dead processes. A zombie runs no code any more, although its parent has not yet read
# its exit status.
_DEAD: Final = b"ZXx"


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
class RunningLease:
    """The deadlines of a note, as the parent reads them; times on the clock of the host.

    Attributes:
        pid: The process that wrote the note.
        start_time: The start time of that process. PID and start time identify it.
        block: Offset of the block in the memory.
        number: Number of the note in its block.
        stamp: Identifies the grant.
        childs: The deadline of the child's own renewals.
        hold_until: The time at which renewal must stop; inf: there is no limit.
        ttl: Seconds.
        with_claim: Whether the message's claim is renewed too.
        parents: The deadline of the parent's renewals; -inf if there are none.
    """

    pid: int
    start_time: int
    block: int
    number: int
    stamp: int
    childs: float
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

    __slots__ = ("_deadline", "_memory", "_owner", "_stamp", "_terms", "closed", "number", "text")

    # Set by open(), and not read before.
    _stamp: int
    _terms: tuple[float, float, bool]

    def __init__(self, memory: mmap.mmap, block: int, number: int, owner: int) -> None:
        self._memory = memory
        self._deadline = _deadline_offset(block, number)
        self._owner = owner
        self.number = number
        #: Offset of the note's text in the memory.
        self.text = _text_offset(block, number)
        #: Whether the parent must not renew the lease, before the grant and after the end.
        self.closed = True

    def open(self, lease: Lease, token: str) -> None:
        """Let the parent renew ``lease``."""
        self._terms = (lease.hold_until, lease.ttl, bool(lease.claim_key))
        self._stamp = _stamp_of(lease.key, token)
        self.closed = False
        self.write(lease.valid_until)

    def write(self, valid_until: float) -> None:
        """See `SharedDeadline.write`."""
        start, end = self._deadline, self._deadline + _CHILDS_BYTES
        if not self.closed:
            self._memory[start:end] = sealed(_CHILDS.pack(self._stamp, valid_until, *self._terms))
        if self.closed:
            # The body's thread has closed this handle meanwhile. The note is the last in the queue
            # of free notes, so no other lease uses it yet.
            self._memory[start:end] = _NO_DEADLINE

    def parents(self) -> float:
        """See `SharedDeadline.parents`."""
        return -inf if self.closed else _parents(self._memory, self._deadline, self._stamp)

    def close(self) -> None:
        """See `SharedDeadline.close`."""
        if self.closed or os.getpid() != self._owner:
            return  # a fork of the holder may read the note, but must not change it
        self.closed = True
        self._memory[self._deadline : self._deadline + _CHILDS_BYTES] = _NO_DEADLINE


@dataclass(slots=True)
class SharedMemory:
    """The memory of one worker; only prefork pools have one."""

    #: The memory begins with one byte per row: whether the row was ever used. The parent skips
    #: unused rows.
    _memory: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, _ROWS + _ROWS * _ROW_BYTES))
    #: By process id, because a fork copies this object: the block (None: the memory is full), the
    #: notes by token, and the numbers of free notes.
    _processes: dict[int, tuple[int | None, dict[str, SharedLease], deque[int]]] = field(
        default_factory=dict
    )

    #: The memory of this worker, in the parent and its children; set before the pool forks.
    current: ClassVar[SharedMemory | None] = None

    # The child's side.

    def note(self, keys: Sequence[str], token: str, ttl: float, claim: str = "") -> None:
        """Note a lease that is about to be requested from the store."""
        pid = os.getpid()
        # setdefault() is atomic: two concurrent first callers get the same block.
        block, notes, free = self._processes.get(pid) or self._processes.setdefault(
            pid, (self._take_block(), {}, deque(range(NOTES)))
        )
        text = marshal.dumps((tuple(keys), token, ttl, claim))
        if block is None or len(text) > _MAX_TEXT - len(_NO_TEXT):
            return  # too long: all slots of a high limit; the granted slot is noted after the grant
        shared = notes.get(token)
        if shared is None:
            number = _free_number(notes, free)
            if number is None:
                return
            shared = notes[token] = SharedLease(self._memory, block, number, pid)
        data = sealed(_LENGTH.pack(len(text)) + text)
        self._memory[shared.text : shared.text + len(data)] = data

    def share(self, lease: Lease) -> SharedLease | None:
        """Let the parent renew a granted lease; None if the lease is not noted."""
        token = str(lease.token)
        process = self._processes.get(os.getpid())
        shared = process[1].get(token) if process else None
        if shared is not None:
            shared.open(lease, token)
        return shared

    def strike(self, token: str) -> None:
        """Erase the note of a lease that is no longer held."""
        process = self._processes.get(os.getpid())
        if process is None:
            return
        _, notes, free = process
        if shared := notes.pop(token, None):
            shared.close()
            self._memory[shared.text : shared.text + len(_NO_TEXT)] = _NO_TEXT
            free.append(shared.number)

    # The parent's side.

    def of_dead(self, pid: int) -> list[LeaseNote]:
        """The notes of the leases that the child ``pid`` held when it died."""
        return [note for block in self._blocks_of(pid) for note in self._notes(block)]

    def settle(self, pid: int) -> None:
        """Empty the blocks of ``pid``, whose leases are released."""
        for block in self._blocks_of(pid):
            self._empty(block)

    def of_living(self) -> list[RunningLease]:
        """The leases of all children. The caller checks that a child lives before a renewal."""
        return [lease for block in self._used_blocks() for lease in self._running(block)]

    def note_of(self, lease: RunningLease) -> LeaseNote | None:
        """Keys and token of ``lease``; None if it was released, or if the note is being written."""
        note = self._note(lease.block, lease.number)
        return note if note and _stamp_of(note.keys[0], note.token) == lease.stamp else None

    def advance(self, lease: RunningLease, valid_until: float) -> None:
        """Write the new deadline of a lease that the parent renewed."""
        start = _deadline_offset(lease.block, lease.number) + _CHILDS_BYTES
        deadline = _PARENTS.pack(lease.stamp, valid_until)
        self._memory[start : start + _PARENTS_BYTES] = sealed(deadline)

    # Blocks.

    def _take_block(self) -> int | None:
        index = pool_index()
        if index is None or index >= _ROWS:
            return None
        self._memory[index] = 1
        blocks = _blocks_of_row(index)
        # A fork of the body has its parent's index, and must not write to its parent's block.
        dead = [block for block in blocks if not lives(*self._owner(block))]
        if not dead:
            return None  # all four blocks belong to the child and to forks of its bodies
        # If all blocks have notes, several processes of this row have died and the parent has not
        # noticed yet. The first block is taken; the ttl frees the leases that were noted there.
        block = next((block for block in dead if not any(self._notes(block))), dead[0])
        self._empty(block)
        _OWNER.pack_into(self._memory, block, os.getpid(), start_time_of(os.getpid()))
        return block

    def _empty(self, block: int) -> None:
        self._memory[block : block + _BLOCK_BYTES] = bytes(_BLOCK_BYTES)

    def _used_blocks(self) -> Iterator[int]:
        for index, used in enumerate(self._memory[:_ROWS].rstrip(b"\0")):
            if used:
                yield from _blocks_of_row(index)

    def _blocks_of(self, pid: int) -> Iterator[int]:
        return (block for block in self._used_blocks() if self._owner(block)[0] == pid)

    def _owner(self, block: int) -> tuple[int, int]:
        """PID and start time of the process that owns the block; 0, 0: none, or settled."""
        pid, start_time = _OWNER.unpack_from(self._memory, block)
        return pid, start_time

    def _notes(self, block: int) -> Iterator[LeaseNote]:
        if self._owner(block)[0]:
            found = (self._note(block, number) for number in range(NOTES))
            yield from (note for note in found if note)

    def _note(self, block: int, number: int) -> LeaseNote | None:
        start = _text_offset(block, number)
        (length,) = _LENGTH.unpack_from(self._memory, start)
        if not 0 < length <= _MAX_TEXT - len(_NO_TEXT):
            return None
        text = unsealed(self._memory[start : start + length + len(_NO_TEXT)])
        return LeaseNote(*marshal.loads(text[_LENGTH.size :])) if text else None

    def _running(self, block: int) -> Iterator[RunningLease]:
        pid, start_time = self._owner(block)
        if not pid:
            return
        for number in range(NOTES):
            offset = _deadline_offset(block, number)
            content = unsealed(self._memory[offset : offset + _CHILDS_BYTES])
            if content is not None:
                fields: _Fields = _CHILDS.unpack(content)
                parents = _parents(self._memory, offset, stamp=fields[0])
                yield RunningLease(pid, start_time, block, number, *fields, parents)


def _free_number(notes: dict[str, SharedLease], free: deque[int]) -> int | None:
    """The number of a note for a new lease. If none is free, the oldest closed note is reused.

    The release of such a lease has failed, and its ttl has freed or will free the key.
    """
    try:
        return free.popleft()
    except IndexError:
        ended = next((token for token, shared in list(notes.items()) if shared.closed), None)
        replaced = None if ended is None else notes.pop(ended, None)
        return None if replaced is None else replaced.number


def _blocks_of_row(index: int) -> range:
    start = _ROWS + index * _ROW_BYTES
    return range(start, start + _ROW_BYTES, _BLOCK_BYTES)


def _deadline_offset(block: int, number: int) -> int:
    return block + _OWNER.size + number * _DEADLINE_BYTES


def _text_offset(block: int, number: int) -> int:
    return block + _TEXTS + number * _MAX_TEXT


def _parents(memory: mmap.mmap, offset: int, stamp: int) -> float:
    start = offset + _CHILDS_BYTES
    # If the parent is writing it, which takes some nanoseconds, it is read once more. Without the
    # parent's renewal the child would declare a loss, and that is final.
    for _ in range(2):
        data = memory[start : start + _PARENTS_BYTES]
        if content := unsealed(data):
            whose, valid_until = _PARENTS.unpack(content)
            return float(valid_until) if whose == stamp else -inf
    return -inf


def sealed(content: bytes) -> bytes:
    """``content`` followed by its checksum."""
    return content + _SEAL.pack(crc32(content))


def unsealed(data: bytes) -> bytes | None:
    """The argument of :func:`sealed`; None if ``data`` is torn or was never written."""
    content, seal = data[: -_SEAL.size], data[-_SEAL.size :]
    return content if seal == _SEAL.pack(crc32(content)) else None


def _stamp_of(key: str, token: str) -> int:
    # The parent and its forks have the same hash seed.
    return hash((key, token)) & _STAMPS


def start_time_of(pid: int) -> int:
    """Clock ticks from the machine's boot to the start of ``pid``; 0 if it is dead or unknown.

    It is unknown on systems without Linux's ``/proc``, such as macOS.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        return 0 if fields[_STATE] in _DEAD else int(fields[_STARTTIME])
    except (OSError, ValueError, IndexError):
        return 0


def lives(pid: int, start_time: int) -> bool:
    """Whether the process that started at ``start_time`` is alive, running or stopped."""
    return start_time != 0 and start_time_of(pid) == start_time
