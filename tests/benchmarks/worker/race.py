"""All contenders in rounds, in shuffled order, and what it comes to: seconds over plain Celery."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from tests.benchmarks.samples import Spread, spread
from tests.benchmarks.wire import Count
from tests.benchmarks.worker.contenders import CELERY, CONTENDERS
from tests.benchmarks.worker.waves import Course, Stage, Wave

__all__ = ["Laps", "Plan", "count", "race"]

_COUNTED_TASKS: Final = 20
_CONCURRENCY: Final = {"solo": 1, "prefork": 2}
# A wave of bodies that take time has fewer of them.
_SLOWER_BY: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured.

    Attributes:
        courses: Which.
        generations: How often the workers are started anew: where their memory lies makes a
            difference that no number of rounds evens out.
        rounds: Of each course, per generation; in each, every contender has one wave.
        tasks: Of a wave of no-ops.
        order: Shuffles the waves of each round.
    """

    courses: Sequence[Course]
    generations: int
    rounds: int
    tasks: int
    order: random.Random


@dataclass(slots=True)
class Laps:
    """What was measured on one course: contenders by name, a number per round.

    Attributes:
        waves: Of each contender.
        pair: Seconds of a raw pair.
    """

    waves: dict[str, list[Wave]] = field(default_factory=dict)
    pair: list[float] = field(default_factory=list)

    def tasks(self, name: str) -> list[float]:
        """Seconds of a task."""
        return [wave.task for wave in self.waves[name]]

    def overheads(self, name: str) -> list[float]:
        """Seconds that a task takes more than one of Celery alone."""
        pairs = zip(self.tasks(name), self.tasks(CELERY), strict=True)
        return [one - plain for one, plain in pairs]

    def processor(self, name: str) -> list[float]:
        """Seconds of processor time that the worker needs more; it is the same on a busy machine,
        but lacks what a task waits for."""
        pairs = zip(self.waves[name], self.waves[CELERY], strict=True)
        return [wave.processor - plain.processor for wave, plain in pairs]

    def publishing(self, name: str) -> list[float]:
        """Seconds that publishing one takes more than with Celery alone."""
        pairs = zip(self.waves[name], self.waves[CELERY], strict=True)
        return [median(wave.publishing) - median(plain.publishing) for wave, plain in pairs]

    def together(self, name: str) -> list[float]:
        """Seconds that publishing one and running it take more."""
        pairs = zip(self.overheads(name), self.publishing(name), strict=True)
        return [running + publishing for running, publishing in pairs]

    def in_pairs(self, name: str) -> Spread:
        """Overheads as multiples of a raw pair of the same round."""
        return _ratio(self.overheads(name), self.pair)

    def over_plain(self, name: str) -> Spread:
        """Overheads as multiples of all that Celery alone does for a task."""
        return _ratio(self.overheads(name), self.tasks(CELERY))

    def publishing_over(self, name: str, peer: str) -> Spread:
        """What publishing one costs more, as a multiple of what it costs a peer more."""
        return _ratio(self.publishing(name), self.publishing(peer))


def race(stage: Stage, plan: Plan) -> dict[Course, Laps]:
    """Run it all."""
    found = {course: Laps() for course in plan.courses}
    for _ in range(plan.generations):
        for pool in dict.fromkeys(course.pool for course in plan.courses):
            with stage.workers(pool, _CONCURRENCY[pool]):
                _warm_up(stage, _CONCURRENCY[pool])
                for _ in range(plan.rounds):
                    for course, laps in found.items():
                        if course.pool == pool:
                            _round(stage, plan, course, laps)
    return found


def count(stage: Stage) -> dict[str, Count]:
    """What one task of each contender asks of the locks' server, at the worker."""
    with stage.workers("solo", 1, counting=True):
        _warm_up(stage, 1)
        waves = {one.name: stage.wave(one, _COUNTED_TASKS, 0.0) for one in CONTENDERS}
    return {
        name: Count(
            round(wave.sent.requests / wave.tasks), round(wave.sent.round_trips / wave.tasks)
        )
        for name, wave in waves.items()
    }


def _warm_up(stage: Stage, processes: int) -> None:
    for contender in CONTENDERS:
        stage.wave(contender, 20 * processes, 0.0)


def _round(stage: Stage, plan: Plan, course: Course, laps: Laps) -> None:
    tasks = max(1, plan.tasks // _SLOWER_BY) if course.seconds else plan.tasks
    contenders = [*CONTENDERS, None]  # None: the unit
    plan.order.shuffle(contenders)
    for contender in contenders:
        if contender is None:
            laps.pair.append(median(stage.pairs(plan.tasks)))
        else:
            wave = stage.wave(contender, tasks, course.seconds)
            laps.waves.setdefault(contender.name, []).append(wave)


def _ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    return spread([one / other for one, other in zip(over, under, strict=True)])
