"""Native threads, locks and queues, also where gevent or eventlet has patched Python's threads.

A greenlet that renews leases starves while a body loops without yielding (4 s measured); a native
thread does not. A native thread can't wait on a patched lock, and can't use a socket that belongs
to another thread's hub. Therefore the heartbeat and the store's connections use this module.
"""

from __future__ import annotations

import _thread
import os
import queue
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import BuiltinFunctionType, FrameType
from typing import Any, Final

#: Raises an exception in one greenlet. The function returns it, or None, when the greenlet's hub
#: runs the request; it is called with the innermost frame of the greenlet.
Throw = Callable[[Callable[[FrameType | None], type[BaseException] | None]], None]


def _patched_by() -> str:
    """The library that has patched threads, ``"gevent"`` or ``"eventlet"``; empty: none."""
    if type(_thread.start_new_thread) is BuiltinFunctionType:
        return ""  # the cheap test comes first: most processes use neither
    # Debuggers replace the function too, so its type alone proves nothing.
    gevent_monkey = sys.modules.get("gevent.monkey")
    if gevent_monkey is not None and gevent_monkey.is_module_patched("_thread"):
        return "gevent"
    eventlet_patcher = sys.modules.get("eventlet.patcher")
    if eventlet_patcher is not None and eventlet_patcher.is_monkey_patched("thread"):
        return "eventlet"
    return ""


def original(name: str, module: str = "_thread") -> Any:
    """The unpatched ``<module>.<name>``, even if gevent or eventlet has patched it already."""
    library = _patched_by()
    if not library:
        return getattr(sys.modules[module], name)
    if library == "gevent":
        return sys.modules["gevent.monkey"].get_original(module, name)
    return getattr(sys.modules["eventlet.patcher"].original(module), name)


def allocate_lock() -> Any:
    """A lock that blocks the whole thread: hold it for a few instructions, never over I/O."""
    return original("allocate_lock")()


def is_patched() -> bool:
    """Whether Python's threads are greenlets here."""
    return bool(_patched_by())


# What belongs to a native thread, and ends with it. Nothing is kept by the number of a thread: that
# is given again after its end, and a later thread would use sockets of a hub that no longer runs,
# and wait forever. Its attributes, each only in some threads: `owner`, the thread's SocketOwner;
# `hub`, a function that runs a function on the hub of the thread that started this one; `caller`,
# its _EventletCaller.
_own: Final[Any] = original("_local")()


class SocketOwner:
    """What the sockets of one native thread belong to."""


#: Of a process whose threads are not patched: any thread may use any socket.
_PROCESS: Final = SocketOwner()


def socket_owner() -> SocketOwner:
    """The owner of a socket created here: the native thread's if threads are patched."""
    if type(_thread.start_new_thread) is BuiltinFunctionType:
        return _PROCESS  # inlined from `_patched_by`: each command of a store calls this function
    if not is_patched():
        return _PROCESS
    owner: SocketOwner | None = getattr(_own, "owner", None)
    if owner is None:
        owner = _own.owner = SocketOwner()
    return owner


def is_readable(sock: Any) -> bool:
    """Whether a read from ``sock`` returns at once, with data or with the end of the stream."""
    poller = original("poll", "select")()
    poller.register(sock.fileno(), select.POLLIN)
    return bool(poller.poll(0))


def has_ended(sock: Any) -> bool:
    """Whether the other end has closed ``sock``, or this process has."""
    if sock.fileno() < 0:
        return True
    poller = original("poll", "select")()
    poller.register(sock.fileno(), getattr(select, "POLLRDHUP", select.POLLHUP))
    return bool(poller.poll(0))


def greenlet_thrower() -> Throw:
    """A function that raises an exception in the current greenlet, callable from any thread.

    Requires is_patched(). Another thread may call only one function of a hub: the one that wakes
    it. The hub then throws the exception. It runs only while the greenlet waits.
    """
    call_soon = _hub_caller()
    current = sys.modules[_patched_by()].getcurrent()

    def throw(decide: Callable[[FrameType | None], type[BaseException] | None]) -> None:
        def throw_on_hub() -> None:
            if (exception := decide(current.gr_frame)) is not None:
                current.throw(exception)

        call_soon(throw_on_hub)

    return throw


