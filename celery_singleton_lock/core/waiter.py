"""A client that waits for a key that another client holds.

Overview
    A waiting client tries to acquire, sleeps, and tries again. A store with a wait queue wakes the
    client that has waited longest when the key is released, and refuses other clients meanwhile.
    With other stores the client polls.

Guarantees
    A waiting client tries again within half a second, woken or not, and when the ttl in the last
    refusal has passed. If a wake-up, the store's memory or the woken client is lost, the delay is
    half a second. A client that leaves or vanishes is counted in the wait queue for at most 1.5 s.

Non-guarantees
    Polling clients acquire the key in no particular order. A client that reconnects may lose its
    place in the wait queue.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from .backoff import backoff
from .heartbeat import timeout_for
from .lease import Kind, Lease
from .locker import Locker
from .store_requests import Acquire, Refused, Relation

# Seconds from the first try of a client that polls to its second; the time doubles at each try.
_POLL: Final = 0.05
# Seconds between two tries of a client at most, woken or not.
_LONGEST_POLL: Final = 0.5
# Seconds. The server's clock counts whole milliseconds, so a try exactly at the end of a ttl would
# be too early.
_AFTER_THE_END: Final = 0.002
# The time of three tries, so that a slow client keeps its position in the queue.
_COUNTED: Final = 3 * _LONGEST_POLL


class Waiter:
    """One client that waits for one key.

    Its owner calls :meth:`acquire` and :meth:`wait` in a loop, and :meth:`leave` at the end.

    Args:
        locker: The locker of the process.
        request: The request for the lease.
    """

    def __init__(self, locker: Locker, request: Acquire) -> None:
        self._locker, self.clock = locker, locker.clock
        queue, timeout = locker.store.wait_queue, timeout_for(request.ttl)
        self._ticket = (
            None
            if queue is None
            else queue.ticket(request.slots[0], request.token.nonce, timeout=timeout)
        )
        self._arrived_at = self.clock.now()
        self._counted = False  # whether the store may count this client in the queue
        self._handoff = ""
        self._tries = 0

    def acquire(self, request: Acquire, *, waits: bool, **options: Any) -> Lease | Refused:
        """`Locker.acquire`, with this client's ticket in the wait queue.

        Args:
            request: The next request.
            waits: Whether the client will wait if another client has the key.
            **options: Further arguments of `Locker.acquire`.
        """
        handoff, self._handoff = self._handoff, ""
        joins = waits and self._ticket is not None
        if joins or self._counted:
            # Set before the request is sent, because the outcome of an interrupted request is
            # unknown.
            self._counted = True
            request = replace(request, wait_ttl=_COUNTED if joins else 0.0, handoff=handoff)
        reply = self._locker.acquire(request, since=self._arrived_at, **options)
        if isinstance(reply, Lease):
            self._counted = False
        elif reply.relation is Relation.OTHER:
            self._counted = joins
        elif reply.relation is Relation.RATE:
            self._counted = False
        return reply

    def waited(self) -> float:
        """Seconds since the client came."""
        return self.clock.now() - self._arrived_at

    def wait(self, refused: Refused, longest: float) -> None:
        """Block until woken, or until the next try.

        Args:
            refused: The last reply.
            longest: Seconds until the client gives up.
        """
        if self.queues(refused) and self.look(self.pause(refused, longest)):
            return
        self.clock.sleep(self.pause(refused, longest))

    def queues(self, refused: Refused) -> bool:
        """Whether the store may wake this client before the next try."""
        # Claims end without running release.lua, and a rate by itself: nothing would wake this
        # client.
        is_claim = refused.record is not None and refused.record.kind is Kind.CLAIM
        return self._ticket is not None and not is_claim and refused.relation is not Relation.RATE

    def pause(self, refused: Refused, longest: float) -> float:
        """Seconds until the next try; the arguments are those of :meth:`wait`."""
        if refused.relation is Relation.RATE:
            return min(longest, refused.due_in + _AFTER_THE_END)
        if self.queues(refused):
            # The ttl of a key without expiry (after an operator's PERSIST) is 0 here.
            ttl_left = (refused.record and refused.record.ttl) or _LONGEST_POLL
            return min(longest, ttl_left + _AFTER_THE_END, _LONGEST_POLL)
        self._tries += 1
        return min(longest, backoff(_POLL, _LONGEST_POLL, self._tries - 1))

    def look(self, seconds: float) -> bool:
        """Join the queue, and wait at most ``seconds`` until woken; False: this client polls."""
        assert self._ticket is not None
        handoff = self._ticket.wait(seconds)
        if handoff is None:
            self._ticket = None  # poll from now on; the next request leaves the queue
        else:
            self._handoff = handoff
        return handoff is not None

    @property
    def woken(self) -> bool:
        """Whether a release has woken this client since its last try."""
        return bool(self._handoff)

    def fileno(self) -> int | None:
        """See `Ticket`."""
        return None if self._ticket is None else self._ticket.fileno()

    def leave(self) -> None:
        """End the waiting; never raises a StoreError."""
        if self._ticket is not None:
            self._ticket.leave(counted=self._counted)
