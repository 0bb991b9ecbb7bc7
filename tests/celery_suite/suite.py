"""One run of the suite: the installed Celery's, with a broker and a lock store of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

import celery
import redis

from example_project.private_server import PrivateServer, tied_to_parent
from tests.harness.processes import ROOT

#: The source archive, and for each mode the unpacked suite and the logs of its runs.
DIRECTORY = ROOT / "build" / "celery-suite"

TESTS = ("t/integration/test_tasks.py", "t/integration/test_canvas.py")

#: Seconds until a test that does not end has failed; Celery's own marks say the same.
TEST_TIMEOUT = 300

#: Seconds for a whole run: many tests at their limit.
RUN_TIMEOUT = 5400

#: Plugins that are not loaded. Without pytest-rerunfailures Celery's mark `flaky` does nothing, and
#: each failure counts. Without ours the plain run has nothing of this package.
_WITHOUT = ("cacheprovider", "randomly", "rerunfailures", "celery_singleton_lock")

_SCRIPTS = ("cmdstat_eval", "cmdstat_evalsha", "cmdstat_fcall")


class Mode(StrEnum):
    """How the suite's tasks are made."""

    PLAIN = "plain"  # by Celery's shared_task
    SINGLETON = "singleton"  # by singleton_task


class SuiteFailed(RuntimeError):
    """pytest did not come to the end of its tests; the message names its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a run left: the outcome of each test, and how many scripts the lock store ran."""

    outcomes: dict[str, str]
    scripts: int


def download() -> Path:
    """The source archive of the installed Celery; downloaded unless it is there."""
    archive = DIRECTORY / f"celery-{celery.__version__}.tar.gz"
    if not archive.exists():
        options = ["--quiet", "--no-deps", "--no-binary", "celery", "--dest", str(DIRECTORY)]
        requirement = f"celery=={celery.__version__}"
        subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
    return archive


def unpack(archive: Path, mode: Mode) -> None:
    """Unpack the suite without the package: the installed Celery is the one that is tested."""
    target = DIRECTORY / mode
    shutil.rmtree(target, ignore_errors=True)
    root = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as tar:
        for member in tar:
            member.name = member.name.removeprefix(f"{root}/")
            if member.name.startswith("t/") or member.name == "pyproject.toml":
                tar.extract(member, target, filter="data")


class SuiteRun:
    """A pytest process over ``tests``. Use it as a context manager, then `wait` for its end."""

    def __init__(self, mode: Mode, tests: Sequence[str] = TESTS, *, name: str = "all") -> None:
        self._mode = mode
        self._tests = tests
        self._directory = DIRECTORY / mode
        self._outcomes = self._directory / f"{name}.json"
        self.log = self._directory / f"{name}.log"
        self._broker = PrivateServer()
        # Apart from the broker: kombu and the result backend run scripts too.
        self._locks = PrivateServer()
        self._ends = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as ends:
            ends.enter_context(self._broker)
            ends.enter_context(self._locks)
            # The suite's own way to add settings.
            (self._directory / "integration-tests-config.json").write_text(
                json.dumps({"singleton_lock_url": self._locks.url()})
            )
            with self.log.open("w") as log:
                self._process = subprocess.Popen(
                    tied_to_parent(self._command()),
                    cwd=self._directory,
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            ends.callback(self._end)
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def wait(self) -> Ended:
        """Wait for the end of pytest.

        Raises:
            SuiteFailed: pytest was interrupted, or had an internal error.
        """
        status = self._process.wait(RUN_TIMEOUT)
        if status not in (0, 1) or not self._outcomes.exists():
            raise SuiteFailed(f"pytest ended with status {status}: see {self.log}")
        outcomes = json.loads(self._outcomes.read_text())
        return Ended(outcomes=outcomes, scripts=_scripts(self._locks.url()))

    def _command(self) -> list[str]:
        plugins = ["-p", "tests.celery_suite.recorder"]
        if self._mode is Mode.SINGLETON:
            plugins += ["-p", "tests.celery_suite.singletons"]
        unused = [f"-pno:{name}" for name in _WITHOUT]
        options = [f"--outcomes={self._outcomes}", f"--timeout={TEST_TIMEOUT}", "--durations=20"]
        return [sys.executable, "-m", "pytest", *plugins, *unused, *options, *self._tests]

    def _environment(self) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
            "PYTHONPATH": str(ROOT),
            "TEST_BROKER": self._broker.url(0),
            # Database 0, as by default: test_chord_on_error reads results there by their keys.
            "TEST_BACKEND": self._broker.url(0),
            # As Celery's own tox.ini has it: two tests look for what the worker logs.
            "WORKER_LOGLEVEL": "INFO",
            # The suite's tasks write to this server too.
            "REDIS_HOST": "127.0.0.1",
            "REDIS_PORT": str(self._broker.port),
        }

    def _end(self) -> None:
        # The pool's processes too, if pytest was interrupted or did not end them.
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


def _scripts(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        stats = client.info("commandstats")
    return sum(stats[name]["calls"] for name in _SCRIPTS if name in stats)
