"""A store that is entered, and left when the test says so, and a fork meanwhile."""

from __future__ import annotations

import os
import threading


class Stall:
    """A store that is entered, and left when the test says so."""

    def __init__(self) -> None:
        self.entered, self.leave, self.left = (threading.Event() for _ in range(3))

    def __call__(self) -> None:
        self.entered.set()
        assert self.leave.wait(30)
        self.left.set()


def assert_a_fork_waits_for(stall: Stall) -> None:
    """Fork while the store is entered: the child finds that it was left."""
    assert stall.entered.wait(30)
    threading.Timer(0.2, stall.leave.set).start()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if stall.left.is_set() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
