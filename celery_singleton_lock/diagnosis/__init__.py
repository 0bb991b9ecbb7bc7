"""``celery singleton doctor``: what is wrong with an app's locks, and what would be.

Promises
    Nothing is changed but one key of its own, which it takes and gives back. A right that is
    missing (INFO, CONFIG, SCAN denied by an ACL) makes a finding less, never an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from celery import Celery

from celery_singleton_lock.diagnosis.finding import Finding, Severity
from celery_singleton_lock.diagnosis.probe import probe
from celery_singleton_lock.diagnosis.redis import examine_redis
from celery_singleton_lock.diagnosis.tasks import examine_tasks
from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.redis import RedisStore

__all__ = ["Finding", "Severity", "diagnose"]


def diagnose(app: Celery) -> Iterator[Finding]:
    """Look at the settings, the store and the tasks of ``app``, in this order.

    What can't be looked at because something before it is broken is left out.
    """
    runtime = Runtime.of(app)
    try:
        settings, store = runtime.settings, runtime.store
    except SingletonLockError as exc:
        yield Finding(Severity.ERROR, "settings", str(exc), "correct this setting")
        return
    yield Finding(Severity.OK, "store", f"{settings.safe_url}, from {settings.url_source}")
    answered = True
    for finding in probe(runtime):
        answered = answered and finding.severity is not Severity.ERROR
        yield finding
    if answered:
        yield from _examine_store(runtime, store)
    yield from examine_tasks(app, runtime)


def _examine_store(runtime: Runtime, store: Any) -> Iterator[Finding]:
    if isinstance(store, RedisStore):
        yield from examine_redis(store, runtime.keyspace, wall=runtime.clock.wall)
