"""The leases that the current thread, greenlet or coroutine holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from celery_singleton_lock.errors import NoLease

if TYPE_CHECKING:
    from celery_singleton_lock.core.lease import Lease


#: The innermost lease held in the current context; its `outer` leads to the others. None: none.
held_lease: ContextVar[Lease | None] = ContextVar("singleton_held_lease", default=None)


def held_leases() -> Iterator[Lease]:
    """The leases held in the current context, innermost first."""
    lease = held_lease.get()
    while lease is not None:
        yield lease
        lease = lease.outer


def current_lease() -> Lease:
    """The innermost lease held in the current context.

    Raises:
        NoLease: No lease is held here: the task was called directly, its key is None, or this is
            another thread.
    """
    lease = held_lease.get()
    if lease is None:
        raise NoLease(
            "no lease is held here: current_lease() works inside the body of a singleton task or a "
            "hold() block, on the same thread; a task that is called directly takes no lock"
        )
    return lease
