"""`python -m tests.benchmarks worker`: what a lock adds to a task, beside the peers."""

from __future__ import annotations

import argparse
import random
from typing import Final

from tests.benchmarks.machine import machine, packages, servers
from tests.benchmarks.publication import publish
from tests.benchmarks.worker.race import Plan, count, race
from tests.benchmarks.worker.report import (
    as_charts,
    as_data,
    as_publishing_table,
    as_table,
    verdicts,
)
from tests.benchmarks.worker.waves import Course, staged

__all__ = ["add_options", "benchmark"]

_POOLS: Final = ("solo", "prefork")
_PACKAGES: Final = (
    *("celery-singleton-lock", "celery", "kombu", "redis", "celery-once", "celery-singleton"),
    *("celery-heimdall", "python-redis-lock", "pottery"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of this benchmark."""
    parser.add_argument("--pool", action="append", choices=_POOLS, help="may be repeated")
    parser.add_argument(
        "--work",
        action="append",
        type=float,
        metavar="MS",
        help="milliseconds of a body, 0 and 10 by default; may be repeated",
    )
    parser.add_argument("--rounds", type=int, default=10, help="per start of the workers")
    parser.add_argument("--generations", type=int, default=2, help="starts of the workers")
    parser.add_argument("--tasks", type=int, default=100, help="of a wave of no-ops")
    parser.add_argument("--seed", type=int, help="of the order of the waves; printed")
    parser.add_argument("--save", action="store_true", help="write docs/benchmarks.md")


def benchmark(options: argparse.Namespace) -> None:
    """Run it; the tables go to standard output, and with ``--save`` into the docs."""
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    work = options.work if options.work is not None else [0, 10]
    plan = Plan(
        courses=[Course(pool, ms / 1000) for pool in options.pool or _POOLS for ms in work],
        generations=options.generations,
        rounds=options.rounds,
        tasks=options.tasks,
        order=random.Random(seed),
    )
    about = "\n".join(
        [
            f"- {machine()}",
            f"- {servers()}",
            f"- {packages(_PACKAGES)}",
            f"- {options.generations} times {options.rounds} rounds of {options.tasks} tasks, "
            f"seed {seed}",
        ]
    )
    print(about, flush=True)
    with staged() as stage:
        counts = count(stage)
        found = race(stage, plan)
    tables = [as_table(course, laps, counts) for course, laps in found.items()]
    tables.append(as_publishing_table(next(iter(found.values()))))
    text = "\n".join(tables)
    print(f"\n{text}")
    for course, laps in found.items():
        print("\n".join(verdicts(course, laps)))
    if options.save:
        publish("worker", f"{text}\n{about}\n", as_data(found, counts), as_charts(found))
