"""Leases in this process's memory: for eager tasks, for users' own tests, and as the reference that
the contract holds the other stores to.
"""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Holder, Kind, Lease, Record, Token
from celery_singleton_lock.core.store import (
    Acquire,
    Capabilities,
    Granted,
    MarkerState,
    Refused,
    Relation,
    Release,
    Released,
    Renewal,
)

__all__ = ["MemoryStore"]

_RANK = {MarkerState.WAITING: 1, MarkerState.FINISHING: 2, MarkerState.DONE: 3}


@dataclass(frozen=True, slots=True)
class _Value:
    kind: Kind
    token: Token
    fence: int
    holder: Holder
    expires_at: float


@dataclass(frozen=True, slots=True)
class _Marker:
    state: MarkerState
    sequence: int
    nonce: str
    expires_at: float


class MemoryStore:
    """The semantics of the Lua scripts, in Python, under one lock. ``timeout`` is ignored."""

    def __init__(self, clock: Clock, *, fence_base: int = 0) -> None:
        self._clock = clock
        self._fence = fence_base
        self._values: dict[str, _Value] = {}
        self._markers: dict[str, _Marker] = {}
        self._guard = threading.RLock()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(fence=True, name="memory")

    def acquire(self, call: Acquire, *, timeout: float = 0) -> Granted | Refused:
        with self._guard:
            marker = self._marker(call.slots[0], call.token)
            if marker is not None:
                if marker.state is MarkerState.DONE:
                    return Refused(relation=Relation.DONE)
                if marker.state is MarkerState.FINISHING:
                    return Refused(relation=Relation.TWIN)
                if marker.sequence > call.sequence:
                    return Refused(relation=Relation.SUPERSEDED)
            chosen: str | None = None
            taken: str | None = None
            for slot in call.slots:
                value = self._value(slot)
                if value is None:
                    chosen = chosen or slot
                    continue
                taken = taken or slot
                relation = _relation(value, call.token)
                if relation is None:
                    chosen = slot
                    break
                if relation is not Relation.OTHER:
                    return Refused(relation=relation, record=self._record(slot))
            if chosen is None:
                assert taken is not None
                return Refused(relation=Relation.OTHER, record=self._record(taken))
            fence = self._next_fence() if len(call.slots) == 1 else 0
            self._values[chosen] = _Value(
                Kind.LEASE, call.token, fence, call.holder, self._clock.now() + call.ttl
            )
            return Granted(key=chosen, fence=fence or None)

    def renew(self, leases: Sequence[Lease], *, timeout: float = 0) -> list[Renewal]:
        with self._guard:
            return [self._renew(lease) for lease in leases]

    def _renew(self, lease: Lease) -> Renewal:
        value = self._value(lease.key)
        if value is None:
            return Renewal.EXPIRED
        if value.token != lease.token or value.kind not in (Kind.LEASE, Kind.DYING):
            return Renewal.REPLACED
        if value.kind is Kind.DYING:
            return Renewal.DYING
        self._values[lease.key] = replace(value, expires_at=self._clock.now() + lease.ttl)
        return Renewal.RENEWED

    def release(self, call: Release, *, timeout: float = 0) -> Released:
        with self._guard:
            reply = Released.NOT_OURS
            for key in call.keys:
                value = self._value(key)
                if value is None:
                    continue
                if value.token == call.token:
                    reply = Released.RELEASED
                    if value.kind in (Kind.LEASE, Kind.DYING):
                        self._give_back(key, value, call)
                elif value.token.attempt == call.token.attempt:
                    reply = Released.TWIN
            marker = self._marker(call.keys[0], call.token)
            done = marker is not None and marker.state is MarkerState.DONE
            if (
                marker is not None
                and done
                and marker.nonce != call.token.nonce
                and reply is not Released.RELEASED
            ):
                reply = Released.DONE
            if call.marker is not None and not done and reply is not Released.TWIN:
                self._markers[Keyspace.marker(call.keys[0], call.token.attempt)] = _Marker(
                    call.marker,
                    marker.sequence if marker else 0,
                    call.token.nonce,
                    self._clock.now() + call.marker_ttl,
                )
            return reply

    def _give_back(self, key: str, value: _Value, call: Release) -> None:
        if call.become is None:
            del self._values[key]
            return
        self._values[key] = replace(
            value,
            kind=call.become,
            token=call.next_token or call.token,
            expires_at=self._clock.now() + call.become_ttl,
        )

    def mark(
        self,
        key: str,
        token: Token,
        state: MarkerState,
        sequence: int,
        ttl: float,
        *,
        timeout: float = 0,
    ) -> None:
        with self._guard:
            old = self._marker(key, token)
            until = self._clock.now() + ttl
            new = _Marker(state, sequence, token.nonce, until)
            if old is not None:
                higher = new if _RANK[state] >= _RANK[old.state] else old
                until = max(old.expires_at, until)
                if higher.state is MarkerState.FINISHING:
                    until = higher.expires_at
                new = _Marker(higher.state, max(sequence, old.sequence), higher.nonce, until)
            self._markers[Keyspace.marker(key, token.attempt)] = new

    def inspect(self, key: str) -> Record | None:
        with self._guard:
            return self._record(key) if self._value(key) is not None else None

    def scan(self, pattern: str) -> Iterator[Record]:
        with self._guard:
            keys = [key for key in self._values if fnmatch.fnmatchcase(key, pattern)]
            records = [self._record(key) for key in keys if self._value(key) is not None]
        return iter(records)

    def free(self, key: str, token: str | None) -> bool:
        with self._guard:
            value = self._value(key)
            if value is None or (token is not None and str(value.token) != token):
                return False
            self._next_fence()
            del self._values[key]
            return True

    def close(self) -> None:
        """Nothing to close."""

    def _value(self, key: str) -> _Value | None:
        value = self._values.get(key)
        if value is not None and self._clock.now() >= value.expires_at:
            del self._values[key]
            return None
        return value

    def _marker(self, key: str, token: Token) -> _Marker | None:
        name = Keyspace.marker(key, token.attempt)
        marker = self._markers.get(name)
        if marker is not None and self._clock.now() >= marker.expires_at:
            del self._markers[name]
            return None
        return marker

    def _record(self, key: str) -> Record:
        value = self._values[key]
        return Record(
            key=key,
            kind=value.kind,
            token=str(value.token),
            fence=value.fence or None,
            holder=value.holder,
            ttl=value.expires_at - self._clock.now(),
        )

    def _next_fence(self) -> int:
        self._fence = max(int(self._clock.wall() * 1e6), self._fence + 1)
        return self._fence


def _relation(value: _Value, token: Token) -> Relation | None:
    """How the delivery ``token`` relates to the key's value; None if the key is its own."""
    held = value.token
    if held.task != token.task:
        return Relation.OTHER
    held_ordinal, ordinal = (held.nesting, held.retries), (token.nesting, token.retries)
    if held_ordinal > ordinal:
        return Relation.LATER
    if value.kind is Kind.COOLING:
        return Relation.OTHER
    if held_ordinal < ordinal:
        return Relation.EARLIER
    if value.kind is Kind.RESERVED or (value.kind is Kind.LEASE and held.nonce == token.nonce):
        return None
    return Relation.TWIN
