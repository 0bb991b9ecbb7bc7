"""What a Redis server may evict when its memory is full, by its ``maxmemory-policy``.

All leases have a ttl, and every policy but ``noeviction`` may evict such keys. ``volatile-lru`` and
``volatile-lfu`` evict the keys that were not used for longest, or least often: a renewed lease
stays as long as the server holds older data with a ttl. The other policies take leases among the
first, or at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_SAFE: Final = "noeviction"
# Policies that evict renewed leases last, if anything else with a ttl was used before them.
_LEASES_LAST: Final = {"volatile-lru", "volatile-lfu"}
#: What to do.
REMEDY: Final = (
    "CONFIG SET maxmemory-policy noeviction, or a server of its own for the locks "
    "(singleton_lock_url)"
)


@dataclass(frozen=True, slots=True)
class Eviction:
    """What a server may evict.

    Attributes:
        text: The policy and what follows from it.
        endangers: Whether it evicts leases that are renewed, so that no lease is safe.
    """

    text: str
    endangers: bool

    def forbids_leases(self, *, allow_eviction: bool) -> bool:
        """Whether no lease is granted on this server, by the setting ``allow_eviction``."""
        return self.endangers and not allow_eviction


def policy_of(memory: Mapping[str, str]) -> str:
    """The ``maxmemory-policy`` in this section ``memory`` of INFO; the safe one if it is absent."""
    return memory.get("maxmemory_policy", _SAFE)


def eviction_of(memory: Mapping[str, str]) -> Eviction | None:
    """What a server with this section ``memory`` of INFO may evict.

    Returns:
        None: nothing, or unknown, because the login may not read INFO.
    """
    policy, limit = policy_of(memory), memory.get("maxmemory", "0")
    if policy == _SAFE:
        return None
    what = f"maxmemory-policy is {policy}"
    if limit == "0":
        text = f"{what}: with a maxmemory, which is not set, it would remove leases"
        return Eviction(text, endangers=False)
    what += f" (maxmemory {limit})"
    if policy in _LEASES_LAST:
        text = (
            f"{what}: when memory is short, leases, which are renewed, go last. Claims and "
            "completion records, which are not, go like other keys: a call may be published, or"
            " run, twice"
        )
        return Eviction(text, endangers=False)
    text = f"{what}: when memory is short, it removes leases, and two runs overlap"
    return Eviction(text, endangers=True)


def risk(memory: Mapping[str, str]) -> int:
    """A number by which to find the server that endangers leases most."""
    found = eviction_of(memory)
    return 0 if found is None else 1 + found.endangers
