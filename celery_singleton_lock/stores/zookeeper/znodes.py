"""The layout of keys in ZooKeeper: paths, text of nodes, and the server's time.

Each key is a node in one of 256 buckets, which are nodes too. The version of a bucket counts the
changes in it, so comparing it detects any change of the nodes that were read there. The versions of
the nodes themselves can't detect it, because a node that is created again starts at version 0. All
keys of a lock are in one bucket.

ZooKeeper expires only ephemeral nodes, and has no request for the time. So all other nodes have
their ttl in their text. The ttl counts from the server's timestamp of their creation. The current
time of the server is estimated from the timestamp of the process's own last write. All timestamps
are those of the leader. The clock of a new leader may differ: such nodes then expire earlier or
later by the difference.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, unquote

from celery_singleton_lock.stores.transitions.entries import Entry, Foreign, parse_value

#: The number of buckets. With this many, the list of a bucket's names stays far below the limit of
#: a reply, one megabyte, and two concurrent operations seldom use the same bucket.
BUCKETS: Final = 256


@dataclass(frozen=True, slots=True)
class Seen:
    """A key as it was read.

    Attributes:
        entry: The entry; None if the node doesn't exist or has expired.
        exists: Whether the node exists.
    """

    entry: Entry | None = None
    exists: bool = False


class ServerTime:
    """The server's clock, estimated from the timestamps of the process's own writes."""

    #: Seconds after which a timestamp is too old: the two clocks run at different speeds.
    MAX_AGE: Final = 60.0

    def __init__(self) -> None:
        self._stamp: tuple[float, float] | None = None

    def note(self, stat: Any, now: float) -> None:
        """Note the timestamp of a write that was acknowledged at ``now``.

        The timestamp is older than ``now``, so the estimate is early.
        """
        self._stamp = (stat.mtime / 1000, now)

    def at(self, now: float) -> float | None:
        """Seconds since the epoch on the server's clock; None if a write is needed first."""
        if self._stamp is None or now - self._stamp[1] > self.MAX_AGE:
            return None
        return self._stamp[0] + now - self._stamp[1]


class Layout:
    """The paths below ``root``."""

    def __init__(self, root: str, fence_base: int) -> None:
        self.root = root
        #: A node that is written for the timestamp, and to prove that a session is alive.
        self.clock = f"{root}/clock"
        self._fence_base = fence_base

    def bucket(self, key: str) -> str:
        """The bucket of ``key``. The slots and claims of a lock, and last runs, share a bucket."""
        shard, brace, rest = key.partition("}:")
        if rest.startswith("claim|"):
            rest = rest.split("|", 2)[-1]
        elif rest.startswith("last|"):
            rest = rest.split("|", 2)[1]  # The leader's key.
        home = f"{shard}{brace}{rest.partition('#')[0]}"
        return self.bucket_path(zlib.crc32(home.encode()) % BUCKETS)

    def bucket_path(self, number: int) -> str:
        return f"{self.root}/{number:03d}"

    def buckets(self, keys: Iterable[str]) -> list[str]:
        return sorted({self.bucket(key) for key in keys})

    def path(self, key: str) -> str:
        """The node of ``key``, without slashes and characters that ZooKeeper refuses."""
        return f"{self.bucket(key)}/{quote(key, safe=':{}|,+*=~@')}"

    def seen(self, node: tuple[bytes, Any] | None, server_now: float | None) -> Seen:
        """The entry of a node. Without the server's time, no node counts as expired."""
        if node is None:
            return Seen()
        data, stat = node
        match = re.match(r"([kp])([0-9.e+]+) ", text := data.decode(errors="replace"))
        if match is None:
            return Seen(Entry(Foreign(), 0.0), exists=True)
        value = parse_value(text[match.end() :], self._fence_base + stat.czxid)
        ttl = float(match[2])
        if match[1] == "k":
            return Seen(Entry(value, ttl, renewed=True), exists=True)
        left = ttl if server_now is None else stat.ctime / 1000 + ttl - server_now
        return Seen(Entry(value, min(left, ttl)) if left > 0 else None, exists=True)


def key_of(name: str) -> str:
    """The key that a node's name encodes."""
    return unquote(name)
