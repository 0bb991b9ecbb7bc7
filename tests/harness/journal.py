"""What the bodies of the tests' tasks write down, and what follows from it.

One file of JSON lines per test. A line is one ``write`` to a file opened with O_APPEND, so lines of
many processes never mix, and what was written before a SIGKILL stays. Times are CLOCK_MONOTONIC:
one clock for all processes of a host, never stepped.

    start, end    a body entered and left; an ``end`` has the name of the exception that left it
    death         a process was killed here; its runs without an end ended then
    note          anything else that a body wants to say
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

#: The environment variable by which worker processes find the journal of their test.
VARIABLE = "JOURNAL"

#: Seconds between two looks at the file.
POLL = 0.01

#: Seconds that are waited for a line, as for a log's (`tests.harness.processes`).
TIMEOUT = 60.0

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line.

    Attributes:
        event: start, end, death or note.
        at: CLOCK_MONOTONIC, seconds.
        pid: The process that wrote it; of a death, the process that died.
        run: The same for the start and the end of one body; empty otherwise.
        task_id: The id of the task, or empty.
        key: What the body works on: bodies of one key must not overlap.
        fence: The fence of the body's lease, if it has one.
        data: Whatever else was given.
    """

    event: str
    at: float
    pid: int
    run: str = ""
    task_id: str = ""
    key: str = ""
    fence: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a body, from `begin` to `end` (infinite while nothing says that it ended).

    Attributes:
        error: The name of the exception that left the body; None for a return, and without an end.
        finished: Whether the body wrote its end itself.
    """

    key: str
    task_id: str
    pid: int
    begin: float
    end: float
    fence: int | None
    error: str | None
    finished: bool
    data: Mapping[str, Any]


class Journal:
    """The file; any number of processes and threads may write it.

    Args:
        path: The path of the file; made with the first line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # What was read, and up to which byte: those who wait look at it a hundred times a second.
        self._read: tuple[int, list[Record]] = 0, []
        self._reading = threading.Lock()

    @classmethod
    def from_env(cls) -> Journal:
        """The journal of the test that started this process."""
        return cls(Path(os.environ[VARIABLE]))

    def write(
        self,
        event: str,
        *,
        key: str = "",
        task_id: str = "",
        run: str = "",
        fence: int | None = None,
        pid: int | None = None,
        at: float | None = None,
        **data: Any,
    ) -> None:
        """Append one line; ``at`` and ``pid`` are now and this process when not given."""
        line: dict[str, Any] = {
            "event": event,
            "at": time.monotonic() if at is None else at,
            "pid": os.getpid() if pid is None else pid,
            "run": run,
            "task_id": task_id,
            "key": key,
            "fence": fence,
            "data": data,
        }
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)

    @contextmanager
    def run(
        self, key: str = "", *, task_id: str = "", fence: int | None = None, **data: Any
    ) -> Iterator[str]:
        """Write start and end around a body, whose name is given; what it raises passes through."""
        run = uuid4().hex
        error: str | None = None
        self.write("start", run=run, key=key, task_id=task_id, fence=fence, **data)
        try:
            yield run
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            self.write("end", run=run, key=key, task_id=task_id, fence=fence, error=error)

    def note(self, text: str, *, key: str = "", task_id: str = "", **data: Any) -> None:
        """Write anything; read back as ``record.data["text"]``."""
        self.write("note", key=key, task_id=task_id, text=text, **data)

    def death(self, pid: int, at: float) -> None:
        """Write that a process was killed: ``journal.death(pid, kill_process(pid))``."""
        self.write("death", pid=pid, at=at)

    def records(self) -> list[Record]:
        """All lines so far, in the order in which they were written."""
        with self._reading:
            offset, records = self._read
            offset, new = self.records_from(offset)
            self._read = offset, [*records, *new]
            return list(self._read[1])

    def records_from(self, offset: int) -> tuple[int, list[Record]]:
        """The lines from byte ``offset`` on, and the offset from which to read the next."""
        if not self.path.exists():
            return offset, []
        with self.path.open("rb") as stream:
            stream.seek(offset)
            data = stream.read()
        # A line without its newline is being written at this moment.
        whole = data[: data.rfind(b"\n") + 1]
        return offset + len(whole), [Record(**json.loads(line)) for line in whole.splitlines()]

    def runs(self, key: str | None = None) -> list[Run]:
        """`runs` of the lines so far."""
        return runs(self.records(), key=key)

    def overlaps(self) -> list[tuple[Run, Run]]:
        """`overlaps` of the lines so far."""
        return overlaps(self.records())

    def wait_for(
        self,
        predicate: Callable[[list[Record]], Answer],
        *,
        timeout: float = TIMEOUT,
        what: str = "the predicate holds",
    ) -> Answer:
        """Wait until ``predicate(records)`` is true, and return what it returned.

        Raises:
            AssertionError: It was not within ``timeout`` seconds; the message has the lines.
        """
        deadline = time.monotonic() + timeout
        while True:
            late = time.monotonic() > deadline  # read first: the last look comes after the deadline
            records = self.records()
            if answer := predicate(records):
                return answer
            if late:
                lines = "\n".join(map(str, records[-40:]))
                raise AssertionError(
                    f"waited {timeout:g} s without success until {what}. Journal:\n{lines}"
                )
            time.sleep(POLL)

    def wait_for_starts(
        self, count: int = 1, *, key: str | None = None, timeout: float = TIMEOUT
    ) -> list[Record]:
        """Wait until at least ``count`` bodies (of ``key``) started; returns their starts."""
        return self._wait_for_events("start", count, key, timeout)

    def wait_for_ends(
        self, count: int = 1, *, key: str | None = None, timeout: float = TIMEOUT
    ) -> list[Record]:
        """Wait until at least ``count`` bodies (of ``key``) ended; returns their ends."""
        return self._wait_for_events("end", count, key, timeout)

    def _wait_for_events(
        self, event: str, count: int, key: str | None, timeout: float
    ) -> list[Record]:
        def enough(records: list[Record]) -> list[Record] | None:
            found = events(records, event, key=key)
            return found if len(found) >= count else None

        what = f"there are {count} records {event!r} of {key or 'any key'}"
        found = self.wait_for(enough, timeout=timeout, what=what)
        assert found is not None
        return found


