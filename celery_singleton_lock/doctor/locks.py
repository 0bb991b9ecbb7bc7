"""Checks of an app's locks: its store's operations, the keys there, and the queues of keys."""

from __future__ import annotations

import math
import os
import secrets
import statistics
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

from ..core.heartbeat import MAX_TIMEOUT, timeout_for
from ..core.lease import Holder, Lease, Token
from ..core.store import operators_of
from ..core.store_requests import RENEWED, Acquire, Granted, Release, ReleaseReply
from ..errors import StoreError, StoreUnavailable
from ..inspection.keys import HeldKey, unique_for_by_task
from ..inspection.overdue import overdue
from ..inspection.pauses import pauses_if_allowed
from ..key_queue.hint import STALLED_AFTER
from ..key_queue.inspection import heads
from ..runtime import IN_MEMORY
from ..stores.remedies import fault_of
from ..worker.other_prefix import PAGE, leases_elsewhere, text_of
from .context import SCOPE, Context, Findings, error, note, ok, warning
from .rights import check_queue_rights, check_waiting, missing_basics
from .servers import is_slow

# Measurements for a median that one slow reply doesn't change; 1 s on a link of 25 ms.
_ROUNDS: Final = 20
_TTL: Final = 10.0
# The number of foreign keys that are reported. More would repeat the same mistake.
_SHOWN_KEYS: Final = 10
# Keys of other programs in the store, through which a search takes some seconds.
_MANY_OTHERS: Final = 200_000
# Seconds after which a pause that does not end may have been forgotten.
_OLD_PAUSE: Final = 86400.0
# The number of queues whose first call is examined.
_SHOWN_QUEUES: Final = 100


def check_processes(context: Context) -> Findings:
    """Whether the store is in memory: pools in one process accept it, prefork workers refuse it."""
    yield note("store", IN_MEMORY, "another singleton_lock_url, if the workers use prefork")


def check_shards(context: Context) -> Findings:
    """Whether all apps with this prefix use the same number of shards."""
    with suppress(StoreError):  # check_leases reports it
        for problem in operators_of(context.store).problems(context.runtime.keyspace.lock("", "")):
            yield error("shards", problem, "one singleton_lock_url for all apps of this prefix")


def check_leases(context: Context) -> Findings:
    """Acquire, renew and release a lease; compare the time per operation with the tasks' ttl."""
    try:
        median = statistics.median(_operation_time(context) for _ in range(_ROUNDS))
    except StoreError as exc:
        subject, remedy = fault_of(context.kind, exc)
        if subject == "rights" and (finding := missing_basics(context)):
            yield finding
            return
        if isinstance(exc, StoreUnavailable):
            remedy += "; until then tasks are requeued"
        yield error(subject, str(exc), remedy)
        return
    yield ok("reachability", f"acquire, renew and release work; {median * 1000:.1f} ms each")
    ttls = context.ttls_by_task
    shortest = min(ttls, key=ttls.__getitem__, default="")
    if shortest and is_slow(median, ttl := ttls[shortest]):
        wait = timeout_for(ttl) * 1000
        text = f"{median * 1000:.1f} ms a reply; {shortest} with ttl={ttl:g} s waits {wait:.0f} ms"
        yield warning("latency", text, "a longer ttl, or a store in the same network")
    # It comes last, because an error of the store ends this check.
    if context.store.wait_queue is not None:
        yield check_waiting(context, context.store.wait_queue)
    if context.store.call_queue is not None:
        yield from check_queue_rights(context, context.store.call_queue)


def _operation_time(context: Context) -> float:
    """Seconds that one operation takes, the mean of three."""
    store, clock, nonce = context.store, context.clock, secrets.token_hex(8)
    key = context.runtime.keyspace.lock(SCOPE, nonce)
    token = Token(f"doctor-{nonce}", 0, 0, nonce)
    worker = context.runtime.worker
    holder = Holder(task_id=token.task_id, worker=worker, pid=os.getpid(), since=clock.wall())
    own: dict[str, Any] = {"token": token, "holder": holder, "ttl": _TTL}
    begin = clock.now()
    granted = store.leases.acquire(Acquire(slots=(key,), **own), timeout=MAX_TIMEOUT)
    lease = Lease(key=key, valid_until=begin + _TTL, acquired_at=begin, clock=clock, **own)
    renewed = store.leases.renew([lease], timeout=MAX_TIMEOUT)
    released = store.leases.release(Release(keys=(key,), token=token), timeout=MAX_TIMEOUT)
    if (isinstance(granted, Granted), renewed, released) != (True, [RENEWED], ReleaseReply.OURS):
        raise StoreError(f"a lease of its own was not kept: {granted}, {renewed}, {released}")
    return (clock.now() - begin) / 3


