"""The processes of a run: found by a mark in their environment, examined, ended.

A process inherits the mark from the step that started it and keeps it when its parent ends, so a
daemon that a test left behind is found too. Linux only: it reads /proc.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

MARK = "SINGLETON_CI_RUN"

#: Seconds in which the kernel ends what was killed.
_END = 10.0


def of_run(run: str) -> dict[int, str]:
    """The processes that carry the mark of this run: process id to command line."""
    mark = f"{MARK}={run}".encode()
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        pid = int(directory.name)
        # A process may end while it is read, and a kernel thread has no environment.
        with suppress(OSError):
            if pid != os.getpid() and mark in (directory / "environ").read_bytes().split(b"\0"):
                arguments = (directory / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                found[pid] = b" ".join(arguments).decode(errors="replace")
    return found


def print_stacks(run: str, py_spy: Path) -> None:
    """Print the stack of each thread of the run's Python processes, and what else it has."""
    for pid, command in sorted(of_run(run).items()):
        print(f"--- process {pid}: {command[:200]}", flush=True)
        if "python" in command and py_spy.exists():
            with suppress(subprocess.TimeoutExpired):
                subprocess.run([py_spy, "dump", "--pid", str(pid)], timeout=10, check=False)


def end_all(run: str) -> list[str]:
    """Kill every process of the run; returns the command lines of those that were there."""
    left = of_run(run)
    deadline = time.monotonic() + _END
    while (alive := of_run(run)) and time.monotonic() < deadline:
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return sorted(left.values())
