"""Interruption, from the heartbeat's thread, of a task body: its lease is lost, or a newer call
cancels it. What becomes of the task then is decided in `run` (``TaskRun._interrupted``).

Guarantees
    ``LeaseInterrupt`` is raised only between the first and the last instruction of the body that is
    interrupted. ``except Exception`` in the body does not catch it. It ends an event loop of
    asyncio that the body runs, and all tasks of that loop are cancelled.

Non-guarantees
    A C call that does not return, a greenlet that never yields, and a body or a coroutine that
    catches BaseException are not interrupted. They can read ``current_lease().lost``. So can what
    runs in threads that the body has started.

Mechanism, by the thread that runs the body::

    main thread (prefork, solo)  a signal ends sleep, recv and lock waits; its handler raises if
                                 the body is still inside; the signal is sent until it is observed
    other thread (threads pool)  an asynchronous exception; a blocking call returns first
    either, in an event loop     a callback of the loop raises, between two steps of its tasks. A
                                 coroutine that does not yield is interrupted as above, after 0.3 s
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
import gc
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ..core import native_threads
from ..core.clock import SystemClock
from ..errors import LeaseLost

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

_R = TypeVar("_R")

# Seconds until an unobserved interrupt is sent again; doubled each time, up to the second number.
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 1.0

# How often an event loop is asked to call back (for 0.31 s) before its coroutine is interrupted.
_MOST_REQUESTS: Final = 5

# Celery uses SIGUSR1 (soft time limit) and SIGUSR2 (debugger). docs/how-to/pools.md says which
# software was examined. SIGRTMIN is above the signals that the C library reserves. macOS has no
# real-time signals; SIGURG is ignored there by default.
_SIGNAL: Final = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGURG


class LeaseInterrupt(BaseException):
    """Raised inside a body whose lease is lost.

    A BaseException, so that ``except Exception`` in the body lets it pass. It never leaves
    ``SingletonTask.__call__``.
    """


class LoopInterrupt(LeaseInterrupt, SystemExit):
    """The LeaseInterrupt of a body that runs an event loop.

    Asyncio and uvloop let a SystemExit end the loop. Of any other exception they take note as the
    end of the one task or callback that raised it, and go on.
    """


class _Disarmed(BaseException):
    """Replaces a LeaseInterrupt that came too late; never leaves this module."""


class Body:
    """One run of a task body, which another thread may interrupt."""

    fired = False
    _inside = False
    _observed = False
    _requests = 0  # to an event loop
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
        self.fired = True
        if self._throw is not None:
            if self._inside:
                self._throw(self._decide)
            return
        if self._guard:
            self._raise_on_thread()
        if self._inside and not self._observed:
            native_threads.start_new_thread(self._send_until_observed, "singleton-interrupt")

    def _send_until_observed(self) -> None:
        # One signal is not enough. If it arrives between Python's last check and a blocking system
        # call, Python handles it only when the call ends. The heartbeat often runs at just that
        # time, because it waited for the interpreter lock that the body releases before it blocks
        # (2 of 1000 sleeps were not interrupted on a busy machine).
        clock, pause = SystemClock(), _FIRST_PAUSE
        while self._inside and not self._observed:
            if self._guard:
                self._raise_on_thread()
            else:
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
            clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _raise_on_thread(self) -> None:
        """Interrupt a body on another thread than the main one. Called on any thread."""
        with self._guard:
            loop = _running_loop(_frame_of(self._thread), self)
            if (loop is None or not self._request(loop)) and self._observe():
                _set_async_exception(self._thread, LoopInterrupt if loop else LeaseInterrupt)

    def raise_on_main(self, frame: FrameType | None) -> None:
        """Interrupt a body on the main thread. Called by the signal handler.

        Args:
            frame: The frame that the signal interrupted.
        """
        loop = _running_loop(frame, self) if self.fired else None
        if loop is None:
            if self._observe():
                raise LeaseInterrupt
        elif not self._request(loop):
            self._leave(loop)

    def _decide(self, frame: FrameType | None) -> type[LeaseInterrupt] | None:
        """What to raise now in a body in a greenlet, which waits. Called by its hub."""
        if not self._observe():
            return None
        return LoopInterrupt if _running_loop(frame, self) else LeaseInterrupt

    def _request(self, loop: AbstractEventLoop) -> bool:
        """Have ``loop`` interrupt the body between two steps of its tasks.

        An exception that is raised in a step, or in asyncio's own code, may lose the wake-up of a
        task, for whose end ``asyncio.run`` then waits forever (2 to 11 of 200 busy loops).

        Returns:
            False: it has had time enough. A coroutine that does not yield keeps it from that.
        """
        if self._requests == _MOST_REQUESTS:
            return False
        self._requests += 1
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(self._leave, loop)
        return True

    def _leave(self, loop: AbstractEventLoop) -> None:
        """End ``loop``. Called on the body's thread, by the loop or the signal handler."""
        if not self._observe():
            return
        import asyncio

        try:
            # asyncio.run() does this too. A loop of the application's own may run again, with the
            # tasks of this body.
            for task in asyncio.all_tasks(loop):
                task.cancel()
        finally:
            raise LoopInterrupt

    def was_swallowed(self) -> None:
        """Interrupt the body again, soon. Called on its thread, by the hook for lost exceptions."""
        if self.fired and self._inside:
            native_threads.start_new_thread(self._interrupt_again, "singleton-interrupt")

    def _interrupt_again(self) -> None:
        SystemClock().sleep(_FIRST_PAUSE)  # until the hook has returned
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
        """Whether to raise in this body now.

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
    for body in _on_main_thread:
        body.raise_on_main(frame)


@cache
def _catch_unraisable() -> None:
    """Install the hook, before the first interrupt of a process: a later hook may call it."""
    former = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs, /) -> None:
        if not issubclass(unraisable.exc_type, LeaseInterrupt):
            former(unraisable)
            return
        ident = threading.get_ident()
        for body in [*_interrupted]:
            if body._thread == ident:
                body.was_swallowed()

    sys.unraisablehook = hook


def _frame_of(ident: int) -> FrameType | None:
    """The innermost frame of a thread.

    Before Python 3.11.9, the collector may run within `sys._current_frames`, which holds a lock of
    the interpreter. If a finalizer then lets another thread run, and that thread starts or ends,
    all threads of the process hang (python/cpython#106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(ident)
    finally:
        if collects:
            gc.enable()


def _running_loop(frame: FrameType | None, body: Body) -> AbstractEventLoop | None:
    """The event loop that ``body`` runs; None: it runs none.

    Only the thread of a loop can ask asyncio for it, so it is looked up on the stack. uvloop has no
    frames there, but the runner that runs it has.

    Args:
        frame: The innermost frame of the body's thread.
    """
    asyncio: Any = sys.modules.get("asyncio")
    if not hasattr(asyncio, "Runner"):
        return None  # it is not imported, or not completely
    while frame is not None:
        if frame.f_code.co_name in ("run", "run_forever"):
            owner = frame.f_locals.get("self")
            if owner is body:
                return None  # a loop further out is that of an outer body
            # get_loop() would create one, on this thread.
            loop = owner._loop if isinstance(owner, asyncio.Runner) else owner
            if isinstance(loop, asyncio.AbstractEventLoop):
                return loop  # type: ignore[no-any-return]
        frame = frame.f_back
    return None


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
