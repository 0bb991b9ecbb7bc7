"""Interruption, from the heartbeat's thread, of a task body: its lease is lost, or a newer call
cancels it. What becomes of the task then is decided in `run` (``TaskRun._interrupted``).

Guarantees
    ``LeaseInterrupt`` is raised only between the first and the last instruction of the body that is
    interrupted. ``except Exception`` in the body does not catch it.

Non-guarantees
    A C call that does not return, a greenlet that never yields and a body that catches
    BaseException are not interrupted. They can read ``current_lease().lost``. So can an event loop
    of asyncio, which may take the exception for the end of one of its tasks, and go on.

Mechanism, by the thread that runs the body::

    main thread (prefork, solo)  a signal ends sleep, recv and lock waits; its handler raises if
                                 the body is still inside; the signal is sent until it is observed
    other thread (threads pool)  an asynchronous exception; a blocking call returns first
    greenlet (gevent, eventlet)  its hub throws the exception when the greenlet waits or yields.
                                 There, a signal could interrupt the hub, and an asynchronous
                                 exception would be raised in the greenlet that is running

    A destructor or a callback of a weak reference, which the collector may call at any time, loses
    each exception that is raised inside. Python reports it to ``sys.unraisablehook``, which
    interrupts the body again.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # see Body.run
import ctypes
import signal
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any, Final, TypeVar

from ..core import native_threads
from ..core.clock import SystemClock
from ..errors import LeaseLost

_R = TypeVar("_R")

# Seconds until an unobserved signal is sent again; doubled each time, up to the second number.
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 1.0

# Celery uses SIGUSR1 (soft time limit) and SIGUSR2 (debugger). docs/how-to/pools.md says which
# software was examined. SIGRTMIN is above the signals that the C library reserves. macOS has no
# real-time signals; SIGURG is ignored there by default.
_SIGNAL: Final = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGURG


class LeaseInterrupt(BaseException):
    """Raised inside a body whose lease is lost.

    A BaseException, so that ``except Exception`` in the body lets it pass. It never leaves
    ``SingletonTask.__call__``.
    """


class _Disarmed(BaseException):
    """Replaces a LeaseInterrupt that came too late; never leaves this module."""


class Body:
    """One run of a task body, which another thread may interrupt."""

    fired = False
    _inside = False
    _observed = False
    _on_main = False
    _guard: Any = None  # the lock for asynchronous exceptions
    _throw: Any = None

    def __init__(self) -> None:
        if _threads_are_greenlets():
            self._throw = native_threads.greenlet_thrower()
            return
        self._thread = threading.get_ident()
        self._on_main = self._thread == threading.main_thread().ident
        if not self._on_main:
            self._guard = native_threads.allocate_lock()

    def run(self, function: Callable[[], _R]) -> _R:
        """Call ``function`` on this thread.

        Raises:
            LeaseInterrupt: :meth:`interrupt` was called meanwhile.
        """
        if self._on_main:
            # signal.getsignal() converts its result to an Enum, at several times the cost.
            if _signal.getsignal(_SIGNAL) is not _on_signal:
                # Scalene replaces signal.signal() by a function that refuses signals without names.
                _signal.signal(_SIGNAL, _on_signal)
            _on_main_thread.append(self)
        try:
            try:
                self._inside = True
                if self.fired:
                    self._observed = True
                    raise LeaseInterrupt  # lost between the grant and the first instruction
                return function()
            finally:
                # From here on no interrupt is raised. An interrupt raised just before leaves this
                # block without the assignment, so the next block repeats it.
                self._inside = False
        finally:
            self._inside = False
            if self._on_main:
                _on_main_thread.remove(self)
            elif self._guard and self.fired:
                self._disarm()

    def interrupt(self) -> None:
        """End the body if it still runs. Called on the heartbeat's thread."""
        if self._throw is None:
            _catch_unraisable()
            _interrupted.add(self)
            # A body that ended takes no care of this set: it may end before it was added.
            _interrupted.difference_update([body for body in [*_interrupted] if not body._inside])
        if self._guard:
            with self._guard:
                self.fired = True
                if self._inside:
                    _set_async_exception(self._thread, LeaseInterrupt)
            return
        self.fired = True
        if not self._inside:
            return
        if self._on_main:
            native_threads.start_new_thread(self._send_until_observed, "singleton-interrupt")
        else:
            self._throw(LeaseInterrupt, self._observe)

    def _send_until_observed(self) -> None:
        # One signal is not enough. If it arrives between Python's last check and a blocking system
        # call, Python handles it only when the call ends. The heartbeat often runs at just that
        # time, because it waited for the interpreter lock that the body releases before it blocks
        # (2 of 1000 sleeps were not interrupted on a busy machine).
        clock, pause = SystemClock(), _FIRST_PAUSE
        while self._inside and not self._observed:
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
            clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def was_swallowed(self) -> None:
        """Interrupt the body again, soon. Called on its thread, by the hook for lost exceptions."""
        if self.fired and self._inside:
            native_threads.start_new_thread(self._interrupt_again, "singleton-interrupt")

    def _interrupt_again(self) -> None:
        SystemClock().sleep(_FIRST_PAUSE)  # until the hook has returned
        if self._guard:
            self.interrupt()
        else:
            self._observed = False
            self._send_until_observed()

    def _disarm(self) -> None:
        # The exception may be set but not raised yet. It must not be raised in Celery's code after
        # the body, so it is replaced by another one, which is raised here. Clearing it instead
        # would leave CPython's eval-breaker flag set (3.11, 3.12): all threads of the process would
        # run slower from then on (calls took twice as long), and hang under a debugger (3.11).
        try:
            with self._guard:
                _set_async_exception(self._thread, _Disarmed)
            while True:
                SystemClock().sleep(0)
        except _Disarmed:
            pass

    def _observe(self) -> bool:
        """Whether to raise in this body. Called by the signal handler or the hub.

        True only once, so that the body's cleanup is not interrupted.
        """
        if self._observed or not (self.fired and self._inside):
            return False
        self._observed = True
        return True


