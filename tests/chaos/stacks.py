"""Where the processes of a worker are: the stacks that a campaign writes down of what never ends.

The parent prints its own through Celery (SIGUSR1), with the names of its threads, if its main one
comes back to Python. Parent and children also dump theirs by faulthandler, whose handler is in C:
it answers for a thread that waits for a lock as well.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.chaos.history import own_number
from tests.harness.processes import Process

#: Not a signal of Celery's or billiard's, nor the one that interrupts a body (SIGRTMIN + 11).
_SIGNAL: Final = signal.SIGRTMIN + 12
#: Begins the dump of each process; what Celery printed of the parent stands before the first.
HEAD: Final = "stacks of process "
#: Seconds for a process to dump its stacks (a stopped one can't), and between two looks.
_PATIENCE: Final = 5.0
_POLL: Final = 0.1


def dump_on_signal(directory: Path) -> None:
    """Have this process, and those that it forks, dump their stacks to a file each on `_SIGNAL`."""
    _register(directory)
    os.register_at_fork(after_in_child=lambda: _register(directory))


def _register(directory: Path) -> None:
    faulthandler.register(_SIGNAL, file=_path(directory, own_number()).open("w"), all_threads=True)


def _path(directory: Path, number: int) -> Path:
    return directory / f"{number}.stacks"


def stacks(worker: Process, directory: Path) -> str:
    """Where all threads of a worker are: what Celery prints of the parent, then `dumps`."""
    return f"{_printed_by_celery(worker)}\n{dumps(worker, directory)}"


def dumps(worker: Process, directory: Path) -> str:
    """What a worker and its children dump.

    Args:
        worker: Its processes have called `dump_on_signal` with ``directory``.
        directory: The directory of the dumps.
    """
    pids = [worker.pid, *worker.children()]
    paths = [_path(directory, worker.number_of(pid)) for pid in pids]
    return "\n".join(
        f"{HEAD}{pid}:\n{_dump(path, pid)}" for pid, path in zip(pids, paths, strict=True)
    )


def _printed_by_celery(worker: Process) -> str:
    """The parent's stacks with the names of its threads; empty if its main thread is stuck."""
    before = len(worker.lines)
    worker.send_signal(signal.SIGUSR1)
    try:
        # It is printed thread by thread. Celery's handler, which does that, runs in the main one,
        # so its own frame is the last of the stack that says what the worker is at.
        worker.wait_for_log(r" in cry$", timeout=10, since=before)
    except AssertionError:
        return ""
    return "\n".join(worker.lines[before:])


def _dump(path: Path, pid: int) -> str:
    """What a process dumps; empty if it doesn't, or is gone."""
    if not path.exists():
        return ""
    before = path.stat().st_size
    with suppress(ProcessLookupError):
        os.kill(pid, _SIGNAL)
    deadline = time.monotonic() + _PATIENCE
    size = before
    while time.monotonic() < deadline:
        time.sleep(_POLL)  # the pause between two looks at the file
        known, size = size, path.stat().st_size
        if before < size == known:  # nothing was added for a while: the dump is whole
            break
    with path.open() as stream:
        stream.seek(before)
        return stream.read()
