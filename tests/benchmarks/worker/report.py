"""From blocks of messages to the tables of the worker benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Final

from tests.benchmarks.contest import Role
from tests.benchmarks.plots import Bar, Chart
from tests.benchmarks.samples import Spread, estimate, in_micros
from tests.benchmarks.worker.contenders import CELERY, CONTENDERS, RAW_PAIR
from tests.benchmarks.worker.stage import Seen

__all__ = ["Block", "Course", "as_block", "as_chart", "as_table", "pace"]

# Between the first and this one that is taken, another contender's may still run.
_OVERLAP: Final = 2
_ROLES: Final = {one.name: one.role for one in CONTENDERS}


@dataclass(frozen=True, slots=True)
class Course:
    """What the worker is, and what the bodies do."""

    pool: str
    seconds: float  # that a body sleeps

    def __str__(self) -> str:
        work = f"{self.seconds * 1000:g} ms" if self.seconds else "no-op"
        return f"{self.pool}, {work}"


@dataclass(frozen=True, slots=True)
class Block:
    """Seconds per task of one block, by contender; of the clock, and of all processors."""

    tasks: dict[str, float]
    processor: dict[str, float]


def as_block(order: Sequence[str], seen: Seen) -> Block:
    """What was ``seen`` of messages in this ``order``."""
    return Block(pace(order, seen.taken), pace(order, seen.processor))


def pace(order: Sequence[str], moments: Sequence[float]) -> dict[str, float]:
    """Seconds per message while nothing but messages of one name run.

    Args:
        order: The name of each message; those of a name stand together.
        moments: What was noted when a process took it.
    """
    found: dict[str, list[float]] = {}
    for name, run in groupby(zip(order, moments, strict=True), key=lambda pair: pair[0]):
        taken = sorted(moment for _, moment in run)[_OVERLAP:]
        found.setdefault(name, []).append((taken[-1] - taken[0]) / (len(taken) - 1))
    return {name: median(paces) for name, paces in found.items()}


# Blocks of each start, and a number of some of them.
_Starts = Sequence[Sequence[Block]]
_Statistic = Callable[[Sequence[Block]], float]


def _over(name: str, what: str = "tasks") -> _Statistic:
    """How much more it is than with Celery alone, taken within each block."""

    def statistic(blocks: Sequence[Block]) -> float:
        numbers: list[dict[str, float]] = [getattr(block, what) for block in blocks]
        return median(one[name] - one[CELERY.name] for one in numbers)

    return statistic


def _in_pairs(starts: _Starts, name: str) -> Spread:
    """The same, as a multiple of a raw pair's."""
    one, pair = _over(name), _over(RAW_PAIR.name)
    return estimate(starts, lambda blocks: one(blocks) / pair(blocks))


def as_table(course: Course, starts: _Starts) -> str:
    """Markdown: what a task takes more at the worker, the least first."""
    plain = estimate(starts, lambda blocks: median(one.tasks[CELERY.name] for one in blocks))
    rows = [
        f"**{course}**: Celery alone takes {in_micros(plain)} µs a task",
        "",
        "| lock | more than Celery alone, µs | in raw pairs | processor time, µs |",
        "|---|---:|---:|---:|",
    ]
    for name in _ordered(starts):
        cells = [
            _label(name),
            in_micros(estimate(starts, _over(name))),
            str(_in_pairs(starts, name)),
            in_micros(estimate(starts, _over(name, "processor"))),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def as_chart(course: Course, starts: _Starts) -> Chart:
    """The same as multiples of a raw pair."""
    return Chart(
        name=f"worker-{course.pool}-{course.seconds * 1000:g}ms",
        title=f"What a lock adds to a task at the worker ({course})",
        unit="times SET NX PX + EVALSHA in the body; less is better",
        bars=[
            Bar(name, _in_pairs(starts, name), _ROLES[name] is Role.OURS)
            for name in _ordered(starts)
        ],
    )


def _ordered(starts: _Starts) -> list[str]:
    blocks = [block for blocks in starts for block in blocks]
    names = [name for name in blocks[0].tasks if name != CELERY.name]
    return sorted(names, key=lambda name: _over(name)(blocks))


def _label(name: str) -> str:
    if _ROLES[name] is Role.OURS:
        return f"**{name}**"
    return f"{name} (no lock)" if _ROLES[name] is Role.FLOOR else name
