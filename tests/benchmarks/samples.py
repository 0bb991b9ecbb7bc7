"""From what was measured to one number, and how far it can be trusted: pure functions.

What is compared is measured in rounds so short that whatever slows the machine slows all that is
compared in one; differences and ratios are taken within a round.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Final, TypeVar

__all__ = ["Rounds", "Spread", "estimate", "in_micros", "ratios", "spread"]

#: Seconds of each cycle, round by round. All contenders have as many rounds.
Rounds = Sequence[Sequence[float]]

T = TypeVar("T")

_DRAWS: Final = 200
_OUTSIDE: Final = 0.025


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some numbers, and between what half of them lie; or an interval."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} [{self.low:.2f} .. {self.high:.2f}]"


def spread(numbers: Sequence[float]) -> Spread:
    """The quartiles of ``numbers``; one number alone is all three."""
    if len(numbers) == 1:
        return Spread(numbers[0], numbers[0], numbers[0])
    return Spread(*quantiles(numbers, n=4, method="inclusive"))


def in_micros(seconds: Spread) -> str:
    """For a table, in whole microseconds."""
    low, middle, high = (one * 1e6 for one in (seconds.low, seconds.middle, seconds.high))
    return f"{middle:.0f} [{low:.0f} .. {high:.0f}]"


def ratios(measured: Mapping[str, Rounds], reference: str) -> dict[str, Spread]:
    """How many times as long as ``reference`` each takes, round by round."""
    middles = {name: [median(times) for times in rounds] for name, rounds in measured.items()}
    return {
        name: spread([one / its for one, its in zip(own, middles[reference], strict=True)])
        for name, own in middles.items()
    }


def estimate(starts: Sequence[Sequence[T]], statistic: Callable[[Sequence[T]], float]) -> Spread:
    """``statistic`` of all rounds, and the interval of 95 of 100 such results.

    These are of starts and rounds drawn at random, each as often as it comes (the bootstrap; Efron
    and Tibshirani, 1993, chapter 13). Starts are drawn too, for where a process's memory lies makes
    a difference that no number of its rounds evens out.

    Args:
        starts: The rounds of each start of what was measured.
        statistic: Computed from rounds, in any order and with repetitions.
    """
    draw = random.Random(0)  # the same data give the same interval
    results = []
    for _ in range(_DRAWS):
        rounds: list[T] = []
        for rounds_of_one in draw.choices(starts, k=len(starts)):
            rounds += draw.choices(rounds_of_one, k=len(rounds_of_one))
        results.append(statistic(rounds))
    results.sort()
    skipped = round(_DRAWS * _OUTSIDE)
    middle = statistic([one for rounds in starts for one in rounds])
    return Spread(results[skipped], middle, results[-1 - skipped])
