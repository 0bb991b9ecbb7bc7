"""Closing of connections that a process needed once and no longer uses.

A burst of waiting clients, or of threads that publish, takes one connection each. Later requests
use the connection that was used last, so the others would stay open, and count against the limit of
the server, for as long as the process lives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakMethod, WeakSet

from ..core import native_threads
from ..core.clock import Clock
from ..core.native_threads import SocketOwner

#: Seconds after which an idle connection is closed instead of used. NATs and load balancers drop
#: idle connections without notice; the shortest common timeout is 240 s.
MAX_IDLE: Final = 60.0

# The number of connections to one server that a process may keep. Most processes never have more,
# and so never start a thread here. One thread has at most one idle connection per timeout of a
# request, so under gevent and eventlet the heartbeat's native thread does not start one.
_KEPT: Final = 8


class IdleSweep:
    """Closes the idle connections to one server, while the process has many.

    A daemon thread does this once a minute, until few connections are left. Where threads are
    patched, it is a greenlet of the native thread that owns the sockets.

    Args:
        close_old: Closes the idle connections of the current thread that were idle for longer than
            ``MAX_IDLE``. A method, because the thread must not keep its object alive.
        clock: The clock of the thread's pauses.
    """

    def __init__(self, close_old: Callable[[], None], clock: Clock) -> None:
        self._close_old = WeakMethod(close_old)
        self._clock = clock
        # Connections in use count too: a waiting client uses its connection for a minute.
        self._open: WeakKeyDictionary[SocketOwner, WeakSet[Any]] = WeakKeyDictionary()
        self._sweeping: WeakSet[SocketOwner] = WeakSet()

    def opened(self, connection: Any) -> None:
        """Note a new connection of the current thread; it is forgotten with the object."""
        owner = native_threads.socket_owner()
        self._open.setdefault(owner, WeakSet()).add(connection)
        self._begin(owner)

    def _begin(self, owner: SocketOwner) -> None:
        if len(self._open[owner]) <= _KEPT or owner in self._sweeping:
            return
        self._sweeping.add(owner)
        try:
            threading.Thread(
                target=self._sweep, args=(owner,), name="singleton-idle", daemon=True
            ).start()
        except RuntimeError:  # the interpreter exits, or the process has too many threads
            self._sweeping.discard(owner)

    def _sweep(self, owner: SocketOwner) -> None:
        self._clock.sleep(MAX_IDLE)
        close_old = self._close_old()
        if close_old is not None:
            close_old()
            self._sweeping.discard(owner)
            self._begin(owner)
