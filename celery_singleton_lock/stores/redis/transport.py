"""What a Redis store needs of its connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from celery_singleton_lock.stores.redis.async_release import PostedRelease

if TYPE_CHECKING:
    from celery_singleton_lock.stores.redis.connection import Connections

__all__ = ["MAX_IDLE", "Command", "Transport"]

#: Seconds after which an idle connection is closed instead of used. NATs and load balancers drop
#: idle connections silently; the shortest common timeout is 240 s.
MAX_IDLE: Final = 60.0

#: Name and arguments, as redis-py packs them.
Command = tuple[Any, ...]


class Transport(Protocol):
    """Takes commands to the server, or the servers, that they are for."""

    def run(self, commands: Sequence[Command], timeout: float) -> list[Any]:
        """Send all, read all; the first error is raised, as the library's own.

        Args:
            commands: Those that name keys begin with them, but for EVAL and EVALSHA.
            timeout: Seconds to wait for each reply.

        Raises:
            ScriptForgotten: A server knows no such script.
            StoreUnavailable, StoreError: No answer; a refusal.
        """
        ...

    def attempt(self, commands: Sequence[Command], timeout: float) -> list[Any]:
        """As :meth:`run`, but for refusals: each stands in the place of its reply."""
        ...

    def post(self, command: Command, timeout: float, posted: PostedRelease) -> bool:
        """Send a script's run whose reply is read later; False: it wasn't sent, and can't be now.

        Args:
            command: EVALSHA, with keys of one shard.
            timeout: Seconds; of the connections to choose from.
            posted: Who hears the reply, or that there will be none.
        """
        ...

    def collect(self, timeout: float) -> None:
        """Read, within seconds for each, what idle connections owe."""
        ...

    def home_of(self, key: str, timeout: float) -> Connections:
        """Connections to the server that has ``key``.

        Args:
            timeout: Seconds for each request that looks for that server.

        Raises:
            StoreUnavailable, StoreError: The server was not found.
        """
        ...

    def close(self) -> None:
        """Close what is idle; the next call connects again."""
        ...
