"""Observers: sinks of events that may block, each with a queue and a thread of its own.

Overview
    Log handlers, receivers of signals and other sinks of events are code of the user, which may
    block (a webhook, an error reporter, a full disk). Most events happen on the thread of the body
    that they are about, and their observers run there. A thread on which other leases depend, such
    as the heartbeat's, runs its code `elsewhere`: each observer gets the events of that thread on
    a thread of its own. The observer `log` also gets the log records of that thread (`defers`).
    Where gevent or eventlet has patched threads, that thread is a greenlet of the bodies' hub, and
    ends when its queue is empty: see `native_threads.start_beside_bodies`.

Guarantees
    A thread inside `elsewhere` never waits for an observer, and no observer waits for another one.
    An observer gets the events of a process in the order in which they were emitted: while its
    queue is not empty, the events of all other threads are added to it. No thread but its own
    waits for it then.
    What has run for `SLOW` seconds in an observer's thread is named in the log, once while events
    wait.

Non-guarantees
    Delivery. A queue has room for `MOST_WAITING` events. Further events are dropped, and their
    number is logged when the observer goes on. The end of the process waits for a second, and a
    SIGKILL for nothing.
    An observer that a body's thread runs is not watched: only that body waits for it.
    A greenlet that never yields stops the observers, as it stops all bodies of its hub.

Failure handling
    An exception of an observer is logged. A forked child has empty queues and no threads: the
    parent's threads run what waited at the fork. A fork waits for the observers that run, for a
    moment: locks that they hold, such as those of a client, would stay locked in the child.
"""

from __future__ import annotations

import _thread
import atexit
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from queue import Empty
from typing import Any, Final

from . import native_threads
from .clock import SystemClock

logger = logging.getLogger("celery_singleton_lock")

#: The number of events that may wait for an observer. A loss of 1,000 leases at once fits.
MOST_WAITING: Final = 2000
#: Seconds after which a call in an observer's thread is named in the log; twice that at the latest.
SLOW: Final = 10.0
#: Seconds that the end of a process waits for its observers.
LAST_CALLS: Final = 1.0
# Seconds after which a thread that has not begun is started again, because its hub may have ended.
# Many events may come before a busy hub runs its greenlet.
_START_PATIENCE: Final = 0.1
# Seconds that a fork waits for the observers that run.
_FORK_PATIENCE: Final = 0.2
_clock: Final = SystemClock()

# The threads and greenlets that are inside `elsewhere`. Their identity is read through the module,
# because gevent and eventlet replace the function: a hub's greenlets have one native identity.
_serving: Final[set[int]] = set()


@contextmanager
def elsewhere() -> Iterator[None]:
    """Run observers on their own threads: those of the events of this thread in this block."""
    thread = _thread.get_ident()
    if thread in _serving:
        yield
        return
    _serving.add(thread)
    try:
        yield
    finally:
        _serving.discard(thread)


def serves_others() -> bool:
    """Whether this thread is inside `elsewhere`."""
    return _thread.get_ident() in _serving


