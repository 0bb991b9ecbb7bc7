"""Leases in a Redis Cluster: routing to the nodes, and a store whose keys are in 256 shards.

Overview
    Each shard of a prefix is in one hash slot, so it is on one node. `NodeConnections` sends each
    command to the node that has the hash slot of its key. `ClusterStore` is a RedisStore on these
    connections.

Guarantees
    A lease, the hash of its shard, its completion record and its claim are in one shard, so every
    operation is one script on one node, as on a single server. All commands for one node are one
    pipeline, and the nodes work at the same time: a node that does not answer delays no lease of
    another node. A node that replies MOVED, ASK or TRYAGAIN has executed nothing, so the command is
    sent again, a few times and within the timeout. A command without a reply is never sent again.

Non-guarantees
    Exclusion over a failover: replication is asynchronous. A current topology: a node that was cut
    off from the others may report an old one. Redirects and failures correct it. Atomicity for a
    remote claim, which is in another shard because its publisher computed another key: a separate
    request changes it, before or after the lease's request. If that request fails, the claim
    expires; one that frees the claim is repeated until its node answers.

Failure handling
    A node that does not answer, MOVED and CLUSTERDOWN make the topology stale. Before the next
    commands the topology is requested from one node after the other, until one answers. If none
    answers, the old topology is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any, Final, TypeVar

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from ...core.call_queue import Hint
from ...core.clock import Clock
from ...core.keyspace import Keyspace
from ...core.lease import Kind, Lease, LossReason, Token
from ...core.store import ConnectionWatch, OnReply
from ...core.store_requests import (
    ARGUMENTS_FOR,
    CLAIM_NOT_CHANGED,
    RENEWED,
    Acquire,
    ClaimChange,
    Granted,
    GrantedArguments,
    Mark,
    QueuedRelease,
    Refused,
    Relation,
    Release,
    ReleaseReply,
    Renewal,
)
from ...errors import SettingsError, StoreError, StoreUnavailable
from ..store_url import Address, StoreUrl
from . import scripts
from .async_release import PendingRelease, RedisAsyncReleases
from .call_queue import RedisCallQueue
from .connection import Connection, Connections
from .leases import RedisLeases
from .runner import ScriptRunner
from .store import RedisStore
from .wait_queue import RedisWaitQueue

R = TypeVar("R", bound=Release)
H = TypeVar("H")

logger = logging.getLogger("celery_singleton_lock")

_PORT: Final = 6379
# How often a command is sent at most. During a migration two redirects are usual, more are not.
_TRIES: Final = 5
# Seconds. TRYAGAIN lasts until the current MIGRATE of the slot's keys ends.
_TRY_AGAIN_PAUSE: Final = 0.02
# Errors of a node that is no longer a master, or of a cluster with slots that are not served.
_STALE: Final = (redis.exceptions.ClusterDownError, redis.exceptions.ReadOnlyError)
# Seconds for which the end of a remote claim is repeated: most claims do not last longer.
_FREED_FOR: Final = 3600.0


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
        #: The node that has each slot; None: no node has it.
        self.master_of: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        shards = [[_address(node, asked) for node in nodes] for _, _, *nodes in reply]
        for (begin, end, *_), (master, *_) in zip(reply, shards, strict=True):
            self.master_of[begin : end + 1] = [master] * (end + 1 - begin)
        #: The nodes that have slots.
        self.masters = list(dict.fromkeys(shard[0] for shard in shards))
        #: All nodes.
        self.nodes = list(dict.fromkeys(chain(self.masters, *shards)))


def _address(node: Sequence[Any], asked: Address) -> Address:
    host = (node[0] or b"").decode()
    # An empty host or '?': the node doesn't know its own name (cluster-preferred-endpoint-type).
    return Address(host if host not in ("", "?") else asked[0], int(node[1]))


@dataclass(slots=True)
class _Request:
    """A command and the WAIT that follows it, if any. Both go to one node, on one connection.

    Attributes:
        commands: The command, and WAIT.
        slot: The hash slot of the command's key.
        address: The node that was asked last, or to which a reply redirects; None: the slot's.
        asking: Whether that reply was ASK.
        replies: The reply or the error of each command.
    """

    commands: list[scripts.Command]
    slot: int
    address: Address | None = None
    asking: bool = False
    replies: list[Any] = field(default_factory=list)

    def to_send(self) -> list[scripts.Command]:
        return [("ASKING",), *self.commands] if self.asking else self.commands

    def fail(self, error: StoreError) -> None:
        self.replies = [error] * len(self.commands)


def _requests_of(commands: Sequence[scripts.Command]) -> list[_Request]:
    requests: list[_Request] = []
    for command in commands:
        if command[0] == "WAIT":
            requests[-1].commands.append(command)
        else:
            key = command[3] if command[0] in ("EVALSHA", "EVAL") else command[1]
            requests.append(_Request([command], slot_of(key)))
    return requests


class NodeConnections(Connections):
    """The connections to the nodes of a cluster. ``url`` names some of the nodes.

    Each node has connections of its own. `take` is a method of these.

    Args:
        url: ``redis+cluster://user:password@host1:7000,host2:7001``; ``rediss+cluster://`` is TLS.
        options: Options of the connections.
        clock: The clock of the deadlines.

    Raises:
        SettingsError: The URL or an option can't be read.
    """

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, clock: Clock | None = None
    ) -> None:
        parsed = StoreUrl.parse(url, port=_PORT)
        if parsed.path not in ("", "0") or parsed.options.get("db", "0") != "0":
            raise SettingsError("a Redis Cluster has no databases: leave the number out of its URL")
        super().__init__(parsed, options, clock)
        self._seeds = parsed.hosts
        self._nodes: dict[Address, Connections] = {}
        self._topology = Topology([], self._seeds[0])
        self._stale = True
        # The nodes whose last request failed. They are asked last.
        self._suspects: set[Address] = set()
        # The time of each node's last report of the topology. Another node is asked next, because
        # one that is cut off from the others reports an old topology.
        self._answered_at: dict[Address, float] = {}

    def run(
        self, commands: Sequence[scripts.Command], timeout: float, *, check: bool = True
    ) -> list[Any]:
        """See `Connections.run`.

        Args:
            commands: Name and arguments. The first argument is a key, except for EVAL and EVALSHA.
            timeout: Seconds for all commands, and once more if a node must be connected to.
            check: Whether the first error is raised; else the error of a command is a value, also
                if its node did not answer, and TRYAGAIN is an error.

        Raises:
            StoreUnavailable, StoreError: No node reports the topology.
        """
        until = self.now() + timeout
        self._fresh_topology(timeout)
        requests = to_send = _requests_of(commands)
        for _ in range(_TRIES):
            self._send(to_send, timeout, until)
            # Redirected requests are sent together too: a node that does not answer must not make
            # the requests to other nodes fail.
            to_send = [request for request in to_send if self._is_redirected(request, waits=check)]
            if not to_send or self.now() >= until:
                break
        for request in to_send:
            request.fail(StoreUnavailable("the store is moving this key: try again"))
        replies = [reply for request in requests for reply in request.replies]
        return self.checked(replies) if check else replies

    def send_async(self, command: scripts.Command, timeout: float, pending: PendingRelease) -> bool:
        """See `Connections.send_async`. A node that replies MOVED has not executed the release."""
        if self._stale:
            return False
        address = self._topology.master_of[slot_of(command[3])]
        return address is not None and self._node(address).send_async(command, timeout, pending)

    def drain(self, timeout: float) -> None:
        """See `Connections.drain`; ``timeout`` is for all nodes."""
        until = self.now() + timeout
        for node in list(self._nodes.values()):
            node.drain(max(0.0, until - self.now()))

    def masters(self, timeout: float) -> list[Connections]:
        """The connections to each node that has slots.

        Raises:
            StoreUnavailable, StoreError: No node reports the topology.
        """
        self._stale = True
        return [self._node(address) for address in self._fresh_topology(timeout).masters]

    def home_of(self, key: str, timeout: float) -> Connections:
        """The connections to the node that has ``key``.

        Raises:
            StoreUnavailable, StoreError: No node has the key, or none reports the topology.
        """
        address = self._fresh_topology(timeout).master_of[slot_of(key)]
        if address is None:
            raise _unserved(slot_of(key))
        return self._node(address)

    def report_to(self, watch: ConnectionWatch) -> None:
        """See `Store.watch_connections`."""
        super().report_to(watch)
        for node in list(self._nodes.values()):
            node.report_to(watch)

    def close(self) -> None:
        """Close all idle connections."""
        for node in list(self._nodes.values()):
            node.close()

    # --- requests --------------------------------------------------------------------------------

    def _send(self, requests: list[_Request], timeout: float, until: float) -> None:
        """Send the requests to all their nodes at once, and read the replies."""
        taken: list[Connection] = []
        in_flight: list[tuple[Address, list[_Request], Connection]] = []
        try:
            for address, load in self._by_node(requests, timeout):
                node = self._node(address)
                try:
                    if self.now() >= until and not node.has_idle(timeout):
                        raise StoreUnavailable("no time was left to ask this node")
                    connection = node.take(timeout)
                    taken.append(connection)
                    commands = [one for request in load for one in request.to_send()]
                    connection.send(b"".join(map(scripts.pack, commands)), len(commands))
                    in_flight.append((address, load, connection))
                except StoreError as exc:
                    self._fail(address, load, exc)
            for address, load, connection in in_flight:
                now = self.now()
                # Connecting does not shorten the time for the replies: over a slow link no attempt
                # would succeed. But after a node that did not answer, only replies that have
                # arrived are read.
                deadline = now + timeout if now < until else until
                try:
                    replies = iter(connection.replies(deadline))
                except StoreError as exc:
                    self._fail(address, load, exc)
                else:
                    self._suspects.discard(address)
                    for request in load:
                        found = [*islice(replies, len(request.to_send()))]
                        request.replies = found[-len(request.commands) :]
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
            address = request.address or self._topology.master_of[request.slot]
            if address is None:
                self._stale = True
                request.fail(_unserved(request.slot))
            else:
                request.address = address
                loads.setdefault(address, []).append(request)
        # A dead node must not use up the time of the others: nodes that need no connecting come
        # first, nodes that failed last come last.
        return sorted(
            loads.items(),
            key=lambda item: (not self._node(item[0]).has_idle(timeout), item[0] in self._suspects),
        )

    def _fail(self, address: Address, load: list[_Request], error: StoreError) -> None:
        self._stale = True
        self._suspects.add(address)
        for request in load:
            request.fail(error)

    def _is_redirected(self, request: _Request, *, waits: bool) -> bool:
        """Whether the request must be sent again. If ``waits``, TRYAGAIN counts as a redirect."""
        error, asked = request.replies[0], request.address
        if isinstance(error, redis.exceptions.AskError) and asked:  # MovedError is a subclass
            # Without a host it is the host of the node that replied.
            request.address = target = Address(error.host.strip("[]") or asked.host, error.port)
            request.asking = not isinstance(error, redis.exceptions.MovedError)
            if not request.asking:
                # Other slots may have moved too, so the topology is read before the next commands.
                self._stale = True
                self.note_other_server()
                self._topology.master_of[request.slot] = target
        elif isinstance(error, redis.exceptions.TryAgainError) and waits:
            self.clock.sleep(_TRY_AGAIN_PAUSE)
        else:
            self._stale = self._stale or isinstance(error, _STALE)
            return False
        return True

    # --- the topology ----------------------------------------------------------------------------

    def _fresh_topology(self, timeout: float) -> Topology:
        """The topology, read again if it is stale and a node answers.

        Raises:
            StoreUnavailable, StoreError: The topology was never read, and no node answers.
        """
        if not self._stale:
            return self._topology
        error: StoreError
        until = self.now() + timeout
        for address in self._nodes_to_ask():
            try:
                (reply,) = self._node(address).run([("CLUSTER", "SLOTS")], timeout)
            except StoreError as exc:
                self._suspects.add(address)
                error = exc
                if self.now() >= until:
                    break
            else:
                self._topology, self._stale = Topology(reply, address), False
                self._answered_at[address] = self.now()
                self._suspects.discard(address)
                for gone in set(self._nodes) - {*self._topology.nodes, *self._seeds}:
                    self._nodes.pop(gone).close()
                return self._topology
        if not self._topology.nodes:
            raise error
        return self._topology

    def _nodes_to_ask(self) -> list[Address]:
        """All nodes. Nodes that failed come last, and before them the node that answered last."""
        return sorted(
            dict.fromkeys([*self._topology.nodes, *self._seeds]),
            key=lambda node: (node in self._suspects, self._answered_at.get(node, 0.0)),
        )

    def _node(self, address: Address) -> Connections:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes.setdefault(address, self.at(*address))
        return node


class RemoteClaims:
    """Changes of claims in other shards than the lease. Each is a request of its own.

    Args:
        runner: Runs the scripts.

    Attributes:
        put: Repeats what frees a claim, see `core.retry_queue.SendsBeside`; None: nothing does.
    """

    def __init__(self, runner: ScriptRunner) -> None:
        self._runner = runner
        self.put: Callable[..., str] | None = None

    def change(self, token: Token, change: ClaimChange, timeout: float) -> None:
        arguments = [token.call_id, scripts.phase_of(change), scripts.milliseconds(change.ttl), "y"]
        command = scripts.CHANGE_CLAIM.command(scripts.keys_of(change), arguments)

        def give_up(why: object) -> None:
            # Exclusion depends on the lease only. A claim that is not changed delays calls until it
            # expires.
            logger.warning(CLAIM_NOT_CHANGED, change.key, why, change.key)

        try:
            self._runner.run(command, timeout)
        except StoreUnavailable as exc:
            # No other change is repeated: a later one of the message may be there first.
            put = self.put if change.phase is None else None
            why: object = exc
            if put is not None:
                why = put(
                    lambda _: self._runner.run(command, timeout), _FREED_FOR, give_up, error=exc
                )
            if why:
                give_up(why)
        except StoreError as exc:
            give_up(exc)

    def release(
        self, request: R, timeout: float, send: Callable[[R], tuple[ReleaseReply, H]]
    ) -> tuple[ReleaseReply, H]:
        """Release by ``send``, and change a claim in another shard after it."""
        claim = remote_claim(request.keys[0], request.claim)
        if claim is None:
            return send(request)
        # The claim of a dying holder can only be freed, see release.lua.
        record = None if claim.phase is None else self._runner.read(request.keys[0], timeout)
        is_kept = record is not None and record.kind is Kind.DYING
        reply, following = send(replace(request, claim=None))
        frees = reply is not ReleaseReply.DUPLICATE and claim.phase is None
        if frees or (reply is ReleaseReply.OURS and not is_kept):
            self.change(request.token, claim, timeout)
        return reply, following


class ClusterLeases(RedisLeases):
    """The leases of a cluster, whose claims may be in other shards."""

    def __init__(
        self, runner: ScriptRunner, fence_base: int, wait_replicas: int, remote: RemoteClaims
    ) -> None:
        super().__init__(runner, fence_base, wait_replicas)
        self._remote = remote

    def acquire(self, request: Acquire, *, timeout: float) -> Granted | Refused:
        claim = remote_claim(request.slots[0], request.claim)
        if claim is None:
            return super().acquire(request, timeout=timeout)
        if claim.arguments:
            # An old copy of the message is requeued too until then; its next acquire drops it.
            left_ms = int(self._runner.run(scripts.DUE.command([claim.arguments]), timeout))
            if left_ms > 0:
                not_due = Refused(relation=Relation.NOT_DUE)
                not_due.due_in = left_ms / 1000
                return not_due
        if request.refused_if_claimed:
            claimed = self._runner.read(claim.key, timeout)
            anothers = (
                claimed and claimed.kind is Kind.CLAIM and claimed.token != request.token.call_id
            )
            if anothers and not self._holds(request, timeout):
                return Refused(relation=Relation.OTHER, record=claimed)
        alone = replace(request, claim=None, frees_claim=False, refused_if_claimed=False)
        reply = super().acquire(alone, timeout=timeout)
        if isinstance(reply, Granted):
            self._remote.change(request.token, replace(claim, arguments=""), timeout)
            if claim.arguments:  # the claim is free, so no call replaces them any more
                kept = ("PEXPIRE", claim.arguments, scripts.milliseconds(ARGUMENTS_FOR))
                get = ("GET", claim.arguments)
                found, _ = self._runner.connections.run([get, kept], timeout)
                arguments = found and found.split(b" ", 2)[2]  # after two times, see replace.lua
                return GrantedArguments(key=reply.key, fence=reply.fence, arguments=arguments)
        elif request.frees_claim and reply.relation is Relation.OTHER:
            self._remote.change(request.token, replace(claim, phase=None), timeout)
        return reply

    def release(self, request: Release, *, timeout: float) -> ReleaseReply:
        def send(request: Release) -> tuple[ReleaseReply, None]:
            return super(ClusterLeases, self).release(request, timeout=timeout), None

        return self._remote.release(request, timeout, send)[0]

    def mark(self, request: Mark, *, timeout: float) -> None:
        claim = remote_claim(request.key, request.claim)
        if claim is None:
            return super().mark(request, timeout=timeout)
        super().mark(replace(request, claim=None), timeout=timeout)
        return self._remote.change(request.token, claim, timeout)

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[Renewal]:
        shards: dict[str, list[Lease]] = {}
        for lease in leases:
            shards.setdefault(Keyspace.shard(lease.key), []).append(lease)
        chunks = [chunk for shard in shards.values() for chunk in scripts.chunks_of(shard)]
        replies = self._each([*map(scripts.renewal_command, chunks)], timeout)
        # While a slot moves, its keys are on two nodes: each lease needs a request of its own.
        apart: list[Sequence[Lease]] = [
            [lease]
            for chunk, reply in zip(chunks, replies, strict=True)
            if isinstance(reply, redis.exceptions.TryAgainError)
            for lease in chunk
        ]
        alone = [scripts.renewal_command(chunk, claims=False) for chunk in apart]
        replies += self._each(alone, timeout)
        if all(isinstance(reply, Exception) for reply in replies):
            self._runner.connections.checked(replies)
        found: dict[int, Renewal] = {}
        for chunk, reply in zip([*chunks, *apart], replies, strict=True):
            if not isinstance(reply, Exception):
                found.update(
                    zip(map(id, chunk), scripts.renewals_of(len(chunk), reply), strict=True)
                )
        renewals = [found.get(id(lease), LossReason.UNREACHABLE) for lease in leases]
        self._prolong_remote(leases, renewals, timeout)
        return renewals

    def _prolong_remote(
        self, leases: Sequence[Lease], renewals: Sequence[Renewal], timeout: float
    ) -> None:
        """Prolong the remote claims of renewed leases. After a failure the claims expire."""
        commands = [
            scripts.PROLONG.command(
                [lease.claim_key], [lease.token.call_id, scripts.milliseconds(lease.ttl)]
            )
            for lease, reply in zip(leases, renewals, strict=True)
            if reply is RENEWED
            and lease.claim_key
            and not Keyspace.same_shard(lease.key, lease.claim_key)
        ]
        self._each(commands, timeout)

    def _each(self, commands: Sequence[scripts.Command], timeout: float) -> list[Any]:
        """The reply or the error of each run of a script."""
        if not commands:
            return []
        replies = self._runner.connections.run(commands, timeout, check=False)
        forgotten = {
            index: scripts.with_source(commands[index])
            for index, reply in enumerate(replies)
            if isinstance(reply, redis.exceptions.NoScriptError)
        }
        if forgotten:
            again = self._runner.connections.run([*forgotten.values()], timeout, check=False)
            for index, reply in zip(forgotten, again, strict=True):
                replies[index] = reply
        return replies

    def _holds(self, request: Acquire, timeout: float) -> bool:
        """Whether the token holds the key already, and only the reply to its acquire was lost."""
        records = [self._runner.read(slot, timeout) for slot in request.slots]
        return any(record is not None and record.token == str(request.token) for record in records)


class ClusterCallQueue(RedisCallQueue):
    """The queues of a cluster, whose claims may be in other shards."""

    def __init__(self, runner: ScriptRunner, remote: RemoteClaims) -> None:
        super().__init__(runner)
        self._remote = remote

    def release(
        self, request: QueuedRelease, *, timeout: float
    ) -> tuple[ReleaseReply, Hint | None]:
        send = partial(super().release, timeout=timeout)
        return self._remote.release(request, timeout, send)


class ClusterAsyncReleases(RedisAsyncReleases):
    """Asynchronous releases, unless they have a claim in another shard."""

    def send(self, request: Release, *, timeout: float, on_reply: OnReply) -> bool:
        if remote_claim(request.keys[0], request.claim) is not None:
            return False  # the change of the remote claim depends on the reply
        return super().send(request, timeout=timeout, on_reply=on_reply)


class ClusterStore(RedisStore):
    """A store in one Redis Cluster. The URL names some nodes; other arguments as for RedisStore."""

    shards = 256
    # All leases are renewed in one batch, because all nodes get their pipelines at once: a node
    # that does not answer delays no lease of another node.
    capabilities = replace(RedisStore.capabilities, name="redis cluster", renewal_batch=None)

    def __init__(
        self,
        url: str,
        *,
        fence_base: int = 0,
        options: Mapping[str, Any] | None = None,
        wait_replicas: int = 0,
    ) -> None:
        super().__init__(url, options=options, connect=NodeConnections)
        self._remote = remote = RemoteClaims(self.runner)
        self.leases = ClusterLeases(self.runner, fence_base, wait_replicas, remote)
        self.wait_queue = RedisWaitQueue(self.runner, self.leases)
        self.call_queue = ClusterCallQueue(self.runner, remote)
        self.async_releases = ClusterAsyncReleases(self.runner)

    def repeat_by(self, put: Callable[..., str]) -> None:
        """Let ``put`` repeat what frees a remote claim: see `core.retry_queue.SendsBeside`."""
        self._remote.put = put


def remote_claim(key: str, claim: ClaimChange | None) -> ClaimChange | None:
    """``claim`` if it is in another shard than ``key``."""
    return claim if claim is not None and not Keyspace.same_shard(key, claim.key) else None


def _unserved(slot: int) -> StoreUnavailable:
    return StoreUnavailable(f"no node of the cluster has slot {slot} now")