def _hub_caller() -> Callable[[Callable[[], Any]], Any]:
    """A function that runs a function on the current thread's hub, callable from any thread."""
    if _patched_by() == "gevent":
        import gevent

        call_soon: Any = gevent.get_hub().loop.run_callback_threadsafe
        return call_soon  # type: ignore[no-any-return]
    import eventlet

    return _eventlet_caller(eventlet.hubs.get_hub())


class _EventletCaller:
    """Calls functions on an eventlet hub, which a native thread can wake only through a pipe.

    Args:
        hub: The hub of the current thread.
    """

    def __init__(self, hub: Any) -> None:
        self.hub = hub
        self._functions: deque[Callable[[], Any]] = deque()
        # Eventlet's own read() and write() may switch to the hub, but this code runs on the hub.
        self._os: Any = sys.modules["eventlet.patcher"].original("os")
        self._reader, self._writer = self._os.pipe()
        hub.add(hub.READ, self._reader, self._call, lambda *_: None, lambda: None)

    def __del__(self) -> None:
        # The hub keeps this object, and ends with its thread.
        for descriptor in (self._reader, self._writer):
            self._os.close(descriptor)

    def __call__(self, function: Callable[[], Any]) -> None:
        """Run ``function`` on the hub. Called on any thread."""
        self._functions.append(function)
        self._os.write(self._writer, b".")

    def _call(self, fileno: int) -> None:
        """Run the next queued function. Called on the hub's greenlet."""
        self._os.read(fileno, 4096)
        while self._functions:
            self._functions.popleft()()


def _eventlet_caller(hub: Any) -> _EventletCaller:
    caller: _EventletCaller | None = getattr(_own, "caller", None)
    if caller is None or caller.hub is not hub:
        caller = _own.caller = _EventletCaller(hub)
    return caller


def make_queue() -> Any:
    """An unbounded FIFO queue; ``get`` blocks the whole thread."""
    return original("SimpleQueue", "queue")()


def inbox() -> Any:
    """A FIFO queue. ``get`` blocks only the current greenlet where threads are patched; any native
    thread may ``put``.
    """
    # Called for each request, so the cheap test comes first.
    if type(_thread.start_new_thread) is BuiltinFunctionType or not is_patched():
        return make_queue()
    return _GreenInbox()


class _GreenInbox:
    """The inbox of one greenlet.

    A native thread can't release a greenlet's lock, but it can make that greenlet's hub release it.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()
        self._call_soon = _hub_caller()

    def put(self, item: Any) -> None:
        self._call_soon(lambda: self._queue.put(item))

    def get(self, timeout: float) -> Any:
        return self._queue.get(timeout=timeout)


def _hub_of_bodies() -> Callable[[Callable[[], Any]], Any]:
    """A function that runs a function on this thread's hub.

    A native thread of this library has no hub that runs; then it is the hub of the thread that
    started it.
    """
    return getattr(_own, "hub", None) or _hub_caller()


def start_new_thread(function: Callable[[], None], name: str) -> None:
    """Run ``function`` in a native thread that does not keep the process alive."""
    if not is_patched():
        threading.Thread(target=function, name=name, daemon=True).start()
        return
    hub = _hub_of_bodies()

    def run() -> None:
        _own.hub = hub
        try:
            function()
        finally:
            del _own.hub

    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = make_queue()
        # threading.Thread would start a greenlet here.
        original("start_new_thread")(_run_one_after_another, (inbox,))
    inbox.put(run)


# The inboxes of the native threads that have nothing to do.
_idle: list[Any] = []
os.register_at_fork(after_in_child=_idle.clear)


def _run_one_after_another(inbox: Any) -> None:
    """Run what is put into ``inbox``, as long as the process lives.

    If the thread ended, no other thread could close its sockets, and the files of its hub would
    stay open: gevent's own way to close them crashed the process when a socket was left.
    """
    while True:
        inbox.get()()
        _idle.append(inbox)


def start_beside_bodies(function: Callable[[], None], name: str) -> None:
    """Run code of the application in a thread of the kind that runs bodies; see above.

    Where threads are patched, that is a greenlet of the bodies' hub. In a native thread, a client
    of the application would open sockets of another hub, and a body that used one of them later
    would fail.
    """

    def start() -> None:
        threading.Thread(target=function, name=name, daemon=True).start()

    if is_patched():
        # start() waits until the thread runs. The hub itself can't wait, so a greenlet does.
        _hub_of_bodies()(lambda: _thread.start_new_thread(start, ()))
    else:
        start()
