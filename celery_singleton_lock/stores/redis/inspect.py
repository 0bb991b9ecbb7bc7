"""Requests of the command line and the doctor to the Redis servers of a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, Final

import redis

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Record
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.connection import Connections
from celery_singleton_lock.stores.redis.scripts import Command

#: Seconds to wait for a reply. It may be long, because operators hold no lease meanwhile.
OPERATOR_TIMEOUT: Final = 2.0

# Keys per SCAN. Each SCAN blocks the server's other clients for some 0.15 ms.
_SCAN_COUNT: Final = 100
# Reads in one pipeline. The server may serve other clients between them.
_READ_AT_ONCE: Final = 500


class RedisOperators(Store):
    """The requests of operators to a store."""

    _connections: Connections

    def _read(self, key: str, timeout: float) -> Record | None:
        value, ttl = self._connections.run([("GET", key), ("PTTL", key)], timeout)
        return None if value is None else record_of(key.encode(), value, ttl)

    def scan(self, pattern: str) -> Iterator[Record]:
        return self.survey(pattern, lambda key, reason: None)

    def survey(self, pattern: str, report: Callable[[str, str], None]) -> Iterator[Record]:
        """As :meth:`scan`, and ``report`` is called with each key of :meth:`foreign_keys`.

        Each key is scanned and read once. Calling both methods would take twice as long.
        """
        # All names are read first. The names of a million keys fit into memory; their values may
        # not.
        names = [name for page in self._pages(pattern) for name in page]
        names.sort()
        keys = (name for name, _ in groupby(names))  # SCAN may return a key twice
        for batch in iter(lambda: [*islice(keys, _READ_AT_ONCE)], []):
            found = [*self._read_each("GET", batch)]
            others = [key for key, value, _ in found if isinstance(value, Exception)]
            kinds = {key: kind for key, kind, _ in self._read_each("TYPE", others)}
            for key, value, ttl_ms in found:
                if key in kinds or ttl_ms == -1:
                    name = key.decode(errors="replace")
                    if what := _problem_with(name, kinds.get(key, b"string"), ttl_ms):
                        report(name, what)
                if key not in kinds and value is not None:
                    record = record_of(key, value, ttl_ms)
                    if record is not None:
                        yield record

    def foreign_keys(self, pattern: str) -> Iterator[tuple[str, str]]:
        """Keys that match ``pattern`` but were not written by this library, each with a reason.

        Examples are locks of other recipes under the same name: SETNX without an expiry, a list, a
        set.
        """
        found: list[tuple[str, str]] = []
        for _ in self.survey(pattern, lambda *foreign: found.append(foreign)):
            pass
        return iter(found)

    def missing_rights(self, key: str) -> list[str]:
        """See `Store.missing_rights`.

        ``key`` is one for which no client waits. The method leaves nothing in the store.
        """
        queue = Keyspace.wait_queue(key)
        handoffs = f"{queue}!"
        commands: list[Command] = [
            ("RPUSH", handoffs, "you"),
            ("BLPOP", handoffs, 0.01),
            ("ZADD", queue, "XX", 0, "you"),
            ("ZCOUNT", queue, 0, 0),
            ("ZREM", queue, "you"),
        ]
        missing: list[str] = []
        for command in commands:
            try:
                self._connections.run([command], OPERATOR_TIMEOUT)
            except StoreError as exc:
                if not isinstance(exc.__cause__, redis.exceptions.NoPermissionError):
                    raise
                missing.append(command[0])
        if "BLPOP" in missing:
            self._connections.run([("DEL", handoffs)], OPERATOR_TIMEOUT)
        return missing

    def info(self, section: str) -> dict[str, str]:
        """One section of INFO. If a server may evict leases, it is the section of that server.

        Empty if the servers deny INFO.
        """
        found: dict[str, str] = {}
        for server in self.servers():
            found = info_of(server, section)
            if found.get("maxmemory_policy", "noeviction") != "noeviction":
                break
        return found

    def servers(self) -> Sequence[Connections]:
        """The connections to each server that has keys of this store."""
        return self._connections.masters(OPERATOR_TIMEOUT)

    def _pages(self, pattern: str) -> Iterator[list[bytes]]:
        """The matching keys of each server, page by page. A key may occur twice."""
        for server in self.servers():
            cursor = b"0"
            while True:
                command = ("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
                ((cursor, keys),) = server.run([command], OPERATOR_TIMEOUT)
                yield keys
                if cursor == b"0":
                    break

    def _read_each(self, read: str, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Any, int]]:
        """Each key, the reply to the command ``read`` for it, and its ttl in ms.

        The reply to GET for a list or a set is an exception that names the problem.
        """
        reads: list[Command] = []
        for key in keys:
            # Packing text costs half as much as packing bytes.
            name = key.decode() if key.isascii() else key
            reads += ((read, name), ("PTTL", name))
        replies = self._connections.run(reads, OPERATOR_TIMEOUT, check=False) if reads else []
        self._connections.checked([reply for reply in replies if not _is_of_type(reply)])
        each = iter(replies)
        return zip(keys, each, each, strict=False)


def _is_of_type(reply: Any) -> bool:
    return isinstance(reply, Exception) and str(reply).startswith("WRONGTYPE ")


def _problem_with(name: str, kind: bytes, ttl_ms: int) -> str:
    """The problem with a key; empty: none."""
    if kind not in (b"string", b"none") and not Keyspace.is_wait_queue(name):
        return f"is a {kind.decode()}, not a string"
    return "has no expiry" if ttl_ms == -1 and not Keyspace.stays(name) else ""


def info_of(server: Connections, section: str) -> dict[str, str]:
    """One section of a server's INFO; empty if the server denies INFO.

    Raises:
        StoreUnavailable: The server doesn't answer.
        StoreError: The server refuses the login.
    """
    try:
        (text,) = server.run([("INFO", section)], OPERATOR_TIMEOUT)
    except StoreUnavailable:
        raise
    except StoreError as exc:
        if isinstance(exc.__cause__, redis.exceptions.AuthenticationError):
            raise  # the login was refused, not INFO
        return {}
    lines = text.decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def record_of(key: bytes, value: bytes, ttl_ms: float) -> Record | None:
    """The record in a key's value; None if other software or a newer version wrote the value."""
    try:
        return Record.parse(key.decode(), value.decode(), max(ttl_ms, 0) / 1000)
    except ValueError:
        return None
