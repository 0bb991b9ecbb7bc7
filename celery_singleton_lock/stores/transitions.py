"""Stores without scripts: their entries, and each operation as a transition of the entries.

A transition is a pure function with the semantics of one Lua script. A store reads the keys of the
transition, calls the function, and writes the changes if none of the entries that it read has
changed meanwhile.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeVar

from ..core.keyspace import Keyspace
from ..core.lease import Holder, Kind, Lease, LossReason, OperatorRelease, Phase, Record, Token
from ..core.pauses import Pause
from ..core.rate import Rate
from ..core.store import RELEASE_NOTE_TTL, Claims, Leases, Operators, Schedule, Store
from ..core.store_requests import (
    RENEWED,
    Acquire,
    Authorization,
    AuthorizeRun,
    ClaimChange,
    ClaimRequest,
    CompletionState,
    Granted,
    Mark,
    Refused,
    Relation,
    Release,
    ReleaseReply,
    Renewal,
    Trace,
    rate_of,
)
from ..errors import StoreError

Reply = TypeVar("Reply")

#: Seconds to wait for the reply to an operator's request.
OPERATOR_TIMEOUT: Final = 2.0
_REFUSALS: Final = {
    CompletionState.DONE: Relation.DONE,
    CompletionState.FINISHING: Relation.DUPLICATE,
}
_RANK: Final = {CompletionState.WAITING: 1, CompletionState.FINISHING: 2, CompletionState.DONE: 3}
# The text of a completion record has two blanks. The text of a lease or a claim has three, and a
# token in the place of the number.
_MARKER: Final = re.compile(r"([-fd]) ([0-9]+) (\S*)")
# The fence of a new lease, and its text: the fence is the number that the store gives to the write.
_WRITE_NUMBER: Final = -1
_WRITE_NUMBER_TEXT: Final = "="
# The word in front of the text in etcd and ZooKeeper: `k` for an entry that is renewed, `p` for one
# that expires, and a number of seconds.
_WORD: Final = re.compile(r"([kp])([0-9]+(?:\.[0-9]+)?(?:e\+[0-9]+)?) ")
# Prefix of the text of a last run. No kind of lease and no completion record begins with it. In
# Redis a last run has no prefix.
_LAST_RUN: Final = "t "


@dataclass(frozen=True, slots=True)
class Completion:
    """The completion record of one attempt. Its key is next to that of the lease.

    Attributes:
        state: Whether the attempt is done, is about to be, or was requeued.
        sequence: How often the attempt was requeued.
        nonce: The nonce of the delivery that wrote the record.
    """

    state: CompletionState
    sequence: int
    nonce: str


#: A record is a lease, the reservation or cooling key that a release left, or a claim. Its key and
#: its ttl do not count, because the entry has them. A text is the last run of a schedule entry,
#: written by the elected beat. None is a value that this version can't read. It is never changed.
Value = Record | Completion | str | None
SomeValue = TypeVar("SomeValue", Completion, str)


@dataclass(frozen=True, slots=True)
class Entry:
    """The value of a key, and when it expires.

    Attributes:
        value: The value. Only ``format_value`` and ``parse_value`` need to know what it is.
        ttl: In how many seconds the entry expires.
        renewed: Whether its holder's heartbeat renews the entry. A server that ties entries to a
            session or a lease can use it. Other stores can ignore it.
    """

    value: Value
    ttl: float
    renewed: bool = False

    @property
    def owner(self) -> str:
        """The token of a lease or the task of a claim; empty for other values."""
        return self.value.token if isinstance(self.value, Record) else ""

    def record(self, key: str) -> Record | None:
        """The readable form of a lease or a claim; None for other values."""
        value = self.value
        return replace(value, key=key, ttl=self.ttl) if isinstance(value, Record) else None

    def numbered(self, number: int) -> Entry:
        """The entry as it is read after the store has given ``number`` to the write."""
        if isinstance(self.value, Record) and self.value.fence == _WRITE_NUMBER:
            return Entry(replace(self.value, fence=number), self.ttl, self.renewed)
        return self

    def has_ttl(self, ttl: float) -> bool:
        """Whether the entry's ttl equals ``ttl``, apart from rounding in the text."""
        return math.isclose(self.ttl, ttl, rel_tol=1e-3)


