"""`python -m tests.benchmarks worker`: what a lock adds to a task, beside the peers."""

from __future__ import annotations

import argparse
import random
from typing import Final

from tests.benchmarks.machine import conditions, seeded
from tests.benchmarks.publication import publish
from tests.benchmarks.worker import profile, report
from tests.benchmarks.worker.contenders import CONTENDERS, OURS
from tests.benchmarks.worker.laps import over
from tests.benchmarks.worker.race import Plan, count, race
from tests.benchmarks.worker.stage import Course, staged

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
    parser.add_argument("--starts", type=int, default=4, help="of the workers")
    parser.add_argument("--blocks", type=int, default=40, help="of each pool and body, per start")
    parser.add_argument("--before", metavar="REVISION", help="an earlier one, run beside this one")
    parser.add_argument("--profiled", type=int, default=150, help="blocks of ours, part by part")
    parser.add_argument("--seed", type=int, help="of the order of the tasks; printed")
    parser.add_argument(
        "--only",
        action="append",
        choices=[one.name for one in CONTENDERS],
        metavar="LOCK",
        help="beside Celery alone, the raw pair and ours; may be repeated",
    )
    parser.add_argument("--run", type=int, metavar="N", help="messages of one lock in a row")
    parser.add_argument("--save", action="store_true", help="write docs/dev/benchmarks.md")


def benchmark(options: argparse.Namespace) -> None:
    """Run it; the tables go to standard output, and with ``--save`` into the docs."""
    if options.save and (options.only or options.run):
        raise SystemExit("--save is for the whole table: leave out --only and --run")
    seed = seeded(options.seed)
    work = options.work if options.work is not None else [0, 10]
    plan = Plan(
        courses=[Course(pool, ms / 1000) for pool in options.pool or _POOLS for ms in work],
        starts=options.starts,
        blocks=options.blocks,
        order=random.Random(seed),
        run=options.run,
    )
    how = f"{options.starts} starts of each worker, {options.blocks} blocks each, seed {seed}"
    about = conditions(_PACKAGES, how, options.before)
    with staged(options.before, options.only or ()) as stage:
        counts = count(stage)
        found = race(stage, plan)
        parts = profile.profile(stage, options.profiled, plan.order)
    blocks = "; ".join(f"{course}: {laps.sizes}" for course, laps in found.items())
    about += f"\n- blocks of each start: {blocks}"
    tables = [report.as_table(course, laps, counts) for course, laps in found.items()]
    first = next(iter(found.values()))
    text, parts_text = "\n".join(tables), profile.as_table(parts, first.of(over("tasks", OURS)))
    print(f"\n{text}\n{parts_text}")
    for course, laps in found.items():
        print("\n".join(report.verdicts(course, laps)))
    if options.save:
        data, charts = report.as_data(found, counts), report.as_charts(found)
        publish("worker", f"{text}\n{about}\n", data, charts)
        publish("profile", parts_text, profile.as_data(parts), [])
