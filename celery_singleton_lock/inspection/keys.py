"""The keys that are held or claimed: list them, find one, release them.

Guarantees
    Reading changes nothing. A release compares the token, unless the caller passes None for it, and
    stores who released the key and why, so that the holder reports the loss with it.

Non-guarantees
    A list is no snapshot: keys are acquired and released while it is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from heapq import merge
from itertools import islice
from typing import Final

from celery import Celery
from celery.utils.nodenames import gethostname

from .. import typed_keys as names
from ..core.call_queue import Depth
from ..core.keyspace import Keyspace, stored_names
from ..core.lease import HANDOFF_TASK, Kind, OperatorRelease, Record, Token
from ..core.locker import notice_free
from ..core.process import is_proven_dead
from ..core.store import operators_of
from ..errors import SingletonLockError, StoreError, StoreUnavailable
from ..key_queue import inspection as queues
from ..policy import Policy
from ..runtime import Runtime, singleton_tasks
from .pauses import Paused, pauses_if_allowed

# Keys whose waiting clients are counted in one request.
_COUNTED_AT_ONCE: Final = 500
_FREE: Final = "free"
_PAUSED: Final = "paused"
_RATE_LIMITED: Final = "rate-limited"
_EMPTY: Final = Depth(waiting=0, oldest_at=None)
_STATES: Final = {
    Kind.LEASE: "running",
    Kind.RESERVED: "reserved for a retry",
    Kind.COOLING: "cooldown",
    Kind.DYING: "being killed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldKey:
    """A key that is held or claimed, and its holder.

    Attributes:
        key: The full key.
        state: ``running``, ``reserved for a retry``, ``reserved for a waiting client``,
            ``cooldown``, ``being killed``, or ``claim, <phase>``. If nothing holds the key but
            calls wait in its queue, it is ``paused``, ``rate-limited`` or ``free``, and ``task_id``
            is the next one.
        phase: For a claim, ``queued``, ``running``, ``retrying`` or ``published``; else None.
        task: The task's name; empty for a ``hold()``.
        task_id: The task's id, or the id of the ``hold()``. It is empty if the key is reserved for
            a waiting client.
        worker: The worker's name, or the host's outside of workers. For a claim, the caller's.
        pid: The process id of the holder. For a claim, the caller's.
        since: When the key was acquired, or the claimed call was sent. None if unknown.
        ttl: In how many seconds the key expires unless it is renewed.
        fence: The fencing token, or None if the key has none.
        token: The token to pass to ``release``.
        waiting: How many clients are in the wait queue. None if you didn't ask for it.
        calls: How many calls wait in the queue of the key. None if you didn't ask for it.
        oldest_call: When the first of these calls joined the queue. None if no call waits.
        call_ttl: The ttl that the call has set, in seconds. None if it uses the task's.
        is_dead: Whether the holder's process no longer exists on this host. False if that can't be
            proven, such as for a process on another host or in another container.
    """

    key: str
    state: str
    phase: str | None
    task: str
    task_id: str
    worker: str
    pid: int
    since: datetime | None
    ttl: float
    fence: int | None
    token: str
    waiting: int | None = None
    calls: int | None = None
    oldest_call: datetime | None = None
    call_ttl: float | None = None
    is_dead: bool = False

    @classmethod
    def of(cls, record: Record, depth: Depth | None = None, *, is_dead: bool = False) -> HeldKey:
        """Make a ``HeldKey`` of a record of the store.

        Args:
            record: The record.
            depth: What waits in the queue of the key. None if it was not counted.
            is_dead: Whether the holder's process is proven dead.
        """
        holder = record.holder
        calls, oldest = _calls_in(depth, is_claim=record.phase is not None)
        return cls(
            key=record.key,
            state=_state(record),
            phase=_phase(record),
            task=holder.task,
            task_id="" if holder.task_id == HANDOFF_TASK else holder.task_id,
            worker=holder.worker,
            pid=holder.pid,
            since=_moment(holder.since),
            ttl=record.ttl,
            fence=record.fence,
            token=record.token,
            calls=calls,
            oldest_call=oldest,
            call_ttl=holder.ttl or None,
            is_dead=is_dead,
        )

    @property
    def scope(self) -> str:
        """The scope of the key."""
        return names.scope_of(self.key)

    @property
    def is_free(self) -> bool:
        """Whether nothing holds the key, but calls are in its queue."""
        return self.state in (_FREE, _PAUSED, _RATE_LIMITED)

    @property
    def is_claim(self) -> bool:
        """Whether this is only the claim of a message. A claim doesn't prevent a run."""
        return self.phase is not None


