"""Steps of the contract's tests. Each creates keys and tokens that no other test uses."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any, TypeAlias

from ...core.clock import SystemClock
from ...core.keyspace import Keyspace
from ...core.lease import Holder, Kind, Lease, Phase, Record, Token
from ...core.store import Store
from ...core.store_requests import (
    Acquire,
    ClaimChange,
    ClaimRequest,
    CompletionState,
    Granted,
    Mark,
    Refused,
    Relation,
    Release,
    ReleaseReply,
    Renewal,
)

#: Seconds to wait for one reply; enough for 600 renewals on a busy machine.
TIMEOUT = 20.0
#: The ttl of a lease that must not expire during a test, in seconds.
LONG = 600.0

#: A key, or slots.
Keys: TypeAlias = str | tuple[str, ...]
KEYSPACE = Keyspace("contract")
#: The holder of claims.
PUBLISHER = Holder(task="app.sync", task_id="m-1", worker="wëb one", pid=8, since=16e8)
LEASE_KINDS = [kind for kind in Kind if kind is not Kind.CLAIM]
HOLDER = Holder(
    task="app.sync",
    task_id="t-1",
    worker="celery@höst one",
    pid=4711,
    since=17e8,
    process="elsewhere65370",
)
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
    """A key that no other test uses."""
    return KEYSPACE.lock("contract", f"{rest}{secrets.token_hex(8)}")


def new_token(
    task_id: str | None = None, *, nesting: int = 0, retries: int = 0, nonce: str = ""
) -> Token:
    """The token of a delivery. Fields that are not given get unique values."""
    return Token(
        task_id or f"task-{secrets.token_hex(4)}", nesting, retries, nonce or secrets.token_hex(4)
    )


def ask(store: Store, key: Keys, token: Token, **options: Any) -> Granted | Refused:
    """Acquire once."""
    slots = (key,) if isinstance(key, str) else key
    request = Acquire(slots=slots, token=token, **{"holder": HOLDER, "ttl": LONG, **options})
    return store.leases.acquire(request, timeout=TIMEOUT)


def lease_of(key: str, token: Token, ttl: float = LONG, claim_key: str = "") -> Lease:
    """The lease that a process with a grant of ``key`` passes to a renewal."""
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


def granted(store: Store, key: Keys, token: Token, **options: Any) -> Granted:
    reply = ask(store, key, token, **options)
    assert isinstance(reply, Granted), reply
    return reply


def take(store: Store, key: str, token: Token | None = None, **options: Any) -> Token:
    token = token or new_token()
    granted(store, key, token, **options)
    return token


def held(store: Store, token: Token | None = None, **options: Any) -> tuple[str, Token]:
    """A new key, and the token that holds it."""
    key = new_key()
    return key, take(store, key, token, **options)


def give(store: Store, key: Keys, token: Token, **options: Any) -> ReleaseReply:
    keys = (key,) if isinstance(key, str) else key
    return store.leases.release(Release(keys=keys, token=token, **options), timeout=TIMEOUT)


def held_as(
    store: Store, kind: Kind, ttl: float = LONG, token: Token | None = None
) -> tuple[str, Token]:
    """A new key of ``kind``, and the token whose lease it was."""
    key, token = held(store, token)
    if kind is not Kind.LEASE:
        become(store, key, token, kind, ttl)
    return key, token


def becoming(kind: Kind | None, token: Token, ttl: float = LONG) -> dict[str, Any]:
    """The options of a release that turns the key into ``kind``."""
    next_token = token.next_attempt() if kind is Kind.RESERVED else None
    return {"become": kind, "become_ttl": ttl, "next_token": next_token}


def become(store: Store, key: str, token: Token, kind: Kind, ttl: float = LONG) -> None:
    assert give(store, key, token, **becoming(kind, token, ttl)) is ReleaseReply.OURS


def renew(store: Store, leases: Sequence[Lease]) -> list[Renewal]:
    return store.leases.renew(leases, timeout=TIMEOUT)


def renew_one(
    store: Store, key: str, token: Token, ttl: float = LONG, claim_key: str = ""
) -> Renewal:
    [reply] = renew(store, [lease_of(key, token, ttl, claim_key)])
    return reply


def mark(
    store: Store, key: str, token: Token, state: CompletionState, sequence: int = 0, **options: Any
) -> None:
    options = {"ttl": LONG, **options}
    request = Mark(key=key, token=token, state=state, sequence=sequence, **options)
    store.leases.mark(request, timeout=TIMEOUT)


def marked(
    store: Store, state: CompletionState, sequence: int = 0, **options: Any
) -> tuple[str, Token]:
    """A new key, and a token whose attempt has a completion record next to it."""
    key, token = new_key(), new_token()
    mark(store, key, token, state, sequence, **options)
    return key, token


def new_claim() -> tuple[str, str]:
    """A new key, and the key of a claim next to it."""
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
    """Create a claim in ``phase``."""
    token = token or new_token()
    assert take_claim(store, claim, token, ttl=ttl) is None
    if phase is not Phase.QUEUED:
        change(store, token, claim, phase, ttl)
    return token


def published(store: Store, token: Token | None = None, **options: Any) -> tuple[str, str, Token]:
    """A new key, the key of a claim next to it, and the token that has the claim."""
    key, claim = new_claim()
    return key, claim, publish(store, claim, token, **options)


def published_and_held(store: Store, **options: Any) -> tuple[str, str, Token]:
    """As :func:`published`; the token holds the key too, without its claim."""
    key, claim, token = published(store, **options)
    return key, claim, take(store, key, token)


def started(store: Store) -> tuple[str, str, Token]:
    """As :func:`published`; the token holds the key too, and its claim runs with the lease."""
    key, claim, token = published(store)
    return key, claim, take(store, key, token, claim=running(claim))


def take_claim(store: Store, claim: str, token: Token, **options: Any) -> Record | None:
    options = {"holder": PUBLISHER, "ttl": LONG, **options}
    return store.claims.take(ClaimRequest(key=claim, token=token, **options), timeout=TIMEOUT)


def not_admitted(store: Store, claim: str, token: Token | None = None, **options: Any) -> Record:
    """The record in the refusal of a claim, by default to a new message."""
    record = take_claim(store, claim, token or new_token(), **options)
    assert record is not None
    return record


def change(store: Store, token: Token, claim: str, phase: Phase | None, ttl: float = LONG) -> None:
    store.claims.change(token, ClaimChange(key=claim, phase=phase, ttl=ttl), timeout=TIMEOUT)


def relation_of(reply: Granted | Refused) -> Relation | None:
    return reply.relation if isinstance(reply, Refused) else None


def record_of(store: Store, key: str) -> Record:
    record = store.leases.inspect(key)
    assert record is not None, f"{key} is free"
    return record


def found(store: Store, key: str) -> tuple[Kind, str, Phase | None, Holder, float]:
    """The record of ``key`` to compare: kind, token, phase, holder, ttl."""
    record = record_of(store, key)
    return record.kind, record.token, record.phase, record.holder, ttl_of(record)


def ttl_of(record: Record) -> float:
    """The original ttl if it was a multiple of LONG, less than a minute ago; else the current."""
    given = math.ceil(record.ttl / LONG) * LONG
    return given if given - record.ttl < 60 else record.ttl


def refused(store: Store, key: Keys, token: Token | None = None, **options: Any) -> Relation:
    """Request a key that is not granted; return the relation."""
    reply = ask(store, key, token or new_token(), **options)
    assert isinstance(reply, Refused), reply
    return reply.relation


def refused_by(
    store: Store,
    key: str,
    token: Token | None = None,
    *,
    relation: Relation = Relation.OTHER,
    **options: Any,
) -> Record:
    """As :func:`refused`, with the relation ``relation``; return the record in the refusal."""
    reply = ask(store, key, token or new_token(), **options)
    assert isinstance(reply, Refused), reply
    assert reply.relation is relation
    assert reply.record is not None
    return reply.record


def fence_of(store: Store, key: str, token: Token) -> int:
    fence = granted(store, key, token).fence
    assert fence is not None
    return fence


def running(claim: str) -> ClaimChange:
    """The change of a claim by a grant if the claim lasts until the task is done."""
    return ClaimChange(key=claim, phase=Phase.RUNNING)


def ending(claim: str) -> dict[str, Any]:
    """The options of an acquire whose refusal by another task frees the claim."""
    return {"claim": running(claim), "frees_claim": True}


def freed(claim: str) -> ClaimChange:
    return ClaimChange(key=claim, phase=None)


def becomes(claim: str, phase: Phase | None, ttl: float = 2 * LONG) -> ClaimChange:
    return ClaimChange(key=claim, phase=phase, ttl=ttl)


def is_claimed(
    store: Store, claim: str, token: Token, phase: Phase = Phase.QUEUED, ttl: float = LONG
) -> bool:
    """Whether the token's task has the claim; by default, as since :func:`publish`."""
    return found(store, claim) == (Kind.CLAIM, token.call_id, phase, PUBLISHER, ttl)


def is_held(store: Store, key: str, token: Token, ttl: float = LONG) -> bool:
    """Whether the token holds the key as since :func:`take`."""
    return found(store, key) == (Kind.LEASE, str(token), None, HOLDER, ttl)


class Part:
    """A part of the contract. A subclass provides the fixture ``store``.

    Attributes:
        SHORT: The shortest ttl, in seconds, that the store supports: for leases that must expire.
        LONGER_THAN_SHORT: Seconds after which such a lease has expired.
    """

    SHORT: float = 0.05
    LONGER_THAN_SHORT: float = 0.1

    def elapse(self, seconds: float) -> None:
        """Let ``seconds`` pass on the store's clock."""
        SystemClock().sleep(seconds)
