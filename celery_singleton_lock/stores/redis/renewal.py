"""What one renewal sends: leases with their claims, cut into pieces that one script may touch.

A process may have thousands of leases, and sends the same of each every time: what it takes to
write a token down is done once, and stays with the lease. Its key is quickly packed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Kind, Lease, LossReason
from celery_singleton_lock.core.store import RENEWED, Renewal
from celery_singleton_lock.stores.redis.scripts import Packed, Script, milliseconds, packed_word

__all__ = [
    "RENEW",
    "RenewalCall",
    "by_shard",
    "chunks_of",
    "renewal_call",
    "renewals_of",
]

# One EVALSHA over N keys stalls the server, for some 2.3 us a key, however they are cut: a step of
# 64 is about 0.15 ms. Claims that are prolonged too make it up to 0.6 ms (median on a busy
# machine). One pipeline carries all steps.
_CHUNK: Final = 64

_CLAIM_KEY: Final = attrgetter("claim_key")

_RENEWALS: Final = {
    0: LossReason.GONE,
    -1: LossReason.REPLACED,
    2: LossReason.DYING,
}


@dataclass(frozen=True, slots=True)
class RenewalCall:
    """KEYS and ARGV of ``renew.lua``.

    Attributes:
        keys: Their number.
        first: The first of them.
        words: How many there are in all.
        packed: All of them, as bytes to send.
    """

    keys: int
    first: str
    words: int
    packed: bytes

    def command(self, name: str, script: Any) -> Packed:
        """EVALSHA or EVAL, with the digest or source of a script."""
        head = b"*%d\r\n%b" % (self.words + 3, b"".join(_words(name, script, self.keys)))
        return Packed((name, script, self.keys, self.first, head + self.packed))


class _Renew(Script):
    """``renew.lua``, whose calls are packed already."""

    __slots__ = ()

    def evalsha(self, call: RenewalCall) -> Packed:  # type: ignore[override]
        return call.command("EVALSHA", self.sha)

    def eval(self, call: RenewalCall) -> Packed:  # type: ignore[override]
        return call.command("EVAL", self.source)


RENEW: Final = _Renew("renew")


def chunks_of(leases: Sequence[Lease]) -> list[Sequence[Lease]]:
    """``leases``, in their order, cut into what one script may touch."""
    return [leases[start : start + _CHUNK] for start in range(0, len(leases), _CHUNK)]


def by_shard(leases: Sequence[Lease]) -> list[list[int]]:
    """Positions of the leases of each shard."""
    shards: dict[str, list[int]] = {}
    for index, lease in enumerate(leases):
        shards.setdefault(Keyspace.shard(lease.key), []).append(index)
    return list(shards.values())


def renewal_call(chunk: Sequence[Lease], *, claims: bool = True) -> RenewalCall:
    """What prolongs ``chunk``; a claim in another shard than its lease is left out."""
    keys = [lease.key for lease in chunk]
    arguments = [lease.token_sent or _packed(lease) for lease in chunk]
    claimed: list[tuple[int, Lease]] = []
    if claims and any(map(_CLAIM_KEY, chunk)):
        claimed = [
            (place, lease)
            for place, lease in enumerate(chunk, start=1)
            if lease.claim_key and Keyspace.same_shard(lease.key, lease.claim_key)
        ]
        keys += [lease.claim_key for _, lease in claimed]
        arguments += _words(*(place for place, _ in claimed))
    ttls = {lease.ttl for lease in chunk}
    common: int | str = ""
    if len(ttls) == 1:
        common = milliseconds(*ttls)
    else:
        each = [*chunk, *(lease for _, lease in claimed)]
        arguments += _words(*(milliseconds(lease.ttl) for lease in each))
    head = _words(len(chunk), common)
    packed = b"".join([_packed_keys(keys), *head, *arguments])
    return RenewalCall(len(keys), keys[0], len(keys) + len(head) + len(arguments), packed)


def renewals_of(chunk: Sequence[Lease], reply: Sequence[int]) -> list[Renewal]:
    """What the script's reply says of each lease."""
    found: list[Renewal] = [RENEWED] * len(chunk)
    for place, number in zip(reply[::2], reply[1::2], strict=True):
        found[place - 1] = _RENEWALS[number]
    return found


def _packed(lease: Lease) -> bytes:
    """The token of ``lease`` as its renewals send it, from now on at hand."""
    lease.token_sent = packed_word(f"{Kind.LEASE} {lease.token} ")
    return lease.token_sent


def _packed_keys(keys: Sequence[str]) -> bytes:
    # Encoded at once where a letter is a byte: at a third of the cost.
    text = "".join([f"${len(key)}\r\n{key}\r\n" for key in keys])
    return text.encode() if text.isascii() else b"".join(_words(*keys))


def _words(*values: Any) -> list[bytes]:
    return [packed_word(value) for value in values]
