"""When what is broken: a timetable from a seed, the same for the same seed.

Seven lanes run beside each other, so that faults of different lanes meet; within a lane one fault
ends before the next begins.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

from tests.chaos.promises import PROMISES


class Lane(StrEnum):
    PROCESS = "process"
    NETWORK = "network"
    STORE = "store"
    BROKER = "broker"
    BEAT = "beat"
    HOST = "host"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sort:
    """One sort of fault.

    Attributes:
        name: As in ``--faults`` and `tests.chaos.faults`.
        lane: Which faults it is never beside.
        shortest, longest: Seconds that it lasts; in units of the leases' ttl if ``in_ttls``.
        loses: Whether the store loses leases by it.
        churns: It revokes calls.
        steps: Whether it steps the server's clock.
        stores: The stores that it strikes; empty: all, or those of one server if its lane is
            that of the store or the network.
    """

    name: str
    lane: Lane
    shortest: float = 0.0
    longest: float = 0.0
    in_ttls: bool = False
    loses: bool = False
    steps: bool = False
    churns: bool = False
    stores: tuple[str, ...] = ()

    def strikes(self, store: str) -> bool:
        """Whether it can be done to a campaign with this store."""
        if self.stores or self.lane not in (Lane.STORE, Lane.NETWORK):
            return not self.stores or store in self.stores
        return PROMISES[store].through_proxies


_CONSENSUS, _REDLOCK = ("etcd", "zookeeper"), ("redlock",)
_LED = ("sentinel", "cluster", *_CONSENSUS)
_PAUSING = ("redis", "valkey", "sentinel", "cluster")
_P, _N, _S, _H = Lane.PROCESS, Lane.NETWORK, Lane.STORE, Lane.HOST

SORTS = (
    Sort(name="kill-child", lane=_P),
    Sort(name="kill-worker", lane=_P),
    Sort(name="kill-parent", lane=_P),
    Sort(name="stop-child", lane=_P, shortest=1.2, longest=2.5, in_ttls=True),
    Sort(name="stop-parent", lane=_P, shortest=1.2, longest=2.5, in_ttls=True),
    Sort(name="stop-worker", lane=_P, shortest=1.2, longest=2.5, in_ttls=True),
    Sort(name="shutdown-warm", lane=_P),
    Sort(name="shutdown-soft", lane=_P),
    Sort(name="shutdown-cold", lane=_P),
    Sort(name="revoke-running", lane=_P, churns=True),
    Sort(name="revoke-waiting", lane=_P, churns=True),
    Sort(name="stall", lane=_N, shortest=0.3, longest=2.0, in_ttls=True),
    Sort(name="cut", lane=_N, shortest=0.3, longest=2.0, in_ttls=True),
    Sort(name="no-requests", lane=_N, shortest=0.3, longest=2.0, in_ttls=True),
    Sort(name="no-replies", lane=_N, shortest=0.3, longest=2.0, in_ttls=True),
    Sort(name="refuse", lane=_N, shortest=0.3, longest=2.0, in_ttls=True),
    Sort(name="slow", lane=_N, shortest=1.0, longest=3.0, in_ttls=True),
    Sort(name="lose-replies", lane=_N, shortest=1.0, longest=4.0, in_ttls=True),
    Sort(name="client-pause", lane=_S, shortest=0.2, longest=1.5, in_ttls=True),
    Sort(name="freeze-server", lane=_S, shortest=0.2, longest=1.5, in_ttls=True),
    Sort(name="busy", lane=_S, shortest=0.2, longest=1.5, in_ttls=True),
    Sort(name="script-flush", lane=_S),
    Sort(name="restart-kept", lane=_S, shortest=0.3, longest=1.5, in_ttls=True),
    Sort(name="restart-empty", lane=_S, shortest=0.3, longest=1.5, in_ttls=True, loses=True),
    Sort(name="out-of-memory", lane=_S, shortest=0.3, longest=1.5, in_ttls=True),
    Sort(name="read-only", lane=_S, shortest=0.3, longest=1.5, in_ttls=True),
    Sort(name="no-rights", lane=_S, shortest=0.3, longest=1.5, in_ttls=True),
    Sort(name="failover", lane=_S, shortest=0.3, longest=1.0, in_ttls=True, loses=True),
    Sort(name="clock-step", lane=_S, shortest=1.0, longest=3.0, in_ttls=True, steps=True),
    Sort(name="leader-killed", lane=_S, shortest=0.3, longest=2.0, in_ttls=True, stores=_LED),
    Sort(name="leader-frozen", lane=_S, shortest=1.0, longest=2.5, in_ttls=True, stores=_LED),
    Sort(name="leader-moved", lane=_S, stores=("sentinel", "cluster")),
    Sort(name="slot-moved", lane=_S, shortest=0.1, longest=1.0, in_ttls=True, stores=("cluster",)),
    Sort(
        name="sentinel-frozen",
        lane=_S,
        shortest=0.3,
        longest=2.5,
        in_ttls=True,
        stores=("sentinel",),
    ),
    Sort(
        name="follower-killed", lane=_S, shortest=0.3, longest=2.0, in_ttls=True, stores=_CONSENSUS
    ),
    Sort(name="quorum-lost", lane=_S, shortest=0.3, longest=1.5, in_ttls=True, stores=_CONSENSUS),
    Sort(name="quorum-frozen", lane=_S, shortest=0.3, longest=1.5, in_ttls=True, stores=_CONSENSUS),
    Sort(
        name="minority-emptied", lane=_S, shortest=0.1, longest=1.0, in_ttls=True, stores=_REDLOCK
    ),
    Sort(name="minority-frozen", lane=_S, shortest=0.3, longest=2.0, in_ttls=True, stores=_REDLOCK),
    Sort(name="majority-frozen", lane=_S, shortest=0.2, longest=1.5, in_ttls=True, stores=_REDLOCK),
    Sort(
        name="pause-key",
        lane=Lane.OPERATOR,
        shortest=0.3,
        longest=2.0,
        in_ttls=True,
        stores=_PAUSING,
    ),
    Sort(
        name="pause-scope",
        lane=Lane.OPERATOR,
        shortest=0.3,
        longest=2.0,
        in_ttls=True,
        stores=_PAUSING,
    ),
    Sort(name="restart-broker", lane=Lane.BROKER, shortest=0.2, longest=2.0),
    Sort(name="cut-beat", lane=Lane.BEAT, shortest=2.0, longest=12.0),
    Sort(name="stop-beat", lane=Lane.BEAT, shortest=1.0, longest=6.0),
    Sort(name="kill-beat", lane=Lane.BEAT),
    Sort(name="host-unplugged", lane=_H, shortest=0.3, longest=2.5, in_ttls=True),
    Sort(name="host-off-store", lane=_H, shortest=0.3, longest=2.5, in_ttls=True),
    Sort(name="host-off-broker", lane=_H, shortest=0.3, longest=2.5, in_ttls=True),
    Sort(name="host-mute", lane=_H, shortest=0.3, longest=2.5, in_ttls=True),
    Sort(name="host-deaf", lane=_H, shortest=0.3, longest=2.5, in_ttls=True),
    Sort(name="host-flapping", lane=_H, shortest=0.5, longest=3.0, in_ttls=True),
    Sort(name="host-frozen", lane=_H, shortest=1.2, longest=2.5, in_ttls=True),
    Sort(name="host-killed", lane=_H, shortest=0.2, longest=2.0, in_ttls=True),
    Sort(name="host-wrong-clock", lane=_H, shortest=0.5, longest=2.5, in_ttls=True),
)

#: Seconds between two faults of a lane, on average.
GAPS = {
    Lane.PROCESS: 5.0,
    Lane.NETWORK: 4.0,
    Lane.STORE: 6.0,
    Lane.BROKER: 30.0,
    Lane.BEAT: 8.0,
    Lane.HOST: 5.0,
    Lane.OPERATOR: 5.0,
}
#: Seconds in which a worker can become ready before the first fault.
_HEAD_START = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One entry of the timetable.

    Attributes:
        name: The name of its sort.
        at: Seconds after the beginning of the campaign; later if the lane is not free.
        seconds: How long it lasts; 0.0 for what happens at once.
        chance: 0.0 to 1.0, from which the fault takes what else is left to chance (which worker).
    """

    name: str
    at: float
    seconds: float
    chance: float


