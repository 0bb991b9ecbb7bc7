"""A pool child as the shared record sees one: a fork with an index."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from celery_singleton_lock.worker.shared_memory import LeaseNote, SharedMemory

# Seconds; of one that a failed test has forgotten.
_LIFETIME = 60


@contextmanager
def open_pipe() -> Iterator[tuple[int, int]]:
    """A pipe for what a child says; both ends are closed in this process."""
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


class Child:
    """A forked pool child with an index, which obeys line by line and then waits to be killed."""

    def __init__(self, index: int | None, life: Callable[[], None]) -> None:
        done, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                from billiard.process import current_process

                if index is not None:
                    current_process().index = index
                signal.alarm(_LIFETIME)
                life()
                os.write(write, b"x")
                signal.pause()
            finally:
                os._exit(1)
        os.close(write)
        assert os.read(done, 1) == b"x", "the child failed"
        os.close(done)

    def kill(self) -> int:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return self.pid


def notes_of_dead(record: SharedMemory, pid: int) -> list[LeaseNote]:
    return [lease.note for lease in record.of_dead(pid)]
