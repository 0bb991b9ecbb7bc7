"""Outages of the store, or of a beat's broker, as one process sees them: from the first request
that fails to the next reply.

The shards of a cluster fail one by one, so each has its own outage.
"""

from __future__ import annotations

from .clock import Clock
from .events import Event, EventName, Events
from .lease import Holder


class Outages:
    """Notes the outages of a server; emits ``store-unreachable``, and ``store-back`` at its end.

    Args:
        events: The process's events.
        clock: The clock.
        url: The server's URL without passwords, for the events.
        server: ``"store"`` or ``"broker"``: the first part of the events' names, and the name of
            the URL in their data.

    Attributes:
        since: By shard, the time at which the outage began.
    """

    __slots__ = ("_clock", "_events", "_reported", "_server", "since", "url")

    def __init__(
        self, events: Events, clock: Clock, url: str = "", *, server: str = "store"
    ) -> None:
        self._events, self._clock, self._server = events, clock, server
        self.url = url
        self.since: dict[str, float] = {}
        self._reported: set[str] = set()

    def begin(self, key: str) -> None:
        """Note a failed request about ``key``."""
        self.since.setdefault(_shard(key), self._clock.now())

    def report(
        self,
        error: object,
        action: str,
        *,
        key: str,
        task: str,
        task_id: str,
        holder: Holder | None = None,
        repeats: bool = False,
    ) -> None:
        """Note a failed request about ``key``, and emit its event.

        Args:
            error: The error.
            action: What becomes of the message, the lease or the ticks.
            key, task, task_id, holder: See `Event`.
            repeats: Whether there is an event for each request, not only for the first of an
                outage.
        """
        self.begin(key)
        shard = _shard(key)
        if shard in self._reported and not repeats:
            return
        self._reported.add(shard)
        self._events.emit(
            Event(
                name=EventName(f"{self._server}-unreachable"),
                key=key,
                task=task,
                task_id=task_id,
                holder=holder or Holder(),
                data={self._server: self.url, "error": str(error), "action": action},
            )
        )

    def end(self, key: str) -> None:
        """Note a reply to a request about ``key``."""
        shard = _shard(key)
        began = self.since.pop(shard, None)
        if began is None or shard not in self._reported:
            return
        self._reported.discard(shard)
        data = {self._server: self.url, "lasted": round(self._clock.now() - began, 3)}
        self._events.emit(Event(name=EventName(f"{self._server}-back"), key=key, data=data))


def _shard(key: str) -> str:
    return key.partition("}")[0]
