"""What the worker benchmark has found: tables, data, charts, and how it stands with the goals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from tests.benchmarks.contest import Role
from tests.benchmarks.plots import Bar, Chart
from tests.benchmarks.samples import Spread
from tests.benchmarks.wire import Count
from tests.benchmarks.worker.contenders import (
    BEFORE,
    BESIDE,
    BY_NAME,
    CELERY,
    OURS,
    RAW_PAIR,
    SKIP,
)
from tests.benchmarks.worker.laps import Laps, Statistic, over, pair, together, whole
from tests.benchmarks.worker.stage import Course

__all__ = ["as_charts", "as_data", "as_table", "verdicts"]

_MICROSECONDS: Final = 1e6
_NO_MORE: Final = 1.0


def as_table(course: Course, laps: Laps, counts: Mapping[str, Count]) -> str:
    """Markdown: what a task takes more at the worker, the least first."""
    solo = course.pool == "solo"
    heads = ["lock", "more than Celery alone, µs", "in pairs of a body", "in pairs of a loop"]
    heads.append("processor time, µs" if solo else "processor time of all processes, µs")
    if solo:
        heads += ["after other tasks, µs", "with publishing, µs"]
    heads.append("replies waited for")
    in_body, in_loop = _micros(laps.of(over("tasks", RAW_PAIR))), _micros(laps.of(pair))
    rows = [
        f"**{course}**: Celery alone takes {_micros(laps.of(whole(CELERY)))} µs a task; a raw pair "
        f"{in_body} µs in a body, {in_loop} µs in a loop",
        "",
        f"| {' | '.join(heads)} |",
        f"|---|{'---:|' * (len(heads) - 1)}",
    ]
    for name in _ordered(laps):
        cells = [_label(name), _micros(laps.of(over("tasks", name)))]
        cells += [_text(_in_bodies(laps, name)), _text(laps.ratio(over("tasks", name), pair))]
        cells.append(_micros(laps.of(over("processor", name))))
        if solo:
            cells.append(_micros(laps.of(over("first", name))))
            cells.append(_micros(laps.of(together(name))))
        cells.append(str(counts[name].requests) if name in counts else "")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def as_data(found: Mapping[Course, Laps], counts: Mapping[str, Count]) -> dict[str, Any]:
    """Plain data, in seconds."""
    return {
        str(course): {
            "raw_pair_in_loop": asdict(laps.of(pair)),
            "blocks": [len(blocks) for blocks in laps.starts],
            "contenders": {name: _data(course, laps, name, counts) for name in laps.names},
        }
        for course, laps in found.items()
    }


def as_charts(found: Mapping[Course, Laps]) -> list[Chart]:
    """One per course."""
    return [
        Chart(
            name=f"worker-{course.pool}-{course.seconds * 1000:g}ms",
            title=f"What a lock adds to a task at the worker ({course})",
            unit="times SET NX PX + EVALSHA in the body; less is better",
            bars=[_bar(name, _in_bodies(laps, name)) for name in _ordered(laps)],
        )
        for course, laps in found.items()
    ]


def verdicts(course: Course, laps: Laps) -> list[str]:
    """How it stands with what we want, a line each; open: the interval has both answers in it."""
    ours = over("tasks", OURS)
    lines = [
        _verdict("a task adds, in raw pairs of a body,", laps, ours, over("tasks", RAW_PAIR)),
        _verdict("a task adds, in raw pairs of a loop,", laps, ours, pair),
    ]
    for name in laps.names:
        if BY_NAME[name].role is Role.PEER:
            lines.append(_verdict(f"a task adds, times {name},", laps, ours, over("tasks", name)))
            text = f"a task adds in processor time, times {name},"
            lines.append(_verdict(text, laps, over("processor", OURS), over("processor", name)))
    if BEFORE in laps.names:
        text = "a task takes, times the earlier revision's,"
        lines.append(_verdict(text, laps, whole(OURS), whole(BEFORE)))
    if SKIP in laps.names:
        skip = over("tasks", SKIP)
        lines.append(_verdict("a skip adds, times Celery's own work,", laps, skip, whole(CELERY)))
    return [f"{course}: {line}" for line in lines]


def _verdict(text: str, laps: Laps, one: Statistic, other: Statistic) -> str:
    excess = laps.excess(one, other, _NO_MORE)
    word = "reached" if excess.high <= 0 else "MISSED" if excess.low > 0 else "open"
    return f"{word}: {text} {_text(laps.ratio(one, other))}; wanted: at most {_NO_MORE:g}"


def _in_bodies(laps: Laps, name: str) -> Spread:
    return laps.ratio(over("tasks", name), over("tasks", RAW_PAIR))


def _data(course: Course, laps: Laps, name: str, counts: Mapping[str, Count]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "role": str(BY_NAME[name].role),
        "task": asdict(laps.of(whole(name))),
        "over_celery": asdict(laps.of(over("tasks", name))),
        "over_celery_in_raw_pairs_of_a_body": asdict(_in_bodies(laps, name)),
        "over_celery_in_raw_pairs_of_a_loop": asdict(laps.ratio(over("tasks", name), pair)),
        "publishing_over_celery": asdict(laps.of(over("publishing", name))),
        "replies_waited_for": counts[name].requests if name in counts else None,
    }
    data["processor_over_celery"] = asdict(laps.of(over("processor", name)))
    if course.pool == "solo":
        data["first_over_celery"] = asdict(laps.of(over("first", name)))
        data["together_over_celery"] = asdict(laps.of(together(name)))
    return data


def _ordered(laps: Laps) -> list[str]:
    names = [name for name in laps.names if name != CELERY]
    return sorted(names, key=lambda name: laps.of(over("tasks", name)).middle)


def _bar(name: str, ratio: Spread) -> Bar:
    return Bar(name, ratio, BY_NAME[name].role is Role.OURS)


def _label(name: str) -> str:
    role = BY_NAME[name].role
    if role is Role.OURS:
        return f"**{name}**"
    return f"{name} (no lock)" if role is Role.FLOOR or name == BESIDE else name


def _micros(seconds: Spread) -> str:
    numbers = [getattr(seconds, name) * _MICROSECONDS for name in ("low", "middle", "high")]
    return _text(Spread(*numbers), 0)


def _text(numbers: Spread, digits: int = 2) -> str:
    return f"{numbers.middle:.{digits}f} [{numbers.low:.{digits}f} .. {numbers.high:.{digits}f}]"
