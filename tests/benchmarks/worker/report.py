"""What the worker benchmark has found: tables, data, charts, and how it stands with the goals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any, Final

from tests.benchmarks.contest import Role
from tests.benchmarks.plots import Bar, Chart
from tests.benchmarks.samples import Spread, spread
from tests.benchmarks.wire import Count
from tests.benchmarks.worker.contenders import (
    CELERY,
    CLAIMED,
    CONTENDERS,
    OURS,
    PUBLISHING_PEERS,
    SKIP,
)
from tests.benchmarks.worker.race import Laps
from tests.benchmarks.worker.waves import Course

__all__ = ["as_charts", "as_data", "as_publishing_table", "as_table", "verdicts"]

_MICROSECONDS: Final = 1e6
_PEER: Final = PUBLISHING_PEERS[-1]
_BY_NAME: Final = {contender.name: contender for contender in CONTENDERS}


def as_table(course: Course, laps: Laps, counts: Mapping[str, Count]) -> str:
    """Markdown: what a task takes more at the worker, the least first."""
    plain, pair = _micros(spread(laps.tasks(CELERY))), _micros(spread(laps.pair))
    rows = [
        f"**{course}**: Celery alone takes {_text(plain)} µs a task; a raw pair {_text(pair)} µs",
        "",
        "| lock | more than Celery alone [p25 .. p75], µs | in raw pairs [p25 .. p75] "
        "| with publishing, µs | processor time of the worker, µs "
        "| replies of the lock server waited for |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in _ordered(laps):
        micros, pairs = _micros(spread(laps.overheads(name))), laps.in_pairs(name)
        waits = str(counts[name].requests) if name in counts else ""
        processor = ""
        if course.pool == "solo":
            processor = f"{median(laps.processor(name)) * _MICROSECONDS:.0f}"
        together = f"{median(laps.together(name)) * _MICROSECONDS:.0f}"
        cells = (_label(name), _text(micros), _text(pairs, 2), together, processor, waits)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def as_publishing_table(laps: Laps) -> str:
    """Markdown: what publishing with a claim takes more than without."""
    plain = _micros(spread(_middles(laps, CELERY)))
    rows = [
        f"**Publishing**: without a lock, `apply_async()` takes {_text(plain)} µs",
        "",
        f"| claim | more than without [p25 .. p75], µs | times {_PEER}'s [p25 .. p75] |",
        "|---|---:|---:|",
    ]
    for name in _claiming(laps):
        micros = _micros(spread(laps.publishing(name)))
        ratio = laps.publishing_over(name, _PEER)
        rows.append(f"| {_label(name)} | {_text(micros)} | {_text(ratio, 2)} |")
    return "\n".join(rows) + "\n"


def as_data(found: Mapping[Course, Laps], counts: Mapping[str, Count]) -> dict[str, Any]:
    """Plain data, in seconds."""
    return {
        str(course): {
            "raw_pair": asdict(spread(laps.pair)),
            "rounds": len(laps.pair),
            "contenders": {
                name: {
                    "role": str(_BY_NAME[name].role),
                    "task": asdict(spread(laps.tasks(name))),
                    "over_celery": asdict(spread(laps.overheads(name))),
                    "together_over_celery": asdict(spread(laps.together(name))),
                    "processor_over_celery": asdict(spread(laps.processor(name))),
                    "over_celery_in_raw_pairs": asdict(laps.in_pairs(name)),
                    "over_celery_in_its_tasks": asdict(laps.over_plain(name)),
                    "publishing": asdict(spread(_middles(laps, name))),
                    "publishing_over_celery": asdict(spread(laps.publishing(name))),
                    "replies_waited_for": counts[name].requests if name in counts else None,
                }
                for name in laps.waves
            },
        }
        for course, laps in found.items()
    }


def as_charts(found: Mapping[Course, Laps]) -> list[Chart]:
    """One per course, and one of publishing, of the first course."""
    charts = [
        Chart(
            name=f"worker-{course.pool}-{course.seconds * 1000:g}ms",
            title=f"What a lock adds to a task at the worker ({course})",
            unit="times a raw pair, SET NX PX + EVALSHA; less is better",
            bars=[_bar(name, laps.in_pairs(name)) for name in _ordered(laps)],
        )
        for course, laps in found.items()
    ]
    first = next(iter(found.values()))
    charts.append(
        Chart(
            name="publishing",
            title="What a claim adds to publishing a task",
            unit=f"times what {_PEER} adds; less is better",
            bars=[_bar(name, first.publishing_over(name, _PEER)) for name in _claiming(first)],
        )
    )
    return charts


def verdicts(course: Course, laps: Laps) -> list[str]:
    """How it stands with what we want, a line each."""
    ours = laps.in_pairs(OURS)
    lines = [_verdict(f"a task adds {ours.middle:.2f} raw pairs; wanted: 1", ours.middle <= 1)]
    own = median(laps.overheads(OURS))
    for name, contender in _BY_NAME.items():
        if contender.role is Role.PEER:
            peers = median(laps.overheads(name))
            lines.append(
                _verdict(f"{name} adds {peers / own:.2f} times what ours adds", peers > own)
            )
    skip = laps.over_plain(SKIP)
    lines.append(
        _verdict(f"a skip adds {skip.middle:.2f} of what Celery alone does", skip.middle < 1)
    )
    for peer in PUBLISHING_PEERS:
        ratio = laps.publishing_over(CLAIMED, peer).middle
        lines.append(_verdict(f"our claim adds {ratio:.2f} of {peer}'s; wanted: 0.8", ratio <= 0.8))
    return [f"{course}: {line}" for line in lines]


def _verdict(text: str, reached: bool) -> str:
    return f"{'reached' if reached else 'MISSED'}: {text}"


def _ordered(laps: Laps) -> list[str]:
    names = [name for name in laps.waves if name != CELERY]
    return sorted(names, key=lambda name: laps.in_pairs(name).middle)


def _claiming(laps: Laps) -> list[str]:
    names = [name for name in laps.waves if _BY_NAME[name].claims]
    return sorted(names, key=lambda name: median(laps.publishing(name)))


def _bar(name: str, ratio: Spread) -> Bar:
    return Bar(name, ratio, _BY_NAME[name].role is Role.OURS)


def _label(name: str) -> str:
    role = _BY_NAME[name].role
    if role is Role.OURS:
        return f"**{name}**"
    return f"{name} (no lock)" if role is not Role.PEER else name


def _middles(laps: Laps, name: str) -> list[float]:
    return [median(wave.publishing) for wave in laps.waves[name]]


def _micros(numbers: Spread) -> Spread:
    return Spread(*(getattr(numbers, name) * _MICROSECONDS for name in ("low", "middle", "high")))


def _text(numbers: Spread, digits: int = 0) -> str:
    return f"{numbers.middle:.{digits}f} [{numbers.low:.{digits}f} .. {numbers.high:.{digits}f}]"
