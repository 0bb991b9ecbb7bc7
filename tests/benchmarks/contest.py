"""Contenders on one store, side by side: interleaved, in shuffled order, in one process."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from tests.benchmarks.samples import Rounds

__all__ = ["Contender", "Result", "Role", "run"]

# Distinct lock keys, each used in turn: a worker's keys repeat, but not one after the other.
_KEYS: Final = 64
_MIN_CYCLES: Final = 5


class Role(StrEnum):
    OURS = "ours"
    PEER = "peer"  # what users would take there: we want to be ahead of it
    FLOOR = "floor"  # less than a lock: what the least possible costs
    INFORMATION = "information"


@dataclass(frozen=True, slots=True)
class Contender:
    """A lock, as a task would use it.

    Attributes:
        name: In the table.
        role: What it is compared for.
        acquire: Takes the lock of a name, without waiting; what it returns is given to ``release``.
            Raises where it isn't granted: there is no other client.
        release: Gives it back.
    """

    name: str
    role: Role
    acquire: Callable[[str], Any]
    release: Callable[[Any], object]

    def cycle(self, number: int) -> None:
        """Acquire and release one lock."""
        self.release(self.acquire(f"key-{number % _KEYS}"))


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured on one store; contenders by name."""

    roles: dict[str, Role]
    seconds: dict[str, Rounds]


@dataclass(slots=True)
class _Turn:
    """One contender's: it goes on with the next key."""

    contender: Contender
    cycles: int = _MIN_CYCLES
    number: int = 0
    rounds: list[list[float]] = field(default_factory=list)

    def take(self) -> list[float]:
        """A block of cycles; seconds of each."""
        # Garbage of the block before is collected before this one, and none within: what a
        # collection costs must not depend on whose turn it falls into.
        gc.collect()
        gc.disable()
        try:
            times = []
            for number in range(self.number, self.number + self.cycles):
                begin = time.perf_counter()
                self.contender.cycle(number)
                times.append(time.perf_counter() - begin)
        finally:
            gc.enable()
        self.number += self.cycles
        return times


def run(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    block: float,
    order: random.Random,
) -> Result:
    """Warm up, and measure.

    Args:
        contenders: All of one store.
        rounds: In each, every contender has one block.
        block: Seconds that a contender's block takes, about.
        order: Shuffles the contenders of each round.
    """
    turns = [_Turn(contender) for contender in contenders]
    for turn in turns:
        _warm_up(turn, block)
    for _ in range(rounds):
        order.shuffle(turns)
        for turn in turns:
            turn.rounds.append(turn.take())
    return Result(
        {contender.name: contender.role for contender in contenders},
        {turn.contender.name: turn.rounds for turn in turns},
    )


def _warm_up(turn: _Turn, block: float) -> None:
    """Every key once, and as many cycles from now on as fit into a block."""
    turn.cycles = _KEYS
    turn.take()
    times = sorted(turn.take())
    turn.cycles = max(_MIN_CYCLES, round(block / times[len(times) // 2]))
