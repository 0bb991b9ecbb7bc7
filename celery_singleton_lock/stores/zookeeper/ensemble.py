"""Reads and writes of ZooKeeper nodes: snapshots of keys, and writes if a snapshot still holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kazoo.exceptions import (
    BadVersionError,
    KazooException,
    NodeExistsError,
    NoNodeError,
    RolledBackError,
    RuntimeInconsistency,
)

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.transitions.entries import Entry, format_value
from celery_singleton_lock.stores.zookeeper.sessions import Session, Sessions
from celery_singleton_lock.stores.zookeeper.znodes import Layout, Seen, ServerTime

#: The content of each key, and the versions of the buckets that were read. A key in a bucket
#: without a version was not read, but is assumed to have no node.
View = dict[str, Seen]
Versions = dict[str, int]

_MIN_TTL: Final = 0.001
_ANY_VERSION: Final = -1
_INTERFERENCE: Final = (
    BadVersionError,
    NodeExistsError,
    NoNodeError,
    RolledBackError,
    RuntimeInconsistency,
)


class Ensemble:
    """The nodes below ``layout``, through the sessions of this process.

    Every method may raise StoreUnavailable and StoreError.
    """

    def __init__(self, sessions: Sessions, layout: Layout, clock: Clock) -> None:
        self.sessions = sessions
        self.layout = layout
        self._clock = clock
        self._server_time = ServerTime()

    def read(self, keys: Sequence[str], deadline: float) -> tuple[View, Versions]:
        """A snapshot of all keys, and the versions of their buckets."""
        session = self.sessions.common(deadline)
        client, buckets = session.client, self.layout.buckets(keys)
        while True:
            # All requests are sent together. The sync lets this member catch up with the leader.
            requests = [client.sync_async(self.layout.root)]
            requests += [client.exists_async(bucket) for bucket in buckets]
            requests += [client.get_async(self.layout.path(key)) for key in keys]
            requests += [client.exists_async(bucket) for bucket in buckets]
            replies = session.collect(requests, deadline)[1:]
            before, nodes = replies[: len(buckets)], replies[len(buckets) : -len(buckets)]
            after = replies[-len(buckets) :]
            if None in before:
                self._make(session, buckets, deadline)
            elif [stat.version for stat in before] == [stat.version for stat in after]:
                now = self._server_now(session, nodes, deadline)
                seen = [self.layout.seen(node, now) for node in nodes]
                versions = {b: stat.version for b, stat in zip(buckets, before, strict=True)}
                return dict(zip(keys, seen, strict=True)), versions
            if self._clock.now() >= deadline:
                raise StoreUnavailable(f"other clients kept changing keys beside {keys[0]!r}")

    def commit(
        self,
        session: Session,
        view: View,
        versions: Versions,
        changes: Mapping[str, Entry | None],
        deadline: float,
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
        changed = self.layout.buckets(changes)
        for bucket in changed:
            transaction.set_data(bucket, b"", versions.get(bucket, _ANY_VERSION))
        for bucket, version in versions.items():
            if bucket not in changed:
                transaction.check(bucket, version)
        for key in view:
            if changes.get(key) is None and self.layout.bucket(key) not in versions:
                transaction.create(self.layout.path(key))
                transaction.delete(self.layout.path(key))
        for key, entry in changes.items():
            path = self.layout.path(key)
            if view[key].exists:
                transaction.delete(path)
            if entry is not None:
                ttl = max(entry.ttl, _MIN_TTL)
                ttl = min(ttl, session.timeout) if entry.renewed else ttl
                text = f"{'k' if entry.renewed else 'p'}{ttl:.3f} {format_value(entry.value)}"
                transaction.create(path, text.encode(), ephemeral=entry.renewed)
        results = session.collect([transaction.commit_async()], deadline)[0]
        stats = _stats(results)
        if stats:
            self._server_time.note(stats[0], self._clock.now())
        return stats

    def prove_alive(self, sessions: Iterable[Session], deadline: float) -> None:
        """Write in each session. A member without a leader could answer a read."""
        sent = [(s, s.client.set_async(self.layout.clock, b"")) for s in sessions]
        for session, request in sent:
            stat = session.collect([request], deadline)[0]
            if stat is None:  # The node doesn't exist yet.
                self._make(session, [self.layout.clock], deadline)
                again = session.client.set_async(self.layout.clock, b"")
                stat = session.collect([again], deadline)[0]
            if stat is not None:
                self._server_time.note(stat, self._clock.now())

    def _server_now(self, session: Session, nodes: Sequence[Any], deadline: float) -> float | None:
        """The server's time, if a node's expiry depends on it."""
        if not any(node is not None and node[0][:1] == b"p" for node in nodes):
            return None
        if self._server_time.at(self._clock.now()) is None:
            self.prove_alive([session], deadline)
        return self._server_time.at(self._clock.now())

    @staticmethod
    def _make(session: Session, paths: Sequence[str], deadline: float) -> None:
        for path in paths:
            session.collect([session.client.ensure_path_async(path)], deadline)


def _stats(results: Sequence[Any]) -> list[Any] | None:
    """The stats of the buckets; None if another client has interfered."""
    errors = [result for result in results if isinstance(result, KazooException)]
    for error in errors:
        if not isinstance(error, _INTERFERENCE):
            raise StoreError(f"the store refuses: {error!r}") from error
    return None if errors else [r for r in results if hasattr(r, "mzxid")]