@dataclass(slots=True)
class Draft:
    """The entries that a transition reads, and the changes that it decides on.

    Attributes:
        entries: The entries that the store has read. A key without an entry is free.
        changes: The entry to write for each changed key. None means that the key is deleted.
        read: The keys that the decision depends on.
    """

    entries: Mapping[str, Entry]
    changes: dict[str, Entry | None] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def get(self, key: str) -> Entry | None:
        self.read.add(key)
        return self.changes[key] if key in self.changes else self.entries.get(key)

    def value(self, key: str, kind: type[SomeValue]) -> SomeValue | None:
        """The value of ``key`` if it is of ``kind``."""
        entry = self.get(key)
        return entry.value if entry and isinstance(entry.value, kind) else None

    def record(self, key: str) -> Record | None:
        """The lease or claim of ``key``, with its ttl."""
        entry = self.get(key)
        return entry.record(key) if entry else None

    def claim(self, key: str) -> Record | None:
        record = self.record(key)
        return record if record and record.kind is Kind.CLAIM else None

    def change_claim(
        self,
        change: ClaimChange,
        call_id: str,
        *,
        holder: Holder | None = None,
        renewed: bool = False,
    ) -> None:
        """Change the claim of a call, or write it if the key is free. Keep any other entry.

        Args:
            change: The change.
            call_id: The call (``Token.call_id``).
            holder: The holder in a claim that is written to a free key.
            renewed: Whether the claim is renewed with a lease.
        """
        claim = self.claim(change.key)
        is_own = claim is not None and claim.token == call_id
        if not is_own and self.get(change.key) is not None:
            return
        if change.phase is None:
            if is_own:
                self.changes[change.key] = None
            return
        publisher = claim.holder if claim else holder or Holder()
        new = _record(Kind.CLAIM, call_id, publisher, phase=change.phase)
        self.changes[change.key] = Entry(new, change.ttl, renewed)


def _record(
    kind: Kind, token: str, holder: Holder, *, fence: int | None = None, phase: Phase | None = None
) -> Record:
    """A record as the value of an entry."""
    return Record(key="", kind=kind, token=token, fence=fence, holder=holder, ttl=0.0, phase=phase)


#: The entry to write for each changed key; None: delete the key.
Changes = Mapping[str, Entry | None]


def format_value(value: Value) -> str:
    """The text of ``value``, as the Lua scripts write it, except for `=` and the last run's prefix.

    Raises:
        TypeError: ``value`` is None.
    """
    match value:
        case Record(kind=kind, token=token, fence=fence, phase=phase, holder=holder):
            third = phase or (_WRITE_NUMBER_TEXT if fence == _WRITE_NUMBER else fence or 0)
            task_id = Token.task_id_of(token.partition("|")[0])
            return f"{kind} {token} {third} {holder.to_json(task_id)}"
        case Completion(state, sequence, nonce):
            return f"{state} {sequence} {nonce}"
        case str():
            return f"{_LAST_RUN}{value}"
    raise TypeError("a value that could not be read can't be written")


def parse_value(text: str, number: int) -> Value:
    """The value of ``text``, which the store wrote under ``number``."""
    if text.startswith(_LAST_RUN):
        return text.removeprefix(_LAST_RUN)
    if match := _MARKER.fullmatch(text):
        return Completion(CompletionState(match[1]), int(match[2]), match[3])
    try:
        kind, token, third, holder = text.split(" ", 3)
        if kind != Kind.CLAIM:
            Token.parse(token)  # raises ValueError: only a claim may have another owner
            third = str(number) if third == _WRITE_NUMBER_TEXT else third
        return Record.parse("", f"{kind} {token} {third} {holder}", 0.0)
    except ValueError:
        return None


def parse_entry(text: str, number: int) -> Entry:
    """The entry of ``text`` behind a word like ``k60``, whose number of seconds becomes its ttl.

    A text without such a word was not written by this library. It never expires.
    """
    match = _WORD.match(text)
    if match is None:
        return Entry(None, math.inf)
    value = parse_value(text[match.end() :], number)
    return Entry(value, float(match[2]), renewed=match[1] == "k")


@dataclass(frozen=True, slots=True)
class Transition(Generic[Reply]):
    """One operation of a store, as a pure function of the entries of some keys.

    Attributes:
        keys: The keys to read.
        decide: A function that puts the changes into a draft and returns the reply. It may be
            called again with a new draft, for example after another client's write.
        likely_free: One of the keys, or empty. If that key is free, the others most likely are too.
            So a store may first try a write that succeeds only if all keys are free, and read the
            keys only if that fails.
    """

    keys: tuple[str, ...]
    decide: Callable[[Draft], Reply]
    likely_free: str = ""


