"""The transition of each store operation: the semantics of the Lua scripts as pure functions.

A store without scripts reads the keys of the transition, calls its function, and writes the changes
if none of the entries that it read has changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Holder, Kind, Lease, LossReason, Phase, Record, Token
from celery_singleton_lock.core.store import (
    RENEWED,
    Acquire,
    Admit,
    Authorization,
    AuthorizeTick,
    ClaimChange,
    Granted,
    Mark,
    MarkerState,
    Refused,
    Relation,
    Release,
    Renewal,
)
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.transitions.entries import Claim, Entry, Held, LastRun, Marker
from celery_singleton_lock.stores.transitions.transition import Draft, Transition

_RANK: Final = {MarkerState.WAITING: 1, MarkerState.FINISHING: 2, MarkerState.DONE: 3}


def acquire(request: Acquire) -> Transition[Granted | Refused]:
    """Take a free slot, or the slot that the token holds or that is reserved for its attempt."""
    marker = Keyspace.marker(request.slots[0], request.token.attempt)
    claims = (request.claim.key,) if request.claim else ()
    # A claim exists since the message was published. A retry and a message that was put back have
    # left a reservation or a marker.
    is_first = request.claim is None and request.token.retries == 0 and request.sequence == 0
    return Transition(
        (marker, *request.slots, *claims),
        lambda draft: _acquire(draft, request, marker),
        likely_free=request.slots[0] if is_first and len(request.slots) == 1 else "",
    )


def _acquire(draft: Draft, request: Acquire, marker_key: str) -> Granted | Refused:
    refusal = _refusal_by_marker(draft.value(marker_key, Marker), request.sequence)
    if refusal is not None:
        return Refused(relation=refusal)
    free: str | None = None
    for slot in request.slots:
        entry = draft.get(slot)
        if entry is None:
            free = free or slot
            continue
        relation = _relation(entry, request.token)
        if relation is None:
            return _grant(draft, request, slot)
        if relation is not Relation.OTHER:
            return Refused(relation=relation, record=draft.record(slot))
    if free is None:
        return _refused_by_other(draft, request, request.slots[0])
    claim = draft.value(request.claim.key, Claim) if request.claim and request.yields else None
    if request.claim and claim and claim.owner != request.token.task:
        return _refused_by_other(draft, request, request.claim.key)
    return _grant(draft, request, free)


def _refusal_by_marker(marker: Marker | None, sequence: int) -> Relation | None:
    if marker is None:
        return None
    if marker.state is MarkerState.DONE:
        return Relation.DONE
    if marker.state is MarkerState.FINISHING:
        return Relation.TWIN
    return Relation.SUPERSEDED if marker.sequence > sequence else None


def _relation(entry: Entry, token: Token) -> Relation | None:
    """How the delivery ``token`` relates to the entry of a slot; None if it may take the slot."""
    value = entry.value
    # Other values are forged or foreign: claims and markers have keys of their own.
    if not isinstance(value, Held) or value.token.task != token.task:
        return Relation.OTHER
    held = value.token
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


def _grant(draft: Draft, request: Acquire, slot: str) -> Granted:
    fence = None if len(request.slots) == 1 else 0
    lease = Held(Kind.LEASE, request.token, fence, request.holder)
    draft.changes[slot] = Entry(lease, request.ttl, renewed=True)
    if request.claim is not None and not request.keeps_claim:
        task, holder = request.token.task, request.holder
        draft.change_claim(request.claim, task, holder=holder, lease_ttl=request.ttl)
    return Granted(key=slot, fence=None)


def _refused_by_other(draft: Draft, request: Acquire, key: str) -> Refused:
    record = draft.record(key)
    if request.claim is not None and request.frees_claim:
        draft.change_claim(replace(request.claim, phase=None), request.token.task)
    return Refused(relation=Relation.OTHER, record=record)


def renew(leases: Sequence[Lease]) -> Transition[list[Renewal]]:
    """Prolong each lease that its token still holds, and its claim, which is never shortened."""
    keys = dict.fromkeys(key for one in leases for key in (one.key, one.claim_key) if key)
    return Transition(tuple(keys), lambda draft: [_renew(draft, lease) for lease in leases])


def _renew(draft: Draft, lease: Lease) -> Renewal:
    entry = draft.get(lease.key)
    if entry is None:
        return LossReason.GONE
    value = entry.value
    if not isinstance(value, Held) or value.token != lease.token:
        return LossReason.REPLACED
    if value.kind is not Kind.LEASE:
        return LossReason.DYING if value.kind is Kind.DYING else LossReason.REPLACED
    draft.changes[lease.key] = Entry(value, lease.ttl, renewed=True)
    claimed = draft.get(lease.claim_key) if lease.claim_key else None
    is_own = claimed and isinstance(claimed.value, Claim) and claimed.owner == lease.token.task
    if claimed and is_own and claimed.ttl < lease.ttl:
        draft.changes[lease.claim_key] = Entry(claimed.value, lease.ttl, renewed=True)
    return RENEWED


def release(request: Release) -> Transition[Relation]:
    """Delete the keys that the token holds, or change their kind. Keep keys of other tokens."""
    marker = Keyspace.marker(request.keys[0], request.token.attempt)
    claims = (request.claim.key,) if request.claim else ()
    keys = (marker, *request.keys, *claims)
    return Transition(keys, lambda draft: _release(draft, request, marker))


def _release(draft: Draft, request: Release, marker_key: str) -> Relation:
    reply, holder = Relation.NOT_OURS, Holder()
    for key in request.keys:
        value = draft.value(key, Held)
        if value is not None and value.token == request.token:
            reply, holder = Relation.OURS, value.holder
            if value.kind in (Kind.LEASE, Kind.DYING):
                draft.changes[key] = _remainder(value, request)
        elif value is not None and value.token.attempt == request.token.attempt:
            reply = Relation.TWIN
    if request.claim is not None and (
        reply is Relation.OURS or (reply is Relation.NOT_OURS and request.claim.phase is None)
    ):
        draft.change_claim(request.claim, request.token.task, holder=holder)
    if reply is Relation.OURS and request.marker is None:
        return reply  # The marker need not be read: nothing depends on it.
    marker = draft.value(marker_key, Marker)
    done = marker is not None and marker.state is MarkerState.DONE
    is_ours = marker is not None and marker.nonce == request.token.nonce
    if done and not is_ours and reply is not Relation.OURS:
        reply = Relation.DONE
    if request.marker is not None and not done and reply is not Relation.TWIN:
        sequence = marker.sequence if marker else 0
        new = Marker(request.marker, sequence, request.token.nonce)
        draft.changes[marker_key] = Entry(new, request.marker_ttl)
    return reply


def _remainder(value: Held, request: Release) -> Entry | None:
    if request.become is None:
        return None
    new = replace(value, kind=request.become, token=request.next_token or request.token)
    return Entry(new, request.become_ttl)


def mark(request: Mark) -> Transition[None]:
    """Raise the marker of one attempt: neither state nor sequence ever goes back."""
    token, claim, ttl = request.token, request.claim, request.ttl
    marker_key = Keyspace.marker(request.key, token.attempt)

    def decide(draft: Draft) -> None:
        new, until = Marker(request.state, request.sequence, token.nonce), ttl
        entry, old = draft.get(marker_key), draft.value(marker_key, Marker)
        if entry and old:
            is_higher = _RANK[new.state] >= _RANK[old.state]
            until = max(entry.ttl, ttl)
            new = new if is_higher else old
            if new.state is MarkerState.FINISHING:
                until = ttl if is_higher else entry.ttl
            new = replace(new, sequence=max(request.sequence, old.sequence))
        draft.changes[marker_key] = Entry(new, until)
        # A missing claim is not written again: the newer copy of the message may have run and freed
        # it meanwhile.
        if claim and new.state is not MarkerState.DONE and draft.value(claim.key, Claim):
            draft.change_claim(claim, token.task)

    return Transition((marker_key, claim.key) if claim else (marker_key,), decide)


def admit(request: Admit) -> Transition[Record | None]:
    """Claim a key for a message, or return the record of another message's claim."""
    task = request.token.task

    def decide(draft: Draft) -> Record | None:
        entry, claim = draft.get(request.key), draft.value(request.key, Claim)
        if entry and claim and claim.owner == task:
            if entry.ttl < request.ttl:
                draft.changes[request.key] = Entry(claim, request.ttl)
            return None
        if entry is None or (claim and claim.owner == request.instead_of):
            new = Claim(task, Phase.QUEUED, request.holder)
            draft.changes[request.key] = Entry(new, request.ttl)
            return None
        record = draft.record(request.key)
        if record is None:
            raise StoreError(f"{request.key!r} holds something that this version can't read")
        return record

    return Transition((request.key,), decide, likely_free=request.key)


