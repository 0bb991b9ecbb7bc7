"""At most one body per lock key at a time, for Celery tasks: across workers, hosts and crashes."""

from __future__ import annotations

from celery_singleton_lock.by_name import claim_and_send
from celery_singleton_lock.core.key import PER_TASK
from celery_singleton_lock.core.lease import Lease
from celery_singleton_lock.core.options import OnConflict
from celery_singleton_lock.core.policy import CallOptions
from celery_singleton_lock.decorator import singleton_task
from celery_singleton_lock.errors import (
    DuplicateTask,
    FenceUnavailable,
    LeaseLost,
    LockConflict,
    LockKeyError,
    NoLease,
    SettingsError,
    SingletonLockError,
    StoreError,
    StoreUnavailable,
)
from celery_singleton_lock.hold import hold
from celery_singleton_lock.instrumentation.signals import (
    lease_acquired,
    lease_conflict,
    lease_lost,
    lease_released,
)
from celery_singleton_lock.skipped import is_skipped
from celery_singleton_lock.task import SingletonTask, current_lease

__version__ = "0.1.0"

__all__ = [
    "PER_TASK",
    "CallOptions",
    "DuplicateTask",
    "FenceUnavailable",
    "Lease",
    "LeaseLost",
    "LockConflict",
    "LockKeyError",
    "NoLease",
    "OnConflict",
    "SettingsError",
    "SingletonLockError",
    "SingletonTask",
    "StoreError",
    "StoreUnavailable",
    "claim_and_send",
    "current_lease",
    "hold",
    "is_skipped",
    "lease_acquired",
    "lease_conflict",
    "lease_lost",
    "lease_released",
    "singleton_task",
]
