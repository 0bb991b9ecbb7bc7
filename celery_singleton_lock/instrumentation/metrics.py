"""The counters and histograms of all monitoring systems; `prometheus` and others export them.

Names are without prefix and unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..core.events import Event, EventName
from ..core.lease import LossReason
from ..option_values import OnDuplicate

#: For each event its counter: the name, the description, and the fields of the event's data that
#: become labels next to ``task``.
COUNTERS: Final[Mapping[EventName, tuple[str, str, tuple[str, ...]]]] = {
    EventName.ACQUIRED: ("acquisitions", "Leases acquired.", ()),
    EventName.RELEASED: ("releases", "Leases released by their holders.", ()),
    EventName.CONFLICT: ("conflicts", "Calls that met another holder.", ("outcome",)),
    EventName.DUPLICATE: ("duplicates", "Calls of unique tasks not published.", ("outcome",)),
    EventName.CANCELLED: ("cancellations", "Calls cancelled by a newer call.", ()),
    EventName.LEASE_LOST: ("losses", "Leases lost while their task ran.", ("reason",)),
    EventName.RELEASE_FAILED: ("release_failures", "Releases without a definite reply.", ()),
    EventName.FREED: ("freed", "Leases of dead processes freed by other processes.", ()),
    EventName.REQUEUED: ("requeues", "Messages published again, to run later.", ("reason",)),
    EventName.DROPPED: ("drops", "Copies of messages dropped.", ("reason",)),
    EventName.JOINED: ("joins", "Calls that wait in the queue of their key.", ()),
    EventName.PUBLISHED: ("publications", "Messages published in their turn.", ()),
    EventName.STALLED: ("stalls", "Messages published three times or more without a run.", ()),
    EventName.REMOVED: ("removals", "Calls taken out of the queue of their key.", ("reason",)),
    EventName.PAUSED: ("pauses", "Pauses of keys and scopes.", ()),
    EventName.RESUMED: ("resumptions", "Pauses that somebody ended.", ()),
    EventName.STORE_UNREACHABLE: ("store_failures", "Requests that the store did not answer.", ()),
    EventName.STORE_BACK: ("store_recoveries", "Outages of the store that ended.", ()),
    EventName.BROKER_UNREACHABLE: ("broker_failures", "Outages of a Beat's broker.", ()),
    EventName.BROKER_BACK: ("broker_recoveries", "Outages of a Beat's broker that ended.", ()),
    EventName.LEADING: ("elections_won", "Elections that a Beat process won.", ()),
    EventName.STANDING_BY: ("elections_lost", "Elections that a Beat process lost.", ()),
    EventName.RESIGNED: ("resignations", "Beat leaders that resigned.", ()),
}
#: The counters with which each task begins, at 0: from nothing to 1 is no increase to Prometheus.
#: For each event the values of its label, where they are known before.
KNOWN: Final[Mapping[EventName, tuple[str, ...]]] = {
    EventName.ACQUIRED: (),
    EventName.RELEASED: (),
    EventName.CONFLICT: ("skip", "requeued", "wait", "raise", "revoke", "parked"),
    EventName.DUPLICATE: tuple(OnDuplicate),
    EventName.CANCELLED: (),
    # DYING is no loss: the worker parent reports the end.
    EventName.LEASE_LOST: tuple(reason for reason in LossReason if reason is not LossReason.DYING),
    EventName.RELEASE_FAILED: (),
    EventName.FREED: (),
    EventName.REQUEUED: ("conflict",),
    EventName.JOINED: (),
    EventName.PUBLISHED: (),
    EventName.STALLED: (),
    EventName.REMOVED: ("cancelled", "revoked", "expired", "lost"),
    EventName.STORE_UNREACHABLE: (),
}
#: For each event its histogram: the name, the description, and the field of its data, in seconds.
HISTOGRAMS: Final[Mapping[EventName, tuple[str, str, str]]] = {
    EventName.ACQUIRED: ("wait", "Time that an acquired lease was waited for.", "waited"),
    EventName.RELEASED: ("hold", "Time for which a released lease was held.", "held"),
}
#: Upper bounds in seconds: from a body of 10 ms to a nightly job of 24 h.
BUCKETS: Final = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)


def is_counted(event: Event) -> bool:
    """Whether the counter of ``event`` counts it.

    A call that is requeued again and again is one call with a conflict. Its tries are requeues.
    """
    if event.name is not EventName.CONFLICT:
        return True
    return not (event.data.get("again") and event.data.get("outcome") == "requeued")
