"""How many replicas must have a grant before it counts (``wait_replicas``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from celery_singleton_lock.stores.redis.scripts import Command, milliseconds

__all__ = ["Replicas"]

# The replicas' time to acknowledge; the rest is for the reply itself, which a server without other
# work sends up to 0.1 s late (hz). Later than the timeout, it counts as no answer: no grant either.
_WAIT_RATIO: Final = 0.5


class Replicas:
    """Of the master that grants.

    Args:
        count: How many of them; 0: nobody waits.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def wait(self, timeout: float) -> list[Command]:
        """What is sent right behind a grant: a script can't wait, a pipeline can."""
        return [("WAIT", self._count, milliseconds(timeout * _WAIT_RATIO))] if self._count else []

    def too_few(self, key: str, acknowledged: Sequence[int]) -> str:
        """Why the grant of ``key`` doesn't count; empty if it does."""
        if not self._count or acknowledged[0] >= self._count:
            return ""
        return (
            f"{acknowledged[0]} replica(s) had the grant of {key!r} in time, and wait_replicas "
            f"asks for {self._count}: it was given back"
        )