# Cached, because threads are patched before the first body or never.
_threads_are_greenlets: Final = cache(native_threads.is_patched)
# Bodies on the main thread, outermost first: an eager call runs inside another's body.
_on_main_thread: list[Body] = []
# The bodies of all threads that were interrupted and had not ended at the latest interrupt.
_interrupted: set[Body] = set()


def _on_signal(signum: int, frame: FrameType | None) -> None:
    if any(body._observe() for body in _on_main_thread):
        raise LeaseInterrupt


@cache
def _catch_unraisable() -> None:
    """Install the hook, before the first interrupt of a process: a later hook may call it."""
    former = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs, /) -> None:
        if unraisable.exc_type is not LeaseInterrupt:
            former(unraisable)
            return
        ident = threading.get_ident()
        for body in [*_interrupted]:
            if body._thread == ident:
                body.was_swallowed()

    sys.unraisablehook = hook


def _set_async_exception(ident: int, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))


def is_loss(error: BaseException, *, interrupted: bool) -> bool:
    """Whether a body whose lease is lost ended because of the loss.

    Args:
        error: The exception that ended the body. In a group, as ``asyncio.TaskGroup`` raises it,
            errors of the other tasks are ignored. An exception that ends the process, and the
            interrupt of a task that called this one, are propagated.
        interrupted: Whether the body was interrupted. Without that, only its own ``check()`` can
            have noticed the loss, earlier than the heartbeat.
    """
    if isinstance(error, BaseExceptionGroup):
        ours = (LeaseLost, LeaseInterrupt) if interrupted else (LeaseLost,)
        losses, others = error.split(ours)
        return losses is not None and (others is None or isinstance(others, Exception))
    if isinstance(error, LeaseLost):
        return True
    if isinstance(error, LeaseInterrupt):
        return interrupted
    return interrupted and isinstance(error, Exception) and _follows_interruption(error)


def _follows_interruption(error: BaseException) -> bool:
    """Whether ``error`` was raised while a body cleaned up after its interrupt.

    An example is the error of a rollback over the network whose failure lost the lease.
    """
    seen: set[int] = set()
    earlier = error.__context__
    while earlier is not None and id(earlier) not in seen:
        if isinstance(earlier, LeaseInterrupt):
            return True
        seen.add(id(earlier))
        earlier = earlier.__context__
    return False
