"""Ratios as a picture: a bar for each contender, a line for its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.benchmarks.samples import Spread

__all__ = ["Bar", "Chart", "draw"]

_OURS: Final = "#1b6ca8"
_OTHERS: Final = "#b8bec4"
_INK: Final = "#333333"
_INCHES_PER_BAR: Final = 0.34


@dataclass(frozen=True, slots=True)
class Bar:
    """One contender."""

    name: str
    ratio: Spread
    ours: bool


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture.

    Attributes:
        name: The name of its file.
        title: Above it.
        unit: Below it: of what the bars are multiples.
        bars: From top to bottom.
    """

    name: str
    title: str
    unit: str
    bars: Sequence[Bar]


def draw(chart: Chart, directory: Path) -> Path:
    """Write it as SVG; its path."""
    # Imported here because it takes a second and is needed only to save a run.
    import matplotlib

    matplotlib.use("agg")
    # The same picture is the same file: no random names, and text that can be searched.
    matplotlib.rcParams.update({"svg.hashsalt": chart.name, "svg.fonttype": "none"})
    from matplotlib import pyplot

    bars = list(reversed(chart.bars))
    ratios = [bar.ratio for bar in bars]
    figure, axes = pyplot.subplots(figsize=(9, 1.1 + _INCHES_PER_BAR * len(bars)))
    drawn = axes.barh(
        [bar.name for bar in bars],
        [one.middle for one in ratios],
        xerr=[[one.middle - one.low for one in ratios], [one.high - one.middle for one in ratios]],
        color=[_OURS if bar.ours else _OTHERS for bar in bars],
        height=0.62,
        error_kw={"ecolor": _INK, "elinewidth": 1, "capsize": 2},
    )
    axes.bar_label(drawn, fmt="%.2f", padding=5, fontsize=8, color=_INK)
    axes.axvline(1, color=_INK, linewidth=0.8, linestyle=":")
    axes.set_title(chart.title, loc="left", fontsize=11, color=_INK)
    axes.set_xlabel(chart.unit, fontsize=9, color=_INK)
    axes.tick_params(labelsize=9, colors=_INK, length=0)
    axes.margins(x=0.12)
    axes.spines[["top", "right", "left"]].set_visible(False)
    path = directory / f"{chart.name}.svg"
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return path
