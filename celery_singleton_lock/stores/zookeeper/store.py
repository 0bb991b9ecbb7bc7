"""Leases in a ZooKeeper ensemble: one ephemeral node per lease, one transaction per operation.

Overview
    Each operation is one transaction (``multi``) that compares the versions of all buckets that it
    depends on (see ensemble.py). If another client has changed one of them, the operation is
    decided again, within its timeout. A key that is probably free isn't read first: the transaction
    proves that it is. Renewing N leases takes one write per ttl, which proves to the leader that
    the session is alive, and N reads that are sent together with it.

Guarantees
    Operations are atomic and linearizable. What a majority has acknowledged survives the loss of a
    minority of members, including the leader. The fence of a grant is the zxid of its transaction
    (the node's czxid), which strictly rises over the whole ensemble.

Non-guarantees
    Availability without a majority: nothing is granted then, and a holder stops at its deadline.
    Timely notice of a lost session: in a partition the server deleted the node after 2.0 s, and its
    client was notified after 5.5 s. The local deadline trusts a grant for half of the session's
    timeout: a member forwards a session's heartbeats every half tick, so the leader may count from
    the heartbeat before the last.
    Expiry to the millisecond: the server rounds the end of a session up to its next tick, and a new
    leader gives each session its full timeout again.
    A ttl that the server doesn't allow: by default, sessions last 4 s at least (the key of a dead
    holder is free that much later) and 40 s at most (a longer lease is shortened).
    Greenlets: a busy greenlet would starve kazoo's heartbeat, so gevent and eventlet are refused.

State model
    The nodes that this process has created, or may have created, in its sessions are noted in
    ``_own`` until their ttl is over. The note of an acknowledged write also says what the keys of
    the operation contain, so that the release that follows needs no read.

Failure handling
    When a connection breaks, kazoo connects to another member and keeps its session. A missing
    reply means that the outcome is unknown: StoreUnavailable. kazoo keeps a session alive by
    itself, so the janitor thread deletes a lease that is no longer renewed, by its token, when its
    ttl is over. Other nodes expire by the ttl in their text. A process deletes those that it reads,
    and its janitor sweeps a bucket after as many writes as the last bucket had nodes.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeVar
from urllib.parse import unquote

from celery_singleton_lock.core import native
from celery_singleton_lock.core.lease import Lease, Record
from celery_singleton_lock.core.store import (
    RENEWED,
    Acquire,
    Capabilities,
    Granted,
    Refused,
    Renewal,
)
from celery_singleton_lock.errors import SettingsError, StoreUnavailable
from celery_singleton_lock.stores.consensus import ConsensusStore, Name, OwnKeys
from celery_singleton_lock.stores.transitions import (
    OPERATOR_TIMEOUT,
    Changes,
    Draft,
    Entry,
    Transition,
    renewal,
)
from celery_singleton_lock.stores.zookeeper.ensemble import Ensemble, Layout, Seen, Versions, View
from celery_singleton_lock.stores.zookeeper.janitor import Janitor, Own
from celery_singleton_lock.stores.zookeeper.sessions import OPTIONS, Sessions

Reply = TypeVar("Reply")

_DEFAULT_ROOT: Final = "celery-singleton-lock"
_TRUSTED: Final = 0.5
# The default limit of a request is one megabyte. A slot takes about a hundred bytes.
_MAX_LIMIT: Final = 1000
# Each attempt that fails means that another client's transaction has succeeded.
_MAX_ATTEMPTS: Final = 100
_CHUNK: Final = 250
# The number of remembered keys that this process found taken. It suffices for the keys that are
# contended at one time. A forgotten key costs one write that fails.
_MAX_TAKEN: Final = 1000


class ZooKeeperStore(ConsensusStore):
    """A store in a ZooKeeper ensemble.

    Its URL is ``zk://host:2181,host:2181/path``; ``zks://`` with TLS. Its login is of the digest
    scheme. The query may contain ``ca``, ``cert`` and ``key``.

    Raises:
        SettingsError: The URL can't be read, or this process runs greenlets.
    """

    port = 2181
    options = OPTIONS

    def _start(self) -> None:
        # A fork has neither the sessions nor the threads of its parent.
        if native.is_patched():
            raise SettingsError(
                "the ZooKeeper store doesn't work with gevent or eventlet: a busy greenlet would "
                "stop the heartbeat of its client. Use the prefork, threads or solo pool, or "
                "another store"
            )
        super()._start()
        self._own: OwnKeys[Own] = OwnKeys()
        self._janitor = Janitor(self._own, self._clock, self._expire_late, self._sweep)
        sessions = Sessions(
            self.url,
            self._clock,
            lambda session: any(own.session is session for own in list(self._own.all.values())),
        )
        layout = Layout(f"/{self.url.path or _DEFAULT_ROOT}")
        self._ensemble = Ensemble(sessions, layout, self._clock, self._fence_base)
        self._taken: set[str] = set()
        #: The paths of all buckets, for operators.
        self.buckets = layout.all_buckets

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            fence=True, name="zookeeper", trusted=_TRUSTED, min_ttl=1.0, max_limit=_MAX_LIMIT
        )

    def acquire(self, request: Acquire, /, *, timeout: float = 0) -> Granted | Refused:
        reply = super().acquire(request, timeout=timeout)
        if isinstance(reply, Granted):
            own = self._own.all.get((reply.key, str(request.token)))
            if own is not None and own.ttl < request.ttl:
                return replace(reply, ttl=own.ttl)
        return reply

    def renew(self, leases: Sequence[Lease], /, *, timeout: float = 0) -> list[Renewal]:
        deadline = self._deadline(timeout)
        replies: list[Renewal] = []
        for start in range(0, len(leases), _CHUNK):
            chunk = leases[start : start + _CHUNK]
            own = [self._own_of(lease) for lease in chunk]
            sessions = {one.session for notes in own for one in notes}
            # If a session has ended meanwhile, its nodes are gone, and the reads show it.
            self._ensemble.prove_alive(sessions, deadline)
            found = self.transact(renewal(chunk), self._left(deadline), renews=True)[0]
            for notes, reply in zip(own, found, strict=True):
                for one in notes if reply is RENEWED else ():
                    one.until = self._clock.now() + one.ttl
            replies += found
        return replies

    def scan(self, pattern: str, /) -> Iterator[Record]:
        deadline = self._deadline(OPERATOR_TIMEOUT)
        session = self._ensemble.sessions.common(deadline)
        # A write instead of a sync, because the server's time is needed too.
        self._ensemble.prove_alive({session}, deadline)
        records: list[Record] = []
        lists = [session.client.get_children_async(path) for path in self.buckets]
        for names in session.collect(lists, deadline):
            keys = [key for key in map(unquote, names or ()) if fnmatch.fnmatchcase(key, pattern)]
            view, _ = self._ensemble.read(keys, self._deadline(OPERATOR_TIMEOUT))
            found = (seen.entry.record(key) for key, seen in view.items() if seen.entry)
            records += filter(None, found)
        return iter(sorted(records, key=lambda record: record.key))

    def close(self) -> None:
        """End the sessions, and with them all leases of this process."""
        self._janitor.close()
        self._ensemble.sessions.close()

    # --- one transition, one transaction ---------------------------------------------------------

    def transact(
        self, transition: Transition[Reply], timeout: float, *, renews: bool = False
    ) -> tuple[Reply, int]:
        deadline = self._deadline(timeout)
        assumed = self._expected(transition)
        for _ in range(_MAX_ATTEMPTS):
            view, versions = assumed or self._read(transition, deadline)
            draft = Draft({key: seen.entry for key, seen in view.items() if seen.entry})
            reply = transition.decide(draft)
            changes = {
                key: entry
                for key, entry in draft.changes.items()
                if not (renews and _lives_on(view[key].entry, entry))
            }
            if assumed and not _replaces_all(view, changes):
                assumed = None  # The end of a session changes no bucket's version.
                continue
            if not changes:
                return reply, 0
            # Keys that the decision doesn't depend on may change meanwhile.
            view = {key: view[key] for key in view if key in draft.read}
            if number := self._commit(view, versions, changes, deadline):
                return reply, number
            assumed = None
            if self._clock.now() >= deadline:
                break
        raise StoreUnavailable(f"other clients kept changing keys beside {transition.keys[0]!r}")

    def _expected(self, transition: Transition[Reply]) -> tuple[View, Versions] | None:
        """The probable content of the keys; None if they have to be read first.

        The assumption is that nothing has changed since this process wrote one of the keys, or that
        none of them exists. The transaction that proves the assumption also does the work. A wrong
        assumption that a key is free costs a round trip, so a key that was found taken is read
        first the next time.
        """
        keys = transition.keys
        for own in filter(None, map(self._own.written, keys)):
            view, versions = own.expected or ({}, {})
            if all(key in view and _is_lasting(view[key]) for key in keys):
                return {key: view[key] for key in keys}, versions
        if transition.likely_free and transition.likely_free not in self._taken:
            return {key: Seen() for key in keys}, {}
        return None

    def _read(self, transition: Transition[Reply], deadline: float) -> tuple[View, Versions]:
        view, versions = self._ensemble.read(transition.keys, deadline)
        key = transition.likely_free
        if key and view[key].entry is None:
            self._taken.discard(key)
        elif key:
            if len(self._taken) >= _MAX_TAKEN:
                self._taken.clear()
            self._taken.add(key)
        return view, versions

    def _commit(self, view: View, versions: Versions, changes: Changes, deadline: float) -> int:
        """Write ``changes`` if no bucket has changed; the number of the write, or 0."""
        sessions = self._ensemble.sessions
        ttls = [entry.ttl for entry in changes.values() if entry is not None and entry.renewed]
        session = sessions.of_ttl(max(ttls), deadline) if ttls else sessions.common(deadline)
        buckets = self._ensemble.layout.buckets(view)
        versions = {bucket: number for bucket, number in versions.items() if bucket in buckets}
        notes: dict[Name, Own] = {}
        for key, entry in changes.items():
            if entry is not None and entry.renewed:
                ttl = min(entry.ttl, session.timeout)
                notes[key, entry.owner] = Own(ttl, self._clock.now() + ttl, session)
        # The notes are added before the request is sent: from here on, the janitor will expire the
        # nodes.
        before = self._own.add(notes)
        if notes:
            self._janitor.wake()
        stats = self._ensemble.commit(session, view, versions, changes, deadline)
        if stats is None:
            self._own.restore(notes, before)
            return 0
        # Note the content of the keys after the write, for the release that follows.
        number = self._fence_base + int(stats[0].mzxid)
        changed = self._ensemble.layout.buckets(changes)
        after = {**versions, **{b: s.version for b, s in zip(changed, stats, strict=True)}}
        written = {
            key: Seen(entry.numbered(number) if entry else None, entry is not None)
            for key, entry in changes.items()
        }
        for own in notes.values():
            own.expected = ({**view, **written}, after)
        self._own.acknowledge(notes, {key: view[key].entry for key in changes})
        self._janitor.count(sum(bool(entry and not entry.renewed) for entry in changes.values()))
        return number

    def _own_of(self, lease: Lease) -> list[Own]:
        names = (lease.key, str(lease.token)), (lease.claim_key, lease.token.task)
        return [own for name in names if (own := self._own.all.get(name)) is not None]

    # --- what the janitor does -------------------------------------------------------------------

    def _expire_late(self, name: Name) -> None:
        own = self._own.all.get(name)
        if own is not None and own.expected is None and not own.session.is_over:
            # The node's session may still have the write in its queue, and the read below is sent
            # in another session. When this later write has arrived, the earlier one has arrived
            # too.
            self._ensemble.prove_alive({own.session}, self._deadline(OPERATOR_TIMEOUT))
        self._expire(name, OPERATOR_TIMEOUT)

    def _sweep(self, number: int) -> int:
        """Delete the expired nodes of a bucket; return the number of nodes that it had."""
        deadline = self._clock.now() + 5 * OPERATOR_TIMEOUT
        session = self._ensemble.sessions.common(deadline)
        request = session.client.get_children_async(self.buckets[number])
        names = session.collect([request], deadline)[0] or []
        for start in range(0, len(names), _CHUNK):
            keys = [unquote(name) for name in names[start : start + _CHUNK]]
            view, versions = self._ensemble.read(keys, deadline)
            expired = {key: None for key in keys if view[key].exists and view[key].entry is None}
            if expired:
                self._commit(view, versions, expired, deadline)
        return len(names)


def _is_lasting(seen: Seen) -> bool:
    """Whether the content of a key does not change with time."""
    return seen.entry is None or seen.entry.renewed


def _replaces_all(view: View, changes: Changes) -> bool:
    """Whether the write fails if one of the nodes has ended with its session."""
    renewed = [key for key, seen in view.items() if seen.entry and seen.entry.renewed]
    return bool(changes) and all(key in changes for key in renewed)


def _lives_on(found: Entry | None, new: Entry | None) -> bool:
    """Whether a renewal needs no write: the node lives with its session and has the same ttl."""
    return bool(
        found and new and found.renewed and found.value == new.value and found.has_ttl(new.ttl)
    )
