"""``python -m tests.ci``: what a delivery has to pass. Needs nothing but Python.

    bash .ci/run                 packages, check, docs, make test, one part of the slow rest
    bash .ci/run --part 3        that part of the rest
    make test-all                every part of the rest

Which part follows from the number of commits, so that consecutive commits run all of them. It goes
on after a failed step, and ends with one table. The exit status is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from tests.ci import record
from tests.ci.processes import end_all
from tests.ci.step import Result, Runner, Step

#: Parts of the slow tests (tests/ci/parts.py), and of those that run alone: each takes five or six
#: minutes at most on two cores.
SLOW_PARTS, ALONE_PARTS = 10, 2

#: Other versions of Celery, kombu and redis-py that users have, as a file of constraints/, each
#: with another server: all of `make test` has to pass. `redis-server` is what the system packages.
VERSIONS = {
    "celery-5.5": "redis-6.2",
    "celery-5.6-redis-6": "redis-server",
    "celery-5.6": "redis-8.2",
}

#: Seconds. Installing system packages takes 60 to 120 of a new machine, and a step of tests half
#: its limit; together they would be above the limit of all.
LIMIT = 2340.0
_INSTALL, _CHECK, _TEST, _PART = 420.0, 240.0, 720.0, 720.0


#: What all steps need.
PACKAGES = Step(name="packages", command=("bash", ".ci/run", "packages", "all"), limit=_INSTALL)


def always() -> list[Step]:
    """The steps of each delivery, after the packages."""
    return [
        Step(name="check", command=("make", "check"), limit=_CHECK),
        Step(name="docs", command=("make", "docs"), limit=_CHECK),
        # The server that a machine without one gets.
        Step(name="test", command=("make", "test", "SERVER=embedded"), limit=_TEST, tests=True),
    ]


def parts() -> list[Step]:
    """The slow rest, of which a delivery runs one part."""
    found = [
        *_in_parts("slow", "test-slow", SLOW_PARTS),
        *_in_parts("alone", "test-alone", ALONE_PARTS),
        *(_with_versions(*each) for each in VERSIONS.items()),
        Step(name="agents", command=("make", "test-agents"), limit=_PART, tests=True),
        Step(name="RabbitMQ 4", command=("make", "test-rabbitmq"), limit=_PART, tests=True),
    ]
    if shutil.which("python3.14"):
        newest = ("make", "test", "PYTHON=python3.14", "VENV=.venv-python3.14")
        found.append(Step(name="newest Python", command=newest, limit=_PART, tests=True))
    return found


def _with_versions(versions: str, server: str) -> Step:
    command = ("make", "test", f"VERSIONS={versions}", f"SERVER={server}")
    return Step(name=versions, command=command, limit=_PART, tests=True)


def _in_parts(name: str, target: str, count: int) -> list[Step]:
    return [
        Step(
            name=f"{name} {number} of {count}",
            command=("make", target),
            args=f"--part={number}/{count}",
            limit=_PART,
            tests=True,
        )
        for number in range(1, count + 1)
    ]


def main() -> int:
    """The exit status."""
    options = _options()
    rest = parts()
    if options.rest:
        steps, seconds = rest, float("inf")
    else:
        number = options.part or _commits() % len(rest) + 1
        chosen = rest[number - 1]
        print(f"part {number} of {len(rest)} of the slow rest: {chosen.name}", flush=True)
        steps, seconds = [chosen] if options.part else [*always(), chosen], LIMIT
    steps = [PACKAGES, *steps]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    run = uuid.uuid4().hex
    # A short path: it is the beginning of the paths of sockets, which have 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="ci-"))
    results: list[Result] = []
    try:
        runner = Runner(run=run, folder=folder, seconds=seconds)
        results.extend(runner.take(step) for step in steps)
    finally:
        end_all(run)
        if options.rest:
            for result in results:
                if "test-slow" in result.step.command:
                    record.update(result.modules)
        shutil.rmtree(folder, ignore_errors=True)
        report(results, steps)
    return 0 if all(result.ok for result in results) else 1


def report(results: Sequence[Result], steps: Sequence[Step]) -> None:
    """Print the table, the names below it, and last the count of the tests."""
    width = max(len(step.name) for step in steps)
    print(f"\n{'step':<{width}}  seconds  passed  failed  unsteady  result")
    ended = {result.step: result for result in results}
    for step in steps:
        result = ended.get(step) or Result(step=step, word="not run")
        print(
            f"{step.name:<{width}}  {result.seconds:7.0f}  {result.passed:6}"
            f"  {len(result.failed):6}  {len(result.unsteady):8}  {result.word}"
        )
    print(f"{'':<{width}}  {sum(result.seconds for result in results):7.0f}")
    for word in ("unsteady", "failed"):
        for result in results:
            for name in getattr(result, word):
                print(f"{word}: {name}")
    failed = sum(len(result.failed) for result in results)
    print(f"{sum(result.passed for result in results)} passed, {failed} failed", flush=True)


def _commits() -> int:
    """How many there are; none in an unpacked source archive, or without git."""
    if shutil.which("git") is None:
        return 0
    counted = subprocess.run(["git", "rev-list", "--count", "HEAD"], capture_output=True, text=True)
    return int(counted.stdout or 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bash .ci/run", description="What a delivery has to pass."
    )
    choice = parser.add_mutually_exclusive_group()
    numbers = range(1, len(parts()) + 1)
    choice.add_argument("--part", type=int, choices=numbers, help="that part of the rest alone")
    choice.add_argument("--rest", action="store_true", help="every part of the rest")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
