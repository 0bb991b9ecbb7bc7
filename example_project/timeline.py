"""The timeline picture: one SVG with a panel per run, a lane per key, a bar per body.

Coordinates: x is time, the same scale in all panels; y is computed once per lane, in `Lane`.
Bodies that overlap stand on rows of their own, and a red band marks the time they share.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from example_project import journal as records
from example_project import svg
from example_project.beat_lane import BeatLane
from example_project.beats import BEATS, by_beat, doubled, scheduled_runs
from example_project.burst import burst, waits
from example_project.journal import Entry, Run, What
from example_project.lanes import LANE_GAP, ROW, Lane, lanes, shared
from example_project.snapshot import Outcome

WIDTH, LEFT, RIGHT = 1240, 190, 30
TOP, PANEL_HEAD, PANEL_GAP, LEGEND = 20, 64, 34, 76

#: The height of a bar in the legend, and in a lane that isn't crowded.
BAR = ROW - 4

#: Distinguished also by people who see no red or green, and in grey by their labels.
COLOURS = ("#3b6fd4", "#b35c00", "#4a9a7a", "#8a63b8")
INK, MUTED, GRID, BAND, ALARM = "#1f2733", "#6b7686", "#e6eaf0", "#f6f8fb", "#d3273e"

STYLE = f"""
text {{ font: 12px 'Inter', 'Segoe UI', 'DejaVu Sans', sans-serif; fill: {INK}; }}
.title {{ font-size: 18px; font-weight: bold; }}
.muted {{ fill: {MUTED}; }}
.onbar {{ fill: white; font-size: 10px; }}
.small {{ fill: {MUTED}; font-size: 10px; }}
.alarm {{ fill: {ALARM}; font-weight: bold; }}
"""


def draw(outcomes: Sequence[Outcome]) -> str:
    """The whole picture as SVG text."""
    seconds = max(outcome.seconds for outcome in outcomes)
    workers = sorted({run.worker for outcome in outcomes for run in records.runs(outcome.entries)})
    names = [*workers, *BEATS]
    colours = dict(zip(names, COLOURS * len(names), strict=False))
    parts: list[str] = []
    y = float(TOP)
    for outcome in outcomes:
        panel = _Panel(outcome, seconds=seconds, colours=colours, top=y)
        parts.extend(panel.parts())
        y = panel.bottom + PANEL_GAP
    parts.extend(_legend(y, colours))
    height = y + LEGEND
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    frame = f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", frame, *parts, "</svg>"]) + "\n"


class _Panel:
    def __init__(
        self, outcome: Outcome, *, seconds: float, colours: dict[str, str], top: float
    ) -> None:
        self._outcome, self._seconds, self._colours, self._top = outcome, seconds, colours, top
        self._runs = records.runs(outcome.entries)
        self._lanes = list(lanes(outcome.entries, self._runs, top + PANEL_HEAD))
        last = self._lanes[-1] if self._lanes else None
        self._beats = BeatLane(
            entries=outcome.entries,
            # Above it stands which beat is killed, and when.
            top=(last.top + last.height if last else top + PANEL_HEAD) + 2 * LANE_GAP,
            left=LEFT - 14,
            end=self._end(),
            x=self._x,
            colours=colours,
            alarm=ALARM,
        )
        self._floor = self._beats.top + self._beats.height + LANE_GAP / 2
        self.bottom = self._floor + 18

    def parts(self) -> Iterator[str]:
        yield from self._head()
        yield from self._grid()
        for lane in self._lanes:
            yield from self._lane(lane)
        yield from self._kills()
        yield from self._beats.parts()

    def _head(self) -> Iterator[str]:
        count = len(records.overlaps(self._runs))
        twice = len(doubled(scheduled_runs(self._outcome.entries)))
        calls = burst(self._outcome.entries)
        skips = sum(entry.what is What.SKIP for entry in self._outcome.entries)
        title = "With the lock" if self._outcome.locked else "Without the lock"
        lost = len(records.unsettled(self._outcome.entries))
        yield svg.text(LEFT, self._top + 18, title, kind="title")
        facts = (
            f"{len(self._runs)} runs, {skips} calls skipped, {lost} jobs lost, "
            f"{calls.published} messages for {calls.calls} calls"
        )
        kind = "title alarm" if count else "title"
        yield svg.text(LEFT + 190, self._top + 18, f"overlaps: {count}", kind=kind)
        kind = "title alarm" if twice else "title"
        yield svg.text(LEFT + 360, self._top + 18, f"runs sent twice: {twice}", kind=kind)
        yield svg.text(LEFT + 590, self._top + 17, facts, kind="muted")

    def _grid(self) -> Iterator[str]:
        top = self._top + PANEL_HEAD - LANE_GAP / 2
        for lane in self._lanes[::2]:
            yield svg.rect(0, lane.top - LANE_GAP / 2, WIDTH, lane.height + LANE_GAP, fill=BAND)
        for second in range(int(self._seconds) + 1):
            x = self._x(self._outcome.zero + second)
            yield svg.line(x, top, x, self._floor, stroke=GRID)
            if second % 2 == 0:
                yield svg.text(x, self._floor + 14, f"{second} s", kind="muted", anchor="middle")

    def _lane(self, lane: Lane) -> Iterator[str]:
        yield svg.text(LEFT - 14, lane.row_top(0) + 12, lane.name, anchor="end")
        tall = lane.bars_height
        for start, end in shared(lane.rows):
            x, width = self._x(start), self._x(end) - self._x(start)
            yield svg.rect(x, lane.top - 2, width, tall + 2, fill=ALARM, opacity=0.22)
        for number, row in enumerate(lane.rows):
            for run in row:
                yield from self._bar(run, lane.row_top(number), lane.bar)
        if lane.in_burst:
            yield from self._burst(lane)
            return
        bottom = lane.strip_top
        for entry in self._outcome.entries:
            if entry.lane == lane.name and entry.what is What.SKIP:
                x = self._x(entry.at)
                yield svg.line(x, bottom + 2, x, bottom + 11, stroke=MUTED, width=2)
        for entry in records.requeues(self._outcome.entries):
            if entry.lane == lane.name:
                yield svg.circle(self._x(entry.at), bottom + 7, 3, fill="white", stroke=MUTED)

    def _burst(self, lane: Lane) -> Iterator[str]:
        """Its calls, which of them published a message, and how long each message waited."""
        top, bottom = lane.top + lane.bars_height + 2, lane.strip_top
        for wait in waits(self._outcome.entries):
            if wait.lane == lane.name and wait.until > wait.since:
                x = self._x(wait.since)
                width = self._x(min(wait.until, self._end())) - x
                # Several at a time make it darker.
                yield svg.rect(x, top, width, 5, fill=INK, opacity=0.3)
        published: set[str] = set()
        for entry in self._outcome.entries:
            if entry.lane != lane.name:
                continue
            x = self._x(entry.at)
            if entry.what is What.CALL:
                yield svg.line(x, bottom + 2, x, bottom + 6, stroke=MUTED)
            elif entry.what is What.SENT and entry.job not in published:
                published.add(entry.job)
                yield svg.line(x, bottom + 2, x, bottom + 13, stroke=INK, width=2)

    def _bar(self, run: Run, y: float, height: int) -> Iterator[str]:
        left, right = self._x(run.started), self._x(min(run.ended, self._end()))
        width = max(right - left, 2)
        fence = f", fence {run.fence}" if run.fence else ""
        took = f"{run.outcome} after {run.ended - run.started:.2f} s"
        tip = f"{run.lane} on {run.worker}: {took}{fence}, job {run.job}"
        killed = run.outcome == "killed"
        colour, opacity = self._colours[run.worker], 0.5 if killed else 1
        bar = svg.rect(left, y, width, height, fill=colour, opacity=opacity, radius=3)
        yield f"<g><title>{escape(tip)}</title>{bar}</g>"
        if width > 54 and height == BAR:
            yield svg.text(left + 6, y + 11, run.worker, kind="onbar")
        beats = [e for e in self._outcome.entries if (e.what, e.job) == (What.HEARTBEAT, run.job)]
        for beat in beats:
            if run.started < beat.at < run.ended:
                yield svg.circle(self._x(beat.at), y + height - 3, 1.8, fill="white")
        if killed:
            yield svg.cross(right, y + height / 2, stroke=ALARM)
        elif any(other.job == run.job and other.outcome == "killed" for other in self._runs):
            yield svg.rect(left, y, width, height, stroke=ALARM, radius=3)
            if width > 110 and height == BAR:
                yield svg.text(right - 6, y + 11, "again", kind="onbar", anchor="end")

    def _kills(self) -> Iterator[str]:
        top = self._top + PANEL_HEAD - LANE_GAP / 2
        for entry in self._outcome.entries:
            if entry.what is What.KILL and not by_beat(entry):
                x = self._x(entry.at)
                yield svg.line(x, top - 4, x, self._floor, stroke=ALARM, width=1.5, dashes="5 4")
                yield svg.text(x, top - 9, f"SIGKILL {entry.worker}", kind="alarm", anchor="middle")
                yield from self._restart(entry, top - 4)

    def _restart(self, kill: Entry, y: float) -> Iterator[str]:
        later = [entry for entry in self._outcome.entries if entry.at > kill.at]
        ready = [e for e in later if (e.what, e.worker) == (What.READY, kill.worker)]
        if ready:
            x = self._x(ready[0].at)
            yield svg.line(self._x(kill.at), y, x, y, stroke=ALARM, width=1.5, dashes="5 4")
            yield svg.circle(x, y, 3, fill=self._colours[kill.worker])
            yield svg.text(x + 7, y + 1, f"{kill.worker} is back", kind="muted")

    def _end(self) -> float:
        return self._outcome.zero + self._outcome.seconds

    def _x(self, at: float) -> float:
        return LEFT + (at - self._outcome.zero) / self._seconds * (WIDTH - LEFT - RIGHT)


def _legend(y: float, colours: dict[str, str]) -> Iterator[str]:
    x = float(LEFT)
    for name, colour in colours.items():
        if name in BEATS:
            continue
        yield svg.rect(x, y, 26, BAR, fill=colour, radius=3)
        yield svg.text(x + 34, y + 12, name)
        x += 112
    bars = (
        (svg.circle(8, 8, 2.5, fill=MUTED), "heartbeat", 104),
        (svg.line(8, 3, 8, 13, stroke=MUTED, width=2), "skipped", 92),
        (svg.circle(8, 8, 3, fill="white", stroke=MUTED), "requeued, runs later", 164),
        (svg.cross(8, 8, stroke=ALARM), "killed", 80),
        (svg.rect(-6, 0, 24, BAR, stroke=ALARM, radius=3), "runs again", 110),
        (svg.rect(-6, 0, 24, BAR, fill=ALARM, opacity=0.22), "two runs of one key", 0),
    )
    yield from _signs(x, y, bars)
    beats = [colour for name, colour in colours.items() if name in BEATS]
    both = [svg.rect(8 * number, 2, 4, 12, fill=colour) for number, colour in enumerate(beats)]
    marks = (
        (svg.line(8, 5, 8, 10, stroke=MUTED, width=1.5), "call of the burst", 134),
        (svg.line(8, 2, 8, 13, stroke=INK, width=2), "... that published a message", 222),
        (svg.rect(-6, 5, 24, 5, fill=INK, opacity=0.3), "a message waits", 152),
        ("".join(both), "scheduled run", 116),
        (svg.rect(8, 2, 4, 12, fill=ALARM), "sent twice", 0),
    )
    yield from _signs(float(LEFT), y + 28, marks)


def _signs(x: float, y: float, signs: Iterable[tuple[str, str, int]]) -> Iterator[str]:
    for sign, words, room in signs:  # `room`: pixels to the next sign
        yield f'<g transform="translate({x:.1f} {y:.1f})">{sign}{svg.text(24, 12, words)}</g>'
        x += room
