"""A benchmark's results as a table for people, and as JSON for comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tests.benchmarks.contest import Result, Role
from tests.benchmarks.samples import Spread, ratios, spread
from tests.benchmarks.wire import Count

__all__ = ["as_data", "as_table", "behind"]

_MICROSECONDS = 1e6


def as_table(results: Mapping[str, Result]) -> str:
    """Markdown: a row per contender, ours first in each store, then the peers by their time."""
    rows = [
        "| store | lock | p50 [p25 .. p75], µs | times ours [p25 .. p75] "
        "| round trips: acquire, release | requests |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for store, result in results.items():
        times = ratios(result.seconds, _ours(result))
        for name in _ordered(result, times):
            role, cost = result.roles[name], result.costs[name]
            label = f"**{name}**" if role is Role.OURS else f"{name}{_NOTES.get(role, '')}"
            trips = f"{cost.acquire.round_trips}, {cost.release.round_trips}"
            requests = f"{cost.acquire.requests}, {cost.release.requests}"
            micros = spread([s * _MICROSECONDS for s in _all(result.seconds[name])])
            ratio = "1" if role is Role.OURS else _text(times[name], 2)
            rows.append(
                f"| {store} | {label} | {_text(micros, 0)} | {ratio} | {trips} | {requests} |"
            )
            store = ""
    return "\n".join(rows) + "\n"


def as_data(results: Mapping[str, Result]) -> dict[str, Any]:
    """Plain data, in seconds."""
    return {
        store: {
            name: {
                "role": str(result.roles[name]),
                "seconds": asdict(spread(_all(result.seconds[name]))),
                "times_ours": asdict(ratio),
                "cycles": len(_all(result.seconds[name])),
                "acquire": _data(result.costs[name].acquire),
                "release": _data(result.costs[name].release),
            }
            for name, ratio in ratios(result.seconds, _ours(result)).items()
        }
        for store, result in results.items()
    }


def behind(results: Mapping[str, Result]) -> list[str]:
    """Where a peer was faster than ours, or asked fewer times."""
    found = []
    for store, result in results.items():
        ours = _ours(result)
        times = ratios(result.seconds, ours)
        for name, role in result.roles.items():
            if role is not Role.PEER:
                continue
            if times[name].middle <= 1:
                found.append(f"{store}: {name} takes {times[name].middle:.2f} times our time")
            if _trips(result, name) < _trips(result, ours):
                found.append(f"{store}: {name} makes fewer round trips than we do")
    return found


_NOTES = {Role.FLOOR: " (no lock, a floor)", Role.INFORMATION: " (for information)"}


def _ours(result: Result) -> str:
    return next(name for name, role in result.roles.items() if role is Role.OURS)


def _ordered(result: Result, times: Mapping[str, Spread]) -> list[str]:
    return sorted(
        result.roles, key=lambda name: (result.roles[name] is not Role.OURS, times[name].middle)
    )


def _trips(result: Result, name: str) -> int:
    cost = result.costs[name]
    return cost.acquire.round_trips + cost.release.round_trips


def _all(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [one for times in rounds for one in times]


def _data(count: Count) -> dict[str, int]:
    return asdict(count)


def _text(numbers: Spread, digits: int) -> str:
    return f"{numbers.middle:.{digits}f} [{numbers.low:.{digits}f} .. {numbers.high:.{digits}f}]"
