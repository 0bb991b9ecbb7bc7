"""The calls in the queues of keys (``on_conflict="queue"``): list them, find one.

Non-guarantees
    A list is no snapshot: calls join, begin and end while it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Final

from celery import Celery

from ..core.call_queue import CallQueue, CallState, Depth, QueuedCall
from ..core.heartbeat import MAX_TIMEOUT
from ..core.keyspace import stored_names
from ..core.lease import Token
from ..errors import SettingsError, StoreError, StoreUnavailable
from ..message.stored_message import StoredMessage
from ..runtime import Runtime
from ..typed_keys import ambiguous, without_prefix

# Calls that are read in one request, with their messages; keys whose calls are counted in one.
_READ_AT_ONCE: Final = 100
_FOUND_AT_ONCE: Final = 1000
_COUNTED_AT_ONCE: Final = 500
_STATES: Final = {
    CallState.WAITS: "waiting",
    CallState.HINTED: "published",
    CallState.BEGUN: "running",
    CallState.OVERDUE: "running",
    CallState.LEAVES: "leaving",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInQueue:
    """A call in the queue of a key.

    Attributes:
        key: The lock key.
        position: The position in the queue. The call at 1 runs, or runs next.
        task: The task's name. Empty if the store has no message, because the call never waited.
        task_id: The task's id.
        state: ``waiting``, ``published`` (a worker has yet to begin it), ``running`` (or its lease
            has just ended), or ``leaving`` (it won't run).
        since: When the call joined the queue.
        copies: How often its message was sent.
        routing_key: The routing key of its message; with most brokers the name of its queue.
        has_begun: Whether this attempt has begun.
        broker: The URL of the caller's broker, without the password.
        call_id: The name of the call in the store (``Token.call_id``).
        starts_in: Seconds until the rate of the key lets the first call start. 0 for other calls.
    """

    key: str
    position: int
    task: str
    task_id: str
    state: str
    since: datetime
    copies: int
    routing_key: str
    has_begun: bool
    broker: str
    call_id: str
    starts_in: float = 0.0

    @classmethod
    def of(cls, call: QueuedCall) -> CallInQueue:
        """Make a ``CallInQueue`` of a call in the store."""
        message = message_of(call.message)
        return cls(
            key=call.key,
            position=call.position + 1,
            task=str(message.headers.get("task") or "") if message else "",
            task_id=Token.task_id_of(call.call_id),
            state=_STATES[call.state],
            since=datetime.fromtimestamp(call.joined_at, UTC),
            copies=call.copies,
            routing_key=str(message.properties.get("routing_key") or "") if message else "",
            has_begun=call.has_begun,
            broker=message.broker if message else "",
            call_id=call.call_id,
            starts_in=call.countdown,
        )


def depths(app: Celery) -> dict[str, Depth]:
    """What waits in the queues that are not empty, by key.

    Empty if the store keeps no queues, or its login may not read them.
    """
    found: dict[str, Depth] = {}
    for queue, keys in _keys_if_allowed(app):
        for start in range(0, len(keys), _COUNTED_AT_ONCE):
            some = keys[start : start + _COUNTED_AT_ONCE]
            found.update(zip(some, queue.depths(some, timeout=MAX_TIMEOUT), strict=True))
    return found


def heads(app: Celery, most: int) -> Iterator[CallInQueue]:
    """The first calls of at most ``most`` queues."""
    for key in islice((key for _, keys in _keys_if_allowed(app) for key in keys), most):
        if (call := first_call(app, key)) is not None:
            yield call


def first_call(app: Celery, key: str) -> CallInQueue | None:
    """The first call in the queue of ``key``; None: none is in it."""
    found = queue_of(app).calls(key, most=1, timeout=MAX_TIMEOUT)
    return CallInQueue.of(found[0]) if found else None


def depth(app: Celery, key: str) -> Depth:
    """What waits in the queue of one key."""
    with suppress(StoreError):
        (found,) = queue_of(app).depths([key], timeout=MAX_TIMEOUT)
        return found
    return Depth(waiting=0, oldest_at=None)


def calls_in_queue(app: Celery, key: str) -> Iterator[CallInQueue]:
    """List the calls in the queue of a key (its full name), in the order in which they run.

    Raises:
        SettingsError: The store doesn't support queues.
        StoreError: The store refused the request, or can't be reached.
    """
    # All are read first: if the caller cancels one, the positions of those behind it change.
    return iter([*map(CallInQueue.of, _calls(queue_of(app), key, _READ_AT_ONCE))])


def find_call(app: Celery, task_id: str) -> CallInQueue | None:
    """Find the queued call with a task id. None if there is none, or you lack the rights."""
    return next(_calls_of(_keys_if_allowed(app), [task_id]), None)


def find_calls(app: Celery, task_ids: Collection[str]) -> Iterator[CallInQueue]:
    """Find the queued calls with these task ids. Each queue is searched once.

    Raises:
        StoreError: The store refused the request, or can't be reached.
    """
    return _calls_of(_keys(app), task_ids)


def _calls_of(
    queues: Iterable[tuple[CallQueue, list[str]]], task_ids: Collection[str]
) -> Iterator[CallInQueue]:
    for queue, keys in queues:
        for key in keys:
            for call in [*_calls(queue, key, _FOUND_AT_ONCE, messages=False)]:
                if Token.task_id_of(call.call_id) in task_ids:
                    # With its message, unless it has left meanwhile.
                    yield CallInQueue.of(next(_at(queue, call), call))


def calls_before(app: Celery, call: CallInQueue) -> tuple[CallInQueue | None, CallInQueue | None]:
    """The first call of the queue and the one just before ``call``; None: ``call`` is the first."""
    first = before = _call_at(app, call.key, 1) if call.position > 1 else None
    if call.position > 2:
        before = _call_at(app, call.key, call.position - 1)
    return first, before


def _call_at(app: Celery, key: str, position: int) -> CallInQueue | None:
    found = queue_of(app).calls(key, first=position - 1, most=1, timeout=MAX_TIMEOUT)
    return CallInQueue.of(found[0]) if found else None


def find_queue(app: Celery, name: str) -> str | None:
    """Find a key with calls in its queue, by a name as for ``find_key``. None if there is none.

    Raises:
        AmbiguousKey: ``name`` is the short name of several keys.
        StoreError: The store refused the request, or can't be reached.
    """
    return _queue_named(name, _keys(app))


def find_queue_if_allowed(app: Celery, name: str) -> str | None:
    """As `find_queue`; None also if the login may not look.

    Raises:
        AmbiguousKey: ``name`` is the short name of several keys.
    """
    return _queue_named(name, _keys_if_allowed(app))


def _queue_named(name: str, queues: Iterable[tuple[CallQueue, list[str]]]) -> str | None:
    wanted = stored_names(name)
    found = [
        key
        for _, keys in queues
        for key in keys
        if not wanted.isdisjoint((key, without_prefix(key), without_prefix(key).partition(":")[2]))
    ]
    if len(found) > 1:
        raise ambiguous(name, found)
    return found[0] if found else None


def queue_of(app: Celery) -> CallQueue:
    store = Runtime.of(app).store
    if store.call_queue is None:
        raise SettingsError(f"the store {store.capabilities.name!r} keeps no queues of calls")
    return store.call_queue


def _keys(app: Celery) -> Iterator[tuple[CallQueue, list[str]]]:
    """The keys whose queues are not empty, in one list for each shard."""
    runtime = Runtime.of(app)
    queue = runtime.store.call_queue
    if queue is None:
        return
    for shard in runtime.keyspace.all_shards():
        if keys := queue.keys(shard, timeout=MAX_TIMEOUT):
            yield queue, sorted(keys)


def _keys_if_allowed(app: Celery) -> Iterator[tuple[CallQueue, list[str]]]:
    """As `_keys`, without those that the login may not read: it may use locks, but no queues."""
    try:
        yield from _keys(app)
    except StoreUnavailable:
        raise
    except StoreError:
        return


def _calls(queue: CallQueue, key: str, most: int, *, messages: bool = True) -> Iterator[QueuedCall]:
    first = 0
    while some := queue.calls(key, first=first, most=most, messages=messages, timeout=MAX_TIMEOUT):
        yield from some
        first += most


def _at(queue: CallQueue, call: QueuedCall) -> Iterator[QueuedCall]:
    """The call as it is now, with its message."""
    position = queue.position(call.key, call.call_id, timeout=MAX_TIMEOUT)
    if position is not None:
        found = queue.calls(call.key, first=position, most=1, timeout=MAX_TIMEOUT)
        yield from (one for one in found if one.call_id == call.call_id)


def message_of(text: bytes) -> StoredMessage | None:
    with suppress(ValueError):
        return StoredMessage.from_bytes(text)
    return None