def policies_by_task(app: Celery) -> dict[str, Policy]:
    """The policy of each singleton task, by name; a call may set other options."""
    found: dict[str, Policy] = {}
    for task in singleton_tasks(app):
        with suppress(TypeError, ValueError):  # a worker refuses such a task
            found[task.name] = task.singleton_policy()
    return found


def unique_for_by_task(app: Celery) -> dict[str, float]:
    """Return the ``unique_for`` of each singleton task, in seconds, by the task's name."""
    return {name: policy.unique_for for name, policy in policies_by_task(app).items()}


class SortBy(StrEnum):
    """How ``held_keys`` sorts.

    By ``key``, ``age`` (the oldest first), ``ttl`` (the next to expire first), ``task`` or
    ``waiting`` (the most waiting first).
    """

    KEY = "key"
    AGE = "age"  # the oldest first
    TTL = "ttl"  # the next to expire first
    TASK = "task"
    WAITING = "waiting"  # the longest wait queue first


#: The key by which each order sorts.
SORT_KEYS: Final[dict[SortBy, Callable[[HeldKey], tuple[float | str, ...]]]] = {
    SortBy.KEY: lambda held: (held.key,),
    SortBy.AGE: lambda held: (held.since.timestamp() if held.since else float("inf"), held.key),
    SortBy.TTL: lambda held: (held.ttl, held.key),
    SortBy.TASK: lambda held: (held.task, held.key),
    SortBy.WAITING: lambda held: (-(held.waiting or 0) - (held.calls or 0), held.key),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which keys to list: those that meet all conditions.

    Attributes:
        pattern: A part of the key, or a glob (``*``, ``?``, ``[...]``) for the whole key, with or
            without its prefix.
        task: The name of the task.
        scope: The scope of the key.
        task_id: The id of the task.
        older_than: For how many seconds the key must have been held.
        waiting: True lists only keys for which clients or calls wait.
    """

    pattern: str = ""
    task: str = ""
    scope: str = ""
    task_id: str = ""
    older_than: float = 0.0
    waiting: bool = False

    def of(self, records: Iterable[Record], now: float) -> Iterator[Record]:
        """Return the records that match. This ignores ``waiting``."""
        matches = self.matcher()
        return (
            record
            for record in records
            if matches(record.key)
            and self.task in ("", record.holder.task)
            and (not self.task_id or is_of_task(record, self.task_id))
            and (not self.older_than or 0 < record.holder.since <= now - self.older_than)
        )

    def matcher(self) -> Callable[[str], bool]:
        """Return a function that says whether a key matches ``pattern`` and ``scope``."""
        matches, scope = names.matcher(self.pattern), self.scope
        return lambda key: matches(key) and (not scope or names.is_in_scope(key, scope))


def held_keys(
    app: Celery,
    conditions: Filter | None = None,
    *,
    sort: SortBy = SortBy.KEY,
    counts_waiting: bool = False,
    counts_calls: bool = False,
    report: Callable[[str, str], None] | None = None,
) -> Iterator[HeldKey]:
    """List the keys that are held or claimed.

    Args:
        app: The app.
        conditions: Which keys to list. By default all.
        sort: The order. Except with ``KEY``, all keys are read before the first is returned.
        counts_waiting: True counts the waiting clients of each key.
        counts_calls: True counts the calls in the queue of each key, and also lists free keys with
            such calls.
        report: A function that is called for each key under the app's prefix that another program
            wrote. It gets the key and what is wrong with it.

    Raises:
        StoreError: The store refused the request, or can't be reached.
        SingletonLockError: You set ``counts_waiting``, but the store can't count them.
    """
    runtime, conditions = Runtime.of(app), conditions or Filter()
    records = operators_of(runtime.store).survey(
        runtime.keyspace.match_all(), report or (lambda key, reason: None)
    )
    found: Iterator[HeldKey]
    if counts_calls:
        found = _with_calls(app, conditions, records)
    else:
        found = map(reader(runtime), conditions.of(records, runtime.clock.wall()))
    if conditions.waiting or counts_waiting or sort is SortBy.WAITING:
        found = _with_waiting(runtime, found)
        if conditions.waiting:
            found = (held for held in found if held.waiting or held.calls)
    return found if sort is SortBy.KEY else iter(sorted(found, key=SORT_KEYS[sort]))


def find_key(app: Celery, name: str) -> HeldKey | None:
    """Find a key that is held, by its full name or a short one.

    You can omit the prefix ``csl:{...}:``, or both the prefix and the scope. The name may be
    percent-encoded or plain text, and may omit the slot of a task with ``limit`` above 1. Name a
    claim with everything after ``csl:{...}:``.

    Returns:
        The key, or None if no such key is held. Then ``can_be_a_key`` says whether a task can
        have it.

    Raises:
        AmbiguousKey: ``name`` is the short name of several keys.
    """
    runtime = Runtime.of(app)
    if (
        runtime.keyspace.is_full(name)
        and (record := runtime.store.leases.inspect(name)) is not None
    ):
        return reader(runtime)(record)
    wanted, found = stored_names(name), defaultdict[int, list[Record]](list)
    try:
        records = [*operators_of(runtime.store).scan(runtime.keyspace.match_all())]
    except StoreUnavailable:
        raise
    except StoreError:
        if runtime.keyspace.is_full(name):
            return None  # the login may not search, and nothing has this very name
        raise
    for record in records:
        matching = [n for n, one in enumerate(names.spellings(record)) if one in wanted]
        if matching:
            found[matching[0]].append(record)
    # A complete name of one record takes precedence over a shortened name of another.
    return _only(runtime, name, found[min(found)] if found else [])


def find_task(app: Celery, task_id: str) -> HeldKey | None:
    """Find the key that a task holds: its lease, or else its claim. None if it has none.

    Raises:
        AmbiguousKey: The task holds several keys.
    """
    runtime = Runtime.of(app)
    records = operators_of(runtime.store).scan(runtime.keyspace.match_all())
    found = [record for record in records if is_of_task(record, task_id)]
    leases = [record for record in found if record.kind is not Kind.CLAIM]
    return _only(runtime, task_id, leases or found)


def release(app: Celery, key: str, token: str | None, *, reason: str = "", user: str = "") -> bool:
    """Release a key that is held, or a claim.

    A task that holds it is interrupted at its next renewal, within ``ttl``/3. A ``with hold()``
    block isn't. The next holder gets a higher fencing token. If you release a claim, its message
    still runs.

    Args:
        app: The app.
        key: The full key, as in ``HeldKey.key``.
        token: The token of the holder that you saw (``HeldKey.token``). If another holder has the
            key by now, it isn't released. None releases the key from any holder.
        reason: Why you release it, for the holder's log and error; cut to 500 characters.
        user: Who releases it. By default the login of this process.

    Returns:
        True if the key was released, False if it's free or another token has it.
    """
    runtime = Runtime.of(app)
    at = runtime.clock.wall()
    who, why = user or names.login(), reason[: names.MAX_REASON_CHARS]
    by = OperatorRelease(user=who, host=gethostname(), reason=why, at=at)
    is_freed = operators_of(runtime.store).free(key, token, by)
    if is_freed and runtime.keyspace.is_lock(key):
        notice_free(runtime.store, key)
    return is_freed


def is_of_task(record: Record, task_id: str) -> bool:
    """Whether the task of this id has the key."""
    owner = Token.task_id_of(record.token.partition("|")[0])
    return task_id in (owner, record.holder.task_id)


def reader(runtime: Runtime) -> Callable[..., HeldKey]:
    """``HeldKey.of`` for the records of one search, with the proof that a process is dead."""

    @cache  # a process may hold many keys
    def is_dead(process: str, pid: int) -> bool:
        return is_proven_dead(process, pid, runtime.process)

    def read(record: Record, depth: Depth | None = None) -> HeldKey:
        is_lease, by = record.kind is Kind.LEASE, record.holder
        return HeldKey.of(record, depth, is_dead=is_lease and is_dead(by.process, by.pid))

    return read


def _only(runtime: Runtime, name: str, records: Sequence[Record]) -> HeldKey | None:
    if len(records) > 1:
        raise names.ambiguous(name, [record.key for record in records])
    return reader(runtime)(records[0]) if records else None


def _with_waiting(runtime: Runtime, found: Iterator[HeldKey]) -> Iterator[HeldKey]:
    store = runtime.store
    if (queue := store.wait_queue) is None:
        raise SingletonLockError(
            f"the store {store.capabilities.name!r} keeps no wait queues, so the clients that wait "
            "for a key are not known: they poll"
        )
    while some := [*islice(found, _COUNTED_AT_ONCE)]:
        counts = queue.lengths([held.key for held in some])
        for held, count in zip(some, counts, strict=True):
            yield replace(held, waiting=0 if held.is_claim else count)


def _with_calls(app: Celery, conditions: Filter, records: Iterable[Record]) -> Iterator[HeldKey]:
    """The matching keys with their waiting calls, and the free ones that have any, by key."""
    depths, now, held_names = queues.depths(app), Runtime.of(app).clock.wall(), set[str]()
    read = reader(Runtime.of(app))
    if not depths:
        return (read(one, _EMPTY) for one in conditions.of(records, now))

    def noted() -> Iterator[Record]:
        for record in records:
            held_names.add(record.key)
            yield record

    held = [read(record, depths.get(record.key, _EMPTY)) for record in conditions.of(noted(), now)]
    matches, free, paused = conditions.matcher(), list[HeldKey](), pauses_if_allowed(app)
    for key, depth in depths.items():
        is_free = depth.waiting and key not in held_names and not conditions.older_than
        if is_free and matches(key):
            one = _free(app, key, depth, paused)
            if conditions.task in ("", one.task) and conditions.task_id in ("", one.task_id):
                free.append(one)
    by_key = SORT_KEYS[SortBy.KEY]
    return merge(held, sorted(free, key=by_key), key=by_key)


def with_calls(app: Celery, held: HeldKey | None, name: str) -> HeldKey | None:
    """Add the number of waiting calls to a key, or find a free key for which calls wait.

    Raises:
        AmbiguousKey: Nothing holds the key, and ``name`` is the short name of several queues.
    """
    if held is not None and (held.is_claim or Runtime.of(app).store.call_queue is None):
        return held
    key = held.key if held else queues.find_queue_if_allowed(app, name)
    depth = queues.depth(app, key) if key else None
    if held is not None:
        return with_depth(held, depth)
    if not (key and depth and depth.waiting):
        return None
    return _free(app, key, depth, pauses_if_allowed(app))


def with_depth(held: HeldKey, depth: Depth | None) -> HeldKey:
    """The key with what waits in its queue; None: nothing does."""
    calls, oldest = _calls_in(depth or _EMPTY, is_claim=held.is_claim)
    return replace(held, calls=calls, oldest_call=oldest)


def _calls_in(depth: Depth | None, *, is_claim: bool) -> tuple[int | None, datetime | None]:
    """The number of calls that wait, and when the first of them joined."""
    if depth is None or is_claim:  # a claim has no queue
        return None, None
    return depth.waiting, _moment(depth.oldest_at or 0.0)


def _free(app: Celery, key: str, depth: Depth, paused: Sequence[Paused]) -> HeldKey:
    """A key that nothing holds, with the call that runs next, unless it is ``paused``."""
    call = queues.first_call(app, key)
    state = _RATE_LIMITED if call and call.starts_in > 0 else _FREE
    free = HeldKey(
        key=key,
        state=_PAUSED if any(one.includes(key) for one in paused) else state,
        phase=None,
        task=call.task if call else "",
        task_id=call.task_id if call else "",
        worker="",
        pid=0,
        since=None,
        ttl=0.0,
        fence=None,
        token="",
    )
    return with_depth(free, depth)


def _state(record: Record) -> str:
    if record.holder.task_id == HANDOFF_TASK:
        return "reserved for a waiting client"
    return f"claim, {_phase(record)}" if record.phase else _STATES[record.kind]


def _phase(record: Record) -> str | None:
    """The state of a claim's message; in a period, the store does not know whether it has run."""
    return "published" if Keyspace.is_period(record.key) else record.phase


def _moment(since: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(since, UTC) if since else None
    except (ValueError, OverflowError, OSError):
        return None  # not a time: another program wrote this record
