"""HTTP/1.1 of uvicorn, which bounds neither the time for a request nor the connections of a client.

Guarantees
    A connection whose request has not arrived completely is closed after `REQUEST_TIMEOUT` to twice
    that time, and at once when the server ends. One address has at most `MOST_PER_PEER`
    connections; further ones are closed.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

#: Seconds.
REQUEST_TIMEOUT: Final = 10.0
#: A browser opens six, and a proxy in front of many browsers some more.
MOST_PER_PEER: Final = 64


class BoundedProtocol(H11Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = self._peer
        if sum(one._peer == peer for one in self.connections) > MOST_PER_PEER:  # type: ignore[union-attr]
            transport.abort()
            return
        self._look(None)

    def shutdown(self) -> None:
        request: Any = self.cycle  # None before the first one
        if request is not None and request.more_body:
            self.transport.close()  # else the end of the server would wait for the rest of the body
        super().shutdown()

    @property
    def _peer(self) -> str:
        return self.client[0] if self.client else ""

    def _look(self, seen: Any) -> None:
        """Look again later; close the connection if no request has arrived since the last look.

        Args:
            seen: A tuple of the request that was incomplete or answered at the last look; it has
                None if there was no request. None: one was being answered, or this is the first
                look.
        """
        if self.transport.is_closing():
            return
        request: Any = self.cycle
        is_waiting = request is None or request.more_body or request.response_complete
        if seen is not None and is_waiting and seen == (request,):
            self.transport.close()
            return
        self.loop.call_later(REQUEST_TIMEOUT, self._look, (request,) if is_waiting else None)
