"""The panels of the board, and what a Prometheus answers to their expressions."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.harness.processes import ROOT
from tests.harness.prometheus import Prometheus

DASHBOARD: Final = ROOT / "celery_singleton_lock/serve/monitoring/grafana-dashboard.json"


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel: its legend, its labels, and its points."""

    legend: str
    labels: dict[str, str]
    points: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Span:
    """What a board shows.

    Attributes:
        begin, end: Seconds since the epoch.
        step: Seconds between two points.
        scrape: Seconds between two scrapes.
    """

    begin: float
    end: float
    step: int
    scrape: int

    @property
    def rate_interval(self) -> str:
        """Grafana's ``$__rate_interval``."""
        return f"{max(self.step + self.scrape, 4 * self.scrape)}s"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title, kind, unit: As in the board.
        place: x, y, width and height in the board's grid, which is 24 wide.
        defaults, options: Of Grafana: thresholds, mappings, colours.
        targets: Its queries.
    """

    title: str
    kind: str
    unit: str
    place: tuple[int, int, int, int]
    defaults: dict[str, Any]
    options: dict[str, Any]
    targets: Sequence[dict[str, Any]]

    def answers(self, prometheus: Prometheus, span: Span) -> list[list[Series]]:
        """What Prometheus answers to each query of it."""
        return [_answer(prometheus, target, span) for target in self.targets]


def title() -> str:
    """The title of the board."""
    return str(json.loads(DASHBOARD.read_text())["title"])


def digest() -> str:
    """A digest of the board, by which a picture says of which board it is."""
    return hashlib.sha256(DASHBOARD.read_bytes()).hexdigest()


def panels() -> list[Panel]:
    """The panels of the board in the package, from its top to its bottom."""
    board = json.loads(DASHBOARD.read_text())
    return [
        Panel(
            title=panel["title"],
            kind=panel["type"],
            unit=panel["fieldConfig"]["defaults"]["unit"],
            place=(
                panel["gridPos"]["x"],
                panel["gridPos"]["y"],
                panel["gridPos"]["w"],
                panel["gridPos"]["h"],
            ),
            defaults=panel["fieldConfig"]["defaults"],
            options=panel["options"],
            targets=panel["targets"],
        )
        for panel in board["panels"]
    ]


def _answer(prometheus: Prometheus, target: dict[str, Any], span: Span) -> list[Series]:
    # "All" is the choice of tasks at the top of the board.
    expression = target["expr"].replace("$__rate_interval", span.rate_interval)
    expression = expression.replace("$task", ".*")
    if target.get("instant"):
        data = prometheus.ask("query", query=expression, time=str(span.end))
    else:
        data = prometheus.ask(
            "query_range",
            query=expression,
            start=str(span.begin),
            end=str(span.end),
            step=str(span.step),
        )
    found = []
    for one in data.get("result", []):
        points = [(at, float(text)) for at, text in one.get("values") or [one["value"]]]
        points = [(at, value) for at, value in points if math.isfinite(value)]
        if points:
            found.append(
                Series(_legend(target["legendFormat"], one["metric"]), one["metric"], points)
            )
    return found


def _legend(template: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), template)
