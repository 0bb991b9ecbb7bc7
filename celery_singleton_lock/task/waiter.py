"""Waiting for a key that somebody else holds: called at its release where the store can do that.

Promises
    Who waits looks at the key again within half a second, called or not, and when the ttl ends that
    it was told of: whatever is lost (a call, the store's memory, who was called), half a second is
    the price. Whoever leaves, for whatever reason, is counted among the waiting for 1.5 s at most.

Does not promise
    An order among those who only look, nor one over a reconnect. Where the store calls, it calls
    who has waited longest, and keeps the key from those who come in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from celery_singleton_lock.core.lease import Kind, Lease
from celery_singleton_lock.core.locker import Locker
from celery_singleton_lock.core.pace import timeout_for
from celery_singleton_lock.core.store import Acquire, Refused, Relation
from celery_singleton_lock.core.wait_queue import CallsWaiters
from celery_singleton_lock.task.put_back import backoff

__all__ = ["Waiter"]

_POLL: Final = 0.05
_LONGEST_POLL: Final = 0.5
# The server's clock counts whole milliseconds: a look right at the end of a ttl is one too early.
_AFTER_THE_END: Final = 0.002
# Three looks: a process that is slow to look must not be passed over.
_COUNTED: Final = 3 * _LONGEST_POLL


class Waiter:
    """One caller's patience for one key: what it asks, and how it waits in between.

    Args:
        locker: Of the process.
        call: What is asked for.
        acquire: How: the locker's, with all that the caller adds.
    """

    def __init__(
        self, locker: Locker, call: Acquire, acquire: Callable[[Acquire], Lease | Refused]
    ) -> None:
        self._clock = locker.clock
        self._acquire = acquire
        store = locker.store
        self._place = (
            store.place(call.slots[0], call.token.nonce, timeout=timeout_for(call.ttl))
            if isinstance(store, CallsWaiters)
            else None
        )
        self._counted = False
        self._turn = ""
        self._tries = 0

    def ask(self, call: Acquire, *, waits: bool) -> Lease | Refused:
        """Look at the key once, and take it if it can be had.

        Args:
            call: What is asked for now.
            waits: Whether the caller will wait, should another have the key.

        Raises:
            StoreError: As of the locker.
        """
        line = None
        if self._place is not None and waits:
            line = _COUNTED
        elif self._counted:
            line = 0.0
        # Before it is sent: of an interrupted call nobody knows what it has done.
        self._counted = self._counted or bool(line)
        turn, self._turn = self._turn, ""
        reply = self._acquire(call if line is None else replace(call, wait_ttl=line, handoff=turn))
        if isinstance(reply, Lease) or reply.relation is Relation.OTHER:
            self._counted = isinstance(reply, Refused) and bool(line)
        return reply

    def wait(self, refused: Refused, longest: float) -> None:
        """Wait for the next look.

        Args:
            refused: What the last one brought.
            longest: Seconds that the caller has left.
        """
        record = refused.record
        # Of a claim's end no release tells.
        if self._place is not None and not (record and record.kind is Kind.CLAIM):
            # No ttl at all, after somebody's PERSIST, is 0.
            ttl_left = (record and record.ttl) or _LONGEST_POLL
            pause = min(longest, ttl_left + _AFTER_THE_END, _LONGEST_POLL)
            turn = self._place.wait(pause)
            if turn is not None:
                self._turn = turn
                return
            self._place = None  # the next look leaves the line
        self._clock.sleep(min(longest, backoff(_POLL, _LONGEST_POLL, self._tries)))
        self._tries += 1

    def leave(self) -> None:
        """The caller waits no more; never raises a StoreError."""
        if self._place is not None:
            self._place.leave(counted=self._counted)
