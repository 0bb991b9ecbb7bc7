"""The calls that the contract's tests make, with keys and tokens that no other test has."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Holder, Kind, Lease, Phase, Record, Token
from celery_singleton_lock.core.store import (
    Acquire,
    Admit,
    ClaimChange,
    Granted,
    MarkerState,
    Refused,
    Relation,
    Release,
    Renewal,
    Store,
)

__all__ = [
    "HOLDER",
    "KEYSPACE",
    "LEASE_KINDS",
    "LONG",
    "ODD_TASK_IDS",
    "PUBLISHER",
    "TIMEOUT",
    "Part",
    "admit",
    "ask",
    "become",
    "becomes",
    "fence_of",
    "freed",
    "give",
    "is_as_published",
    "lease_of",
    "mark",
    "new_claim",
    "new_key",
    "new_token",
    "publish",
    "record_of",
    "relation_of",
    "renew",
    "running",
    "settle",
    "take",
]

#: Seconds to wait for one reply, also of 600 renewals on a machine that is busy with other things.
TIMEOUT = 20.0
#: Seconds that no test lasts: a lease that stands.
LONG = 600.0

KEYSPACE = Keyspace("contract")
#: Of a claim.
PUBLISHER = Holder(task="app.sync", task_id="m-1", worker="wëb one", pid=8, since=16e8)
LEASE_KINDS = [kind for kind in Kind if kind is not Kind.CLAIM]
HOLDER = Holder(task="app.sync", task_id="t-1", worker="celery@höst one", pid=4711, since=17e8)
ODD_TASK_IDS = (
    "with some blanks",
    "a|b|0.0|c",
    "a+b",
    "line\nbreak\ttab",
    "ünïcode → 日本",
    "100%25[a-z]*.+-^$",
    "-",
    "i" * 1024,
)


def new_key(rest: str = "") -> str:
    """A key that no other test has."""
    return KEYSPACE.lock("contract", f"{rest}{secrets.token_hex(8)}")


def new_token(
    task_id: str | None = None, *, nesting: int = 0, retries: int = 0, nonce: str = ""
) -> Token:
    """The token of a delivery that no other test has, but for what is given."""
    return Token(
        task_id or f"task-{secrets.token_hex(4)}", nesting, retries, nonce or secrets.token_hex(4)
    )


def ask(
    store: Store,
    key: str | tuple[str, ...],
    token: Token,
    *,
    ttl: float = LONG,
    sequence: int = 0,
    holder: Holder = HOLDER,
    **claim: Any,
) -> Granted | Refused:
    """Acquire once."""
    slots = (key,) if isinstance(key, str) else key
    call = Acquire(slots=slots, token=token, holder=holder, ttl=ttl, sequence=sequence, **claim)
    return store.acquire(call, timeout=TIMEOUT)


def lease_of(key: str, token: Token, ttl: float = LONG, claim_key: str = "") -> Lease:
    """What a process that was granted ``key`` renews."""
    clock = SystemClock()
    return Lease(
        key=key,
        token=token,
        ttl=ttl,
        holder=HOLDER,
        valid_until=clock.now() + ttl,
        acquired_at=clock.now(),
        clock=clock,
        claim_key=claim_key,
    )


def take(
    store: Store, key: str, token: Token | None = None, *, ttl: float = LONG, **claim: Any
) -> Token:
    token = token or new_token()
    reply = ask(store, key, token, ttl=ttl, **claim)
    assert isinstance(reply, Granted), reply
    return token


def give(store: Store, key: str | tuple[str, ...], token: Token, **options: Any) -> Relation:
    keys = (key,) if isinstance(key, str) else key
    return store.release(Release(keys=keys, token=token, **options), timeout=TIMEOUT)


def become(store: Store, key: str, token: Token, kind: Kind, ttl: float = LONG) -> None:
    next_token = token.next_attempt() if kind is Kind.RESERVED else None
    reply = give(store, key, token, become=kind, become_ttl=ttl, next_token=next_token)
    assert reply is Relation.OURS


def renew(store: Store, leases: Sequence[Lease]) -> list[Renewal]:
    return store.renew(leases, timeout=TIMEOUT)


def mark(
    store: Store,
    key: str,
    token: Token,
    state: MarkerState,
    sequence: int = 0,
    ttl: float = LONG,
    **claim: Any,
) -> None:
    store.mark(key, token, state, sequence, ttl, timeout=TIMEOUT, **claim)


def new_claim() -> tuple[str, str]:
    """A key that no other test has, and that of a claim beside it."""
    key = new_key()
    return key, Keyspace.claim("app.sync", key)


def publish(
    store: Store,
    claim: str,
    token: Token | None = None,
    *,
    ttl: float = LONG,
    phase: Phase = Phase.QUEUED,
) -> Token:
    """A claim that has come to ``phase``."""
    token = token or new_token()
    assert admit(store, claim, token, ttl=ttl) is None
    if phase is not Phase.QUEUED:
        settle(store, token, claim, phase, ttl)
    return token


def admit(
    store: Store,
    claim: str,
    token: Token,
    *,
    ttl: float = LONG,
    holder: Holder = PUBLISHER,
    instead_of: str = "",
    tells_ttl: bool = True,
) -> Record | None:
    call = Admit(
        key=claim,
        token=token,
        holder=holder,
        ttl=ttl,
        instead_of=instead_of,
        tells_ttl=tells_ttl,
    )
    return store.admit(call, timeout=TIMEOUT)


def settle(store: Store, token: Token, claim: str, phase: Phase | None, ttl: float = LONG) -> None:
    store.settle_claim(token, ClaimChange(key=claim, phase=phase, ttl=ttl), timeout=TIMEOUT)


def relation_of(reply: Granted | Refused) -> Relation | None:
    return reply.relation if isinstance(reply, Refused) else None


def record_of(store: Store, key: str) -> Record:
    record = store.inspect(key)
    assert record is not None, f"{key} is free"
    return record


def fence_of(store: Store, key: str, token: Token) -> int:
    reply = ask(store, key, token)
    assert isinstance(reply, Granted), reply
    assert reply.fence is not None
    return reply.fence


def running(claim: str) -> ClaimChange:
    """What a grant makes of a claim that stays until the task is done."""
    return ClaimChange(key=claim, phase=Phase.RUNNING)


def freed(claim: str) -> ClaimChange:
    return ClaimChange(key=claim, phase=None)


def becomes(claim: str, phase: Phase | None, ttl: float = 2 * LONG) -> ClaimChange:
    return ClaimChange(key=claim, phase=phase, ttl=ttl)


def is_as_published(store: Store, claim: str, token: Token, phase: Phase = Phase.QUEUED) -> bool:
    """Whether nothing has touched the claim since :func:`publish`."""
    record = record_of(store, claim)
    unchanged = (record.kind, record.token, record.phase) == (Kind.CLAIM, token.task, phase)
    return unchanged and record.holder == PUBLISHER and LONG - 60 < record.ttl <= LONG


class Part:
    """A part of the contract: tests that a subclass runs on its fixture ``store``.

    Attributes:
        SHORT: Seconds of a lease that shall expire: the shortest ttl that the store keeps.
        LONGER_THAN_SHORT: Seconds after which it has, at the store's own granularity.
    """

    SHORT: float = 0.05
    LONGER_THAN_SHORT: float = 0.1

    def elapse(self, seconds: float) -> None:
        """Let ``seconds`` pass on the store's clock."""
        SystemClock().sleep(seconds)
