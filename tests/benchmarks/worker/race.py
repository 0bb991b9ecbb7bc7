"""All contenders in blocks, each in short runs whose order is shuffled."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tests.benchmarks.wire import Count
from tests.benchmarks.worker.contenders import BY_NAME, CELERY
from tests.benchmarks.worker.laps import Block, Laps, as_block
from tests.benchmarks.worker.stage import Course, Stage

__all__ = ["Plan", "count", "race", "runs", "warm_up"]

_COUNTED_TASKS: Final = 20
_PAIRS: Final = 30
#: Messages of one contender in a row. Where children run them, some are under way at once.
_RUN: Final = {"solo": 5, "prefork": 20}
# Celery alone is the other side of every difference: it has more runs, because its noise is in all.
_RUNS_OF_CELERY: Final = 3
_WARM_UP: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        courses: Which.
        starts: How often each worker is started again.
        blocks: The blocks of each course in each start, the same number in all pools.
        order: Shuffles the runs of each block.
        run: Messages of one contender in a row; None: as many as suit the pool.
    """

    courses: Sequence[Course]
    starts: int
    blocks: int
    order: random.Random
    run: int | None = None


def race(stage: Stage, plan: Plan) -> dict[Course, Laps]:
    """Run it all."""
    found = {course: Laps() for course in plan.courses}
    for start in range(plan.starts):
        for pool in dict.fromkeys(course.pool for course in plan.courses):
            with stage.worker(pool):
                warm_up(stage, pool)
                for course, laps in found.items():
                    if course.pool == pool:
                        laps.starts.append(
                            [_block(stage, plan, course) for _ in range(plan.blocks)]
                        )
        print(f"start {start + 1} of {plan.starts} is done", flush=True)
    return found


def count(stage: Stage) -> dict[str, Count]:
    """What one task of each contender asks of the locks' server, at the worker."""
    found = {}
    with stage.worker("solo", counting=True):
        warm_up(stage, "solo")
        for contender in stage.contenders(0.0):
            sent = stage.block([contender] * _COUNTED_TASKS, 0.0).sent
            found[contender.name] = Count(
                round(sent.requests / _COUNTED_TASKS), round(sent.round_trips / _COUNTED_TASKS)
            )
    return found


def warm_up(stage: Stage, pool: str) -> None:
    """Let every process of a new worker, and this one, have seen every contender."""
    tasks = _WARM_UP if pool == "solo" else 2 * _WARM_UP
    field = stage.contenders(0.0)
    stage.block([one for one in field for _ in range(tasks)], 0.0, pairs=_WARM_UP)


def runs(names: Sequence[str], length: int, order: random.Random) -> list[str]:
    """The messages of one block: ``length`` of each name in a row, those of Celery alone thrice."""
    shuffled = [*names, *[CELERY] * (_RUNS_OF_CELERY - 1)]
    order.shuffle(shuffled)
    return [name for name in shuffled for _ in range(length)]


def _block(stage: Stage, plan: Plan, course: Course) -> Block:
    field = [one.name for one in stage.contenders(course.seconds)]
    names = runs(field, plan.run or _RUN[course.pool], plan.order)
    seen = stage.block([BY_NAME[name] for name in names], course.seconds, pairs=_PAIRS)
    return as_block(names, seen)
