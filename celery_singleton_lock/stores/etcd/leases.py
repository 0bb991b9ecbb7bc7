"""The etcd leases of one process: few of them, whatever the number of keys.

A key in etcd lives as long as the etcd lease that it is bound to. There are two sorts:

kept
    One per whole-second ttl, for what lives with a heartbeat (leases, claims of running tasks). One
    keepalive prolongs all its keys. When nothing is held, nobody keeps it alive, and it ends.
passing
    For what ends by itself (reservations, cooling keys, markers, queued claims). One is shared by
    all keys whose end lies in the same sixteenth of their time, so that a thousand markers a minute
    need some twenty etcd leases, not 60 000. None is ever revoked or prolonged: each ends on time.

``ends_at`` is on this process's clock, counted from before the request: etcd's own end is later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.stores.etcd.gateway import Gateway, LeaseGone

__all__ = ["TRUSTED", "EtcdLease", "EtcdLeases"]

#: The share of a ttl that a grant vouches for: the keepalive that it relies on may be as old as
#: the rest. So a worker with many short bodies sends one keepalive per ttl/6, not one per body. The
#: rest also covers a leader that was deposed and doesn't know yet: for an election timeout at most,
#: it answers keepalives that the new one hasn't seen, which has given every lease its full ttl.
TRUSTED: Final = 5 / 6
# etcd grants no less than 1.5 election timeouts (1 s by default), rounded up.
_MIN_TTL: Final = 2
# Of a passing key's time: how much later than asked for it may end.
_SLACK: Final = 1 / 16


@dataclass(slots=True)
class EtcdLease:
    """One etcd lease of this process."""

    id: int
    ends_at: float


class EtcdLeases:
    """Grants and keeps them.

    Every method may raise StoreUnavailable and StoreError.
    """

    def __init__(self, gateway: Gateway, clock: Clock) -> None:
        self._gateway = gateway
        self._clock = clock
        self._kept: dict[int, EtcdLease] = {}
        self._passing: list[EtcdLease] = []

    def kept(self, ttl: float, deadline: float) -> tuple[EtcdLease, bool]:
        """One that stands for :data:`TRUSTED` of ``ttl`` from now; whether it was prolonged."""
        seconds = whole(ttl)
        lease = self._kept.get(seconds)
        now = self._clock.now()
        if lease is not None and lease.ends_at - now >= ttl * TRUSTED:
            return lease, False
        if lease is not None and lease.ends_at > now and self.keep_alive(lease.id, deadline):
            return lease, True
        lease = self._grant(seconds, deadline)
        # Of two threads that come first, the second's serves its own key, which then has to move.
        self._kept[seconds] = lease
        return lease, False

    def passing(self, ttl: float, deadline: float) -> EtcdLease:
        """One that ends in ``ttl`` seconds, or slightly later."""
        now = self._clock.now()
        longest = ttl * (1 + _SLACK) + 1
        # A new list, in one step: another thread may look through the old one.
        self._passing = living = [lease for lease in self._passing if lease.ends_at > now]
        for lease in living:
            if ttl <= lease.ends_at - now <= longest:
                return lease
        lease = self._grant(whole(ttl * (1 + _SLACK)), deadline)
        self._passing.append(lease)
        return lease

    def is_kept(self, lease_id: int) -> bool:
        """Whether this process keeps it alive."""
        return any(lease.id == lease_id for lease in list(self._kept.values()))

    def keep_alive(self, lease_id: int, deadline: float) -> float:
        """Prolong it, be it this process's or another's; seconds that it has now, 0 if it ended."""
        sent = self._clock.now()
        reply = self._call("lease/keepalive", {"ID": lease_id}, deadline)
        # etcd leaves the ttl out once the lease has expired.
        ttl = float(reply.get("result", {}).get("TTL", -1))
        for seconds, lease in list(self._kept.items()):
            if lease.id == lease_id and ttl > 0:
                lease.ends_at = sent + ttl
            elif lease.id == lease_id:
                self._kept.pop(seconds, None)
        return max(0.0, ttl)

    def forget(self) -> None:
        """etcd knows one of them no more: ask for new ones, whichever it was."""
        self._kept.clear()
        self._passing = []

    def remaining(self, lease_id: int, deadline: float) -> float:
        """Seconds that one, of any process, still has; 0 if it ended."""
        for lease in [*self._kept.values(), *self._passing]:
            if lease.id == lease_id:
                return max(0.0, lease.ends_at - self._clock.now())
        try:
            reply = self._call("lease/timetolive", {"ID": lease_id}, deadline)
        except LeaseGone:
            return 0.0
        return max(0.0, float(reply.get("TTL", -1)))

    def _grant(self, seconds: int, deadline: float) -> EtcdLease:
        sent = self._clock.now()
        # Sent again after a lost reply, it leaves a lease without keys, which ends by itself.
        reply = self._call("lease/grant", {"TTL": seconds, "ID": 0}, deadline)
        return EtcdLease(int(reply["ID"]), sent + float(reply["TTL"]))

    def _call(self, path: str, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        return self._gateway.call(path, body, deadline, repeatable=True)


def whole(ttl: float) -> int:
    """``ttl`` as etcd can keep it: whole seconds, two at least."""
    return max(math.ceil(ttl), _MIN_TTL)
