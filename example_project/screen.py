"""What the demo shows while it runs: a board on a terminal, lines where there is none."""

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from example_project import journal as records
from example_project.beats import BEATS, doubled, scheduled_runs
from example_project.burst import unpublished
from example_project.journal import Entry, What
from example_project.narration import heartbeats, narrated
from example_project.snapshot import Snapshot

#: The bar that shows what remains of a lease: characters, and the seconds they stand for.
BAR, BAR_SECONDS = 10, 2.0

#: Seconds between two lines about the leases, where lines are all there is.
LEASE_LINES_EVERY = 2.0

EVENTS = 8

BOLD, DIM, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"
RED, GREEN, YELLOW = "\x1b[31m", "\x1b[32m", "\x1b[33m"


class Screen(Protocol):
    def show(self, snapshot: Snapshot) -> None: ...
    def close(self) -> None: ...


def open_screen() -> Screen:
    return Board() if sys.stdout.isatty() else Lines()


class Lines:
    """One line per event, and every two seconds one about the leases."""

    def __init__(self) -> None:
        self._shown: set[Entry] = set()
        self._leases_shown = 0.0

    def show(self, snapshot: Snapshot) -> None:
        # Not by position: an entry that another process writes late may sort before shown ones.
        for entry, text in narrated(snapshot.entries):
            if entry not in self._shown:
                self._shown.add(entry)
                print(f"{_clock(entry, snapshot)}  {text}")
        if snapshot.leases and snapshot.now - self._leases_shown >= LEASE_LINES_EVERY:
            self._leases_shown = snapshot.now
            names = records.jobs(snapshot.entries)
            beats = heartbeats(snapshot.entries)
            held = [
                f"{names.get(lease.job, lease.key)} {lease.remaining:.1f} s,"
                f" {beats.get(lease.job, 0)} heartbeats"
                for lease in snapshot.leases
            ]
            print(f"{snapshot.now:6.2f} s  leases: {'; '.join(held)}")
            if leader := _leader(snapshot):
                print(f"{snapshot.now:6.2f} s  {leader}")
        sys.stdout.flush()

    def close(self) -> None:
        """Lines need no cleaning up."""


class Board:
    """The same place of the terminal, drawn again at each step; plain ANSI, no library."""

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
    twice = len(doubled(scheduled_runs(snapshot.entries)))
    up = {name: f"{name} {_up(alive)}" for name, alive in snapshot.alive.items()}
    workers = "   ".join(words for name, words in up.items() if name not in BEATS)
    yield f"{workers}   overlaps {_alarm(overlaps)}"
    leader = _leader(snapshot) or ("no beat leads" if snapshot.locked else "")
    beats = "   ".join(words for name, words in up.items() if name in BEATS)
    yield f"{beats}       scheduled runs sent twice {_alarm(twice)}   {leader}"
    yield ""
    counts = f"{'done':>5}{'skipped':>8}{'requeued':>9}{'unsent':>7}"
    yield f"{DIM}{'':20}{'runs on':20}{'lease':17}{'heartbeats':11}{counts}{PLAIN}"
    yield from _rows(snapshot)
    yield ""
    for entry, text in list(narrated(snapshot.entries))[-EVENTS:]:
        yield f"{DIM}{_clock(entry, snapshot)}{PLAIN}  {_coloured(text)}"


def _rows(snapshot: Snapshot) -> Iterator[str]:
    entries = snapshot.entries
    task_runs = records.runs(entries)
    names = records.jobs(entries)
    leases = {names[lease.job]: lease for lease in snapshot.leases if lease.job in names}
    beats = heartbeats(entries)
    requeue = records.requeues(entries)
    unsent = unpublished(entries)
    for lane in sorted(set(names.values())):
        runs = [run for run in task_runs if run.lane == lane]
        running = Counter(run.worker for run in runs if run.outcome == "running")
        lease = leases.get(lane)
        bar = _bar(lease.remaining) if lease else ""
        hearts = "♥" * min(beats.get(lease.job, 0), 10) if lease else ""
        done = sum(run.outcome == "done" for run in runs)
        skipped = sum(entry.lane == lane and entry.what is What.SKIP for entry in entries)
        waited = sum(entry.lane == lane for entry in requeue)
        colour = RED if running.total() > 1 else GREEN if running else DIM
        workers = [f"{name} x{n}" if n > 1 else name for name, n in running.items()]
        where = ", ".join(workers) or ("dead, lease runs out" if lease else "-")
        counts = f"{done:>5}{skipped:>8}{waited:>9}{unsent.get(lane, 0):>7}"
        # Padded before it is coloured: escape codes have no width.
        yield f"{lane:20}{colour}{_cut(where, 19):20}{PLAIN}{bar:17}{RED}{hearts:11}{PLAIN}{counts}"


def _clock(entry: Entry, snapshot: Snapshot) -> str:
    # Before the first call there is no time to count from.
    return f"{entry.at - snapshot.zero:6.2f} s" if snapshot.phase != "starting" else "   -    "


def _bar(remaining: float) -> str:
    filled = round(min(remaining / BAR_SECONDS, 1) * BAR)
    return "█" * filled + "░" * (BAR - filled) + f" {remaining:.1f} s"


def _leader(snapshot: Snapshot) -> str:
    """Which beat leads, as the store has it: a dead one until its lease is over."""
    if not snapshot.leader:
        return ""
    dead = "" if snapshot.alive[snapshot.leader] else ", but is dead"
    return f"{snapshot.leader} leads{dead}: lease {snapshot.leads_for:.1f} s"


def _alarm(count: int) -> str:
    return f"{RED if count else GREEN}{count}{PLAIN}"


def _up(alive: bool) -> str:
    return f"{GREEN}up{PLAIN}" if alive else f"{RED}down{PLAIN}"


def _coloured(text: str) -> str:
    alarms = dict.fromkeys(("OVERLAP", "KILLED", "SENT TWICE"), RED)
    alarms |= dict.fromkeys((" skips ", " requeued "), YELLOW)
    for word, colour in alarms.items():
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
