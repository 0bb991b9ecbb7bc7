"""Checks that run the store's operations on the doctor's own keys."""

from __future__ import annotations

import os
import secrets
import statistics
from typing import Final

from celery_singleton_lock.core.heartbeat import MAX_TIMEOUT, timeout_for
from celery_singleton_lock.core.lease import Holder, Lease, Token
from celery_singleton_lock.core.store import RENEWED, Acquire, Granted, Relation, Release
from celery_singleton_lock.doctor.context import (
    Context,
    Findings,
    error,
    is_slow,
    note,
    ok,
    warning,
)
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.runtime import IN_MEMORY

# Measurements for a median that one slow reply doesn't change; 1 s on a link of 25 ms.
_ROUNDS: Final = 20
_TTL: Final = 10.0
# The number of foreign keys that are reported. More would repeat the same mistake.
_SHOWN_KEYS: Final = 10
_RIGHTS_IN_REDIS: Final = (
    "grant what docs/options.md lists for an ACL user, or make the store writable"
)
_RIGHTS: Final = {
    "etcd": "etcdctl role grant-permission ROLE readwrite --prefix PATH, with the path of "
    "singleton_lock_url; or clear the alarm that makes it read-only",
    "zookeeper": "the login under which the nodes were made; or setAcl, or another path in "
    "singleton_lock_url",
}


def check_processes(context: Context) -> Findings:
    """Whether the store is in memory: pools in one process accept it, prefork workers refuse it."""
    yield note("store", IN_MEMORY, "another singleton_lock_url, if the workers use prefork")


def check_shards(context: Context) -> Findings:
    """Whether all apps with this prefix use the same number of shards."""
    try:
        problems = context.store.problems(context.runtime.keyspace.lock("", ""))
    except StoreError:
        return  # check_leases reports it
    for problem in problems:
        yield error("shards", problem, "one singleton_lock_url for all apps of this prefix")


def check_leases(context: Context) -> Findings:
    """Acquire, renew and release a lease; compare the time per operation with the tasks' ttl."""
    try:
        median = statistics.median(_operation_time(context) for _ in range(_ROUNDS))
    except StoreUnavailable as exc:
        remedy = "start the store, or correct singleton_lock_url; until then tasks are put back"
        yield error("reachability", str(exc), remedy)
        return
    except StoreError as exc:
        remedy = _RIGHTS.get(context.kind, _RIGHTS_IN_REDIS)
        if "DB index" in str(exc):
            remedy = "correct the database number in singleton_lock_url"
        yield error("rights", str(exc), remedy)
        return
    yield ok("reachability", f"acquire, renew and release work; {median * 1000:.1f} ms each")
    ttls = context.ttls_by_task
    shortest = min(ttls, key=ttls.__getitem__, default="")
    if shortest and is_slow(median, ttl := ttls[shortest]):
        wait = timeout_for(ttl) * 1000
        text = f"{median * 1000:.1f} ms a reply; {shortest} with ttl={ttl:g} s waits {wait:.0f} ms"
        yield warning("latency", text, "a longer ttl, or a store that is nearer")


def _operation_time(context: Context) -> float:
    """Seconds that one operation takes, the mean of three."""
    store, clock, nonce = context.store, context.clock, secrets.token_hex(8)
    key = context.runtime.keyspace.lock("singleton-doctor", nonce)
    token = Token(f"doctor-{nonce}", 0, 0, nonce)
    worker = context.runtime.worker
    holder = Holder(task_id=token.task_id, worker=worker, pid=os.getpid(), since=clock.wall())
    begin = clock.now()
    granted = store.acquire(
        Acquire(slots=(key,), token=token, holder=holder, ttl=_TTL), timeout=MAX_TIMEOUT
    )
    lease = Lease(
        key=key,
        token=token,
        ttl=_TTL,
        holder=holder,
        valid_until=begin + _TTL,
        acquired_at=begin,
        clock=clock,
    )
    renewed = store.renew([lease], timeout=MAX_TIMEOUT)
    released = store.release(Release(keys=(key,), token=token), timeout=MAX_TIMEOUT)
    took = (clock.now() - begin) / 3
    replies = (isinstance(granted, Granted), renewed, released)
    if replies != (True, [RENEWED], Relation.OURS):
        raise StoreError(f"a lease of its own was not kept: {granted}, {renewed}, {released}")
    return took


def check_waiting(context: Context) -> Findings:
    """Whether the login has the rights to wake waiting calls."""
    if not context.store.capabilities.wakes_waiters:
        return
    key = context.runtime.keyspace.lock("singleton-doctor", secrets.token_hex(8))
    missing = context.store.missing_rights(key)
    if not missing:
        yield ok("waiting", "a call that waits for a key is woken when the key is released")
        return
    yield note(
        "waiting",
        f"the login may not use {', '.join(missing)}: a call that waits for a key isn't woken when "
        "the key is released, but looks every half second",
        f"grant {' '.join(f'+{name.lower()}' for name in missing)}, see docs/options.md",
    )


def check_keys(context: Context) -> Findings:
    """Keys under this library's names that other software wrote. They are never deleted."""
    foreign = list(context.store.foreign_keys(context.runtime.keyspace.match_all()))
    for key, what in foreign[:_SHOWN_KEYS]:
        text = f"{key!r} {what}: other code uses a lock's name, and a task with that key can't run"
        remedy = "find out what writes it, then delete it or choose another singleton_lock_prefix"
        yield warning("keys", text, remedy)
    if len(foreign) > _SHOWN_KEYS:
        yield warning("keys", f"{len(foreign) - _SHOWN_KEYS} more of this kind")
