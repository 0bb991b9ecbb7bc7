"""The last runs of schedule entries in Redis."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.store import Schedule
from ...core.store_requests import Authorization, AuthorizeRun
from . import scripts
from .runner import ScriptRunner


class RedisSchedule(Schedule):
    """See `Schedule`."""

    def __init__(self, runner: ScriptRunner) -> None:
        self._runner = runner

    def authorize(self, request: AuthorizeRun, *, timeout: float) -> Authorization:
        ttl_ms = scripts.milliseconds(request.ttl)
        arguments = [str(request.token), request.expected or "", request.new, ttl_ms]
        command = scripts.AUTHORIZE_RUN.command([request.leader, request.entry], arguments)
        return Authorization(self._runner.run(command, timeout).decode())

    def last_runs(self, keys: Sequence[str], *, timeout: float) -> list[str | None]:
        return self._runner.texts(keys, timeout)
