"""What a body waits at until its test lets it go on: an event, in place of a sleep."""

from __future__ import annotations

import redis


class Gate:
    """A list in Redis, open once there is something in it: for all waiters, also later ones.

    Args:
        client: A client of the database that test and worker share.
        name: The name of the gate.
    """

    def __init__(self, client: redis.Redis, name: str) -> None:
        self._client, self._key = client, f"gate:{name}"

    def open(self) -> None:
        self._client.lpush(self._key, "open")

    def wait(self, timeout: float = 60.0) -> None:
        """Block for at most ``timeout`` seconds; AssertionError after that."""
        # The list is moved onto itself, so the gate stays open.
        if self._client.blmove(self._key, self._key, timeout) is None:
            raise AssertionError(f"{self._key} was not opened in {timeout:g} s")
