"""``celery singleton``: what it says, and its exit status.

A process of its own takes 0.7 s of processor time. Tests of what only a process has (its terminal,
its environment, its end) start one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_singleton_lock.cli import singleton
from tests.harness.processes import ROOT


@dataclass(frozen=True)
class Answer:
    """What one command said, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def all(self) -> str:
        return self.out + self.err

    def json(self) -> Any:
        return json.loads(self.out)


def run_here(app: Celery, *arguments: str, answers: str = "") -> Answer:
    """The command with ``arguments``, for ``app``, with ``answers`` as its standard input.

    Raises:
        Exception: What the command does not turn into an exit status.
    """
    context = CLIContext(app=app, no_color=True, workdir=None)
    done = CliRunner().invoke(singleton, arguments, obj=context, input=answers)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Answer(done.exit_code, done.stdout, done.stderr)


def run_apart(module: str, *arguments: str, env: Mapping[str, str], answers: str = "") -> Answer:
    """The same in a process of its own, for the app of ``module``, with ``env`` added."""
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", module, "singleton", *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        input=answers,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return Answer(done.returncode, done.stdout, done.stderr)