class TransitionStore(Store, ABC):
    """A store that carries out each operation as a transition of some entries.

    A subclass defines ``capabilities``, ``transact`` and ``entries``. Its constructor must call
    that of this class, which makes the parts.
    """

    operators: TransitionOperators
    schedule: TransitionSchedule

    def __init__(self) -> None:
        self.leases: Leases = TransitionLeases(self)
        self.claims = TransitionClaims(self)
        self.schedule = TransitionSchedule(self)
        self.operators = TransitionOperators(self)

    @abstractmethod
    def entries(self, pattern: str, /) -> Iterator[tuple[str, Entry]]:
        """Return all entries whose keys match the glob ``pattern``, sorted by key.

        The result need not be a snapshot.
        """

    @abstractmethod
    def transact(self, transition: Transition[Reply], timeout: float) -> tuple[Reply, int]:
        """Apply ``transition`` in one atomic step.

        Args:
            transition: The operation.
            timeout: How many seconds it may take.

        Returns:
            The transition's reply, and the number of the write. It's 0 if nothing was written. The
            numbers of later writes are higher.

        Raises:
            StoreUnavailable: No reply came in time. The write may have taken effect.
            StoreError: The server refused the request.
        """

    def renew(self, leases: Sequence[Lease], timeout: float) -> list[Renewal]:
        """See `Leases.renew`."""
        return self.transact(renewal(leases), timeout)[0]

    def read_texts(self, keys: Sequence[str], timeout: float) -> list[str | None]:
        """The text at each of ``keys``: a last run or an operator's note; None: there is none."""

        def decide(draft: Draft) -> list[str | None]:
            return [draft.value(key, str) for key in keys]

        transition = Transition(tuple(dict.fromkeys(keys)), decide)
        return self.transact(transition, timeout)[0] if keys else []


class TransitionLeases(Leases):
    """See `Leases`.

    Args:
        store: The store.
        pause_of: Returns the pause of a key, or of its scope; None: there is none.
        start: Counts a start of a key that has a rate, and returns 0; or returns the seconds until
            a call may start.
    """

    def __init__(
        self,
        store: TransitionStore,
        pause_of: Callable[[str], Pause | None] = lambda key: None,
        start: Callable[[str, Rate], float] = lambda key, rate: 0.0,
    ) -> None:
        self._store, self._pause_of, self._start = store, pause_of, start

    def acquire(self, request: Acquire, /, *, timeout: float = 0) -> Granted | Refused:
        completion = Keyspace.completion(request.slots[0], request.token.attempt)
        # A claim exists since the message was published. A retry and a message that was requeued
        # have left a reservation or a completion record.
        is_first = request.claim is None and request.token.retries == 0 and request.sequence == 0
        transition = Transition(
            (completion, *request.slots, *_claim_keys(request.claim)),
            lambda draft: _acquire(draft, request, completion, self._pause_of, self._start),
            likely_free=request.slots[0] if is_first and len(request.slots) == 1 else "",
        )
        reply, number = self._store.transact(transition, timeout)
        if isinstance(reply, Granted) and len(request.slots) == 1:
            reply.fence = number
        return reply

    def renew(self, leases: Sequence[Lease], /, *, timeout: float = 0) -> list[Renewal]:
        return self._store.renew(leases, timeout)

    def release(self, request: Release, /, *, timeout: float = 0) -> ReleaseReply:
        completion = Keyspace.completion(request.keys[0], request.token.attempt)
        keys = (completion, *request.keys, *_claim_keys(request.claim))
        transition = Transition(keys, lambda draft: _release(draft, request, completion))
        return self._store.transact(transition, timeout)[0]

    def mark(self, request: Mark, /, *, timeout: float = 0) -> None:
        token, claim, ttl = request.token, request.claim, request.ttl
        completion = Keyspace.completion(request.key, token.attempt)

        def decide(draft: Draft) -> None:
            new, until = Completion(request.state, request.sequence, token.nonce), ttl
            entry, old = draft.get(completion), draft.value(completion, Completion)
            if entry and old:
                is_higher = _RANK[new.state] >= _RANK[old.state]
                until = max(entry.ttl, ttl)
                new = new if is_higher else old
                if new.state is CompletionState.FINISHING:
                    until = ttl if is_higher else entry.ttl
                new = replace(new, sequence=max(request.sequence, old.sequence))
            draft.changes[completion] = Entry(new, until)
            # A missing claim is not written again: the newer copy of the message may have run and
            # freed it meanwhile.
            if claim and new.state is not CompletionState.DONE and draft.claim(claim.key):
                draft.change_claim(claim, token.call_id)

        self._store.transact(Transition((completion, *_claim_keys(claim)), decide), timeout)

    def trace(self, key: str, /, *, timeout: float = 0) -> Trace:
        transition = Transition((key,), lambda draft: draft.record(key))
        return Trace(record=self._store.transact(transition, timeout)[0])

    def inspect(self, key: str, /) -> Record | None:
        return self.trace(key, timeout=OPERATOR_TIMEOUT).record


