"""The pictures of a campaign: what its processes used, and a timeline of each violation.

A timeline has the bodies of the key, what was broken, and the time they shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from example_project import svg
from tests.chaos import usage
from tests.chaos.bodies import Body, bodies
from tests.chaos.campaign import Outcome
from tests.chaos.verdict import Violation
from tests.harness.journal import Record, events

WIDTH, LEFT, RIGHT, TOP, ROW = 1200, 330, 20, 56, 26
#: Seconds shown before and after.
AROUND = 5.0
#: Characters that fit.
_MOST_TEXT = 165
#: The most pictures of one campaign; a broken lock has thousands of violations.
MOST = 10
INK, MUTED, ALARM, BODY, SECTION, FAULT = (
    "#1f2733",
    "#6b7686",
    "#d3273e",
    "#c9d6ee",
    "#3b6fd4",
    "#e08a1e",
)
STYLE = f"""
text {{ font: 12px 'DejaVu Sans', sans-serif; fill: {INK}; }}
.title {{ font-weight: bold; }}
.muted {{ fill: {MUTED}; }}
.alarm {{ fill: {ALARM}; font-weight: bold; }}
"""


def draw_all(outcome: Outcome) -> list[Path]:
    """Write the picture of the usage, and one of each of the first violations; the files."""
    found = bodies(outcome.records)
    paths = [outcome.directory / "usage.svg"]
    paths[0].write_text(usage.draw(usage.usages(outcome.directory)))
    for number, violation in enumerate(outcome.verdict.violations[:MOST], start=1):
        path = outcome.directory / f"violation-{number}.svg"
        path.write_text(draw(violation, found, outcome.records))
        paths.append(path)
    return paths


def draw(violation: Violation, found: Sequence[Body], records: Sequence[Record]) -> str:
    """One picture as SVG text."""
    concerned = [body for body in found if body.run in violation.runs]
    at = violation.at or max((body.begin for body in concerned), default=0.0)
    begin = min([body.begin for body in concerned] + [at]) - 1.0
    begin, end = max(begin, at - 4 * AROUND), at + AROUND
    shown = [
        body
        for body in found
        if (body.run in violation.runs or (violation.key and body.key == violation.key))
        and body.begin < end
        and body.end > begin
    ]
    faults = [
        fault for fault in events(records, "fault") if fault.at < end and fault.data["end"] > begin
    ]
    height = TOP + ROW * (len(shown) + len(faults) + 3)
    scale = _Scale(begin, end)
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        svg.text(12, 20, f"{violation.kind}: {violation.key}", kind="alarm"),
        svg.text(12, 40, violation.text[:_MOST_TEXT]),
        svg.line(scale.x(at), TOP - 6, scale.x(at), height - 2 * ROW, stroke=ALARM, dashes="4 4"),
        *_rows(shown, faults, violation, scale),
        *_seconds(scale, height - ROW),
        *_legend(height - ROW),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Scale:
    def __init__(self, begin: float, end: float) -> None:
        self.begin, self.end = begin, end

    def x(self, at: float) -> float:
        at = min(max(at, self.begin), self.end)
        return LEFT + (at - self.begin) / (self.end - self.begin) * (WIDTH - LEFT - RIGHT)


def _rows(
    shown: Sequence[Body], faults: Sequence[Record], violation: Violation, scale: _Scale
) -> Iterator[str]:
    y = float(TOP)
    for fault in faults:
        label = f"{fault.data['name']} ({fault.data['target']})"
        yield svg.text(12, y + 14, label, kind="muted")
        left, right = scale.x(fault.at), scale.x(fault.data["end"])
        yield svg.rect(left, y + 4, max(right - left, 2), 12, fill=FAULT, opacity=0.7)
        y += ROW
    for body in shown:
        kind = "title" if body.run in violation.runs else ""
        label = f"{body.task.rpartition('.')[2]} {body.job[:8]} {body.worker} pid {body.pid}"
        yield svg.text(12, y + 14, label, kind=kind)
        yield from _bar(body, y, scale)
        y += ROW


def _bar(body: Body, y: float, scale: _Scale) -> Iterator[str]:
    left, right = scale.x(body.begin), scale.x(body.end)
    how = body.error or ("done" if body.finished else "killed")
    tip = f"{body.run}, fence {body.fence}, {how}"
    bar = svg.rect(left, y + 2, max(right - left, 2), 16, fill=BODY, radius=3)
    yield f"<g><title>{escape(tip)}</title>{bar}</g>"
    for section in body.sections:
        x = scale.x(section.begin)
        yield svg.rect(x, y + 6, max(scale.x(section.end) - x, 1), 8, fill=SECTION)
    if not body.finished and right < scale.x(scale.end):
        yield svg.cross(right, y + 10, stroke=ALARM)


def _seconds(scale: _Scale, height: float) -> Iterator[str]:
    for second in range(int(scale.end - scale.begin) + 1):
        x = scale.x(scale.begin + second)
        yield svg.text(x, height - 8, f"{second} s", kind="muted", anchor="middle")


def _legend(y: float) -> Iterator[str]:
    signs = (
        (svg.rect(LEFT, y + 4, 24, 12, fill=FAULT, opacity=0.7), "a fault"),
        (svg.rect(LEFT + 140, y + 2, 24, 16, fill=BODY, radius=3), "a body"),
        (svg.rect(LEFT + 280, y + 6, 24, 8, fill=SECTION), "it has the word of the lock"),
        (svg.cross(LEFT + 532, y + 10, stroke=ALARM), "it was killed"),
    )
    for (sign, words), x in zip(signs, (0, 140, 280, 520), strict=True):
        yield sign
        yield svg.text(LEFT + x + 32, y + 14, words)
