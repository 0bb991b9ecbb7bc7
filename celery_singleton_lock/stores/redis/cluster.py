"""Leases in a Redis Cluster: the keys of a prefix are in 256 shards, each in one hash slot.

Guarantees
    A lease, its fence counter, its marker and its claim are in one shard, so every operation is one
    script on one node, as on a single server. Renewals are one pipeline per node, all at once: a
    node that does not answer delays no lease of another node.

Non-guarantees
    Exclusion over a failover: replication is asynchronous. Atomicity for a stray claim, which is in
    another shard because its publisher computed another key: a separate request changes it, before
    or after the lease's request. If that request fails, the claim expires.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import redis

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Kind, Lease, LossReason, Record, Token
from celery_singleton_lock.core.store import (
    RENEWED,
    Acquire,
    Capabilities,
    ClaimChange,
    Granted,
    Mark,
    OnReply,
    Refused,
    Relation,
    Release,
    Renewal,
)
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.redis import scripts
from celery_singleton_lock.stores.redis.inspect import record_of
from celery_singleton_lock.stores.redis.nodes import NodeConnections
from celery_singleton_lock.stores.redis.replies import checked
from celery_singleton_lock.stores.redis.scripts import (
    KeysAndArguments,
    Script,
    milliseconds,
    phase_of,
)
from celery_singleton_lock.stores.redis.store import RedisStore

logger = logging.getLogger("celery_singleton_lock")


class ClusterStore(RedisStore):
    """A store in one Redis Cluster. The URL names some nodes; other arguments as for RedisStore."""

    shards = 256

    def __init__(
        self,
        url: str,
        *,
        fence_base: int = 0,
        options: Mapping[str, Any] | None = None,
        wait_replicas: int = 0,
    ) -> None:
        self._nodes = NodeConnections(url, options)
        super().__init__(
            url,
            fence_base=fence_base,
            wait_replicas=wait_replicas,
            connect=lambda url, options: self._nodes,
        )

    @property
    def capabilities(self) -> Capabilities:
        # All leases are renewed in one batch, because all nodes get their pipelines at once: a node
        # that does not answer delays no lease of another node.
        return replace(super().capabilities, name="redis cluster", renewal_batch=None)

    def acquire(self, request: Acquire, *, timeout: float) -> Granted | Refused:
        claim = _stray(request.slots[0], request.claim)
        if claim is None:
            return super().acquire(request, timeout=timeout)
        if request.yields:
            claimed = self._read(claim.key, timeout)
            anothers = (
                claimed and claimed.kind is Kind.CLAIM and claimed.token != request.token.task
            )
            if anothers and not self._holds(request, timeout):
                return Refused(relation=Relation.OTHER, record=claimed)
        alone = replace(request, claim=None, frees_claim=False, yields=False)
        reply = super().acquire(alone, timeout=timeout)
        if isinstance(reply, Granted):
            self._settle_stray(request.token, claim, timeout)
        elif request.frees_claim and reply.relation is Relation.OTHER:
            self._settle_stray(request.token, replace(claim, phase=None), timeout)
        return reply

    def release(self, request: Release, *, timeout: float) -> Relation:
        claim = _stray(request.keys[0], request.claim)
        if claim is None:
            return super().release(request, timeout=timeout)
        reply = super().release(replace(request, claim=None), timeout=timeout)
        if reply is Relation.OURS or (reply is Relation.NOT_OURS and claim.phase is None):
            self._settle_stray(request.token, claim, timeout)
        return reply

    def release_async(
        self,
        request: Release,
        *,
        timeout: float,
        on_reply: OnReply,
    ) -> bool:
        if _stray(request.keys[0], request.claim) is not None:
            return False  # the change of the stray claim depends on the reply
        return super().release_async(request, timeout=timeout, on_reply=on_reply)

    def mark(self, request: Mark, *, timeout: float) -> None:
        claim = _stray(request.key, request.claim)
        if claim is None:
            return super().mark(request, timeout=timeout)
        super().mark(replace(request, claim=None), timeout=timeout)
        return self._settle_stray(request.token, claim, timeout)

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[Renewal]:
        shards = _by_shard(leases)
        chunks = [
            chunk
            for shard in shards
            for chunk in scripts.chunks_of([leases[index] for index in shard])
        ]
        found = chain.from_iterable(self._renew(chunks, timeout))
        order = dict(zip(chain.from_iterable(shards), found, strict=True))
        replies = [order[index] for index in range(len(leases))]
        runs = [
            ((lease.claim_key,), (lease.token.task, milliseconds(lease.ttl)))
            for lease, reply in zip(leases, replies, strict=True)
            if reply is RENEWED
            and lease.claim_key
            and not Keyspace.same_shard(lease.key, lease.claim_key)
        ]
        if runs:
            self._attempt(scripts.PROLONG, runs, timeout)  # after a failure the claim expires
        return replies

    def _renew(self, chunks: Sequence[Sequence[Lease]], timeout: float) -> list[list[Renewal]]:
        runs = [scripts.renewal_arguments(chunk) for chunk in chunks]
        found: list[list[Renewal] | None] = []
        for chunk, reply in zip(
            chunks, replies := self._attempt(scripts.RENEW, runs, timeout), strict=True
        ):
            if isinstance(reply, redis.exceptions.TryAgainError):
                found.append(self._renew_apart(chunk, timeout))
            else:
                failed = isinstance(reply, Exception)
                found.append(None if failed else scripts.renewals_of(chunk, reply))
        if replies and not any(found):
            raise _refusal(replies)
        return [
            reply or [LossReason.UNREACHABLE] * len(chunk)
            for chunk, reply in zip(chunks, found, strict=True)
        ]

    def _renew_apart(self, chunk: Sequence[Lease], timeout: float) -> list[Renewal] | None:
        """Renew each lease by its own request: while a slot moves, its keys are on two nodes."""
        runs = [scripts.renewal_arguments([lease], claims=False) for lease in chunk]
        replies = self._attempt(scripts.RENEW, runs, timeout)
        if all(isinstance(reply, Exception) for reply in replies):
            return None
        return [
            LossReason.UNREACHABLE
            if isinstance(reply, Exception)
            else scripts.renewals_of([lease], reply)[0]
            for lease, reply in zip(chunk, replies, strict=True)
        ]

    def _attempt(
        self, script: Script, runs: Sequence[KeysAndArguments], timeout: float
    ) -> list[Any]:
        """The reply or the error of each request."""
        replies = self._nodes.attempt([*map(script.evalsha, runs)], timeout, waits=False)
        forgotten = [
            index
            for index, reply in enumerate(replies)
            if isinstance(reply, redis.exceptions.NoScriptError)
        ]
        if forgotten:
            taught = [script.eval(runs[index]) for index in forgotten]
            again = self._nodes.attempt(taught, timeout, waits=False)
            for index, reply in zip(forgotten, again, strict=True):
                replies[index] = reply
        return replies

    def _holds(self, request: Acquire, timeout: float) -> bool:
        """Whether the token holds the key already, and only the reply to its acquire was lost."""
        records = [self._read(slot, timeout) for slot in request.slots]
        return any(record is not None and record.token == str(request.token) for record in records)

    def _read(self, key: str, timeout: float) -> Record | None:
        value, ttl_ms = self._nodes.run([("GET", key), ("PTTL", key)], timeout)
        return None if value is None else record_of(key.encode(), value, ttl_ms)

    def _settle_stray(self, token: Token, change: ClaimChange, timeout: float) -> None:
        arguments = [token.task, phase_of(change), milliseconds(change.ttl), "y"]
        try:
            self._run(scripts.SETTLE_CLAIM, ([change.key], arguments), timeout)
        except StoreError as exc:
            # Exclusion depends on the lease only. An unsettled claim delays calls until it expires.
            logger.warning("singleton: %s stays until it expires: %s", change.key, exc)


def _by_shard(leases: Sequence[Lease]) -> list[list[int]]:
    """The positions of the leases of each shard."""
    shards: dict[str, list[int]] = {}
    for index, lease in enumerate(leases):
        shards.setdefault(Keyspace.shard(lease.key), []).append(index)
    return list(shards.values())


def _stray(key: str, claim: ClaimChange | None) -> ClaimChange | None:
    """``claim`` if it is in another shard than ``key``."""
    return claim if claim is not None and not Keyspace.same_shard(key, claim.key) else None


def _refusal(replies: list[Any]) -> StoreError:
    """The first error among ``replies``, as an error of this library."""
    if isinstance(replies[0], StoreError):
        return replies[0]
    try:
        checked(replies)
    except StoreError as exc:
        return exc
    raise AssertionError("unreachable: these were errors")
