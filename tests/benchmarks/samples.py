"""What was measured of each contender, and what it comes to: pure functions of seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

__all__ = ["Rounds", "Spread", "each_over", "ratios", "spread"]

#: Seconds of each cycle, round by round. All contenders have as many rounds.
Rounds = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some numbers, and between what half of them lie."""

    low: float  # a quarter is below
    middle: float
    high: float  # a quarter is above


def spread(numbers: Sequence[float]) -> Spread:
    """The quartiles of ``numbers``; one number alone is all three."""
    if len(numbers) == 1:
        return Spread(numbers[0], numbers[0], numbers[0])
    low, middle, high = quantiles(numbers, n=4, method="inclusive")
    return Spread(low, middle, high)


def ratios(measured: Mapping[str, Rounds], reference: str) -> dict[str, Spread]:
    """How many times as long as ``reference`` each takes, round by round.

    A round is short, so whatever else the machine does slows all contenders of it alike, and
    cancels out; over the whole run it doesn't.
    """
    return {name: spread(numbers) for name, numbers in each_over(measured, reference).items()}


def each_over(measured: Mapping[str, Rounds], reference: str) -> dict[str, list[float]]:
    """The same, a number for each round."""
    middles = {name: [median(times) for times in rounds] for name, rounds in measured.items()}
    return {
        name: [one / its for one, its in zip(own, middles[reference], strict=True)]
        for name, own in middles.items()
    }
