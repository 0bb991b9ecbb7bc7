"""Leases in an etcd cluster: a key per lease, one transaction per operation.

Promises
    Each operation is one transaction that compares the revisions of all keys it was decided from,
    so it happens wholly or not at all, and as if nothing else happened meanwhile; on interference
    it is decided anew, a bounded number of times. What a majority has acknowledged survives the
    loss of members and of the leader. The fence of a grant is the revision of its transaction: it
    rises over the whole cluster, strictly. Renewing N leases is one keepalive per ttl, and one read
    per 120 keys that finds out which tokens still stand.

Does not promise
    Anything without a majority: then nothing is granted, and a holder stops at its deadline. Expiry
    to the second: etcd's leases are of whole seconds, two at least, and a new leader gives each its
    full time again. So a dead holder's key is free within its ttl rounded up, about half a second
    later than that, or a ttl after the election. The local deadline is the shorter one: it trusts a
    grant for five sixths of the ttl (see etcd_leases).

Failure handling
    A member that refuses connections is passed over within the call. No answer at all means that
    nobody knows: StoreUnavailable, and the next call goes to the next member. What may have been
    written without an answer, or is renewed no more, is noted here and deleted by its token when
    its ttl is over; without that, the heartbeat of the other leases would keep it for ever. If this
    process ends first, its etcd lease ends with all its keys.
"""

from __future__ import annotations

import fnmatch
import os
import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.core.lease import Lease, Record
from celery_singleton_lock.core.store import Capabilities, Renewal
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.endpoints import ClusterUrl
from celery_singleton_lock.stores.etcd.gateway import OPTIONS, Gateway, LeaseGone
from celery_singleton_lock.stores.etcd.keys import EtcdKeys, Kept, Seen, encoded
from celery_singleton_lock.stores.etcd.leases import TRUSTED, EtcdLeases
from celery_singleton_lock.stores.transitions import rules
from celery_singleton_lock.stores.transitions.entries import Entry
from celery_singleton_lock.stores.transitions.store import RuledStore
from celery_singleton_lock.stores.transitions.transition import Rule, numbered, same_ttl

__all__ = ["EtcdStore"]

Reply = TypeVar("Reply")

_PORT: Final = 2379
# etcd's default max-txn-ops is 128.
_MAX_OPS: Final = 120
# An operation with a marker, a claim and this many slots fits.
_MAX_LIMIT: Final = 100
# Each round that fails means that somebody else's has succeeded.
_MAX_ROUNDS: Final = 50
_PAGE: Final = 500
_OPERATOR_TIMEOUT: Final = 2.0


