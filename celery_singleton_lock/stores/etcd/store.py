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
    it trusts a grant for five sixths of the ttl (see TRUSTED).

State model
    Many keys share one etcd lease, and exist as long as it does. There are two kinds of etcd lease:

    renewed
        One per ttl in whole seconds, for leases and the claims of running tasks. One keepalive
        prolongs all keys of that ttl. It expires when the process holds nothing and stops the
        keepalives.
    expiring
        For reservations, cooling keys, completion records and queued claims. All keys that expire
        in the same sixteenth of their ttl share one. So a thousand completion records a minute need
        some 20 etcd leases instead of 60,000. These are never prolonged and never revoked.

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
import math
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from ...core.clock import Clock
from ...core.lease import Lease
from ...core.store import Capabilities, ConnectionWatch
from ...core.store_requests import RENEWED, Renewal
from ...errors import StoreError, StoreUnavailable
from ..consensus import ConsensusStore, Name, OwnKeys, names_of
from ..transitions import (
    OPERATOR_TIMEOUT,
    Changes,
    Draft,
    Entry,
    Transition,
    format_value,
    parse_entry,
    renewal,
)
from .gateway import OPTIONS, Gateway, LeaseGone

Reply = TypeVar("Reply")

# etcd's default of max-txn-ops is 128. It limits the comparisons, the writes and the reads of a
# transaction separately.
_MAX_OPERATIONS: Final = 120
# An operation with this many slots, a completion record and a claim fits into one transaction.
_MAX_LIMIT: Final = 100
_PAGE: Final = 500
#: The share of a ttl for which a holder may trust a grant. The other sixth is the maximum age of
#: the keepalive that the grant relies on, so a worker with many short bodies sends one keepalive
#: per ttl/6 instead of one per body. It also covers a leader that was deposed and doesn't know it
#: yet. For at most an election timeout, such a leader answers keepalives that the new leader hasn't
#: seen. The new leader has given every lease its full ttl.
TRUSTED: Final = 5 / 6
# Seconds. etcd grants at least 1.5 election timeouts (of 1 s by default), rounded up.
_MIN_TTL: Final = 2
# The share of its ttl that an expiring key may exist for longer than requested.
_SLACK: Final = 1 / 16


@dataclass(slots=True)
class EtcdLease:
    """One etcd lease of this process.

    ``ends_at`` is a time on the clock of this process, counted from before the request. So etcd's
    own expiry is later.
    """

    id: int
    ends_at: float


