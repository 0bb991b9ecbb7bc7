"""Locks that a fork of the worker's parent waits for.

A thread of the parent holds one while it is inside a client of the store or the broker: locks that
such a thread holds there (import, resolver, OpenSSL) would stay locked in a forked child.
"""

from __future__ import annotations

import os
import threading
from typing import Final

# Seconds that a fork waits for a thread. Forks are rare; a server replies within a millisecond, or
# is unavailable.
_FORK_PATIENCE: Final = 0.2
#: The locks, by what their threads do.
FORK_LOCKS: Final[dict[str, threading.Lock]] = {}
_locked_by_fork: Final[list[threading.Lock]] = []


def _before_fork() -> None:
    """Wait until no thread is inside a client."""
    # extend(), because another thread may be forking too.
    locked = [lock for lock in FORK_LOCKS.values() if lock.acquire(timeout=_FORK_PATIENCE)]
    _locked_by_fork.extend(locked)


def _after_fork() -> None:
    while _locked_by_fork:
        _locked_by_fork.pop().release()


def _make_locks() -> None:
    # Also called in a forked child, which has none of the threads: a lock that one of them held at
    # the fork would stay locked there, and the child's own forks would wait for it.
    _locked_by_fork.clear()
    FORK_LOCKS.update({name: threading.Lock() for name in ("renewal", "retry", "events", "sweeps")})


_make_locks()
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_make_locks)
