"""What every operation does to its keys: the semantics of the Lua scripts, as pure functions.

A rule names the keys that it reads, and decides from what stands in them: the reply, and what shall
stand there afterwards. A store without scripts reads the keys, lets the rule decide, and writes the
changes if nothing that was read has changed meanwhile. Time is not read here: an entry has the
seconds that are left to it, and gets seconds from now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Holder, Kind, Lease, Phase, Record, Token
from celery_singleton_lock.core.store import (
    Acquire,
    Admit,
    Authorization,
    AuthorizeTick,
    ClaimChange,
    Granted,
    MarkerState,
    Refused,
    Relation,
    Release,
    Released,
    Renewal,
)
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.transitions.entries import Claim, Entry, Held, LastRun, Marker
from celery_singleton_lock.stores.transitions.transition import Draft, Rule

__all__ = [
    "acquire",
    "admit",
    "authorize_tick",
    "expire",
    "free",
    "inspect",
    "last_runs",
    "mark",
    "release",
    "renew",
    "renew_all",
    "settle_claim",
]

_RANK: Final = {MarkerState.WAITING: 1, MarkerState.FINISHING: 2, MarkerState.DONE: 3}


def acquire(call: Acquire) -> Rule[Granted | Refused]:
    """Take a free slot, or the one that is one's own already or reserved for one."""
    marker = Keyspace.marker(call.slots[0], call.token.attempt)
    claims = (call.claim.key,) if call.claim else ()
    # A claim was made when the message was published, and an attempt that isn't the first, or was
    # put back, has left a marker or a reservation.
    is_first = call.claim is None and call.token.retries == 0 and call.sequence == 0
    return Rule(
        (marker, *call.slots, *claims),
        lambda draft: _acquire(draft, call, marker),
        likely_free=call.slots[0] if is_first and len(call.slots) == 1 else "",
    )


def _acquire(draft: Draft, call: Acquire, marker_key: str) -> Granted | Refused:
    marked = _refusal_by_marker(draft.marker(marker_key), call.sequence)
    if marked is not None:
        return Refused(relation=marked)
    chosen, is_own, refusal = _choose(draft, call)
    if refusal is not None:
        return refusal
    if chosen is None:
        taken = next(slot for slot in call.slots if draft.get(slot) is not None)
        return _refused_by_other(draft, call, taken)
    if call.claim is not None and call.yields and not is_own:
        claim = draft.claim(call.claim.key)
        if claim is not None and claim.task != call.token.task:
            return _refused_by_other(draft, call, call.claim.key)
    fence = None if len(call.slots) == 1 else 0
    lease = Held(Kind.LEASE, call.token, fence, call.holder)
    draft.put(chosen, Entry(lease, call.ttl, kept=True))
    if call.claim is not None and not call.keeps_claim:
        draft.change_claim(call.claim, call.token.task, call.ttl, call.holder, kept=True)
    return Granted(key=chosen, fence=None)


def _refusal_by_marker(marker: Marker | None, sequence: int) -> Relation | None:
    if marker is None:
        return None
    if marker.state is MarkerState.DONE:
        return Relation.DONE
    if marker.state is MarkerState.FINISHING:
        return Relation.TWIN
    return Relation.SUPERSEDED if marker.sequence > sequence else None


def _choose(draft: Draft, call: Acquire) -> tuple[str | None, bool, Refused | None]:
    """The slot to take and whether it is one's own; or the refusal by one's own task."""
    chosen: str | None = None
    for slot in call.slots:
        entry = draft.get(slot)
        if entry is None:
            chosen = chosen or slot
            continue
        relation = _relation(entry, call.token)
        if relation is None:
            return slot, True, None
        if relation is not Relation.OTHER:
            return None, False, Refused(relation=relation, record=draft.record(slot))
    return chosen, False, None


def _relation(entry: Entry, token: Token) -> Relation | None:
    """How the delivery ``token`` relates to the key's value; None if the key is its own."""
    value = entry.value
    if not isinstance(value, Held):
        return Relation.OTHER  # a forged or foreign key: claims and markers have keys of their own
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


