"""`python -m tests.benchmarks worker`: what a lock adds to a task, beside the peers."""

from __future__ import annotations

import argparse
import random
from typing import Final

from tests.benchmarks.machine import conditions, seeded
from tests.benchmarks.publication import publish
from tests.benchmarks.worker.contenders import CELERY, Contender, contenders_of
from tests.benchmarks.worker.report import Block, Course, as_block, as_chart, as_table
from tests.benchmarks.worker.stage import Stage, staged

__all__ = ["add_options", "benchmark", "runs"]

_POOLS: Final = ("solo", "prefork")
_PACKAGES: Final = (
    *("celery-singleton-lock", "celery", "kombu", "redis", "celery-once", "celery-singleton"),
)
# Messages of one contender in a row. Where children run them, some are under way at once.
_RUN: Final = {"solo": 7, "prefork": 20}
# Celery alone is the other side of every difference: it has more runs, because its noise is in all.
_RUNS_OF_CELERY: Final = 3
_WARM_UP: Final = 40


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
    parser.add_argument("--seed", type=int, help="of the order of the tasks; printed")
    parser.add_argument("--save", action="store_true", help="write docs/dev/benchmarks.md")


def benchmark(options: argparse.Namespace) -> None:
    """Run it; the tables go to standard output, and with ``--save`` into the docs."""
    seed = seeded(options.seed)
    how = f"{options.starts} starts of each worker, {options.blocks} blocks each, seed {seed}"
    about = conditions(_PACKAGES, how)
    order, work = random.Random(seed), options.work if options.work is not None else [0, 10]
    pools = options.pool or _POOLS
    found: dict[Course, list[list[Block]]] = {
        Course(pool, ms / 1000): [] for pool in pools for ms in work
    }
    with staged() as stage:
        for start in range(options.starts):
            for pool in pools:
                with stage.worker(pool):
                    _warm_up(stage)
                    for course, starts in found.items():
                        if course.pool == pool:
                            field = contenders_of(course.seconds)
                            starts.append(
                                [_block(stage, course, field, order) for _ in range(options.blocks)]
                            )
            print(f"start {start + 1} of {options.starts} is done", flush=True)
    text = "\n".join(as_table(course, starts) for course, starts in found.items())
    print(f"\n{text}")
    if options.save:
        first = next(iter(found))
        publish("worker", f"{text}\n{about}\n", as_chart(first, found[first]))


def _warm_up(stage: Stage) -> None:
    """Let every process of a new worker, and this one, have seen every contender."""
    field = contenders_of(0.0)
    stage.block([one for one in field for _ in range(_WARM_UP)], 0.0)


def _block(stage: Stage, course: Course, field: list[Contender], order: random.Random) -> Block:
    messages = runs(field, _RUN[course.pool], order)
    return as_block([one.name for one in messages], stage.block(messages, course.seconds))


def runs(field: list[Contender], length: int, order: random.Random) -> list[Contender]:
    """The messages of one block: ``length`` of each in a row, those of Celery alone thrice."""
    shuffled = [*field, *[CELERY] * (_RUNS_OF_CELERY - 1)]
    order.shuffle(shuffled)
    return [one for one in shuffled for _ in range(length)]