class TransitionClaims(Claims):
    """See `Claims`."""

    def __init__(self, store: TransitionStore) -> None:
        self._store = store

    def take(self, request: ClaimRequest, /, *, timeout: float = 0) -> Record | None:
        call_id = request.token.call_id

        def decide(draft: Draft) -> Record | None:
            claim = draft.claim(request.key)
            if claim and claim.token == call_id:
                if request.prolongs and claim.ttl < request.ttl:
                    draft.changes[request.key] = Entry(claim, request.ttl)
                return None
            if draft.get(request.key) is None or (claim and claim.token == request.instead_of):
                new = _record(Kind.CLAIM, call_id, request.holder, phase=Phase.QUEUED)
                draft.changes[request.key] = Entry(new, request.ttl)
                return None
            record = draft.record(request.key)
            if record is None:
                raise StoreError(f"{request.key!r} holds something that this version can't read")
            return record

        transition = Transition((request.key,), decide, likely_free=request.key)
        return self._store.transact(transition, timeout)[0]

    def change(self, token: Token, change: ClaimChange, /, *, timeout: float = 0) -> None:
        def decide(draft: Draft) -> None:
            claim = draft.claim(change.key)
            if claim and (claim.phase is not Phase.RUNNING or change.phase is Phase.RUNNING):
                draft.change_claim(change, token.call_id)

        self._store.transact(Transition((change.key,), decide), timeout)


class TransitionSchedule(Schedule):
    """See `Schedule`."""

    def __init__(self, store: TransitionStore) -> None:
        self._store = store

    def authorize(self, request: AuthorizeRun, /, *, timeout: float = 0) -> Authorization:
        def decide(draft: Draft) -> Authorization:
            leader, found = draft.record(request.leader), draft.value(request.entry, str)
            if not leader or (leader.kind, leader.token) != (Kind.LEASE, str(request.token)):
                return Authorization.DEPOSED
            if found == request.new:
                return Authorization.AUTHORIZED  # A repeated request, whose first reply was lost.
            if found != request.expected:
                return Authorization.CHANGED
            draft.changes[request.entry] = Entry(request.new, request.ttl)
            return Authorization.AUTHORIZED

        return self._store.transact(Transition((request.leader, request.entry), decide), timeout)[0]

    def last_runs(self, keys: Sequence[str], /, *, timeout: float = 0) -> list[str | None]:
        return self._store.read_texts(keys, timeout)


class TransitionOperators(Operators):
    """See `Operators`."""

    def __init__(self, store: TransitionStore) -> None:
        self._store = store

    def scan(self, pattern: str, /) -> Iterator[Record]:
        records = (entry.record(key) for key, entry in self._store.entries(pattern))
        return (record for record in records if record is not None)

    def texts(self, pattern: str, /) -> Iterator[tuple[str, str, float]]:
        for key, entry in self._store.entries(pattern):
            if entry.value is not None:
                value = entry.value
                yield key, value if isinstance(value, str) else format_value(value), entry.ttl

    def free(self, key: str, token: str | None, /, by: OperatorRelease | None = None) -> bool:
        note = Keyspace.release_note(key)

        def decide(draft: Draft) -> bool:
            record = draft.record(key)
            if record is None or (token is not None and record.token != token):
                return False
            draft.changes[key] = None
            if by is not None:
                draft.get(note)  # a store writes only keys that the decision has read
                draft.changes[note] = Entry(f"{record.token} {by.to_json()}", RELEASE_NOTE_TTL)
            return True

        # The number of the next grant is higher than that of this deletion and of the freed lease.
        keys = (key,) if by is None else (key, note)
        return self._store.transact(Transition(keys, decide), OPERATOR_TIMEOUT)[0]

    def release_notes(self, keys: Sequence[str], /, *, timeout: float = 0) -> list[str | None]:
        return self._store.read_texts(keys, timeout)


