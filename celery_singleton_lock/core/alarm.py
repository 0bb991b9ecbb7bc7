"""The sleep of the heartbeat's thread, and what ends it early.

Overview
    The thread sleeps until its next sweep, a call of :meth:`Alarm.ring`, or the end of a
    connection of the store (see `Store.watch_connections`). On Linux the thread waits for all
    three in one system call. The kernel reports the end of a connection at once, although no thread
    reads from it. It reports nothing else: a reply to another thread does not wake this one.

Guarantees
    A ring between two sleeps ends the next one. A connection that the other end has closed is
    reported once, also if a request finds that first. The end of a connection that this process
    closes is not reported.
    On Linux the time of a sleep includes that in which the machine was suspended.

Non-guarantees
    On other systems the end of a connection is not reported, and a sleep is longer by the time of a
    suspension.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from typing import Any, Final

from . import native_threads
from .clock import Timer
from .process import this_process

# Seconds of one sleep at most: a lock can't wait for any number of seconds.
_LONGEST: Final = 3600.0


class Alarm:
    """The sleep of one thread, which calls :meth:`sleep`. Any thread may call the other methods.

    This class works everywhere. :func:`make_alarm` returns a better one where there is one.
    """

    def __init__(self) -> None:
        self._has_ended = False  # whether a connection has ended since the last sleep

    def ring(self) -> None:
        """End the sleep, or the next one."""
        raise NotImplementedError

    def sleep(self, seconds: float | None) -> bool:
        """Sleep for ``seconds`` (None: for ever), or until woken.

        Returns:
            Whether a connection has ended.
        """
        self._wait(seconds)
        has_ended = self._has_ended
        if has_ended:  # else another thread may set it between these two lines
            self._has_ended = False
        return has_ended

    def opened(self, sock: Any) -> None:
        """See `ConnectionWatch`."""

    def closing(self, sock: Any) -> None:
        """See `ConnectionWatch`."""

    def ended(self) -> None:
        """See `ConnectionWatch`."""
        self._has_ended = True
        self.ring()

    def _wait(self, seconds: float | None) -> None:
        raise NotImplementedError


class LockAlarm(Alarm):
    """Sleeps on a lock."""

    def __init__(self) -> None:
        super().__init__()
        self._lock: Any = native_threads.allocate_lock()  # released to wake the thread
        self._lock.acquire()

    def ring(self) -> None:
        with suppress(RuntimeError):  # the lock is released already: the thread will wake
            self._lock.release()

    def _wait(self, seconds: float | None) -> None:
        self._lock.acquire(timeout=-1 if seconds is None else min(seconds, _LONGEST))


class EpollAlarm(Alarm):
    """Sleeps in epoll_wait. The events are edge-triggered, so no event has to be read.

    Raises:
        AttributeError: This system has no epoll.
        OSError: This process has no descriptor left.
    """

    def __init__(self) -> None:
        super().__init__()
        # gevent and eventlet remove epoll from its module.
        self._epoll: Any = native_threads.original("epoll", "select")()
        self._process = this_process()
        self._bell: int = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # The timer is opened by the first sleep: many processes have a heartbeat that never sleeps.
        self._timer: Timer | None = None
        self._has_slept = False
        self._own: set[int] = set()  # the descriptors that are no connections
        self._reported: set[int] = set()  # open connections whose end was reported
        self._add(self._bell)

    def __del__(self) -> None:
        # Not sooner: another thread may be about to ring, and the number may be that of a file of
        # the application by then.
        with suppress(AttributeError):  # the constructor failed
            os.close(self._bell)

    def ring(self) -> None:
        with suppress(OSError):  # the application has closed all descriptors
            os.eventfd_write(self._bell, 1)

    def opened(self, sock: Any) -> None:
        if self._process is not this_process():
            return  # a forked child uses its parent's store; it shares epoll with its parent
        with suppress(OSError, ValueError):  # closed meanwhile, or the kernel watches too many
            self._reported.discard(sock.fileno())
            self._epoll.register(sock.fileno(), select.EPOLLRDHUP | select.EPOLLET)

    def closing(self, sock: Any) -> None:
        if self._process is not this_process():
            return
        try:
            descriptor = sock.fileno()
            self._epoll.unregister(descriptor)
        except (OSError, ValueError):
            return  # not registered
        # A request may find the end before this thread has woken, and closing would hide it.
        if descriptor not in self._reported and native_threads.has_ended(sock):
            self.ended()

    def _wait(self, seconds: float | None) -> None:
        if not self._has_slept:
            self._has_slept, self._timer = True, Timer.open()
            if self._timer is not None:
                self._add(self._timer.fileno())
        if self._timer is not None:
            self._timer.set(seconds)
            seconds = None
        for descriptor, _ in self._epoll.poll(seconds):
            if descriptor not in self._own:
                self._reported.add(descriptor)
                self._has_ended = True

    def _add(self, descriptor: int) -> None:
        self._own.add(descriptor)
        self._epoll.register(descriptor, select.EPOLLIN | select.EPOLLET)


def make_alarm() -> Alarm:
    """The best alarm of this system."""
    try:
        return EpollAlarm()
    except (AttributeError, OSError):
        return LockAlarm()
