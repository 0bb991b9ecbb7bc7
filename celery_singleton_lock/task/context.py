"""The leases that the current thread, greenlet or coroutine holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_singleton_lock.errors import NoLease

if TYPE_CHECKING:
    from celery_singleton_lock.core.lease import Lease


@dataclass(slots=True, eq=False)
class HeldLeases:
    """A linked list of held leases: the innermost lease, and the leases around it.

    With tuples, ten thousand nested blocks would have ten thousand tuples of up to that length.
    """

    innermost: Lease
    others: HeldLeases | tuple[()]

    def __iter__(self) -> Iterator[Lease]:
        found: HeldLeases | tuple[()] = self
        while found:
            yield found.innermost
            found = found.others


#: The leases held in the current context; empty: none.
held_leases: ContextVar[HeldLeases | tuple[()]] = ContextVar("singleton_held_leases", default=())


def current_lease() -> Lease:
    """The innermost lease held in the current context.

    Raises:
        NoLease: No lease is held here: the task was called directly, its key is None, or this is
            another thread.
    """
    leases = held_leases.get()
    if not leases:
        raise NoLease(
            "no lease is held here: current_lease() works inside the body of a singleton task or a "
            "hold() block, on the same thread; a task that is called directly takes no lock"
        )
    return leases.innermost
