"""Leases in a Redis Cluster: the keys of a prefix in 256 shards, each of which is one slot's.

Promises
    A lease, its fence counter, its marker and its claim are in one shard, so every operation is
    one script on one node, as on a single server. A renewal is one pipeline per node, and a node
    that is away takes no leases with it but those it has.

Does not promise
    Exclusion over a failover: replication is asynchronous here, too. Nor one script for a claim
    whose publisher knew the key by another name: that one is settled by a call of its own, before
    or after the lease's, and left to its ttl if that fails.
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
    MarkerState,
    OnReply,
    Refused,
    Relation,
    Release,
    Renewal,
)
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.redis.inspect import record_of
from celery_singleton_lock.stores.redis.nodes import NodeConnections
from celery_singleton_lock.stores.redis.renewal import (
    RENEW,
    by_shard,
    chunks_of,
    renewal_call,
    renewals_of,
)
from celery_singleton_lock.stores.redis.replies import checked
from celery_singleton_lock.stores.redis.scripts import Script, milliseconds
from celery_singleton_lock.stores.redis.store import SETTLE_CLAIM, RedisStore

__all__ = ["ClusterStore"]

logger = logging.getLogger("celery_singleton_lock")

_PROLONG = Script("claims", "prolong")


class ClusterStore(RedisStore):
    """One Redis Cluster, by the URL of some of its nodes; arguments as of RedisStore."""

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
        # All nodes are asked at once, and so all leases: a silent node delays no other node's.
        return replace(super().capabilities, name="redis cluster", renewal_batch=None)

    def acquire(self, call: Acquire, *, timeout: float) -> Granted | Refused:
        claim = _stray(call.slots[0], call.claim)
        if claim is None:
            return super().acquire(call, timeout=timeout)
        if call.yields:
            claimed = self._read(claim.key, timeout)
            anothers = claimed and claimed.kind is Kind.CLAIM and claimed.token != call.token.task
            if anothers and not self._holds(call, timeout):
                return Refused(relation=Relation.OTHER, record=claimed)
        alone = replace(call, claim=None, frees_claim=False, yields=False)
        reply = super().acquire(alone, timeout=timeout)
        if isinstance(reply, Granted):
            self._settle_stray(call.token, claim, timeout)
        elif call.frees_claim and reply.relation is Relation.OTHER:
            self._settle_stray(call.token, replace(claim, phase=None), timeout)
        return reply

    def release(self, call: Release, *, timeout: float) -> Relation:
        claim = _stray(call.keys[0], call.claim)
        if claim is None:
            return super().release(call, timeout=timeout)
        reply = super().release(replace(call, claim=None), timeout=timeout)
        if reply is Relation.OURS or (reply is Relation.NOT_OURS and claim.phase is None):
            self._settle_stray(call.token, claim, timeout)
        return reply

    def release_async(
        self,
        call: Release,
        *,
        timeout: float,
        on_reply: OnReply,
    ) -> bool:
        if _stray(call.keys[0], call.claim) is not None:
            return False  # what becomes of that claim depends on the reply
        return super().release_async(call, timeout=timeout, on_reply=on_reply)

    def mark(
        self,
        key: str,
        token: Token,
        state: MarkerState,
        sequence: int,
        ttl: float,
        *,
        timeout: float,
        claim: ClaimChange | None = None,
    ) -> None:
        stray = _stray(key, claim)
        if stray is not None:
            claim = None
        super().mark(key, token, state, sequence, ttl, timeout=timeout, claim=claim)
        if stray is not None:
            self._settle_stray(token, stray, timeout)

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[Renewal]:
        shards = by_shard(leases)
        chunks = [
            chunk for shard in shards for chunk in chunks_of([leases[index] for index in shard])
        ]
        found = chain.from_iterable(self._renewals(chunks, timeout))
        order = dict(zip(chain.from_iterable(shards), found, strict=True))
        replies = [order[index] for index in range(len(leases))]
        calls = [
            ((lease.claim_key,), (lease.token.task, milliseconds(lease.ttl)))
            for lease, reply in zip(leases, replies, strict=True)
            if reply is RENEWED
            and lease.claim_key
            and not Keyspace.same_shard(lease.key, lease.claim_key)
        ]
        if calls:
            self._attempt(_PROLONG, calls, timeout)  # what fails is left to its ttl
        return replies

    def _renewals(self, chunks: Sequence[Sequence[Lease]], timeout: float) -> list[list[Renewal]]:
        calls = [renewal_call(chunk) for chunk in chunks]
        found: list[list[Renewal] | None] = []
        for chunk, reply in zip(
            chunks, replies := self._attempt(RENEW, calls, timeout), strict=True
        ):
            if isinstance(reply, redis.exceptions.TryAgainError):
                found.append(self._renew_apart(chunk, timeout))
            else:
                failed = isinstance(reply, Exception)
                found.append(None if failed else renewals_of(chunk, reply))
        if replies and not any(found):
            raise _refusal(replies)
        return [
            reply or [LossReason.UNREACHABLE] * len(chunk)
            for chunk, reply in zip(chunks, found, strict=True)
        ]

    def _renew_apart(self, chunk: Sequence[Lease], timeout: float) -> list[Renewal] | None:
        """While a slot moves, its keys are on two nodes; each key alone is on one."""
        calls = [renewal_call([lease], claims=False) for lease in chunk]
        replies = self._attempt(RENEW, calls, timeout)
        if all(isinstance(reply, Exception) for reply in replies):
            return None
        return [
            LossReason.UNREACHABLE
            if isinstance(reply, Exception)
            else renewals_of([lease], reply)[0]
            for lease, reply in zip(chunk, replies, strict=True)
        ]

    def _attempt(self, script: Script, calls: Sequence[Any], timeout: float) -> list[Any]:
        """The reply to each call, or the error in its place."""
        replies = self._nodes.attempt([*map(script.evalsha, calls)], timeout, waits=False)
        forgotten = [
            index
            for index, reply in enumerate(replies)
            if isinstance(reply, redis.exceptions.NoScriptError)
        ]
        if forgotten:
            taught = [script.eval(calls[index]) for index in forgotten]
            again = self._nodes.attempt(taught, timeout, waits=False)
            for index, reply in zip(forgotten, again, strict=True):
                replies[index] = reply
        return replies

    def _holds(self, call: Acquire, timeout: float) -> bool:
        """Whether the grant is its own already, and only its reply was lost."""
        records = [self._read(slot, timeout) for slot in call.slots]
        return any(record is not None and record.token == str(call.token) for record in records)

    def _read(self, key: str, timeout: float) -> Record | None:
        value, ttl_ms = self._nodes.run([("GET", key), ("PTTL", key)], timeout)
        return None if value is None else record_of(key.encode(), value, ttl_ms)

    def _settle_stray(self, token: Token, change: ClaimChange, timeout: float) -> None:
        arguments = [token.task, str(change.phase or ""), milliseconds(change.ttl), "y"]
        try:
            self._run(SETTLE_CLAIM, [change.key], arguments, timeout)
        except StoreError as exc:
            # The lease is what excludes; an unsettled claim holds back calls until it expires.
            logger.warning("singleton: %s stays until it expires: %s", change.key, exc)


def _stray(key: str, claim: ClaimChange | None) -> ClaimChange | None:
    """``claim`` if it is in another shard than ``key``."""
    return claim if claim is not None and not Keyspace.same_shard(key, claim.key) else None


def _refusal(replies: list[Any]) -> StoreError:
    """The first error, as the library's own."""
    if isinstance(replies[0], StoreError):
        return replies[0]
    try:
        checked(replies)
    except StoreError as exc:
        return exc
    raise AssertionError("unreachable: these were errors")
