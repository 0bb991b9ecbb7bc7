"""Waiting for a key that another client holds: in the store's wait queue, or by polling.

Guarantees
    A waiting client tries again within half a second, woken or not, and at the end of the ttl in
    the last refusal. If a wake-up, the store's memory or the woken client is lost, the delay is
    half a second. A client that leaves or vanishes is counted in the wait queue for at most 1.5 s.

Non-guarantees
    An order of polling clients. A position in the queue after a reconnect. A store with a wait
    queue wakes the client that has waited longest, and refuses other clients meanwhile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from celery_singleton_lock.core.heartbeat import timeout_for
from celery_singleton_lock.core.lease import Kind, Lease
from celery_singleton_lock.core.locker import Locker
from celery_singleton_lock.core.store import Acquire, Refused, Relation
from celery_singleton_lock.task.put_back import backoff

_POLL: Final = 0.05
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
        self._locker, self._clock = locker, locker.clock
        self._ticket = locker.store.ticket(
            request.slots[0], request.token.nonce, timeout=timeout_for(request.ttl)
        )
        self._arrived_at = self._clock.now()
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
        reply = self._locker.acquire(request, **options)
        if isinstance(reply, Lease):
            self._counted = False
        elif reply.relation is Relation.OTHER:
            self._counted = joins
        return reply

    def waited(self) -> float:
        """Seconds since the client came."""
        return self._clock.now() - self._arrived_at

    def wait(self, refused: Refused, longest: float) -> None:
        """Wait until the next try.

        Args:
            refused: The last reply.
            longest: Seconds until the client gives up.
        """
        record = refused.record
        # Claims end without running release.lua, so nothing would wake this client.
        if self._ticket is not None and not (record and record.kind is Kind.CLAIM):
            # The ttl of a key without expiry (after an operator's PERSIST) is 0 here.
            ttl_left = (record and record.ttl) or _LONGEST_POLL
            handoff = self._ticket.wait(min(longest, ttl_left + _AFTER_THE_END, _LONGEST_POLL))
            if handoff is not None:
                self._handoff = handoff
                return
            self._ticket = None  # poll from now on; the next request leaves the queue
        self._clock.sleep(min(longest, backoff(_POLL, _LONGEST_POLL, self._tries)))
        self._tries += 1

    def leave(self) -> None:
        """End the waiting; never raises a StoreError."""
        if self._ticket is not None:
            self._ticket.leave(counted=self._counted)
