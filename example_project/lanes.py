"""Where the bars of the timeline stand: a lane per key, a row per body that runs at the same time.

Pure; lengths in pixels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from example_project import journal as records
from example_project.journal import Entry, Run, What

ROW, STRIP, LANE_GAP = 20, 14, 12

#: A lane of more rows than this gets low ones, without words on its bars.
TALL_ROWS, LOW_ROW = 6, 9

#: Between the bars and the marks below them, where waiting messages are drawn.
WAITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    name: str
    top: float
    rows: list[list[Run]]  # within a row nothing overlaps
    in_burst: bool  # its calls and its waiting messages are drawn too

    @property
    def row(self) -> int:
        return ROW if len(self.rows) <= TALL_ROWS else LOW_ROW

    @property
    def bar(self) -> int:
        return self.row - (4 if self.row == ROW else 2)

    @property
    def bars_height(self) -> float:
        return len(self.rows) * self.row

    @property
    def strip_top(self) -> float:
        return self.top + self.bars_height + (WAITS if self.in_burst else 0)

    @property
    def height(self) -> float:
        return self.strip_top + STRIP - self.top

    def row_top(self, row: int) -> float:
        return self.top + row * self.row + 2


def lanes(entries: Sequence[Entry], task_runs: Sequence[Run], top: float) -> Iterator[Lane]:
    called = {entry.lane for entry in entries if entry.what is What.CALL}
    for name in sorted(set(records.jobs(entries).values())):
        rows = _rows([run for run in task_runs if run.lane == name])
        lane = Lane(name=name, top=top, rows=rows, in_burst=name in called)
        yield lane
        top += lane.height + LANE_GAP


def _rows(task_runs: Sequence[Run]) -> list[list[Run]]:
    """Each run on the first row that is free when it starts: one row, unless something overlaps."""
    rows: list[list[Run]] = [[]]
    for run in task_runs:
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