def sorts_for(
    names: Collection[str],
    *,
    clock: bool,
    churn: bool = False,
    hosts: bool = False,
    store: str = "redis",
) -> list[Sort]:
    """The sorts that may be beside each other in one campaign.

    Either the server's clock is stepped or the store loses its data: together, fences fall, and
    that is no news (a server that has neither its counter nor its clock can't know better).

    Args:
        names: The wanted ones; all if empty.
        clock: Whether the clock is stepped, if ``names`` doesn't say.
        churn: Whether calls are revoked, if ``names`` doesn't say.
        hosts: Whether there are several hosts.
        store: The name of the store.

    Raises:
        ValueError: There is no such sort, or it needs hosts or another store.
    """
    known = {sort.name for sort in SORTS}
    if unknown := set(names) - known:
        raise ValueError(f"no such faults: {sorted(unknown)}; there are {sorted(known)}")
    if names:
        sorts = [sort for sort in SORTS if sort.name in names]
        if not hosts and any(sort.lane is Lane.HOST for sort in sorts):
            raise ValueError(f"some of these faults need several hosts: {sorted(names)}")
        if not all(sort.strikes(store) for sort in sorts):
            raise ValueError(f"some of these faults do not concern {store}: {sorted(names)}")
        return sorts
    possible = [
        sort
        for sort in SORTS
        if sort.strikes(store)
        and (hosts or sort.lane is not Lane.HOST)
        and (churn or not sort.churns)
    ]
    return [sort for sort in possible if not (sort.loses if clock else sort.steps)]


def timetable(
    sorts: Collection[Sort], *, seconds: float, seed: int, ttl: float, haste: float = 1.0
) -> dict[Lane, list[Fault]]:
    """What happens in a campaign of ``seconds``, each lane by time; the gaps are over ``haste``.

    The first faults of a lane are all of its sorts in turn, in a random order; then any.
    """
    lanes = {}
    for lane in Lane:
        of_lane = [sort for sort in sorts if sort.lane is lane]
        # A generator per lane: a sort more in one lane changes nothing in another.
        chances = random.Random(f"{seed} {lane}")
        lanes[lane] = list(_faults(of_lane, GAPS[lane] / haste, seconds, ttl, chances))
    return lanes


def _faults(
    sorts: list[Sort], gap: float, seconds: float, ttl: float, chances: random.Random
) -> Iterator[Fault]:
    if not sorts:
        return
    at = _HEAD_START
    deck: list[Sort] = []
    while True:
        if not deck:
            deck = chances.sample(sorts, len(sorts))
        sort = deck.pop()
        unit = ttl if sort.in_ttls else 1.0
        at += chances.uniform(0.4, 1.6) * gap
        lasts = chances.uniform(sort.shortest, sort.longest) * unit
        if at + lasts > seconds:
            return
        yield Fault(name=sort.name, at=at, seconds=lasts, chance=chances.random())
        at += lasts