def check_prefix(context: Context) -> Findings:
    """Leases of this app's tasks under another ``global_keyprefix``."""
    if records := leases_elsewhere(context.runtime, context.store):
        remedy = f"one global_keyprefix for all processes of a deployment, see {PAGE}"
        yield warning("prefix", text_of(records, context.runtime), remedy)


NO_SCAN: Final = note("keys", "SCAN is denied, so foreign keys are unknown")


def check_keys(context: Context) -> Findings:
    """What a search for all keys shows.

    Foreign keys under this library's names, which are never deleted; overdue claims; many keys of
    other programs.
    """
    foreign: list[tuple[str, str]] = []
    late: dict[str, float] = {}
    now = datetime.fromtimestamp(context.runtime.clock.wall(), UTC)
    unique_for = unique_for_by_task(context.app)
    pattern = context.runtime.keyspace.match_all()
    own, size = 0, operators_of(context.store).size()

    def count(key: str, text: str) -> None:
        nonlocal own
        own += 1

    # Other stores than Redis would read everything a second time for the texts.
    texts = None if size is None else count
    for record in operators_of(context.store).survey(
        pattern, lambda *one: foreign.append(one), texts=texts
    ):
        own += 1
        if seconds := overdue(HeldKey.of(record), unique_for.get(record.holder.task), now):
            late[record.key] = seconds
    for key, seconds in islice(late.items(), _SHOWN_KEYS):
        text = (
            f"the message of {key!r} is overdue by {seconds:.0f} s: it waits in its queue, or is "
            "lost (a purged queue), and equal calls are answered with it"
        )
        remedy = f"more workers; if it is lost: celery -A ... singleton release '{key}'"
        yield warning("claims", text, remedy)
    if len(late) > _SHOWN_KEYS:
        yield warning("claims", f"{len(late) - _SHOWN_KEYS} more of this kind")
    for key, what in foreign[:_SHOWN_KEYS]:
        text = f"{key!r} {what}: other code uses a lock's name, and a task with that key can't run"
        remedy = "find out what writes it, then delete it or choose another singleton_lock_prefix"
        yield warning("keys", text, remedy)
    if len(foreign) > _SHOWN_KEYS:
        yield warning("keys", f"{len(foreign) - _SHOWN_KEYS} more of this kind")
    if size is not None and (others := size - own) >= _MANY_OTHERS:
        text = (
            f"{others:,} keys of other programs are next to {own:,} of ours: ls, watch, explain, "
            "doctor and serve look through all of them, at most a tenth of the server's time"
        )
        is_cluster = context.kind == "redis cluster"  # which has one database only
        where = "a cluster" if is_cluster else "a database"
        remedy = f"{where} of its own for the locks: singleton_lock_url"
        yield note("search", text, remedy if is_cluster else f'{remedy} = "redis://.../2"')


def check_pauses(context: Context) -> Findings:
    """Pauses that nothing ends, and that somebody may have forgotten."""
    now = datetime.fromtimestamp(context.runtime.clock.wall(), UTC)
    for one in pauses_if_allowed(context.app):
        age = (now - one.since).total_seconds() if one.since else math.inf
        if one.left is None and age > _OLD_PAUSE:
            what = f"'{one.key}'" if one.key else f"--scope '{one.scope}'"
            yield warning("pauses", str(one), f"celery -A ... singleton resume {what}")


def check_queues(context: Context) -> Findings:
    """Calls in the queues of keys that no worker begins, and calls of an app with another broker.

    The call that runs next is published by the worker that ends the one before it, if the call is
    of that worker's broker.
    """
    own = context.runtime.broker
    for call in heads(context.app, _SHOWN_QUEUES):
        name = f"{call.task}[{call.task_id}] in the queue of {call.key!r}"
        if call.broker not in ("", own):
            text = f"{name} was made by an app with the broker {call.broker}; this app has {own}"
            remedy = (
                "a singleton_lock_prefix of its own for each project; or, if the two are one, one "
                "spelling of its URL"
            )
            yield warning("queues", text, remedy)
        if call.state == "published" and call.copies >= STALLED_AFTER and not call.has_begun:
            yield warning(
                "queues",
                f"{name} was published {call.copies} times and has not begun",
                f"a worker that consumes the queue of the routing key {call.routing_key!r}, or "
                f"celery -A ... singleton cancel {call.task_id}",
            )
