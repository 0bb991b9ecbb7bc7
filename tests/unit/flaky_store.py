"""The memory store, with the moods that a server has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from celery_singleton_lock.core.lease import Lease, LossReason
from celery_singleton_lock.core.store_requests import Release, ReleaseReply, Renewal
from celery_singleton_lock.errors import StoreUnavailable
from tests.harness.flat_store import FlatStore


class FlakyStore(FlatStore):
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

    def renew_leases(self, leases: Sequence[Lease], *, timeout: float = 0) -> list[Renewal]:
        self.batches.append([lease.key for lease in leases])
        self.timeouts.append(timeout)
        if self.away:
            raise StoreUnavailable("connection refused")
        if self.before_renewal is not None:
            self.before_renewal()
        replies = super().renew_leases(leases, timeout=timeout)
        if self.before_reply is not None:
            self.before_reply()
        return [
            LossReason.UNREACHABLE if lease.key in self.silent else reply
            for lease, reply in zip(leases, replies, strict=True)
        ]

    def release(self, request: Release, *, timeout: float = 0) -> ReleaseReply:
        if self.away:
            raise StoreUnavailable("connection refused")
        return super().release(request, timeout=timeout)


class BatchingFlakyStore(FlakyStore):
    """The same, asked for each lease by itself."""

    #: After so many calls it is away.
    answers: int | None = None

    capabilities = replace(FlakyStore.capabilities, renewal_batch=1)

    def renew_leases(self, leases: Sequence[Lease], *, timeout: float = 0) -> list[Renewal]:
        self.away = len(self.batches) == self.answers
        return super().renew_leases(leases, timeout=timeout)
