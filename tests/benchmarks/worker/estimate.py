"""From blocks to one number, and how far it can be trusted.

A block is short, so what slows the machine slows all that is compared in it. A statistic is taken
over all blocks of all starts of the worker, and taken again with starts and blocks drawn from
these at random, each as often as it comes: 95 of 100 such results lie within the interval. (The
bootstrap; Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.) Starts are
drawn too, for where a worker's memory lies makes a difference that no number of its blocks evens
out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, TypeVar

from tests.benchmarks.samples import Spread

__all__ = ["after_own_kind", "estimate", "first_of_runs", "pace"]

T = TypeVar("T")

_DRAWS: Final = 200
_OUTSIDE: Final = 0.025
# Between the first and this one that is taken, another contender's may still run.
_OVERLAP: Final = 2


def estimate(starts: Sequence[Sequence[T]], statistic: Callable[[Sequence[T]], float]) -> Spread:
    """``statistic`` of all blocks, and its interval.

    Args:
        starts: The blocks of each start of the worker.
        statistic: Computed from blocks, in any order and with repetitions.
    """
    draw = random.Random(0)  # the same data give the same interval
    results = []
    for _ in range(_DRAWS):
        blocks: list[T] = []
        for blocks_of_one in draw.choices(starts, k=len(starts)):
            blocks += draw.choices(blocks_of_one, k=len(blocks_of_one))
        results.append(statistic(blocks))
    results.sort()
    skipped = round(_DRAWS * _OUTSIDE)
    middle = statistic([block for blocks in starts for block in blocks])
    return Spread(results[skipped], middle, results[-1 - skipped])


def after_own_kind(order: Sequence[str], numbers: Sequence[float]) -> dict[str, float]:
    """The middle of each name's numbers, but for those that follow another name's."""
    return _middles(order, numbers, first=False)


def first_of_runs(order: Sequence[str], numbers: Sequence[float]) -> dict[str, float]:
    """The middle of those that follow another name's."""
    return _middles(order, numbers, first=True)


def pace(order: Sequence[str], taken: Sequence[float]) -> dict[str, float]:
    """Seconds per message while several processes run nothing but messages of one name.

    Args:
        order: The name of each message; those of a name stand together.
        taken: When a process took it.
    """
    moments: dict[str, list[list[float]]] = {}
    for number, (name, moment) in enumerate(zip(order, taken, strict=True)):
        if not number or order[number - 1] != name:
            moments.setdefault(name, []).append([])
        moments[name][-1].append(moment)
    return {
        name: median([_pace_of_run(sorted(run)[_OVERLAP:]) for run in runs])
        for name, runs in moments.items()
    }


def _pace_of_run(taken: Sequence[float]) -> float:
    return (taken[-1] - taken[0]) / (len(taken) - 1)


def _middles(order: Sequence[str], numbers: Sequence[float], *, first: bool) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for number, (name, one) in enumerate(zip(order, numbers, strict=True)):
        if first == (not number or order[number - 1] != name):
            found.setdefault(name, []).append(one)
    return {name: median(ones) for name, ones in found.items()}
