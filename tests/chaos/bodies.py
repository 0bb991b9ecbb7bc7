"""From records to bodies and their exclusive sections: pure functions.

A *section* is the time in which a body had the lock's word that it is alone. It begins when a
``check()`` has returned, and it ends with the first of these:

* the guarded step that the check covers is over, and a second question right after it was answered
  with yes: then everything in between was the body's, at whatever length;
* that question was answered with no, or never came: then the section ends at the deadline that the
  lock had given at the check (``remaining()``), or with the step, whichever is earlier;
* the process died, or an exception left the body.

So a body that is stopped between a check and its write is not charged with the time after its
deadline: no lock can hold a stopped process back, and there the fence has to help. A lock that
gives no deadline is charged with the whole step. All times are read so that a section comes out too
short rather than too long: an overlap of two sections is one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from celery_singleton_lock import Rate
from tests.harness.journal import Record, events

#: How many bodies of a key may run at a time, by task; else one.
LIMITS = {"limited": 2, "queued_several": 3}
#: How many bodies of a key may begin in a time, by task.
RATES = {"rated": Rate(4, burst=2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Exclusive time of one body, seconds of CLOCK_MONOTONIC."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """One task run.

    Attributes:
        run: Its name.
        job: Celery's task id.
        attempt: 0, or how often the task has retried itself.
        asked: When its lock was asked for, at the latest.
        begin, end: Infinite while nothing says that it ended.
        finished: Whether it wrote its end itself.
        error: What left it; None for a return, and without an end.
        lease: The id by which events name its lease.
        call: The number of the call whose arguments it has; 0: it has no number.
        sections: Where it had the lock's word, by time.
    """

    run: str
    key: str
    job: str
    pid: int
    worker: str
    task: str
    late: bool
    attempt: int
    fence: int | None
    asked: float
    begin: float
    end: float
    finished: bool
    error: str | None
    lease: str
    call: int
    sections: tuple[Section, ...]

    @property
    def succeeded(self) -> bool:
        return self.finished and self.error is None

    @property
    def limit(self) -> int:
        """How many bodies of its key may run at a time."""
        return LIMITS.get(self.task.rpartition(".")[2], 1)

    @property
    def name(self) -> str:
        """For people."""
        task, fence = self.task.rpartition(".")[2], self.fence
        numbers = f"pid {self.pid}" + ("" if fence is None else f", fence {fence}")
        return f"{task}[{self.job[:8]}] on {self.worker} ({numbers})"


def bodies(records: Iterable[Record]) -> list[Body]:
    """All bodies, by the time of their beginning."""
    records = list(records)
    ends = {record.run: record for record in events(records, "end")}
    deaths: dict[int, list[Record]] = defaultdict(list)
    for record in events(records, "death"):
        deaths[record.pid].append(record)
    marks: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.event in ("check", "step"):
            marks[record.run].append(record)
    found = [
        _body(start, ends.get(start.run), deaths[start.pid], marks[start.run])
        for start in events(records, "start")
    ]
    return sorted(found, key=lambda body: body.begin)


def _body(
    start: Record, end: Record | None, deaths: Sequence[Record], marks: Sequence[Record]
) -> Body:
    marks = sorted(marks, key=lambda record: record.at)
    ended = end.at if end else _death(start, deaths, marks)
    return Body(
        run=start.run,
        key=start.key,
        job=start.task_id,
        pid=start.pid,
        worker=start.data.get("worker", ""),
        task=start.data.get("task", ""),
        late=bool(start.data.get("late")),
        attempt=int(start.data.get("attempt", 0)),
        fence=start.fence,
        asked=start.data.get("asked", start.at),
        begin=start.at,
        end=ended,
        finished=end is not None,
        error=end.data.get("error") if end else None,
        lease=str(start.data.get("lease", start.task_id)),
        call=int(start.data.get("call", 0)),
        sections=tuple(_sections(marks, ended)),
    )


def _death(start: Record, deaths: Sequence[Record], marks: Sequence[Record]) -> float:
    """When a body without an end ended: not before its last sign of life, not later than it must.

    A death is known to lie between its ``at`` and its ``until``. Process ids come again.
    """
    last = max((record.at for record in marks), default=start.at)
    possible = [d for d in deaths if max(d.at, d.data.get("until", d.at)) >= last]
    return max(last, min(d.at for d in possible)) if possible else math.inf


def _sections(marks: Sequence[Record], ended: float) -> Iterable[Section]:
    for number, check in enumerate(marks):
        if check.event != "check":
            continue
        following = marks[number + 1] if number + 1 < len(marks) else None
        step = following if following and following.event == "step" else None
        end = _section_end(check, step, ended)
        if end > check.at:
            yield Section(begin=check.at, end=end)


def _section_end(check: Record, step: Record | None, ended: float) -> float:
    until: float = check.data["until"]
    if step is None:
        return min(until, ended)
    sure_until: float | None = step.data.get("sure_until")
    return min(until, step.at) if sure_until is None else sure_until


def by_key(found: Iterable[Body]) -> Mapping[str, list[Body]]:
    """The bodies of each key, in their order."""
    keys: dict[str, list[Body]] = defaultdict(list)
    for body in found:
        keys[body.key].append(body)
    return keys