def _refused_by_other(draft: Draft, call: Acquire, key: str) -> Refused:
    record = draft.record(key)
    if call.claim is not None and call.frees_claim:
        draft.change_claim(ClaimChange(key=call.claim.key, phase=None), call.token.task)
    return Refused(relation=Relation.OTHER, record=record)


def renew(lease: Lease) -> Rule[Renewal]:
    """Prolong a lease whose token still stands, and its claim with it, which is never shortened.

    Not the claim of a lease that was given back meanwhile: that has a ttl of its own.
    """
    keys = (lease.key, lease.claim_key) if lease.claim_key else (lease.key,)
    return Rule(keys, lambda draft: _renew(draft, lease))


def renew_all(leases: Sequence[Lease]) -> Rule[list[Renewal]]:
    """:func:`renew` of each, in the order given."""
    keys = dict.fromkeys(key for lease in leases for key in renew(lease).keys)
    return Rule(tuple(keys), lambda draft: [_renew(draft, lease) for lease in leases])


def _renew(draft: Draft, lease: Lease) -> Renewal:
    entry = draft.get(lease.key)
    if entry is None:
        return Renewal.GONE
    value = entry.value
    if not isinstance(value, Held) or value.token != lease.token:
        return Renewal.REPLACED
    if value.kind is Kind.DYING:
        return Renewal.DYING
    if value.kind is not Kind.LEASE:
        return Renewal.REPLACED
    draft.put(lease.key, Entry(value, lease.ttl, kept=True))
    claimed = draft.get(lease.claim_key) if lease.claim_key else None
    claim = draft.claim(lease.claim_key)
    if claimed and claim and claim.task == lease.token.task and claimed.ttl < lease.ttl:
        draft.put(lease.claim_key, Entry(claim, lease.ttl, kept=True))
    return Renewal.RENEWED


def release(call: Release) -> Rule[Released]:
    """Give back what the token holds, or turn it into another kind; never touch another's key."""
    marker = Keyspace.marker(call.keys[0], call.token.attempt)
    claims = (call.claim.key,) if call.claim else ()
    return Rule((marker, *call.keys, *claims), lambda draft: _release(draft, call, marker))


def _release(draft: Draft, call: Release, marker_key: str) -> Released:
    reply, holder = _give_back_all(draft, call)
    if call.claim is not None and (
        reply is Released.RELEASED or (reply is Released.NOT_OURS and call.claim.phase is None)
    ):
        draft.change_claim(call.claim, call.token.task, call.claim.ttl, holder)
    if reply is Released.RELEASED and call.marker is None:
        return reply  # whatever the marker says, so nobody needs to look
    marker = draft.marker(marker_key)
    done = marker is not None and marker.state is MarkerState.DONE
    is_ours = marker is not None and marker.nonce == call.token.nonce
    if done and not is_ours and reply is not Released.RELEASED:
        reply = Released.DONE
    if call.marker is not None and not done and reply is not Released.TWIN:
        sequence = marker.sequence if marker else 0
        new = Marker(call.marker, sequence, call.token.nonce)
        draft.put(marker_key, Entry(new, call.marker_ttl))
    return reply


def _give_back_all(draft: Draft, call: Release) -> tuple[Released, Holder]:
    reply, holder = Released.NOT_OURS, Holder()
    for key in call.keys:
        entry = draft.get(key)
        if entry is None or not isinstance(entry.value, Held):
            continue
        value = entry.value
        if value.token == call.token:
            reply, holder = Released.RELEASED, value.holder
            if value.kind in (Kind.LEASE, Kind.DYING):
                _give_back(draft, key, value, call)
        elif value.token.attempt == call.token.attempt:
            reply = Released.TWIN
    return reply, holder


def _give_back(draft: Draft, key: str, value: Held, call: Release) -> None:
    if call.become is None:
        draft.delete(key)
        return
    new = replace(value, kind=call.become, token=call.next_token or call.token)
    draft.put(key, Entry(new, call.become_ttl))


