"""A Redis Cluster, for tests: three masters and three replicas, all real processes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self

import redis

from celery_singleton_lock.stores.redis.cluster import slot_of
from example_project.private_server import PrivateServer, free_port
from tests.harness.addresses import LOCAL, redis_arguments
from tests.harness.certificates import Certificates
from tests.harness.deliveries import wait_until
from tests.harness.sentinels import client_of, link_of
from tests.harness.servers import server_version

#: Seconds after which a silent node is thought to be down; its replica is elected 1 to 3 later.
NODE_TIMEOUT = 1.0

_SLOTS = 16384
_MASTERS = 3


def cluster_ports() -> tuple[int, int]:
    """Free ports of a node: for clients, and for the other nodes."""
    if server_version() >= (7, 0):
        return free_port(), free_port()
    # Redis 6.2 has no option for the second one: it lies so far above the first.
    while True:
        port = free_port()
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOCAL, port + 10_000))
            return port, port + 10_000


def cluster_options(bus_port: int) -> dict[str, str]:
    """The options that make a server a node, with its port for the other nodes."""
    chosen = {"--cluster-port": str(bus_port)} if server_version() >= (7, 0) else {}
    return {"--cluster-enabled": "yes", **chosen}


class Cluster:
    """The six processes; a context manager.

    Args:
        arguments: More arguments of all nodes.
        tls: They speak TLS, among themselves too, on ports of their own; `url` names those. The
            plain ports are for the test.
        address: Where all listen beside 127.0.0.1, and by which they know each other.
    """

    def __init__(
        self,
        arguments: Sequence[str] = (),
        *,
        tls: Certificates | None = None,
        address: str = LOCAL,
    ) -> None:
        self._stack = ExitStack()
        self._arguments = [*redis_arguments(address), *arguments]
        self._address = address
        self._tls = tls
        self._tls_ports: list[int] = []
        #: Masters at the start, then their replicas in the same order.
        self.nodes: list[PrivateServer] = []
        #: Node ids, in the same order.
        self.ids: list[str] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            bus_ports = []
            for _ in range(2 * _MASTERS):
                port, bus_port = cluster_ports()
                bus_ports.append(bus_port)
                self._tls_ports.append(port if self._tls else 0)
                options = self._options(bus_port)
                if self._tls:
                    options += [
                        *self._tls.redis_arguments(self._tls_ports[-1]),
                        "--tls-cluster",
                        "yes",
                    ]
                node = PrivateServer(port=None if self._tls else port, arguments=options)
                self.nodes.append(stack.enter_context(node))
            self._form(bus_ports)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """With all nodes, so that any of them may be away."""
        hosts = ",".join(f"{self._address}:{port}" for port in self._ports())
        if self._tls is None:
            return f"redis+cluster://{hosts}"
        return f"rediss+cluster://{hosts}?ssl_ca_certs={self._tls.ca}"

    def master_of(self, key: str) -> PrivateServer:
        """The node that has the slot of ``key`` now, by those that live."""
        for begin, end, port in self._ranges():
            if begin <= slot_of(key) <= end:
                return self.at(port)
        raise AssertionError(f"no node has the slot of {key}")

    def masters(self) -> list[PrivateServer]:
        """The nodes that have slots now."""
        return [self.at(port) for port in sorted({port for _, _, port in self._ranges()})]

    def at(self, port: int) -> PrivateServer:
        """The node on this port."""
        return next(node for node in self.nodes if node.port == port)

    def id_of(self, node: PrivateServer) -> str:
        """Its name in the cluster."""
        return self.ids[self.nodes.index(node)]

    def replica_of(self, master: PrivateServer) -> PrivateServer:
        """The replica of one of the masters of the start."""
        return self.nodes[self.nodes.index(master) + _MASTERS]

    def wait_until_promoted(self, key: str, old: PrivateServer) -> PrivateServer:
        """Wait until all living nodes name another master of ``key`` than ``old``."""
        wait_until(lambda: self.has_promoted(key, old), "a replica is promoted", timeout=60)
        return self.master_of(key)

    def has_promoted(self, key: str, old: PrivateServer) -> bool:
        """Whether all living nodes name another master of ``key`` than ``old``."""
        views = [self._ranges_of(node) for node in self.nodes if self._lives(node)]
        slot = slot_of(key)
        owners = {port for view in views for b, e, port in view if b <= slot <= e}
        return len(owners) == 1 and old.port not in owners and self._all_ok()

    # --- moving a slot ---------------------------------------------------------------------------

    def begin_to_move(self, slot: int, source: PrivateServer, target: PrivateServer) -> None:
        """From now on ``source`` redirects requests for keys that it doesn't have to ``target``."""
        with client_of(target) as client:
            client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", self.id_of(source))
        with client_of(source) as client:
            client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", self.id_of(target))

    def move_keys(self, keys: Sequence[str], source: PrivateServer, target: PrivateServer) -> None:
        """MIGRATE them, ttls and all."""
        with client_of(source) as client:
            client.migrate(self._address, target.port, list(keys), 0, 5000)

    def keys_in(self, slot: int, node: PrivateServer) -> list[str]:
        """What a node has of a slot."""
        with client_of(node) as client:
            keys: Any = client.execute_command("CLUSTER GETKEYSINSLOT", slot, 1000)
            return list(keys)

    def end_move(self, slot: int, target: PrivateServer) -> None:
        """The slot is ``target``'s."""
        for node in [target, *(node for node in self.masters() if node is not target)]:
            with client_of(node) as client:
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", self.id_of(target))

    # ---------------------------------------------------------------------------------------------

    def _options(self, bus_port: int) -> list[str]:
        options = {
            **cluster_options(bus_port),
            "--cluster-node-timeout": str(int(NODE_TIMEOUT * 1000)),
            # A replica may be promoted however long its stream has been cut.
            "--cluster-replica-validity-factor": "0",
            "--cluster-allow-replica-migration": "no",
            "--repl-diskless-sync-delay": "0",
            "--repl-ping-replica-period": "1",
        }
        return [word for pair in options.items() for word in pair] + self._arguments

    def _form(self, bus_ports: Sequence[int]) -> None:
        for number, node in enumerate(self.nodes):
            with client_of(node) as client:
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                self.ids.append(str(client.execute_command("CLUSTER MYID")))
                if number < _MASTERS:
                    begin = number * _SLOTS // _MASTERS
                    end = (number + 1) * _SLOTS // _MASTERS - 1
                    client.execute_command("CLUSTER ADDSLOTS", *range(begin, end + 1))
        with client_of(self.nodes[0]) as client:
            for port, bus_port in zip(self._ports()[1:], bus_ports[1:], strict=True):
                client.execute_command("CLUSTER MEET", self._address, port, bus_port)
        wait_until(
            lambda: self._known() == {str(len(self.nodes))}, "all nodes have met", timeout=60
        )
        for number, node in enumerate(self.nodes[_MASTERS:]):
            with client_of(node) as client:
                client.execute_command("CLUSTER REPLICATE", self.ids[number])
        wait_until(self._is_whole, "the cluster is whole", timeout=60)

    def _ports(self) -> list[int]:
        """Those by which clients and the other nodes know them."""
        return self._tls_ports if self._tls else [node.port for node in self.nodes]

    def _known(self) -> set[str]:
        return {self._info(node).get("cluster_known_nodes", "") for node in self.nodes}

    def _is_whole(self) -> bool:
        replicas = self.nodes[_MASTERS:]
        slots = [self._ranges_of(node) for node in self.nodes]
        return (
            self._all_ok()
            and all(link_of(node) == "up" for node in replicas)
            and all(len(view) == _MASTERS for view in slots)
            and all(self._replicas_seen_by(node) == len(replicas) for node in self.nodes)
        )

    def _replicas_seen_by(self, node: PrivateServer) -> int:
        with client_of(node) as client:
            view: Any = client.execute_command("CLUSTER SLOTS")
        return _ports_of_replicas(view)

    def _all_ok(self) -> bool:
        living = [node for node in self.nodes if self._lives(node)]
        return all(self._info(node).get("cluster_state") == "ok" for node in living)

    def _ranges(self) -> list[tuple[int, int, int]]:
        for node in self.nodes:
            if self._lives(node):
                return self._ranges_of(node)
        raise AssertionError("no node lives")

    def _ranges_of(self, node: PrivateServer) -> list[tuple[int, int, int]]:
        with client_of(node) as client:
            view: Any = client.execute_command("CLUSTER SLOTS")
        return _ranges(view)

    def _info(self, node: PrivateServer) -> dict[str, str]:
        with client_of(node) as client:
            info: Any = client.execute_command("CLUSTER INFO")
        return info if isinstance(info, dict) else _pairs(str(info))

    def _lives(self, node: PrivateServer) -> bool:
        if not node.alive:
            return False
        with redis.Redis(port=node.port, socket_timeout=0.2) as client:
            try:
                return bool(client.ping())
            except redis.exceptions.RedisError:
                return False  # stopped


def _pairs(text: str) -> dict[str, str]:
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _ranges(view: Any) -> list[tuple[int, int, int]]:
    if isinstance(view, dict):  # redis-py's own reading of the reply
        return sorted((b, e, int(entry["primary"][1])) for (b, e), entry in view.items())
    return sorted((int(row[0]), int(row[1]), int(row[2][1])) for row in view)


def _ports_of_replicas(view: Any) -> int:
    if isinstance(view, dict):
        return sum(len(entry["replicas"]) for entry in view.values())
    return sum(len(row) - 3 for row in view)
