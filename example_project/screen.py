"""What the demo shows while it runs: a board on a terminal, lines where there is none."""

import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

from example_project import journal as records
from example_project.journal import Entry, What
from example_project.scenario import Snapshot

#: Width of the bar that shows what remains of a lease, in characters, and the seconds it stands
#: for.
BAR, BAR_SECONDS = 10, 2.0

#: Seconds between two lines about the leases, where lines are all there is.
LEASE_LINES_EVERY = 2.0

EVENTS = 8

BOLD, DIM, RED, GREEN, YELLOW, PLAIN = (
    "\x1b[1m",
    "\x1b[2m",
    "\x1b[31m",
    "\x1b[32m",
    "\x1b[33m",
    "\x1b[0m",
)


class Screen(Protocol):
    def show(self, snapshot: Snapshot) -> None: ...
    def close(self) -> None: ...


def open_screen() -> Screen:
    return Board() if sys.stdout.isatty() else Lines()


class Lines:
    """One line per event, and every two seconds one about the leases."""

    def __init__(self) -> None:
        self._told = 0
        self._leases_told = 0.0

    def show(self, snapshot: Snapshot) -> None:
        told = list(_told(snapshot.entries))
        # Entries of several processes may arrive a little out of order; what matters is that each
        # is told once.
        for entry, text in told[self._told :]:
            print(f"{_clock(entry, snapshot)}  {text}")
        self._told = len(told)
        if snapshot.leases and snapshot.now - self._leases_told >= LEASE_LINES_EVERY:
            self._leases_told = snapshot.now
            names = records.jobs(snapshot.entries)
            beats = _heartbeats(snapshot.entries)
            held = [
                f"{names.get(lease.job, lease.key)} {lease.remaining:.1f} s,"
                f" {beats.get(lease.job, 0)} heartbeats"
                for lease in snapshot.leases
            ]
            print(f"{snapshot.now:6.2f} s  leases: {'; '.join(held)}")
        sys.stdout.flush()

    def close(self) -> None:
        """Lines need no cleaning up."""


class Board:
    """The same place of the terminal, drawn anew at each step; plain ANSI, no library."""

    def __init__(self) -> None:
        self._height = 0
        sys.stdout.write("\x1b[?25l")  # hides the cursor

    def show(self, snapshot: Snapshot) -> None:
        width, height = shutil.get_terminal_size()
        lines = [_cut(line, width - 1) for line in _board(snapshot)][: height - 1]
        back = f"\x1b[{self._height}F" if self._height else ""
        sys.stdout.write(back + "\x1b[J" + "\n".join(lines) + "\n")
        sys.stdout.flush()
        self._height = len(lines)

    def close(self) -> None:
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()


def _board(snapshot: Snapshot) -> Iterator[str]:
    title = "With the lock" if snapshot.locked else "Without the lock"
    yield f"{BOLD}{title}{PLAIN}   {snapshot.phase}, {snapshot.now:.1f} s"
    overlaps = len(records.overlaps(records.runs(snapshot.entries)))
    workers = "   ".join(f"{name} {_up(alive)}" for name, alive in snapshot.alive.items())
    yield f"{workers}   overlaps {RED if overlaps else GREEN}{overlaps}{PLAIN}"
    yield ""
    counts = f"{'done':>5}{'skipped':>9}{'put back':>10}"
    yield f"{DIM}{'':20}{'runs on':22}{'lease':18}{'heartbeats':12}{counts}{PLAIN}"
    yield from _rows(snapshot)
    yield ""
    for entry, text in list(_told(snapshot.entries))[-EVENTS:]:
        yield f"{DIM}{_clock(entry, snapshot)}{PLAIN}  {_coloured(text)}"


