"""Ending a body whose lease is lost, from the heartbeat's thread.

Promises
    ``LeaseInterrupt`` is raised only between the first and the last instruction of the body it is
    meant for. ``except Exception`` in the body doesn't catch it.

Does not promise
    To end a C call that doesn't return, a greenlet that never yields, or a body that catches
    BaseException: there ``current_lease().lost`` tells.

How, by where the body runs::

    main thread (prefork, solo)  a signal of our own wakes sleep, recv and lock waits; its handler
                                 raises if the body is still inside. It is sent until it was heard
    other thread (threads pool)  an asynchronous exception; a blocking call ends first
    greenlet (gevent, eventlet)  its hub throws into it when it waits or yields
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # see _install_handler
import ctypes
import signal
import threading
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any, Final, TypeVar

from celery_singleton_lock.core import native
from celery_singleton_lock.core.clock import SystemClock

__all__ = ["Body", "GreenBody", "LeaseInterrupt", "body_class"]

_R = TypeVar("_R")

# Seconds until a signal that was not heard is sent again; doubles, up to the second.
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 1.0

# Not SIGUSR1 (Celery's soft time limit) nor SIGUSR2 (its debugger): a real-time signal, of which
# nobody has the eleventh, or SIGURG where there are none (macOS), which is ignored by default.
_SIGNAL: Final = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGURG


class LeaseInterrupt(BaseException):
    """Raised inside a body whose lease is lost. A BaseException, so that ``except Exception`` in
    the body lets it pass; never seen outside ``SingletonTask.__call__``."""


class _Disarmed(BaseException):
    """Takes the place of a LeaseInterrupt that came too late; never leaves this module."""


class Body:
    """One run of a body, which another thread may end."""

    __slots__ = ("_guard", "_heard", "_inside", "_on_main", "_thread", "fired")

    def __init__(self) -> None:
        self._inside = False
        self._heard = False
        self._thread = threading.current_thread()
        self._on_main = self._thread is threading.main_thread()
        # Of asynchronous exceptions, which the main thread gets none of.
        self._guard: Any = None if self._on_main else native.allocate_lock()
        self.fired = False

    def run(self, function: Callable[[], _R]) -> _R:
        """Call ``function`` on this thread.

        Raises:
            LeaseInterrupt: :meth:`interrupt` was called meanwhile.
        """
        if self._on_main:
            _install_handler()
            _in_main_thread.append(self)
        try:
            try:
                self._inside = True
                if self.fired:
                    self._heard = True
                    raise LeaseInterrupt  # lost between its grant and its first instruction
                return function()
            finally:
                # From here on nothing is raised. What struck just before is raised out of this very
                # block, which is why the next one says it again.
                self._inside = False
        finally:
            self._inside = False
            if self._on_main:
                _in_main_thread.remove(self)
            elif self.fired:
                self._disarm()

    def interrupt(self) -> None:
        """Heartbeat's thread: end the body if it still runs."""
        if self._on_main:
            self.fired = True
            if self._inside:
                native.start_new_thread(self._insist, "singleton-interrupt")
        else:
            with self._guard:
                self.fired = True
                if self._inside:
                    _set_async_exception(self._thread.ident or 0, LeaseInterrupt)

    def _insist(self) -> None:
        # Once is not enough: a signal that comes between Python's last look and the system call
        # that blocks is noticed when that call ends. And the heartbeat runs just then, for it
        # waited for the interpreter lock that the body gives up to block (2 of 1000 sleeps were
        # not ended, on a busy machine).
        clock, pause = SystemClock(), _FIRST_PAUSE
        while self._inside and not self._heard:
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
            clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _disarm(self) -> None:
        # The exception may be set and not raised yet; it must not hit what Celery does next.
        # Another one in its place is raised here. Setting none instead would leave CPython's
        # request for attention standing (3.11, 3.12): all threads of the process run slower from
        # then on (calls took twice as long), and under a debugger they hang (3.11).
        try:
            with self._guard:
                _set_async_exception(self._thread.ident or 0, _Disarmed)
            while True:
                SystemClock().sleep(0)
        except _Disarmed:
            pass

    def _hear(self) -> bool:
        """Whether the signal is for this body; true once, so that its cleaning up is left alone."""
        if self._heard or not (self.fired and self._inside):
            return False
        self._heard = True
        return True


class GreenBody:
    """As :class:`Body`, for a process whose threads, the main one too, are greenlets.

    A signal could interrupt the hub instead of the body, and an asynchronous exception would be
    raised in the greenlet that happens to run.
    """

    __slots__ = ("_heard", "_inside", "_throw", "fired")

    def __init__(self) -> None:
        self._inside = False
        self._heard = False
        self._throw = native.greenlet_thrower()
        self.fired = False

    def run(self, function: Callable[[], _R]) -> _R:
        """As of :class:`Body`."""
        try:
            self._inside = True
            if self.fired:
                self._heard = True
                raise LeaseInterrupt  # lost between its grant and its first instruction
            return function()
        finally:
            self._inside = False

    def interrupt(self) -> None:
        """Heartbeat's thread: end the body when it next waits or yields, if it still runs then."""
        self.fired = True
        if self._inside:
            self._throw(LeaseInterrupt, self._hear)

    def _hear(self) -> bool:
        """Hub: whether to throw; true only once, so that the body's cleanup is not interrupted."""
        if self._heard or not self._inside:
            return False
        self._heard = True
        return True


@cache
def body_class() -> type[Body] | type[GreenBody]:
    """The class for this process, cached: threads are patched before the first body or never."""
    return GreenBody if native.is_patched() else Body


# Bodies on the main thread, outermost first: an eager call runs inside another's body.
_in_main_thread: list[Body] = []


def _on_signal(signum: int, frame: FrameType | None) -> None:
    if any(body._hear() for body in _in_main_thread):
        raise LeaseInterrupt


def _install_handler() -> None:
    # Not signal.getsignal(): it makes an Enum of what it finds, at several times the cost.
    if _signal.getsignal(_SIGNAL) is not _on_signal:
        signal.signal(_SIGNAL, _on_signal)


def _set_async_exception(ident: int, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))
