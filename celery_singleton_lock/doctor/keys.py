"""Keys under our names that this library can't have written: locks of a recipe, say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.doctor.finding import Finding, Severity
from celery_singleton_lock.errors import StoreError

__all__ = ["examine_keys"]

# More are the same mistake again.
_SHOWN: Final = 10


def examine_keys(store: Store, keyspace: Keyspace) -> Iterator[Finding]:
    """Tell of them; nothing is ever deleted here."""
    try:
        strays = list(store.foreign_keys(keyspace.match_all()))
    except StoreError as exc:
        text = f"SCAN is denied, so foreign keys are unknown ({exc})"
        yield Finding(Severity.NOTE, "keys", text)
        return
    for key, what in strays[:_SHOWN]:
        yield Finding(
            Severity.WARNING,
            "keys",
            f"{key!r} {what}: other code uses a lock's name, and a task with that key can't run",
            "find out who writes it, then delete it or choose another singleton_lock_prefix",
        )
    if len(strays) > _SHOWN:
        yield Finding(Severity.WARNING, "keys", f"{len(strays) - _SHOWN} more of this kind")
