"""The addresses on which servers of a test listen."""

from __future__ import annotations

#: Where they listen unless a test has other hosts.
LOCAL = "127.0.0.1"


def redis_arguments(address: str) -> list[str]:
    """Arguments with which a Redis server listens on ``address`` beside `LOCAL`."""
    if address == LOCAL:
        return []
    return ["--bind", LOCAL, address, "--protected-mode", "no"]
