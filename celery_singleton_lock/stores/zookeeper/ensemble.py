"""The nodes of keys in ZooKeeper: their paths, snapshots, and writes if a snapshot still holds.

Each key is a node in one of 256 buckets, which are nodes too. The version of a bucket counts the
changes in it, so comparing it detects any change of the nodes that were read there. The versions of
the nodes themselves can't detect it, because a node that is created again starts at version 0. All
keys of a lock are in one bucket.

ZooKeeper expires only ephemeral nodes, and has no request for the time. So all other nodes have
their ttl in their text. The ttl counts from the server's timestamp of their creation. The current
time of the server is estimated from the timestamp of the process's own last write. All timestamps
are those of the leader. The clock of a new leader may differ: such nodes then expire earlier or
later by the difference.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote

from kazoo import exceptions as kazoo_errors

from ...core.clock import Clock
from ...errors import StoreError, StoreUnavailable
from ..store_url import StoreUrl
from ..transitions import Changes, Entry, format_value, parse_entry
from .sessions import Session

#: The number of buckets. With this many, the list of a bucket's names stays far below the limit of
#: a reply, one megabyte, and two concurrent operations seldom use the same bucket.
BUCKETS: Final = 256
_DEFAULT_ROOT: Final = "celery-singleton-lock"
# The timeout, in seconds, of the session for nodes that don't end with a session.
_COMMON_TTL: Final = 10.0
# Each session has a connection and three threads. Policies rarely have more ttls, but the calls of
# a process may.
_MAX_SESSIONS: Final = 8
_MIN_TTL: Final = 0.001
_ANY_VERSION: Final = -1
# Seconds after which a timestamp of the server is too old: the two clocks run at different speeds.
_MAX_AGE: Final = 60.0
_INTERFERENCE: Final = (
    kazoo_errors.BadVersionError,
    kazoo_errors.NodeExistsError,
    kazoo_errors.NoNodeError,
    kazoo_errors.RolledBackError,
    kazoo_errors.RuntimeInconsistency,
)


@dataclass(frozen=True, slots=True)
class SeenNode:
    """A key as it was read.

    Attributes:
        entry: The entry; None if the node doesn't exist or has expired.
        exists: Whether the node exists.
    """

    entry: Entry | None = None
    exists: bool = False


#: The content of each key, and the versions of the buckets that were read. A key in a bucket
#: without a version was not read, but is assumed to have no node.
View = dict[str, SeenNode]
Versions = dict[str, int]


class Ensemble:
    """The nodes of a store, and the sessions of this process, which are created when needed.

    An ephemeral node ends with its session, so leases of different ttls need different sessions.
    Every method that sends requests may raise StoreUnavailable and StoreError.

    Args:
        url: Members, login, options, and the path of the nodes.
        clock: The clock of the deadlines.
        fence_base: Fences are above this number.
        is_used: Whether ephemeral nodes of a session may exist.

    Attributes:
        clock_node: A node that is written for the timestamp, and to prove that a session is alive.
        all_buckets: The paths of all buckets.
    """

    def __init__(
        self, url: StoreUrl, clock: Clock, fence_base: int, is_used: Callable[[Session], bool]
    ) -> None:
        self._url = url
        self._clock = clock
        self._fence_base = fence_base
        self._is_used = is_used
        self._root = f"/{url.path or _DEFAULT_ROOT}"
        self.clock_node = f"{self._root}/clock"
        self.all_buckets = [f"{self._root}/{number:03d}" for number in range(BUCKETS)]
        self._sessions: dict[int, Session] = {}  # by the ttl in milliseconds
        self._guard = threading.Lock()
        # The server's timestamp of the last write, and when it was acknowledged, on the clock.
        self._stamp: tuple[float, float] | None = None

    def session(self, deadline: float) -> Session:
        """The common session, for nodes that don't end with a session."""
        with self.using(0.0, deadline) as session:
            return session

    @contextmanager
    def using(self, ttl: float, deadline: float) -> Iterator[Session]:
        """The session that ends ``ttl`` seconds after this process, within the server's limits.

        Inside the block it is not ended as a spare one: another thread does not see yet that it has
        nodes. Without a ttl: the common session, which never ends as a spare one.
        """
        ttl_ms, spare = round(ttl * 1000), []
        with self._guard:
            session = self._sessions.get(ttl_ms)
            if session is None:
                session = Session(self._url, ttl or _COMMON_TTL, self._clock)
                self._sessions[ttl_ms] = session
                spare = self._pop_spare(session)
            session.users += 1
        try:
            for one in spare:
                one.close()
            session.start(deadline)
            yield session
        finally:
            with self._guard:
                session.users -= 1

    def close(self) -> None:
        """End all sessions."""
        for ttl_ms in list(self._sessions):
            if session := self._sessions.pop(ttl_ms, None):
                session.close()

    def buckets(self, keys: Iterable[str]) -> list[str]:
        """The buckets of ``keys``, each once."""
        return sorted(set(map(self._bucket, keys)))

    def read(self, keys: Sequence[str], deadline: float) -> tuple[View, Versions]:
        """A snapshot of all keys, and the versions of their buckets."""
        session = self.session(deadline)
        client, buckets = session.client, self.buckets(keys)
        while True:
            # All requests are sent together. The sync lets this member catch up with the leader.
            requests = [client.sync_async(self._root)]
            requests += [client.exists_async(bucket) for bucket in buckets]
            requests += [client.get_async(self._path(key)) for key in keys]
            requests += [client.exists_async(bucket) for bucket in buckets]
            replies = session.collect(requests, deadline)[1:]
            before, nodes = replies[: len(buckets)], replies[len(buckets) : -len(buckets)]
            after = replies[-len(buckets) :]
            if None in before:
                self._make(session, buckets, deadline)
            elif [stat.version for stat in before] == [stat.version for stat in after]:
                now = self._server_now(session, nodes, deadline)
                seen = [self._seen(node, now) for node in nodes]
                versions = {b: stat.version for b, stat in zip(buckets, before, strict=True)}
                return dict(zip(keys, seen, strict=True)), versions
            if self._clock.now() >= deadline:
                raise StoreUnavailable(f"other clients kept changing keys next to {keys[0]!r}")

    def commit(
        self, session: Session, view: View, versions: Versions, changes: Changes, deadline: float
    ) -> list[Any] | None:
        """Write ``changes`` if ``view`` still holds; None if it doesn't.

        A key whose bucket has a version was read, and comparing the version proves that it is
        unchanged. A key whose bucket has no version is assumed to have no node. ZooKeeper has no
        check for the absence of a node, so the transaction creates it: if the node exists, the
        whole transaction fails. A created node that is not in ``changes`` is deleted in the same
        transaction, so no client sees it. An expired node counts as existing.

        Returns:
            The stats of the changed buckets, in order.
        """
        transaction = session.client.transaction()
        changed = self.buckets(changes)
        for bucket in changed:
            transaction.set_data(bucket, b"", versions.get(bucket, _ANY_VERSION))
        for bucket, version in versions.items():
            if bucket not in changed:
                transaction.check(bucket, version)
        for key in view:
            if changes.get(key) is None and self._bucket(key) not in versions:
                transaction.create(self._path(key))
                transaction.delete(self._path(key))
        for key, entry in changes.items():
            path = self._path(key)
            if view[key].exists:
                transaction.delete(path)
            if entry is not None:
                ttl = max(entry.ttl, _MIN_TTL)
                ttl = min(ttl, session.timeout) if entry.renewed else ttl
                text = f"{'k' if entry.renewed else 'p'}{ttl:.3f} {format_value(entry.value)}"
                transaction.create(path, text.encode(), ephemeral=entry.renewed)
        stats = _stats(session.collect([transaction.commit_async()], deadline)[0])
        self._note_time(stats[0] if stats else None)
        return stats

    def prove_alive(self, sessions: Iterable[Session], deadline: float) -> None:
        """Write in each session. A member without a leader could answer a read."""
        sent = [(s, s.client.set_async(self.clock_node, b"")) for s in sessions]
        for session, request in sent:
            [stat] = session.collect([request], deadline)
            if stat is None:  # The node doesn't exist yet.
                self._make(session, [self.clock_node], deadline)
                again = session.client.set_async(self.clock_node, b"")
                [stat] = session.collect([again], deadline)
            self._note_time(stat)

    def _pop_spare(self, newest: Session) -> list[Session]:
        """Remove unused sessions beyond the maximum, so that ttls of single calls don't add up.

        The caller holds the guard, so that no thread begins to use one of them.
        """
        spare: list[Session] = []
        for ttl_ms, session in list(self._sessions.items()):
            if len(self._sessions) <= _MAX_SESSIONS:
                break
            is_used = session is newest or session.users or self._is_used(session)
            if ttl_ms and not is_used:
                spare.append(self._sessions.pop(ttl_ms))
        return spare

    def _bucket(self, key: str) -> str:
        """The bucket of ``key``. The slots and claims of a lock, and last runs, share a bucket."""
        shard, brace, rest = key.partition("}:")
        if rest.startswith("claim|"):
            rest = rest.split("|", 2)[-1]
        elif rest.startswith("last|"):
            rest = rest.split("|", 2)[1]  # The leader's key.
        home = f"{shard}{brace}{rest.partition('#')[0]}"
        return self.all_buckets[zlib.crc32(home.encode()) % BUCKETS]

    def _path(self, key: str) -> str:
        """The node of ``key``, quoted: without slashes and characters that ZooKeeper refuses."""
        return f"{self._bucket(key)}/{quote(key, safe=':{}|,+*=~@')}"

    def _seen(self, node: tuple[bytes, Any] | None, server_now: float | None) -> SeenNode:
        """The entry of a node. Without the server's time, no node counts as expired."""
        if node is None:
            return SeenNode()
        data, stat = node
        entry = parse_entry(data.decode(errors="replace"), self._fence_base + stat.czxid)
        if not entry.renewed and server_now is not None:
            left = stat.ctime / 1000 + entry.ttl - server_now
            if left <= 0:
                return SeenNode(None, exists=True)
            entry = replace(entry, ttl=min(left, entry.ttl))
        return SeenNode(entry, exists=True)

    def _note_time(self, stat: Any) -> None:
        """Note the timestamp of a write. It is older than now, so the estimate is early."""
        if stat is not None:
            self._stamp = (stat.mtime / 1000, self._clock.now())

    def _server_now(self, session: Session, nodes: Sequence[Any], deadline: float) -> float | None:
        """The server's time, if a node's expiry depends on it."""
        if not any(node is not None and node[0][:1] == b"p" for node in nodes):
            return None
        if self._stamp is None or self._clock.now() - self._stamp[1] > _MAX_AGE:
            self.prove_alive([session], deadline)
        stamp = self._stamp
        return stamp[0] + self._clock.now() - stamp[1] if stamp else None

    @staticmethod
    def _make(session: Session, paths: Sequence[str], deadline: float) -> None:
        for path in paths:
            session.collect([session.client.ensure_path_async(path)], deadline)


def _stats(results: Sequence[Any]) -> list[Any] | None:
    """The stats of the buckets; None if another client has interfered."""
    errors = [result for result in results if isinstance(result, kazoo_errors.KazooException)]
    for error in errors:
        if not isinstance(error, _INTERFERENCE):
            raise StoreError(f"the store refuses: {error!r}") from error
    return None if errors else [r for r in results if hasattr(r, "mzxid")]
