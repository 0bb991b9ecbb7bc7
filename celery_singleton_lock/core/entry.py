"""A lease in the keeper's hands: when it has its next turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from celery_singleton_lock.core.lease import Lease
from celery_singleton_lock.core.pace import interval_of, retry_pause

__all__ = ["Entry"]


@dataclass(slots=True, eq=False)
class Entry:
    """One lease that is renewed; times in seconds, on its clock."""

    lease: Lease
    due: float
    on_lost: Callable[[Lease], None]
    error: str = ""
    failures: int = 0

    @property
    def interval(self) -> float:
        return interval_of(self.lease.ttl, self.lease.trusted)

    def renewable(self, now: float) -> bool:
        hold_until = self.lease.hold_until
        return hold_until is None or now < hold_until

    def retry_pause(self, now: float) -> float:
        """Seconds until the silent store is asked again."""
        return retry_pause(self.lease.ttl, self.lease.deadline - now)

    def next_time(self, now: float) -> float:
        """When this entry needs the keeper again."""
        deadline = self.lease.deadline
        return min(self.due, deadline) if self.renewable(now) else deadline
