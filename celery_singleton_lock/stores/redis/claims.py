"""Claims of messages in Redis, and the arguments that later calls replace."""

from __future__ import annotations

import math
from typing import Final

from ...core.lease import Kind, Phase, Record, Token
from ...core.store import Claims, QueuedArguments
from ...core.store_requests import ClaimChange, ClaimRequest, ReplaceArguments, Replaced
from ...errors import StoreError, StoreUnavailable
from . import scripts
from .replies import record_of
from .runner import ScriptRunner, repeated

_REPLIES_TO_REPLACE: Final = {1: Replaced.YES, 0: Replaced.NOT_QUEUED, -1: Replaced.FIXED}


class RedisClaims(Claims):
    """See `Claims`. A free claim is taken by one SET command, others by a script."""

    def __init__(self, runner: ScriptRunner) -> None:
        self._runner = runner
        # SET accepts NX together with GET since Redis 7.0. Older servers run the script instead.
        self._claims_by_set = True

    def take(self, request: ClaimRequest, *, timeout: float) -> Record | None:
        self._runner.check_shards(request.key, timeout)
        record = self._take(request, timeout)
        if self._runner.pending.lost:
            self._runner.pending.resend_lost()
        superseding = self._runner.pending.superseding(record)
        for pending in superseding:
            self._runner.pending.resend(pending)
        return self._take(request, timeout) if superseding else record

    def _take(self, request: ClaimRequest, timeout: float) -> Record | None:
        take = self._claim_by_set
        by_script = request.instead_of or request.wants_ttl or request.arguments
        if by_script or not self._claims_by_set:
            take = self._claim_by_script
        return repeated(take, request, timeout)

    def _claim_by_set(self, request: ClaimRequest, timeout: float) -> Record | None:
        # A free claim is the common case. SET NX takes it at a quarter of a script's cost to the
        # server. With GET it returns the existing claim otherwise.
        token = request.token
        value = (
            f"{Kind.CLAIM} {token.call_id} {Phase.QUEUED} {request.holder.to_json(token.task_id)}"
        )
        ttl_ms = scripts.milliseconds(request.ttl)
        command = ("SET", request.key, value, "PX", ttl_ms, "NX", "GET")
        try:
            (found,) = self._runner.connections.run([command], timeout)
        except StoreUnavailable:
            raise
        except StoreError:
            # The script may be refused too. Then its error is reported.
            record = self._claim_by_script(request, timeout)
            self._claims_by_set = False
            return record
        if found is None:
            return None
        if found.startswith(f"{Kind.CLAIM} {token.call_id} ".encode()):
            # The same message: prolong its claim.
            return self._claim_by_script(request, timeout) if request.prolongs else None
        return _claim_record(request, found, math.nan)

    def _claim_by_script(self, request: ClaimRequest, timeout: float) -> Record | None:
        token = request.token
        holder = request.holder.to_json(token.task_id)
        arguments = [token.call_id, scripts.milliseconds(request.ttl), holder, request.instead_of]
        keys = [request.key]
        if request.arguments or not request.prolongs:
            arguments.append("0" if request.prolongs else "1")
        if request.arguments:
            keys.append(request.arguments)
            arguments.append(f"{request.due_in * 1000:.0f}")
        reply = self._runner.run(scripts.TAKE_CLAIM.command(keys, arguments), timeout)
        return _claim_record(request, *reply) if reply else None

    def change(self, token: Token, change: ClaimChange, *, timeout: float) -> None:
        arguments = [token.call_id, scripts.phase_of(change), scripts.milliseconds(change.ttl)]
        command = scripts.CHANGE_CLAIM.command(scripts.keys_of(change), arguments)
        self._runner.run_repeatably(command, timeout)


class RedisArguments(QueuedArguments):
    """See `QueuedArguments`."""

    def __init__(self, runner: ScriptRunner) -> None:
        self._runner = runner

    def replace(self, request: ReplaceArguments, *, timeout: float) -> Replaced:
        due_max = "" if request.due_max is None else f"{request.due_max * 1000:.0f}"
        due = [f"{request.due_in * 1000:.0f}", due_max]
        arguments = [request.call_id, request.arguments, scripts.milliseconds(request.ttl), *due]
        command = scripts.REPLACE.command([request.claim, request.key], arguments)
        return _REPLIES_TO_REPLACE[self._runner.run_repeatably(command, timeout)]


def _claim_record(request: ClaimRequest, value: bytes, ttl_ms: float) -> Record:
    record = record_of(request.key.encode(), value, ttl_ms)
    if record is None:
        raise StoreError(f"{request.key!r} holds something that this version can't read")
    return record
