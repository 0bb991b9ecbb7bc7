"""The queues of the calls of all keys in the memory of this process; see `core.call_queue`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ..core.call_queue import (
    CallQueue,
    CallState,
    Depth,
    Hint,
    Join,
    Place,
    QueuedCall,
    Removal,
    Remove,
)
from ..core.clock import Clock
from ..core.keyspace import Keyspace
from ..core.lease import Kind, Phase, Token
from ..core.pauses import Pause
from ..core.rate import Rate
from ..core.store import (
    ClaimChange,
    Claims,
    Granted,
    Leases,
    Operators,
    QueuedAcquire,
    QueuedRelease,
    Refused,
    Relation,
    ReleaseReply,
)
from .memory_pauses import MemoryPauses
from .memory_rates import MemoryRates

#: Seconds until the first hint is late. The time grows fourfold.
_DEADLINE: Final = 60.0
_MOST_GROWTH: Final = 6
#: Seconds for which the end of a call is remembered if its message was published twice.
_WEEK: Final = 7 * 86400.0
#: Seconds that the message of the next call is delayed at most. After a longer time a sweep is due.
_LONGEST_DELAY: Final = 60.0
#: Seconds. A message that arrives before its key is free is dropped; its call waits for a sweep.
_CLOCKS_DIFFER: Final = 0.02
#: Seconds between two sweeps while a client without a place holds the key.
_FOREIGN: Final = 1.0
#: Seconds from the end of the lease of a call, which is acknowledged early, until it is lost.
_OVERDUE_FOR: Final = 5.0
#: Seconds between two sweeps of a key that is paused.
_PAUSED: Final = 3600.0
#: Seconds between two sweeps of a key whose rate lets no call start for longer.
_RATE_MAY_CHANGE: Final = 300.0
# The states of a call that has begun.
_BEGUN: Final = ("b", "o")
# Refusals that say more of a message than that its call waits.
_ENDS: Final = (Relation.DONE, Relation.SUPERSEDED, Relation.LATER)

_Number = tuple[int, int, int]


@dataclass(slots=True)
class _Call:
    """A call in a queue.

    Attributes:
        call_id: The call.
        number: Attempt and sequence of the stored message.
        message: The stored message; empty: none.
        late: Whether its messages are acknowledged late.
        state: One of the letters of ``call_queue.lua``.
        copies: How often the stored message was published.
        repeated: Whether any message of the call was published twice.
        begins: How often a body has begun by the stored message.
        begun: Whether an attempt of it has begun.
        nonce: That of the last begin of the attempt.
        joined_at: When it joined, in seconds since the epoch.
    """

    call_id: str
    number: _Number
    message: bytes
    late: bool
    joined_at: float
    state: str = "w"
    copies: int = 0
    repeated: bool = False
    begins: int = 0
    begun: bool = False
    nonce: str = ""

    def is_lost(self, request: QueuedAcquire) -> bool:
        """Whether it does not begin again: acknowledged early, or begun as often as it may."""
        if self.state in _BEGUN and not request.late:
            return True
        return request.most_begins is not None and self.begins >= request.most_begins

    def begin(self, request: QueuedAcquire, *, is_repeated: bool) -> None:
        """Note that a run begins; ``is_repeated``: the delivery was granted the lease before."""
        token = request.token
        if self.nonce != token.nonce and not is_repeated:
            self.begins += 1
        self.state, self.begun, self.late = "b", True, request.late
        self.number = (token.nesting, token.retries, request.sequence)
        self.nonce = token.nonce

    def consume(self) -> None:
        """A copy of its message ends here, because its call may not start."""
        if self.state == "h":
            self.copies = max(self.copies - 1, 0)
            self.state = "h" if self.copies else "w"

    def hint(self, key: str) -> Hint:
        return Hint(
            key=key,
            call_id=self.call_id,
            copies=self.copies,
            begins=self.begins,
            message=self.message,
        )


@dataclass(slots=True)
class _Queue:
    """The calls of one key in order, when it is swept next, and the rate if it has one."""

    calls: dict[str, _Call] = field(default_factory=dict)
    due: float = 0.0
    rate: Rate | None = None

    @property
    def head(self) -> _Call | None:
        return next(iter(self.calls.values()), None)


@dataclass(frozen=True, slots=True)
class _CallEnd:
    """The end of a call.

    Attributes:
        nonce: That of the delivery that has ended it.
        may_return_from: The first attempt that may still come; None: none may.
        hinted: The call that was hinted then.
        until: When it is forgotten.
    """

    nonce: str
    may_return_from: tuple[int, int] | None
    hinted: str
    until: float

    def includes(self, token: Token) -> bool:
        """Whether the attempt of ``token`` has ended."""
        return self.may_return_from is None or (token.nesting, token.retries) < self.may_return_from


class MemoryCallQueue(CallQueue):
    """See `CallQueue`.

    Args:
        clock: The clock of the store.
        guard: The lock of the store.
        leases: The leases of the store, without their queues.
        claims: Its claims.
        operators: Frees keys.
        pauses: Its pauses.
        rates: Its rates.
    """

    def __init__(
        self,
        clock: Clock,
        guard: threading.RLock,
        leases: Leases,
        claims: Claims,
        operators: Operators,
        pauses: MemoryPauses,
        rates: MemoryRates,
    ) -> None:
        self._clock, self._guard = clock, guard
        self._leases, self._claims, self._operators = leases, claims, operators
        self._inspect, self._pause_of, self._rates = leases.inspect, pauses.of, rates
        self._queues: dict[str, _Queue] = {}
        self._ends: dict[tuple[str, str], _CallEnd] = {}

    # --- for the store ---------------------------------------------------------------------------

    def acquire(self, request: QueuedAcquire, /, *, timeout: float = 0) -> Granted | Refused:
        """The steps of ``queue_acquire.lua``."""
        key, token = request.slots[0], request.token
        number = (token.nesting, token.retries, request.sequence)
        with self._guard:
            if self._has_ended(key, token):
                return Refused(relation=Relation.DONE)
            queue = self._queues.get(key, _Queue())
            # A call that has not joined joins by running; the broker has its message.
            call = queue.calls.get(token.call_id) or _Call(
                token.call_id, number, b"", request.late, self._clock.wall(), copies=1
            )
            if call.number > number or call.state == "x":
                return Refused(relation=Relation.SUPERSEDED)
            is_newest = call.number == number
            kept = Relation.QUEUED if is_newest and call.message else Relation.UNQUEUED
            if not is_newest or queue.head not in (None, call):
                return Refused(relation=kept, record=self._inspect(key))
            was_granted = call.nonce in request.asked
            if not was_granted and self._inspect(key) is None and call.is_lost(request):
                call.state, queue.due = "x", self._clock.now()
                return Refused(relation=Relation.LOST)
            reply = self._leases.acquire(request, timeout=timeout)
            if isinstance(reply, Granted):
                queue.calls[token.call_id], self._queues[key] = call, queue
                call.begin(request, is_repeated=was_granted)
                self._is_held(key, queue)
                queue.rate = request.rate
            elif reply.relation is Relation.DONE:
                queue.due = self._clock.now()
                self._drop(key, call)
            elif reply.relation not in _ENDS:
                if reply.relation not in (Relation.PAUSED, Relation.RATE):
                    self._is_held(key, queue)
                elif token.call_id in queue.calls:
                    self._may_not_start(request, queue, call, reply, kept)
                if reply.relation is not Relation.RATE or reply.hint is None:
                    reply.relation = kept
            return reply

    def _may_not_start(
        self, request: QueuedAcquire, queue: _Queue, call: _Call, refused: Refused, kept: Relation
    ) -> None:
        """The key is paused, or its rate lets no call start: note when the call is published."""
        queue.rate = request.rate
        if refused.relation is Relation.PAUSED:
            call.consume()
            queue.due = self._after(refused.pause)
        elif kept is Relation.QUEUED and refused.due_in <= _LONGEST_DELAY:
            # The copy that is published takes the place of the one that has asked.
            call.copies = max(call.copies, 1)
            self._published(queue, call, refused.due_in)
            hint = call.hint(request.slots[0])
            refused.hint = replace(hint, countdown=refused.due_in)
        elif kept is Relation.QUEUED:
            call.consume()
            queue.due = self._clock.now() + min(refused.due_in, _RATE_MAY_CHANGE)

    def release(
        self, request: QueuedRelease, /, *, timeout: float = 0
    ) -> tuple[ReleaseReply, Hint | None]:
        """The steps of ``queue_release.lua``."""
        key, token = request.keys[0], request.token
        with self._guard:
            end, call = self._end_of(key, token.call_id), self._call(key, token.call_id)
            reply, hinted = self._leases.release(request, timeout=timeout), None
            cools = self._cooling(key)
            left = self._rate_left(key, self._queues.get(key, _Queue()))
            delay = max(cools + _CLOCKS_DIFFER if cools else 0.0, left)
            if end and end.nonce == token.nonce and request.ended_ttl is not None:
                # Repeated, because its reply was lost.
                reply, found = ReleaseReply.OURS, self._call(key, end.hinted)
                hinted = found if found and found.state == "h" else None
            elif call is not None:
                hinted = self._released(request, call, reply, delay)
        if hinted is None:
            return reply, None
        # The next attempt of the same call has its own countdown.
        return reply, replace(hinted.hint(key), countdown=0.0 if hinted is call else delay)

    def _released(
        self, request: QueuedRelease, call: _Call, reply: ReleaseReply, delay: float
    ) -> _Call | None:
        """Whether a call whose lease was released goes on; returns the call to publish next."""
        key, token, ended_ttl = request.keys[0], request.token, request.ended_ttl
        # Newer: a retry with another key, whose own retry has come back and joined this queue.
        is_newer = call.number[:2] > (token.nesting, token.retries)
        has_begun = call.state in _BEGUN
        # That no body has begun counts even if the lease has ended before its client says so.
        is_undone = has_begun and not request.has_begun and call.nonce == token.nonce
        if reply is not ReleaseReply.OURS and not is_undone:
            # Repeated: its next message was handed over, and has not arrived.
            is_handed_over = (call.state, call.nonce, call.copies) == ("h", "", 1)
            if ended_ttl is not None or not is_newer or not is_handed_over:
                return None
            call.repeated = True
            return call
        if is_undone:
            call.begins -= 1
        if ended_ttl is not None and not is_newer:
            return self._take_out(key, call, token, ended_ttl, request.may_return_from, delay)
        self._queues[key].due = self._clock.now() + _DEADLINE + request.due_in
        if has_begun and (call.late or not request.has_begun):
            call.state = "h"  # the broker delivers its message again
        elif call.state == "w":
            call.state, call.copies = "h", call.copies + 1
            return call
        return None

    # --- for clients -----------------------------------------------------------------------------

    def join(self, request: Join, *, timeout: float) -> tuple[Place, int]:
        key, token = request.key, request.token
        number = (token.nesting, token.retries, request.sequence)
        with self._guard:
            if self._has_ended(key, token):
                return Place.ENDED, 0
            queue = self._queues.get(key, _Queue())
            call, depth = queue.calls.get(token.call_id), len(queue.calls)
            if call is None:
                if request.max_waiting is not None and depth >= request.max_waiting:
                    return Place.FULL, depth
                call = _Call(
                    token.call_id, number, request.message, request.late, self._clock.wall()
                )
                queue.calls[token.call_id] = call
                self._queues[key] = queue
                depth += 1
                if request.claim:
                    ttl = request.claim_ttl
                    change = ClaimChange(key=request.claim, phase=Phase.QUEUED, ttl=ttl)
                    self._claims.change(token, change, timeout=timeout)
            elif call.state == "x":
                return Place.WAITING, 0
            elif call.number > number or (call.number == number and call.message):
                return (Place.HINTED if call.state == "h" else Place.WAITING), 0
            else:
                call.message = request.message
                if call.number == number:
                    return Place.WAITING, 0
                is_used = call.state in _BEGUN and call.number[:2] == number[:2]
                if is_used and call.nonce not in request.asked:
                    call.number = number
                    return Place.WAITING, 0
                call.state, call.copies, call.begins, call.nonce = "w", 0, 0, ""
                call.number, depth = number, 0
            is_own = self._is_reserved_for(key, call)
            if queue.head is call and self._hint(key, queue, is_own=is_own):
                return Place.HINTED, depth
            return Place.WAITING, depth

    def position(self, key: str, call_id: str, *, timeout: float) -> int | None:
        with self._guard:
            calls = list(self._queues.get(key, _Queue()).calls)
        return calls.index(call_id) if call_id in calls else None

    def keys(self, shard: str, *, timeout: float) -> list[str]:
        with self._guard:
            return [key for key in self._queues if Keyspace.shard(key) == shard]

    def depths(self, keys: Sequence[str], *, timeout: float) -> list[Depth]:
        with self._guard:
            return [self._depth(self._queues.get(key, _Queue())) for key in keys]

    def calls(
        self, key: str, *, first: int = 0, most: int, messages: bool = True, timeout: float
    ) -> list[QueuedCall]:
        with self._guard:
            queue = self._queues.get(key, _Queue())
            calls, left = [*queue.calls.values()][first : first + most], self._rate_left(key, queue)
        return [
            QueuedCall(
                key=key,
                call_id=call.call_id,
                copies=call.copies,
                begins=call.begins,
                message=call.message if messages else b"",
                position=position,
                joined_at=call.joined_at,
                state=CallState(call.state),
                countdown=0.0 if position else left,
            )
            for position, call in enumerate(calls, first)
        ]

    def due(self, shard: str, *, limit: int, timeout: float) -> list[str]:
        with self._guard:
            now = self._clock.now()
            due = [key for key, queue in self._queues.items() if queue.due <= now]
        return [key for key in due if Keyspace.shard(key) == shard][:limit]

    def sweep(self, key: str, *, timeout: float) -> tuple[bool, Hint] | None:
        with self._guard:
            found = self._queues.get(key)
            if found is None or found.due > self._clock.now():
                return None  # another client has looked at the same time
            while queue := self._queues.get(key):
                head = queue.head
                # A retry whose key was paused does not come by itself.
                is_own = head is not None and self._is_reserved_for(key, head)
                if head is None or (not is_own and self._is_held(key, queue)):
                    return None
                if head.state == "b" and not head.late:
                    head.state, queue.due = "o", self._clock.now() + _OVERDUE_FOR
                    return None
                if head.state == "o":
                    head.state = "x"
                if head.state == "x":
                    queue.due = self._clock.now() + _DEADLINE
                    return True, head.hint(key)
                if head.message and (pause := self._pause_of(key)) is not None:
                    queue.due = self._after(pause)
                    return None
                if head.message:
                    hinted = self._hint(key, queue, is_own=is_own)
                    return None if hinted is None else (False, hinted.hint(key))
                self._drop(key, head)
        return None

    def defer(
        self,
        key: str,
        *,
        seconds: float,
        timeout: float,
        unpublished: Hint | None = None,
        perhaps: bool = False,
    ) -> None:
        with self._guard:
            call = self._call(key, unpublished.call_id) if unpublished else None
            if call is not None and call.state == "h" and call.copies:
                call.copies -= 1
                call.repeated = call.repeated or perhaps
            if (queue := self._queues.get(key)) is not None:
                due = self._clock.now() + seconds
                leaves = queue.head is not None and queue.head.state == "x"
                queue.due = min(queue.due, due) if leaves else due

    def leave(self, key: str, call_id: str, *, timeout: float) -> Removal | Hint:
        with self._guard:
            call, record = self._call(key, call_id), self._inspect(key)
            if call is None:
                return Removal.ABSENT
            is_holder = (
                record is not None
                and record.kind in (Kind.LEASE, Kind.DYING)
                and record.token.partition("|")[0] == call_id
            )
            if is_holder or (call.state == "b" and record is not None):
                return Removal.RUNNING
            call.state = "x"
            if self._queues[key].head is call:
                self._queues[key].due = self._clock.now() + _DEADLINE
            return call.hint(key)

    def remove(self, request: Remove, *, timeout: float) -> tuple[Removal, Hint | None]:
        key, token = request.key, request.token
        with self._guard:
            call, record = self._call(key, token.call_id), self._inspect(key)
            if call is None:
                return Removal.ABSENT, None
            kind = (
                record.kind if record and record.token.partition("|")[0] == token.call_id else None
            )
            copy = call.number[2] if request.sequence is None else request.sequence
            number = (token.nesting, token.retries, copy)
            is_older = call.state != "x" and call.number > number
            if kind is Kind.LEASE or is_older or (call.begun and request.only_unbegun):
                return Removal.RUNNING, None
            if kind is Kind.RESERVED:  # for its retry
                self._operators.free(key, None)
            hinted = self._take_out(key, call, token, request.ended_ttl, request.may_return_from)
            return Removal.REMOVED, hinted.hint(key) if hinted else None

    # --- inside ----------------------------------------------------------------------------------

    @staticmethod
    def _depth(queue: _Queue) -> Depth:
        waiting = [call for call in queue.calls.values() if call is not queue.head]
        if queue.head is not None and queue.head.state not in _BEGUN:
            waiting.insert(0, queue.head)
        return Depth(waiting=len(waiting), oldest_at=waiting[0].joined_at if waiting else None)

    def _call(self, key: str, call_id: str) -> _Call | None:
        queue = self._queues.get(key)
        return queue.calls.get(call_id) if queue else None

    def _end_of(self, key: str, call_id: str) -> _CallEnd | None:
        end = self._ends.get((key, call_id))
        return end if end and self._clock.now() < end.until else None

    def _has_ended(self, key: str, token: Token) -> bool:
        end = self._end_of(key, token.call_id)
        return end is not None and end.includes(token)

    def _is_reserved_for(self, key: str, call: _Call) -> bool:
        """Whether the key is reserved for the retry of a call."""
        record = self._inspect(key)
        if record is None or record.kind is not Kind.RESERVED:
            return False
        return record.token.partition("|")[0] == call.call_id

    def _is_held(self, key: str, queue: _Queue) -> bool:
        record = self._inspect(key)
        if record is None:
            return False
        has_place = record.token.partition("|")[0] in queue.calls
        queue.due = self._clock.now() + (record.ttl if has_place else min(record.ttl, _FOREIGN))
        return True

    def _after(self, pause: Pause) -> float:
        """When a queue is swept whose key is paused, unless it is resumed before."""
        left = _PAUSED if pause.left is None else min(pause.left, _PAUSED)
        return self._clock.now() + left

    def _rate_left(self, key: str, queue: _Queue) -> float:
        """Seconds until the rate of a key lets its next call start."""
        return 0.0 if queue.rate is None else self._rates.left(key, queue.rate)

    def _cooling(self, key: str) -> float:
        """Seconds for which a key cools down after a call; 0 if it does not."""
        record = self._inspect(key)
        return record.ttl if record is not None and record.kind is Kind.COOLING else 0.0

    def _hint(
        self, key: str, queue: _Queue, *, is_own: bool = False, delay: float = 0.0
    ) -> _Call | None:
        head = queue.head
        if head is None or (not is_own and self._is_held(key, queue)):
            return None
        if head.state == "x" or not head.message:
            queue.due = self._clock.now() + (_DEADLINE if head.state == "x" else 0.0)
            return None
        if delay > _LONGEST_DELAY:
            queue.due = self._clock.now() + min(delay, _RATE_MAY_CHANGE)
            return None
        head.copies += 1
        head.repeated = head.repeated or head.copies > 1
        self._published(queue, head, delay)
        return head

    def _published(self, queue: _Queue, call: _Call, delay: float) -> None:
        """Note that the message of a call is published, and is to arrive in ``delay`` seconds."""
        call.state = "h"
        growth = 4 ** min(call.copies - 1, _MOST_GROWTH)
        queue.due = self._clock.now() + _DEADLINE * growth + delay

    def _take_out(
        self,
        key: str,
        call: _Call,
        token: Token,
        ttl: float,
        may_return_from: int | None,
        delay: float = 0.0,
    ) -> _Call | None:
        """Take out a call that has ended; returns the call that is hinted next.

        Its message has a delay if the key cools down, or if its rate lets no call start yet. If
        that takes more than a minute, a sweep publishes it.
        """
        was_head = self._queues[key].head is call
        self._drop(key, call)
        queue = self._queues.get(key)
        hinted = None
        if queue and was_head:
            is_cooling = 0.0 < self._cooling(key) <= _LONGEST_DELAY
            hinted = self._hint(key, queue, is_own=is_cooling, delay=delay)
        first, following = None, hinted.call_id if hinted else ""
        if may_return_from is not None:
            first = (token.nesting, may_return_from)
        now = self._clock.now()
        kept = max(ttl, _WEEK) if call.repeated else ttl
        while self._ends and (oldest := next(iter(self._ends.items())))[1].until <= now:
            del self._ends[oldest[0]]
        self._ends[key, call.call_id] = _CallEnd(token.nonce, first, following, now + kept)
        return hinted

    def _drop(self, key: str, call: _Call) -> None:
        if (queue := self._queues.get(key)) is not None:
            queue.calls.pop(call.call_id, None)
            if not queue.calls:
                del self._queues[key]
