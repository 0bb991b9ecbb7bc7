"""The etcd leases of one process. Many keys share one etcd lease.

A key in etcd exists as long as the etcd lease that it is bound to. There are two kinds:

renewed
    One per ttl in whole seconds, for leases and the claims of running tasks. One keepalive prolongs
    all keys of that ttl. It expires when the process holds nothing and stops the keepalives.
expiring
    For reservations, cooling keys, markers and queued claims. All keys that expire in the same
    sixteenth of their ttl share one. So a thousand markers a minute need some 20 etcd leases
    instead of 60,000. These are never prolonged and never revoked.

``ends_at`` is a time on the clock of this process, counted from before the request. So etcd's own
expiry is later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.stores.etcd.gateway import Gateway, LeaseGone

#: The share of a ttl for which a holder may trust a grant. The other sixth is the maximum age of
#: the keepalive that the grant relies on, so a worker with many short bodies sends one keepalive
#: per ttl/6 instead of one per body. It also covers a leader that was deposed and doesn't know it
#: yet. For at most an election timeout, such a leader answers keepalives that the new leader hasn't
#: seen. The new leader has given every lease its full ttl.
TRUSTED: Final = 5 / 6
# Seconds. etcd grants at least 1.5 election timeouts (of 1 s by default), rounded up.
_MIN_TTL: Final = 2
# The share of its ttl that an expiring key may exist for longer than requested.
_SLACK: Final = 1 / 16


@dataclass(slots=True)
class EtcdLease:
    """One etcd lease of this process."""

    id: int
    ends_at: float


class EtcdLeases:
    """Grants etcd leases and keeps them alive.

    Every method may raise StoreUnavailable and StoreError.
    """

    def __init__(self, gateway: Gateway, clock: Clock) -> None:
        self._gateway = gateway
        self._clock = clock
        self._renewed: dict[int, EtcdLease] = {}
        self._expiring: list[EtcdLease] = []

    def renewed(self, ttl: float, deadline: float) -> tuple[EtcdLease, bool]:
        """An etcd lease that lasts for TRUSTED of ``ttl``, and whether it was just prolonged."""
        seconds = max(math.ceil(ttl), _MIN_TTL)
        lease = self._renewed.get(seconds)
        left = lease.ends_at - self._clock.now() if lease else 0.0
        if lease and left >= ttl * TRUSTED:
            return lease, False
        if lease and left > 0 and self.keep_alive(lease.id, deadline):
            return lease, True
        # If two threads grant an etcd lease, the second replaces the first. A key that is bound to
        # the first moves to the second at its next renewal.
        self._renewed[seconds] = lease = self._grant(seconds, deadline)
        return lease, False

    def expiring(self, ttl: float, deadline: float) -> EtcdLease:
        """An etcd lease that expires in ``ttl`` seconds, or slightly later."""
        now = self._clock.now()
        # A new list, assigned in one step: another thread may iterate over the old one.
        self._expiring = alive = [lease for lease in self._expiring if lease.ends_at > now]
        for lease in alive:
            if ttl <= lease.ends_at - now <= ttl * (1 + _SLACK) + 1:
                return lease
        lease = self._grant(max(math.ceil(ttl * (1 + _SLACK)), _MIN_TTL), deadline)
        self._expiring.append(lease)
        return lease

    def is_renewed(self, lease_id: int) -> bool:
        """Whether this process keeps the etcd lease alive."""
        return any(lease.id == lease_id for lease in list(self._renewed.values()))

    def keep_alive(self, lease_id: int, deadline: float) -> bool:
        """Prolong an etcd lease of any process; whether it still existed."""
        sent = self._clock.now()
        reply = self._request("lease/keepalive", {"ID": lease_id}, deadline)
        # Once the lease has expired, etcd omits the ttl.
        ttl = float(reply.get("result", {}).get("TTL", -1))
        for seconds, lease in list(self._renewed.items()):
            if lease.id == lease_id and ttl > 0:
                lease.ends_at = sent + ttl
            elif lease.id == lease_id:
                self._renewed.pop(seconds, None)
        return ttl > 0

    def forget(self) -> None:
        """Forget all etcd leases, so that new ones are granted.

        etcd has reported that one of them is gone, but not which one.
        """
        self._renewed.clear()
        self._expiring = []

    def remaining(self, lease_id: int, deadline: float) -> float:
        """Seconds until an etcd lease of any process expires; 0 if it has expired."""
        for lease in [*self._renewed.values(), *self._expiring]:
            if lease.id == lease_id:
                return max(0.0, lease.ends_at - self._clock.now())
        try:
            reply = self._request("lease/timetolive", {"ID": lease_id}, deadline)
        except LeaseGone:
            return 0.0
        return max(0.0, float(reply.get("TTL", -1)))

    def _grant(self, seconds: int, deadline: float) -> EtcdLease:
        sent = self._clock.now()
        # A repeated grant after a lost reply leaves an etcd lease without keys, which expires.
        reply = self._request("lease/grant", {"TTL": seconds, "ID": 0}, deadline)
        return EtcdLease(int(reply["ID"]), sent + float(reply["TTL"]))

    def _request(self, path: str, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        return self._gateway.request(path, body, deadline, repeatable=True)
