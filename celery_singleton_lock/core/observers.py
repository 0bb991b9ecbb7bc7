"""The thread that runs observers in place of threads that must not wait for them.

Overview
    Observers are log handlers, receivers of signals and other sinks of events: code of the user,
    which may block (a webhook, an error reporter, a full disk). Most events happen on the thread of
    the body that they are about, and their observers run there. A thread on which other leases
    depend, such as the heartbeat's, runs its code `elsewhere`: the observers of its events, and the
    handlers of its log records, run on one thread of their own.

Guarantees
    A thread inside `elsewhere` never waits for an observer. Observers get the events of a process
    in the order in which they were emitted: while the observers' thread is busy, the observers of
    all other threads run on it too.

Non-guarantees
    Delivery. The queue has room for `MOST_WAITING` calls. Further calls of a thread inside
    `elsewhere` are dropped, and their number is logged when the observers' thread goes on. (Another
    thread then runs its observers itself.) The end of the process waits for a second, and a SIGKILL
    for nothing.

Failure handling
    An exception of an observer is logged. A forked child has an empty queue and no thread: the
    parent's thread runs what waited at the fork. A fork waits for the observer that runs, for a
    moment: locks that it holds, such as those of a client, would stay locked in the child.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Final

from . import native

logger = logging.getLogger("celery_singleton_lock")

#: The number of calls that may wait for the thread. A loss of 1,000 leases at once fits.
MOST_WAITING: Final = 2000
#: Seconds that the end of a process waits for its observers.
LAST_CALLS: Final = 1.0
# Seconds that a fork waits for the observer that runs.
_FORK_PATIENCE: Final = 0.2


class ObserverThread:
    """Runs observers; starts its thread when it is first needed."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin with an empty queue and without a thread, as in a forked child."""
        # The first call is removed when it has returned, so an empty queue means an idle thread.
        self._calls: deque[Callable[[], object]] = deque()
        self._dropped = 0
        # The threads that are inside `elsewhere`, by their native identity.
        self._serving: set[int] = set()
        self._alarm: Any = native.allocate_lock()  # released to wake the thread
        self._alarm.acquire()
        self._start: Any = native.allocate_lock()  # held by the thread that runs
        self._running = False
        self._thread = 0  # the native identity of the thread
        self._guard: Any = native.allocate_lock()  # held while an observer runs, and by a fork
        self._forks: list[None] = []  # an item while a fork holds it

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Run observers on their own thread: those of the events of this thread in this block."""
        thread = native.get_ident()
        if thread in self._serving:
            yield
            return
        self._serving.add(thread)
        try:
            yield
        finally:
            self._serving.discard(thread)

    def run(self, observe: Callable[..., object], *args: Any) -> None:
        """Call ``observe``, now or on the observers' thread; in a copy of the caller's context."""
        serving = native.get_ident() in self._serving
        if not serving and not self._calls:
            observe(*args)
        elif len(self._calls) < MOST_WAITING:
            self._calls.append(partial(copy_context().run, observe, *args))
            self._wake()
        elif serving:
            self._dropped += 1
        else:
            observe(*args)

    def defers(self, record: logging.LogRecord, *, always: bool = False) -> bool:
        """Whether ``record`` is handled later, on the observers' thread. For a filter of a logger.

        Args:
            record: The record.
            always: For a logger that only serving threads use: a client's.
        """
        thread = native.get_ident()
        if thread == self._thread or not (always or thread in self._serving):
            return False
        with self.elsewhere():
            self.run(logging.getLogger(record.name).handle, record)
        return True

    def flush(self, seconds: float = LAST_CALLS) -> None:
        """Wait at most ``seconds`` for the observers that are in the queue now."""
        if not self._calls:
            return
        done: Any = native.allocate_lock()
        done.acquire()
        self._calls.append(done.release)
        self._wake()
        done.acquire(timeout=seconds)

    def before_fork(self) -> None:
        """Wait a moment until no observer runs, and let none begin until :meth:`after_fork`."""
        if native.get_ident() == self._thread:
            return  # an observer forks
        if self._guard.acquire(timeout=_FORK_PATIENCE):
            self._forks.append(None)

    def after_fork(self) -> None:
        """Called in the parent."""
        with suppress(IndexError):  # the guard was not free, or another thread has forked too
            self._forks.pop()
            self._guard.release()

    def _wake(self) -> None:
        if not self._running:
            # The new thread sets _running: if no thread can be started now, the next call tries
            # again.
            try:
                native.start_new_thread(self._run, "singleton-observers")
            except RuntimeError:
                return
        try:
            self._alarm.release()
        except RuntimeError:
            pass  # the lock is released already: the thread will wake

    def _run(self) -> None:
        if not self._start.acquire(blocking=False):
            return  # two calls came at once, and each started a thread
        self._running, self._thread = True, native.get_ident()
        while True:
            while self._calls:
                try:
                    with self._guard:
                        self._calls[0]()
                except BaseException:
                    # SystemExit in a receiver must not end the thread.
                    logger.exception("singleton: an observer failed")
                self._calls.popleft()
            if dropped := self._dropped:
                self._dropped -= dropped
                logger.warning(
                    "singleton: %d log lines and signals were dropped, because log handlers and "
                    "receivers of signals were too slow. Worker events and metrics have them",
                    dropped,
                )
            self._alarm.acquire()


#: The observers of this process.
observers: Final = ObserverThread()
os.register_at_fork(
    before=observers.before_fork,
    after_in_parent=observers.after_fork,
    after_in_child=observers.reset,
)
atexit.register(observers.flush)
logger.addFilter(lambda record: not observers.defers(record))