def _rows(snapshot: Snapshot) -> Iterator[str]:
    entries = snapshot.entries
    executions = records.runs(entries)
    names = records.jobs(entries)
    leases = {names[lease.job]: lease for lease in snapshot.leases if lease.job in names}
    beats = _heartbeats(entries)
    put_back = records.put_backs(entries)
    for lane in sorted(set(names.values())):
        running = [
            run.worker for run in executions if run.lane == lane and run.outcome == "running"
        ]
        lease = leases.get(lane)
        bar = _bar(lease.remaining) if lease else ""
        hearts = "♥" * min(beats.get(lease.job, 0), 10) if lease else ""
        done = sum(run.lane == lane and run.outcome == "done" for run in executions)
        skipped = sum(entry.lane == lane and entry.what is What.SKIP for entry in entries)
        waited = sum(entry.lane == lane for entry in put_back)
        colour = RED if len(running) > 1 else GREEN if running else DIM
        # Padded before it is coloured: escape codes have no width.
        counted = ", ".join(
            f"{name} x{count}" if count > 1 else name for name, count in Counter(running).items()
        )
        where = counted or ("died, its lease runs out" if lease else "-")
        counts = f"{done:>5}{skipped:>9}{waited:>10}"
        yield f"{lane:20}{colour}{_cut(where, 21):22}{PLAIN}{bar:18}{RED}{hearts:12}{PLAIN}{counts}"


def _told(entries: Sequence[Entry]) -> Iterator[tuple[Entry, str]]:
    """The entries worth a line, and the line."""
    running: dict[str, dict[str, str]] = {}
    sent: set[str] = set()
    for entry in entries:
        lane = running.setdefault(entry.lane, {})
        if entry.what is What.START:
            others = ", ".join(lane.values())
            lane[entry.body] = entry.worker
            with_fence = f"   fence {entry.fence}" if entry.fence else ""
            warning = f"   OVERLAP with {others}" if others else ""
            yield entry, f"{entry.worker:9} runs      {entry.lane:20}{with_fence}{warning}"
        elif entry.what is What.END:
            lane.pop(entry.body, None)
            verb = "finishes" if entry.detail == "done" else "gives up"
            yield entry, f"{entry.worker:9} {verb:9} {entry.lane:20}"
        elif entry.what is What.SKIP:
            holders = ", ".join(lane.values())
            yield (
                entry,
                f"{entry.worker:9} skips     {entry.lane:20}"
                + (f"   runs on {holders}" if holders else ""),
            )
        elif entry.what is What.SENT:
            if entry.job in sent:
                yield entry, f"{'':9} put back  {entry.lane:20}"
            sent.add(entry.job)
        elif entry.what is What.KILL:
            for bodies in running.values():
                for body in [body for body, worker in bodies.items() if worker == entry.worker]:
                    del bodies[body]
            yield entry, f"{entry.worker:9} KILLED    by SIGKILL, with all its processes"
        elif entry.what is What.READY:
            yield entry, f"{entry.worker:9} ready"


def _heartbeats(entries: Sequence[Entry]) -> dict[str, int]:
    """Renewals seen so far, by job."""
    seen: dict[str, int] = {}
    for entry in entries:
        if entry.what is What.HEARTBEAT:
            seen[entry.job] = seen.get(entry.job, 0) + 1
    return seen


def _clock(entry: Entry, snapshot: Snapshot) -> str:
    # Before the first call there is no time to count from.
    return f"{entry.at - snapshot.zero:6.2f} s" if snapshot.phase != "starting" else "   -    "


def _bar(remaining: float) -> str:
    filled = round(min(remaining / BAR_SECONDS, 1) * BAR)
    return "█" * filled + "░" * (BAR - filled) + f" {remaining:.1f} s"


def _up(alive: bool) -> str:
    return f"{GREEN}up{PLAIN}" if alive else f"{RED}down{PLAIN}"


def _coloured(text: str) -> str:
    for word, colour in (
        ("OVERLAP", RED),
        ("KILLED", RED),
        (" skips ", YELLOW),
        (" put back ", YELLOW),
    ):
        text = text.replace(word, f"{colour}{word}{PLAIN}")
    return text


def _cut(line: str, width: int) -> str:
    """The first `width` visible characters.

    A longer line would wrap, and spoil the count of lines to go back.
    """
    visible, position = 0, 0
    while position < len(line) and visible < width:
        if line[position] == "\x1b":
            position = line.index("m", position) + 1
        else:
            visible, position = visible + 1, position + 1
    return line[:position] + (PLAIN if position < len(line) else "")
