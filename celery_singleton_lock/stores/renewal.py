"""What one renewal sends: leases with their claims, cut into pieces that one script may touch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Lease
from celery_singleton_lock.core.store import Renewal
from celery_singleton_lock.stores.script import Call, milliseconds

__all__ = ["chunks_of", "renewal_call", "renewals_of"]

# One EVALSHA over N keys stalls the server: 125 keys took it 0.8 to 0.9 ms on two shared, virtual
# cores (`make bench ARGS=micro`). One pipeline carries all chunks.
_CHUNK: Final = 125

_RENEWALS: Final = {
    1: Renewal.RENEWED,
    0: Renewal.EXPIRED,
    -1: Renewal.REPLACED,
    2: Renewal.DYING,
}


def chunks_of(leases: Sequence[Lease]) -> list[list[int]]:
    """Positions of the leases that one script may touch: of one shard, and not too many."""
    shards: dict[str, list[int]] = {}
    for index, lease in enumerate(leases):
        shards.setdefault(Keyspace.shard(lease.key), []).append(index)
    return [
        members[start : start + _CHUNK]
        for members in shards.values()
        for start in range(0, len(members), _CHUNK)
    ]


def renewal_call(chunk: Sequence[Lease], *, claims: bool = True) -> Call:
    """KEYS and ARGV of ``renew.lua``; a claim in another shard than its lease is left out."""
    # Behind the leases, so that these are the first replies.
    claimed = [
        lease
        for lease in chunk
        if claims and lease.claim_key and Keyspace.same_shard(lease.key, lease.claim_key)
    ]
    ttls = {lease.ttl: milliseconds(lease.ttl) for lease in chunk}
    arguments: list[Any] = [len(chunk)]
    for lease in (*chunk, *claimed):
        arguments += (str(lease.token), ttls[lease.ttl])
    return [*(lease.key for lease in chunk), *(lease.claim_key for lease in claimed)], arguments


def renewals_of(chunk: Sequence[Lease], reply: Sequence[int]) -> list[Renewal]:
    """What the script's reply says of each lease."""
    return [_RENEWALS[number] for number in reply[: len(chunk)]]
