"""What one acquire and one release send: KEYS and ARGV of their scripts.

What is not there is left out, for each word costs both sides: most tasks have no claim, and most
releases delete. All of it is text, which is packed faster than what has to be looked at.
"""

from __future__ import annotations

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.store import Acquire, ClaimChange, Release
from celery_singleton_lock.stores.redis.scripts import Call, milliseconds

__all__ = ["acquire_call", "phase_of", "release_call"]


def acquire_call(call: Acquire, fence_base: int) -> Call:
    """Of ``acquire.lua``; fences are above ``fence_base``."""
    token, claim = call.token, call.claim
    key = call.slots[0]
    attempt = token.attempt
    keys = Keyspace.beside_acquire(key, attempt)
    keys += call.slots
    arguments = [
        f"{attempt}|{token.nonce}",
        f"{milliseconds(call.ttl)}",
        f"{call.sequence}",
        call.holder.to_json(token.task_id),
        f"{fence_base}",
    ]
    if claim is not None:
        keys.append(claim.key)
        flags = (call.frees_claim, call.yields, call.keeps_claim)
        arguments += [phase_of(claim), *("1" if flag else "0" for flag in flags)]
    if call.wait_ttl is not None:
        keys.append(Keyspace.wait_queue(key))
        if claim is None:
            arguments += ["-", "0", "0", "0"]
        arguments += [f"{milliseconds(call.wait_ttl)}" if call.wait_ttl else "0", call.handoff]
    return keys, arguments


def release_call(call: Release) -> Call:
    """Of ``release.lua``."""
    token, claim = call.token, call.claim
    attempt = token.attempt
    # With the line even if no client waits: only the script can see that, and some servers refuse
    # access to undeclared keys.
    keys = Keyspace.beside_release(call.keys[0], attempt)
    keys += call.keys
    arguments = [attempt, token.nonce]
    if not (call.marker or call.become or claim):
        return keys, arguments
    arguments += [str(call.marker or ""), f"{milliseconds(call.marker_ttl)}"]
    if call.become or claim:
        become_ttl = f"{milliseconds(call.become_ttl)}"
        arguments += [str(call.become or ""), become_ttl, str(call.next_token or token)]
    if claim is not None:
        keys.append(claim.key)
        arguments += [phase_of(claim), f"{milliseconds(claim.ttl)}"]
    return keys, arguments


def phase_of(claim: ClaimChange) -> str:
    """What a script reads of a claim's change."""
    return str(claim.phase or "")
