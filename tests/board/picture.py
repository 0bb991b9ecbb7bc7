"""The panels as a picture, in the board's own grid and near the look of Grafana's light theme."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from tests.board.panels import Panel, Series, digest

#: Pixels: the width of the board, of its margin, and the height of a row of its grid.
_WIDTH, _GAP, _ROW = 1280, 8, 37
_DPI: Final = 100
_COLUMNS: Final = 24
_PAGE, _PAPER, _BORDER, _GRID = "#f4f5f5", "#ffffff", "#dcdee2", "#e9eaec"
_INK, _MUTED = "#24292e", "#5f6670"
#: Grafana's own, in its order, darkened where white paper needs it.
_LINES: Final = (
    *("#56a64b", "#e0a800", "#3aa6c9", "#e0752d", "#e24d42", "#1f78c1"),
    *("#ba43a9", "#705da0", "#508642", "#c15c17", "#0a437c", "#890f02"),
)
_NAMED: Final = {"red": "#e02f44", "green": "#37872d", "yellow": "#e0a800"}
#: Of a text: the width of an average letter, in pixels for each point.
_LETTER: Final = 0.78


def draw(
    title: str, board: Sequence[tuple[Panel, list[list[Series]]]], path: Path, *, step: float
) -> None:
    """Write the board as a PNG.

    Args:
        title: Above the panels.
        board: The panels, each with the answers to its queries.
        path: The file.
        step: Seconds between two points: a longer gap is a gap in the line.
    """
    # Imported here because it takes a second.
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = max(panel.place[1] + panel.place[3] for panel, _ in board)
    head = 44
    height = head + rows * _ROW + _GAP
    figure = pyplot.figure(figsize=(_WIDTH / _DPI, height / _DPI), dpi=_DPI, facecolor=_PAGE)
    canvas = _Canvas(figure, height)
    canvas.text(2 * _GAP, head / 2 + 4, title, size=13, weight="bold")
    for panel, answers in board:
        x, y, width, tall = panel.place
        unit = (_WIDTH - _GAP) / _COLUMNS
        area = (x * unit + _GAP, head + y * _ROW, width * unit - _GAP, tall * _ROW - _GAP)
        canvas.frame(area)
        if panel.kind == "stat":
            _stat(canvas, area, panel, answers)
            continue
        canvas.text(area[0] + 12, area[1] + 18, panel.title, size=11.5, weight="bold")
        if panel.kind == "table":
            _table(canvas, area, answers)
        else:
            _lines(canvas, area, panel, [one for answer in answers for one in answer], step)
    _save(figure, path)
    pyplot.close(figure)


def _save(figure: Any, path: Path) -> None:
    from PIL import Image, PngImagePlugin

    full = io.BytesIO()
    figure.savefig(full, dpi=_DPI, facecolor=_PAGE)
    about = PngImagePlugin.PngInfo()
    about.add_text("Description", digest())
    # A third of the size, in colours that look the same.
    few = Image.open(full).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(path, optimize=True, pnginfo=about)


class _Canvas:
    """A figure that is addressed in pixels from its upper left corner."""

    def __init__(self, figure: Any, height: float) -> None:
        self.figure, self._height = figure, height

    def text(self, x: float, y: float, text: str, *, size: float, **look: Any) -> None:
        look = {"color": _INK, "va": "center", **look}
        self.figure.text(x / _WIDTH, 1 - y / self._height, text, fontsize=size, **look)

    def frame(self, area: tuple[float, float, float, float], fill: str = _PAPER) -> None:
        from matplotlib.patches import FancyBboxPatch

        x, y, width, height = area
        box = FancyBboxPatch(
            (x / _WIDTH, 1 - (y + height) / self._height),
            width / _WIDTH,
            height / self._height,
            boxstyle="square,pad=0",
            facecolor=fill,
            edgecolor=_BORDER if fill == _PAPER else fill,
            linewidth=1,
            zorder=-1,  # below the axes
            transform=self.figure.transFigure,
        )
        self.figure.add_artist(box)

    def axes(self, x: float, y: float, width: float, height: float) -> Any:
        bottom = 1 - (y + height) / self._height
        return self.figure.add_axes(
            (x / _WIDTH, bottom, width / _WIDTH, height / self._height), facecolor=_PAPER
        )


_Area = tuple[float, float, float, float]


def _stat(canvas: _Canvas, area: _Area, panel: Panel, answers: list[list[Series]]) -> None:
    x, y, width, height = area
    series = [one for answer in answers for one in answer]
    value = series[0].points[-1][1] if series else math.nan
    colour = _NAMED["green"]
    for one in panel.defaults.get("thresholds", {}).get("steps", []):
        if one["value"] is None or value >= one["value"]:
            colour = _NAMED[one["color"]]
    texts: dict[str, Any] = {}
    for mapping in panel.defaults.get("mappings", []):
        texts |= mapping["options"]
    value = round(value, panel.defaults.get("decimals", 3))
    text = texts.get(f"{value:g}", {}).get("text") or _number(value, "short")
    is_filled = panel.options["colorMode"] == "background"
    if is_filled:
        canvas.frame(area, fill=colour)
    ink = "white" if is_filled else _INK
    canvas.text(x + 12, y + 18, panel.title, size=11.5, weight="bold", color=ink)
    look = {"color": "white" if is_filled else colour, "ha": "center", "weight": "bold"}
    canvas.text(x + width / 2, y + height * 0.62, text, size=27, **look)
    if series and series[0].legend:
        canvas.text(x + width - 12, y + 18, series[0].legend, size=10.5, color=ink, ha="right")


def _table(canvas: _Canvas, area: _Area, answers: list[list[Series]]) -> None:
    x, y, width, _ = area
    rows = [one.labels | {"value": f"{one.points[-1][1]:g}"} for one in answers[0]]
    names = list(rows[0]) if rows else []
    for number, row in enumerate([{name: name for name in names}, *rows]):
        for place, name in enumerate(names):
            look = {"weight": "bold", "color": _MUTED} if number == 0 else {}
            at = x + 14 + place * (width - 20) / len(names)
            canvas.text(at, y + 48 + number * 28, row[name], size=11, **look)


def _lines(canvas: _Canvas, area: _Area, panel: Panel, series: list[Series], step: float) -> None:
    x, y, width, height = area
    legend = _legend_rows([one.legend for one in series], width - 24)
    below = 22 * len(legend) + 30
    axes = canvas.axes(x + 84, y + 36, width - 108, height - 36 - below)
    colours = dict(zip((id(one) for one in series), cycle(_LINES), strict=False))
    for one in series:
        moments, values = _with_gaps(one.points, step)
        axes.plot(moments, values, color=colours[id(one)], linewidth=1.5, solid_capstyle="round")
        alone = _alone(one.points, step)
        if alone:
            axes.plot(*zip(*alone, strict=True), ".", color=colours[id(one)], markersize=4)
    _dress(axes, panel.unit)
    place = {one.legend: colours[id(one)] for one in series}
    for number, row in enumerate(legend):
        at, line = x + 14, y + height - 22 * (len(legend) - number) + 8
        for text, wide in row:
            canvas.text(at, line, "\u25ac", size=9, color=place[text])
            canvas.text(at + 18, line, text, size=10)
            at += wide


def _dress(axes: Any, unit: str) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

    axes.set_ylim(0, 1.06 * axes.dataLim.y1 or 1)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=unit == "short"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value, unit)))
    begin, end = axes.get_xlim()
    axes.xaxis.set_major_locator(MultipleLocator(60 * max(1, round((end - begin) / 360))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: _clock(at)))
    axes.margins(x=0)
    axes.grid(color=_GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=10, colors=_MUTED, length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _with_gaps(
    points: Sequence[tuple[float, float]], step: float
) -> tuple[list[float], list[float]]:
    moments, values = [], []
    for at, value in points:
        if moments and at - moments[-1] > 1.5 * step:
            moments.append(moments[-1])
            values.append(math.nan)
        moments.append(at)
        values.append(value)
    return moments, values


def _alone(points: Sequence[tuple[float, float]], step: float) -> list[tuple[float, float]]:
    """The points without a neighbour, of which no line is drawn."""
    moments = {at for at, _ in points}
    return [one for one in points if not moments & {one[0] - step, one[0] + step}]


def _legend_rows(names: Sequence[str], width: float) -> list[list[tuple[str, float]]]:
    """The names in rows that are no wider than ``width``, each with its own width."""
    rows: list[list[tuple[str, float]]] = [[]]
    used = 0.0
    for name in names:
        wide = 34 + len(name) * 10 * _LETTER
        if rows[-1] and used + wide > width:
            rows.append([])
            used = 0.0
        rows[-1].append((name, wide))
        used += wide
    return rows


def _seconds(value: float) -> str:
    if value >= 60:
        return f"{value / 60:g} min"
    return f"{value:g} s" if value >= 1 or not value else f"{value * 1000:g} ms"


_UNITS: Final[dict[str, Callable[[float], str]]] = {
    "s": _seconds,
    "ops": lambda value: f"{value:g} ops/s",
    "short": lambda value: f"{value:g}",
}


def _number(value: float, unit: str) -> str:
    return _UNITS[unit](round(value, 3))


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M")
