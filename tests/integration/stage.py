"""One worker with one app for all tests of a module; names keep the tests apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import redis

from tests.apps.gate import Gate
from tests.harness.app_module import fresh_module
from tests.harness.deliveries import wait_until as wait_until
from tests.harness.journal import VARIABLE, Journal, Record
from tests.harness.worker import CeleryWorker

APP = "tests.apps.semantics"

# Seconds: for two cores that others use too. Nothing waits that long when all is well.
PATIENCE = 60.0


class Stage:
    """A database, a journal, the app, and the workers that were asked for.

    Args:
        url: The URL of the database.
        directory: For the journal, and the logs of the workers.
        stack: What ends with the stage.
        name: The module of the app.
        env: What its environment has beside.

    Attributes:
        app: The test's own copy of it.
        redis: A client of the database.
        journal: What the bodies write.
    """

    def __init__(
        self,
        url: str,
        directory: Path,
        stack: ExitStack,
        name: str = APP,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.environment = {
            "BROKER_URL": url,
            "RESULT_URL": url,
            VARIABLE: str(directory / "journal.jsonl"),
            **(env or {}),
        }
        self.journal = Journal(directory / "journal.jsonl")
        self.redis: Any = stack.enter_context(redis.Redis.from_url(url, decode_responses=True))
        self.redis.flushdb()
        stack.callback(self.redis.flushdb)
        self.app: ModuleType = stack.enter_context(fresh_module(name, self.environment))
        self._name, self._directory, self._stack = name, directory, stack
        #: All that were started.
        self.workers: list[CeleryWorker] = []

    def worker(self, **options: Any) -> CeleryWorker:
        """Start one, ready when this returns; it ends with the stage, or with `kill_group`."""
        options["env"] = {**self.environment, **options.get("env", {})}
        worker = CeleryWorker(self._name, **options)
        self.workers.append(worker)
        self._stack.callback(lambda: self._end(worker))
        worker.start()
        worker.wait_until_ready()
        if options["env"]["BROKER_URL"] == self.environment["BROKER_URL"]:
            worker.wait_until_it_answers(self.app.app)  # else a test's first command may be lost
        return worker

    def _end(self, worker: CeleryWorker) -> None:
        worker.kill_group()
        # Shown when the last test of the module fails; for the others there is the file.
        (self._directory / f"{worker.name}.log").write_text(worker.log)
        print(f"--- log of {worker.name}, also in {self._directory}\n{worker.log}")

    def open(self, gate: str) -> None:
        """Let the bodies that wait at ``gate`` end."""
        Gate(self.redis, gate).open()

    def occupy(self, name: str) -> Any:
        """Have a body of `work` hold ``name`` until the gate ``name`` is opened; its result."""
        result = self.app.work.delay(name, gate=name)
        self.journal.wait_for(
            lambda records: [r for r in records if r.task_id == result.id],
            what=f"{name} is occupied",
        )
        return result

    def key(self, name: str) -> str:
        """The lock key of ``name`` in the scope of most tasks."""
        return str(self.app.work.lock_key(name))

    def kind(self, name: str) -> str | None:
        """The kind of that key's value: l, r, c, d; None where there is no key."""
        value = self.redis.get(self.key(name))
        return value[0] if value else None

    def starts(self, name: str) -> list[Record]:
        """The starts of the bodies of ``name``."""
        return [r for r in self.journal.records() if r.event == "start" and r.key == name]


@contextmanager
def open_stage(
    url: str, directory: Path, name: str = APP, env: Mapping[str, str] | None = None
) -> Iterator[Stage]:
    """A stage on an empty database."""
    with ExitStack() as stack:
        yield Stage(url, directory, stack, name, env)
