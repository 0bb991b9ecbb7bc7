"""Leases in Redis: one key per lease, and one script or command per operation.

A lease is a string key with a ttl. Its value is the kind, the token, the fence and the holder as
JSON. If ``wait_replicas`` is set, WAIT follows an acquire in the same pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha1
from typing import Final

from ...core.keyspace import Keyspace
from ...core.lease import Lease, Record
from ...core.store import Leases
from ...core.store_requests import (
    Acquire,
    Granted,
    Mark,
    QueuedAcquire,
    QueuedRelease,
    Refused,
    Release,
    ReleaseReply,
    Renewal,
    Trace,
)
from ...errors import StoreError, StoreUnavailable
from . import scripts
from .connection import OPERATOR_TIMEOUT
from .replies import record_of, slot_or_refusal, with_arguments
from .runner import ScriptRunner, denied_of

# The share of the timeout in which the replicas must acknowledge. The rest is for the reply, which
# an idle server sends up to 0.1 s late (hz). A reply after the timeout is not a grant.
_WAIT_RATIO: Final = 0.5


class RedisLeases(Leases):
    """See `Leases`.

    Args:
        runner: Runs the scripts.
        fence_base: Fences are above this number.
        wait_replicas: The number of replicas that must acknowledge a grant before it counts.
    """

    def __init__(self, runner: ScriptRunner, fence_base: int, wait_replicas: int) -> None:
        self._runner = runner
        self._pending, self._known_shards = runner.pending, runner.known_shards
        self._fence_base = f"{fence_base}"
        self._wait_replicas = wait_replicas

    def acquire(self, request: Acquire, *, timeout: float) -> Granted | Refused:
        # A refusal returns the holder of the first of several slots, but a pending release may be
        # on any of them.
        pending = self._pending.open_on(request.slots) if len(request.slots) > 1 else ()
        reply = self._acquire(request, timeout)
        if isinstance(reply, Granted):
            return reply
        superseding = self._pending.superseding(reply.record)
        if not superseding and not pending:
            return reply
        for one in superseding or self._pending.open_on(request.slots):
            self._pending.resend(one)
        return self._acquire(request, timeout)

    def _acquire(self, request: Acquire, timeout: float) -> Granted | Refused:
        commands = [scripts.acquire_command(request, self._fence_base)]
        fence = commands[0][3]  # names the shard
        is_known = fence in self._known_shards
        just_checked = not is_known and self._runner.check_shards(fence, timeout)
        if self._wait_replicas:
            # WAIT follows the script in the pipeline, because a script can't wait for replicas.
            waited = scripts.milliseconds(timeout * _WAIT_RATIO)
            commands.append(("WAIT", f"{self._wait_replicas}", waited))
        replies = self._runner.pipeline(commands, timeout)
        reply = replies[0]
        if just_checked:
            self._known_shards.add(fence)  # again, if the server had lost the script
        if self._pending.lost:
            self._pending.resend_lost()
        if isinstance(reply, bytes):
            found: Granted | Refused = Granted(key=request.slots[0], fence=int(reply) or None)
        elif request.claim is not None and request.claim.arguments:
            found = with_arguments(request, *reply)
        elif isinstance(request, QueuedAcquire) and reply[0] == b"slots":
            return self._acquire(on_slots(request, reply[1]), timeout)
        else:
            found = slot_or_refusal(request.slots[0], reply)
        if self._wait_replicas and isinstance(found, Granted) and replies[1] < self._wait_replicas:
            with suppress(StoreError):  # the ttl frees the key; no body runs with this lease
                self._undo(request, timeout)
            raise StoreUnavailable(
                f"{replies[1]} replica(s) had the grant of {found.key!r} in time, and "
                f"wait_replicas asks for {self._wait_replicas}: it was given back"
            )
        return found

    def _undo(self, request: Acquire, timeout: float) -> None:
        undo = request.undo()
        if isinstance(undo, QueuedRelease):  # else its call would count as begun
            self._runner.run(scripts.queued_release_command(undo), timeout)
        else:
            self.release(undo, timeout=timeout)

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[Renewal]:
        # Pending releases are not resent here, because all other leases would wait for that.
        chunks = scripts.chunks_of(leases)
        commands = [*map(scripts.renewal_command, chunks)]
        replies = self._runner.pipeline(commands, timeout) if commands else []
        found: list[Renewal] = []
        for chunk, reply in zip(chunks, replies, strict=True):
            found += scripts.renewals_of(len(chunk), reply)
        return found

    def release(self, request: Release, *, timeout: float) -> ReleaseReply:
        reply = self._runner.release(request, timeout)
        if self._pending.lost:
            self._pending.resend_lost()
        return reply

    def mark(self, request: Mark, *, timeout: float) -> None:
        token, claim = request.token, request.claim
        keys = [Keyspace.completion(request.key, token.attempt)]
        ttl_ms = scripts.milliseconds(request.ttl)
        arguments = [str(request.state), f"{request.sequence}", token.nonce, ttl_ms]
        if claim is not None:
            keys += scripts.keys_of(claim)
            arguments += [token.call_id, scripts.phase_of(claim), scripts.milliseconds(claim.ttl)]
        self._runner.run_repeatably(scripts.MARK.command(keys, arguments), timeout)

    def trace(self, key: str, *, timeout: float) -> Trace:
        command = scripts.TRACE.command([key, Keyspace.shard_hash(key)])
        value, ttl, fence, now = self._runner.run(command, timeout)
        record = None if value is None else record_of(key.encode(), value, ttl)
        return Trace(record=record, fence=int(fence), now=int(now) / 1e6)

    def inspect(self, key: str) -> Record | None:
        self._runner.drain_open()
        return self._runner.read(key, OPERATOR_TIMEOUT)

    def missing_rights(self, key: str) -> list[str]:
        """See `Leases.missing_rights`. Leaves nothing in the store."""
        script = "return 1"
        commands: list[scripts.Command] = [
            ("EVAL", script, 1, key),
            ("EVALSHA", sha1(script.encode(), usedforsecurity=False).hexdigest(), 1, key),
            ("HSET", key, "last", 0),
            ("HMGET", key, "last"),
            ("HGET", key, "last"),
            ("HINCRBY", key, "last", 1),
            ("HKEYS", key),
            ("HDEL", key, "last"),
            ("SET", key, "", "PX", 1),
            ("GET", key),
            ("PTTL", key),
            ("PEXPIRE", key, 1),
            ("DEL", key),
        ]
        tries = [partial(self._runner.connections.run, [one]) for one in commands]
        # It has no key, by which a cluster would find the server.
        return denied_of([*tries, partial(self._runner.servers()[0].run, [("TIME",)])])


def on_slots(request: QueuedAcquire, number: int) -> QueuedAcquire:
    """The request with all slots that calls may hold: more could run when they began."""
    limit = len(request.slots) if request.limit is None else request.limit
    return replace(request, slots=Keyspace.slots(request.slots[0], number), limit=limit)
