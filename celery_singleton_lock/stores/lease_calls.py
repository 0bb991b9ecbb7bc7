"""What one acquire and one release send: KEYS and ARGV of their scripts."""

from __future__ import annotations

from typing import Final

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.store import Acquire, ClaimChange, Release
from celery_singleton_lock.stores.script import Call, milliseconds

__all__ = ["acquire_call", "phase_of", "release_call"]

# Where a script expects a claim's phase: there is no claim.
_NO_CLAIM: Final = "-"


def acquire_call(call: Acquire, fence_base: int) -> Call:
    """Of ``acquire.lua``; fences are above ``fence_base``."""
    token, claim = call.token, call.claim
    key = call.slots[0]
    keys = [Keyspace.fence(key), Keyspace.marker(key, token.attempt), *call.slots]
    arguments = [
        token.task,
        token.nesting,
        token.retries,
        token.nonce,
        milliseconds(call.ttl),
        call.sequence,
        call.holder.to_json(),
        fence_base,
        phase_of(claim),
        int(call.frees_claim),
        int(call.yields),
        int(call.keeps_claim),
    ]
    return (keys if claim is None else [*keys, claim.key]), arguments


def release_call(call: Release) -> Call:
    """Of ``release.lua``."""
    token, claim = call.token, call.claim
    keys = [Keyspace.marker(call.keys[0], token.attempt), *call.keys]
    arguments = [
        token.attempt,
        token.nonce,
        str(call.become or ""),
        milliseconds(call.become_ttl),
        str(call.next_token or token),
        str(call.marker or ""),
        milliseconds(call.marker_ttl),
        phase_of(claim),
        milliseconds(claim.ttl if claim else 0),
    ]
    return (keys if claim is None else [*keys, claim.key]), arguments


def phase_of(claim: ClaimChange | None) -> str:
    """What a script reads of a claim's change."""
    return _NO_CLAIM if claim is None else str(claim.phase or "")
