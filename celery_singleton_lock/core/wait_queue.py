"""Calling who waits for a key: what a store may do beyond a store's duty."""

from __future__ import annotations

from typing import Final, Protocol, runtime_checkable

__all__ = ["HANDOFF_TASK", "CallsWaiters", "Place"]

#: The task in the token of a key that is kept for who was called. No task's id is quoted like that,
#: so no delivery, release or renewal takes such a key for its own.
HANDOFF_TASK: Final = "%waiter"


class Place(Protocol):
    """One caller's place in the line for a key. Blocks one thread; :meth:`leave` ends it."""

    def wait(self, seconds: float) -> str | None:
        """Wait until called, at most ``seconds``.

        Returns:
            What the next acquire shows as its turn; empty: nobody has called; None: nobody will,
            and this place is no more use.
        """
        ...

    def leave(self, *, counted: bool) -> None:
        """Give the place up; never raises.

        Args:
            counted: Whether the store still counts its caller among those who wait.
        """
        ...


@runtime_checkable
class CallsWaiters(Protocol):
    """A store that calls who waits for a key when it is given back: optional.

    It calls who has waited longest, and keeps the key for that one a moment. A call may be lost at
    any time, so who waits goes on looking; that it looks less often is all it may rely on.
    """

    def place(self, key: str, who: str, *, timeout: float) -> Place | None:
        """A place in the line for ``key``; None where nobody is called. Sends nothing.

        Args:
            key: The first of the slots that are asked for.
            who: The nonce of the token that asks.
            timeout: Seconds to wait for a connection, when one is needed.
        """
        ...
