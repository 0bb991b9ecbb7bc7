"""The queues of the calls of all keys in Redis: a sorted set and a hash for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.call_queue import (
    CallQueue,
    CallState,
    Depth,
    Hint,
    Join,
    Place,
    QueuedCall,
    Removal,
    Remove,
)
from ...core.keyspace import CallQueueNames, Keyspace
from ...core.store_requests import QueuedRelease, ReleaseReply
from . import scripts
from .replies import hint_of
from .runner import RELEASE_REPLIES, ScriptRunner


class RedisCallQueue(CallQueue):
    """See `CallQueue`."""

    def __init__(self, runner: ScriptRunner) -> None:
        self._runner = runner

    def release(
        self, request: QueuedRelease, *, timeout: float
    ) -> tuple[ReleaseReply, Hint | None]:
        command, key = scripts.queued_release_command(request), Keyspace.lock_of(request.keys[0])
        reply, *call = self._runner.run(command, timeout)
        return RELEASE_REPLIES[reply], hint_of(key, call) if call else None

    def join(self, request: Join, *, timeout: float) -> tuple[Place, int]:
        key, token = request.key, request.token
        most = scripts.ANY_NUMBER if request.max_waiting is None else f"{request.max_waiting}"
        ordinal = [f"{token.nesting}", f"{token.retries}", f"{request.sequence}"]
        late, asked = "1" if request.late else "0", f" {' '.join(request.asked)} "
        first = [f"{request.limit}", token.call_id, *ordinal]
        arguments = [*first, late, request.message, most, asked]
        names = CallQueueNames.of(key)
        keys = [*names, names.last_number, names.ended(token.call_id)]
        if request.claim:
            keys.append(request.claim)
            arguments.append(scripts.milliseconds(request.claim_ttl))
        place, *depth = self._run_on_slots(
            scripts.QUEUE_JOIN, key, keys, arguments, timeout, request.limit
        )
        return Place(place.decode()), int(depth[0]) if depth else 0

    def position(self, key: str, call_id: str, *, timeout: float) -> int | None:
        command = scripts.QUEUE_POSITION.command([CallQueueNames.of(key).queue], [call_id])
        found: int | None = self._runner.run_checked(command, timeout)
        return found

    def keys(self, shard: str, *, timeout: float) -> list[str]:
        command = scripts.QUEUE_KEYS.command([f"{shard}:due"])
        return [key.decode() for key in self._runner.run(command, timeout)]

    def depths(self, keys: Sequence[str], *, timeout: float) -> list[Depth]:
        if not keys:
            return []
        queues = [name for names in map(CallQueueNames.of, keys) for name in names[:2]]
        found = self._runner.run(scripts.QUEUE_DEPTHS.command(queues), timeout)
        return [
            Depth(waiting=waiting, oldest_at=_time_of(number[0]) if number else None)
            for waiting, *number in found
        ]

    def calls(
        self, key: str, *, first: int = 0, most: int, messages: bool = True, timeout: float
    ) -> list[QueuedCall]:
        arguments = [f"{first}", f"{first + most - 1}", "1" if messages else "0"]
        command = scripts.QUEUE_CALLS.command([*CallQueueNames.of(key), key], arguments)
        return [
            QueuedCall(
                key=key,
                call_id=call_id.decode(),
                copies=int(copies),
                begins=int(begins),
                message=message,
                position=position,
                joined_at=_time_of(number),
                state=CallState(letter.decode()),
                countdown=left / 1000,
            )
            for position, (call_id, copies, begins, message, number, letter, left) in enumerate(
                self._runner.run(command, timeout), first
            )
        ]

    def due(self, shard: str, *, limit: int, timeout: float) -> list[str]:
        command = scripts.QUEUE_DUE.command([f"{shard}:due"], [f"{limit}"])
        return [key.decode() for key in self._runner.run_checked(command, timeout)]

    def sweep(self, key: str, *, timeout: float) -> list[tuple[bool, Hint]]:
        keys = [*CallQueueNames.of(key), Keyspace.shard_hash(key)]
        found = self._run_on_slots(scripts.QUEUE_SWEEP, key, keys, [], timeout)
        return [(word == b"lost", hint_of(key, call)) for word, *call in found]

    def defer(
        self,
        key: str,
        *,
        seconds: float,
        timeout: float,
        unpublished: Hint | None = None,
        perhaps: bool = False,
        returns: str = "",
    ) -> None:
        call_id = unpublished.call_id if unpublished else returns
        why = "returns" if returns else "perhaps" if perhaps else "unpublished"
        # Not at least 1 ms, as a ttl: a sweep that follows at once finds the key due.
        arguments = [str(round(seconds * 1000)), call_id, why]
        command = scripts.QUEUE_DEFER.command([*CallQueueNames.of(key), key], arguments)
        self._runner.run_checked(command, timeout)

    def leave(self, key: str, call_id: str, *, timeout: float) -> Removal | Hint:
        word, *call = self._remove("leave", key, call_id, [], timeout)
        return hint_of(key, call) if call else Removal(word.decode())

    def remove(self, request: Remove, *, timeout: float) -> tuple[Removal, Hint | None]:
        token, step = request.token, "withdraw" if request.only_unbegun else "end"
        copy = "" if request.sequence is None else f"{request.sequence}"
        arguments = [
            *(f"{token.nesting}", f"{token.retries}", copy, token.nonce),
            scripts.milliseconds(request.ended_ttl),
            scripts.first_open_of(token, request.may_return_from),
        ]
        word, *call = self._remove(step, request.key, token.call_id, arguments, timeout)
        return Removal(word.decode()), hint_of(request.key, call) if call else None

    def _remove(
        self, step: str, key: str, call_id: str, arguments: Sequence[str], timeout: float
    ) -> Sequence[Any]:
        names = CallQueueNames.of(key)
        keys, words = [*names, names.ended(call_id)], [call_id, step, *arguments]
        return self._run_on_slots(scripts.QUEUE_REMOVE, key, keys, words, timeout)

    def _run_on_slots(
        self,
        script: scripts.Script,
        key: str,
        keys: Sequence[str],
        arguments: Sequence[Any],
        timeout: float,
        number: int = 1,
    ) -> Sequence[Any]:
        """Run a script that reads all slots of ``key``, which may be more than ``number``."""
        while True:
            command = script.command([*keys, *Keyspace.slots(key, number)], arguments)
            reply: Sequence[Any] = self._runner.run_checked(command, timeout)
            if not reply or reply[0] != b"slots":
                return reply
            number = reply[1]

    def missing_rights(self, key: str) -> list[str]:
        """See `CallQueue.missing_rights`. Leaves nothing in the store."""
        queue = Keyspace.wait_queue(key)
        return self._runner.denied(
            ("ZADD", queue, "XX", 0, "you"),
            ("ZCOUNT", queue, 0, 0),
            ("ZREM", queue, "you"),
            ("EXISTS", queue),
            ("ZCARD", queue),
            ("ZRANGE", queue, 0, 0),
            ("ZRANGEBYSCORE", queue, 0, 0),
            ("ZRANK", queue, "you"),
            ("ZSCORE", queue, "you"),
        )


def _time_of(number: bytes) -> float:
    """Seconds since the epoch, of the number of a call."""
    return float(number) / 1_000_000
