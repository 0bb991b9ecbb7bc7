"""The memory store, with the moods that a server has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from celery_singleton_lock.core.lease import Lease
from celery_singleton_lock.core.store import Release, Released, Renewal
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.memory import MemoryStore


class FlakyStore(MemoryStore):
    """The memory store, which doesn't answer while it is ``away`` and counts its renewals."""

    away = False
    #: Called when a renewal is on its way to the store.
    before_renewal: Callable[[], None] | None = None
    #: Called between the renewal in the store and its reply.
    before_reply: Callable[[], None] | None = None

    def __init__(self, clock: Any) -> None:
        super().__init__(clock)
        self.batches: list[list[str]] = []
        self.timeouts: list[float] = []

    #: Keys whose part of the store doesn't answer.
    silent: frozenset[str] = frozenset()

    def renew(self, leases: Sequence[Lease], *, timeout: float = 0) -> list[Renewal]:
        self.batches.append([lease.key for lease in leases])
        self.timeouts.append(timeout)
        if self.away:
            raise StoreUnavailable("connection refused")
        if self.before_renewal is not None:
            self.before_renewal()
        replies = super().renew(leases, timeout=timeout)
        if self.before_reply is not None:
            self.before_reply()
        return [
            Renewal.SILENT if lease.key in self.silent else reply
            for lease, reply in zip(leases, replies, strict=True)
        ]

    def release(self, call: Release, *, timeout: float = 0) -> Released:
        if self.away:
            raise StoreUnavailable("connection refused")
        return super().release(call, timeout=timeout)


class StreamingFlakyStore(FlakyStore):
    """The same, which answers about each lease by itself."""

    #: After so many answers it is away.
    answers: int | None = None

    def renewals(self, leases: Sequence[Lease], *, timeout: float) -> Iterator[list[Renewal]]:
        for number, lease in enumerate(leases):
            self.away = number == self.answers
            yield self.renew([lease], timeout=timeout)
