"""Runs scripts and commands for the parts of one store in Redis.

Guarantees
    A script that the server has lost is sent again, once, with its source. Before the first use of
    a prefix, the number of shards is compared with that of the other apps. After each request,
    asynchronous releases whose reply was lost are sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import redis

from ...core.keyspace import Keyspace
from ...core.lease import Record
from ...core.store import NO_KEYS
from ...core.store_requests import Release, ReleaseReply
from ...errors import StoreError, StoreUnavailable
from . import scripts
from .async_release import PendingReleases
from .connection import OPERATOR_TIMEOUT, Connections
from .replies import record_of
from .server_errors import denied_by, is_denied

R = TypeVar("R")
T = TypeVar("T")

#: The replies of the scripts that release.
RELEASE_REPLIES: Final = {reply.encode(): reply for reply in ReleaseReply}


class ScriptRunner:
    """See the module.

    Args:
        connections: The connections of the store.
        shards: The number of shards of each prefix; None: it is not compared with other apps'.

    Attributes:
        pending: The asynchronous releases.
        known_shards: Shards, named by their hashes, for whose prefix the stored number of
            shards was found equal.
        loaded: Shards whose server has run release.lua, and so has it loaded.
    """

    def __init__(self, connections: Connections, shards: int | None) -> None:
        self.connections = connections
        self.pending = PendingReleases(self.release)
        self.known_shards: set[str] = set()
        self._shards = shards
        self.loaded: set[str] = set()

    def run(self, command: scripts.Command, timeout: float) -> Any:
        """Run a script once, then resend asynchronous releases whose reply was lost."""
        (reply,) = self.pipeline([command], timeout)
        if self.pending.lost:
            self.pending.resend_lost()
        return reply

    def run_checked(self, command: scripts.Command, timeout: float) -> Any:
        """As :meth:`run`, once the number of shards is known to be that of the other apps."""
        self.check_shards(command[3], timeout)
        return self.run(command, timeout)

    def run_repeatably(self, command: scripts.Command, timeout: float) -> Any:
        """As :meth:`run`; again if an idle connection was broken. The script is idempotent."""
        return repeated(self.run, command, timeout)

    def release(self, request: Release, timeout: float) -> ReleaseReply:
        """Release a lease and wait for the reply."""
        (reply,) = self.pipeline([scripts.release_command(request)], timeout)
        self.loaded.add(Keyspace.shard(request.keys[0]))
        return RELEASE_REPLIES[reply]

    def drain(self, timeout: float) -> None:
        """See `AsyncReleases.drain`."""
        self.connections.drain(timeout)
        self.pending.resend_all(timeout)

    def drain_open(self) -> None:
        """The same, if a release is pending."""
        if self.pending.open():
            self.drain(OPERATOR_TIMEOUT)

    def pipeline(self, commands: Sequence[scripts.Command], timeout: float) -> list[Any]:
        """The reply to each command. Load the scripts into a server that has lost them."""
        try:
            return self.connections.run(commands, timeout)
        except redis.exceptions.NoScriptError:
            # The server was restarted, or SCRIPT FLUSH was called. Only the commands before the
            # first error were executed, and every script may run twice. EVAL loads and runs in one
            # step, so no other client's flush comes in between, and it needs no right to SCRIPT.
            script = scripts.Script.known.get(commands[0][1])
            if script is not None and script.grants:
                # The server may have lost its data, with the number of shards, too.
                if self.loaded:
                    self.connections.note_other_server()
                self.loaded.clear()
                self.known_shards.clear()
            return self.connections.run([*map(scripts.with_source, commands)], timeout)

    def read(self, key: str, timeout: float) -> Record | None:
        value, ttl = self.connections.run([("GET", key), ("PTTL", key)], timeout)
        return None if value is None else record_of(key.encode(), value, ttl)

    def texts(self, keys: Sequence[str], timeout: float) -> list[str | None]:
        """The text of each of ``keys``, or None."""
        # GET instead of MGET: every login has the right to GET, which the scripts need, and a
        # pipeline is one round trip too.
        replies = self.connections.run([("GET", key) for key in keys], timeout) if keys else []
        return [reply if reply is None else reply.decode() for reply in replies]

    def servers(self) -> Sequence[Connections]:
        """The connections to each server that has keys of this store."""
        return self.connections.masters(OPERATOR_TIMEOUT)

    def denied(self, *commands: scripts.Command) -> list[str]:
        """Which of the ``commands`` the login may not use; ``NO_KEYS`` for their keys."""
        return denied_of(partial(self.connections.run, [one]) for one in commands)

    def check_shards(self, key: str, timeout: float) -> bool:
        """Check that this app and the others use one number of shards.

        Returns:
            Whether a request was sent; False if the result for this prefix is known already.

        Raises:
            StoreError: The numbers differ, or the store refuses the request.
            StoreUnavailable: The store doesn't answer.
        """
        if Keyspace.shard_hash(key) in self.known_shards or self._shards is None:
            return False
        if Keyspace.shard_count(key) in map(Keyspace.shard_count, list(self.known_shards)):
            self.known_shards.add(Keyspace.shard_hash(key))
            return False
        if problem := self.problem_with_shards(key, timeout):
            raise StoreError(problem)
        return True

    def problem_with_shards(self, key: str, timeout: float) -> str:
        """Compare this store's number of shards with the number that is stored in Redis.

        Every key contains its shard (``...csl:{prefix:shard}:...``). Apps with different numbers of
        shards would use different keys, and two bodies would run at once. That happens if one app
        names a node of a cluster as a plain server, or if data were moved between a server and a
        cluster.

        Returns:
            The problem; empty if the numbers are equal.

        Raises:
            StoreError: The store refuses the request.
            StoreUnavailable: The store doesn't answer.
        """
        if self._shards is None:
            return ""
        note = Keyspace.shard_count(key)
        noted = int(self.run(scripts.SHARDS.command([note], [f"{self._shards}"]), timeout))
        if noted != self._shards:
            return (
                f"the locks here are kept in {noted} shard(s), says {note!r}, and this app looks "
                f"for them in {self._shards}: two apps would not see each other's locks. Name the "
                "store alike everywhere (a cluster is redis+cluster://, in every app); if no "
                "worker of the other sort is left, delete that key"
            )
        self.known_shards.add(Keyspace.shard_hash(key))
        return ""


def repeated(operation: Callable[[R, float], T], request: R, timeout: float) -> T:
    """Run an idempotent operation, a second time if it got no reply on an idle connection.

    A NAT or load balancer may have dropped that connection while the server is reachable.
    """
    try:
        return operation(request, timeout)
    except StoreUnavailable as exc:
        if not exc.was_idle:
            raise
        return operation(request, timeout)


def denied_of(tries: Iterable[Callable[[float], object]]) -> list[str]:
    """What the login may not use, as the server's refusals of the ``tries`` name it."""
    denied: dict[str, None] = {}
    for send in tries:
        try:
            send(OPERATOR_TIMEOUT)
        except redis.exceptions.NoScriptError:
            pass  # the login may use EVALSHA
        except StoreError as exc:
            if not is_denied(exc.__cause__):
                raise
            denied[denied_by(exc.__cause__) or NO_KEYS] = None
    return list(denied)
