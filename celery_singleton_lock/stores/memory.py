"""Leases in this process's memory: for eager tasks, for users' own tests, and as the reference that
the contract holds the other stores to.
"""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lease import Lease, Record
from celery_singleton_lock.core.store import Capabilities, Renewal
from celery_singleton_lock.stores.transitions import rules
from celery_singleton_lock.stores.transitions.entries import Entry
from celery_singleton_lock.stores.transitions.store import RuledStore
from celery_singleton_lock.stores.transitions.transition import Rule, numbered

__all__ = ["MemoryStore"]

Reply = TypeVar("Reply")

# Number of entries at which expired ones are removed. The next sweep is at twice the entries that
# remain, so that a write examines two entries on average.
_SWEEP_AT: Final = 256


class MemoryStore(RuledStore):
    """The rules, under one lock. ``timeout`` is ignored."""

    def __init__(self, clock: Clock, *, fence_base: int = 0) -> None:
        super().__init__()
        self._clock = clock
        self._fence = fence_base
        # A value, and when it expires on the clock.
        self._entries: dict[str, tuple[Entry, float]] = {}
        self._sweep_at = _SWEEP_AT
        self._guard = threading.RLock()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(fence=True, name="memory")

    def renew(self, leases: Sequence[Lease], *, timeout: float = 0) -> list[Renewal]:
        with self._guard:
            return self._apply(rules.renew_all(leases), timeout)[0]

    def scan(self, pattern: str) -> Iterator[Record]:
        with self._guard:
            keys = [key for key in sorted(self._entries) if fnmatch.fnmatchcase(key, pattern)]
            records = [record for key in keys if (record := self.inspect(key)) is not None]
        return iter(records)

    def close(self) -> None:
        """Nothing to close."""

    def _apply(self, rule: Rule[Reply], timeout: float) -> tuple[Reply, int]:
        with self._guard:
            now = self._clock.now()
            found = {key: entry for key in rule.keys if (entry := self._entry(key, now))}
            outcome = rule.decide(found)
            return outcome.reply, self._write(outcome.changes, now)

    def _entry(self, key: str, now: float) -> Entry | None:
        entry, until = self._entries.get(key, (None, 0.0))
        if entry is None:
            return None
        if now >= until:
            del self._entries[key]
            return None
        return replace(entry, ttl=until - now)

    def _write(self, changes: Mapping[str, Entry | None], now: float) -> int:
        number = self._next_fence() if changes else 0
        for key, entry in changes.items():
            if entry is None:
                self._entries.pop(key, None)
                continue
            self._entries[key] = (numbered(entry, number), now + entry.ttl)
        if len(self._entries) > self._sweep_at:
            expired = [key for key, (_, until) in self._entries.items() if now >= until]
            for key in expired:
                del self._entries[key]
            self._sweep_at = max(_SWEEP_AT, 2 * len(self._entries))
        return number

    def _next_fence(self) -> int:
        self._fence = max(int(self._clock.wall() * 1e6), self._fence + 1)
        return self._fence
