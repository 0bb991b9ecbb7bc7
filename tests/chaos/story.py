"""The shortest story that shows a violation: what its jobs went through, and what was broken then.

All times are of CLOCK_MONOTONIC, which the hosts of a campaign share, in seconds since the story's
first line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tests.chaos.bodies import Body
from tests.chaos.verdict import Violation
from tests.harness.journal import Record

#: Seconds before the first body concerned asked for its lock, and after the last one's end.
_AROUND: Final = 1.0
#: Seconds after the last record of a job in which its worker's end and the faults are shown: what
#: a lost job was lost by.
_AFTER_JOB: Final = 30.0
_OF_PROCESS: Final = frozenset({"death", "stopped"})
_OF_WORKER: Final = frozenset({"down", "broken", "cut-off"})
#: What happens to the store or the processes, whatever the job.
_OF_ALL: Final = frozenset({"fault", "loss", "emptied"})
#: Steps of a body, of which a long one has hundreds; and what another record says too.
_LEFT_OUT: Final = frozenset({"check", "step", "write", "publishing"})
#: Fields that each line has already, or that are long.
_NOT_SHOWN: Final = frozenset({"worker", "text", "task", "name", "target", "end", "asked"})


def story(violation: Violation, found: Sequence[Body], records: Sequence[Record]) -> list[str]:
    """The lines of the story; none if the violation concerns no job.

    Args:
        violation: The violation.
        found: All bodies.
        records: The history, by time.
    """
    concerned = [body for body in found if body.run in violation.runs]
    jobs = {body.job for body in concerned} | ({violation.job} if violation.job else set())
    mine = [r for r in records if r.task_id in jobs and r.event not in _LEFT_OUT]
    if not mine:
        return []
    first, last = mine[0].at, mine[-1].at
    ends: list[Record] = []
    if violation.job:
        last += _AFTER_JOB
        ends = _ends_of_carriers(mine, records)
    else:
        first = min(body.asked for body in concerned) - _AROUND
        finished = [body.end for body in concerned if body.finished]
        last = max([violation.at, *finished]) + _AROUND
    shown = [r for r in [*mine, *ends] if first <= r.at <= last]
    shown += [
        r
        for r in records
        if r.event in _OF_ALL and r.at <= last and r.data.get("end", r.at) >= first
    ]
    shown.sort(key=lambda record: record.at)
    return [f"{record.at - shown[0].at:8.3f}  {_line(record)}" for record in shown]


def _ends_of_carriers(mine: Sequence[Record], records: Sequence[Record]) -> list[Record]:
    """The ends of the processes, the workers and the broker that may have had a job's message."""
    workers = {record.data.get("worker") for record in mine} - {None} | {"broker"}
    pids = {record.pid for record in mine}
    return [
        record
        for record in records
        if (record.event in _OF_PROCESS and record.pid in pids)
        or (record.event in _OF_WORKER and record.data.get("worker") in workers)
    ]


def _line(record: Record) -> str:
    if record.event == "fault":
        took = record.data["end"] - record.at
        return f"fault: {record.data['name']} ({record.data['target']}), for {took:.3f} s"
    return " ".join([f"{record.event:9} {record.task_id[:8]:8}", *_details(record)])


def _details(record: Record) -> Iterator[str]:
    yield f"{record.data.get('worker', 'pid')} {record.pid}"
    if record.key:
        yield f"key={record.key}"
    if record.fence is not None:
        yield f"fence={record.fence}"
    for name, value in record.data.items():
        if name not in _NOT_SHOWN and value is not None:
            yield f"{name}={value}"
