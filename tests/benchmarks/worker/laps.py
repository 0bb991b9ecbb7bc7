"""What was measured, block by block, and the numbers that it comes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from tests.benchmarks.samples import Spread
from tests.benchmarks.worker.contenders import CELERY
from tests.benchmarks.worker.estimate import after_own_kind, estimate, first_of_runs, pace
from tests.benchmarks.worker.stage import Seen

__all__ = ["Block", "Laps", "Statistic", "as_block", "over", "pair", "together", "whole"]

What = Literal["tasks", "first", "processor", "publishing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What was seen of one: middles, in seconds, by contender.

    Attributes:
        tasks: The time of a task that follows one of its own kind.
        first: The time of one that follows another's; solo alone.
        processor: The processor time of one that follows one of its own kind; in prefork, of all
            the worker's processes.
        publishing: The time of a call that follows one of its own kind.
        pair: A raw pair among others.
    """

    tasks: dict[str, float]
    first: dict[str, float]
    processor: dict[str, float]
    publishing: dict[str, float]
    pair: float


def as_block(order: Sequence[str], seen: Seen) -> Block:
    """What was ``seen`` of messages in this ``order``."""
    solo = bool(seen.seconds)
    return Block(
        tasks=after_own_kind(order, seen.seconds) if solo else pace(order, seen.taken),
        first=first_of_runs(order, seen.seconds) if solo else {},
        processor=(after_own_kind(order, seen.processor) if solo else pace(order, seen.processor)),
        publishing=after_own_kind(order, seen.publishing),
        pair=median(seen.pairs),
    )


#: One number, of some blocks.
Statistic = Callable[[Sequence[Block]], float]


def over(what: What, name: str) -> Statistic:
    """How much more it is than with Celery alone, taken within each block."""

    def statistic(blocks: Sequence[Block]) -> float:
        numbers: list[dict[str, float]] = [getattr(block, what) for block in blocks]
        return median(one[name] - one[CELERY] for one in numbers)

    return statistic


def together(name: str) -> Statistic:
    """How much more publishing a task and running it take."""
    running, publishing = over("tasks", name), over("publishing", name)
    return lambda blocks: running(blocks) + publishing(blocks)


def whole(name: str) -> Statistic:
    """All of a task, with what Celery does."""
    return lambda blocks: median(block.tasks[name] for block in blocks)


def pair(blocks: Sequence[Block]) -> float:
    """A raw pair among others."""
    return median(block.pair for block in blocks)


@dataclass(slots=True)
class Laps:
    """What was measured on one course: the blocks of each start."""

    starts: list[list[Block]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The names of the contenders."""
        return list(self.starts[0][0].tasks)

    @property
    def sizes(self) -> str:
        """How many blocks each start had."""
        return ", ".join(str(len(blocks)) for blocks in self.starts)

    def of(self, one: Statistic) -> Spread:
        """``one``, and its interval."""
        return estimate(self.starts, one)

    def ratio(self, one: Statistic, other: Statistic) -> Spread:
        """``one`` as a multiple of ``other``; of use where ``other`` is far from 0."""
        return estimate(self.starts, lambda blocks: one(blocks) / other(blocks))

    def excess(self, one: Statistic, other: Statistic, most: float) -> Spread:
        """By how much ``one`` is more than ``most`` times ``other``, which may be near 0."""
        return estimate(self.starts, lambda blocks: one(blocks) - most * other(blocks))
