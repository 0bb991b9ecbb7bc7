"""When a process must have told the store that a job is done: pure functions.

A release, with the completion record of a job that is done, is repeated until the store answers,
while its process lives; so is the end of the claim of a message that was discarded. So it has
arrived once the process has run for some seconds without a fault between it and the store. Not so
if the store refused it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tests.chaos.schedule import SORTS, Lane
from tests.harness.journal import Record, events

#: Seconds, on a busy machine. After a request without a reply, the queue of a process pauses for
#: one, and each of its requests may wait for its timeout.
REPEATED_WITHIN = 4.0
_LANES = (Lane.NETWORK, Lane.STORE, Lane.HOST)
#: The faults that keep a process from reaching the store.
_SEPARATING = {s.name for s in SORTS if s.lane in _LANES or s.name.startswith("stop-")}
#: What the campaign writes down of a process.
_OF_OTHERS = ("death", "stopped", "continued", "down", "broken")


class Ends:
    """The faults and the lives of processes in a history.

    Args:
        records: The history, by time.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._faults = sorted(
            (fault.at, float(fault.data["end"]))
            for fault in events(records, "fault")
            if fault.data["name"] in _SEPARATING
        )
        self._deaths: dict[int, list[float]] = defaultdict(list)
        self._last_sign: dict[int, float] = {}
        for record in records:
            if record.event == "death":
                self._deaths[record.pid].append(record.at)
            elif record.event not in _OF_OTHERS:
                self._last_sign[record.pid] = record.at
        self._refused = {
            (record.pid, record.task_id)
            for record in events(records, "release-failed")
            if "refuses" in str(record.data.get("error", ""))
        }

    def known_at(self, pid: int, job: str, left_at: float) -> float | None:
        """When the store must know the end of a job at the latest; None: it need not.

        Args:
            pid: The process that did the job.
            job: The job.
            left_at: When its task had ended as SUCCESS, or its message was discarded.
        """
        at = left_at
        for begin, end in self._faults:
            if begin < at + REPEATED_WITHIN and end > at:
                at = end
        at += REPEATED_WITHIN
        died = any(left_at <= death <= at for death in self._deaths[pid])
        lived_on = not died and self._last_sign.get(pid, 0.0) >= at
        return at if lived_on and (pid, job) not in self._refused else None
