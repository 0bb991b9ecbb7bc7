"""What the store holds right now: for each lease its job, its fence and its remaining seconds.

The only module of the example that knows how a lease looks in Redis.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import redis

#: Remaining seconds only ever fall by themselves; a rise of more than this is a renewal.
RENEWAL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease:
    key: str
    job: str
    fence: int
    remaining: float  # seconds


class LeaseView:
    """Looks at the store now and then, and notices renewals between two looks."""

    def __init__(self, url: str, prefix: str) -> None:
        self._client = redis.Redis.from_url(url, socket_timeout=2)
        self._prefix = prefix
        self._before: dict[str, float] = {}

    def look(self) -> tuple[list[HeldLease], list[HeldLease]]:
        """The leases held now, and those among them that were renewed since the last look."""
        held = list(self._read())
        renewed = [
            lease
            for lease in held
            if lease.remaining > self._before.get(_grant(lease), float("inf")) + RENEWAL_SECONDS
        ]
        self._before = {_grant(lease): lease.remaining for lease in held}
        return held, renewed

    def sweep(self) -> None:
        """Delete all that a run left on the server; its prefix is nobody else's."""
        for raw in self._client.scan_iter(f"*{self._prefix}*", count=1000):
            self._client.delete(raw)

    def close(self) -> None:
        self._client.close()

    def _read(self) -> Iterator[HeldLease]:
        for raw in self._client.scan_iter(f"csl:{{{self._prefix}:*}}:*", count=1000):
            with self._client.pipeline(transaction=True) as pipe:
                pipe.get(raw)
                pipe.pttl(raw)
                value, remaining_ms = pipe.execute(raise_on_error=False)
            # A counter or a marker of the lock's own, or a lease that ended in between.
            if not isinstance(value, bytes) or not value.startswith(b"l ") or remaining_ms < 0:
                continue
            _kind, token, fence = value.decode().split(" ", 3)[:3]
            yield HeldLease(
                key=raw.decode(),
                job=token.partition("|")[0],
                fence=int(fence),
                remaining=remaining_ms / 1000,
            )


def _grant(lease: HeldLease) -> str:
    """A renewal prolongs one grant; a next holder of the same key is no renewal."""
    return f"{lease.key} {lease.fence}"
