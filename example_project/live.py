"""What the store holds right now: each lease with its job, fence and remaining seconds, and which
beat leads."""

from collections.abc import Iterator
from dataclasses import dataclass

import redis

from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Kind
from celery_singleton_lock.core.store import operators_of
from celery_singleton_lock.stores import open_store

#: Remaining seconds only ever fall by themselves; a rise of more than this is a renewal.
RENEWAL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease:
    key: str
    job: str
    fence: int
    remaining: float  # seconds
    pid: int  # of the process that took it


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    leases: list[HeldLease]  # of jobs
    renewed: list[HeldLease]  # those of them that were renewed since the last look
    leader: HeldLease | None  # of the beats


class LeaseView:
    """Looks at the store now and then, and notices renewals between two looks."""

    def __init__(self, url: str, prefix: str) -> None:
        self._store = open_store(url)
        self._client = redis.Redis.from_url(url, socket_timeout=2)
        self._prefix = prefix
        self._before: dict[str, float] = {}

    def look(self) -> Look:
        found = list(self._read())
        leader = next((lease for lease in found if _is_leader(lease)), None)
        held = [lease for lease in found if not _is_leader(lease)]
        renewed = [
            lease
            for lease in held
            if lease.remaining > self._before.get(_grant(lease), float("inf")) + RENEWAL_SECONDS
        ]
        self._before = {_grant(lease): lease.remaining for lease in held}
        return Look(leases=held, renewed=renewed, leader=leader)

    def sweep(self) -> None:
        """Delete all that a run left on the server; its prefix is its own."""
        for raw in self._client.scan_iter(f"*{self._prefix}*", count=1000):
            self._client.delete(raw)

    def close(self) -> None:
        self._client.close()
        self._store.close()

    def _read(self) -> Iterator[HeldLease]:
        keyspace = Keyspace(self._prefix, global_prefix=f"{self._prefix}:")  # as in app.py
        for record in operators_of(self._store).scan(keyspace.match_all()):
            if record.kind is Kind.LEASE and record.fence is not None:
                yield HeldLease(
                    key=record.key,
                    job=record.holder.task_id,
                    fence=record.fence,
                    remaining=record.ttl,
                    pid=record.holder.pid,
                )


def _is_leader(lease: HeldLease) -> bool:
    """Whether it is the beats' lease: its key stands in a scope of its own, `celery.beat`."""
    return "}:celery.beat:" in lease.key


def _grant(lease: HeldLease) -> str:
    """A renewal prolongs one grant; a next holder of the same key is no renewal."""
    return f"{lease.key} {lease.fence}"
