"""Commands under way to one node, and what has come in reply: also for who didn't wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.redis.resp import pack

__all__ = ["Exchange"]


class Exchange:
    """Some commands, and what has come in reply.

    Args:
        commands: Name and arguments of each.
        packed: The same as bytes, where they are at hand.
        sha: The name of the script that they run, if it is one.
    """

    __slots__ = ("awaited", "count", "error", "packed", "replies", "sent", "sent_again", "sha")

    def __init__(
        self, commands: Sequence[tuple[Any, ...]], packed: bytes = b"", sha: str = ""
    ) -> None:
        self.packed = packed or pack(commands)
        self.count = len(commands)
        self.sha = sha
        self.replies: list[Any] = []
        self.error: StoreError | None = None
        self.awaited = True
        self.sent = False
        self.sent_again = False

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.replies) == self.count

    @property
    def confirmed(self) -> bool:
        """Whether it is not under way any more: the server has replied, or it never left."""
        return len(self.replies) == self.count if self.error is None else not self.sent
