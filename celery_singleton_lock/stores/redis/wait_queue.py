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
import select
from collections.abc import Callable
from typing import Any, Final

import redis

from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.redis.connection import Connection, Connections

__all__ = ["Places"]

logger = logging.getLogger("celery_singleton_lock")

# Seconds; then the place is lost, and taken anew at the end. A host that vanished without a word
# stands in the line no longer than that.
_LONGEST_BLOCK: Final = 60
# After as many breaks without a reply between them, a place is given up: something on the way to
# the server doesn't bear connections that block.
_BREAKS: Final = 3
_UNKNOWN: Final = ("unknown command", "unknown cmd")


class Places:
    """Those of one store in this process."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._denied = False

    def place(
        self, line: str, who: str, home: Callable[[], Connections], timeout: float
    ) -> _Place | None:
        """A place in ``line``, on the server that ``home`` finds; None: the login may not block."""
        return None if self._denied else _Place(self, line, who, home, timeout, self._clock)

    def deny(self, reply: Exception) -> None:
        """The server won't have it: from now on, this process's callers look."""
        if not self._denied:
            logger.info(
                "singleton: calls that wait for a key look every half second, for the store can't "
                "call them: %s",
                reply,
            )
        self._denied = True


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
        self._connection: Connection | None = None
        self._breaks = 0
        # Deadline for the server's next reply; after it, the connection counts as dropped.
        self._answered_by = 0.0

    def wait(self, seconds: float) -> str | None:
        """As of a Place."""
        until = self._clock.now() + seconds
        while True:
            try:
                if self._connection is None:
                    self._connection = self._block()
                found = self._connection.arrived()
            except StoreError:
                break
            if found and isinstance(found[0], redis.exceptions.ResponseError):
                if _is_denial(found[0]):
                    self._places.deny(found[0])
                    self._hang_up()
                    return None
                self._connection.close()  # it may lead to a replica that was the master
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
            _wait_for_reply(self._connection.fileno(), left)
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

    def _block(self) -> Connection:
        connection = self._home().take(self._timeout)
        try:
            connection.replies()  # to a release that another call left on this connection
            connection.send([("BLPOP", f"{self._line}!", _LONGEST_BLOCK)])
        except BaseException:
            connection.end()
            raise
        self._answered_by = self._clock.now() + _LONGEST_BLOCK + self._timeout
        return connection

    def _called(self, reply: Any) -> str:
        self._hang_up()
        return reply[1].decode(errors="replace") if reply else ""

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end()  # closed, unless its reply was read


def _is_denial(error: redis.exceptions.ResponseError) -> bool:
    """Whether the login may not block here, or the server can't."""
    denied = isinstance(error, redis.exceptions.NoPermissionError)
    return denied or str(error).startswith(_UNKNOWN)


def _wait_for_reply(descriptor: int, seconds: float) -> None:
    """Wait until bytes, or the end of the stream, arrive."""
    # Looked up at each call: gevent replaces poll, and eventlet removes it.
    if not hasattr(select, "poll"):
        select.select([descriptor], [], [], seconds)
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    # Rounded up to a millisecond, so that 0.4 ms do not become a busy loop.
    poll.poll(int(seconds * 1000) + 1)
