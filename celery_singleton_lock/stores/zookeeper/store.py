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
    reply means that the outcome is unknown: StoreUnavailable.
    kazoo keeps a session alive by itself, and with it a lease that is no longer renewed
    (``max_hold`` is reached, its release failed, or the reply to its acquire was lost). So a
    thread, the janitor, deletes such a lease by its token when its ttl is over. The thread starts
    with the first own key.
    Other nodes expire by the ttl in their text. A process deletes those that it reads. Its janitor
    also sweeps a random bucket once per as many writes as the last bucket had nodes. So each write
    costs about one read, and there are at most about as many expired nodes as living ones.
"""

from __future__ import annotations

import fnmatch
import logging
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from ...core import native_threads, observers
from ...core.lease import Lease, Token
from ...core.process import this_process
from ...core.store import Capabilities
from ...core.store_requests import RENEWED, Acquire, Granted, Refused, Renewal
from ...errors import SettingsError, StoreError, StoreUnavailable
from ..consensus import ConsensusStore, Name, OwnKeys
from ..transitions import (
    OPERATOR_TIMEOUT,
    Changes,
    Draft,
    Entry,
    Transition,
    TransitionLeases,
    renewal,
)
from .ensemble import Ensemble, SeenNode, Versions, View
from .sessions import OPTIONS, Session

Reply = TypeVar("Reply")

logger = logging.getLogger("celery_singleton_lock")

_TRUSTED: Final = 0.5
# The default limit of a request is one megabyte. A slot takes about a hundred bytes.
_MAX_LIMIT: Final = 1000
_CHUNK: Final = 250
# The number of remembered keys that this process found taken. It suffices for the keys that are
# contended at one time. A forgotten key costs one write that fails.
_MAX_TAKEN: Final = 1000
# The minimum of new nodes between two sweeps of the janitor.
_MIN_WRITES: Final = 64
# The janitor's pauses, in seconds; the first one while the store doesn't answer.
_RETRY_PAUSE: Final = 1.0
_MIN_PAUSE: Final = 0.05
_MAX_PAUSE: Final = 3600.0


@dataclass(slots=True, eq=False)
class Own:
    """A note on a node that this process has created, or may have created, in one of its sessions.

    Attributes:
        until: The end of the ttl, on the clock, unless the node is renewed.
        session: The session of the node.
        expected: The content of the operation's keys after the write, and the versions of their
            buckets. None until the write is acknowledged.
    """

    until: float
    session: Session
    expected: tuple[View, Versions] | None = None


class ZooKeeperLeases(TransitionLeases):
    """The leases, whose ttl is at most the timeout that the server gave to their session."""

    _store: ZooKeeperStore

    def acquire(self, request: Acquire, /, *, timeout: float = 0) -> Granted | Refused:
        reply = super().acquire(request, timeout=timeout)
        if isinstance(reply, Granted):
            longest = self._store.session_timeout_of(reply.key, request.token)
            return replace(reply, ttl=longest) if longest < request.ttl else reply
        return reply


class ZooKeeperStore(ConsensusStore):
    """A store in a ZooKeeper ensemble.

    Its URL is ``zk://host:2181,host:2181/path``; ``zks://`` with TLS. Its login is of the digest
    scheme. The query may contain ``ca``, ``cert`` and ``key``.

    Raises:
        SettingsError: The URL can't be read, or this process runs greenlets.
    """

    port = 2181
    options = OPTIONS
    capabilities = Capabilities(
        fence=True,
        name="zookeeper",
        trusted=_TRUSTED,
        min_ttl=1.0,
        max_limit=_MAX_LIMIT,
        renewal_batch=_CHUNK,
    )

    def _start(self) -> None:
        # A fork has neither the sessions nor the threads of its parent.
        if native_threads.is_patched():
            raise SettingsError(
                "the ZooKeeper store doesn't work with gevent or eventlet: a busy greenlet would "
                "stop the heartbeat of its client. Use the prefork, threads or solo pool, or "
                "another store"
            )
        super()._start()
        self._own: OwnKeys[Own] = OwnKeys()
        self._taken: set[str] = set()
        self._ensemble = Ensemble(
            self.url,
            self._clock,
            self._fence_base,
            lambda session: any(own.session is session for own in list(self._own.all.values())),
        )
        #: The paths of all buckets, for operators.
        self.buckets = self._ensemble.all_buckets
        self._closed = False
        # New nodes since the last sweep that expire by the ttl in their text.
        self._unswept = 0
        self._writes_per_sweep = _MIN_WRITES
        self._alarm: Any = native_threads.allocate_lock()
        self._alarm.acquire()
        # Held by the janitor's thread, and never released.
        self._has_janitor: Any = native_threads.allocate_lock()

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.leases = ZooKeeperLeases(self)

    def session_timeout_of(self, key: str, token: Token) -> float:
        """Seconds for which the server keeps the lease that this process wrote; else infinity."""
        own = self._own.all.get((key, str(token)))
        return math.inf if own is None else own.session.timeout

    def renew(self, leases: Sequence[Lease], timeout: float) -> list[Renewal]:
        deadline = self._deadline(timeout)
        sessions = {own.session for lease in leases for own in self._own.of(lease)}
        # If a session has ended meanwhile, its nodes are gone, and the reads show it.
        self._ensemble.prove_alive(sessions, deadline)
        replies = self.transact(renewal(leases), self._left(deadline), renews=True)[0]
        for lease, reply in zip(leases, replies, strict=True):
            for own in self._own.of(lease) if reply is RENEWED else ():
                own.until = self._clock.now() + min(lease.ttl, own.session.timeout)
        return replies

    def entries(self, pattern: str, /) -> Iterator[tuple[str, Entry]]:
        deadline = self._deadline(OPERATOR_TIMEOUT)
        session = self._ensemble.session(deadline)
        # A write instead of a sync, because the server's time is needed too.
        self._ensemble.prove_alive({session}, deadline)
        entries: list[tuple[str, Entry]] = []
        lists = [session.client.get_children_async(path) for path in self.buckets]
        for names in session.collect(lists, deadline):
            keys = [key for key in map(unquote, names or ()) if fnmatch.fnmatchcase(key, pattern)]
            view, _ = self._ensemble.read(keys, self._deadline(OPERATOR_TIMEOUT))
            entries += [(key, seen.entry) for key, seen in view.items() if seen.entry]
        return iter(sorted(entries, key=lambda found: found[0]))

    def close(self) -> None:
        """End the sessions, and with them all leases of this process."""
        if self._process is this_process():  # else a fork has a copy of its parent's sessions
            self._closed = True
            self._wake_janitor()
            self._ensemble.close()

    # --- one transition, one transaction ---------------------------------------------------------

    def transact(
        self, transition: Transition[Reply], timeout: float, *, renews: bool = False
    ) -> tuple[Reply, int]:
        deadline = self._deadline(timeout)
        assumed = self._expected(transition)
        while True:
            view, versions = assumed or self._read(transition, deadline)
            draft = Draft({key: seen.entry for key, seen in view.items() if seen.entry})
            reply = transition.decide(draft)
            changes = {
                key: entry
                for key, entry in draft.changes.items()
                if not (renews and entry and _lives_on(view[key].entry, entry.ttl))
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
            if self._clock.now() >= deadline:
                raise StoreUnavailable(
                    f"other clients kept changing keys next to {transition.keys[0]!r}"
                )
            assumed = None

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
            return {key: SeenNode() for key in keys}, {}
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
        ttl = max((e.ttl for e in changes.values() if e is not None and e.renewed), default=0.0)
        with self._ensemble.using(ttl, deadline) as session:
            return self._commit_in(session, view, versions, changes, deadline)

    def _commit_in(
        self, session: Session, view: View, versions: Versions, changes: Changes, deadline: float
    ) -> int:
        buckets = self._ensemble.buckets(view)
        versions = {bucket: number for bucket, number in versions.items() if bucket in buckets}
        notes: dict[Name, Own] = {}
        for key, entry in changes.items():
            if entry is not None and entry.renewed:
                until = self._clock.now() + min(entry.ttl, session.timeout)
                notes[key, entry.owner] = Own(until, session)
        # The notes are added before the request is sent: from here on, the janitor will expire the
        # nodes.
        before = self._own.add(notes)
        if notes:
            self._wake_janitor()
        stats = self._ensemble.commit(session, view, versions, changes, deadline)
        if stats is None:
            self._own.restore(notes, before)
            return 0
        # Note the content of the keys after the write, for the release that follows.
        number = self._fence_base + int(stats[0].mzxid)
        changed = self._ensemble.buckets(changes)
        after = {**versions, **{b: s.version for b, s in zip(changed, stats, strict=True)}}
        written = {
            key: SeenNode(entry.numbered(number) if entry else None, entry is not None)
            for key, entry in changes.items()
        }
        for own in notes.values():
            own.expected = ({**view, **written}, after)
        self._own.acknowledge(notes, {key: view[key].entry for key in changes})
        self._unswept += sum(bool(entry and not entry.renewed) for entry in changes.values())
        if self._unswept >= self._writes_per_sweep:
            self._wake_janitor()
        return number

    # --- the janitor ------------------------------------------------------------------------------

    def _wake_janitor(self) -> None:
        """Wake the janitor's thread: own keys have changed, there is much to sweep, or it ends."""
        if not self._has_janitor.locked() and not self._closed:
            # The thread itself acquires the lock. If this method acquired it and the start failed
            # or was interrupted, all own keys would be without a janitor.
            native_threads.start_new_thread(self._run_janitor, "singleton-janitor")
        with suppress(RuntimeError):  # The thread hasn't handled the last alarm yet.
            self._alarm.release()

    # A log handler that blocks must not keep leases from ending.
    @observers.elsewhere()
    def _run_janitor(self) -> None:
        if not self._has_janitor.acquire(blocking=False):
            return  # Two threads were started by concurrent first writes.
        while not self._closed:
            pause = -1.0
            try:
                self._clean()
                if ends := [own.until for own in list(self._own.all.values())]:
                    pause = min(max(min(ends) - self._clock.now(), _MIN_PAUSE), _MAX_PAUSE)
            except StoreError:
                pause = _RETRY_PAUSE
            except Exception:
                logger.exception("singleton: the janitor of the lock store failed; it goes on")
                pause = _RETRY_PAUSE
            self._alarm.acquire(timeout=pause)

    def _clean(self) -> None:
        """Expire own keys, and sweep a bucket after enough writes."""
        now = self._clock.now()
        for name, own in list(self._own.all.items()):
            if now >= own.until:
                self._expire_late(name, own)
                if self._own.all.get(name) is own:
                    self._own.forget(name)
        if self._unswept >= self._writes_per_sweep:
            self._unswept = 0
            self._writes_per_sweep = max(_MIN_WRITES, self._sweep(random.choice(self.buckets)))

    def _expire_late(self, name: Name, own: Own) -> None:
        if own.expected is None and not own.session.is_over:
            # The node's session may still have the write in its queue, and the read below is sent
            # in another session. When this later write has arrived, the earlier one has arrived
            # too.
            self._ensemble.prove_alive({own.session}, self._deadline(OPERATOR_TIMEOUT))
        self._expire(name, OPERATOR_TIMEOUT)

    def _sweep(self, bucket: str) -> int:
        """Delete the expired nodes of ``bucket``; return the number of nodes that it had."""
        deadline = self._clock.now() + 5 * OPERATOR_TIMEOUT
        session = self._ensemble.session(deadline)
        names = session.collect([session.client.get_children_async(bucket)], deadline)[0] or []
        for start in range(0, len(names), _CHUNK):
            keys = [unquote(name) for name in names[start : start + _CHUNK]]
            view, versions = self._ensemble.read(keys, deadline)
            expired = {key: None for key in keys if view[key].exists and view[key].entry is None}
            if expired:
                self._commit(view, versions, expired, deadline)
        return len(names)


def _is_lasting(seen: SeenNode) -> bool:
    """Whether the content of a key does not change with time."""
    return seen.entry is None or seen.entry.renewed


def _replaces_all(view: View, changes: Changes) -> bool:
    """Whether the write fails if one of the nodes has ended with its session."""
    renewed = [key for key, seen in view.items() if seen.entry and seen.entry.renewed]
    return bool(changes) and all(key in changes for key in renewed)


def _lives_on(found: Entry | None, ttl: float) -> bool:
    """Whether a renewal needs no write: the node lives with its session and has the same ttl."""
    return bool(found and found.renewed and found.has_ttl(ttl))
