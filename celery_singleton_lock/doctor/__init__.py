"""``celery singleton doctor``: what is wrong with an app's locks, and what would be.

Promises
    Nothing is changed but one key of its own, and the line of those who wait for it. A right that
    is missing (INFO, CONFIG, SCAN denied by an ACL) makes a finding less, never an error. A member
    that is away, while the store works without it, is a warning.

Every sort of store has an examination in a module of its own; its client is imported with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, cast

from celery import Celery

from celery_singleton_lock.doctor.cluster import examine_cluster
from celery_singleton_lock.doctor.finding import Finding, Severity
from celery_singleton_lock.doctor.keys import examine_keys
from celery_singleton_lock.doctor.patient import Patient
from celery_singleton_lock.doctor.probe import probe
from celery_singleton_lock.doctor.redis import examine_redis
from celery_singleton_lock.doctor.redlock import examine_redlock
from celery_singleton_lock.doctor.sentinel import examine_sentinel
from celery_singleton_lock.doctor.tasks import examine_tasks
from celery_singleton_lock.doctor.waiting import examine_waiting
from celery_singleton_lock.errors import SingletonLockError, StoreError
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores import is_sentinel_url
from celery_singleton_lock.stores.redis.cluster import ClusterStore
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.stores.redlock.store import RedlockStore

if TYPE_CHECKING:
    from celery_singleton_lock.stores.zookeeper.store import ZooKeeperStore

__all__ = ["Finding", "Severity", "diagnose"]


def diagnose(app: Celery) -> Iterator[Finding]:
    """Look at the settings, the store and the tasks of ``app``, in this order.

    What can't be looked at because something before it is broken is left out.
    """
    runtime = Runtime.of(app)
    try:
        patient = Patient.of(runtime)
    except SingletonLockError as exc:
        yield Finding(Severity.ERROR, "settings", str(exc), "correct this setting")
        return
    settings = patient.settings
    yield Finding(Severity.OK, "store", f"{settings.safe_url}, from {settings.url_source}")
    works = True
    for finding in chain(_shards(patient), probe(runtime)):
        yield finding
        if finding.severity is Severity.ERROR:
            works = False
            break
    # Also of a store that doesn't work: its members may tell why.
    yield from _examine_store(patient)
    if works:
        yield from examine_waiting(patient)
        yield from examine_keys(patient.store, patient.keyspace)
    yield from examine_tasks(app, runtime)


def _examine_store(patient: Patient) -> Iterator[Finding]:
    try:
        yield from _examination(patient)
    except StoreError as exc:
        # It went away between two questions.
        yield Finding(Severity.WARNING, "store", str(exc), "run doctor again")


def _examination(patient: Patient) -> Iterator[Finding]:
    store = patient.store
    if isinstance(store, ClusterStore):
        return examine_cluster(store, patient)
    if isinstance(store, RedlockStore):
        return examine_redlock(patient)
    if isinstance(store, RedisStore):
        behind_sentinels = is_sentinel_url(patient.settings.url)
        return examine_sentinel(patient) if behind_sentinels else examine_redis(store, patient)
    # The clients of these are installed only where they are wanted.
    if store.capabilities.name == "etcd":
        from celery_singleton_lock.doctor.etcd import examine_etcd

        return examine_etcd(patient)
    if store.capabilities.name == "zookeeper":
        from celery_singleton_lock.doctor.zookeeper import examine_zookeeper

        return examine_zookeeper(cast("ZooKeeperStore", store), patient)
    return iter(())


def _shards(patient: Patient) -> Iterator[Finding]:
    """Whether apps that look for the same locks in other places have been here."""
    try:
        problems = patient.store.problems(patient.keyspace.lock("", ""))
    except StoreError:
        return  # the probe says so
    for problem in problems:
        cure = "one singleton_lock_url for all apps of this prefix"
        yield Finding(Severity.ERROR, "shards", problem, cure)
