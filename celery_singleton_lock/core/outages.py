"""Outages of the store, as one process sees them: from the first request that fails to the next
reply.

The shards of a cluster fail one by one, so each has its own outage.
"""

from __future__ import annotations

from .clock import Clock
from .events import Event, EventName, Events


class Outages:
    """Notes the outages of a store, and emits ``store-back`` at the end of each that was reported.

    Args:
        events: The process's events.
        clock: The clock.

    Attributes:
        store: The store's URL without passwords, for the events.
        since: By shard, the time at which the outage began.
    """

    __slots__ = ("_clock", "_events", "_reported", "since", "store")

    def __init__(self, events: Events, clock: Clock) -> None:
        self._events, self._clock = events, clock
        self.store = ""
        self.since: dict[str, float] = {}
        self._reported: set[str] = set()

    def begin(self, key: str) -> None:
        """Note a failed request about ``key``."""
        self.since.setdefault(_shard(key), self._clock.now())

    def is_news(self, key: str) -> bool:
        """Note a failed request that an event reports; return whether none has reported before."""
        self.begin(key)
        shard = _shard(key)
        was_reported = shard in self._reported
        self._reported.add(shard)
        return not was_reported

    def end(self, key: str) -> None:
        """Note a reply to a request about ``key``."""
        shard = _shard(key)
        began = self.since.pop(shard, None)
        if began is None or shard not in self._reported:
            return
        self._reported.discard(shard)
        data = {"store": self.store, "lasted": round(self._clock.now() - began, 3)}
        self._events.emit(Event(name=EventName.STORE_BACK, key=key, data=data))


def _shard(key: str) -> str:
    return key.partition("}")[0]
