"""The newest call for each key in Redis."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.keyspace import Keyspace
from ...core.store import NewestCalls
from ...core.store_requests import NewestCall
from . import scripts
from .runner import ScriptRunner


class RedisNewestCalls(NewestCalls):
    """See `NewestCalls`."""

    def __init__(self, runner: ScriptRunner) -> None:
        self._runner = runner

    def register(
        self, key: str, call: NewestCall, *, ttl: float, timeout: float, reservation: str = ""
    ) -> NewestCall:
        queue = Keyspace.wait_queue(key)
        keys = [Keyspace.newest_call(key), key, queue, f"{queue}!"]
        at = "" if call.called_at is None else repr(call.called_at)
        arguments = [at, call.call_id, scripts.milliseconds(ttl), reservation]
        command = scripts.NEWEST_CALL.command(keys, arguments)
        return _call(self._runner.run_repeatably(command, timeout))

    def of(self, keys: Sequence[str], *, timeout: float) -> list[NewestCall | None]:
        # GET as in `ScriptRunner.texts`. A node of a cluster that does not answer has no effect on
        # others.
        commands = [("GET", Keyspace.newest_call(key)) for key in keys]
        replies = self._runner.connections.run(commands, timeout, check=False)
        return [_call(reply) if isinstance(reply, bytes) else None for reply in replies]


def _call(text: bytes) -> NewestCall:
    called_at, call_id = text.decode().split(" ")
    return NewestCall(call_id=call_id, called_at=float(called_at))
