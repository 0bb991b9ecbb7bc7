"""HTTP/1.1 of uvicorn, which bounds neither the time for a request nor the connections of a client.

Guarantees
    A connection whose request has not arrived completely is closed after `REQUEST_TIMEOUT` to twice
    that time, and at once when the server ends. One whose response the client does not read is
    closed after that time too. One address has at most as many connections as the options say. As
    many again are surplus: each is closed after one response, which is 503 except for probes and
    scrapes (`http.Application`). Beyond that, the surplus connection that has waited longest for
    its request is closed, so that a new one can send its own. The log has one warning for each such
    address.
"""

from __future__ import annotations

import asyncio
import logging
from functools import lru_cache
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger("celery_singleton_lock")

#: Seconds.
REQUEST_TIMEOUT: Final = 10.0
#: The key in the state of a request that says whether its connection is surplus.
SURPLUS: Final = "surplus"
# The addresses that the log has named. Each may be named again after as many others.
_MOST_NAMED: Final = 1000


class BoundedProtocol(H11Protocol):
    """One connection."""

    #: The connections of one address that are not surplus.
    most_per_peer: ClassVar[int]
    is_surplus = False
    since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()
        connections: Any = self.connections
        same = [one for one in connections if one._peer == self._peer and one._is_open]
        if len(same) > self.most_per_peer:
            self.is_surplus = True
            self.app_state = {**self.app_state, SURPLUS: True}
            _warn(self._peer, self.most_per_peer)
        if len(same) > 2 * self.most_per_peer:
            waiting = [one for one in same if one.is_surplus and one.cycle is None]
            min(waiting, key=lambda one: one.since).transport.abort()
        self._look(None)

    def shutdown(self) -> None:
        request: Any = self.cycle  # None before the first one
        if request is not None and request.more_body:
            self.transport.close()  # else the end of the server would wait for the rest of the body
        super().shutdown()

    @property
    def _peer(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def _is_open(self) -> bool:
        """Also while it is being closed: the response waits until the client reads it."""
        return not self.transport.is_closing() or self._is_unread

    @property
    def _is_unread(self) -> bool:
        return self.transport.get_write_buffer_size() > 0

    def _look(self, seen: Any) -> None:
        """Look again later; close the connection if nothing has happened since the last look.

        Args:
            seen: A tuple of the request that was incomplete or answered at the last look; it has
                None if there was no request. None: one was being answered, or this is the first
                look.
        """
        if not self._is_open:
            return
        request: Any = self.cycle
        is_waiting = request is None or request.more_body or request.response_complete
        if seen is not None and is_waiting and seen == (request,):
            if self._is_unread:
                self.transport.abort()  # close() would wait for the client
            else:
                self.transport.close()
            return
        self.loop.call_later(REQUEST_TIMEOUT, self._look, (request,) if is_waiting else None)


def bounded(most_per_peer: int) -> type[BoundedProtocol]:
    """The protocol of a server that gives each address ``most_per_peer`` connections."""
    return type("Protocol", (BoundedProtocol,), {"most_per_peer": most_per_peer})


@lru_cache(_MOST_NAMED)
def _warn(address: str, most: int) -> None:
    logger.warning(
        "singleton serve: %s has more than %d connections; requests on further ones get 503, all "
        "but /metrics and /healthz. If it is a proxy, let it keep fewer, or raise "
        "--max-connections",
        *(address, most),
    )
