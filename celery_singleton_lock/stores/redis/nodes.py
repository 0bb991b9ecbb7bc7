"""Connections to the nodes of a Redis Cluster: commands find the node that has their slot.

Promises
    All commands for one node travel in one pipeline, and the nodes work at the same time. A node
    that said no (MOVED, ASK, TRYAGAIN) has done nothing, so the command is sent again to where it
    belongs: a few times, and within the timeout. What got no answer is never sent again in here.
    A silent node costs the others' commands nothing but the wait.

Failure handling
    A silent node, MOVED and CLUSTERDOWN make the picture of the cluster stale: before the next
    commands another node is asked for a new one, each in its turn, for a node that was cut off from
    the others may have an old one. Without any answer the old picture is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import redis

from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.errors import SettingsError, StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.async_release import PostedRelease
from celery_singleton_lock.stores.redis.connection import Connections, Exchange
from celery_singleton_lock.stores.redis.parcel import Parcel, parcels_of
from celery_singleton_lock.stores.redis.replies import checked
from celery_singleton_lock.stores.redis.topology import Address, Topology, slot_of
from celery_singleton_lock.stores.redis.transport import Command
from celery_singleton_lock.stores.urls import Hosts

__all__ = ["NodeConnections"]

_PORT: Final = 6379
# A redirect leads to the right node, or meets a migration that ends: two are usual, more are not.
_ROUNDS: Final = 5
# A slot's keys are on both sides for as long as one MIGRATE takes.
_TRY_AGAIN_PAUSE: Final = 0.02
_NO_TIME: Final = "no time was left to ask this node"


class NodeConnections:
    """To the cluster of which ``url`` names some nodes.

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
        # Who failed last is asked last.
        self._suspects: set[Address] = set()
        self._answered_last: Address | None = None

    def run(self, commands: Sequence[Command], timeout: float) -> list[Any]:
        """As of a transport.

        Raises:
            ScriptForgotten, StoreUnavailable, StoreError: Of the first command that met one.
        """
        replies = self.attempt(commands, timeout)
        for reply in replies:
            if isinstance(reply, StoreError):
                raise reply
        return checked(replies)

    def attempt(
        self, commands: Sequence[Command], timeout: float, *, waits: bool = True
    ) -> list[Any]:
        """Send all, read all; in the place of a reply stands the error that its command met.

        Args:
            commands: As of a transport.
            timeout: Seconds for all of it, and once more where a node must be connected to.
            waits: Whether TRYAGAIN is tried again; else it is an error like others.

        Raises:
            StoreUnavailable, StoreError: No node tells what the cluster looks like.
        """
        until = self._clock.now() + timeout
        replies: list[Any] = [None] * len(commands)
        parcels = parcels_of(commands)
        for number in range(_ROUNDS):
            if not number:
                self._look(timeout)
            elif self._clock.now() >= until:
                break
            parcels = self._round(parcels, replies, timeout, until, waits)
            if not parcels:
                break
        for parcel in parcels:
            parcel.fill(replies, StoreUnavailable("the store is moving this key: try again"))
        return replies

    def post(self, command: Command, timeout: float, posted: PostedRelease) -> bool:
        """As of a transport. A node that says MOVED has done nothing, and it is made again."""
        if self._topology is None or self._stale:
            return False
        (parcel,) = parcels_of([command])
        address = self._topology.master_of(parcel.slot)
        return address is not None and self._node(address).post(command, timeout, posted)

    def collect(self, timeout: float) -> None:
        """As of a transport, but within seconds for all nodes: behind a silent one only what has
        come already is read.
        """
        until = self._clock.now() + timeout
        for node in list(self._nodes.values()):
            node.collect(max(0.0, until - self._clock.now()))

    def masters(self, timeout: float) -> list[Connections]:
        """To each node that has slots.

        Raises:
            StoreUnavailable, StoreError: No node tells which these are.
        """
        self._stale = True
        return [self._node(address) for address in self._look(timeout).masters]

    def home_of(self, key: str, timeout: float) -> Connections:
        """To the node that has ``key``; StoreError if none is known to have it."""
        address = self._look(timeout).master_of(slot_of(key))
        if address is None:
            raise StoreUnavailable(f"no node of the cluster has slot {slot_of(key)} now")
        return self._node(address)

    def close(self) -> None:
        """Close what is idle."""
        for node in list(self._nodes.values()):
            node.close()

    # --- one round -------------------------------------------------------------------------------

    def _round(
        self, parcels: list[Parcel], replies: list[Any], timeout: float, until: float, waits: bool
    ) -> list[Parcel]:
        """Deliver the parcels to their nodes; those that are to go elsewhere are returned."""
        again: list[Parcel] = []
        under_way: list[tuple[Address, list[Parcel], Exchange]] = []
        try:
            for address, load in self._by_node(parcels, replies, timeout):
                try:
                    exchange = self._send(address, load, timeout, until)
                except StoreError as exc:
                    self._failed(address, load, replies, exc)
                else:
                    under_way.append((address, load, exchange))
            for address, load, exchange in under_way:
                try:
                    answers = exchange.replies(lambda: self._clock.now() >= until)
                except StoreError as exc:
                    self._failed(address, load, replies, exc)
                else:
                    self._suspects.discard(address)
                    again += self._sort(address, load, answers, replies, waits)
        finally:
            # Also where a signal's exception struck: what was not read to its end is closed.
            for *_, exchange in under_way:
                exchange.end()
        return again

    def _by_node(
        self, parcels: list[Parcel], replies: list[Any], timeout: float
    ) -> list[tuple[Address, list[Parcel]]]:
        topology = self._topology
        assert topology is not None, "attempt() has looked"
        loads: dict[Address, list[Parcel]] = {}
        for parcel in parcels:
            address = parcel.asking or topology.master_of(parcel.slot)
            if address is None:
                self._stale = True
                error = StoreUnavailable(f"no node of the cluster has slot {parcel.slot} now")
                parcel.fill(replies, error)
            else:
                loads.setdefault(address, []).append(parcel)
        # A dead node shall not use up the time of the others: those first that need no connecting,
        # those last that failed last.
        return sorted(
            loads.items(),
            key=lambda item: (
                not self._node(item[0]).has_idle(timeout),
                item[0] in self._suspects,
            ),
        )

    def _send(self, address: Address, load: list[Parcel], timeout: float, until: float) -> Exchange:
        node = self._node(address)
        if not node.has_idle(timeout) and self._clock.now() >= until:
            raise StoreUnavailable(_NO_TIME)
        commands: list[Command] = []
        for parcel in load:
            if parcel.asking:
                commands.append(("ASKING",))
            commands += parcel.commands
        return node.begin(commands, timeout)

    def _failed(
        self, address: Address, load: list[Parcel], replies: list[Any], error: StoreError
    ) -> None:
        self._stale = True
        self._suspects.add(address)
        for parcel in load:
            parcel.fill(replies, error)

    def _sort(
        self,
        asked: Address,
        load: list[Parcel],
        answers: list[Any],
        replies: list[Any],
        waits: bool,
    ) -> Iterable[Parcel]:
        """Put each answer in its place; what is to go elsewhere is returned."""
        position, again, pause = 0, [], False
        for parcel in load:
            position += bool(parcel.asking)
            first = answers[position]
            if isinstance(first, redis.exceptions.AskError):  # MovedError is one, too
                again.append(self._redirected(parcel, first, asked))
            elif isinstance(first, redis.exceptions.TryAgainError) and waits:
                again.append(parcel)
                pause = True
            else:
                if isinstance(first, _STALE):
                    self._stale = True
                own = answers[position : position + len(parcel.commands)]
                replies[parcel.index : parcel.index + len(parcel.commands)] = own
            position += len(parcel.commands)
        if pause:
            self._clock.sleep(_TRY_AGAIN_PAUSE)
        return again

    def _redirected(
        self, parcel: Parcel, error: redis.exceptions.AskError, asked: Address
    ) -> Parcel:
        _, _, where = str(error).partition(" ")
        host, _, port = where.rpartition(":")
        target = (host.strip("[]") or asked[0], int(port))
        if not isinstance(error, redis.exceptions.MovedError):
            return replace(parcel, asking=target)
        # Followed now, and looked into before the next commands: others may have moved, too.
        self._stale = True
        if self._topology is not None:
            self._topology.learn(parcel.slot, target)
        return replace(parcel, asking=None)

    # --- the picture of the cluster --------------------------------------------------------------

    def _look(self, timeout: float) -> Topology:
        """The picture, a new one if it is stale and a node answers."""
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
            self._take(Topology.parse(reply, address), address)
            break
        if self._topology is None:
            raise error
        return self._topology

    def _take(self, topology: Topology, answered: Address) -> None:
        self._topology, self._stale = topology, False
        self._answered_last = answered
        self._suspects.discard(answered)
        known = {*topology.nodes, *self._seeds}
        for address in set(self._nodes) - known:
            self._nodes.pop(address).close()

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


# The node isn't what it was taken for, or knows that the cluster isn't whole.
_STALE: Final = (redis.exceptions.ClusterDownError, redis.exceptions.ReadOnlyError)


def _about(address: Address, error: StoreError) -> StoreError:
    if "cluster support disabled" in str(error):
        return StoreError(
            f"{address[0]}:{address[1]} belongs to no Redis Cluster: name it redis:// ({error})"
        )
    return error
