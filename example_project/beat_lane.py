"""The lane of the beats in the timeline: a row per beat, its scheduled runs, and when it led."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from example_project import svg
from example_project.beats import BEATS, doubled, killed_beat, scheduled_runs
from example_project.journal import Entry, What
from example_project.lanes import ROW

#: Pixels: how high the mark of a scheduled run stands in its row.
MARK = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Reign:
    """A beat led, as the demo saw it in the store."""

    beat: str
    since: float
    until: float


def reigns(entries: Sequence[Entry], end: float) -> Iterator[Reign]:
    changes = [entry for entry in entries if entry.what is What.LEADS]
    for number, change in enumerate(changes):
        until = changes[number + 1].at if number + 1 < len(changes) else end
        if change.worker:
            yield Reign(beat=change.worker, since=change.at, until=until)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatLane:
    entries: Sequence[Entry]
    top: float
    left: float  # where labels end
    end: float  # of the run, CLOCK_MONOTONIC seconds
    x: Callable[[float], float]
    colours: dict[str, str]
    alarm: str

    @property
    def height(self) -> float:
        return len(BEATS) * ROW + 4

    def parts(self) -> Iterator[str]:
        sent = scheduled_runs(self.entries)
        twice = doubled(sent)
        for beat in BEATS:
            yield svg.text(self.left, self._row(beat) + 12, beat, anchor="end")
        for reign in reigns(self.entries, self.end):
            yield from self._reign(reign)
        yield from self._kill()
        for run in sent:
            x, y, colour = self.x(run.at), self._row(run.worker) + 2, self.colours[run.worker]
            tip = f"<title>{escape(f'{run.worker} sends a scheduled run, job {run.job}')}</title>"
            mark = svg.rect(x - 2, y, 4, MARK, fill=self.alarm if run in twice else colour)
            yield f"<g>{tip}{mark}</g>"

    def _reign(self, reign: Reign) -> Iterator[str]:
        kill = killed_beat(self.entries)
        until, y = reign.until, self._row(reign.beat)
        if kill and kill.worker == reign.beat and reign.since < kill.at < reign.until:
            # The store doesn't know yet: its lease has to run out before another may lead.
            until = kill.at
            x, width = self.x(until), self.x(reign.until) - self.x(until)
            yield svg.rect(x, y, width, ROW - 4, stroke=self.colours[reign.beat], dashes="3 3")
            yield svg.text(x + 10, y + 12, "dead, its lease runs out", kind="small")
        x = self.x(reign.since)
        width = max(self.x(until) - x, 2)
        yield svg.rect(x, y, width, ROW - 4, fill=self.colours[reign.beat], opacity=0.25, radius=3)
        yield svg.text(x + 6, y + 12, "leads", kind="small")

    def _kill(self) -> Iterator[str]:
        kill = killed_beat(self.entries)
        if kill is None:
            return
        x, y = self.x(kill.at), self._row(kill.worker) + ROW / 2 - 2
        yield svg.cross(x, y, stroke=self.alarm)
        yield svg.text(x - 5, self.top - 4, f"SIGKILL {kill.worker}", kind="alarm")
        back = (
            entry
            for entry in self.entries
            if (entry.what, entry.worker) == (What.READY, kill.worker) and entry.at > kill.at
        )
        for entry in back:
            x = self.x(entry.at)
            yield svg.circle(x, y, 3, fill=self.colours[kill.worker])
            yield svg.text(x + 7, y + 4, "is back", kind="small")

    def _row(self, beat: str) -> float:
        return self.top + BEATS.index(beat) * ROW + 2