def mark(
    key: str,
    token: Token,
    state: MarkerState,
    sequence: int,
    ttl: float,
    claim: ClaimChange | None,
) -> Rule[None]:
    """Raise the marker of one attempt; neither its state nor its sequence ever goes back."""
    marker_key = Keyspace.marker(key, token.attempt)

    def decide(draft: Draft) -> None:
        new, until = Marker(state, sequence, token.nonce), ttl
        entry = draft.get(marker_key)
        if entry is not None and isinstance(entry.value, Marker):
            old = entry.value
            is_higher = _RANK[state] >= _RANK[old.state]
            kept = new if is_higher else old
            until = max(entry.ttl, ttl)
            if kept.state is MarkerState.FINISHING:
                until = ttl if is_higher else entry.ttl
            new = Marker(kept.state, max(sequence, old.sequence), kept.nonce)
        draft.put(marker_key, Entry(new, until))
        # Never made anew: the copy may have run, and freed it, by now.
        known = claim is not None and draft.claim(claim.key) is not None
        if claim is not None and known and new.state is not MarkerState.DONE:
            draft.change_claim(claim, token.task, claim.ttl)

    return Rule((marker_key, claim.key) if claim else (marker_key,), decide)


def admit(call: Admit) -> Rule[Record | None]:
    """Claim a key for a message that is about to be published, or say which message has it."""
    task = call.token.task

    def decide(draft: Draft) -> Record | None:
        entry, claim = draft.get(call.key), draft.claim(call.key)
        if entry is not None and claim is not None and claim.task == task:
            if entry.ttl < call.ttl:
                draft.put(call.key, Entry(claim, call.ttl))
            return None
        if entry is None or (claim is not None and claim.task == call.instead_of):
            draft.put(call.key, Entry(Claim(task, Phase.QUEUED, call.holder), call.ttl))
            return None
        record = draft.record(call.key)
        if record is None:
            raise StoreError(f"{call.key!r} holds something that this version can't read")
        return record

    return Rule((call.key,), decide, likely_free=call.key)


def settle_claim(token: Token, change: ClaimChange) -> Rule[None]:
    """Change a claim where no lease is at hand; a running task's is left to its lease."""

    def decide(draft: Draft) -> None:
        claim = draft.claim(change.key)
        if claim is None:
            return
        if claim.phase is not Phase.RUNNING or change.phase is Phase.RUNNING:
            draft.change_claim(change, token.task, change.ttl)

    return Rule((change.key,), decide)


def authorize_tick(call: AuthorizeTick) -> Rule[Authorization]:
    """Let the leader send one entry: if its token still stands, swap that entry's last run."""

    def decide(draft: Draft) -> Authorization:
        leading = draft.get(call.leader)
        value = leading.value if leading else None
        if not isinstance(value, Held) or value.kind is not Kind.LEASE or value.token != call.token:
            return Authorization.DEPOSED
        last = draft.last_run(call.entry)
        if last == call.new:
            return Authorization.AUTHORIZED  # sent again: the first reply was lost
        if last != call.expected:
            return Authorization.CHANGED
        draft.put(call.entry, Entry(LastRun(call.new), call.ttl))
        return Authorization.AUTHORIZED

    return Rule((call.leader, call.entry), decide)


def last_runs(keys: Sequence[str]) -> Rule[list[str | None]]:
    """What :func:`authorize_tick` put at each of ``keys``."""
    return Rule(tuple(dict.fromkeys(keys)), lambda draft: [draft.last_run(key) for key in keys])


def inspect(key: str) -> Rule[Record | None]:
    """The record of one key."""
    return Rule((key,), lambda draft: draft.record(key))


def free(key: str, token: str | None) -> Rule[bool]:
    """For operators: delete a key of any kind, if ``token`` stands."""

    def decide(draft: Draft) -> bool:
        record = draft.record(key)
        if record is None or (token is not None and record.token != token):
            return False
        draft.delete(key)
        return True

    return Rule((key,), decide)


def expire(key: str, name: str) -> Rule[None]:
    """Delete what lived with a heartbeat that has ended: a lease's (its token) or a claim's (its
    task), if ``name`` still has it and no other kind has come of it.
    """

    def decide(draft: Draft) -> None:
        entry = draft.get(key)
        if entry is None or not entry.kept:
            return
        record = draft.record(key)
        if record is not None and record.token == name:
            draft.delete(key)

    return Rule((key,), decide)
