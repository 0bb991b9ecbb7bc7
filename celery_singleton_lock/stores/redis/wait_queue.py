"""Places in the lines for keys: each a blocking pop, on a connection that nothing else uses.

Promises
    Redis serves those who block on one list in the order in which they came, and forgets at once
    whose connection is closed: so who has waited longest is called, of those who live. A place is
    kept while its caller looks at the key in between. No wait outlasts what was asked for by more
    than a connection's timeout, whatever the server does.

Does not promise
    That a call arrives. Who was called and died has taken it along; the key is free again half a
    second later (wait_queue.lua), and the others look by themselves.

States of a place::

    (nothing sent) --BLPOP--> blocking --reply: called, or 60 s over--> (nothing sent)
                                 +-- error, exception, leave(): closed, and forgotten there;
                                     after an error taken anew, three times at most

Under gevent a connection belongs to a thread's hub, so idle ones are kept per native thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import redis

from celery_singleton_lock.core import native
from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.redis.connection import Connections
from celery_singleton_lock.stores.redis.replies import receive
from celery_singleton_lock.stores.redis.resp import ErrorReply, ProtocolError, Replies, pack
from celery_singleton_lock.stores.redis.transport import MAX_IDLE
from celery_singleton_lock.stores.redlock.waiting import ready

__all__ = ["Places"]

logger = logging.getLogger("celery_singleton_lock")

# Seconds; then the place is lost, and taken anew at the end. A host that vanished without a word
# stands in the line no longer than that.
_LONGEST_BLOCK: Final = 60
# After as many breaks without a reply between them, a place is given up: something on the way to
# the server doesn't bear connections that block.
_BREAKS: Final = 3
_NEVER: Final = ("NOPERM", "ERR unknown command", "ERR unknown cmd")
_BROKEN: Final = (redis.exceptions.RedisError, OSError, ProtocolError, StoreError)


class Places:
    """Those of one store in this process."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._idle: dict[tuple[int, str], deque[Any]] = {}
        self._denied = False

    def place(
        self, line: str, who: str, home: Callable[[], Connections], timeout: float
    ) -> _Place | None:
        """A place in ``line``, on the server that ``home`` finds; None: the login may not block."""
        return None if self._denied else _Place(self, line, who, home, timeout, self._clock)

    def take(self, server: Connections, timeout: float) -> Any:
        """A connection to ``server``, an idle one if there is one."""
        idle = self._idle_to(server)
        while idle:
            connection = idle.pop()
            age = self._clock.now() - connection.idle_since
            # What broke while nobody used it shows as bytes, or their end.
            if age <= MAX_IDLE and not ready([(connection._sock.fileno(), False)], 0):
                return connection
            connection.disconnect()
        connection = server.new(timeout)
        try:
            server.greet(connection)
        except BaseException:
            connection.disconnect()
            raise
        return connection

    def give(self, server: Connections, connection: Any) -> None:
        """Keep a connection that waits for no reply."""
        connection.idle_since = self._clock.now()
        self._idle_to(server).append(connection)

    def deny(self, reply: ErrorReply) -> None:
        """The server won't have it: from now on, this process's callers look."""
        if not self._denied:
            logger.info(
                "singleton: calls that wait for a key look every half second, for the store can't "
                "call them: %s",
                reply,
            )
        self._denied = True

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            idle = self._idle.popitem()[1]
            while idle:
                idle.pop().disconnect()

    def _idle_to(self, server: Connections) -> deque[Any]:
        thread = native.socket_owner()
        return self._idle.setdefault((thread, server.address), deque())


class _Place:
    """One caller's; of one thread."""

    def __init__(
        self,
        places: Places,
        line: str,
        who: str,
        home: Callable[[], Connections],
        timeout: float,
        clock: Clock,
    ) -> None:
        self._places = places
        self._line = line
        self._who = who
        self._home = home
        self._timeout = timeout
        self._clock = clock
        self._server: Connections | None = None
        self._connection: Any = None
        self._replies = Replies()
        self._breaks = 0
        # Deadline for the server's next reply; after it, the connection counts as dropped.
        self._answered_by = 0.0

    def wait(self, seconds: float) -> str | None:
        """As of a Place."""
        until = self._clock.now() + seconds
        while True:
            try:
                if self._connection is None:
                    self._block()
                found = self._replies.feed(self._received())
            except _BROKEN:
                break
            if found and isinstance(found[0], ErrorReply):
                if found[0].startswith(_NEVER):
                    self._places.deny(found[0])
                    self._hang_up()
                    return None
                break
            now = self._clock.now()
            left = until - now
            if not found and now > self._answered_by:
                break
            if found or left <= 0:
                self._breaks = 0
                return self._called(found[0]) if found else ""
            # Not above: what a signal's handler raises here (TimeoutError is an OSError) tells
            # nothing of the connection, and is its caller's.
            ready([(self._connection._sock.fileno(), False)], left)
        self._hang_up()
        self._breaks += 1
        if self._breaks == _BREAKS:
            return None
        # The next wait stands in the line again, at its end. Who only looked from now on would be
        # overtaken by all who do.
        self._clock.sleep(max(0.0, until - self._clock.now()))
        return ""

    def leave(self, *, counted: bool) -> None:
        """As of a Place."""
        self._hang_up()
        if counted:
            try:
                command = ("ZREM", self._line, self._who)
                self._home().run([command], self._timeout)
            except StoreError:
                pass  # counted for a moment longer: the next release keeps the key for nobody

    def _block(self) -> None:
        self._server = self._home()
        self._connection = self._places.take(self._server, self._timeout)
        self._answered_by = self._clock.now() + _LONGEST_BLOCK + self._timeout
        command = ("BLPOP", f"{self._line}!", _LONGEST_BLOCK)
        self._connection.send_packed_command([pack([command])], check_health=False)

    def _received(self) -> bytes:
        try:
            return receive(self._connection, within=0)
        except redis.exceptions.TimeoutError:
            return b""  # nothing yet, or bytes of TLS that belong to no reply

    def _called(self, reply: Any) -> str:
        connection, self._connection = self._connection, None
        assert self._server is not None, "it was asked"
        self._places.give(self._server, connection)
        return reply[1].decode(errors="replace") if reply else ""

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        self._replies = Replies()
        if connection is not None:
            connection.disconnect()