def events(records: Iterable[Record], event: str, *, key: str | None = None) -> list[Record]:
    """The records of one sort, of one key if it is given."""
    return [r for r in records if r.event == event and key in (None, r.key)]


def runs(
    records: Iterable[Record],
    *,
    key: str | None = None,
    deaths: Mapping[int, float] | None = None,
) -> list[Run]:
    """All runs, in the order of their starts.

    Args:
        records: The records of a journal.
        key: Only the runs of this key.
        deaths: When (CLOCK_MONOTONIC, seconds) which process id was killed, added to the deaths
            that the journal records. A run without an end ended then; the moment before the
            signal is the one to give, since nothing else may start before the process is dead.
    """
    records = list(records)
    died: dict[int, list[float]] = defaultdict(list)
    for record in events(records, "death"):
        died[record.pid].append(record.at)
    for pid, at in (deaths or {}).items():
        died[pid].append(at)
    ends = {record.run: record for record in events(records, "end")}

    def run_of(start: Record) -> Run:
        end = ends.get(start.run)
        # Process ids come again: only a death after the start can be this one's.
        deaths_after = [at for at in died[start.pid] if at >= start.at]
        return Run(
            key=start.key,
            task_id=start.task_id,
            pid=start.pid,
            begin=start.at,
            end=end.at if end else min(deaths_after, default=math.inf),
            fence=start.fence,
            error=end.data.get("error") if end else None,
            finished=end is not None,
            data=start.data,
        )

    starts = sorted(events(records, "start", key=key), key=lambda record: record.at)
    return [run_of(start) for start in starts]


def overlaps(
    records: Iterable[Record], *, deaths: Mapping[int, float] | None = None
) -> list[tuple[Run, Run]]:
    """All pairs of runs of one key that ran at the same time, the earlier one first.

    A run that neither ended nor died is taken to run for ever, so a kill that was forgotten in
    ``deaths`` shows as an overlap and can't hide one.
    """
    by_key: dict[str, list[Run]] = defaultdict(list)
    for run in runs(records, deaths=deaths):
        by_key[run.key].append(run)
    return [
        (first, second)
        for same_key in by_key.values()
        for first, second in combinations(same_key, 2)
        if second.begin < first.end
    ]


def most_at_once(
    records: Iterable[Record], key: str, *, deaths: Mapping[int, float] | None = None
) -> int:
    """How many bodies of one key ran at the same time, at most; for tests of ``limit``."""
    all_runs = runs(records, key=key, deaths=deaths)
    # At one instant the ends come first: a run that begins as another ends does not overlap it.
    steps = sorted([(r.end, -1) for r in all_runs] + [(r.begin, 1) for r in all_runs])
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most
