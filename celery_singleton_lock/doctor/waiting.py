"""Whether those who wait for a key can be called when it is given back."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from celery_singleton_lock.doctor.finding import Finding, Severity
from celery_singleton_lock.doctor.patient import Patient
from celery_singleton_lock.errors import StoreError

__all__ = ["examine_waiting"]


def examine_waiting(patient: Patient) -> Iterator[Finding]:
    """The rights that it takes, tried out on a line of the doctor's own."""
    store = patient.store
    if not store.capabilities.wakes_waiters:
        return  # all others look, whatever they may do
    key = patient.keyspace.lock("singleton-doctor", secrets.token_hex(8))
    try:
        missing = store.missing_rights(key)
    except StoreError:
        return  # it went away; what is asked next says so
    if not missing:
        yield Finding(Severity.OK, "waiting", "who waits for a key is called when it is given back")
        return
    yield Finding(
        Severity.NOTE,
        "waiting",
        f"the login may not use {', '.join(missing)}: who waits for a key isn't called when it is "
        "given back, but looks every half second",
        f"grant {' '.join(f'+{name.lower()}' for name in missing)}, see docs/options.md",
    )