class Observer:
    """A sink of events that may block. Starts its thread when it is first needed.

    Args:
        sink: Called with each event.
        name: The name of the thread.
        what: What the sink is, in log lines; its module and name by default.
        wants: Whether the sink uses an event. Called before an event is added to the queue.

    Attributes:
        thread: The identity of the thread or greenlet that runs what waits; 0: none.
    """

    def __init__(
        self,
        sink: Callable[[Any], object],
        name: str,
        *,
        what: str = "",
        wants: Callable[[Any], object] = lambda event: True,
    ) -> None:
        self._sink, self._name, self._wants = sink, name, wants
        self._what = what or name_of(sink)
        self.reset()
        _observers.append(self)

    def __repr__(self) -> str:
        return f"<Observer {self._what}>"

    def reset(self) -> None:
        """Begin with an empty queue and without a thread, as in a forked child."""
        # The first call is removed when it has returned, so an empty queue means an idle thread.
        self._calls: deque[Callable[[], object]] = deque()
        self._dropped = 0
        self._alarm: Any = native_threads.allocate_lock()  # released to wake the thread
        self._alarm.acquire()
        self._start: Any = native_threads.allocate_lock()  # held by the thread that runs
        self._started_at = 0.0  # the time of a start that has not begun to run yet
        self.thread = 0
        self._watch: Any = native_threads.allocate_lock()  # held by the thread that watches
        self.guard: Any = native_threads.allocate_lock()  # held while the sink runs, and by a fork
        # What runs: another tuple for each call of the user's code.
        self._running: tuple[object, ...] = ()

    def __call__(self, event: Any) -> None:
        """Call the sink with ``event``: now, or on the observer's thread in a copy of the caller's
        context."""
        if self._calls or _thread.get_ident() in _serving:
            self.put(event)
        else:
            self._sink(event)

    def is_due_later(self) -> bool:
        """Whether an event of this thread has to wait: behind others, or because the thread must
        not."""
        return bool(self._calls) or _thread.get_ident() in _serving

    def put(self, event: Any) -> None:
        """Pass ``event`` to the observer's thread."""
        if not self._wants(event):
            return
        if len(self._calls) < MOST_WAITING:
            self._calls.append(partial(copy_context().run, self.deliver, event))
            self._wake()
        else:
            self._dropped += 1

    def deliver(self, event: Any) -> None:
        """Call the sink with an event that has waited."""
        self.begin(self._sink)
        self._sink(event)

    def begin(self, function: object) -> None:
        """Note that ``function`` begins to run on the observer's thread."""
        self._running = (function,)

    def flush(self, seconds: float = LAST_CALLS) -> None:
        """Wait at most ``seconds`` for the events that are in the queue now."""
        if not self._calls or self.thread == _thread.get_ident():
            return
        done = native_threads.inbox()
        self._calls.append(lambda: done.put(None))
        self._wake()
        with suppress(Empty):
            done.get(timeout=max(seconds, 0.001))

    def _wake(self) -> None:
        # The new thread sets `thread`: if none can be started now, the next call tries again.
        if not self.thread and (now := _clock.now()) - self._started_at > _START_PATIENCE:
            self._started_at = now
            try:
                native_threads.start_beside_bodies(self._run, self._name)
            except (RuntimeError, OSError, ValueError):  # too many threads, or the hub has ended
                self._started_at = 0.0
        with suppress(RuntimeError):  # the lock is released already: the thread will wake
            self._alarm.release()

    def _run(self) -> None:
        start, calls = self._start, self._calls
        if not start.acquire(blocking=False):
            return  # two calls came at once, and each started a thread
        self.thread = _thread.get_ident()
        with elsewhere():
            self._run_calls()
            while not native_threads.is_patched():
                self._alarm.acquire()
                self._run_calls()
        if calls is not self._calls:
            return  # the copy of a greenlet, in a forked child
        # A call that comes between the last look and this line has started no greenlet.
        self._started_at, self.thread = 0.0, 0
        start.release()
        if calls:
            self._wake()

    def _run_calls(self) -> None:
        calls = self._calls
        while calls and calls is self._calls:
            if not self._watch.locked():
                with suppress(RuntimeError):  # no thread can be started now
                    native_threads.start_new_thread(self._name_slow_calls, f"{self._name}-watch")
            try:
                with self.guard:
                    calls[0]()
            except BaseException:
                # SystemExit in a receiver must not end the thread.
                logger.exception("singleton: %r failed", self)
            self._running = ()
            calls.popleft()
        if dropped := self._dropped:
            self._dropped -= dropped
            logger.warning(
                "singleton: %d events were dropped for %s, because that was too slow. All other "
                "sinks have them",
                *(dropped, self._what),
            )

    def _name_slow_calls(self) -> None:
        """Name what runs for long. A thread of its own, while events wait."""
        sleep, named = native_threads.original("sleep", "time"), set[str]()
        watch, calls = self._watch, self._calls  # reset() replaces them
        with elsewhere():
            # A call that comes between the last look and the release has started no thread.
            while calls and watch.acquire(blocking=False):
                while calls:
                    running = self._running
                    sleep(SLOW)
                    if not running or running is not self._running:
                        continue
                    name = name_of(*running)
                    if name not in named:
                        named.add(name)
                        logger.warning(
                            "singleton: %s has run for %g s, and %d events wait for %s. No task, "
                            "no lease and no other sink does",
                            *(name, SLOW, len(calls) - 1, self._what),
                        )
                watch.release()


def name_of(function: Any) -> str:
    """The module and the name of ``function``, or those of its class."""
    function = getattr(function, "func", function)  # of a partial
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def defers(record: logging.LogRecord, *, always: bool = False) -> bool:
    """Whether ``record`` is handled later, by `log`. For a filter of a logger.

    Args:
        record: The record.
        always: For a logger that only serving threads use: a client's.
    """
    if _thread.get_ident() == log.thread or not (always or log.is_due_later()):
        return False
    log.put(partial(logging.getLogger(record.name).handle, record))
    return True


def flush(seconds: float = LAST_CALLS) -> None:
    """Wait at most ``seconds`` for the events that are in the queues of observers now."""
    until = _clock.now() + seconds
    for observer in reversed(_observers):  # the log comes last: others write to it
        observer.flush(until - _clock.now())


def _call(write: Callable[[], object]) -> None:
    write()


_observers: Final[list[Observer]] = []
#: The observer that writes to the log. Its events are functions that write one line.
log: Final = Observer(_call, "singleton-log", what="log handlers")
# The guards that the fork of a thread holds.
_held_by_forks: Final[dict[int, list[Any]]] = {}


def _before_fork() -> None:
    """Wait a moment until no observer runs, and let none begin until `_after_fork`."""
    if native_threads.is_patched():
        return  # the observers' greenlets live on in the child, and release what they hold
    thread, until = _thread.get_ident(), _clock.now() + _FORK_PATIENCE
    held = _held_by_forks[thread] = list[Any]()
    for observer in _observers:
        if observer.thread == thread:
            continue  # an observer forks
        if observer.guard.acquire(timeout=max(until - _clock.now(), 0.0)):
            held.append(observer.guard)


def _after_fork() -> None:
    for guard in _held_by_forks.pop(_thread.get_ident(), ()):
        guard.release()


def _after_fork_in_child() -> None:
    _serving.clear()
    _held_by_forks.clear()
    for observer in _observers:
        observer.reset()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)
atexit.register(flush)
logger.addFilter(lambda record: not defers(record))
