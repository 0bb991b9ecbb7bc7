"""The queues of the calls of all keys in the memory of this process; see `core.call_queue`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
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
from ..core.lease import Kind, Phase, Record, Token
from ..core.pauses import Pause
from ..core.rate import Rate
from ..core.store import Claims, Leases, Operators
from ..core.store_requests import (
    ClaimChange,
    Granted,
    GrantedInTurn,
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
        at: When a sweep looks at it; None: it waits for its turn.
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
    at: float | None = None

    @property
    def is_new(self) -> bool:
        """Whether no body of it has begun, and one may begin: those behind it wait for that."""
        return not self.begun and self.state != "x"

    def is_lost(self, request: QueuedAcquire) -> bool:
        """Whether it does not begin again: acknowledged early, or begun as often as it may."""
        if self.nonce in request.asked:
            return False  # its delivery was granted the lease before, and began no run
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

    def undo_begin(self) -> None:
        """Note that no run has begun by the grant."""
        self.begins, self.nonce = self.begins - 1, ""
        self.begun = self.begins > 0 or any(self.number)

    @property
    def is_handed_over(self) -> bool:
        """Whether a release has published its next message, and that has not arrived."""
        return (self.state, self.nonce, self.copies) == ("h", "", 1)

    def consume(self, at: float | None = None) -> None:
        """A copy of its message ends here. It is looked at then; None: it waits for its turn."""
        if self.state == "h":
            self.copies = max(self.copies - 1, 0)
            self.state = "h" if self.copies and at is None else "w"
        if self.state == "w":
            self.at = at

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
    """The calls of one key in order, how many may run, and the rate if it has one."""

    calls: dict[str, _Call] = field(default_factory=dict)
    limit: int = 1
    most_limit: int = 1
    rate: Rate | None = None

    def set_limit(self, limit: int) -> None:
        self.limit, self.most_limit = limit, max(limit, self.most_limit)

    @property
    def front(self) -> list[_Call]:
        """The calls that may run."""
        return [*islice(self.calls.values(), self.limit)]

    @property
    def looked_at(self) -> list[_Call]:
        """The calls that a sweep looks at: none behind one that has not begun."""
        found, is_blocked = [], False
        for call in self.front:
            if not (call.is_new and is_blocked):
                found.append(call)
            is_blocked = is_blocked or call.is_new
        return found

    @property
    def due(self) -> float:
        """When it is swept next."""
        return min((call.at or 0.0 for call in self.looked_at), default=0.0)

    @property
    def depth(self) -> Depth:
        """How many calls wait."""
        running = [call.call_id for call in self.front if call.state in _BEGUN]
        waiting = [call for call in self.calls.values() if call.call_id not in running]
        return Depth(waiting=len(waiting), oldest_at=waiting[0].joined_at if waiting else None)

    def new_behind(self, call: _Call) -> _Call | None:
        """The first call behind one that may run and has not begun."""
        front = self.front
        behind = front[front.index(call) + 1 :] if call in front else []
        return next((one for one in behind if one.is_new), None)

    def undo_hint_behind(self, call: _Call) -> None:
        """The grant to ``call`` is undone, and may have named the next call in a lost reply."""
        behind = self.new_behind(call) if self.limit > 1 else None
        if behind is not None and behind.state == "h":  # the next grant names it again
            behind.state, behind.at, behind.repeated = "w", None, True
            behind.copies = max(behind.copies - 1, 0)

    def has_turn(self, call: _Call) -> bool:
        """Whether a call may begin now."""
        front = self.front
        if call.call_id not in self.calls:
            return len(front) < self.limit and not any(one.is_new for one in front)
        if call not in front:
            return False
        before = front[: front.index(call)]
        return call.begun or not any(one.is_new for one in before)


@dataclass(frozen=True, slots=True)
class _Slots:
    """What the slots of a key hold.

    Attributes:
        records: By slot.
        free: How many of those that may be granted are free.
        left: One of these: of a retry that leaves it to those that may run since the limit is
            lower; empty: there is none.
        at: When one may be free.
    """

    records: dict[str, Record]
    free: int
    left: str
    at: float

    def of(self, call: _Call) -> Record | None:
        """That of a call."""
        records = self.records.values()
        return next((one for one in records if _holder_of(one) == call.call_id), None)

    def lease_of(self, call: _Call) -> Record | None:
        """The lease of a body of a call."""
        record = self.of(call)
        return None if record is None or record.kind is Kind.RESERVED else record


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


class _Queues:
    """The queues of all keys, and the calls that have ended.

    Attributes:
        by_key: The queues that have calls.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.by_key: dict[str, _Queue] = {}
        self._ends: dict[tuple[str, str], _CallEnd] = {}

    def of(self, key: str) -> _Queue:
        """That of a key; a new one if none of its calls is in it."""
        return self.by_key.get(key) or _Queue()

    def call(self, key: str, call_id: str) -> _Call | None:
        return self.of(key).calls.get(call_id)

    def add(self, key: str, queue: _Queue, call: _Call) -> None:
        queue.calls[call.call_id], self.by_key[key] = call, queue

    def drop(self, key: str, call: _Call) -> None:
        if (queue := self.by_key.get(key)) is not None:
            queue.calls.pop(call.call_id, None)
            if not queue.calls:
                del self.by_key[key]

    def remember(self, key: str, call: _Call, end: _CallEnd) -> None:
        """Note the end of a call, and forget the ends that are over."""
        now = self._clock.now()
        while self._ends and (oldest := next(iter(self._ends.items())))[1].until <= now:
            del self._ends[oldest[0]]
        self._ends[key, call.call_id] = end

    def end_of(self, key: str, call_id: str) -> _CallEnd | None:
        end = self._ends.get((key, call_id))
        return end if end and self._clock.now() < end.until else None

    def has_ended(self, key: str, token: Token) -> bool:
        end = self.end_of(key, token.call_id)
        return end is not None and end.includes(token)


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
        self._queues = _Queues(clock)

    # --- for the store ---------------------------------------------------------------------------

    def acquire(self, request: QueuedAcquire, /, *, timeout: float = 0) -> Granted | Refused:
        """The steps of ``queue_acquire.lua``."""
        key, token, number = request.slots[0], request.token, _number_of(request)
        with self._guard:
            if self._queues.has_ended(key, token):
                return Refused(relation=Relation.DONE)
            queue = self._queues.of(key)
            has_place, limits = token.call_id in queue.calls, (queue.limit, queue.most_limit)
            # A call that has not joined joins by running; the broker has its message.
            call = queue.calls.get(token.call_id) or _Call(
                token.call_id, number, b"", request.late, self._clock.wall(), copies=1
            )
            if call.number > number or call.state == "x":
                return Refused(relation=Relation.SUPERSEDED)
            queue.set_limit(len(request.slots))
            reply = self._refused_a_turn(request, queue, call) or self._ask(request, queue, call)
            if isinstance(reply, Granted):
                return self._begin(request, queue, call, reply)
            if not has_place:  # what is not in the queue changes nothing
                queue.limit, queue.most_limit = limits
            return reply

    def _refused_a_turn(self, request: QueuedAcquire, queue: _Queue, call: _Call) -> Refused | None:
        """The refusal of a call that has no turn, or may not begin again; None: it may begin."""
        key, kept = request.slots[0], _kept(request, call)
        slots = self._slots(key, queue)
        held = slots.of(call)
        is_beyond = held is not None and held.key not in request.slots
        runs_beyond = is_beyond and slots.lease_of(call) is not None
        # A call keeps its place only with the message of its newest attempt.
        if call.number < _number_of(request) or runs_beyond or not queue.has_turn(call):
            if kept is Relation.QUEUED:
                call.consume()
            records = tuple(slots.records.values())
            return Refused(relation=kept, record=next(iter(records), None), others=records[1:])
        if held is None and slots.free and call.is_lost(request):
            call.state, call.at = "x", self._clock.now()
            return Refused(relation=Relation.LOST)
        if held is not None and is_beyond:  # reserved for this retry
            self._operators.free(held.key, None)
        if slots.left:
            self._operators.free(slots.left, None)
        return None

    def _ask(self, request: QueuedAcquire, queue: _Queue, call: _Call) -> Granted | Refused:
        """Ask for the lease of a call that has its turn."""
        key, kept = request.slots[0], _kept(request, call)
        reply = self._leases.acquire(request, timeout=0)
        if isinstance(reply, Granted) or reply.relation in (Relation.SUPERSEDED, Relation.LATER):
            return reply
        if reply.relation is Relation.DONE:
            self._queues.drop(key, call)
            return reply
        if call.call_id in queue.calls:
            self._may_not_start(request, queue, call, reply, kept)
        if reply.relation is not Relation.RATE or reply.hint is None:
            reply.relation = kept
        return reply

    def _begin(self, request: QueuedAcquire, queue: _Queue, call: _Call, grant: Granted) -> Granted:
        """Note that a call begins; returns the grant, perhaps with the next call."""
        key, was_granted = request.slots[0], call.nonce in request.asked
        self._queues.add(key, queue, call)
        is_repeated = was_granted or call.nonce == request.token.nonce
        call.begin(request, is_repeated=was_granted)
        call.at = self._clock.now() + request.ttl
        queue.rate = request.rate
        return self._in_turn(key, queue, grant, is_repeated=is_repeated)

    def _in_turn(self, key: str, queue: _Queue, reply: Granted, *, is_repeated: bool) -> Granted:
        """The grant, with the next call if the limit lets it run at the same time.

        Args:
            key: The lock key.
            queue: Its queue.
            reply: The grant.
            is_repeated: Whether its reply was lost before, perhaps with that call.
        """
        following = self._next(key, queue) if queue.limit > 1 else None
        delay = self._rate_left(key, queue)
        if following is None:
            return reply
        if following.state == "w":
            if self._hint(key, queue, following, delay=delay) is None:
                return reply
        elif following.state == "h" and is_repeated and following.message:
            following.repeated = True
        else:
            return reply
        hint = replace(following.hint(key), countdown=delay)
        return GrantedInTurn(key=reply.key, fence=reply.fence, following=hint)

    def _may_not_start(
        self, request: QueuedAcquire, queue: _Queue, call: _Call, refused: Refused, kept: Relation
    ) -> None:
        """A call has its turn, and may not start yet: note when it is published or looked at."""
        key, now, is_kept = request.slots[0], self._clock.now(), kept is Relation.QUEUED
        if refused.relation is Relation.RATE:
            queue.rate = request.rate
            if is_kept and refused.due_in <= _LONGEST_DELAY:
                # The copy that is published takes the place of the one that has asked.
                call.copies = max(call.copies, 1)
                self._published(call, refused.due_in)
                refused.hint = replace(call.hint(key), countdown=refused.due_in)
            elif is_kept:
                call.consume(now + min(refused.due_in, _RATE_MAY_CHANGE))
        elif call.number == _number_of(request):
            is_paused = refused.relation is Relation.PAUSED
            call.consume(self._after(refused.pause) if is_paused else self._slots(key, queue).at)

    def release(
        self, request: QueuedRelease, /, *, timeout: float = 0
    ) -> tuple[ReleaseReply, Hint | None]:
        """The steps of ``queue_release.lua``."""
        key, token = Keyspace.lock_of(request.keys[0]), request.token
        with self._guard:
            end, call = (
                self._queues.end_of(key, token.call_id),
                self._queues.call(key, token.call_id),
            )
            reply, hinted = self._leases.release(request, timeout=timeout), None
            cools = self._cooling(request.keys[0])
            left = self._rate_left(key, self._queues.of(key))
            delay = max(cools + _CLOCKS_DIFFER if cools else 0.0, left)
            if end and end.nonce == token.nonce and request.ended_ttl is not None:
                # Repeated, because its reply was lost.
                reply, found = ReleaseReply.OURS, self._queues.call(key, end.hinted)
                hinted = found if found and found.state == "h" else None
            elif call is not None:
                hinted = self._released(request, key, call, reply, delay)
        if hinted is None:
            return reply, None
        # The next attempt of the same call has its own countdown.
        return reply, replace(hinted.hint(key), countdown=0.0 if hinted is call else delay)

    def _released(
        self, request: QueuedRelease, key: str, call: _Call, reply: ReleaseReply, delay: float
    ) -> _Call | None:
        """Whether a call whose lease was released goes on; returns the call to publish next."""
        token, ended_ttl = request.token, request.ended_ttl
        # Newer: a retry with another key, whose own retry has come back and joined this queue.
        is_newer = call.number[:2] > (token.nesting, token.retries)
        has_begun = call.state in _BEGUN
        # That no body has begun counts even if the lease has ended before its client says so.
        is_undone = has_begun and not request.has_begun and call.nonce == token.nonce
        if reply is not ReleaseReply.OURS and not is_undone:
            if ended_ttl is not None or not (is_newer and call.is_handed_over):
                return None
            call.repeated = True
            return call
        if is_undone:
            call.undo_begin()
        if ended_ttl is not None and not is_newer:
            return self._take_out(
                key, call, token, ended_ttl, request.may_return_from, delay, is_release=True
            )
        if is_undone:
            self._queues.by_key[key].undo_hint_behind(call)
        call.at = self._clock.now() + _DEADLINE + request.due_in
        if has_begun and (call.late or not request.has_begun):
            call.state = "h"  # the broker delivers its message again
        elif call.state == "w":
            call.state, call.copies = "h", call.copies + 1
            return call
        return None

    # --- for clients -----------------------------------------------------------------------------

    def join(self, request: Join, *, timeout: float) -> tuple[Place, int]:
        key, token = request.key, request.token
        with self._guard:
            if self._queues.has_ended(key, token):
                return Place.ENDED, 0
            queue = self._queues.of(key)
            call, depth = queue.calls.get(token.call_id), len(queue.calls)
            queue.set_limit(request.limit)
            if call is None:
                if request.max_waiting is not None and depth >= request.max_waiting:
                    return Place.FULL, depth
                call, depth = self._add(request, queue), depth + 1
            else:
                depth = 0
                if (place := _place_kept(request, call)) is not None:
                    return place, depth
            lease = self._slots(key, queue).lease_of(call)
            if lease is not None:  # it publishes its retry
                call.at = self._clock.now() + lease.ttl
            elif queue.has_turn(call) and self._hint(key, queue, call):
                return Place.HINTED, depth
            return Place.WAITING, depth

    def _add(self, request: Join, queue: _Queue) -> _Call:
        """Put a call at the end of a queue."""
        token, number, wall = request.token, _number_of(request), self._clock.wall()
        call = _Call(token.call_id, number, request.message, request.late, wall)
        self._queues.add(request.key, queue, call)
        if request.claim:
            ttl = request.claim_ttl
            change = ClaimChange(key=request.claim, phase=Phase.QUEUED, ttl=ttl)
            self._claims.change(token, change, timeout=0)
        return call

    def position(self, key: str, call_id: str, *, timeout: float) -> int | None:
        with self._guard:
            calls = list(self._queues.of(key).calls)
        return calls.index(call_id) if call_id in calls else None

    def keys(self, shard: str, *, timeout: float) -> list[str]:
        with self._guard:
            return [key for key in self._queues.by_key if Keyspace.shard(key) == shard]

    def depths(self, keys: Sequence[str], *, timeout: float) -> list[Depth]:
        with self._guard:
            return [self._queues.of(key).depth for key in keys]

    def calls(
        self, key: str, *, first: int = 0, most: int, messages: bool = True, timeout: float
    ) -> list[QueuedCall]:
        with self._guard:
            queue = self._queues.of(key)
            calls, left = [*queue.calls.values()][first : first + most], self._rate_left(key, queue)
            next_call = self._next(key, queue)
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
                countdown=left if call is next_call else 0.0,
            )
            for position, call in enumerate(calls, first)
        ]

    def due(self, shard: str, *, limit: int, timeout: float) -> list[str]:
        with self._guard:
            now = self._clock.now()
            due = [key for key, queue in self._queues.by_key.items() if queue.due <= now]
        return [key for key in due if Keyspace.shard(key) == shard][:limit]

    def sweep(self, key: str, *, timeout: float) -> list[tuple[bool, Hint]]:
        with self._guard:
            queue, now = self._queues.by_key.get(key), self._clock.now()
            if queue is None or queue.due > now:
                return []  # another client has looked at the same time
            found, number = [], len(queue.calls) + 1
            while len(queue.calls) < number:  # again for those in the place of one that is gone
                number = len(queue.calls)
                due = [call for call in queue.looked_at if (call.at or 0.0) <= now]
                found += [one for call in due if (one := self._look_at(key, queue, call))]
            return found

    def _look_at(self, key: str, queue: _Queue, call: _Call) -> tuple[bool, Hint] | None:
        """The steps of ``queue_sweep.lua`` for a call."""
        now = self._clock.now()
        lease = self._slots(key, queue).lease_of(call)
        if lease is not None:
            call.at = now + lease.ttl
        elif call.state == "b" and not call.late:
            call.state, call.at = "o", now + _OVERDUE_FOR
        elif call.state in ("o", "x"):
            call.state, call.at = "x", now + _DEADLINE
            return True, call.hint(key)
        elif not call.message:
            self._queues.drop(key, call)
        elif (pause := self._pause_of(key)) is not None:
            call.at = self._after(pause)
        # A retry whose key was paused does not come by itself: its reservation does not keep it.
        elif self._hint(key, queue, call):
            return False, call.hint(key)
        return None

    def defer(
        self,
        key: str,
        *,
        seconds: float,
        timeout: float,
        unpublished: Hint | None = None,
        perhaps: bool = False,
        returns: str = "",
    ) -> None:
        with self._guard:
            call = self._queues.call(key, unpublished.call_id if unpublished else returns)
            at = self._clock.now() + seconds
            if call is not None and call.state != "x":
                if unpublished and call.state == "h" and call.copies:
                    call.copies -= 1
                    call.repeated = call.repeated or perhaps
                call.at = at
                queue = self._queues.by_key[key]
                behind = queue.new_behind(call) if returns and queue.limit > 1 else None
                if behind is not None and behind.at is not None:
                    behind.at = min(behind.at, self._clock.now() + _FOREIGN)
                return
            queue = self._queues.of(key)
            front = [*islice(queue.calls.values(), queue.most_limit)]
            # The sweep that stores the result of a call that leaves is not put off.
            some = front if unpublished is None and not returns else filter(None, [call])
            for one in some:
                one.at = None if one.at is None else min(one.at, at)

    def leave(self, key: str, call_id: str, *, timeout: float) -> Removal | Hint:
        with self._guard:
            call, queue = self._queues.call(key, call_id), self._queues.by_key.get(key)
            if call is None or queue is None:
                return Removal.ABSENT
            held = self._slots(key, queue).of(call)
            is_holder = held is not None and held.kind in (Kind.LEASE, Kind.DYING)
            if is_holder or (call.state == "b" and held is not None):
                return Removal.RUNNING
            call.state, call.at = "x", self._clock.now() + _DEADLINE
            return call.hint(key)

    def remove(self, request: Remove, *, timeout: float) -> tuple[Removal, Hint | None]:
        key, token = request.key, request.token
        with self._guard:
            call, queue = self._queues.call(key, token.call_id), self._queues.by_key.get(key)
            if call is None or queue is None:
                return Removal.ABSENT, None
            held = self._slots(key, queue).of(call)
            kind = held.kind if held else None
            copy = call.number[2] if request.sequence is None else request.sequence
            number = (token.nesting, token.retries, copy)
            is_older = call.state != "x" and call.number > number
            if kind is Kind.LEASE or is_older or (call.begun and request.only_unbegun):
                return Removal.RUNNING, None
            if held is not None and kind is Kind.RESERVED:  # for its retry
                self._operators.free(held.key, None)
            hinted = self._take_out(key, call, token, request.ended_ttl, request.may_return_from)
            return Removal.REMOVED, hinted.hint(key) if hinted else None

    # --- inside ----------------------------------------------------------------------------------

    def _slots(self, key: str, queue: _Queue) -> _Slots:
        """What the slots of a key hold."""
        slots = Keyspace.slots(key, queue.most_limit)
        records = {slot: one for slot in slots if (one := self._inspect(slot)) is not None}
        front, free, left, soonest = {one.call_id for one in queue.front}, 0, "", []
        for slot in slots[: queue.limit]:
            record = records.get(slot)
            holder = _holder_of(record) if record else ""
            if record is None:
                free += 1
            elif record.kind is Kind.RESERVED and holder in queue.calls and holder not in front:
                free, left = free + 1, slot
            else:
                soonest.append(record.ttl if holder in queue.calls else min(record.ttl, _FOREIGN))
        at = self._clock.now() + (0.0 if free else min(soonest))
        return _Slots(records, free, left, at)

    def _next(self, key: str, queue: _Queue) -> _Call | None:
        """The first call that may run and has to be published; see ``call_queue.lua``."""
        slots = self._slots(key, queue)
        for one in queue.front:
            if one.is_new or (one.state == "w" and slots.lease_of(one) is None):
                return one
        return None

    def _after(self, pause: Pause) -> float:
        """When a queue is swept whose key is paused, unless it is resumed before."""
        left = _PAUSED if pause.left is None else min(pause.left, _PAUSED)
        return self._clock.now() + left

    def _rate_left(self, key: str, queue: _Queue) -> float:
        """Seconds until the rate of a key lets its next call start."""
        return 0.0 if queue.rate is None else self._rates.left(key, queue.rate)

    def _cooling(self, slot: str) -> float:
        """Seconds until the cooldown of a slot ends (``min_hold``); 0: there is none."""
        record = self._inspect(slot)
        return record.ttl if record is not None and record.kind is Kind.COOLING else 0.0

    def _hint(self, key: str, queue: _Queue, call: _Call, *, delay: float = 0.0) -> _Call | None:
        """Hint a call if a slot is free, reserved for it, or in a cooldown of at most a minute."""
        slots = self._slots(key, queue)
        held, cools = slots.of(call), 0.0 < self._cooling(key) <= _LONGEST_DELAY
        is_own = held is not None and held.kind is Kind.RESERVED
        if not slots.free and not is_own and not (cools and delay):
            if call.state == "b":  # it gets the next slot, before those behind it
                call.state, call.copies = "w", 0
            call.at = slots.at
            return None
        if not call.message:
            call.at = self._clock.now()
            return None
        if delay > _LONGEST_DELAY:
            call.at = self._clock.now() + min(delay, _RATE_MAY_CHANGE)
            return None
        call.copies += 1
        call.repeated = call.repeated or call.copies > 1
        self._published(call, delay)
        return call

    def _published(self, call: _Call, delay: float) -> None:
        """Note that the message of a call is published, and is to arrive in ``delay`` seconds."""
        call.state = "h"
        growth = 4 ** min(call.copies - 1, _MOST_GROWTH)
        call.at = self._clock.now() + _DEADLINE * growth + delay

    def _take_out(
        self,
        key: str,
        call: _Call,
        token: Token,
        ttl: float,
        may_return_from: int | None,
        delay: float = 0.0,
        *,
        is_release: bool = False,
    ) -> _Call | None:
        """Take out a call that has ended; returns the call that is hinted next.

        Its message is delayed until the cooldown of the key ends and its rate allows a start. If
        that takes more than a minute, a sweep publishes it.
        """
        could_run = is_release or call in self._queues.by_key[key].front
        self._queues.drop(key, call)
        queue = self._queues.by_key.get(key)
        hinted = self._next(key, queue) if queue and could_run else None
        if queue and hinted and hinted.state == "w":
            hinted = self._hint(key, queue, hinted, delay=delay)
        else:
            hinted = None
        first, following = None, hinted.call_id if hinted else ""
        if may_return_from is not None:
            first = (token.nesting, may_return_from)
        now = self._clock.now()
        kept = max(ttl, _WEEK) if call.repeated else ttl
        end = _CallEnd(token.nonce, first, following, now + kept)
        self._queues.remember(key, call, end)
        return hinted


def _number_of(request: QueuedAcquire | Join) -> _Number:
    token = request.token
    return token.nesting, token.retries, request.sequence


def _kept(request: QueuedAcquire, call: _Call) -> Relation:
    """What a refusal says: whether the store has the newest message of a call."""
    is_newest = call.number == _number_of(request)
    return Relation.QUEUED if is_newest and call.message else Relation.UNQUEUED


def _place_kept(request: Join, call: _Call) -> Place | None:
    """The place of a call that is in the queue; None: it waits there with a newer message now."""
    number = _number_of(request)
    if call.state == "x":
        return Place.WAITING
    if call.number > number or (call.number == number and call.message):
        return Place.HINTED if call.state == "h" else Place.WAITING
    call.message = request.message
    if call.number == number:
        return Place.WAITING
    is_used = call.state in _BEGUN and call.number[:2] == number[:2]
    call.number = number
    if is_used and call.nonce not in request.asked:
        return Place.WAITING
    call.state, call.copies, call.begins, call.nonce, call.at = "w", 0, 0, "", None
    return None


def _holder_of(record: Record) -> str:
    """The call that has a slot."""
    return record.token.partition("|")[0]