def settle_claim(token: Token, change: ClaimChange) -> Transition[None]:
    """Change a claim without its lease. The claim of a running task is left to the lease."""

    def decide(draft: Draft) -> None:
        claim = draft.value(change.key, Claim)
        if claim and (claim.phase is not Phase.RUNNING or change.phase is Phase.RUNNING):
            draft.change_claim(change, token.task)

    return Transition((change.key,), decide)


def authorize_tick(request: AuthorizeTick) -> Transition[Authorization]:
    """Replace an entry's last run if the leader's token and the expected last run are stored."""

    def decide(draft: Draft) -> Authorization:
        leader, last = draft.value(request.leader, Held), draft.value(request.entry, LastRun)
        if not leader or leader.kind is not Kind.LEASE or leader.token != request.token:
            return Authorization.DEPOSED
        found = last.text if last else None
        if found == request.new:
            return Authorization.AUTHORIZED  # A repeated request, whose first reply was lost.
        if found != request.expected:
            return Authorization.CHANGED
        draft.changes[request.entry] = Entry(LastRun(request.new), request.ttl)
        return Authorization.AUTHORIZED

    return Transition((request.leader, request.entry), decide)


def last_runs(keys: Sequence[str]) -> Transition[list[str | None]]:
    """The last runs that :func:`authorize_tick` has written at ``keys``."""

    def decide(draft: Draft) -> list[str | None]:
        found = [draft.value(key, LastRun) for key in keys]
        return [last.text if last else None for last in found]

    return Transition(tuple(dict.fromkeys(keys)), decide)


def inspect(key: str) -> Transition[Record | None]:
    """The record of one key."""
    return Transition((key,), lambda draft: draft.record(key))


def free(key: str, token: str | None) -> Transition[bool]:
    """For operators: delete a key of any kind, if ``token`` holds it."""

    def decide(draft: Draft) -> bool:
        record = draft.record(key)
        if record is None or (token is not None and record.token != token):
            return False
        draft.changes[key] = None
        return True

    return Transition((key,), decide)


def expire(key: str, owner: str) -> Transition[None]:
    """Delete the lease or claim of ``owner``, whose heartbeat has ended.

    An entry that no longer depends on a heartbeat is kept.
    """

    def decide(draft: Draft) -> None:
        entry = draft.get(key)
        if entry and entry.renewed and entry.owner == owner:
            draft.changes[key] = None

    return Transition((key,), decide)
