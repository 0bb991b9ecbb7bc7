"""Which node of a Redis Cluster has which slot, as far as this process knows."""

from __future__ import annotations

import binascii
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

__all__ = ["Address", "Topology", "slot_of"]

#: Host and port.
Address = tuple[str, int]

_SLOTS: Final = 16384


def slot_of(key: str | bytes) -> int:
    """The hash slot of ``key``: of what stands in its first braces, if anything does."""
    data = key.encode() if isinstance(key, str) else bytes(key)
    tag, closed, _ = data.partition(b"{")[2].partition(b"}")
    return _slot_of_tag(tag if closed and tag else data)


@lru_cache(maxsize=1024)
def _slot_of_tag(tag: bytes) -> int:
    # CRC16-CCITT (XMODEM), https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec
    return binascii.crc_hqx(tag, 0) % _SLOTS


class Topology:
    """A picture of the cluster at one moment, and what redirects said since."""

    def __init__(self, ranges: Sequence[tuple[int, int, Address]], others: Sequence[Address]):
        self._ranges = sorted(ranges)
        self._begins = [begin for begin, _, _ in self._ranges]
        self._moved: dict[int, Address] = {}
        #: Those that have slots.
        self.masters: list[Address] = list(dict.fromkeys(address for _, _, address in self._ranges))
        #: All, whatever they are.
        self.nodes: list[Address] = list(dict.fromkeys([*self.masters, *others]))

    @classmethod
    def parse(cls, reply: Sequence[Any], asked: Address) -> Topology:
        """The reply to CLUSTER SLOTS of the node ``asked``, which may leave out its own host."""
        ranges, others = [], []
        for begin, end, master, *replicas in reply:
            ranges.append((int(begin), int(end), _address(master, asked)))
            others += [_address(replica, asked) for replica in replicas]
        return cls(ranges, others)

    def master_of(self, slot: int) -> Address | None:
        """The node to ask about ``slot``; None if the cluster has none for it."""
        if slot in self._moved:
            return self._moved[slot]
        index = bisect_right(self._begins, slot) - 1
        if index < 0 or self._ranges[index][1] < slot:
            return None
        return self._ranges[index][2]

    def learn(self, slot: int, address: Address) -> None:
        """A node said MOVED."""
        self._moved[slot] = address


def _address(node: Sequence[Any], asked: Address) -> Address:
    host = (node[0] or b"").decode()
    # Empty or '?': the node doesn't know its own name (cluster-preferred-endpoint-type).
    return (host if host not in ("", "?") else asked[0], int(node[1]))
