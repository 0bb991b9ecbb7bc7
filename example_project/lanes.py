"""Where the bars of the timeline stand: a lane per key, a row per body that runs at the same time.

Pure; lengths in pixels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from example_project import journal as records
from example_project.journal import Entry, Run

BAR, ROW, STRIP, LANE_GAP = 16, 20, 14, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    name: str
    top: float
    rows: list[list[Run]]  # within a row nothing overlaps

    @property
    def height(self) -> float:
        return len(self.rows) * ROW + STRIP

    def row_top(self, row: int) -> float:
        return self.top + row * ROW + 2


def lanes(entries: Sequence[Entry], executions: Sequence[Run], top: float) -> Iterator[Lane]:
    for name in sorted(set(records.jobs(entries).values())):
        lane = Lane(name=name, top=top, rows=_rows([run for run in executions if run.lane == name]))
        yield lane
        top += lane.height + LANE_GAP


def _rows(executions: Sequence[Run]) -> list[list[Run]]:
    """Each run on the first row that is free when it starts: one row, unless something overlaps."""
    rows: list[list[Run]] = [[]]
    for run in executions:
        row = next((row for row in rows if not row or row[-1].ended <= run.started), None)
        if row is None:
            rows.append(row := [])
        row.append(run)
    return rows


def shared(rows: Sequence[Sequence[Run]]) -> Iterator[tuple[float, float]]:
    """The times at which two bodies or more ran, as start and end."""
    steps = sorted(
        (at, step)
        for row in rows
        for run in row
        for at, step in ((run.started, 1), (run.ended, -1))
    )
    running, since = 0, 0.0
    for at, step in steps:
        before, running = running, running + step
        if (before, running) == (1, 2):
            since = at
        elif (before, running) == (2, 1):
            yield since, at
