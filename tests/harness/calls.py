"""The calls of one key, and what their publishers, workers and operators do in the store."""

from __future__ import annotations

from typing import Any, Final

from celery_singleton_lock.core.call_queue import (
    CallQueue,
    Hint,
    Join,
    Place,
    Removal,
    Remove,
)
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Kind, Token
from celery_singleton_lock.core.store import Store, operators_of
from celery_singleton_lock.core.store_requests import (
    Granted,
    GrantedInTurn,
    QueuedAcquire,
    QueuedRelease,
    Refused,
    Relation,
    ReleaseReply,
)
from celery_singleton_lock.testing.contract import TIMEOUT, new_key, new_token
from celery_singleton_lock.testing.contract.steps import HOLDER, LONG
from tests.harness.deliveries import wait_until

#: Seconds for which the end of a call is remembered.
DAY: Final = 86400.0


class Calls:
    """The calls of one key, and what their publishers and workers do."""

    def __init__(
        self, store: Store, *, late: bool = True, limit: int = 1, slots: int | None = None
    ) -> None:
        self.store, self.late, self.key, self.limit = store, late, new_key(), limit
        self._slots = slots or limit
        assert store.call_queue is not None
        self.queue: CallQueue = store.call_queue

    def position(self, token: Token) -> int | None:
        return self.queue.position(self.key, token.call_id, timeout=TIMEOUT)

    def join(self, token: Token, **options: Any) -> Place:
        return self.joins(token, **options)[0]

    def joins(self, token: Token, *, message: bytes = b"", **options: Any) -> tuple[Place, int]:
        message = message or token.attempt.encode()
        options = {"late": self.late, "limit": self.limit, **options}
        request = Join(key=self.key, token=token, message=message, **options)
        return self.queue.join(request, timeout=TIMEOUT)

    def joined(self, count: int) -> list[Token]:
        tokens = [new_token() for _ in range(count)]
        for token in tokens:
            self.join(token)
        return tokens

    def ask(self, token: Token, **options: Any) -> Granted | Refused:
        slots = Keyspace.slots(self.key, self.limit)
        options = {"holder": HOLDER, "ttl": LONG, "late": self.late, "slots": slots, **options}
        request = QueuedAcquire(token=token, **options)
        return self.store.leases.acquire(request, timeout=TIMEOUT)

    def relation(self, token: Token) -> Relation:
        reply = self.ask(token)
        assert isinstance(reply, Refused), reply
        return reply.relation

    def begin(self, token: Token, **options: Any) -> None:
        reply = self.ask(token, **options)
        assert isinstance(reply, Granted), reply

    def release(
        self, token: Token, *, goes_on: bool = False, due_in: float = 0.0, **options: Any
    ) -> tuple[ReleaseReply, Hint | None]:
        request = QueuedRelease(
            keys=self.slots_of_worker(token),
            token=token,
            ended_ttl=None if goes_on else DAY,
            due_in=due_in,
            **options,
        )
        assert self.store.call_queue is not None
        return self.store.call_queue.release(request, timeout=TIMEOUT)

    def end(self, token: Token, **options: Any) -> Hint | None:
        relation, hint = self.release(token, **options)
        assert relation is ReleaseReply.OURS
        return hint

    def remove(self, token: Token, **options: Any) -> tuple[Removal, Hint | None]:
        request = Remove(key=self.key, token=token, **{"ended_ttl": DAY, **options})
        return self.queue.remove(request, timeout=TIMEOUT)

    def depth(self) -> int:
        """How many calls wait."""
        (depth,) = self.queue.depths([self.key], timeout=TIMEOUT)
        return depth.waiting

    def is_due(self) -> bool:
        shard = Keyspace.shard(self.key)
        return self.key in self.queue.due(shard, limit=1000, timeout=TIMEOUT)

    def sweep(self) -> tuple[bool, Hint] | None:
        """A sweep whose time has come."""
        self.queue.defer(self.key, seconds=0.0, timeout=TIMEOUT)
        # A deadline is a millisecond away at least. A queue without calls has none.
        wait_until(
            lambda: self.is_due() or not self.queue.calls(self.key, most=1, timeout=TIMEOUT),
            "its time has come",
        )
        return self.sweep_early()

    def sweep_early(self) -> tuple[bool, Hint] | None:
        """A sweep whose time may not have come: a client is slow, and another one was before it."""
        found = self.queue.sweep(self.key, timeout=TIMEOUT)
        assert len(found) < 2
        return found[0] if found else None

    def found_by_look(self) -> tuple[bool, Hint]:
        """The first reply of a sweep: a lease that has ended may be there for a moment."""
        found = wait_until(self.sweep, "a sweep that finds a call")
        assert found is not None
        return found

    def hinted_by_sweep(self) -> Hint:
        is_lost, hint = self.found_by_look()
        assert not is_lost
        return hint

    def lost_by_sweep(self) -> Hint:
        """The call at the head, whose lease has ended, as a sweep finds it: lost, after a while."""
        assert self.sweep() is None
        is_lost, hint = self.found_by_look()
        assert is_lost
        return hint

    def slots_of_worker(self, token: Token) -> tuple[str, ...]:
        """The slots that the worker with the lease knows: as many as now, or more before."""
        slots = Keyspace.slots(self.key, self._slots)
        records = map(self.store.leases.inspect, slots if self._slots > 1 else ())
        held = [n for n, one in enumerate(records) if one is not None and one.token == str(token)]
        return slots[: max([self.limit, *(number + 1 for number in held)])]

    def is_running(self, token: Token) -> bool:
        """Whether a delivery has its lease."""
        slots = Keyspace.slots(self.key, self._slots)
        records = filter(None, map(self.store.leases.inspect, slots))
        return any(one.token == str(token) and one.kind is Kind.LEASE for one in records)

    def slot_of(self, token: Token) -> str | None:
        """The slot that a call has; None: none, or the key has one alone."""
        for slot in Keyspace.slots(self.key, self._slots) if self._slots > 1 else ():
            record = self.store.leases.inspect(slot)
            if record is not None and record.token.startswith(f"{token.call_id}|"):
                return slot
        return None

    def lose_lease(self, token: Token | None = None) -> None:
        """The lease of the holder, or of a call, ends without a release."""
        slot = self.key if token is None else self.slot_of(token)
        assert slot is not None
        operators_of(self.store).free(slot, None)

    def runs(self, token: Token, **options: Any) -> Hint | None:
        """A call begins; the call to publish that may begin beside it."""
        reply = self.ask(token, **options)
        assert isinstance(reply, Granted), reply
        return reply.following if isinstance(reply, GrantedInTurn) else None

    def swept(self) -> list[tuple[bool, Hint]]:
        """What a sweep finds whose time has come."""
        self.queue.defer(self.key, seconds=0.0, timeout=TIMEOUT)
        wait_until(self.is_due, "its time has come")
        return self.queue.sweep(self.key, timeout=TIMEOUT)
