"""Routing in a Redis Cluster: each command goes to the node that has the hash slot of its key.

Guarantees
    All commands for one node are one pipeline, and the nodes work at the same time. A node that
    replies MOVED, ASK or TRYAGAIN has executed nothing, so the command is sent again, a few times
    and within the timeout. This module never sends a command without a reply again. A node that
    does not answer delays the commands of other nodes, but does not make them fail.

Non-guarantees
    A current topology: a node that was cut off from the others may report an old one. Redirects and
    failures correct it.

Failure handling
    A node that does not answer, MOVED and CLUSTERDOWN make the topology stale. Before the next
    commands the topology is requested from one node after the other, until one answers. If none
    answers, the old topology is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.errors import SettingsError, StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.async_release import PendingRelease
from celery_singleton_lock.stores.redis.connection import Connection, Connections
from celery_singleton_lock.stores.redis.replies import checked
from celery_singleton_lock.stores.redis.scripts import Command
from celery_singleton_lock.stores.urls import Hosts

#: Host and port.
Address = tuple[str, int]

_PORT: Final = 6379
# The number of rounds of redirects. During a migration two redirects are usual, more are not.
_ROUNDS: Final = 5
# Seconds. TRYAGAIN lasts until the current MIGRATE of the slot's keys ends.
_TRY_AGAIN_PAUSE: Final = 0.02
# Errors of a node that is no longer a master, or of a cluster with slots that are not served.
_STALE: Final = (redis.exceptions.ClusterDownError, redis.exceptions.ReadOnlyError)


def slot_of(key: str | bytes) -> int:
    """The hash slot of ``key``. If ``key`` has a hash tag in braces, only the tag counts."""
    return int(key_slot(key.encode() if isinstance(key, str) else key))


class Topology:
    """The node of each hash slot, as reported by one node and updated by redirects.

    Args:
        reply: The reply to CLUSTER SLOTS.
        asked: The node that replied, which may leave out its own host.
    """

    def __init__(self, reply: Sequence[Any], asked: Address) -> None:
        self._masters: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
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
        """Note the new node of a slot after a MOVED reply."""
        self._masters[slot] = address


def _address(node: Sequence[Any], asked: Address) -> Address:
    host = (node[0] or b"").decode()
    # An empty host or '?': the node doesn't know its own name (cluster-preferred-endpoint-type).
    return (host if host not in ("", "?") else asked[0], int(node[1]))


@dataclass(slots=True)
class _Request:
    """A command and the WAIT that follows it, if any. Both go to one node, on one connection.

    Attributes:
        commands: The command, and WAIT.
        slot: The hash slot of the command's key.
        asking: The node named by an ASK reply; None: the slot's node.
        replies: The reply or the error of each command; empty: the request must be sent (again).
    """

    commands: list[Command]
    slot: int
    asking: Address | None = None
    replies: list[Any] = field(default_factory=list)

    def fail(self, error: StoreError) -> None:
        self.replies = [error] * len(self.commands)


def _requests_of(commands: Sequence[Command]) -> list[_Request]:
    requests: list[_Request] = []
    for command in commands:
        if command[0] == "WAIT":
            requests[-1].commands.append(command)
        else:
            key = command[3] if command[0] in ("EVALSHA", "EVAL") else command[1]
            requests.append(_Request([command], slot_of(key)))
    return requests


class NodeConnections:
    """The connections to the nodes of a cluster. ``url`` names some of the nodes.

    Args:
        url: ``redis+cluster://user:password@host1:7000,host2:7001``; ``rediss+cluster://`` is TLS.
        options: Options of the connections.
        clock: The clock of the deadlines.

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
        self._clock = clock or SystemClock()
        url = hosts.redis_url(tls=tls, query=hosts.query)
        self._any_node = Connections(url, options, self._clock)
        self._seeds = hosts.addresses
        self._nodes: dict[Address, Connections] = {}
        self._topology = Topology([], self._seeds[0])
        self._stale = True
        # The nodes whose last request failed. They are asked last.
        self._suspects: set[Address] = set()
        self._answered_last: Address | None = None

    def run(self, commands: Sequence[Command], timeout: float) -> list[Any]:
        """Send all commands at once and read all replies. The first error is raised.

        Args:
            commands: Name and arguments. The first argument is a key, except for EVAL and EVALSHA.
            timeout: See :meth:`attempt`.

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
        """As :meth:`run`, but the error of a failed command is returned as a value.

        Args:
            commands: See :meth:`run`.
            timeout: Seconds for all commands, and once more if a node must be connected to.
            waits: Whether a command is sent again after TRYAGAIN; else TRYAGAIN is an error.

        Raises:
            StoreUnavailable, StoreError: No node reports the topology.
        """
        until = self._clock.now() + timeout
        requests = to_send = _requests_of(commands)
        self._look(timeout)
        for _ in range(_ROUNDS):
            self._round(to_send, timeout, until, waits)
            to_send = [request for request in requests if not request.replies]
            if not to_send or self._clock.now() >= until:
                break
        for request in to_send:
            request.fail(StoreUnavailable("the store is moving this key: try again"))
        return [reply for request in requests for reply in request.replies]

    def send_async(self, command: Command, timeout: float, pending: PendingRelease) -> bool:
        """See `Connections.send_async`. A node that replies MOVED has not executed the release."""
        if self._stale:
            return False
        address = self._topology.master_of(slot_of(command[3]))
        return address is not None and self._node(address).send_async(command, timeout, pending)

    def drain(self, timeout: float) -> None:
        """See `Connections.drain`; ``timeout`` is for all nodes.

        After a node that did not answer, only replies that have arrived already are read.
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
        return [self._node(address) for address in self._look(timeout).masters]

    def home_of(self, key: str, timeout: float) -> Connections:
        """The connections to the node that has ``key``.

        Raises:
            StoreUnavailable, StoreError: No node has the key, or none reports the topology.
        """
        address = self._look(timeout).master_of(slot_of(key))
        if address is None:
            raise _unserved(slot_of(key))
        return self._node(address)

    def close(self) -> None:
        """Close all idle connections."""
        for node in list(self._nodes.values()):
            node.close()

    # --- one round -------------------------------------------------------------------------------

    def _round(self, requests: list[_Request], timeout: float, until: float, waits: bool) -> None:
        """Send the requests to their nodes, and read the replies."""
        taken: list[Connection] = []
        in_flight: list[tuple[Address, list[_Request], Connection]] = []
        try:
            for address, load in self._by_node(requests, timeout):
                try:
                    connection = self._connection_to(address, timeout, until)
                    taken.append(connection)
                    connection.send(_commands_of(load))
                    in_flight.append((address, load, connection))
                except StoreError as exc:
                    self._fail(address, load, exc)
            for address, load, connection in in_flight:
                try:
                    # After a node that was slow or did not answer, only replies that have arrived
                    # are read.
                    replies = connection.replies(until=until)
                except StoreError as exc:
                    self._fail(address, load, exc)
                else:
                    self._suspects.discard(address)
                    self._distribute(address, load, replies, waits)
        finally:
            # Also after an exception from a signal handler: end() closes a connection with unread
            # replies.
            for connection in taken:
                connection.end()

    def _by_node(
        self, requests: list[_Request], timeout: float
    ) -> list[tuple[Address, list[_Request]]]:
        loads: dict[Address, list[_Request]] = {}
        for request in requests:
            address = request.asking or self._topology.master_of(request.slot)
            if address is None:
                self._stale = True
                request.fail(_unserved(request.slot))
            else:
                loads.setdefault(address, []).append(request)
        # A dead node must not use up the time of the others: nodes that need no connecting come
        # first, nodes that failed last come last.
        return sorted(
            loads.items(),
            key=lambda item: (not self._node(item[0]).has_idle(timeout), item[0] in self._suspects),
        )

    def _connection_to(self, address: Address, timeout: float, until: float) -> Connection:
        node = self._node(address)
        if self._clock.now() >= until and not node.has_idle(timeout):
            raise StoreUnavailable("no time was left to ask this node")
        return node.take(timeout)

    def _fail(self, address: Address, load: list[_Request], error: StoreError) -> None:
        self._stale = True
        self._suspects.add(address)
        for request in load:
            request.fail(error)

    def _distribute(
        self, asked: Address, load: list[_Request], replies: list[Any], waits: bool
    ) -> None:
        """Assign the replies to the requests, except to those that must be sent again."""
        rest = iter(replies)
        pause = False
        for request in load:
            if request.asking:
                next(rest)  # the reply to ASKING
            found = list(islice(rest, len(request.commands)))
            error = found[0]
            if isinstance(error, redis.exceptions.AskError):  # MovedError is a subclass
                self._redirect(request, error, asked)
            elif isinstance(error, redis.exceptions.TryAgainError) and waits:
                pause = True
            else:
                self._stale = self._stale or isinstance(error, _STALE)
                request.replies = found
        if pause:
            self._clock.sleep(_TRY_AGAIN_PAUSE)

    def _redirect(
        self, request: _Request, error: redis.exceptions.AskError, asked: Address
    ) -> None:
        target = (error.host.strip("[]") or asked[0], error.port)
        if isinstance(error, redis.exceptions.MovedError):
            # This redirect is followed at once. Other slots may have moved too, so the topology is
            # read before the next commands.
            self._stale = True
            self._topology.move(request.slot, target)
            request.asking = None
        else:
            request.asking = target

    # --- the topology ----------------------------------------------------------------------------

    def _look(self, timeout: float) -> Topology:
        """The topology, read again if it is stale and a node answers.

        Raises:
            StoreUnavailable, StoreError: The topology was never read, and no node answers.
        """
        if not self._stale:
            return self._topology
        error: StoreError = StoreUnavailable("the store has no node that could be asked")
        until = self._clock.now() + timeout
        for address in self._whom_to_ask():
            try:
                (reply,) = self._node(address).run([("CLUSTER", "SLOTS")], timeout)
            except StoreError as exc:
                self._suspects.add(address)
                error = _about(address, exc)
                if self._clock.now() >= until:
                    break
            else:
                self._take(Topology(reply, address), address)
                return self._topology
        if not self._topology.nodes:
            raise error
        return self._topology

    def _take(self, topology: Topology, answered: Address) -> None:
        self._topology, self._stale = topology, False
        self._answered_last = answered
        self._suspects.discard(answered)
        for address in set(self._nodes) - {*topology.nodes, *self._seeds}:
            self._nodes.pop(address).close()

    def _whom_to_ask(self) -> list[Address]:
        addresses = list(dict.fromkeys([*self._topology.nodes, *self._seeds]))
        if self._answered_last in addresses:
            after = addresses.index(self._answered_last) + 1
            addresses = addresses[after:] + addresses[:after]
        return sorted(addresses, key=lambda address: address in self._suspects)

    def _node(self, address: Address) -> Connections:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes.setdefault(address, self._any_node.at(*address))
        return node


#: The connections to one server, or to the nodes of a cluster.
AnyConnections = Connections | NodeConnections


def _commands_of(load: list[_Request]) -> list[Command]:
    commands: list[Command] = []
    for request in load:
        if request.asking:
            commands.append(("ASKING",))
        commands += request.commands
    return commands


def _unserved(slot: int) -> StoreUnavailable:
    return StoreUnavailable(f"no node of the cluster has slot {slot} now")


def _about(address: Address, error: StoreError) -> StoreError:
    if "cluster support disabled" in str(error):
        return StoreError(
            f"{address[0]}:{address[1]} belongs to no Redis Cluster: name it redis:// ({error})"
        )
    return error
