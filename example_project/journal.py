"""The journal: what the bodies themselves saw, and what follows from it.

Every process appends JSON lines to one file. A line is one write() to a file opened with O_APPEND,
so lines of several processes don't mix; times are CLOCK_MONOTONIC, which all processes of a host
share and no program can set. Overlaps are computed from this file alone: neither the lock nor its
store is asked.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path


class What(StrEnum):
    CALL = "call"  # one of many calls was made; whether a message came of it, SENT says
    SENT = "sent"  # a message was published; again for the same job: it was requeued
    TAKEN = "taken"  # a worker took the message up; what it does with it comes after
    START = "start"  # a body began
    END = "end"  # the same body ended, `detail` says how
    SKIP = "skip"  # a call was skipped, its body never ran
    HEARTBEAT = "heartbeat"  # the demo saw a lease being renewed
    READY = "ready"  # a worker or a beat took up work
    LEADS = "leads"  # the demo saw that another beat leads now; without a name: none does
    KILL = "kill"  # a worker or beat and all its processes were killed, and are proven dead


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    at: float  # seconds of CLOCK_MONOTONIC
    what: What
    lane: str = (
        ""  # what must not run twice at a time, as the example itself names it: "import_account(1)"
    )
    job: str = ""  # Celery's task id
    body: str = ""  # names one run of the body; a redelivered job has several
    worker: str = ""  # or beat; the one that was at work, or sent the message
    fence: int | None = None
    detail: str = ""


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path

    def write(
        self,
        what: What,
        *,
        lane: str = "",
        job: str = "",
        body: str = "",
        worker: str = "",
        fence: int | None = None,
        detail: str = "",
    ) -> None:
        entry = Entry(
            at=time.monotonic(),
            what=what,
            lane=lane,
            job=job,
            body=body,
            worker=worker,
            fence=fence,
            detail=detail,
        )
        line = (
            json.dumps(
                {name: value for name, value in asdict(entry).items() if value not in ("", None)}
            )
            + "\n"
        )
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def read(self) -> list[Entry]:
        """All entries, by time."""
        if not self._path.exists():
            return []
        entries = [
            _parse(line)
            for line in self._path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        return sorted(entries, key=lambda entry: entry.at)


def lane_of(task_name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """What must not run twice at a time, named without the lock: the task, its first argument."""
    return f"{task_name.rpartition('.')[2]}({[*args, *kwargs.values()][0]})"


def _parse(line: str) -> Entry:
    fields = json.loads(line)
    return Entry(**{**fields, "what": What(fields["what"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a body."""

    lane: str
    job: str
    worker: str
    fence: int | None
    started: float
    ended: float  # for a body that still runs: infinity
    outcome: str  # "done", "killed", "running", or the exception that ended it


def runs(entries: Sequence[Entry]) -> list[Run]:
    """Every run, by start. A killed body wrote no end: it ended with its worker."""
    ends = {entry.body: entry for entry in entries if entry.what is What.END}
    kills = [entry for entry in entries if entry.what is What.KILL]
    found = []
    for start in (entry for entry in entries if entry.what is What.START):
        end = ends.get(start.body)
        kill = next(
            (kill for kill in kills if kill.worker == start.worker and kill.at >= start.at), None
        )
        if end is not None:
            ended, outcome = end.at, end.detail
        elif kill is not None:
            ended, outcome = kill.at, "killed"
        else:
            ended, outcome = float("inf"), "running"
        found.append(
            Run(
                lane=start.lane,
                job=start.job,
                worker=start.worker,
                fence=start.fence,
                started=start.at,
                ended=ended,
                outcome=outcome,
            )
        )
    return found


def overlaps(task_runs: Iterable[Run]) -> list[tuple[Run, Run]]:
    """Every pair of bodies of one lane that ran at the same time; touching ends don't count."""
    by_lane: dict[str, list[Run]] = defaultdict(list)
    for run in task_runs:
        by_lane[run.lane].append(run)
    return [
        (first, second)
        for lane in by_lane.values()
        for position, first in enumerate(lane)
        for second in lane[position + 1 :]
        if first.started < second.ended and second.started < first.ended
    ]


def jobs(entries: Iterable[Entry]) -> dict[str, str]:
    """Every job that was sent or seen to run, with its lane."""
    return {
        entry.job: entry.lane
        for entry in entries
        if entry.job and entry.what in (What.SENT, What.START)
    }


def unsettled(entries: Sequence[Entry]) -> set[str]:
    """Jobs that neither finished nor were skipped; a job that has started may no longer be skipped.

    While a run is going on, these are the jobs still to wait for. After it, they are the jobs lost.
    """
    task_runs = runs(entries)
    started = {run.job for run in task_runs}
    finished = {run.job for run in task_runs if run.outcome == "done"}
    skipped = {entry.job for entry in entries if entry.what is What.SKIP} - started
    return set(jobs(entries)) - finished - skipped


def requeues(entries: Iterable[Entry]) -> list[Entry]:
    """Publications of a job after its first: it came too early, and the worker sent it back."""
    seen: set[str] = set()
    again = []
    for entry in entries:
        if entry.what is What.SENT:
            if entry.job in seen:
                again.append(entry)
            seen.add(entry.job)
    return again