def _claim_keys(change: ClaimChange | None) -> tuple[str, ...]:
    return (change.key,) if change else ()


def _acquire(
    draft: Draft,
    request: Acquire,
    completion_key: str,
    pause_of: Callable[[str], Pause | None],
    start: Callable[[str, Rate], float],
) -> Granted | Refused:
    """Take a free slot, or the slot that the token holds or that is reserved for its attempt."""
    completion = draft.value(completion_key, Completion)
    if completion and (completion.state in _REFUSALS or completion.sequence > request.sequence):
        return Refused(relation=_REFUSALS.get(completion.state, Relation.SUPERSEDED))
    chosen = _choose(draft, request)
    if isinstance(chosen, Refused):
        return chosen
    slot, own = chosen
    if own is not None and own.kind is Kind.LEASE:  # repeated, because its reply was lost
        assert slot is not None
        return _grant(draft, request, slot)
    pause = pause_of(request.slots[0])
    if slot is None and pause is None:
        return _refused_by_other(draft, request, request.slots[0])
    if own is None and (claim := _claim_of_another(draft, request)):
        return _refused_by_other(draft, request, claim)
    if pause is not None or slot is None:
        # Also if another call holds the key: a call is not dropped because of it during a pause.
        assert pause is not None
        return _paused(pause)
    rate = rate_of(request)
    if rate is not None and (left := start(request.slots[0], rate)):
        if own is not None:  # a retry keeps its reservation until it starts
            draft.changes[slot] = Entry(own, max(left + request.ttl, own.ttl))
        return _too_early(draft, request, left)
    return _grant(draft, request, slot)


def _choose(draft: Draft, request: Acquire) -> Refused | tuple[str | None, Record | None]:
    """A slot that the token may take, and its own record there.

    Returns:
        No slot: other tasks hold all. No record: the slot is free. Or the refusal by another
        delivery or attempt of the same task.
    """
    free: str | None = None
    for slot in request.slots:
        if draft.get(slot) is None:
            free = free or slot
            continue
        record = draft.record(slot)
        relation = _relation(record, request.token)
        if relation is None:
            return slot, record
        if relation is not Relation.OTHER:
            return Refused(relation=relation, record=record)
    return free, None


def _claim_of_another(draft: Draft, request: Acquire) -> str:
    """The key of the claim by which another task's message refuses this one; empty: none does."""
    if request.claim is None or not request.refused_if_claimed:
        return ""
    claim = draft.claim(request.claim.key)
    return request.claim.key if claim and claim.token != request.token.call_id else ""


def _paused(pause: Pause) -> Refused:
    refused = Refused(relation=Relation.PAUSED)
    refused.pause = pause
    return refused


def _too_early(draft: Draft, request: Acquire, left: float) -> Refused:
    _free_claim(draft, request)
    refused = Refused(relation=Relation.RATE)
    refused.due_in, refused.hint = left, None
    return refused


def _free_claim(draft: Draft, request: Acquire) -> None:
    """Free the claim of a message that ends with its refusal."""
    if request.claim is not None and request.frees_claim:
        draft.change_claim(replace(request.claim, phase=None), request.token.call_id)


def _relation(record: Record | None, token: Token) -> Relation | None:
    """How the delivery ``token`` relates to the content of a slot; None if it may take the slot."""
    # Other values are forged or foreign: claims and completion records have keys of their own.
    if record is None or record.kind is Kind.CLAIM:
        return Relation.OTHER
    held = Token.parse(record.token)
    if held.call_id != token.call_id:
        return Relation.OTHER
    held_ordinal, ordinal = (held.nesting, held.retries), (token.nesting, token.retries)
    if held_ordinal > ordinal:
        return Relation.LATER
    if record.kind is Kind.COOLING:
        return Relation.OTHER
    if held_ordinal < ordinal:
        return Relation.EARLIER
    if record.kind is Kind.RESERVED or (record.kind is Kind.LEASE and held.nonce == token.nonce):
        return None
    return Relation.DUPLICATE


def _grant(draft: Draft, request: Acquire, slot: str) -> Granted:
    fence = _WRITE_NUMBER if len(request.slots) == 1 else None
    lease = _record(Kind.LEASE, str(request.token), request.holder, fence=fence)
    draft.changes[slot] = Entry(lease, request.ttl, renewed=True)
    if request.claim is not None and not request.keeps_claim:
        claim = replace(request.claim, ttl=request.ttl)
        draft.change_claim(claim, request.token.call_id, holder=request.holder, renewed=True)
    return Granted(key=slot, fence=None)


