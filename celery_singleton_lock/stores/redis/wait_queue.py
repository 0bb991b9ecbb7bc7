"""Tickets in the wait queues for keys: each is a BLPOP on a connection of its own.

Overview
    Redis wakes clients blocked in BLPOP in FIFO order and drops closed connections. So a release
    (wait_queue.lua) wakes the living client that has waited longest.

Guarantees
    A ticket keeps its position while its client tries an acquire in between. No wait lasts longer
    than requested by more than a connection's timeout, whatever the server does.

Non-guarantees
    A wake-up may be lost with the client that it was sent to. The key is then free again half a
    second later (wait_queue.lua), and the other clients poll.

State model::

    (nothing sent) --BLPOP--> blocking --reply: woken, or 60 s over--> (nothing sent)
                                 +-- error, exception, leave(): connection closed; after an error a
                                     new BLPOP follows, three times at most
"""

from __future__ import annotations

import logging
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import redis

from ...core.clock import Clock, SystemClock
from ...core.keyspace import Keyspace
from ...core.store import Leases, Ticket, WaitQueue
from ...errors import StoreError
from . import scripts
from .connection import OPERATOR_TIMEOUT, Connection, Connections
from .runner import ScriptRunner
from .server_errors import is_denied, is_unknown_command

logger = logging.getLogger("celery_singleton_lock")

# Seconds until a BLPOP ends and the client joins the queue again, at its end. For this time a
# wake-up may be sent to a host that vanished without closing its connection.
_LONGEST_BLOCK: Final = 60
# The number of consecutive broken connections after which a ticket is given up. A proxy on the way
# to the server may not allow connections that block.
_BREAKS: Final = 3


class RedisWaitQueue(WaitQueue):
    """See `WaitQueue`.

    Attributes:
        denied: Whether the login may not block, so that the clients of this process poll.
    """

    def __init__(self, runner: ScriptRunner, leases: Leases) -> None:
        self._runner, self._leases = runner, leases
        self.denied = False

    def ticket(self, key: str, nonce: str, *, timeout: float) -> Ticket | None:
        if self.denied:
            return None
        queue = Keyspace.wait_queue(key)
        home = partial(self._runner.connections.home_of, queue, timeout)
        return RedisTicket(self, queue, nonce, home, timeout)

    def lengths(self, keys: Sequence[str]) -> list[int]:
        if not keys:
            return []
        now = f"{int(self._leases.trace(keys[0], timeout=OPERATOR_TIMEOUT).now * 1000)}"
        counts: list[scripts.Command] = [
            ("ZCOUNT", Keyspace.wait_queue(key), now, "+inf") for key in keys
        ]
        replies = self._runner.connections.run(counts, OPERATOR_TIMEOUT)
        return [int(reply) for reply in replies]

    def missing_rights(self, key: str) -> list[str]:
        """See `WaitQueue.missing_rights`. Leaves nothing in the store."""
        queue = Keyspace.wait_queue(key)
        handoffs = f"{queue}!"
        missing = self._runner.denied(
            ("RPUSH", handoffs, "you"),
            ("BLPOP", handoffs, 0.01),
            ("ZADD", queue, "XX", 0, "you"),
            ("ZCOUNT", queue, 0, 0),
            ("ZREM", queue, "you"),
        )
        if "BLPOP" in missing:
            self._runner.connections.run([("DEL", handoffs)], OPERATOR_TIMEOUT)
        return missing

    def deny(self, reply: Exception) -> None:
        """Note that the server refused a BLPOP."""
        if not self.denied:
            logger.info(
                "singleton: calls that wait for a key ask every half second, because the store "
                "can't wake them: %s",
                reply,
            )
        self.denied = True


@dataclass(slots=True, eq=False)
class RedisTicket:
    """See `Ticket`.

    Attributes:
        queues: The wait queues of the store.
        queue: The key of the wait queue.
        nonce: The nonce of the waiting token.
        home: Returns the connections to the server that has the queue.
        timeout: Seconds to wait for each reply.
        clock: The clock of the deadlines.
    """

    queues: RedisWaitQueue
    queue: str
    nonce: str
    home: Callable[[], Connections]
    timeout: float
    clock: Clock = field(default_factory=SystemClock)
    _connection: Connection | None = field(default=None, init=False)
    _breaks: int = field(default=0, init=False)
    # Deadline for the server's next reply. After it, the connection counts as broken.
    _answered_by: float = field(default=0.0, init=False)

    def wait(self, seconds: float) -> str | None:
        """See `Ticket`."""
        until = self.clock.now() + seconds
        while True:
            try:
                if self._connection is None:
                    self._connection = self._block()
                found = self._connection.arrived()
            except StoreError:
                break
            if found and isinstance(found[0], redis.exceptions.ResponseError):
                if is_denied(found[0]) or is_unknown_command(found[0]):  # the server can't block
                    self.queues.deny(found[0])
                    self._hang_up()
                    return None
                self._connection.close()  # it may lead to a former master
                break
            if found:
                self._breaks = 0
                self._hang_up()
                return found[0][1].decode(errors="replace") if found[0] else ""
            now = self.clock.now()
            if now > self._answered_by:
                break
            if now >= until:
                self._breaks = 0
                return ""
            # Outside the try: an exception that a signal handler raises here may be an OSError (as
            # TimeoutError is) without any failure of the connection.
            _wait_for_reply(self._connection.fileno(), until - now)
        self._hang_up()
        self._breaks += 1
        if self._breaks == _BREAKS:
            return None
        # The next wait() joins the queue again, at its end. A client that only polled would be
        # overtaken by all clients in the queue.
        self.clock.sleep(max(0.0, until - self.clock.now()))
        return ""

    def fileno(self) -> int | None:
        """See `Ticket`."""
        return None if self._connection is None else self._connection.fileno()

    def leave(self, *, counted: bool) -> None:
        """See `Ticket`."""
        self._hang_up()
        if counted:
            # After an error the store counts the client a moment longer. The next release may
            # reserve the key although no client is left.
            with suppress(StoreError):
                self.home().run([("ZREM", self.queue, self.nonce)], self.timeout)

    def _block(self) -> Connection:
        connection = self.home().take(self.timeout)
        try:
            connection.replies()  # read the reply to a release pending on this connection
            connection.send(scripts.pack(("BLPOP", f"{self.queue}!", _LONGEST_BLOCK)), 1)
        except BaseException:
            connection.end()
            raise
        self._answered_by = self.clock.now() + _LONGEST_BLOCK + self.timeout
        return connection

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.end()  # closes it, unless its reply was read


def _wait_for_reply(descriptor: int, seconds: float) -> None:
    """Wait until data or the end of the stream arrives."""
    # Looked up at each call: gevent replaces poll, and eventlet removes it.
    if not hasattr(select, "poll"):
        select.select([descriptor], [], [], seconds)
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    # Round up to a millisecond, so that 0.4 ms do not become a busy loop.
    poll.poll(int(seconds * 1000) + 1)
