"""Counters and histograms for Prometheus; needs the package ``prometheus-client``.

`celery singleton serve` feeds them from worker events, so prefork workers need no multiprocess
directory. A process that exposes its own metrics can use them as a sink instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from ..core.events import Event, EventName

#: For each event its counter: the name without prefix and ``_total``, the help, and the fields of
#: the event's data that become labels beside ``task``.
COUNTERS: Final[Mapping[EventName, tuple[str, str, tuple[str, ...]]]] = {
    EventName.ACQUIRED: ("acquisitions", "Leases acquired.", ()),
    EventName.RELEASED: ("releases", "Leases released by their holders.", ()),
    EventName.CONFLICT: ("conflicts", "Calls that met another holder.", ("outcome",)),
    EventName.DUPLICATE: ("duplicates", "Calls of unique tasks not published.", ("outcome",)),
    EventName.CANCELLED: ("cancellations", "Calls cancelled by a newer call.", ()),
    EventName.LEASE_LOST: ("losses", "Leases lost before their body ended.", ("reason",)),
    EventName.RELEASE_FAILED: ("release_failures", "Releases without a definite reply.", ()),
    EventName.FREED: ("freed", "Leases of dead processes freed by other processes.", ()),
    EventName.PUT_BACK: ("put_backs", "Messages published again, to run later.", ("reason",)),
    EventName.DROPPED: ("drops", "Copies of messages dropped.", ("reason",)),
    EventName.STORE_UNREACHABLE: ("store_failures", "Requests that the store did not answer.", ()),
    EventName.LEADING: ("elections_won", "Elections that a Beat process won.", ()),
    EventName.STANDING_BY: ("elections_lost", "Elections that a Beat process lost.", ()),
    EventName.RESIGNED: ("resignations", "Beat leaders that resigned.", ()),
}
#: For each event its histogram: the name without prefix, the help, and the field of its data.
HISTOGRAMS: Final[Mapping[EventName, tuple[str, str, str]]] = {
    EventName.ACQUIRED: ("wait_seconds", "Time that an acquired lease was waited for.", "waited"),
    EventName.RELEASED: ("hold_seconds", "Time for which a released lease was held.", "held"),
}
_PREFIX: Final = "celery_singleton_"
# From a skip's neighbour to a nightly job.
_BUCKETS: Final = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
_MAX_LABEL_CHARS: Final = 200


class PrometheusMetrics:
    """A sink that counts events.

    Args:
        registry: The registry that exposes the metrics.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._counters = {
            event: (Counter(_PREFIX + name, text, ("task", *labels), registry=registry), labels)
            for event, (name, text, labels) in COUNTERS.items()
        }
        self._histograms = {
            event: (
                Histogram(_PREFIX + name, text, ["task"], registry=registry, buckets=_BUCKETS),
                field,
            )
            for event, (name, text, field) in HISTOGRAMS.items()
        }

    def __call__(self, event: Event) -> None:
        """Count the event. An event without a counter is ignored."""
        task = label(event.task)
        if event.name in self._counters:
            counter, names = self._counters[event.name]
            counter.labels(task, *(label(event.data.get(name, "")) for name in names)).inc()
        if event.name in self._histograms:
            histogram, field = self._histograms[event.name]
            value = event.data.get(field)
            if isinstance(value, (int, float)):
                histogram.labels(task).observe(value)


def label(value: Any) -> str:
    """``value`` as the value of a label, which must be UTF-8: a task's name may be any text."""
    return str(value)[:_MAX_LABEL_CHARS].encode(errors="replace").decode()
