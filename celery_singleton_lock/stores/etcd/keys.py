"""Keys in etcd: their names, their texts, and the transactions on them.

A text is that of the Lua scripts behind a word: ``k60`` for what lives with a heartbeat, of a ttl
of 60 s; ``p1.5`` for what ends by itself, 1.5 s before its etcd lease does.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from celery_singleton_lock.stores.transitions.entries import (
    Entry,
    Foreign,
    format_value,
    parse_value,
)

__all__ = ["EtcdKeys", "Kept", "Seen", "encoded"]


@dataclass(frozen=True, slots=True)
class Seen:
    """A key as it was read: what stands there, its revision (0: nothing), and its etcd lease."""

    entry: Entry | None = None
    revision: int = 0
    lease_id: int = 0


@dataclass(slots=True, eq=False)
class Kept:
    """A key that this process has bound, or may have bound, to an etcd lease that it keeps alive.

    Attributes:
        until: When its time is over unless it is renewed, on the clock.
        lease_id: What it is bound to.
        seen: What stands there; None while nobody knows.
    """

    until: float
    lease_id: int
    seen: Seen | None = None


class EtcdKeys:
    """The keys under a prefix.

    Args:
        prefix: Of every key.
        fence_base: Fences are above it.
    """

    def __init__(self, prefix: str, fence_base: int) -> None:
        self._prefix = prefix
        self._fence_base = fence_base

    def name(self, key: str) -> str:
        """As etcd's gateway wants it."""
        return encoded((self._prefix + key).encode())

    def key(self, name: str) -> str:
        """The key of a name that etcd told."""
        return b64decode(name).decode(errors="replace")[len(self._prefix) :]

    def bounds(self, start: str) -> tuple[bytes, bytes]:
        """The first name that begins with ``start``, and the first behind all that do."""
        first = (self._prefix + start).encode()
        return first, first + b"\xff"  # no key has such a byte

    def put(self, key: str, entry: Entry, lease_id: int, slack: float) -> dict[str, Any]:
        """Write ``entry``, bound to an etcd lease that ends ``slack`` seconds late."""
        word = f"k{entry.ttl:g}" if entry.kept else f"p{max(0.0, slack):.3f}"
        value = encoded(f"{word} {format_value(entry.value)}".encode())
        return {"key": self.name(key), "value": value, "lease": str(lease_id)}

    def seen(self, kv: Mapping[str, Any], remaining: Callable[[int], float]) -> Seen:
        """What etcd tells of a key; ``remaining`` tells how long an etcd lease still has."""
        revision, lease_id = int(kv["mod_revision"]), int(kv.get("lease", 0))
        text = b64decode(kv.get("value", "")).decode(errors="replace")
        match = re.match(r"([kp])([0-9.e+]+) ", text)
        if match is None or not lease_id:
            return Seen(Entry(Foreign(), 0.0), revision, lease_id)
        value = parse_value(text[match.end() :], self._fence_base + revision)
        kept, ttl = match[1] == "k", float(match[2])
        if not kept:
            ttl = max(0.0, remaining(lease_id) - ttl)
        return Seen(Entry(value, ttl, kept), revision, lease_id)

    def views(
        self,
        keys: Iterable[str],
        reply: Mapping[str, Any],
        remaining: Callable[[int], float],
    ) -> dict[str, Seen]:
        """What a transaction has read, by :meth:`read`."""
        ranges = (one["response_range"].get("kvs", []) for one in reply.get("responses", []))
        return {
            key: self.seen(found[0], remaining) if found else Seen()
            for key, found in zip(keys, ranges, strict=True)
        }

    def read(self, keys: Iterable[str]) -> list[dict[str, Any]]:
        """A range per key, for a transaction."""
        return [{"request_range": {"key": self.name(key)}} for key in keys]

    def transaction(
        self,
        view: Mapping[str, Seen],
        changes: Mapping[str, Entry | None],
        puts: Mapping[str, dict[str, Any]],
    ) -> dict[str, Any]:
        """Write ``changes`` if every key is as in ``view``; else read them all."""
        compare = [
            {
                "key": self.name(key),
                "target": "MOD",
                "result": "EQUAL",
                "mod_revision": str(seen.revision),
            }
            for key, seen in view.items()
        ]
        success: list[dict[str, Any]] = [{"request_put": put} for put in puts.values()]
        gone = [key for key, entry in changes.items() if entry is None]
        success += [{"request_delete_range": {"key": self.name(key)}} for key in gone]
        return {"compare": compare, "success": success, "failure": self.read(view)}


def encoded(data: bytes) -> str:
    """Base64, as the gateway wants it."""
    return b64encode(data).decode()
