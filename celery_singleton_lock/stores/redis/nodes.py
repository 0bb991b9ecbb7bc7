"""Routing in a Redis Cluster: each command goes to the node that has the hash slot of its key.

Guarantees
    All commands for one node are one pipeline, and the nodes work at the same time. A node that
    replies MOVED, ASK or TRYAGAIN has executed nothing, so the command is sent again, a few times
    and within the timeout. A command without a reply is never sent again in here. A node that does
    not answer delays the commands of other nodes, and does not fail them.

Non-guarantees
    That the topology is the cluster's: a node that was cut off from the others may report an old
    one. Its redirects and failures correct that.

Failure handling
    A node that does not answer, MOVED and CLUSTERDOWN make the topology stale. Before the next
    commands another node is asked for it, each in its turn. If none answers, the old one is used.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, Final

import redis

from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.errors import SettingsError, StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.async_release import PendingRelease
from celery_singleton_lock.stores.redis.connection import Connection, Connections
from celery_singleton_lock.stores.redis.replies import checked
from celery_singleton_lock.stores.redis.scripts import Command
from celery_singleton_lock.stores.urls import Hosts

__all__ = ["Address", "AnyConnections", "NodeConnections", "Topology", "slot_of"]

#: Host and port.
Address = tuple[str, int]

_SLOTS: Final = 16384
_PORT: Final = 6379
# A redirect leads to the right node, or meets a migration that ends: two are usual, more are not.
_ROUNDS: Final = 5
# Seconds. The keys of a slot are on both nodes for as long as one MIGRATE takes.
_TRY_AGAIN_PAUSE: Final = 0.02
# The node is no master any more, or knows that slots of the cluster are not served.
_STALE: Final = (redis.exceptions.ClusterDownError, redis.exceptions.ReadOnlyError)


def slot_of(key: str | bytes) -> int:
    """The hash slot of ``key``: of the part in its first braces if there is one."""
    data = key.encode() if isinstance(key, str) else bytes(key)
    tag, closed, _ = data.partition(b"{")[2].partition(b"}")
    return _slot_of_tag(tag if closed and tag else data)


@lru_cache(maxsize=1024)
def _slot_of_tag(tag: bytes) -> int:
    # CRC16-CCITT (XMODEM), https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec
    return binascii.crc_hqx(tag, 0) % _SLOTS


class Topology:
    """Which node has which hash slot, as one node reported it, and as redirects have changed it.

    Args:
        reply: To CLUSTER SLOTS.
        asked: The node that gave it, which may leave out its own host.
    """

    def __init__(self, reply: Sequence[Any], asked: Address) -> None:
        self._masters: list[Address | None] = [None] * _SLOTS
        masters: list[Address] = []
        replicas: list[Address] = []
        for begin, end, *nodes in reply:
            master, *others = [_address(node, asked) for node in nodes]
            self._masters[begin : end + 1] = [master] * (end + 1 - begin)
            masters.append(master)
            replicas += others
        #: The nodes that have slots.
        self.masters = list(dict.fromkeys(masters))
        #: All nodes.
        self.nodes = list(dict.fromkeys([*masters, *replicas]))

    def master_of(self, slot: int) -> Address | None:
        """The node that has ``slot``; None if no node has it."""
        return self._masters[slot]

    def move(self, slot: int, address: Address) -> None:
        """Note a MOVED."""
        self._masters[slot] = address


def _address(node: Sequence[Any], asked: Address) -> Address:
    host = (node[0] or b"").decode()
    # Empty or '?': the node doesn't know its own name (cluster-preferred-endpoint-type).
    return (host if host not in ("", "?") else asked[0], int(node[1]))


@dataclass(frozen=True, slots=True)
class _Request:
    """A command, and WAIT behind it if it has one: both go to one node, on one connection.

    Attributes:
        index: The position of its first reply.
        commands: Both.
        slot: The hash slot of the command's key.
        asking: The node that an ASK led to; None: the slot's.
    """

    index: int
    commands: tuple[Command, ...]
    slot: int
    asking: Address | None = None

    def fill(self, replies: list[Any], found: Sequence[Any]) -> None:
        replies[self.index : self.index + len(self.commands)] = found

    def fail(self, replies: list[Any], error: StoreError) -> None:
        self.fill(replies, [error] * len(self.commands))


def _requests_of(commands: Sequence[Command]) -> list[_Request]:
    requests: list[_Request] = []
    for index, command in enumerate(commands):
        if command[0] == "WAIT":
            requests[-1] = replace(requests[-1], commands=(*requests[-1].commands, command))
        else:
            key = command[3] if command[0] in ("EVALSHA", "EVAL") else command[1]
            requests.append(_Request(index, (command,), slot_of(key)))
    return requests


class NodeConnections:
    """The connections to the nodes of the cluster of which ``url`` names some.

    Args:
        url: ``redis+cluster://user:password@host1:7000,host2:7001``; ``rediss+cluster://`` is TLS.
        options: For the connections.
        clock: Of deadlines.

    Raises:
        SettingsError: The URL or an option can't be read.
    """

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, *, clock: Clock | None = None
    ) -> None:
        try:
            hosts = Hosts.of(url, default_port=_PORT)
        except ValueError as exc:
            raise SettingsError(f"the store's URL can't be read: {exc}") from exc
        if hosts.parts.path.strip("/") not in ("", "0") or hosts.query.get("db", "0") != "0":
            raise SettingsError("a Redis Cluster has no databases: leave the number out of its URL")
        tls = hosts.scheme in ("rediss+cluster", "valkeys+cluster")
        self._any_node = Connections(hosts.redis_url(tls=tls, query=hosts.query), options)
        self._seeds = hosts.addresses
        self._clock = clock or SystemClock()
        self._nodes: dict[Address, Connections] = {}
        self._topology: Topology | None = None
        self._stale = True
        # Nodes that failed last are asked last.
        self._suspects: set[Address] = set()
        self._answered_last: Address | None = None

    def run(self, commands: Sequence[Command], timeout: float) -> list[Any]:
        """Send all commands at once and read all replies. The first error is raised.

        Args:
            commands: Name and arguments; the first argument is a key, but for EVAL and EVALSHA.
            timeout: As of :meth:`attempt`.

        Raises:
            ScriptForgotten, StoreUnavailable, StoreError: The error of the first failed command.
        """
        replies = self.attempt(commands, timeout)
        for reply in replies:
            if isinstance(reply, StoreError):
                raise reply
        return checked(replies)

    def attempt(
        self, commands: Sequence[Command], timeout: float, *, waits: bool = True
    ) -> list[Any]:
        """As :meth:`run`, with the error of each failed command in the place of its reply.

        Args:
            commands: As of :meth:`run`.
            timeout: Seconds for all of it, and once more where a node must be connected to.
            waits: Whether TRYAGAIN is tried again; else it is an error like others.

        Raises:
            StoreUnavailable, StoreError: No node reports the topology.
        """
        until = self._clock.now() + timeout
        replies: list[Any] = [None] * len(commands)
        requests = _requests_of(commands)
        topology = self._known_topology(timeout)
        for _ in range(_ROUNDS):
            requests = self._round(topology, requests, replies, timeout, until, waits)
            if not requests or self._clock.now() >= until:
                break
        for request in requests:
            request.fail(replies, StoreUnavailable("the store is moving this key: try again"))
        return replies

    def send_async(self, command: Command, timeout: float, pending: PendingRelease) -> bool:
        """See `Connections.send_async`. A node that replies MOVED has done nothing: send again."""
        if self._topology is None or self._stale:
            return False
        address = self._topology.master_of(slot_of(command[3]))
        return address is not None and self._node(address).send_async(command, timeout, pending)

    def drain(self, timeout: float) -> None:
        """See `Connections.drain`; ``timeout`` is for all nodes.

        Behind a node that does not answer, only the replies that have arrived are read.
        """
        until = self._clock.now() + timeout
        for node in list(self._nodes.values()):
            node.drain(max(0.0, until - self._clock.now()))

    def masters(self, timeout: float) -> list[Connections]:
        """The connections to each node that has slots.

        Raises:
            StoreUnavailable, StoreError: No node reports the topology.
        """
        self._stale = True
        return [self._node(address) for address in self._known_topology(timeout).masters]

    def home_of(self, key: str, timeout: float) -> Connections:
        """The connections to the node that has ``key``.

        Raises:
            StoreUnavailable, StoreError: No node has it, or none reports the topology.
        """
        address = self._known_topology(timeout).master_of(slot_of(key))
        if address is None:
            raise _unserved(slot_of(key))
        return self._node(address)

    def close(self) -> None:
        """Close all idle connections."""
        for node in list(self._nodes.values()):
            node.close()

    # --- one round -------------------------------------------------------------------------------

    def _round(
        self,
        topology: Topology,
        requests: list[_Request],
        replies: list[Any],
        timeout: float,
        until: float,
        waits: bool,
    ) -> list[_Request]:
        """Send the requests to their nodes; return those that must be sent again."""
        again: list[_Request] = []
        in_flight: list[tuple[Address, list[_Request], Connection]] = []
        try:
            for address, load in self._by_node(topology, requests, replies, timeout):
                try:
                    in_flight.append((address, load, self._send(address, load, timeout, until)))
                except StoreError as exc:
                    self._fail(address, load, replies, exc)
            for address, load, connection in in_flight:
                try:
                    answers = connection.replies(within=until - self._clock.now())
                except StoreError as exc:
                    self._fail(address, load, replies, exc)
                else:
                    self._suspects.discard(address)
                    again += self._sort(topology, address, load, answers, replies, waits)
        finally:
            # Also after an exception of a signal handler: a connection with unread replies closes.
            for *_, connection in in_flight:
                connection.end()
        return again

    def _by_node(
        self,
        topology: Topology,
        requests: list[_Request],
        replies: list[Any],
        timeout: float,
    ) -> list[tuple[Address, list[_Request]]]:
        loads: dict[Address, list[_Request]] = {}
        for request in requests:
            address = request.asking or topology.master_of(request.slot)
            if address is None:
                self._stale = True
                request.fail(replies, _unserved(request.slot))
            else:
                loads.setdefault(address, []).append(request)
        if len(loads) < 2:
            return list(loads.items())
        # A dead node must not use up the time of the others: nodes that need no connecting come
        # first, nodes that failed last come last.
        return sorted(
            loads.items(),
            key=lambda item: (not self._node(item[0]).has_idle(timeout), item[0] in self._suspects),
        )

    def _send(
        self, address: Address, load: list[_Request], timeout: float, until: float
    ) -> Connection:
        node = self._node(address)
        if self._clock.now() >= until and not node.has_idle(timeout):
            raise StoreUnavailable("no time was left to ask this node")
        commands: list[Command] = []
        for request in load:
            if request.asking:
                commands.append(("ASKING",))
            commands += request.commands
        return node.begin(commands, timeout)

    def _fail(
        self, address: Address, load: list[_Request], replies: list[Any], error: StoreError
    ) -> None:
        self._stale = True
        self._suspects.add(address)
        for request in load:
            request.fail(replies, error)

    def _sort(
        self,
        topology: Topology,
        asked: Address,
        load: list[_Request],
        answers: list[Any],
        replies: list[Any],
        waits: bool,
    ) -> list[_Request]:
        """Put each answer in its place; return the requests that must be sent again."""
        again, pause = [], False
        rest = iter(answers)
        for request in load:
            if request.asking:
                next(rest)  # the reply to ASKING
            found = list(islice(rest, len(request.commands)))
            error = found[0]
            if isinstance(error, redis.exceptions.AskError):  # MovedError is a subclass
                again.append(self._redirected(topology, request, error, asked))
            elif isinstance(error, redis.exceptions.TryAgainError) and waits:
                again.append(request)
                pause = True
            else:
                if isinstance(error, _STALE):
                    self._stale = True
                request.fill(replies, found)
        if pause:
            self._clock.sleep(_TRY_AGAIN_PAUSE)
        return again

    def _redirected(
        self,
        topology: Topology,
        request: _Request,
        error: redis.exceptions.AskError,
        asked: Address,
    ) -> _Request:
        target = (error.host.strip("[]") or asked[0], error.port)
        if not isinstance(error, redis.exceptions.MovedError):
            return replace(request, asking=target)
        # Followed now. Other slots may have moved too, so the topology is read before the next
        # commands.
        self._stale = True
        topology.move(request.slot, target)
        return replace(request, asking=None)

    # --- the topology ----------------------------------------------------------------------------

    def _known_topology(self, timeout: float) -> Topology:
        """The topology, read again if it is stale and a node answers."""
        if self._topology is not None and not self._stale:
            return self._topology
        error: StoreError = StoreUnavailable("the store has no node that could be asked")
        until = self._clock.now() + timeout
        for address in self._whom_to_ask():
            try:
                reply = self._node(address).run([("CLUSTER SLOTS",)], timeout)[0]
            except StoreError as exc:
                self._suspects.add(address)
                error = _about(address, exc)
                if self._clock.now() >= until:
                    break
                continue
            return self._take(Topology(reply, address), address)
        if self._topology is None:
            raise error
        return self._topology

    def _take(self, topology: Topology, answered: Address) -> Topology:
        self._topology, self._stale = topology, False
        self._answered_last = answered
        self._suspects.discard(answered)
        for address in set(self._nodes) - {*topology.nodes, *self._seeds}:
            self._nodes.pop(address).close()
        return topology

    def _whom_to_ask(self) -> list[Address]:
        known = self._topology.nodes if self._topology else []
        addresses = list(dict.fromkeys([*known, *self._seeds]))
        if self._answered_last in addresses:
            after = addresses.index(self._answered_last) + 1
            addresses = addresses[after:] + addresses[:after]
        return sorted(addresses, key=lambda address: address in self._suspects)

    def _node(self, address: Address) -> Connections:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes.setdefault(address, self._any_node.at(*address))
        return node


#: Those to one server, or to the nodes of a cluster.
AnyConnections = Connections | NodeConnections


def _unserved(slot: int) -> StoreUnavailable:
    return StoreUnavailable(f"no node of the cluster has slot {slot} now")


def _about(address: Address, error: StoreError) -> StoreError:
    if "cluster support disabled" in str(error):
        return StoreError(
            f"{address[0]}:{address[1]} belongs to no Redis Cluster: name it redis:// ({error})"
        )
    return error
