"""The pauses in Redis: fields of the hash of their shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.keyspace import Keyspace
from ...core.pauses import Pause, Pauses
from . import scripts
from .replies import pause_of
from .runner import ScriptRunner


class RedisPauses(Pauses):
    """See `Pauses`."""

    def __init__(self, runner: ScriptRunner) -> None:
        self._runner = runner

    def pause(self, pause: Pause, *, timeout: float) -> Pause:
        left = "" if pause.left is None else scripts.milliseconds(pause.left)
        name = pause.name
        reply = self._run(scripts.PAUSE, name, [_field_of(name), left, pause.to_json()], timeout)
        return pause_of(name, *reply)

    def resume(self, name: str, *, timeout: float) -> Pause | None:
        reply = self._run(scripts.RESUME, name, [_field_of(name)], timeout)
        return pause_of(name, *reply) if reply else None

    def of_shard(self, shard: str, *, timeout: float) -> list[Pause]:
        reply = self._run(scripts.PAUSES, f"{shard}:", [], timeout)
        found = [pause_of(f"{shard}:{field.decode()}", *rest) for field, *rest in reply]
        return sorted(found, key=lambda pause: pause.name)

    def _run(
        self, script: scripts.Script, name: str, arguments: Sequence[str], timeout: float
    ) -> Any:
        command = script.command([Keyspace.shard_hash(name)], arguments)
        return self._runner.run_checked(command, timeout)


def _field_of(name: str) -> str:
    """The field of the hash: the name without its shard."""
    return name.partition("}:")[2]
