"""Leases in Redis or Valkey: a key per lease, a Lua script per operation.

Promises
    Each operation is one EVALSHA, so it happens wholly or not at all. Nothing is retried in here
    but a script that the server had forgotten.

Does not promise
    Exclusion over a failover: an acknowledged write may be lost with the old master. That at least
    ``wait_replicas`` have it makes this less likely, and no more: WAIT neither elects a replica
    that acknowledged nor stops the old master.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Lease, Record, Token
from celery_singleton_lock.core.store import (
    Acquire,
    Admit,
    Capabilities,
    ClaimChange,
    Granted,
    MarkerState,
    Permission,
    Permit,
    Refused,
    Relation,
    Release,
    Released,
    Renewal,
)
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.connections import Connections, ScriptForgotten
from celery_singleton_lock.stores.operators import OPERATOR_TIMEOUT, RedisOperators
from celery_singleton_lock.stores.operators import record_of as _record
from celery_singleton_lock.stores.renewal import chunks_of, renewal_call, renewals_of
from celery_singleton_lock.stores.replicas import Replicas
from celery_singleton_lock.stores.script import Call
from celery_singleton_lock.stores.script import Script as _Script
from celery_singleton_lock.stores.script import milliseconds as _ms
from celery_singleton_lock.stores.shards import Shards
from celery_singleton_lock.stores.transport import Command, Transport

__all__ = ["RENEW", "SETTLE_CLAIM", "RedisStore"]

_ACQUIRE = _Script("claims", "acquire")
RENEW = _Script("renew")
_RELEASE = _Script("claims", "release")
_MARK = _Script("claims", "mark")
_ADMIT = _Script("admit")
SETTLE_CLAIM = _Script("claims", "settle_claim")
_FREE = _Script("free")
_PERMIT = _Script("permit")
_SHARDS = _Script("shards")
_CAPABILITIES: Final = Capabilities(fence=True, name="redis", renews_for_others=True)
# Where a script expects a claim's phase: there is no claim.
_NO_CLAIM: Final = "-"


class RedisStore(RedisOperators):
    """One Redis server at a time, by URL.

    Args:
        url: In a form that ``connect`` reads.
        fence_base: Fences are above it.
        options: For the connection.
        wait_replicas: How many replicas must have a grant before it counts.
        connect: How ``url`` is reached.

    Raises:
        SettingsError: The URL or an option can't be read.
    """

    #: How many shards the keys of a prefix are spread over.
    shards = 1

    def __init__(
        self,
        url: str,
        *,
        fence_base: int = 0,
        options: Mapping[str, Any] | None = None,
        wait_replicas: int = 0,
        connect: Callable[[str, Mapping[str, Any] | None], Transport] = Connections,
    ) -> None:
        self._connections = connect(url, options)
        self._fence_base = fence_base
        self._replicas = Replicas(wait_replicas)
        self._shards = Shards(self.shards, self._write_shards_down)

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def disagreement(self, key: str) -> str:
        """Why apps would not see each other's locks on ``key``'s prefix; empty if they do."""
        return self._shards.disagreement(key, OPERATOR_TIMEOUT)

    def acquire(self, call: Acquire, *, timeout: float) -> Granted | Refused:
        key, token = call.slots[0], call.token
        self._check_shards(key, timeout)
        keys = [Keyspace.fence(key), Keyspace.marker(key, token.attempt), *call.slots]
        arguments = [
            token.task,
            token.nesting,
            token.retries,
            token.nonce,
            _ms(call.ttl),
            call.sequence,
            call.holder.to_json(token.task_id),
            self._fence_base,
            _phase(call.claim),
            int(call.frees_claim),
            int(call.yields),
            int(call.keeps_claim),
        ]
        if call.claim is not None:
            keys.append(call.claim.key)
        wait = self._replicas.wait(timeout)
        reply, *counts = self._pipeline(_ACQUIRE, [(keys, arguments)], timeout, then=wait)
        word, *rest = reply
        if word != b"granted":
            record = _record(rest[0], rest[1], rest[2]) if rest else None
            return Refused(relation=Relation(word.decode()), record=record)
        granted = Granted(key=rest[0].decode(), fence=int(rest[1]) or None)
        too_few = self._replicas.too_few(granted.key, counts)
        if too_few:
            self._take_back(granted.key, token, timeout)
            raise StoreUnavailable(too_few)
        return granted

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[Renewal]:
        chunks = chunks_of(leases)
        replies = self._renewals([[leases[index] for index in chunk] for chunk in chunks], timeout)
        found: dict[int, Renewal] = {}
        for chunk, reply in zip(chunks, replies, strict=True):
            found.update(zip(chunk, reply, strict=True))
        return [found[index] for index in range(len(leases))]

    def release(self, call: Release, *, timeout: float) -> Released:
        token = call.token
        reply = self._run(
            _RELEASE,
            [Keyspace.marker(call.keys[0], token.attempt), *call.keys]
            + ([call.claim.key] if call.claim else []),
            [
                token.attempt,
                token.nonce,
                str(call.become or ""),
                _ms(call.become_ttl),
                str(call.next_token or token),
                str(call.marker or ""),
                _ms(call.marker_ttl),
                _phase(call.claim),
                _ms(call.claim.ttl if call.claim else 0),
            ],
            timeout,
        )
        return Released(reply.decode())

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
        keys = [Keyspace.marker(key, token.attempt)]
        arguments = [str(state), sequence, token.nonce, _ms(ttl)]
        if claim is not None:
            keys.append(claim.key)
            arguments += [token.task, _phase(claim), _ms(claim.ttl)]
        self._run(_MARK, keys, arguments, timeout)

    def admit(self, call: Admit, *, timeout: float) -> Record | None:
        self._check_shards(call.key, timeout)
        holder = call.holder.to_json(call.token.task_id)
        arguments = [call.token.task, _ms(call.ttl), holder, call.instead_of]
        reply = self._run(_ADMIT, [call.key], arguments, timeout)
        if not reply:
            return None
        record = _record(call.key.encode(), *reply)
        if record is None:
            raise StoreError(f"{call.key!r} holds something that this version can't read")
        return record

    def settle_claim(self, token: Token, change: ClaimChange, *, timeout: float) -> None:
        arguments = [token.task, _phase(change), _ms(change.ttl)]
        self._run(SETTLE_CLAIM, [change.key], arguments, timeout)

    def permit(self, call: Permit, *, timeout: float) -> Permission:
        reply = self._run(
            _PERMIT,
            [call.leader, call.entry],
            [str(call.token), call.expected or "", call.new, _ms(call.ttl)],
            timeout,
        )
        return Permission(reply.decode())

    def last_runs(self, keys: Sequence[str], *, timeout: float) -> list[str | None]:
        # Not MGET: whoever may run the scripts may GET, and a pipeline is one round trip too.
        replies = self._connections.run([("GET", key) for key in keys], timeout) if keys else []
        return [reply if reply is None else reply.decode() for reply in replies]

    def free(self, key: str, token: str | None) -> bool:
        keys = [key, Keyspace.fence(key)]
        return bool(self._run(_FREE, keys, [token or ""], OPERATOR_TIMEOUT))

    def close(self) -> None:
        self._connections.close()

    def _run(
        self, script: _Script, keys: Sequence[Any], arguments: Sequence[Any], timeout: float
    ) -> Any:
        return self._pipeline(script, [(keys, arguments)], timeout)[0]

    def _pipeline(
        self,
        script: _Script,
        calls: Sequence[Call],
        timeout: float,
        *,
        then: Sequence[Command] = (),
    ) -> list[Any]:
        """Run ``script`` once per call; a server that forgot the script is taught it again."""
        try:
            return self._connections.run([*script.evalsha(calls), *then], timeout)
        except ScriptForgotten:
            # A restart or SCRIPT FLUSH. None of the commands ran but those before the first error,
            # and every script may run twice. EVAL teaches and runs at once: no other client's flush
            # gets in between, and the login needs no right to SCRIPT.
            if script is _ACQUIRE:
                self._shards.forget()
            return self._connections.run([*script.eval(calls), *then], timeout)

    def _renewals(self, chunks: Sequence[Sequence[Lease]], timeout: float) -> list[list[Renewal]]:
        """Renew the leases of each chunk, all in one shard, and their claims with them."""
        replies = self._pipeline(RENEW, [renewal_call(chunk) for chunk in chunks], timeout)
        return [renewals_of(chunk, reply) for chunk, reply in zip(chunks, replies, strict=True)]

    def _check_shards(self, key: str, timeout: float) -> None:
        problem = self._shards.disagreement(key, timeout)
        if problem:
            raise StoreError(problem)

    def _write_shards_down(self, note: str, number: int, timeout: float) -> int:
        return int(self._run(_SHARDS, [note], [number], timeout))

    def _take_back(self, key: str, token: Token, timeout: float) -> None:
        try:
            self.release(Release(keys=(key,), token=token), timeout=timeout)
        except StoreError:
            pass  # the ttl frees it; what matters is that nobody runs under it


def _phase(claim: ClaimChange | None) -> str:
    return _NO_CLAIM if claim is None else str(claim.phase or "")
