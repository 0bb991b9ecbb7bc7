"""The rows of `metrics` as counters and histograms of Prometheus; needs ``prometheus-client``.

`celery singleton serve` feeds them from worker events, so prefork workers need no multiprocess
directory. A process that exposes its own metrics can use them as a sink instead.
"""

from __future__ import annotations

from typing import Any, Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from ..core.events import Event
from .metrics import BUCKETS, COUNTERS, HISTOGRAMS, KNOWN, is_counted

_PREFIX: Final = "celery_singleton_"
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
        options: Any = {"unit": "seconds", "registry": registry, "buckets": BUCKETS}
        self._histograms = {
            event: (Histogram(_PREFIX + name, text, ["task"], **options), field)
            for event, (name, text, field) in HISTOGRAMS.items()
        }
        self._tasks: set[str] = set()

    def begin(self, task: str) -> None:
        """Begin the counters of ``task`` with 0: its first event is no increase otherwise."""
        if task in self._tasks:
            return
        self._tasks.add(task)
        for event, values in KNOWN.items():
            counter, _ = self._counters[event]
            for value in values or (None,):
                counter.labels(label(task), *([] if value is None else [label(value)]))

    def __call__(self, event: Event, times: int = 1) -> None:
        """Count the event, which was emitted ``times`` times."""
        self.begin(event.task)
        task = label(event.task)
        if event.name in self._counters and is_counted(event):
            counter, names = self._counters[event.name]
            counter.labels(task, *(label(event.data.get(name, "")) for name in names)).inc(times)
        if event.name in self._histograms:
            histogram, field = self._histograms[event.name]
            value = event.data.get(field)
            if isinstance(value, (int, float)):
                of_task = histogram.labels(task)
                for _ in range(times):
                    of_task.observe(value)


def label(value: Any) -> str:
    """``value`` as the value of a label, which must be UTF-8: a task's name may be any text."""
    return str(value)[:_MAX_LABEL_CHARS].encode(errors="replace").decode()
