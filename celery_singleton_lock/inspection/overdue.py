"""When a message that was published is so late that it may be lost."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from ..core.lease import Phase
from .keys import HeldKey

# The phases of a claim in which a worker has yet to take the message.
_QUEUED: Final = (Phase.QUEUED, Phase.RETRYING)
_OVERDUE_SHARE: Final = 0.1


def overdue(claim: HeldKey, unique_for: float | None, now: datetime) -> float:
    """Return for how many seconds the message of a claim is overdue, or 0 if it isn't.

    An overdue message waits in its queue behind others, or it is lost (a purged queue). A message
    is overdue after a tenth of its task's ``unique_for``.

    Args:
        claim: The claim. The result is 0 for other keys, and for a claim of ``"until_expired"``.
        unique_for: The task's ``unique_for``, in seconds. The result is 0 without it.
        now: The time at which the key was read.
    """
    if unique_for is None or claim.since is None or claim.phase not in _QUEUED:
        return 0.0
    late, age = unique_for - claim.ttl, (now - claim.since).total_seconds()
    # If it seems to be overdue for longer than it exists, its call has set another unique_for, or
    # expires before.
    return late if unique_for * _OVERDUE_SHARE < late <= age + 1 else 0.0
