"""The claim of a message in Redis: one SET where that says enough, else a script.

A call that gets its claim is the common case, and SET with NX does all of it at a quarter of what
a script costs the server. With GET it also answers whose claim is there otherwise: one round trip,
either way. The script is for the rest, and has the last word wherever SET was refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from celery_singleton_lock.core.lease import Kind, Phase, Record
from celery_singleton_lock.core.store import Admit
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.inspect import record_of
from celery_singleton_lock.stores.redis.nodes import AnyConnections
from celery_singleton_lock.stores.redis.scripts import Call, Command, Packed, Script, milliseconds

__all__ = ["Admissions", "admitted_by_script"]

_ADMIT: Final = Script("admit")

#: Runs a script once, within seconds, and gives the replies.
Ask = Callable[[Script, Call, float], list[Any]]


class Admissions:
    """Those of one store in one process.

    Args:
        transport: Takes a command to the server of its key.
        ask: Runs a script.
    """

    def __init__(self, transport: AnyConnections, ask: Ask) -> None:
        self._transport = transport
        self._ask = ask
        # Redis has NX beside GET since 7.0; what is asked for by an older one is the script.
        self._may_set = True

    def admit(self, call: Admit, timeout: float) -> Record | None:
        """As of the store.

        Raises:
            StoreError, StoreUnavailable: As of the store.
        """
        if not self._may_set or call.instead_of or call.tells_ttl:
            return admitted_by_script(self._ask, call, timeout)
        try:
            (value,) = self._transport.run([_set(call)], timeout)
        except StoreUnavailable:
            raise
        except StoreError:
            # Which may be refused as well, and says why.
            record = admitted_by_script(self._ask, call, timeout)
            self._may_set = False
            return record
        if value is None:
            return None
        if value.startswith(f"{Kind.CLAIM} {call.token.task} ".encode()):
            # The same message again: its claim stays longer.
            return admitted_by_script(self._ask, call, timeout)
        return _readable(call, value, math.nan)


def admitted_by_script(ask: Ask, call: Admit, timeout: float) -> Record | None:
    """As of the store, by the script alone.

    Raises:
        StoreError, StoreUnavailable: As of the store.
    """
    token = call.token
    holder = call.holder.to_json(token.task_id)
    arguments = [token.task, f"{milliseconds(call.ttl)}", holder, call.instead_of]
    (reply,) = ask(_ADMIT, ([call.key], arguments), timeout)
    return _readable(call, *reply) if reply else None


def _set(call: Admit) -> Command:
    """The command that claims a key which nobody has, as the script does."""
    key, token, ttl = call.key, call.token, f"{milliseconds(call.ttl)}"
    value = f"{_QUEUED[0]} {token.task} {_QUEUED[1]} {call.holder.to_json(token.task_id)}"
    text = (
        f"*7\r\n$3\r\nSET\r\n${len(key)}\r\n{key}\r\n${len(value)}\r\n{value}\r\n"
        f"$2\r\nPX\r\n${len(ttl)}\r\n{ttl}\r\n$2\r\nNX\r\n$3\r\nGET\r\n"
    )
    if text.isascii():
        return Packed(("SET", key, text.encode()))  # a letter is a byte
    return ("SET", key, value, "PX", ttl, "NX", "GET")


_QUEUED: Final = (str(Kind.CLAIM), str(Phase.QUEUED))


def _readable(call: Admit, value: bytes, ttl_ms: float) -> Record:
    """The record in ``value``; its ttl is nan where nobody asked for it."""
    record = record_of(call.key.encode(), value, ttl_ms)
    if record is None:
        raise StoreError(f"{call.key!r} holds something that this version can't read")
    return record
