"""Real `celery worker` and `celery beat` processes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self
from uuid import uuid4

from celery import Celery

from tests.harness.deliveries import wait_until
from tests.harness.processes import ROOT, TIMEOUT, Process


class CeleryWorker(Process):
    """``python -m celery -A <app> worker``.

    Args:
        app: The module of the app, as ``tests.apps.plain``.
        pool: prefork, threads, solo, gevent or eventlet.
        concurrency: Processes, threads or greenlets.
        queues: Queues it consumes; the app's default queue when not given.
        name: The worker's name before the ``@``; a unique one when not given.
        env: Added to the environment of the test; None as a value takes the name out.
        args: More arguments, as ``["--max-tasks-per-child", "1"]``.
        loglevel: The loglevel of the worker.
        prefix: What runs the command of the worker, as ``["unshare", "--pid"]``.
        python: The interpreter.
        cwd: The directory it starts in; modules there come before all others.
    """

    def __init__(
        self,
        app: str,
        *,
        pool: str = "prefork",
        concurrency: int = 2,
        queues: Sequence[str] | None = None,
        name: str | None = None,
        env: Mapping[str, str | None] | None = None,
        args: Sequence[str] = (),
        loglevel: str = "INFO",
        prefix: Sequence[str] = (),
        python: str = sys.executable,
        cwd: Path = ROOT,
    ) -> None:
        name = name or f"w{uuid4().hex[:8]}"
        self.hostname = f"{name}@localhost"
        self.pool = pool
        command = [*prefix, python, "-m", "celery", "-A", app, "worker"]
        command += ["--pool", pool, "--concurrency", str(concurrency)]
        command += ["--hostname", self.hostname, "--loglevel", loglevel]
        # Gossip and mingle are for clusters; without them a worker starts a second earlier.
        command += ["--without-gossip", "--without-mingle"]
        if queues:
            command += ["--queues", ",".join(queues)]
        super().__init__([*command, *args], env=env, name=name, cwd=cwd)

    def wait_until_ready(self, timeout: float = TIMEOUT) -> Self:
        """Wait until it consumes."""
        self.wait_for_log(r"@localhost ready\.", timeout=timeout)
        return self

    def wait_until_it_answers(self, app: Celery, timeout: float = TIMEOUT) -> Self:
        """Wait until remote control commands of ``app`` reach it.

        With a Redis broker it subscribes to them after it has said that it is ready, and an earlier
        command is lost.
        """

        def answers() -> bool:
            return bool(app.control.ping([self.hostname], timeout=1.0, limit=1))

        wait_until(answers, f"{self.hostname} answers", timeout)
        return self


class CeleryBeat(Process):
    """``python -m celery -A <app> beat``, with a schedule file of its own.

    Args:
        app: The module of the app.
        scheduler: A scheduler class, as ``celery.beat:PersistentScheduler``; the app's by default.
        schedule: The schedule file; a new one when not given. Two runs that share one go on in it.
        max_interval: Seconds between two looks at the schedule, at most; what is due, is due.
        name, env, args, loglevel, python, cwd: As of `CeleryWorker`.
    """

    def __init__(
        self,
        app: str,
        *,
        scheduler: str | None = None,
        schedule: Path | None = None,
        max_interval: int = 1,
        name: str = "beat",
        env: Mapping[str, str | None] | None = None,
        args: Sequence[str] = (),
        loglevel: str = "INFO",
        python: str = sys.executable,
        cwd: Path = ROOT,
    ) -> None:
        if schedule is None:
            self._directory = tempfile.TemporaryDirectory(prefix="csl-beat-")
            schedule = Path(self._directory.name) / "schedule"
        self.schedule = schedule
        command = [python, "-m", "celery", "-A", app, "beat"]
        command += ["--schedule", str(schedule), "--max-interval", str(max_interval)]
        command += ["--loglevel", loglevel, "--pidfile="]
        if scheduler:
            command += ["--scheduler", scheduler]
        super().__init__([*command, *args], env=env, name=name, cwd=cwd)

    def wait_until_ready(self, timeout: float = TIMEOUT) -> Self:
        """Wait until it ticks."""
        self.wait_for_log(r"beat: Starting\.\.\.", timeout=timeout)
        return self

    def end(self, timeout: float = 10.0) -> None:
        super().end(timeout)
        if hasattr(self, "_directory"):
            self._directory.cleanup()
