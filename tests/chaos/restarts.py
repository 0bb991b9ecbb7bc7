"""Whether the holders are notified of a restart without data within a second: pure functions.

A server that restarts without its data has lost its connections too, and their end makes each
process renew its leases. So each body that held a lease when the server was killed, and still runs
when the server accepts connections again, is interrupted within a second of that. (Its signal
lease_lost may come later, as an observer of an earlier loss may be slow.) The time for which the
machine was late is added to the second.

This concerns `lasting` alone, because its first renewal by the clock is due 9 s after its start at
the earliest, and its bodies are shorter than that: what notifies them is the end of the connection.

A holder is left out if something else was in the way between the kill and the end of that second,
by what the campaign has written down: its process was stopped, the network between it and the store
was disturbed, or the store was disturbed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.bodies import Body
from tests.chaos.lateness import deadline as deadline_of
from tests.chaos.schedule import SORTS, Lane
from tests.chaos.verdict import Kind, Violation
from tests.harness.journal import Record, events

#: Seconds: the ttl of `lasting`.
TTL = 30.0
#: Seconds from the first accepted connection to the interruption of a body.
WITHIN = 1.0
_TASK = "lasting"
#: What leaves a body whose lease is lost: thrown into it, or raised by its own check().
_INTERRUPTIONS = ("LeaseInterrupt", "LeaseLost")
_LANES = {sort.name: sort.lane for sort in SORTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A body whose lease was lost by a restart, and with whose notice nothing else interfered.

    Attributes:
        accepted: When the server accepted connections again.
        deadline: When it has to be notified.
        notified: When the body was interrupted, or the signal came; infinite: it was not.
    """

    body: Body
    accepted: float
    deadline: float
    notified: float


def holders(records: Sequence[Record], found: Iterable[Body]) -> list[Holder]:
    """The holders to which the promise applies, by the time of the restart."""
    lasting = [body for body in found if body.task.endswith(f".{_TASK}")]
    now = max((record.at for record in records), default=0.0)
    concerned = []
    for restart in events(records, "emptied"):
        killed, deadline = restart.data["killed"], deadline_of(records, restart.at, WITHIN)
        for body in lasting:
            if deadline > now or not body.begin < killed < body.end:
                continue
            notified = _notified(body, records)
            if notified < killed:
                continue  # another fault had taken its lease
            # A body that ended in time by itself need not have been notified.
            applies = notified <= deadline or deadline < body.end
            disturbances = [*_stops(body, records), *_faults(body, records, restart.at)]
            if applies and not any(at < deadline and end > killed for at, end in disturbances):
                concerned.append(
                    Holder(body=body, accepted=restart.at, deadline=deadline, notified=notified)
                )
    return concerned


def notified_late(concerned: Iterable[Holder]) -> list[Violation]:
    """The holders that were notified late, or not at all."""
    return [
        Violation(
            kind=Kind.REPORTED_LATE,
            key=holder.body.key,
            at=holder.deadline,
            runs=(holder.body.run,),
            text=(
                f"{holder.body.name} was notified {holder.notified - holder.accepted:.3f} s"
                " (inf: never) after the server that had lost its lease accepted connections,"
                f" by {holder.deadline - holder.accepted:.3f} s on this machine"
            ),
        )
        for holder in concerned
        if holder.notified > holder.deadline
    ]


def _notified(body: Body, records: Iterable[Record]) -> float:
    """When its process learned that the lease of ``body`` was lost, at the latest."""
    signals = (
        record.at
        for record in events(records, "lost")
        if (record.task_id, record.fence) == (body.job, body.fence)
    )
    interrupted = [body.end] if body.error in _INTERRUPTIONS else []
    return min([*signals, *interrupted], default=math.inf)


def _stops(body: Body, records: Iterable[Record]) -> Iterator[tuple[float, float]]:
    """From when to when its process was stopped."""
    since = math.inf
    for record in records:
        if record.pid != body.pid:
            continue
        if record.event == "stopped":
            since = record.at
        elif record.event == "continued":
            yield since, record.at
            since = math.inf
    yield since, math.inf


def _faults(
    body: Body, records: Iterable[Record], accepted: float
) -> Iterator[tuple[float, float]]:
    """The faults between its process and the store, and those of the store after ``accepted``."""
    for fault in events(records, "fault"):
        lane, target = _LANES.get(fault.data["name"]), fault.data["target"]
        of_all = lane is Lane.STORE and fault.at > accepted
        on_its_way = target == "all" or body.worker.startswith(f"{target}-")
        if of_all or (lane in (Lane.NETWORK, Lane.HOST) and on_its_way):
            yield fault.at, fault.data["end"]
