"""Reads and writes of keys in etcd: their names, their text, and the transactions.

The text of a key is a word and then the text that the Lua scripts write. The word is ``k60`` for an
entry that is renewed, with a ttl of 60 s, and ``p1.5`` for an entry that expires 1.5 s before its
etcd lease.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from celery_singleton_lock.stores.etcd.gateway import Gateway
from celery_singleton_lock.stores.etcd.leases import EtcdLeases
from celery_singleton_lock.stores.transitions.entries import (
    Entry,
    Foreign,
    format_value,
    parse_value,
)

_PAGE: Final = 500


@dataclass(frozen=True, slots=True)
class Seen:
    """A key as it was read: its entry, its revision (0: no key), and its etcd lease."""

    entry: Entry | None = None
    revision: int = 0
    lease_id: int = 0


class EtcdKeys:
    """The keys under a prefix.

    Every method with a deadline may raise StoreUnavailable and StoreError.
    """

    def __init__(
        self, gateway: Gateway, leases: EtcdLeases, *, prefix: str, fence_base: int
    ) -> None:
        self._gateway = gateway
        self._leases = leases
        self._prefix = prefix
        self._fence_base = fence_base

    def read(self, keys: Iterable[str], deadline: float) -> dict[str, Seen]:
        """Read all keys in one snapshot."""
        body = {"success": self._ranges(keys)}
        reply = self._gateway.request("kv/txn", body, deadline, repeatable=True)
        return self._found(keys, reply, deadline)

    def write(
        self,
        view: Mapping[str, Seen],
        changes: Mapping[str, Entry | None],
        puts: Iterable[dict[str, Any]],
        deadline: float,
    ) -> tuple[int, dict[str, Seen]]:
        """Write ``puts``, and delete the other changed keys, if every key is as in ``view``.

        Returns:
            The revision of the write; or 0 and the current content of the keys.

        Raises:
            LeaseGone: A put names an etcd lease that has expired.
        """
        compare = [
            {
                "key": self._name(key),
                "target": "MOD",
                "result": "EQUAL",
                "mod_revision": str(seen.revision),
            }
            for key, seen in view.items()
        ]
        success: list[dict[str, Any]] = [{"request_put": put} for put in puts]
        for key, entry in changes.items():
            if entry is None:
                success.append({"request_delete_range": {"key": self._name(key)}})
        body = {"compare": compare, "success": success, "failure": self._ranges(view)}
        reply = self._gateway.request("kv/txn", body, deadline, repeatable=not changes)
        if reply.get("succeeded"):
            return int(reply["header"]["revision"]), {}
        return 0, self._found(view, reply, deadline)

    def put(self, key: str, entry: Entry, lease_id: int, slack: float) -> dict[str, Any]:
        """A put of ``entry``, bound to an etcd lease that expires ``slack`` seconds later."""
        word = f"k{entry.ttl:g}" if entry.renewed else f"p{max(0.0, slack):.3f}"
        value = f"{word} {format_value(entry.value)}".encode()
        return {
            "key": self._name(key),
            "value": b64encode(value).decode(),
            "lease": str(lease_id),
        }

    def pages(self, start: str, deadline: Callable[[], float]) -> Iterator[tuple[str, Seen]]:
        """All keys that begin with ``start``. ``deadline`` returns the next request's deadline.

        Each key has its own deadline, because reading its ttl may take another request.
        """
        first = (self._prefix + start).encode()
        end = b64encode(first + b"\xff").decode()  # No key contains this byte.
        while True:
            body = {"key": b64encode(first).decode(), "range_end": end, "limit": _PAGE}
            reply = self._gateway.request("kv/range", body, deadline(), repeatable=True)
            found = reply.get("kvs", [])
            for kv in found:
                name = b64decode(kv["key"]).decode(errors="replace")
                yield name[len(self._prefix) :], self._seen(kv, deadline())
            if len(found) < _PAGE:
                return
            first = b64decode(found[-1]["key"]) + b"\x00"

    def _name(self, key: str) -> str:
        return b64encode((self._prefix + key).encode()).decode()

    def _ranges(self, keys: Iterable[str]) -> list[dict[str, Any]]:
        return [{"request_range": {"key": self._name(key)}} for key in keys]

    def _found(
        self, keys: Iterable[str], reply: Mapping[str, Any], deadline: float
    ) -> dict[str, Seen]:
        ranges = (one["response_range"].get("kvs", []) for one in reply.get("responses", []))
        return {
            key: self._seen(found[0], deadline) if found else Seen()
            for key, found in zip(keys, ranges, strict=True)
        }

    def _seen(self, kv: Mapping[str, Any], deadline: float) -> Seen:
        revision, lease_id = int(kv["mod_revision"]), int(kv.get("lease", 0))
        text = b64decode(kv.get("value", "")).decode(errors="replace")
        match = re.match(r"([kp])([0-9.e+]+) ", text)
        if match is None or not lease_id:
            return Seen(Entry(Foreign(), 0.0), revision, lease_id)
        value = parse_value(text[match.end() :], self._fence_base + revision)
        renewed, ttl = match[1] == "k", float(match[2])
        if not renewed:
            ttl = max(0.0, self._leases.remaining(lease_id, deadline) - ttl)
        return Seen(Entry(value, ttl, renewed), revision, lease_id)
