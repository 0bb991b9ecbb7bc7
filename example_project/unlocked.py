"""Stand-ins for `celery_singleton_lock`, for the run that shows what happens without it.

Same names, no lock: `singleton_task` drops the lock's options and registers a plain Celery task.
"""

from collections.abc import Callable
from typing import Any

from celery import Celery
from celery.result import AsyncResult

LOCK_OPTIONS = {
    *("key", "scope", "limit", "ttl", "max_hold", "min_hold", "on_conflict", "on_lost"),
    *("unique", "unique_for", "on_duplicate"),
}


def singleton_task(*, app: Celery, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    plain = {name: value for name, value in options.items() if name not in LOCK_OPTIONS}
    register: Callable[[Callable[..., Any]], Any] = app.task(**plain)
    return register


def claim_and_send(
    app: Celery, name: str, args: tuple[object, ...], *, singleton: object, key: str
) -> "AsyncResult[Any]":
    """Every call is published: without a claim no publisher knows of the one that waits."""
    return app.send_task(name, args)


class OnConflict:
    @staticmethod
    def retry(**_bounds: float) -> None:
        """Nothing to wait for: without a lock there is no conflict."""


class NoLease:
    """What a body gets that asks for its lease: it always seems valid, and has no fence."""

    fence: int | None = None

    def check(self) -> None:
        """Never raises: no lock is checked."""


def current_lease() -> NoLease:
    return NoLease()


def is_skipped(_value: object) -> bool:
    return False
