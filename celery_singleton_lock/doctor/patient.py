"""The app under examination: what the examinations need to know of it."""

from __future__ import annotations

from dataclasses import dataclass

from celery import Celery

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.runtime import Runtime, singleton_tasks
from celery_singleton_lock.settings import Settings

__all__ = ["Patient", "ttls_by_task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """One app.

    Attributes:
        store: Where its leases live.
        settings: The app's.
        keyspace: Its keys.
        clock: Of this host.
        ttls: Of its tasks and of its beats' leader, in seconds, the shortest first.
    """

    store: Store
    settings: Settings
    keyspace: Keyspace
    clock: Clock
    ttls: tuple[float, ...]

    @classmethod
    def of(cls, runtime: Runtime) -> Patient:
        """The app of ``runtime``.

        Raises:
            SettingsError: Its settings are wrong, or its store can't be opened.
        """
        ttls = {runtime.settings.beat_ttl, *ttls_by_task(runtime.app).values()}
        return cls(
            store=runtime.store,
            settings=runtime.settings,
            keyspace=runtime.keyspace,
            clock=runtime.clock,
            ttls=tuple(sorted(ttls)),
        )


def ttls_by_task(app: Celery) -> dict[str, float]:
    """Seconds, by the name of each task whose policy agrees with the app's settings."""
    ttls: dict[str, float] = {}
    for task in singleton_tasks(app):
        try:
            ttls[task.name] = task.singleton_policy().ttl
        except (TypeError, ValueError):
            pass  # a worker refuses it, and the examination of the tasks says so
    return ttls
