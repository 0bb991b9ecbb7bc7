"""The lock stores of several members, and what is broken in each.

Workers reach the members directly, without a proxy: only the faults of hosts are in the network
between them. Each fault ends when the store is whole again, but for what its members catch up on.

The servers of Redis lose what they hold when they are killed: a master that fails has passed it on
to its replica, or has lost it.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import redis

from celery_singleton_lock.core.store import operators_of
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.stores.redis.cluster import slot_of
from example_project.private_server import PrivateServer
from tests.chaos.history import History
from tests.harness.cluster import Cluster
from tests.harness.deliveries import wait_until
from tests.harness.ensemble import Ensemble
from tests.harness.etcd import EtcdCluster
from tests.harness.keys import EVERY_NAME
from tests.harness.redlock_nodes import RedlockNodes
from tests.harness.sentinels import Sentinels, client_of, role_of
from tests.harness.zookeeper import ZooKeeperEnsemble

#: Microseconds per second: fences are microseconds of the server's clock.
_MICRO = 1_000_000
#: Seconds until the members agree again.
_WHOLE = 90.0
#: Seconds after which Redis has given up a manual failover, which may happen: it has 5 s, and
#: masters don't vote for one right after another.
_GIVES_UP = 8.0

#: A fault of ``seconds``, which takes what it leaves to chance from ``chance`` (0.0 to 1.0).
Strike = Callable[[float, float], None]
#: Runs what starts processes on the thread that may.
Starter = Callable[[Callable[[], Any]], Any]


class Members(ABC):
    """One of the stores below.

    Args:
        starter: See `Starter`.
        history: Where losses are written down.
    """

    #: What workers have as the URL of the lock store.
    url: str

    def __init__(self, starter: Starter, history: History) -> None:
        self._starter, self._history = starter, history

    @property
    @abstractmethod
    def faults(self) -> dict[str, Strike]:
        """By the names of their sorts."""

    @abstractmethod
    def keys_left(self) -> dict[str, str]:
        """What should not be in a store that is used no more, and why; by key."""

    @contextmanager
    def _loss(self, name: str) -> Iterator[None]:
        """What was granted meanwhile, or shortly before, may be lost."""
        since, fence_from = time.monotonic(), wall_fence()
        try:
            yield
        finally:
            self._write_loss(name, since, fence_from)

    def _write_loss(self, name: str, since: float, fence_from: int) -> None:
        fences = {"fence_from": fence_from, "fence_to": wall_fence()}
        self._history.write("loss", name=name, since=since, **fences)


class SentinelMembers(Members):
    """A master, two replicas and three sentinels."""

    def __init__(self, stack: ExitStack, address: str, starter: Starter, history: History) -> None:
        super().__init__(starter, history)
        self._sentinels = Sentinels(address=address)
        starter(lambda: stack.enter_context(self._sentinels))
        self.url = self._sentinels.url

    @property
    def faults(self) -> dict[str, Strike]:
        return {
            "leader-killed": self._kill_master,
            "leader-frozen": self._freeze_master,
            "leader-moved": self._fail_over,
            "sentinel-frozen": self._freeze_sentinel,
        }

    def keys_left(self) -> dict[str, str]:
        return keys_left_on([self._sentinels.master()])

    def _kill_master(self, seconds: float, chance: float) -> None:
        old = self._sentinels.master()
        with self._loss("leader-killed"):
            self._starter(old.kill)
        new = self._sentinels.wait_until_promoted(old)
        with self._split(new):
            # Not before: it would come back as a master without data.
            self._starter(old.start)
            self._sentinels.wait_until_whole()

    @contextmanager
    def _split(self, new: PrivateServer) -> Iterator[None]:
        """A loss, if clients have used another server than the new master.

        Two sentinels may lead a failover each, a second apart: the later one promotes the other
        replica. The first new master is demoted ten seconds later, and its connections work on.
        """
        since, fence_from = time.monotonic(), wall_fence()
        others = [server for server in self._sentinels.servers if server is not new]
        before = {server.port: scripts_run_by(server) for server in others}
        yield
        if any(scripts_run_by(server) > before[server.port] for server in others):
            self._write_loss("two-masters", since, fence_from)

    def _freeze_master(self, seconds: float, chance: float) -> None:
        """A replica is promoted meanwhile; the old master goes on until it is demoted."""
        old = self._sentinels.master()
        with self._loss("leader-frozen"):
            old.pause()
            try:
                self._sentinels.wait_until_promoted(old)
            finally:
                old.resume()
            wait_until(lambda: role_of(old) == "slave", "the old master is demoted", timeout=_WHOLE)
        self._sentinels.wait_until_whole()

    def _fail_over(self, seconds: float, chance: float) -> None:
        """The sentinels are told to; the master is not asked."""
        old, asked = self._sentinels.master(), int(chance * 3)
        self._sentinels.wait_until_able(asked)
        with self._loss("leader-moved"):
            self._sentinels.fail_over(asked)
            self._sentinels.wait_until_promoted(old)
            wait_until(lambda: role_of(old) == "slave", "the old master is demoted", timeout=_WHOLE)
        self._sentinels.wait_until_whole()

    def _freeze_sentinel(self, seconds: float, chance: float) -> None:
        sentinel = self._sentinels.sentinels[int(chance * 3)]
        sentinel.stop()
        try:
            time.sleep(seconds)
        finally:
            sentinel.cont()
        self._sentinels.wait_until_whole()


class ClusterMembers(Members):
    """Three masters with a replica each."""

    def __init__(self, stack: ExitStack, address: str, starter: Starter, history: History) -> None:
        super().__init__(starter, history)
        self._cluster = Cluster(address=address)
        starter(lambda: stack.enter_context(self._cluster))
        self.url = self._cluster.url

    @property
    def faults(self) -> dict[str, Strike]:
        return {
            "leader-killed": self._kill_master,
            "leader-frozen": self._freeze_master,
            "leader-moved": self._move_master,
            "slot-moved": self._move_slot,
        }

    def keys_left(self) -> dict[str, str]:
        return keys_left_on(self._cluster.masters())

    def _kill_master(self, seconds: float, chance: float) -> None:
        key, old = self._one(chance)
        with self._loss("leader-killed"):
            self._starter(old.kill)
        self._cluster.wait_until_promoted(key, old)
        self._starter(old.start)
        self._wait_until_whole()

    def _freeze_master(self, seconds: float, chance: float) -> None:
        key, old = self._one(chance)
        with self._loss("leader-frozen"):
            old.pause()
            try:
                self._cluster.wait_until_promoted(key, old)
            finally:
                old.resume()
            wait_until(lambda: role_of(old) == "slave", "the old master is demoted", timeout=_WHOLE)
        self._wait_until_whole()

    def _move_master(self, seconds: float, chance: float) -> None:
        """A replica takes over in agreement with its master: nothing is lost."""
        key, old = self._one(chance)
        replica, asked = self._replica_of(old), 0.0

        def has_moved() -> bool:
            nonlocal asked
            if time.monotonic() - asked > _GIVES_UP and role_of(replica) == "slave":
                asked = time.monotonic()
                with client_of(replica) as client:
                    client.execute_command("CLUSTER FAILOVER")
            return self._cluster.has_promoted(key, old)

        wait_until(has_moved, "the replica has taken over", timeout=_WHOLE)
        self._wait_until_whole()

    def _move_slot(self, seconds: float, chance: float) -> None:
        """A hash slot that is in use moves to another master, for ``seconds`` at least."""
        key, source = self._one(chance)
        with client_of(source) as client:
            key = next(client.scan_iter("csl:*", count=100), key)
        slot = slot_of(key)
        target = next(node for node in self._cluster.masters() if node is not source)
        self._cluster.begin_to_move(slot, source, target)
        time.sleep(seconds)
        while keys := self._cluster.keys_in(slot, source):
            self._cluster.move_keys(keys, source, target)
        self._cluster.end_move(slot, target)

    def _one(self, chance: float) -> tuple[str, PrivateServer]:
        """A key of the locks, by chance, and the master that has it."""
        key = f"csl:{{celery:{int(chance * 256)}}}:key"
        return key, self._cluster.master_of(key)

    def _replica_of(self, master: PrivateServer) -> PrivateServer:
        with client_of(master) as client:
            role: Any = client.role()
        return self._cluster.at(int(role[2][0][1]))

    def _wait_until_whole(self) -> None:
        def whole() -> bool:
            roles = [role_of(node) for node in self._cluster.nodes]
            return roles.count("master") == roles.count("slave") and all(
                self._has_replica(node) for node in self._cluster.masters()
            )

        wait_until(whole, "each master has its replica", timeout=_WHOLE)

    @staticmethod
    def _has_replica(master: PrivateServer) -> bool:
        with client_of(master) as client:
            role: Any = client.role()
        return role[0] == "master" and bool(role[2])


class RedlockMembers(Members):
    """Five servers, of which two may be away; those that restart are empty."""

    def __init__(self, stack: ExitStack, address: str, starter: Starter, history: History) -> None:
        super().__init__(starter, history)
        self._nodes = RedlockNodes(5, address=address)
        starter(lambda: stack.enter_context(self._nodes))
        self.url = self._nodes.url(quarantine=None)

    @property
    def faults(self) -> dict[str, Strike]:
        return {
            "minority-emptied": self._restart_minority,
            "minority-frozen": self._freeze_minority,
            "majority-frozen": self._freeze_majority,
        }

    def keys_left(self) -> dict[str, str]:
        return keys_left_on(self._nodes)

    def _restart_minority(self, seconds: float, chance: float) -> None:
        with self._loss("minority-emptied"):
            for node in (chosen := self._some(2, chance)):
                self._starter(node.kill)
            time.sleep(seconds)
            for node in chosen:
                self._starter(node.start)

    def _freeze_minority(self, seconds: float, chance: float) -> None:
        self._freeze(self._some(2, chance), seconds)

    def _freeze_majority(self, seconds: float, chance: float) -> None:
        self._freeze(self._some(3, chance), seconds)

    def _some(self, most: int, chance: float) -> list[PrivateServer]:
        chances = random.Random(chance)
        count = most if most > 2 else chances.randint(1, most)
        return chances.sample(list(self._nodes), count)

    @staticmethod
    def _freeze(nodes: Iterable[PrivateServer], seconds: float) -> None:
        for node in nodes:
            node.pause()
        try:
            time.sleep(seconds)
        finally:
            for node in nodes:
                node.resume()


class ConsensusMembers(Members):
    """Three members of etcd or ZooKeeper, which keep their data."""

    def __init__(
        self, ensemble: EtcdCluster | ZooKeeperEnsemble, starter: Starter, history: History
    ) -> None:
        super().__init__(starter, history)
        self._ensemble: Ensemble = ensemble
        self.url = ensemble.url()

    @property
    def faults(self) -> dict[str, Strike]:
        return {
            "leader-killed": self._kill_leader,
            "leader-frozen": self._freeze_leader,
            "follower-killed": self._kill_follower,
            "quorum-lost": self._kill_quorum,
            "quorum-frozen": self._freeze_all,
        }

    def keys_left(self) -> dict[str, str]:
        store = open_store(self.url)
        try:
            return {
                record.key: f"held: {record.kind} {record.token} {record.phase or record.fence} "
                for record in operators_of(store).scan(EVERY_NAME)
            }
        finally:
            store.close()

    def _kill_leader(self, seconds: float, chance: float) -> None:
        self._kill([self._ensemble.leader()], seconds)

    def _kill_follower(self, seconds: float, chance: float) -> None:
        leader = self._ensemble.leader()
        self._kill([(leader + 1 + int(chance * 2)) % 3], seconds)

    def _kill_quorum(self, seconds: float, chance: float) -> None:
        leader = self._ensemble.leader()
        self._kill([leader, (leader + 1 + int(chance * 2)) % 3], seconds)

    def _freeze_leader(self, seconds: float, chance: float) -> None:
        self._freeze([self._ensemble.leader()], seconds)
        # Whether it is one that has leases revoked that another leader has prolonged meanwhile.
        if isinstance(self._ensemble, EtcdCluster) and self._ensemble.revokes_when_deposed():
            self._history.write("stalled-leader", until=time.monotonic())

    def _freeze_all(self, seconds: float, chance: float) -> None:
        """As a disk that stands still: sessions of clients do not end meanwhile."""
        self._freeze([0, 1, 2], seconds)

    def _kill(self, numbers: Iterable[int], seconds: float) -> None:
        for number in numbers:
            self._ensemble.kill(number)
        time.sleep(seconds)
        for number in numbers:
            self._starter(partial(self._ensemble.start_member, number))
        self._ensemble.leader()

    def _freeze(self, numbers: Iterable[int], seconds: float) -> None:
        for number in numbers:
            self._ensemble.pause(number)
        try:
            time.sleep(seconds)
        finally:
            for number in numbers:
                self._ensemble.resume(number)
        self._ensemble.leader()


def open_members(
    kind: str, stack: ExitStack, address: str, starter: Starter, history: History
) -> Members:
    """Start a store; it ends with ``stack``.

    Args:
        kind: As of ``--store``.
        stack: See above.
        address: Where its members are for the workers.
        starter, history: As of `Members`.
    """
    if kind in ("etcd", "zookeeper"):
        ensemble = (EtcdCluster if kind == "etcd" else ZooKeeperEnsemble)(address=address)
        starter(lambda: stack.enter_context(ensemble))
        return ConsensusMembers(ensemble, starter, history)
    kinds: dict[str, Callable[..., Members]] = {
        "sentinel": SentinelMembers,
        "cluster": ClusterMembers,
        "redlock": RedlockMembers,
    }
    return kinds[kind](stack, address, starter, history)


def wall_fence() -> int:
    """What a server would give as a fence now."""
    return int(time.time() * _MICRO)


def keys_left_on(servers: Iterable[PrivateServer]) -> dict[str, str]:
    """See `Members.keys_left`, of some servers."""
    left: dict[str, str] = {}
    for server in servers:
        with client_of(server) as client:
            left |= keys_left(client)
    return left


def keys_left(client: redis.Redis) -> dict[str, str]:
    """See `Members.keys_left`, of one server of Redis whose client decodes responses."""
    left = {}
    for key in client.scan_iter("*", count=1000):
        if key.endswith(":shard"):
            if client.hexists(key, "|pauses"):
                names = [str(name) for name in client.hkeys(key) if str(name)[0] != "|"]
                left[key] = f"has pauses: {' '.join(names)}"
            continue
        if client.type(key) in ("zset", "hash"):
            left[key] = "has calls"
            continue
        value: Any = client.get(key)
        if value is None or key.endswith((":shards", ":number")):
            continue  # one of each, and known
        if not any(known in key for known in (":last|", ":done|", ":ended|", ":newest|", ":args|")):
            milliseconds: Any = client.pttl(key)
            left[key] = f"held: {value}, for {'ever' if milliseconds == -1 else milliseconds / 1e3}"
        elif client.pttl(key) == -1:
            # A completion record, and the newest call, stay for an hour: for copies and calls that
            # come late; arguments of a message that was lost stay for a week.
            left[key] = f"has no ttl: {value}"
    return left


def scripts_run_by(server: PrivateServer) -> int:
    """How many scripts of clients a server has run since its start; 0 if it doesn't answer."""
    with client_of(server) as client:
        try:
            stats: Any = client.info("commandstats")
        except redis.exceptions.RedisError:
            return 0
    found = [stats.get(f"cmdstat_{name}", {}) for name in ("eval", "evalsha")]
    # A replica refuses the first write of a script: such a call has failed.
    return sum(each.get("calls", 0) - each.get("failed_calls", 0) for each in found)
