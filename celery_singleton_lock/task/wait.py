"""Waiting for a key that another client holds: in the store's wait queue, or by polling.

Guarantees
    A waiting client looks at the key again within half a second, woken or not, and when the ttl
    ends that the last refusal named. Whatever is lost (a wake-up, the store's memory, the woken
    client), the delay is half a second. A client that leaves, for whatever reason, is counted in
    the wait queue for at most 1.5 s.

Non-guarantees
    Polling clients are in no order, and a reconnect loses the place in the queue. A store with a
    wait queue wakes the client that has waited longest, and refuses others meanwhile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from celery_singleton_lock.core.heartbeat import timeout_for
from celery_singleton_lock.core.lease import Kind, Lease
from celery_singleton_lock.core.locker import Locker
from celery_singleton_lock.core.store import Acquire, Refused, Relation
from celery_singleton_lock.task.put_back import backoff

_POLL: Final = 0.05
_LONGEST_POLL: Final = 0.5
# The server's clock counts whole milliseconds: a look exactly at the end of a ttl is too early.
_AFTER_THE_END: Final = 0.002
# Three looks: a process that is slow to look must not be passed over.
_COUNTED: Final = 3 * _LONGEST_POLL


class Waiter:
    """One client that waits for one key.

    Its owner sends the requests, in a loop: :meth:`prepare`, acquire, :meth:`observe`,
    :meth:`wait`.

    Args:
        locker: Of the process.
        request: What is asked for.
    """

    def __init__(self, locker: Locker, request: Acquire) -> None:
        self._clock = locker.clock
        self._ticket = locker.store.ticket(
            request.slots[0], request.token.nonce, timeout=timeout_for(request.ttl)
        )
        self._counted = False  # whether the store may count this client in the queue
        self._joins = False
        self._handoff = ""
        self._tries = 0

    def prepare(self, request: Acquire, *, waits: bool) -> Acquire:
        """``request`` with this client's place in the wait queue.

        Args:
            request: What is asked for now.
            waits: Whether the client will wait, should another have the key.
        """
        handoff, self._handoff = self._handoff, ""
        self._joins = waits and self._ticket is not None
        if not self._joins and not self._counted:
            return request
        # Noted before it is sent: the outcome of an interrupted request is unknown.
        self._counted = True
        return replace(request, wait_ttl=_COUNTED if self._joins else 0.0, handoff=handoff)

    def observe(self, reply: Lease | Refused) -> None:
        """Note the reply to what was prepared."""
        if isinstance(reply, Lease):
            self._counted = False
        elif reply.relation is Relation.OTHER:
            self._counted = self._joins

    def wait(self, refused: Refused, longest: float) -> None:
        """Wait until the next look.

        Args:
            refused: The last reply.
            longest: Seconds that the client has left.
        """
        record = refused.record
        # Claims end without running release.lua, so nothing would wake this client.
        if self._ticket is not None and not (record and record.kind is Kind.CLAIM):
            # A key without a ttl (after an operator's PERSIST) has 0.
            ttl_left = (record and record.ttl) or _LONGEST_POLL
            handoff = self._ticket.wait(min(longest, ttl_left + _AFTER_THE_END, _LONGEST_POLL))
            if handoff is not None:
                self._handoff = handoff
                return
            self._ticket = None  # the next request leaves the queue
        self._clock.sleep(min(longest, backoff(_POLL, _LONGEST_POLL, self._tries)))
        self._tries += 1

    def leave(self) -> None:
        """End the waiting; never raises a StoreError."""
        if self._ticket is not None:
            self._ticket.leave(counted=self._counted)
