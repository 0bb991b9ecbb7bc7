"""A TCP proxy between one worker and the lock store, which can do what networks do.

    PASS           everything goes through
    STALL          nothing goes through; what was sent arrives when the network heals, as TCP has it
    CUT            nothing goes through, and what was sent is lost with its connection
    NO_REQUESTS    half open: replies come, requests are lost
    NO_REPLIES     half open: requests arrive and are executed, their replies are lost
    SLOW           every packet takes ``delay`` seconds, more or less
    LOSE_REPLIES   with ``probability``, a request is executed, its reply swallowed, the connection
                   cut
    REFUSE         connections are closed as they come
    FORGET         a reply waits until its connection has asked for something more

No connection outlives the server that it led to, nor a change of the server.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any, Self

_CHUNK_BYTES = 1 << 16


class Kind(StrEnum):
    PASS = auto()
    STALL = auto()
    CUT = auto()
    NO_REQUESTS = auto()
    NO_REPLIES = auto()
    SLOW = auto()
    LOSE_REPLIES = auto()
    REFUSE = auto()
    FORGET = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What the network does.

    Attributes:
        kind: See the module.
        delay: Seconds, of SLOW.
        probability: The probability of LOSE_REPLIES.
    """

    kind: Kind = Kind.PASS
    delay: float = 0.0
    probability: float = 0.0


class _Lost(Exception):
    """This connection ends here."""


class Proxy:
    """Listens on a port of its own from `start` to `stop`; a context manager.

    Args:
        target: The server's port on 127.0.0.1.
        seed: The seed of the chances that it takes.
        address: Where it listens.
    """

    def __init__(self, target: int, *, seed: int = 0, address: str = "127.0.0.1") -> None:
        self._target, self._address = target, address
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        # Only the loop's thread uses these.
        self._mode = Mode()
        self._changed = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()
        self._forgotten: set[asyncio.StreamWriter] = set()
        #: How many packets were lost by CUT, NO_REQUESTS or NO_REPLIES, or will be.
        self.lost = 0
        self._loses_reply = False
        self._serving: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def set(self, mode: Mode) -> None:
        """From now on the network is like this."""
        self._do(self._set(mode))

    def lead_to(self, target: int) -> None:
        """Cut all connections; new ones go to another server's port."""
        self._do(self._lead_to(target))

    def cut_connections(self) -> None:
        """Close all present connections; new ones are accepted."""
        self._do(self._cut_connections())

    def forget_connections(self) -> None:
        """Drop the present connections as a NAT or load balancer does.

        Packets are discarded in both directions, and neither end is notified. New connections are
        not affected.
        """
        self._do(self._forget_connections())

    def lose_next_reply(self) -> None:
        """Swallow the next reply, whose request is executed, and cut its connection."""
        self._do(self._lose_next_reply())

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    # --- on the loop's thread --------------------------------------------------------------------

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, self._address, 0)

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        self._cut_all()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _set(self, mode: Mode) -> None:
        self._mode = mode
        before, self._changed = self._changed, asyncio.Event()
        before.set()

    async def _lead_to(self, target: int) -> None:
        self._target = target
        self._cut_all()

    async def _cut_connections(self) -> None:
        self._cut_all()

    async def _forget_connections(self) -> None:
        self._forgotten |= self._open

    async def _lose_next_reply(self) -> None:
        self._loses_reply = True

    def _cut_all(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self._open.add(writer)
        there = None
        try:
            if self._mode.kind is Kind.REFUSE:
                return
            from_there, there = await asyncio.open_connection("127.0.0.1", self._target)
            self._open.add(there)
            asked = asyncio.Event()
            ways = {
                asyncio.ensure_future(self._carry(reader, there, asked, replies=False)),
                asyncio.ensure_future(self._carry(from_there, writer, asked, replies=True)),
            }
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the server is down, or the proxy is
        finally:
            for end in (writer, there):
                if end is not None:
                    self._open.discard(end)
                    self._forgotten.discard(end)
                    end.transport.abort()
            self._serving.discard(task)

    async def _carry(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        asked: asyncio.Event,
        *,
        replies: bool,
    ) -> None:
        """One direction, until it ends; ``asked`` is set by each request."""
        try:
            while data := await source.read(_CHUNK_BYTES):
                if not replies:
                    asked.set()
                elif self._mode.kind is Kind.FORGET:
                    asked.clear()
                    await asked.wait()  # or the end of the connection
                await self._pass(replies)
                if sink in self._forgotten:
                    continue
                sink.write(data)
                await sink.drain()
        except (OSError, _Lost):
            pass

    async def _pass(self, replies: bool) -> None:
        """Return when a packet may go on.

        Raises:
            _Lost: It may not, nor anything after it.
        """
        if replies and self._loses_reply:
            self._loses_reply = False
            raise _Lost
        mode, changed = self._mode, self._changed
        blocked = Kind.NO_REPLIES if replies else Kind.NO_REQUESTS
        if mode.kind is Kind.STALL:
            await changed.wait()
        elif mode.kind in (Kind.CUT, blocked):
            self.lost += 1
            await changed.wait()
            raise _Lost
        elif mode.kind is Kind.SLOW:
            await asyncio.sleep(mode.delay * (0.5 + self._random.random()))
        elif mode.kind is Kind.REFUSE or (
            mode.kind is Kind.LOSE_REPLIES and replies and self._random.random() < mode.probability
        ):
            raise _Lost
