"""Where keys stand in ZooKeeper, and how long: paths, texts, and the server's time.

Each key is a node in one of 256 buckets, which are nodes as well. A bucket's version counts the
changes in it, so comparing it tells whether anything that was read there has changed: the nodes'
own versions start anew with each node, and say nothing. Keys of one lock are in one bucket.

ZooKeeper ends ephemeral nodes alone, and tells nobody the time. So every other node has its ttl in
its text, and counts from its creation, which the server has stamped. What the server's clock shows
now is reckoned from the stamp of one's own last write: it is one clock for all, that of the leader.
A new leader's may differ by the skew between the two: such nodes end that much earlier or later.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, unquote

from celery_singleton_lock.stores.transitions.entries import (
    Entry,
    Foreign,
    Value,
    format_value,
    parse_value,
)

__all__ = ["BUCKETS", "Layout", "Seen", "ServerTime", "to_text"]

#: So that a bucket's list of names stays far below the megabyte that a reply may have, and two
#: operations at a time seldom meet in one.
BUCKETS: Final = 256


@dataclass(frozen=True, slots=True)
class Seen:
    """A key as it was read.

    Attributes:
        entry: What stands there; None: nothing, or something whose time is over.
        exists: Whether there is a node.
    """

    entry: Entry | None = None
    exists: bool = False


class ServerTime:
    """The server's clock, reckoned from the stamps of one's own writes."""

    #: Seconds after which a stamp is too old: the two clocks run at different speeds.
    MAX_AGE: Final = 60.0

    def __init__(self) -> None:
        self._stamp: tuple[float, float] | None = None

    def note(self, stat: Any, now: float) -> None:
        """A write was answered at ``now``; the server stamped it earlier, so this is never fast."""
        self._stamp = (stat.mtime / 1000, now)

    def at(self, now: float) -> float | None:
        """Seconds since the epoch on the server's clock; None: write something first."""
        if self._stamp is None or now - self._stamp[1] > self.MAX_AGE:
            return None
        return self._stamp[0] + now - self._stamp[1]


class Layout:
    """The paths below ``root``."""

    def __init__(self, root: str, fence_base: int) -> None:
        self.root = root
        self._fence_base = fence_base

    @property
    def clock(self) -> str:
        """A node that is written to only for the server's stamp, and to prove a session alive."""
        return f"{self.root}/clock"

    def bucket(self, key: str) -> str:
        """The bucket of ``key``: a lock's slots and claims share one, and so do last runs."""
        shard, brace, rest = key.partition("}:")
        if rest.startswith("claim|"):
            rest = rest.split("|", 2)[-1]
        elif rest.startswith("last|"):
            rest = rest.split("|", 2)[1]  # the leader's
        home = f"{shard}{brace}{rest.partition('#')[0]}"
        return self.bucket_path(zlib.crc32(home.encode()) % BUCKETS)

    def bucket_path(self, number: int) -> str:
        return f"{self.root}/{number:03d}"

    def buckets(self, keys: Iterable[str]) -> list[str]:
        return sorted({self.bucket(key) for key in keys})

    def path(self, key: str) -> str:
        """The node of ``key``. A slash would separate, and some letters are not allowed."""
        return f"{self.bucket(key)}/{quote(key, safe=':{}|,+*=~@')}"

    @staticmethod
    def key(name: str) -> str:
        """The key of a node's name."""
        return unquote(name)

    def seen(self, node: tuple[bytes, Any] | None, server_now: float | None) -> Seen:
        """What a node says. Without the time, what has an end counts as unended."""
        if node is None:
            return Seen()
        data, stat = node
        match = re.match(r"([kp])([0-9.e+]+) ", text := data.decode(errors="replace"))
        if match is None:
            return Seen(Entry(Foreign(), 0.0), exists=True)
        value = parse_value(text[match.end() :], self._fence_base + stat.czxid)
        ttl = float(match[2])
        if match[1] == "k":
            return Seen(Entry(value, ttl, kept=True), exists=True)
        left = ttl if server_now is None else stat.ctime / 1000 + ttl - server_now
        return Seen(Entry(value, min(left, ttl)) if left > 0 else None, exists=True)


def to_text(value: Value, ttl: float, kept: bool) -> bytes:
    """What a node of ``value`` says."""
    return f"{'k' if kept else 'p'}{ttl:.3f} {format_value(value)}".encode()
