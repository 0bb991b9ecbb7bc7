"""What laps with and without `-E` come to: pure functions of seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from statistics import median
from typing import Any, Final

from tests.benchmarks.samples import Spread, spread
from tests.benchmarks.worker.estimate import estimate

__all__ = ["KINDS", "LOCKED", "PLAIN", "Lap", "Round", "as_data", "as_table", "verdicts"]

PLAIN: Final = "plain"
LOCKED: Final = "locked"
#: Each combination of a task and of whether the worker sends events.
KINDS: Final = [(task, events) for task in (PLAIN, LOCKED) for events in (False, True)]

_MICROSECONDS: Final = 1e6
# Seconds that a singleton task may take more in a worker that sends events.
_GOAL: Final = 60e-6
# The share of a core that serve may take.
_SERVE_GOAL: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """Seconds for each task of a lap.

    Attributes:
        time: From the arrival of the first task to the end of the last.
        parent: Processor time of the worker's parent, with the events that it sends afterwards.
        threads: The part of it that is not of the main thread: this library's threads.
        child: Processor time of the pool's process.
    """

    time: float
    parent: float
    threads: float
    child: float

    @property
    def processor(self) -> float:
        """Processor time of both."""
        return self.parent + self.child


#: A lap of each of `KINDS`.
Round = Mapping[tuple[str, bool], Lap]
_What = Callable[[Lap], float]
_Row = Callable[[Round, _What], float]


def _over(task: str, events: bool, base: str, base_events: bool) -> _Row:
    return lambda one, what: what(one[task, events]) - what(one[base, base_events])


def _own_events(one: Round, what: _What) -> float:
    """By how much more a singleton task exceeds a plain one if the worker sends events."""
    with_events, without = (
        what(one[LOCKED, events]) - what(one[PLAIN, events]) for events in (True, False)
    )
    return with_events - without


_OWN_EVENTS: Final = "**the events of a singleton task**, `-E`"
_CELERYS_EVENTS: Final = "Celery's own events of a task, `-E`"
_ROWS: Final[dict[str, _Row]] = {
    "Celery alone: a plain task": lambda one, what: what(one[PLAIN, False]),
    _CELERYS_EVENTS: _over(PLAIN, True, PLAIN, False),
    "a singleton task, more than a plain one": _over(LOCKED, False, PLAIN, False),
    "a singleton task, more than a plain one, both with `-E`": _over(LOCKED, True, PLAIN, True),
    _OWN_EVENTS: _own_events,
}
_COLUMNS: Final[dict[str, _What]] = {
    "time, µs": attrgetter("time"),
    "processor time of the parent, µs": attrgetter("parent"),
    "of its threads that send, µs": attrgetter("threads"),
    "of the pool process, µs": attrgetter("child"),
    "of both, µs": attrgetter("processor"),
}


def as_table(rounds: Sequence[Round]) -> str:
    """Markdown: a row for each difference between the laps of a round."""
    heads = ["no-op", *_COLUMNS, "of both, times Celery's own events"]
    rows = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for name, row in _ROWS.items():
        cells = [
            _text(spread([row(one, what) * _MICROSECONDS for one in rounds]), 0)
            for what in _COLUMNS.values()
        ]
        rows.append(f"| {name} | {' | '.join(cells)} | {_text(_times(rounds, row), 2)} |")
    return "\n".join(rows) + "\n"


def as_data(rounds: Sequence[Round]) -> dict[str, Any]:
    """Plain data, in seconds."""
    return {
        name.replace("*", ""): {
            **{
                what: asdict(spread([row(one, attrgetter(what)) for one in rounds]))
                for what in ("time", "parent", "threads", "child", "processor")
            },
            "times_celerys_own_events": asdict(_times(rounds, row)),
        }
        for name, row in _ROWS.items()
    }


def verdicts(starts: Sequence[Sequence[Round]], share: float) -> list[str]:
    """How it stands with the goals; open: the interval of the median has both answers in it.

    Args:
        starts: The rounds of each start of the workers.
        share: The share of a core, that `serve` took.
    """
    lines = []
    for column, what in {"time": "time", "processor time": "processor"}.items():
        getter: _What = attrgetter(what)
        found = estimate(starts, lambda rounds, g=getter: median(_own_events(r, g) for r in rounds))
        word = "reached" if found.high <= _GOAL else "MISSED" if found.low > _GOAL else "open"
        micros = Spread(*(number * _MICROSECONDS for number in asdict(found).values()))
        lines.append(
            f"{word}: the events of a singleton task add {_text(micros, 0)} µs of {column}; "
            f"wanted: at most {_GOAL * _MICROSECONDS:g}"
        )
    word = "reached" if share < _SERVE_GOAL else "MISSED"
    lines.append(f"{word}: serve takes {share:.1%} of a core; wanted: less than {_SERVE_GOAL:.0%}")
    return lines


def _times(rounds: Sequence[Round], row: _Row) -> Spread:
    """As a multiple of Celery's own events, round by round."""
    what: _What = attrgetter("processor")
    celerys = _ROWS[_CELERYS_EVENTS]
    return spread([row(one, what) / celerys(one, what) for one in rounds])


def _text(numbers: Spread, digits: int) -> str:
    return f"{numbers.middle:.{digits}f} [{numbers.low:.{digits}f} .. {numbers.high:.{digits}f}]"
