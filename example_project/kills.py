"""What is killed in a run, and when: a worker in the middle of an import, and the beat that leads.

Each is started again some seconds later, as a supervisor would.
"""

import time
from collections.abc import Callable, Sequence

from example_project import journal as records
from example_project.beats import scheduled_runs
from example_project.journal import Entry, What
from example_project.processes import Processes

#: The kill waits for an import that is this many seconds old: in its middle, between two
#: heartbeats.
KILL_AGE = (0.6, 1.5)

#: Ticks that a beat has sent before it is killed: the run has seen it at work.
KILL_RUNS = 3

#: Seconds from the kill to the new process. By then the messages of a dead worker are old enough to
#: be delivered again (see VISIBILITY_TIMEOUT), and a dead leader's lease is over.
RESTART_AFTER = 2.5


class Kill:
    """One process that is killed as soon as `victim` names one, and started again later."""

    def __init__(
        self,
        processes: Processes,
        victim: Callable[[Sequence[Entry]], str | None],
        may_die: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._processes = processes
        self._victim = victim
        self._may_die = may_die  # asked while it is frozen
        self._killed_at = 0.0
        self._restarted = False
        self.name = ""

    def step(self, entries: Sequence[Entry], *, may_begin: bool) -> None:
        """Do what is due: kill, if it `may_begin`; start again."""
        now = time.monotonic()
        if not self.name:
            if may_begin and (victim := self._victim(entries)) and self._kill(victim):
                self.name, self._killed_at = victim, now
        elif now > self._killed_at + RESTART_AFTER and not self._restarted:
            self._restarted = True
            self._processes.start(self.name)

    def _kill(self, name: str) -> bool:
        self._processes.freeze(name)
        if not self._may_die(name):
            self._processes.thaw(name)  # another moment will do
            return False
        self._processes.kill(name)
        return True


def worker_in_an_import(entries: Sequence[Entry]) -> str | None:
    youngest, oldest = KILL_AGE
    now = time.monotonic()
    return next(
        (
            run.worker
            for run in records.runs(entries)
            if run.outcome == "running"
            and run.lane.startswith("import_account")
            and youngest <= now - run.started <= oldest
        ),
        None,
    )


def has_sent(beat: str, entries: Sequence[Entry]) -> bool:
    """Whether `beat` has sent so many runs that it may be killed."""
    return sum(run.worker == beat for run in scheduled_runs(entries)) >= KILL_RUNS


def are_ready(names: Sequence[str], entries: Sequence[Entry]) -> bool:
    """Whether all of them have taken up work."""
    return {entry.worker for entry in entries if entry.what is What.READY} >= set(names)
