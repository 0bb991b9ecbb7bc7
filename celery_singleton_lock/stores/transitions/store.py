"""The base class of stores without scripts: each operation is one transition.

A subclass implements ``capabilities``, ``transact``, ``scan`` and ``close``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeVar

from celery_singleton_lock.core.lease import Lease, Record, Token
from celery_singleton_lock.core.store import (
    Acquire,
    Admit,
    Authorization,
    AuthorizeTick,
    ClaimChange,
    Granted,
    Mark,
    Refused,
    Relation,
    Release,
    Renewal,
    Store,
    Trace,
)
from celery_singleton_lock.stores.transitions import operations
from celery_singleton_lock.stores.transitions.transition import Transition

Reply = TypeVar("Reply")

#: Seconds to wait for the reply to an operator's request.
OPERATOR_TIMEOUT: Final = 2.0


class TransitionStore(Store):
    """A store that reads entries, applies a transition, and writes if none of them has changed."""

    @abstractmethod
    def transact(self, transition: Transition[Reply], timeout: float) -> tuple[Reply, int]:
        """Apply ``transition`` atomically.

        Returns:
            The transition's reply, and the number that the store gave to the write; 0 if nothing
            was written. The numbers of later writes are higher.
        """

    def acquire(self, request: Acquire, /, *, timeout: float = 0) -> Granted | Refused:
        reply, number = self.transact(operations.acquire(request), timeout)
        if isinstance(reply, Granted) and len(request.slots) == 1:
            return replace(reply, fence=number)
        return reply

    def renew(self, leases: Sequence[Lease], /, *, timeout: float = 0) -> list[Renewal]:
        return self.transact(operations.renew(leases), timeout)[0]

    def release(self, request: Release, /, *, timeout: float = 0) -> Relation:
        return self.transact(operations.release(request), timeout)[0]

    def mark(self, request: Mark, /, *, timeout: float = 0) -> None:
        self.transact(operations.mark(request), timeout)

    def admit(self, request: Admit, /, *, timeout: float = 0) -> Record | None:
        return self.transact(operations.admit(request), timeout)[0]

    def settle_claim(self, token: Token, change: ClaimChange, /, *, timeout: float = 0) -> None:
        self.transact(operations.settle_claim(token, change), timeout)

    def authorize_tick(self, request: AuthorizeTick, /, *, timeout: float = 0) -> Authorization:
        return self.transact(operations.authorize_tick(request), timeout)[0]

    def last_runs(self, keys: Sequence[str], /, *, timeout: float = 0) -> list[str | None]:
        return self.transact(operations.last_runs(keys), timeout)[0] if keys else []

    def trace(self, key: str, /, *, timeout: float = 0) -> Trace:
        return Trace(record=self.transact(operations.inspect(key), timeout)[0])

    def inspect(self, key: str, /) -> Record | None:
        return self.transact(operations.inspect(key), OPERATOR_TIMEOUT)[0]

    def free(self, key: str, token: str | None, /) -> bool:
        # The number of the next grant is higher than that of this deletion and of the freed lease.
        return self.transact(operations.free(key, token), OPERATOR_TIMEOUT)[0]
