"""Leases in an etcd cluster: one key per lease, one transaction per operation.

Overview
    Each operation is one transaction that compares the revisions of all keys that it depends on.
    If another client has changed one of them, the operation is decided again, a bounded number of
    times. Renewing N leases takes one keepalive per ttl, and one read per 60 leases that finds out
    which tokens still hold their keys.

Guarantees
    Operations are atomic and linearizable. What a majority has acknowledged survives the loss of a
    minority of members, including the leader. The fence of a grant is the revision of its
    transaction, which strictly rises over the whole cluster.

Non-guarantees
    Availability without a majority: nothing is granted then, and a holder stops at its deadline.
    Expiry to the second: etcd leases last whole seconds, two at least, and a new leader gives each
    of them its full ttl again. So the key of a dead holder is free within its ttl rounded up plus
    about half a second, or within a ttl after an election. The holder's own deadline is earlier:
    it trusts a grant for five sixths of the ttl (see leases.py).

State model
    The keys that this process has bound, or may have bound, to an etcd lease that it keeps alive
    are noted in ``_own`` until their ttl is over. The note of an acknowledged write also says what
    the key contains, so that the release that follows needs no read.

Failure handling
    If a member refuses connections, the same request goes on to the next member. A missing reply
    means that the outcome is unknown: StoreUnavailable, and the next request starts with the next
    member. Keys that may have been written without a reply, or that are no longer renewed, are
    deleted by token or task when their ttl is over; otherwise the keepalives for other leases would
    preserve them. If this process ends first, its etcd lease expires with all its keys.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.core.lease import Lease, Record
from celery_singleton_lock.core.store import RENEWED, Capabilities, Renewal
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.etcd.gateway import OPTIONS, Gateway, LeaseGone
from celery_singleton_lock.stores.etcd.keys import EtcdKeys, Seen
from celery_singleton_lock.stores.etcd.leases import TRUSTED, EtcdLeases
from celery_singleton_lock.stores.transitions import operations
from celery_singleton_lock.stores.transitions.entries import Entry
from celery_singleton_lock.stores.transitions.own_keys import Name, OwnKeys
from celery_singleton_lock.stores.transitions.store import OPERATOR_TIMEOUT, TransitionStore
from celery_singleton_lock.stores.transitions.transition import Draft, Transition
from celery_singleton_lock.stores.urls import ClusterUrl

Reply = TypeVar("Reply")

_PORT: Final = 2379
# etcd's default of max-txn-ops is 128.
_MAX_OPERATIONS: Final = 120
# An operation with this many slots, a marker and a claim fits into one transaction.
_MAX_LIMIT: Final = 100
# Each attempt that fails means that another client's transaction has succeeded.
_MAX_ATTEMPTS: Final = 50


@dataclass(slots=True, eq=False)
class _Own:
    """A note on a key that this process has bound, or may have bound, to an etcd lease.

    Attributes:
        until: The end of the key's ttl, on the clock, unless the key is renewed.
        lease_id: The etcd lease.
        seen: The content of the key; None until the write is acknowledged.
    """

    until: float
    lease_id: int
    seen: Seen | None = None


class EtcdStore(TransitionStore):
    """A store in an etcd cluster.

    Args:
        url: ``etcd://host:2379,host:2379/prefix``; ``etcds://`` with TLS. Its query may contain
            ``ca``, ``cert`` and ``key`` (files) and ``api_path``.
        clock: The clock of the deadlines.
        fence_base: Fences are above this number.
        options: Further options, as in the query.

    Raises:
        SettingsError: The URL can't be read.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        fence_base: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        parsed = ClusterUrl.parse(url, port=_PORT, known=OPTIONS, options=options)
        self._clock = clock or SystemClock()
        self._gateway = Gateway(parsed, self._clock)
        self._prefix = f"{parsed.path}/" if parsed.path else ""
        self._fence_base = fence_base
        self._start()

    def _start(self) -> None:
        # Called in each process: a fork must not expire the keys that its parent keeps alive.
        self._process = os.getpid()
        self._own: OwnKeys[_Own] = OwnKeys()
        self._leases = EtcdLeases(self._gateway, self._clock)
        self._keys = EtcdKeys(
            self._gateway, self._leases, prefix=self._prefix, fence_base=self._fence_base
        )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            fence=True,
            name="etcd",
            trusted=TRUSTED,
            min_ttl=1.0,
            max_limit=_MAX_LIMIT,
            renews_for_others=True,
        )

    def renew(self, leases: Sequence[Lease], /, *, timeout: float = 0) -> list[Renewal]:
        if self._process != os.getpid():
            self._start()
        deadline = self._clock.now() + timeout
        known = [self._own.all.get((lease.key, str(lease.token))) for lease in leases]
        alive: set[int] = set()
        for lease_id in {own.lease_id for own in known if own}:
            self._keep_alive(lease_id, alive, deadline)
        replies: list[Renewal] = []
        try:
            for chunk in _chunks(leases, _MAX_OPERATIONS // 2):
                replies += self._renew(chunk, alive, deadline)
        finally:
            # These leases are held by other processes, which may renew them later without this
            # process.
            for lease in leases:
                if lease.process != self._process:
                    self._own.forget((lease.key, str(lease.token)))
                    self._own.forget((lease.claim_key, lease.token.task))
        self._expire_overdue(deadline)
        return replies

    def last_runs(self, keys: Sequence[str], /, *, timeout: float = 0) -> list[str | None]:
        deadline, found = self._clock.now() + timeout, []
        for chunk in _chunks(keys, _MAX_OPERATIONS):
            found += super().last_runs(chunk, timeout=self._left(deadline))
        return found

    def scan(self, pattern: str, /) -> Iterator[Record]:
        literal = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
        for key, seen in self._keys.pages(literal, lambda: self._clock.now() + OPERATOR_TIMEOUT):
            record = seen.entry.record(key) if seen.entry else None
            if record is not None and fnmatch.fnmatchcase(key, pattern):
                yield record

    def close(self) -> None:
        """Close the connections. A lease that was not released expires at the end of its ttl."""
        self._gateway.close()

    # --- one transition, one transaction ---------------------------------------------------------

    def transact(self, transition: Transition[Reply], timeout: float) -> tuple[Reply, int]:
        if self._process != os.getpid():
            self._start()
        deadline = self._clock.now() + timeout
        # Assume that own keys are as they were written, and that all other keys are free. If the
        # assumption holds, the transaction that proves it also does the work, and no read is
        # needed.
        view = {key: self._expected(key) for key in transition.keys}
        was_read = False
        for _ in range(_MAX_ATTEMPTS):
            draft = _draft(view)
            reply = transition.decide(draft)
            if was_read and not draft.changes:
                return reply, 0
            try:
                number, view = self._write(view, draft.changes, deadline)
            except LeaseGone:
                self._leases.forget()
                continue
            if number:
                return reply, number
            was_read = True
            if self._clock.now() >= deadline:
                break
        raise StoreUnavailable(
            f"other clients kept changing {transition.keys[0]!r} for {timeout:g} s"
        )

    def _expected(self, key: str) -> Seen:
        own = self._own.written(key)
        return own.seen if own and own.seen else Seen()

    def _write(
        self, view: Mapping[str, Seen], changes: Mapping[str, Entry | None], deadline: float
    ) -> tuple[int, dict[str, Seen]]:
        """Write ``changes`` if all keys are as in ``view``.

        Returns:
            The number of the write; or 0 and the current content of the keys.
        """
        notes, puts = self._bind(changes, deadline)
        # The notes are added before the request is sent: from here on, a thread will expire the
        # keys.
        before = self._own.add(notes)
        revision, found = self._keys.write(view, changes, puts, deadline)
        if not revision:
            self._own.restore(notes, before)
            return 0, found
        number = self._fence_base + revision
        for key, entry in changes.items():
            old = view[key].entry
            if old is not None and (key, old.owner) not in notes:
                self._own.forget((key, old.owner))
            if entry is not None and entry.renewed:
                own = notes[key, entry.owner]
                own.seen = Seen(entry.numbered(number), revision, own.lease_id)
                self._own.acknowledge((key, entry.owner))
        return number, {}

    def _bind(
        self, changes: Mapping[str, Entry | None], deadline: float
    ) -> tuple[dict[Name, _Own], list[dict[str, Any]]]:
        """Bind each new entry to an etcd lease; return the notes and the puts."""
        notes: dict[Name, _Own] = {}
        puts: list[dict[str, Any]] = []
        for key, entry in changes.items():
            if entry is None:
                continue
            if entry.renewed:
                lease, was_prolonged = self._leases.renewed(entry.ttl, deadline)
                if was_prolonged:
                    self._expire_overdue(deadline)
                notes[key, entry.owner] = _Own(self._clock.now() + entry.ttl, lease.id)
            else:
                lease = self._leases.expiring(entry.ttl, deadline)
            slack = lease.ends_at - self._clock.now() - entry.ttl
            puts.append(self._keys.put(key, entry, lease.id, slack))
        return notes, puts

    # --- the heartbeat ---------------------------------------------------------------------------

    def _renew(self, leases: Sequence[Lease], alive: set[int], deadline: float) -> list[Renewal]:
        """Renew leases by keepalives. Write a key only if its etcd lease has to change."""
        transition = operations.renew(leases)
        view = self._keys.read(transition.keys, deadline)
        draft = _draft(view)
        replies = transition.decide(draft)
        moves: dict[str, Entry | None] = {}
        for lease, reply in zip(leases, replies, strict=True):
            owners = {lease.key: str(lease.token), lease.claim_key: lease.token.task}
            if reply is not RENEWED:
                owners.pop(lease.claim_key)  # The request that ended the lease has set its ttl.
            for key, owner in owners.items():
                seen, change = view.get(key, Seen()), draft.changes.get(key)
                entry = seen.entry
                if entry is None or entry.owner != owner:
                    continue
                is_alive = entry.renewed and (change is None or entry.has_ttl(change.ttl))
                if is_alive:
                    if own := self._own.all.get((key, owner)):
                        own.until = self._clock.now() + entry.ttl
                    is_alive = self._keep_alive(seen.lease_id, alive, deadline)
                if change is not None and not is_alive:
                    moves[key] = change
        if self._move(view, moves, deadline):
            return replies
        return [
            self.transact(operations.renew([lease]), self._left(deadline))[0][0] for lease in leases
        ]

    def _move(
        self, view: Mapping[str, Seen], moves: Mapping[str, Entry | None], deadline: float
    ) -> bool:
        """Bind keys to other etcd leases; False if another client has changed a key meanwhile."""
        for keys in _chunks(list(moves), _MAX_OPERATIONS // 2):
            changes = {key: moves[key] for key in keys}
            try:
                if not self._write({key: view[key] for key in keys}, changes, deadline)[0]:
                    return False
            except LeaseGone:
                self._leases.forget()
                return False
        return True

    def _keep_alive(self, lease_id: int, alive: set[int], deadline: float) -> bool:
        """Keep an etcd lease of any process alive, once per renewal; whether it still exists."""
        if lease_id not in alive and self._leases.keep_alive(lease_id, deadline):
            alive.add(lease_id)
        return lease_id in alive

    def _expire_overdue(self, deadline: float) -> None:
        """Delete own keys whose ttl is over while their etcd lease is kept alive for other keys."""
        now = self._clock.now()
        notes = list(self._own.all.items())
        overdue = [(name, own) for name, own in notes if now >= own.until]
        # This includes etcd leases to which no new keys are bound.
        alive = {own.lease_id for _, own in notes if now < own.until} if overdue else set()
        for name, own in overdue:
            try:
                if own.lease_id in alive or self._leases.is_renewed(own.lease_id):
                    self.transact(operations.expire(*name), self._left(deadline))
            except StoreError:
                return  # The next heartbeat tries again.
            if self._own.all.get(name) is own:
                self._own.forget(name)

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - self._clock.now())


def _draft(view: Mapping[str, Seen]) -> Draft:
    return Draft({key: seen.entry for key, seen in view.items() if seen.entry})


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
