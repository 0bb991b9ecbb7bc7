"""The replies of the scripts, as the store's interface has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any, Final

from ...core.call_queue import Hint
from ...core.keyspace import Keyspace
from ...core.lease import Record
from ...core.pauses import Pause
from ...core.store_requests import (
    Acquire,
    Granted,
    GrantedArguments,
    GrantedInTurn,
    Refused,
    Relation,
)

_RELATIONS: Final = {relation.encode(): relation for relation in Relation}


def record_of(key: bytes, value: bytes, ttl_ms: float) -> Record | None:
    """The record in a key's value; None if other software or a newer version wrote the value."""
    try:
        return Record.parse(key.decode(), value.decode(), max(ttl_ms, 0) / 1000)
    except ValueError:
        return None


def pause_of(name: str, text: bytes, left_ms: int) -> Pause:
    """The pause of ``name``, from what the scripts of the pauses reply."""
    _, _, written = text.decode(errors="replace").partition(" ")
    return Pause.of(name, written, None if left_ms < 0 else left_ms / 1000)


def hint_of(key: str, reply: Sequence[Any], countdown: float = 0.0) -> Hint:
    """The call in a reply of a script, perhaps with the ms until its message is to arrive."""
    call_id, copies, begins, message, *delay = reply
    return Hint(
        key=key,
        call_id=call_id.decode(),
        copies=int(copies),
        begins=int(begins),
        message=message,
        countdown=delay[0] / 1000 if delay else countdown,
    )


def slot_or_refusal(key: str, reply: Sequence[Any]) -> Granted | Refused:
    """The reply of ``acquire.lua`` that is not a fence: one of several slots, or a refusal.

    Args:
        key: The lock key.
        reply: The reply.
    """
    word, *found = reply
    if word == b"granted":
        slot, *call = found
        if call:
            following = hint_of(key, call)
            return GrantedInTurn(key=slot.decode(), fence=None, following=following)
        return Granted(key=slot.decode(), fence=None)
    if word == b"paused":
        name, text, left = found
        shard = Keyspace.shard(key)
        refused = Refused(relation=Relation.PAUSED)
        refused.pause = pause_of(f"{shard}:{name.decode()}", text, left)
        return refused
    if word == b"rate":
        refused = Refused(relation=Relation.RATE)
        refused.due_in = found[0] / 1000
        refused.hint = hint_of(key, found[1:], refused.due_in) if found[1:] else None
        return refused
    record = record_of(*found[:3]) if found else None
    refused = Refused(relation=_RELATIONS[word], record=record)
    if len(found) > 3:
        others = map(record_of, found[3::2], found[4::2], repeat(math.nan))
        refused.others = tuple(filter(None, others))
    return refused


def with_arguments(
    request: Acquire, reply: bytes | Sequence[Any], arguments: Any
) -> Granted | Refused:
    """The reply of ``arguments.lua``: that of ``acquire.lua``, and the newest arguments."""
    if isinstance(reply, bytes):
        fence = int(reply) or None
        return GrantedArguments(key=request.slots[0], fence=fence, arguments=arguments)
    if reply[0] == b"not_due":
        refused = Refused(relation=Relation.NOT_DUE)
        refused.due_in = arguments / 1000
        return refused
    found = slot_or_refusal(request.slots[0], reply)
    if isinstance(found, Granted):
        return GrantedArguments(key=found.key, fence=None, arguments=arguments)
    return found
