"""What each lock store promises, as far as the promises differ: the page of stores as a table.

`docs/reference/stores.md` has the sentences. What is the same for all stores is in the rules of the
checker.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The promise of one store.

    Attributes:
        fences: Each grant has a fence. (Where there are fences, they rise, in every store.)
        forgets: The store may lose what it has acknowledged, where the history says so. Without,
            two bodies never overlap.
        keeps_markers: Done completion records and claims are kept as well as leases. Without, they
            may be lost where the history says so: a late redelivery may run again.
        orders_calls: It has ``on_conflict="cancel_running"`` and ``on_duplicate="replace"``.
        through_proxies: It is one server, which workers reach through a proxy each.
    """

    fences: bool = True
    forgets: bool = False
    keeps_markers: bool = True
    orders_calls: bool = False
    through_proxies: bool = False


_ONE_SERVER = Promise(forgets=True, orders_calls=True, through_proxies=True)
_REPLICATED = Promise(forgets=True, orders_calls=True)

#: By the names that ``--store`` takes.
PROMISES = {
    "redis": _ONE_SERVER,
    "valkey": _ONE_SERVER,
    "sentinel": _REPLICATED,
    "cluster": _REPLICATED,
    "redlock": Promise(fences=False, keeps_markers=False),
    "etcd": Promise(),
    "zookeeper": Promise(),
}

#: The environment variable by which workers find the name of their store.
STORE = "CHAOS_STORE"
