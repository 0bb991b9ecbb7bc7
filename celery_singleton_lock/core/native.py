"""Threads of the operating system, also where gevent or eventlet replaced Python's.

A renewing greenlet starves as soon as a body loops without yielding (4 s measured); a native thread
does not. It can't wait on a patched lock, nor use a socket that belongs to another thread's hub, so
the keeper and the store's connections use what this module hands out.
"""

from __future__ import annotations

import _thread
import importlib
import select
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = [
    "allocate_lock",
    "get_ident",
    "is_patched",
    "is_readable",
    "socket_owner",
    "start_new_thread",
]


def _original(name: str, module: str = "_thread") -> Any:
    """The unpatched ``<module>.<name>``, whichever library patched it and whenever it did."""
    gevent_monkey = sys.modules.get("gevent.monkey")
    if gevent_monkey is not None:
        return gevent_monkey.get_original(module, name)
    eventlet_patcher = sys.modules.get("eventlet.patcher")
    if eventlet_patcher is not None:
        return getattr(eventlet_patcher.original(module), name)
    return getattr(importlib.import_module(module), name)


def allocate_lock() -> Any:
    """A lock that blocks the whole thread: hold it for a few instructions, never over I/O."""
    return _original("allocate_lock")()


def is_patched() -> bool:
    """Whether Python's threads are greenlets here."""
    return _original("start_new_thread") is not _thread.start_new_thread


def get_ident() -> int:
    """The identity of the operating system's thread, the same for all greenlets on it."""
    return int(_original("get_ident")())


def socket_owner() -> int:
    """Whose a socket made here is: a thread's, with its hub, where threads are patched; else 0."""
    if "gevent.monkey" not in sys.modules and "eventlet.patcher" not in sys.modules:
        return 0  # asked at each command of a store
    return get_ident() if is_patched() else 0


def is_readable(sock: Any) -> bool:
    """Whether a read from ``sock`` would not block, because of data or of the end of the stream."""
    poll = select.poll if "gevent.monkey" not in sys.modules else _original("poll", "select")
    poller = poll()
    poller.register(sock.fileno(), select.POLLIN)
    return bool(poller.poll(0))


def start_new_thread(function: Callable[[], None], name: str) -> None:
    """Run ``function`` in a native thread that does not keep the process alive."""
    if not is_patched():
        threading.Thread(target=function, name=name, daemon=True).start()
    else:
        # threading.Thread would start a greenlet here.
        _original("start_new_thread")(function, ())
