"""Whether the store does what locking needs of it: tried out, on a key of the doctor's own."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from typing import Final

from celery_singleton_lock.core.heartbeat import MAX_TIMEOUT, timeout_for
from celery_singleton_lock.core.lease import Holder, Lease, Token
from celery_singleton_lock.core.store import RENEWED, Acquire, Granted, Relation, Release
from celery_singleton_lock.doctor.finding import Finding, Severity
from celery_singleton_lock.doctor.patient import ttls_by_task
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.publish.header import mint_nonce
from celery_singleton_lock.runtime import Runtime

__all__ = ["probe"]

# Enough for a median that one slow reply doesn't move; a second on a link of 25 ms.
_ROUNDS: Final = 20
_TTL: Final = 10.0
_RIGHTS_IN_REDIS: Final = (
    "grant what docs/options.md lists for an ACL user, or make the store writable"
)
_RIGHTS: Final = {
    "etcd": "etcdctl role grant-permission ROLE readwrite --prefix PATH, with the path of "
    "singleton_lock_url; or clear the alarm that makes it read-only",
    "zookeeper": "the login under which the nodes were made; or setAcl, or another path in "
    "singleton_lock_url",
}
# A reply may take ttl/6; more than a tenth of that leaves little for a bad day.
_COMFORTABLE: Final = 0.1


def probe(runtime: Runtime) -> Iterator[Finding]:
    """Acquire, renew, release; measure how long that takes, and compare with the tasks' ttl."""
    try:
        seconds = [_round(runtime) for _ in range(_ROUNDS)]
    except StoreUnavailable as exc:
        yield Finding(
            Severity.ERROR,
            "reachability",
            str(exc),
            "start the store, or correct singleton_lock_url; until then tasks are put back",
        )
        return
    except StoreError as exc:
        yield Finding(
            Severity.ERROR,
            "rights",
            str(exc),
            _RIGHTS.get(runtime.store.capabilities.name, _RIGHTS_IN_REDIS),
        )
        return
    median = statistics.median(seconds)
    yield Finding(
        Severity.OK, "reachability", f"acquire, renew and release work; {median * 1000:.1f} ms each"
    )
    yield from _compare(runtime, median)


def _compare(runtime: Runtime, median: float) -> Iterator[Finding]:
    ttls = ttls_by_task(runtime.app)
    if not ttls:
        return
    shortest = min(ttls, key=ttls.__getitem__)
    ttl = ttls[shortest]
    if median > timeout_for(ttl) * _COMFORTABLE:
        yield Finding(
            Severity.WARNING,
            "latency",
            f"a reply takes {median * 1000:.1f} ms, and {shortest} with ttl={ttl:g} s waits "
            f"{timeout_for(ttl) * 1000:.0f} ms for one",
            "a longer ttl, or a store that is nearer",
        )


def _round(runtime: Runtime) -> float:
    """Seconds that one operation takes, the mean of three."""
    store, clock, nonce = runtime.store, runtime.clock, mint_nonce()
    key = runtime.keyspace.lock("singleton-doctor", nonce)
    token = Token(f"doctor-{nonce}", 0, 0, nonce)
    holder = Holder(
        task_id=token.task_id, worker=runtime.worker, pid=os.getpid(), since=clock.wall()
    )
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