def _refused_by_other(draft: Draft, request: Acquire, key: str) -> Refused:
    record = draft.record(key)
    others = map(draft.record, request.slots[1:] if key == request.slots[0] else ())
    _free_claim(draft, request)
    return Refused(
        relation=Relation.OTHER, record=record, others=tuple(other for other in others if other)
    )


def renewal(leases: Sequence[Lease]) -> Transition[list[Renewal]]:
    """Prolong each lease that its token still holds, and its claim, which is never shortened."""
    keys = dict.fromkeys(key for one in leases for key in (one.key, one.claim_key) if key)
    return Transition(tuple(keys), lambda draft: [_renew(draft, lease) for lease in leases])


def _renew(draft: Draft, lease: Lease) -> Renewal:
    record = draft.record(lease.key)
    if draft.get(lease.key) is None:
        return LossReason.GONE
    if record is None or record.token != str(lease.token):
        return LossReason.REPLACED
    if record.kind is not Kind.LEASE:
        return LossReason.DYING if record.kind is Kind.DYING else LossReason.REPLACED
    draft.changes[lease.key] = Entry(record, lease.ttl, renewed=True)
    claim = draft.claim(lease.claim_key) if lease.claim_key else None
    if claim and claim.token == lease.token.call_id and claim.ttl < lease.ttl:
        draft.changes[lease.claim_key] = Entry(claim, lease.ttl, renewed=True)
    return RENEWED


def _release(draft: Draft, request: Release, completion_key: str) -> ReleaseReply:
    """Release the keys that the token holds, and what ends with them: claim, completion record."""
    reply, own = _release_keys(draft, request)
    # The worker parent has reported the end of a dying holder, and knows whether its message comes
    # back.
    keeps_claim = own is not None and own.kind is not Kind.DYING and reply is ReleaseReply.OURS
    if request.claim is not None and (
        keeps_claim or (reply is not ReleaseReply.DUPLICATE and request.claim.phase is None)
    ):
        holder = Holder() if own is None else own.holder
        draft.change_claim(request.claim, request.token.call_id, holder=holder)
    if reply is ReleaseReply.OURS and request.completion is None:
        return reply  # The completion record need not be read: nothing depends on it.
    return _complete(draft, request, completion_key, reply)


def _release_keys(draft: Draft, request: Release) -> tuple[ReleaseReply, Record | None]:
    """Delete the keys that the token holds, or change their kind. Keep keys of other tokens.

    Returns:
        The reply, and the last record of the token; None: it holds no key.
    """
    reply, own = ReleaseReply.NOT_OURS, None
    for key in request.keys:
        record = draft.record(key)
        if record is not None and record.token == str(request.token):
            reply, own = ReleaseReply.OURS, record
            if record.kind in (Kind.LEASE, Kind.DYING):
                draft.changes[key] = _remainder(record, request)
        elif record is not None and record.token.startswith(f"{request.token.attempt}|"):
            reply = ReleaseReply.DUPLICATE
    return reply, own


def _complete(
    draft: Draft, request: Release, completion_key: str, reply: ReleaseReply
) -> ReleaseReply:
    """Write the completion record of the attempt, unless it is done.

    Returns:
        ``reply``, or that another delivery has finished the attempt.
    """
    completion = draft.value(completion_key, Completion)
    if completion is not None and completion.state is CompletionState.DONE:
        is_ours = completion.nonce == request.token.nonce or reply is ReleaseReply.OURS
        return reply if is_ours else ReleaseReply.DONE
    # DONE is sent when Celery has stored the outcome, so it holds for duplicates too: the request
    # may have got no reply before the lease ended, and a duplicate that has the key now may never
    # begin.
    is_over = request.completion is CompletionState.DONE
    if request.completion is not None and (is_over or reply is not ReleaseReply.DUPLICATE):
        sequence = completion.sequence if completion else 0
        new = Completion(request.completion, sequence, request.token.nonce)
        draft.changes[completion_key] = Entry(new, request.completion_ttl)
    return reply


def _remainder(record: Record, request: Release) -> Entry | None:
    if request.become is None:
        return None
    new = replace(record, kind=request.become, token=str(request.next_token or request.token))
    return Entry(new, request.become_ttl)
