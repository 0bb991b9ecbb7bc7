"""The interface of wait queues: the ticket of a client that waits for a key."""

from __future__ import annotations

from typing import Final, Protocol

#: The task in the token of a key that is reserved for the client that was woken. No task id is
#: quoted like this, so no delivery, release or renewal matches such a key.
HANDOFF_TASK: Final = "%waiter"


class Ticket(Protocol):
    """The ticket of one client in the wait queue for a key. Used by one thread until `leave`."""

    def wait(self, seconds: float) -> str | None:
        """Block until woken, at most ``seconds``.

        Returns:
            The handoff token for the next acquire; empty: the client was not woken; None: the
            store does not wake this client any more, and the ticket is of no further use.
        """
        ...

    def leave(self, *, counted: bool) -> None:
        """Leave the wait queue; never raises.

        Args:
            counted: Whether the store still counts the client as waiting.
        """
        ...