class EtcdStore(RuledStore):
    """One cluster, by URL: ``etcd://host:2379,host:2379/prefix``; ``etcds://`` with TLS.

    Args:
        url: Its query may name ``ca``, ``cert`` and ``key`` (files) and ``api_path``.
        clock: Of deadlines.
        fence_base: Fences are above it.
        options: As the query's.

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
        self._fence_base = fence_base
        self._keys = EtcdKeys(f"{parsed.path}/" if parsed.path else "", fence_base)
        super().__init__()

    def _begin(self) -> None:
        super()._begin()
        self._leases = EtcdLeases(self._gateway, self._clock)
        # By key and name (the lease's token, or the claim's task): of two acquires of a key without
        # an answer either may have been carried out, and neither may be forgotten for the other.
        self._kept: dict[tuple[str, str], Kept] = {}
        # By key, the name that it was written for last, of what was answered.
        self._written: dict[str, str] = {}

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

    def renew(self, leases: Sequence[Lease], *, timeout: float = 0) -> list[Renewal]:
        self._notice_fork()
        deadline = self._clock.now() + timeout
        known = [self._kept.get((lease.key, str(lease.token))) for lease in leases]
        alive: set[int] = set()
        for lease_id in {kept.lease_id for kept in known if kept}:
            self._is_alive(lease_id, alive, deadline)
        replies: list[Renewal] = []
        try:
            for chunk in _chunks(leases, _MAX_OPS // 2):
                replies += self._renew(chunk, alive, deadline)
        finally:
            self._leave_to_others(leases)
        self._expire_overdue(deadline)
        return replies

    def last_runs(self, keys: Sequence[str], *, timeout: float = 0) -> list[str | None]:
        deadline = self._clock.now() + timeout
        found: list[str | None] = []
        for chunk in _chunks(keys, _MAX_OPS):
            rule = rules.last_runs(chunk)
            entries = self._read(rule.keys, deadline)[1]
            found += rule.decide(entries).reply
        return found

    def scan(self, pattern: str) -> Iterator[Record]:
        literal = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
        start, end = self._keys.bounds(literal)
        while True:
            deadline = self._clock.now() + _OPERATOR_TIMEOUT
            body = {"key": encoded(start), "range_end": encoded(end), "limit": _PAGE}
            found = self._gateway.call("kv/range", body, deadline, repeatable=True).get("kvs", [])
            for kv in found:
                key = self._keys.key(kv["key"])
                # Each has its own time: a page may ask for as many leases as there are workers.
                entry = self._entry(kv, self._clock.now() + _OPERATOR_TIMEOUT)
                record = entry.record(key) if entry else None
                if record is not None and fnmatch.fnmatchcase(key, pattern):
                    yield record
            if len(found) < _PAGE:
                return
            start = b64decode(found[-1]["key"]) + b"\x00"

    def close(self) -> None:
        """Close the connections. What is held still ends with its ttl, unless it is released."""
        self._gateway.close()

    # --- one rule, one transaction ---------------------------------------------------------------

    def _apply(self, rule: Rule[Reply], timeout: float) -> tuple[Reply, int]:
        self._notice_fork()
        deadline = self._clock.now() + timeout
        # What is likely: one's own keys as one wrote them, and nothing anywhere else. If that is
        # so, the transaction that finds it out has done the work too.
        view = {key: self._expected(key) for key in rule.keys}
        was_read = False
        for _ in range(_MAX_ROUNDS):
            outcome = rule.decide({key: seen.entry for key, seen in view.items() if seen.entry})
            if was_read and not outcome.changes:
                return outcome.reply, 0
            try:
                number, view = self._write(view, outcome.changes, deadline)
            except LeaseGone:
                self._leases.forget()
                continue
            if number:
                return outcome.reply, number
            was_read = True
            if self._clock.now() >= deadline:
                break
        raise StoreUnavailable(f"others kept changing {rule.keys[0]!r} for {timeout:g} s")

    def _expected(self, key: str) -> Seen:
        kept = self._kept.get((key, self._written.get(key, "")))
        return kept.seen if kept and kept.seen else Seen()

    def _write(
        self, view: Mapping[str, Seen], changes: Mapping[str, Entry | None], deadline: float
    ) -> tuple[int, dict[str, Seen]]:
        """Write ``changes`` if all keys are as in ``view``.

        Returns:
            The number of the write; or 0, and what the keys are instead.
        """
        bound, puts = self._bind(changes, deadline)
        before = {what: self._kept.get(what) for what in bound}
        # Before it is sent: whatever happens from here on, somebody will see to their end.
        self._kept.update(bound)
        body = self._keys.transaction(view, changes, puts)
        reply = self._gateway.call("kv/txn", body, deadline, repeatable=not changes)
        if not reply.get("succeeded"):
            for what, kept in bound.items():
                self._restore(what, kept, before[what])
            return 0, self._views(view, reply, deadline)
        revision = int(reply["header"]["revision"])
        number = self._fence_base + revision
        for key, entry in changes.items():
            stood = view[key].entry
            if stood is not None and (key, stood.name) not in bound:
                self._forget(key, stood.name)
            if entry is not None and entry.kept:
                name = entry.name
                kept = bound[key, name]
                kept.seen = Seen(numbered(entry, number), revision, kept.lease_id)
                self._written[key] = name
        return number, {}

    def _bind(
        self, changes: Mapping[str, Entry | None], deadline: float
    ) -> tuple[dict[tuple[str, str], Kept], dict[str, dict[str, Any]]]:
        """Find each new entry an etcd lease: what will be kept, and the operations of the puts."""
        bound: dict[tuple[str, str], Kept] = {}
        puts: dict[str, dict[str, Any]] = {}
        for key, entry in changes.items():
            if entry is None:
                continue
            if entry.kept:
                lease, prolonged = self._leases.kept(entry.ttl, deadline)
                if prolonged:
                    self._expire_overdue(deadline)
                until = self._clock.now() + entry.ttl
                bound[key, entry.name] = Kept(until, lease.id)
            else:
                lease = self._leases.passing(entry.ttl, deadline)
            slack = lease.ends_at - self._clock.now() - entry.ttl
            puts[key] = self._keys.put(key, entry, lease.id, slack)
        return bound, puts

    def _restore(self, what: tuple[str, str], ours: Kept, before: Kept | None) -> None:
        """Nothing was written after all."""
        if self._kept.get(what) is not ours:
            return  # another thread has bound it since
        if before is None:
            del self._kept[what]
        else:
            self._kept[what] = before

    def _forget(self, key: str, name: str) -> None:
        """It isn't this process's to end any more."""
        self._kept.pop((key, name), None)
        if self._written.get(key) == name:
            self._written.pop(key, None)

    def _read(
        self, keys: Sequence[str], deadline: float
    ) -> tuple[dict[str, Seen], dict[str, Entry]]:
        """All keys at one moment, and what stands in them."""
        body = {"success": self._keys.read(keys)}
        reply = self._gateway.call("kv/txn", body, deadline, repeatable=True)
        view = self._views(keys, reply, deadline)
        return view, {key: seen.entry for key, seen in view.items() if seen.entry}

    def _views(
        self, keys: Iterable[str], reply: Mapping[str, Any], deadline: float
    ) -> dict[str, Seen]:
        return self._keys.views(keys, reply, lambda one: self._leases.remaining(one, deadline))

    def _entry(self, kv: Mapping[str, Any], deadline: float) -> Entry | None:
        return self._keys.seen(kv, lambda one: self._leases.remaining(one, deadline)).entry

    # --- the heartbeat ---------------------------------------------------------------------------

    def _renew(self, leases: Sequence[Lease], alive: set[int], deadline: float) -> list[Renewal]:
        view, entries = self._read(rules.renew_all(leases).keys, deadline)
        replies: list[Renewal] = []
        moves: dict[str, Entry | None] = {}
        for lease in leases:
            outcome = rules.renew(lease).decide(entries)
            replies.append(outcome.reply)
            for key in rules.renew(lease).keys:
                change = outcome.changes.get(key)
                if key != lease.key and outcome.reply is not Renewal.RENEWED:
                    continue  # what ended the lease has seen to its claim
                if not self._stays(lease, key, view[key], change, alive, deadline):
                    moves[key] = change
        if moves and not self._moved(view, moves, deadline):
            return [self._apply(rules.renew(lease), self._left(deadline))[0] for lease in leases]
        return replies

    def _stays(
        self,
        lease: Lease,
        key: str,
        seen: Seen,
        change: Entry | None,
        alive: set[int],
        deadline: float,
    ) -> bool:
        """Whether the key needs no write: it isn't the lease's, or its etcd lease is kept alive."""
        entry = seen.entry
        record = entry.record(key) if entry else None
        if entry is None or record is None:
            return True
        if record.token != (lease.token.task if key == lease.claim_key else str(lease.token)):
            return True
        if not entry.kept or (change is not None and not same_ttl(entry.ttl, change.ttl)):
            return change is None
        if kept := self._kept.get((key, record.token)):
            kept.until = self._clock.now() + entry.ttl
        return self._is_alive(seen.lease_id, alive, deadline) or change is None

    def _moved(
        self, view: Mapping[str, Seen], moves: Mapping[str, Entry | None], deadline: float
    ) -> bool:
        """Bind keys to other etcd leases; whether nobody interfered."""
        for keys in _chunks(list(moves), _MAX_OPS // 2):
            changes = {key: moves[key] for key in keys}
            try:
                if not self._write({key: view[key] for key in keys}, changes, deadline)[0]:
                    return False
            except LeaseGone:
                self._leases.forget()
                return False
        return True

    def _is_alive(self, lease_id: int, alive: set[int], deadline: float) -> bool:
        """Keep an etcd lease alive, once per renewal, be it ours or another process's."""
        if lease_id not in alive and self._leases.keep_alive(lease_id, deadline):
            alive.add(lease_id)
        return lease_id in alive

    def _leave_to_others(self, leases: Sequence[Lease]) -> None:
        """Not to delete what another process holds, for it may renew it by itself from now on."""
        own = os.getpid()
        for lease in leases:
            if lease.process != own:
                self._forget(lease.key, str(lease.token))
                self._forget(lease.claim_key, lease.token.task)

    def _expire_overdue(self, deadline: float) -> None:
        """Delete what this process has bound to a living etcd lease, and renews no more."""
        now = self._clock.now()
        everything = list(self._kept.items())
        overdue = [(what, kept) for what, kept in everything if now >= kept.until]
        # Also one that no new key is bound to any more, as long as one of its keys is renewed.
        alive = {kept.lease_id for _, kept in everything if now < kept.until} if overdue else set()
        for (key, name), kept in overdue:
            try:
                if kept.lease_id in alive or self._leases.is_kept(kept.lease_id):
                    self._apply(rules.expire(key, name), self._left(deadline))
            except StoreError:
                return  # the next heartbeat tries again
            if self._kept.get((key, name)) is kept:
                self._forget(key, name)

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - self._clock.now())


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
