"""`python -m tests.benchmarks publishing`: what a claim adds to a call, beside the peers."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from typing import Final

from example_project.private_server import PrivateServer, find_binary
from tests.benchmarks.machine import conditions, seeded
from tests.benchmarks.publication import publish
from tests.benchmarks.publishing import report
from tests.harness.processes import ROOT

__all__ = ["add_options", "benchmark"]

_PACKAGES: Final = (
    *("celery-singleton-lock", "celery", "kombu", "redis", "celery-once", "celery-singleton"),
    "celery-heimdall",
)
_CALLS: Final = "tests.benchmarks.publishing.calls"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of this benchmark."""
    parser.add_argument("--starts", type=int, default=4, help="of the process that publishes")
    parser.add_argument("--rounds", type=int, default=800, help="of each start: a call of each")
    parser.add_argument("--profiled", type=int, default=300, help="rounds of it, part by part")
    parser.add_argument("--seed", type=int, help="of the order of the calls; printed")
    parser.add_argument("--save", action="store_true", help="write docs/dev/benchmarks.md")


def benchmark(options: argparse.Namespace) -> None:
    """Run it; the tables go to standard output, and with ``--save`` into the docs."""
    seed = seeded(options.seed)
    how = f"{options.rounds} rounds of each of {options.starts} processes, seed {seed}"
    about = conditions(_PACKAGES, how)
    starts = [
        _start(options.rounds, options.profiled, seed + number) for number in range(options.starts)
    ]
    text = report.as_table(starts)
    print(f"\n{text}\n" + "\n".join(report.verdicts(starts)))
    if options.save:
        publish(
            "publishing", f"{text}\n{about}\n", report.as_data(starts), [report.as_chart(starts)]
        )


def _start(rounds: int, profiled: int, seed: int) -> report.Start:
    """In a fresh interpreter, and with fresh servers."""
    with ExitStack() as stack:
        broker, locks = (
            stack.enter_context(PrivateServer(binary=find_binary())).url() for _ in range(2)
        )
        ran = subprocess.run(
            [sys.executable, "-m", _CALLS, str(rounds), str(profiled), str(seed)],
            cwd=ROOT,
            env={**os.environ, "BROKER_URL": broker, "LOCK_URL": locks},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return report.Start(**json.loads(ran.stdout))
