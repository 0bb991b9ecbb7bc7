"""What the stores without scripts have in common: each operation is one rule, applied."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeVar

from celery_singleton_lock.core.lease import Record, Token
from celery_singleton_lock.core.store import (
    Acquire,
    Admit,
    Authorization,
    AuthorizeTick,
    ClaimChange,
    Granted,
    MarkerState,
    Refused,
    Release,
    Released,
    Trace,
)
from celery_singleton_lock.stores.transitions import rules
from celery_singleton_lock.stores.transitions.transition import Rule

__all__ = ["RuledStore"]

Reply = TypeVar("Reply")

_OPERATOR_TIMEOUT: Final = 2.0


class RuledStore(ABC):
    """A store that reads, lets a rule decide, and writes if nothing has changed meanwhile.

    What a subclass adds to this is a Store.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """Begin with nothing that belongs to one process: sessions, threads, what they keep."""
        self._process = os.getpid()

    def _notice_fork(self) -> None:
        """Begin anew in a child: what its parent keeps alive isn't the child's to end."""
        if self._process != os.getpid():
            self._begin()

    @abstractmethod
    def _apply(self, rule: Rule[Reply], timeout: float) -> tuple[Reply, int]:
        """Carry out ``rule`` as if nobody else did anything meanwhile.

        Returns:
            Its reply, and the number that the store gave to the write (0: there was none). The
            numbers of later writes are higher.
        """

    def acquire(self, call: Acquire, *, timeout: float = 0) -> Granted | Refused:
        reply, number = self._apply(rules.acquire(call), timeout)
        if isinstance(reply, Granted) and len(call.slots) == 1:
            return replace(reply, fence=number)
        return reply

    def release(self, call: Release, *, timeout: float = 0) -> Released:
        return self._apply(rules.release(call), timeout)[0]

    def mark(
        self,
        key: str,
        token: Token,
        state: MarkerState,
        sequence: int,
        ttl: float,
        *,
        timeout: float = 0,
        claim: ClaimChange | None = None,
    ) -> None:
        self._apply(rules.mark(key, token, state, sequence, ttl, claim), timeout)

    def admit(self, call: Admit, *, timeout: float = 0) -> Record | None:
        return self._apply(rules.admit(call), timeout)[0]

    def settle_claim(self, token: Token, change: ClaimChange, *, timeout: float = 0) -> None:
        self._apply(rules.settle_claim(token, change), timeout)

    def authorize_tick(self, call: AuthorizeTick, *, timeout: float = 0) -> Authorization:
        return self._apply(rules.authorize_tick(call), timeout)[0]

    def last_runs(self, keys: Sequence[str], *, timeout: float = 0) -> list[str | None]:
        return self._apply(rules.last_runs(keys), timeout)[0] if keys else []

    def trace(self, key: str, *, timeout: float = 0) -> Trace:
        return Trace(record=self._apply(rules.inspect(key), timeout)[0])

    def inspect(self, key: str) -> Record | None:
        return self._apply(rules.inspect(key), _OPERATOR_TIMEOUT)[0]

    def free(self, key: str, token: str | None) -> bool:
        # The number of the next grant is above that of this deletion, and of the freed lease.
        return self._apply(rules.free(key, token), _OPERATOR_TIMEOUT)[0]
