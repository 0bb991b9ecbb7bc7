"""What it comes to: tables, data, and how it stands with the goal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any, Final

from tests.benchmarks.contest import Role
from tests.benchmarks.plots import Bar, Chart
from tests.benchmarks.publishing.contenders import CONTENDERS, OURS, PEERS, PLAIN
from tests.benchmarks.publishing.parts import SENDING, WAITING, is_celerys
from tests.benchmarks.samples import Spread, spread
from tests.benchmarks.worker.estimate import estimate

__all__ = ["Start", "as_chart", "as_data", "as_table", "verdicts"]

_MICROSECONDS: Final = 1e6
# What a claim may cost of what a peer's does.
_GOAL: Final = 0.8

Rounds = Sequence[Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What one process has reported; seconds, but for the server's, which are microseconds.

    Attributes:
        rounds: The time of each call, by contender.
        parts: The time of our calls, by part.
        server: The time of a command, by its name, as the server counts it.
        instructions: The instructions that a call adds to a plain one, by contender.
    """

    rounds: Rounds
    parts: Rounds
    server: Mapping[str, float]
    instructions: Mapping[str, int]


def _over(name: str) -> Callable[[Rounds], float]:
    """How much more it is than a plain call, taken within each round."""
    return lambda rounds: median(one[name] - one[PLAIN] for one in rounds)


def _of(starts: Sequence[Start], statistic: Callable[[Rounds], float]) -> Spread:
    return estimate([start.rounds for start in starts], statistic)


def _ratio(starts: Sequence[Start], name: str, peer: str) -> Spread:
    one, other = _over(name), _over(peer)
    return _of(starts, lambda rounds: one(rounds) / other(rounds))


def _least(starts: Sequence[Start], name: str) -> float:
    """The fastest call, over the fastest plain one, of the same process; the middle of these."""
    return median(
        min(one[name] for one in start.rounds) - min(one[PLAIN] for one in start.rounds)
        for start in starts
    )


def _instructions(starts: Sequence[Start], name: str) -> int:
    return min(start.instructions[name] for start in starts)


def as_table(starts: Sequence[Start]) -> str:
    """Markdown: contenders, the least first, and the parts of ours."""
    over = {name: _of(starts, _over(name)) for name in CONTENDERS if name != PLAIN}
    plain = _of(starts, lambda rounds: median(one[PLAIN] for one in rounds))
    heads = ["publishing", "its claim is", "more than Celery alone, µs", "the fastest, µs"]
    heads.append("instructions")
    heads += [f"times {peer}'s" for peer in PEERS]
    rows = [
        f"**A call**, after others: Celery alone takes {_micros(plain)} µs",
        "",
        f"| {' | '.join(heads)} |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name in sorted(over, key=lambda one: over[one].middle):
        cells = [_label(name), CONTENDERS[name].does, _micros(over[name])]
        cells.append(f"{_least(starts, name) * _MICROSECONDS:.0f}")
        cells.append(f"{_instructions(starts, name):,}")
        cells += [_text(_ratio(starts, name, peer)) for peer in PEERS]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, "", *_part_rows(starts)]) + "\n"


def _part_rows(starts: Sequence[Start]) -> list[str]:
    parts = _parts(starts)
    total = sum(one.middle for one in parts.values())
    rows = ['| part of `unique="until_done"` | µs [p25 .. p75] | of the parts |', "|---|---:|---:|"]
    for part in sorted(parts, key=lambda part: -parts[part].middle):
        rows.append(f"| {part} | {_micros(parts[part], 1)} | {parts[part].middle / total:.0%} |")
    away = parts[SENDING].middle + parts[WAITING].middle
    server = {
        name: mean(start.server[name] for start in starts) for name in sorted(starts[0].server)
    }
    return [
        *rows,
        f"| **all parts** | {total * _MICROSECONDS:.1f} | 100% |",
        f"| all but sending and waiting | {(total - away) * _MICROSECONDS:.1f} "
        f"| {1 - away / total:.0%} |",
        *(
            f"| a claim by {name.upper()} at the server, by its own count | {one:.1f} | |"
            for name, one in server.items()
        ),
    ]


def _parts(starts: Sequence[Start]) -> dict[str, Spread]:
    calls = [one for start in starts for one in start.parts]
    names = sorted({part for one in calls for part in one if not is_celerys(part)})
    return {part: spread([one.get(part, 0.0) for one in calls]) for part in names}


def as_data(starts: Sequence[Start]) -> dict[str, Any]:
    """Plain data, in seconds."""
    return {
        "contenders": {
            name: {
                "role": str(one.role),
                "over_celery": asdict(_of(starts, _over(name))),
                "fastest_over_fastest": _least(starts, name),
                "instructions_over_celery": _instructions(starts, name),
                **{f"times_{peer}": asdict(_ratio(starts, name, peer)) for peer in PEERS},
            }
            for name, one in CONTENDERS.items()
            if name != PLAIN
        },
        "parts": {part: asdict(one) for part, one in _parts(starts).items()},
        "rounds": [len(start.rounds) for start in starts],
        "microseconds_at_the_server": [dict(start.server) for start in starts],
    }


def as_chart(starts: Sequence[Start]) -> Chart:
    """What each claim costs, as a multiple of the last peer's."""
    peer = PEERS[-1]
    ratios = {name: _ratio(starts, name, peer) for name in CONTENDERS if name != PLAIN}
    return Chart(
        name="publishing",
        title="What a claim adds to publishing a task",
        unit=f"times what {peer} adds; less is better",
        bars=[
            Bar(name, ratios[name], CONTENDERS[name].role is Role.OURS)
            for name in sorted(ratios, key=lambda one: ratios[one].middle)
        ],
    )


def verdicts(starts: Sequence[Start]) -> list[str]:
    """How it stands with what we want; open: the interval has both answers in it."""
    lines = []
    for peer in PEERS:
        mine, theirs = _over(OURS), _over(peer)
        excess = _of(starts, lambda rounds, m=mine, t=theirs: m(rounds) - _GOAL * t(rounds))
        word = "reached" if excess.high <= 0 else "MISSED" if excess.low > 0 else "open"
        ratio = _text(_ratio(starts, OURS, peer))
        lines.append(f"{word}: a claim adds, times {peer}'s, {ratio}; wanted: at most {_GOAL:g}")
    return lines


def _label(name: str) -> str:
    role = CONTENDERS[name].role
    if role is Role.OURS:
        return f"**{name}**"
    return f"Celery alone, {name} (no lock)" if role is Role.FLOOR else name


def _micros(seconds: Spread, digits: int = 0) -> str:
    numbers = (getattr(seconds, name) * _MICROSECONDS for name in ("low", "middle", "high"))
    return _text(Spread(*numbers), digits)


def _text(numbers: Spread, digits: int = 2) -> str:
    return f"{numbers.middle:.{digits}f} [{numbers.low:.{digits}f} .. {numbers.high:.{digits}f}]"
