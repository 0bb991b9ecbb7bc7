"""Deadlines that a pool child and its worker parent tell each other, in memory that both see.

A slot has two halves, and each half one writer: the child says until when its own renewals vouch
for a lease, the parent until when its renewals do. The lease's deadline is the later one.

Why nobody needs a lock, which a child that is killed would never give back:

* A half is written in one copy and ends with a checksum. Who reads while it is written sees that it
  is torn, takes it for empty, and looks again later.
* Each half carries a stamp, the digest of key and token: the child's of the lease that it was
  granted, the parent's of what the store has just confirmed. So a note of the parent's that comes
  late, to a slot that another lease has now, says nothing about that lease. One with the right
  stamp is true wherever it stands, for the store has said so of this key and token.
* Whatever stands in a half that its lease has left is ignored: the child's is erased at the end of
  the renewing, and the child believes no note from then on.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct
from typing import Final
from zlib import crc32

from celery_singleton_lock.core.lease import Lease

__all__ = ["BYTES", "SLOTS", "ChildsSlot", "Share", "sealed", "shares", "stamp_of", "unsealed"]

#: Slots of one process. What it holds beyond that is renewed by itself alone.
SLOTS: Final = 8

_SEAL: Final = Struct("=I")
_CHILDS: Final = Struct("=Qdddd?")  # in the order of Share, but for the parent's
_PARENTS: Final = Struct("=Qd")  # stamp, valid until
_CHILDS_BYTES: Final = _CHILDS.size + _SEAL.size
_SLOT_BYTES: Final = _CHILDS_BYTES + _PARENTS.size + _SEAL.size
#: The room that the slots of one process take.
BYTES: Final = SLOTS * _SLOT_BYTES

_FREE: Final = bytes(_CHILDS_BYTES)
_NEVER: Final = float("-inf")
_UNBOUNDED: Final = float("inf")


def stamp_of(key: str, token: str) -> int:
    """What names one grant in a slot."""
    return int.from_bytes(blake2b(f"{key} {token}".encode(), digest_size=8).digest())


def sealed(content: bytes) -> bytes:
    """``content`` with its checksum behind it."""
    return content + _SEAL.pack(crc32(content))


def unsealed(data: bytes) -> bytes | None:
    """What :func:`sealed` was given; None if it is torn, or nothing was ever written."""
    content, seal = data[: -_SEAL.size], data[-_SEAL.size :]
    # The checksum of nothing is 0, and so is memory in which nothing was written.
    return content if content and seal == _SEAL.pack(crc32(content)) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What the parent reads of one lease; times in seconds on the clock of the host.

    Attributes:
        offset: Of its slot.
        stamp: Which grant it is.
        childs: Until when the child's own renewals vouch for it.
        hold_until: When nobody may renew it any more; inf: that isn't bounded.
        ttl: Of the lease.
        trusted: The share of the ttl that the store's answer vouches for.
        with_claim: Whether the message's claim is renewed with it.
        parents: Until when the parent's do; -inf: it has made none.
    """

    offset: int
    stamp: int
    childs: float
    hold_until: float
    ttl: float
    trusted: float
    with_claim: bool
    parents: float

    @property
    def deadline(self) -> float:
        return max(self.childs, self.parents)

    def advance(self, memory: mmap.mmap, valid_until: float) -> None:
        """Parent: its renewal, which the store has confirmed, vouches until ``valid_until``."""
        start = self.offset + _CHILDS_BYTES
        half = sealed(_PARENTS.pack(self.stamp, valid_until))
        memory[start : start + len(half)] = half


class ChildsSlot:
    """The deadline of one lease, seen from its holder; a ``SharedDeadline``.

    Its methods may run on the body's thread and on the heartbeat's at once.
    """

    __slots__ = ("_free", "_holder", "_lease", "_memory", "_number", "_offset", "_stamp", "closed")

    def __init__(
        self,
        memory: mmap.mmap,
        start: int,
        number: int,
        free: deque[int],
        lease: Lease,
        stamp: int,
    ) -> None:
        self._memory = memory
        self._offset = start + number * _SLOT_BYTES
        self._number = [number]  # taken out by whoever closes first
        self._free = free
        self._holder = os.getpid()
        hold_until = _UNBOUNDED if lease.hold_until is None else lease.hold_until
        self._lease = (hold_until, lease.ttl, lease.trusted, bool(lease.claim_key))
        self._stamp = stamp
        #: Whether nobody renews it any more.
        self.closed = False

    def tell(self, valid_until: float) -> None:
        """As of ``SharedDeadline``."""
        if not self.closed:
            self._write(sealed(_CHILDS.pack(self._stamp, valid_until, *self._lease)))
        if self.closed:
            # By the body's thread, between the two lines above. The number of this slot is the last
            # that is given again, so nobody else has it yet.
            self._write(_FREE)

    def heard(self) -> float:
        """As of ``SharedDeadline``."""
        return _NEVER if self.closed else _parents(self._memory, self._offset, self._stamp)

    def close(self) -> None:
        """As of ``SharedDeadline``."""
        if os.getpid() != self._holder:
            return  # a fork of the holder looks on, and decides nothing
        self.closed = True
        try:
            number = self._number.pop()
        except IndexError:
            return
        self._write(_FREE)
        self._free.append(number)

    def _write(self, half: bytes) -> None:
        self._memory[self._offset : self._offset + _CHILDS_BYTES] = half


def shares(memory: mmap.mmap, start: int) -> Iterator[Share]:
    """Parent: what the process whose slots begin at ``start`` has renewed."""
    for offset in range(start, start + BYTES, _SLOT_BYTES):
        data = memory[offset : offset + _CHILDS_BYTES]
        half = None if data == _FREE else unsealed(data)
        if half is not None:
            stamp, childs, hold_until, ttl, trusted, with_claim = _CHILDS.unpack(half)
            yield Share(
                offset=offset,
                stamp=stamp,
                childs=childs,
                hold_until=hold_until,
                ttl=ttl,
                trusted=trusted,
                with_claim=with_claim,
                parents=_parents(memory, offset, stamp),
            )


def _parents(memory: mmap.mmap, offset: int, stamp: int) -> float:
    start = offset + _CHILDS_BYTES
    half = unsealed(memory[start : start + _PARENTS.size + _SEAL.size])
    if half is None:
        return _NEVER
    whose, valid_until = _PARENTS.unpack(half)
    return float(valid_until) if whose == stamp else _NEVER
