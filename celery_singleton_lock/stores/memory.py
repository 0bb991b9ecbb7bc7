"""A store in the memory of this process: for eager tasks and users' own tests."""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Iterator, Mapping
from typing import Final, TypeVar

from ..core.clock import Clock
from ..core.store import Capabilities
from ..core.store_requests import Acquire, Granted, QueuedAcquire, Refused
from .memory_pauses import MemoryPauses
from .memory_queue import MemoryCallQueue
from .memory_rates import MemoryRates
from .transitions import Draft, Entry, Transition, TransitionLeases, TransitionStore

Reply = TypeVar("Reply")

# Number of entries at which expired ones are removed. The next sweep is at twice the entries that
# remain, so that a write examines two entries on average.
_SWEEP_AT: Final = 256


class MemoryLeases(TransitionLeases):
    """The leases. The queue decides about those of its calls."""

    def __init__(
        self,
        store: TransitionStore,
        queue: MemoryCallQueue,
        pauses: MemoryPauses,
        rates: MemoryRates,
    ) -> None:
        super().__init__(store, pauses.of, rates.start)
        self._queue = queue

    def acquire(self, request: Acquire, /, *, timeout: float = 0) -> Granted | Refused:
        if isinstance(request, QueuedAcquire):
            return self._queue.acquire(request, timeout=timeout)
        return super().acquire(request, timeout=timeout)


class MemoryStore(TransitionStore):
    """A store that applies each transition under one lock. Ignores ``timeout``.

    Args:
        clock: The clock for expiry and fences.
        fence_base: Fences are above this number.
    """

    capabilities = Capabilities(fence=True, name="memory", rates=True)

    def __init__(self, clock: Clock, *, fence_base: int = 0) -> None:
        super().__init__()
        self._clock = clock
        self._fence = fence_base
        # For each key, its entry and the time of its expiry on the clock.
        self._entries: dict[str, tuple[Entry, float]] = {}
        self._sweep_at = _SWEEP_AT
        self._guard = threading.RLock()
        self.pauses = pauses = MemoryPauses(clock, self._guard)
        rates = MemoryRates(clock)
        self.leases = TransitionLeases(self, pauses.of, rates.start)
        self.call_queue = MemoryCallQueue(
            clock, self._guard, self.leases, self.claims, self.operators, pauses, rates
        )
        self.leases = MemoryLeases(self, self.call_queue, pauses, rates)

    def transact(self, transition: Transition[Reply], timeout: float) -> tuple[Reply, int]:
        with self._guard:
            now = self._clock.now()
            found = [(key, *self._entries[key]) for key in transition.keys if key in self._entries]
            draft = Draft(
                {key: Entry(e.value, end - now, e.renewed) for key, e, end in found if now < end}
            )
            reply = transition.decide(draft)
            return reply, self._write(draft.changes, now) if draft.changes else 0

    def entries(self, pattern: str, /) -> Iterator[tuple[str, Entry]]:
        with self._guard:
            now, entries = self._clock.now(), dict(self._entries)
        for key in sorted(entries):
            entry, end = entries[key]
            if now < end and fnmatch.fnmatchcase(key, pattern):
                yield key, Entry(entry.value, end - now, entry.renewed)

    def _write(self, changes: Mapping[str, Entry | None], now: float) -> int:
        # Microseconds, like the fences of Redis.
        self._fence = max(int(self._clock.wall() * 1e6), self._fence + 1)
        for key, entry in changes.items():
            if entry is None:
                self._entries.pop(key, None)
            else:
                self._entries[key] = (entry.numbered(self._fence), now + entry.ttl)
        if len(self._entries) > self._sweep_at:
            alive = {key: found for key, found in self._entries.items() if now < found[1]}
            self._entries = alive
            self._sweep_at = max(_SWEEP_AT, 2 * len(alive))
        return self._fence