class EtcdLeases:
    """Grants etcd leases and keeps them alive.

    Every method may raise StoreUnavailable and StoreError.
    """

    def __init__(self, gateway: Gateway, clock: Clock) -> None:
        self._gateway = gateway
        self._clock = clock
        self._renewed: dict[int, EtcdLease] = {}
        self._expiring: list[EtcdLease] = []

    def renewed(self, ttl: float, deadline: float) -> tuple[EtcdLease, bool]:
        """An etcd lease that lasts for TRUSTED of ``ttl``, and whether it was just prolonged."""
        seconds = max(math.ceil(ttl), _MIN_TTL)
        lease = self._renewed.get(seconds)
        left = lease.ends_at - self._clock.now() if lease else 0.0
        if lease and left >= ttl * TRUSTED:
            return lease, False
        if lease and left > 0 and self.keep_alive(lease.id, deadline):
            return lease, True
        # If two threads grant an etcd lease, the second replaces the first. A key that is bound to
        # the first moves to the second at its next renewal.
        self._renewed[seconds] = lease = self._grant(seconds, deadline)
        return lease, False

    def expiring(self, ttl: float, deadline: float) -> EtcdLease:
        """An etcd lease that expires in ``ttl`` seconds, or slightly later."""
        now = self._clock.now()
        # A new list, assigned in one step: another thread may iterate over the old one.
        self._expiring = alive = [lease for lease in self._expiring if lease.ends_at > now]
        for lease in alive:
            if ttl <= lease.ends_at - now <= ttl * (1 + _SLACK) + 1:
                return lease
        lease = self._grant(max(math.ceil(ttl * (1 + _SLACK)), _MIN_TTL), deadline)
        self._expiring.append(lease)
        return lease

    def is_renewed(self, lease_id: int) -> bool:
        """Whether this process keeps the etcd lease alive."""
        return any(lease.id == lease_id for lease in list(self._renewed.values()))

    def keep_alive(self, lease_id: int, deadline: float) -> bool:
        """Prolong an etcd lease of any process; whether it still existed."""
        sent = self._clock.now()
        reply = self._request("lease/keepalive", {"ID": lease_id}, deadline)
        # Once the lease has expired, etcd omits the ttl.
        ttl = float(reply.get("result", {}).get("TTL", -1))
        for seconds, lease in list(self._renewed.items()):
            if lease.id == lease_id and ttl > 0:
                lease.ends_at = sent + ttl
            elif lease.id == lease_id:
                self._renewed.pop(seconds, None)
        return ttl > 0

    def forget(self) -> None:
        """Forget all etcd leases, so that new ones are granted.

        etcd has reported that one of them is gone, but not which one.
        """
        self._renewed.clear()
        self._expiring = []

    def remaining(self, lease_id: int, deadline: float) -> float:
        """Seconds until an etcd lease of any process expires; 0 if it has expired."""
        for lease in [*self._renewed.values(), *self._expiring]:
            if lease.id == lease_id:
                return max(0.0, lease.ends_at - self._clock.now())
        try:
            reply = self._request("lease/timetolive", {"ID": lease_id}, deadline)
        except LeaseGone:
            return 0.0
        return max(0.0, float(reply.get("TTL", -1)))

    def _grant(self, seconds: int, deadline: float) -> EtcdLease:
        sent = self._clock.now()
        # A repeated grant after a lost reply leaves an etcd lease without keys, which expires.
        reply = self._request("lease/grant", {"TTL": seconds, "ID": 0}, deadline)
        return EtcdLease(int(reply["ID"]), sent + float(reply["TTL"]))

    def _request(self, path: str, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        return self._gateway.request(path, body, deadline, repeatable=True)


@dataclass(frozen=True, slots=True)
class SeenKey:
    """A key as it was read: its entry, its revision (0: no key), and its etcd lease."""

    entry: Entry | None = None
    revision: int = 0
    lease_id: int = 0


@dataclass(slots=True, eq=False)
class _Own:
    """A note on a key that this process has bound, or may have bound, to an etcd lease.

    Attributes:
        until: The end of the key's ttl, on the clock, unless the key is renewed.
        lease_id: The etcd lease.
        seen: The content of the key; no key until the write is acknowledged.
    """

    until: float
    lease_id: int
    seen: SeenKey = SeenKey()


class EtcdStore(ConsensusStore):
    """A store in an etcd cluster.

    Its URL is ``etcd://host:2379,host:2379/prefix``; ``etcds://`` with TLS. The query may contain
    ``ca``, ``cert`` and ``key`` (files) and ``api_path``.
    """

    port = 2379
    options = OPTIONS
    capabilities = Capabilities(
        fence=True,
        name="etcd",
        trusted=TRUSTED,
        min_ttl=1.0,
        max_limit=_MAX_LIMIT,
        renews_for_others=True,
    )

    def _start(self) -> None:
        # A fork must not expire the keys that its parent keeps alive.
        super()._start()
        self._gateway = Gateway(self.url, self._clock)
        self._leases = EtcdLeases(self._gateway, self._clock)
        self._own: OwnKeys[_Own] = OwnKeys()
        self._prefix = f"{self.url.path}/" if self.url.path else ""

    def watch_connections(self, watch: ConnectionWatch, /) -> None:
        self._gateway.watch = watch

    def renew(self, leases: Sequence[Lease], timeout: float) -> list[Renewal]:
        """See `Leases.renew`."""
        deadline = self._deadline(timeout)
        alive: set[int] = set()
        for lease_id in {own.lease_id for lease in leases for own in self._own.of(lease)}:
            self._keep_alive(lease_id, alive, deadline)
        replies: list[Renewal] = []
        try:
            # A lease and its claim are two keys.
            for chunk in _chunks(leases, _MAX_OPERATIONS // 2):
                replies += self._renew(chunk, alive, deadline)
        finally:
            # These leases are held by other processes, which may renew them later without this
            # process.
            for lease in leases:
                for name in names_of(lease) if lease.process is not self._process else ():
                    self._own.forget(name)
        self._expire_overdue(deadline)
        return replies

    def read_texts(self, keys: Sequence[str], timeout: float) -> list[str | None]:
        deadline, found = self._deadline(timeout), []
        for chunk in _chunks(keys, _MAX_OPERATIONS):
            found += super().read_texts(chunk, self._left(deadline))
        return found

    def entries(self, pattern: str, /) -> Iterator[tuple[str, Entry]]:
        first = (self._prefix + re.split(r"[*?\[]", pattern, maxsplit=1)[0]).encode()
        end = first + b"\xff"  # No key contains this byte.
        while True:
            body = {"key": _encoded(first), "range_end": _encoded(end), "limit": _PAGE}
            deadline = self._deadline(OPERATOR_TIMEOUT)
            reply = self._gateway.request("kv/range", body, deadline, repeatable=True)
            found = reply.get("kvs", [])
            for kv in found:
                key = b64decode(kv["key"]).decode(errors="replace")[len(self._prefix) :]
                if fnmatch.fnmatchcase(key, pattern):
                    # Each key has its own deadline, because reading its ttl may take a request.
                    entry = self._seen(kv, self._deadline(OPERATOR_TIMEOUT)).entry
                    yield from [(key, entry)] if entry else []
            if len(found) < _PAGE:
                return
            first = b64decode(found[-1]["key"]) + b"\x00"

    def close(self) -> None:
        """Close the connections. A lease that was not released expires at the end of its ttl."""
        self._gateway.close()

    # --- one transition, one transaction ---------------------------------------------------------

    def transact(self, transition: Transition[Reply], timeout: float) -> tuple[Reply, int]:
        deadline = self._deadline(timeout)
        # Assume that own keys are as they were written, and that all other keys are free. If the
        # assumption holds, the transaction that proves it also does the work, and no read is
        # needed.
        own = {key: self._own.written(key) for key in transition.keys}
        view = {key: note.seen if note else SeenKey() for key, note in own.items()}
        was_read = False
        while True:
            draft = _draft(view)
            reply = transition.decide(draft)
            if was_read and not draft.changes:
                return reply, 0
            number, view = self._write(view, draft.changes, deadline)
            if number:
                return reply, number
            was_read = True
            if self._clock.now() >= deadline:
                raise StoreUnavailable(
                    f"other clients kept changing {transition.keys[0]!r} for {timeout:g} s"
                )

    def _write(
        self, view: Mapping[str, SeenKey], changes: Changes, deadline: float
    ) -> tuple[int, dict[str, SeenKey]]:
        """Write ``changes`` if all keys are as in ``view``.

        Returns:
            The number of the write; or 0 and the current content of the keys. Also 0 if an etcd
            lease to which a new entry is bound has expired; later writes use new ones.
        """
        compare = [
            {"key": self._name(key), "target": "MOD", "mod_revision": str(seen.revision)}
            for key, seen in view.items()
        ]
        try:
            notes, writes = self._bind(changes, deadline)
            body = {"compare": compare, "success": writes, "failure": self._ranges(view)}
            # The notes are added before the request is sent: from here on, a thread will expire the
            # keys.
            before = self._own.add(notes)
            reply = self._gateway.request("kv/txn", body, deadline, repeatable=not changes)
        except LeaseGone:
            self._leases.forget()
            return 0, dict(view)
        if not reply.get("succeeded"):
            self._own.restore(notes, before)
            return 0, self._found(view, reply, deadline)
        revision = int(reply["header"]["revision"])
        number = self._fence_base + revision
        for (key, _), own in notes.items():
            if entry := changes[key]:
                own.seen = SeenKey(entry.numbered(number), revision, own.lease_id)
        self._own.acknowledge(notes, {key: view[key].entry for key in changes})
        return number, {}

    def _bind(
        self, changes: Changes, deadline: float
    ) -> tuple[dict[Name, _Own], list[dict[str, Any]]]:
        """Bind each new entry to an etcd lease; return the notes and the writes.

        The text of a key is a word and then the text that the Lua scripts write. The word is
        ``k60`` for an entry that is renewed, with a ttl of 60 s, and ``p1.5`` for an entry that
        expires 1.5 s before its etcd lease.
        """
        notes: dict[Name, _Own] = {}
        writes: list[dict[str, Any]] = []
        for key, entry in changes.items():
            if entry is None:
                writes.append({"request_delete_range": {"key": self._name(key)}})
                continue
            if entry.renewed:
                lease, was_prolonged = self._leases.renewed(entry.ttl, deadline)
                if was_prolonged:
                    self._expire_overdue(deadline)
                notes[key, entry.owner] = _Own(self._clock.now() + entry.ttl, lease.id)
                word = f"k{entry.ttl:g}"
            else:
                lease = self._leases.expiring(entry.ttl, deadline)
                word = f"p{max(0.0, lease.ends_at - self._clock.now() - entry.ttl):.3f}"
            value = _encoded(f"{word} {format_value(entry.value)}".encode())
            put = {"key": self._name(key), "value": value, "lease": str(lease.id)}
            writes.append({"request_put": put})
        return notes, writes

    def _name(self, key: str) -> str:
        return _encoded((self._prefix + key).encode())

    def _ranges(self, keys: Iterable[str]) -> list[dict[str, Any]]:
        return [{"request_range": {"key": self._name(key)}} for key in keys]

    def _found(
        self, keys: Iterable[str], reply: Mapping[str, Any], deadline: float
    ) -> dict[str, SeenKey]:
        """The keys in the reply to :meth:`_ranges`."""
        ranges = (one["response_range"].get("kvs", []) for one in reply.get("responses", []))
        return {
            key: self._seen(found[0], deadline) if found else SeenKey()
            for key, found in zip(keys, ranges, strict=True)
        }

    def _seen(self, kv: Mapping[str, Any], deadline: float) -> SeenKey:
        revision, lease_id = int(kv["mod_revision"]), int(kv.get("lease", 0))
        # A key without an etcd lease was not written by this library.
        text = b64decode(kv.get("value", "")).decode(errors="replace") if lease_id else ""
        entry = parse_entry(text, self._fence_base + revision)
        if lease_id and not entry.renewed:
            ttl = max(0.0, self._leases.remaining(lease_id, deadline) - entry.ttl)
            entry = replace(entry, ttl=ttl)
        return SeenKey(entry, revision, lease_id)

    # --- the heartbeat ---------------------------------------------------------------------------

    def _renew(self, leases: Sequence[Lease], alive: set[int], deadline: float) -> list[Renewal]:
        """Renew leases by keepalives. Write a key only if its etcd lease has to change."""
        transition = renewal(leases)
        body = {"success": self._ranges(transition.keys)}
        reply = self._gateway.request("kv/txn", body, deadline, repeatable=True)
        view = self._found(transition.keys, reply, deadline)
        draft = _draft(view)
        replies = transition.decide(draft)
        moves: dict[str, Entry | None] = {}
        for lease, outcome in zip(leases, replies, strict=True):
            # The request that ended a lost lease has set its claim's ttl.
            for key, owner in names_of(lease) if outcome is RENEWED else names_of(lease)[:1]:
                seen, change = view.get(key, SeenKey()), draft.changes.get(key)
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
        if not moves or self._write({key: view[key] for key in moves}, moves, deadline)[0]:
            return replies
        # Another client has changed a key meanwhile, or an etcd lease has expired.
        return [self.transact(renewal([one]), self._left(deadline))[0][0] for one in leases]

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
                    self._expire(name, self._left(deadline))
            except StoreError:
                return  # The next heartbeat tries again.
            if self._own.all.get(name) is own:
                self._own.forget(name)


def _encoded(value: bytes) -> str:
    return b64encode(value).decode()


def _draft(view: Mapping[str, SeenKey]) -> Draft:
    return Draft({key: seen.entry for key, seen in view.items() if seen.entry})


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
