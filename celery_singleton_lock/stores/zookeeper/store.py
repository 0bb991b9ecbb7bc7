"""Leases in a ZooKeeper ensemble: an ephemeral node per lease, one transaction per operation.

Promises
    Each operation is one transaction (``multi``) that compares the versions of the buckets it was
    decided from (see znodes), so it happens wholly or not at all, and as if nothing else happened
    meanwhile; on interference it is decided anew, within its time. A key that is likely free isn't
    read before it is taken: the transaction proves the guess (see ensemble). What a majority has
    acknowledged survives the loss of members and of the leader. The fence of a grant is its
    transaction's zxid (the node's czxid): it rises over the whole ensemble, strictly. Renewing N
    leases is one write per ttl, which proves the session alive at the leader, and N reads sent
    together with it.

Does not promise
    Anything without a majority: then nothing is granted, and a holder stops at its deadline. It
    never waits to hear that a session is lost: in a partition the server dropped the node at 2.0 s,
    and the client heard of it at 5.5 s. The local deadline trusts a grant for half of the session:
    a member passes on what it hears from a session every half tick, so the leader may count from
    the sign of life before the last one. Expiry to the millisecond: the server rounds a session's
    end up to its next tick, and a new leader gives each session its full time again. A ttl that the
    server doesn't allow: by default it is at least 4 s (then a dead holder's key is free so much
    later) and at most 40 s (then the lease is one of 40 s). Greenlets: kazoo's heartbeat would
    starve beside them, so gevent and eventlet are refused.

Failure handling
    kazoo goes to another member when a connection breaks, and keeps its session. No answer means
    that nobody knows: StoreUnavailable. kazoo keeps a session alive by itself, so a lease that is
    renewed no more would stand as long as this process does: the janitor thread deletes it by its
    token when its ttl is over. Other nodes end by the time in their text, and are deleted by
    whoever writes much: after as many of them as a bucket holds, the janitor goes through a bucket.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from celery_singleton_lock.core import native
from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.core.lease import Lease, Record
from celery_singleton_lock.core.store import Acquire, Capabilities, Granted, Refused, Renewal
from celery_singleton_lock.errors import SettingsError, StoreUnavailable
from celery_singleton_lock.stores.endpoints import ClusterUrl
from celery_singleton_lock.stores.transitions import rules
from celery_singleton_lock.stores.transitions.entries import Entry
from celery_singleton_lock.stores.transitions.store import RuledStore
from celery_singleton_lock.stores.transitions.transition import Rule, numbered, same_ttl
from celery_singleton_lock.stores.zookeeper.ensemble import Ensemble, Versions, View
from celery_singleton_lock.stores.zookeeper.guesses import Guesses
from celery_singleton_lock.stores.zookeeper.janitor import Janitor, Kept, Watched
from celery_singleton_lock.stores.zookeeper.sessions import OPTIONS, Sessions
from celery_singleton_lock.stores.zookeeper.znodes import BUCKETS, Layout, Seen

__all__ = ["ZooKeeperStore"]

Reply = TypeVar("Reply")

_PORT: Final = 2181
_DEFAULT_ROOT: Final = "celery-singleton-lock"
_TRUSTED: Final = 0.5
# The default limit of a request is a megabyte, of which a slot takes a tenth of a thousandth.
_MAX_LIMIT: Final = 1000
# Each round that fails means that somebody else's has succeeded.
_MAX_ROUNDS: Final = 100
_RENEW_CHUNK: Final = 250
_OPERATOR_TIMEOUT: Final = 2.0


class ZooKeeperStore(RuledStore):
    """One ensemble, by URL: ``zk://host:2181,host:2181/path``; ``zks://`` with TLS.

    Args:
        url: Its login is of the digest scheme; its query may name ``ca``, ``cert`` and ``key``.
        clock: Of deadlines.
        fence_base: Fences are above it.
        options: As the query's.

    Raises:
        SettingsError: The URL can't be read, or this process runs greenlets.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        fence_base: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if native.is_patched():
            raise SettingsError(
                "the ZooKeeper store doesn't work with gevent or eventlet: a busy greenlet would "
                "stop the heartbeat of its client. Use the prefork, threads or solo pool, or "
                "another store"
            )
        parsed = ClusterUrl.parse(url, port=_PORT, known=OPTIONS, options=options)
        self._clock = clock or SystemClock()
        self._fence_base = fence_base
        self._url = parsed
        super().__init__()

    def _begin(self) -> None:
        """In this process: a fork has neither the sessions nor the threads of its parent."""
        super()._begin()
        self._janitor = Janitor(self._clock, self._expire, self._sweep)
        sessions = Sessions(self._url, self._clock, self._janitor.watches)
        layout = Layout(f"/{self._url.path or _DEFAULT_ROOT}", self._fence_base)
        self._ensemble = Ensemble(sessions, layout, self._clock)
        self._guesses = Guesses()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            fence=True, name="zookeeper", trusted=_TRUSTED, min_ttl=1.0, max_limit=_MAX_LIMIT
        )

    @property
    def buckets(self) -> list[str]:
        """The paths below which all keys are, for operators."""
        return [self._ensemble.layout.bucket_path(number) for number in range(BUCKETS)]

    def acquire(self, call: Acquire, *, timeout: float = 0) -> Granted | Refused:
        reply = super().acquire(call, timeout=timeout)
        if isinstance(reply, Granted):
            kept = self._janitor.kept.get((reply.key, str(call.token)))
            if kept is not None and kept.ttl < call.ttl:
                return replace(reply, ttl=kept.ttl)
        return reply

    def renew(self, leases: Sequence[Lease], *, timeout: float = 0) -> list[Renewal]:
        self._notice_fork()
        deadline = self._clock.now() + timeout
        replies: list[Renewal] = []
        for start in range(0, len(leases), _RENEW_CHUNK):
            chunk = leases[start : start + _RENEW_CHUNK]
            # A session that has ended meanwhile has no nodes any more, so the reads tell.
            self._ensemble.prove_alive({kept.session for kept in self._kept_of(chunk)}, deadline)
            left = deadline - self._clock.now()
            found = self._apply(rules.renew_all(chunk), left, renews=True)[0]
            for lease, reply in zip(chunk, found, strict=True):
                if reply is Renewal.RENEWED:
                    self._prolong(lease)
            replies += found
        return replies

    def scan(self, pattern: str) -> Iterator[Record]:
        return iter(sorted(self._scan(pattern), key=lambda record: record.key))

    def _scan(self, pattern: str) -> Iterator[Record]:
        deadline = self._clock.now() + _OPERATOR_TIMEOUT
        session = self._ensemble.sessions.common(deadline)
        # Written, not only synced: the time is needed too.
        self._ensemble.prove_alive({session}, deadline)
        lists = [session.client.get_children_async(path) for path in self.buckets]
        for names in session.collect(lists, deadline):
            keys = [self._ensemble.layout.key(name) for name in names or ()]
            keys = [key for key in keys if fnmatch.fnmatchcase(key, pattern)]
            view, _ = self._ensemble.read(keys, self._clock.now() + _OPERATOR_TIMEOUT)
            for key, seen in view.items():
                record = seen.entry.record(key) if seen.entry else None
                if record is not None:
                    yield record

    def close(self) -> None:
        """End the sessions, and with them every lease that this process has."""
        self._janitor.close()
        self._ensemble.sessions.close()

    # --- one rule, one transaction ---------------------------------------------------------------

    def _apply(
        self, rule: Rule[Reply], timeout: float, *, renews: bool = False
    ) -> tuple[Reply, int]:
        self._notice_fork()
        deadline = self._clock.now() + timeout
        expected = self._janitor.expected(rule.keys) or self._guess(rule)
        for _ in range(_MAX_ROUNDS):
            view, versions = expected or self._read(rule, deadline)
            outcome = rule.decide({key: seen.entry for key, seen in view.items() if seen.entry})
            changes = {
                key: entry
                for key, entry in outcome.changes.items()
                if renews is False or not _suffices(view[key].entry, entry)
            }
            if expected and not _replaces_all(view, changes):
                expected = None  # a session that ends changes no bucket's version
                continue
            if not changes:
                return outcome.reply, 0
            # What the rule didn't look at may change as it likes.
            view = {key: view[key] for key in view if key in outcome.seen}
            if number := self._commit(view, versions, changes, deadline):
                return outcome.reply, number
            expected = None
            if self._clock.now() >= deadline:
                break
        raise StoreUnavailable(f"others kept changing what is near {rule.keys[0]!r}")

    def _guess(self, rule: Rule[Reply]) -> tuple[View, Versions] | None:
        """What is likely, where it is likely enough: nothing stands anywhere.

        If that is so, the transaction that proves it has done the work too. If it isn't, that was a
        write in vain, before the read: so a key that was found taken is read first the next time.
        """
        if not rule.likely_free or not self._guesses.is_free(rule.likely_free):
            return None
        return {key: Seen() for key in rule.keys}, {}

    def _read(self, rule: Rule[Reply], deadline: float) -> tuple[View, Versions]:
        view, versions = self._ensemble.read(rule.keys, deadline)
        if rule.likely_free:
            self._guesses.learn(rule.likely_free, free=view[rule.likely_free].entry is None)
        return view, versions

    def _commit(
        self,
        view: View,
        versions: Versions,
        changes: Mapping[str, Entry | None],
        deadline: float,
    ) -> int:
        """Write ``changes`` if no bucket has changed; the write's number, 0 if one has."""
        session = self._ensemble.session_for(changes, deadline)
        buckets = self._ensemble.layout.buckets(view)
        versions = {bucket: versions[bucket] for bucket in buckets if bucket in versions}
        kept: Watched = {}
        for key, entry in changes.items():
            if entry is not None and entry.kept:
                ttl = min(entry.ttl, session.timeout)
                until = self._clock.now() + ttl
                kept[key, entry.name] = Kept(ttl, until, session)
        # Before it is sent: whatever happens from here on, somebody will see to their end.
        before = self._janitor.watch(kept)
        stats = self._ensemble.commit(session, view, versions, changes, deadline)
        if stats is None:
            self._janitor.restore(kept, before)
            return 0
        return self._note(view, versions, changes, kept, stats)

    def _note(
        self,
        view: View,
        versions: Versions,
        changes: Mapping[str, Entry | None],
        kept: Watched,
        stats: Sequence[Any],
    ) -> int:
        """Remember what was written, for the release that follows."""
        number = self._fence_base + int(stats[0].mzxid)
        now_there: View = {
            **view,
            **{
                key: Seen(numbered(entry, number) if entry else None, entry is not None)
                for key, entry in changes.items()
            },
        }
        changed = self._ensemble.layout.buckets(changes)
        after = {**versions, **{b: s.version for b, s in zip(changed, stats, strict=True)}}
        for key in changes:
            before = view[key].entry
            if before is not None and before.kept and (key, before.name) not in kept:
                self._janitor.forget(key, before.name)
        self._janitor.note(kept, now_there, after)
        self._janitor.count(sum(entry is not None and not entry.kept for entry in changes.values()))
        return number

    def _prolong(self, lease: Lease) -> None:
        """The janitor shall wait longer for a lease that was renewed, and for its claim."""
        for kept in self._kept_of([lease]):
            kept.until = self._clock.now() + kept.ttl

    def _kept_of(self, leases: Sequence[Lease]) -> list[Kept]:
        both = [
            what
            for lease in leases
            for what in ((lease.key, str(lease.token)), (lease.claim_key, lease.token.task))
        ]
        return [kept for what in both if (kept := self._janitor.kept.get(what)) is not None]

    # --- what the janitor does -------------------------------------------------------------------

    def _expire(self, key: str, name: str) -> None:
        kept = self._janitor.kept.get((key, name))
        if kept is not None and kept.expected is None and not kept.session.is_over:
            # Its session may have it in the queue still, and looking is another session's: once
            # this write has arrived, that one has, too.
            self._ensemble.prove_alive({kept.session}, self._clock.now() + _OPERATOR_TIMEOUT)
        self._apply(rules.expire(key, name), _OPERATOR_TIMEOUT)

    def _sweep(self, number: int) -> int:
        """Delete what has ended in one bucket; how many nodes were there."""
        deadline = self._clock.now() + 5 * _OPERATOR_TIMEOUT
        session = self._ensemble.sessions.common(deadline)
        path = self._ensemble.layout.bucket_path(number)
        names = session.collect([session.client.get_children_async(path)], deadline)[0] or []
        for start in range(0, len(names), _RENEW_CHUNK):
            keys = [self._ensemble.layout.key(name) for name in names[start : start + _RENEW_CHUNK]]
            view, versions = self._ensemble.read(keys, deadline)
            ended = {key: None for key in keys if view[key].exists and view[key].entry is None}
            if ended:
                self._commit(view, versions, ended, deadline)
        return len(names)


def _replaces_all(view: View, changes: Mapping[str, Entry | None]) -> bool:
    """Whether a write would fail if one of the nodes had gone with its session."""
    kept = [key for key, seen in view.items() if seen.entry and seen.entry.kept]
    return bool(changes) and all(key in changes for key in kept)


def _suffices(found: Entry | None, new: Entry | None) -> bool:
    """Whether a heartbeat needs no write, for the node lives with its session, and for as long."""
    if found is None or new is None:
        return False
    return found.kept and found.value == new.value and same_ttl(found.ttl, new.ttl)
