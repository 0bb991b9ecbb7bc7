"""Gauges, computed from the readings when Prometheus asks for them.

A gauge that were counted up and down by events would drift at each lost event; these can't.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..doctor import Severity
from ..inspection.keys import HeldKey, unique_for_by_task
from ..inspection.overdue import overdue
from ..instrumentation.prometheus import label
from .listener import Listener
from .readings import Reading, Readings

_PREFIX: Final = "celery_singleton_"
_Labels = tuple[str, ...]


class Gauges(Collector):
    """The gauges of one app.

    Args:
        readings: The app's readings.
        listener: The receiver of worker events.
        beat_name: The name of the app's Beat election.
    """

    def __init__(self, readings: Readings, listener: Listener, beat_name: str) -> None:
        self._readings, self._listener, self._beat_name = readings, listener, beat_name

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Nothing: otherwise the registration would read the store."""
        return ()

    def collect(self) -> Iterator[Metric]:
        reading = self._readings.keys.get()
        yield _gauge("store_up", "Whether the store answers (1) or not (0).", not reading.error)
        connected = not self._listener.error
        yield _gauge("events_up", "Whether the worker events' broker is connected (1).", connected)
        text = "Worker events that workers could not send."
        yield CounterMetricFamily(f"{_PREFIX}dropped_events", text, self._listener.dropped)
        findings = [one for one in self._readings.findings if one.severity is not Severity.OK]
        by_kind = Counter[_Labels]((str(one.severity), label(one.subject)) for one in findings)
        text = "Findings of the doctor that are not ok."
        yield _family("findings", text, ("severity", "subject"), by_kind)
        if not reading.error:
            yield from self._of_store(reading)

    def _of_store(self, reading: Reading) -> Iterator[GaugeMetricFamily]:
        by_state = Counter[_Labels](
            (label(key.task), key.state) for key in reading.keys if not key.is_free
        )
        yield _family("keys", "Keys held or claimed.", ("task", "state"), by_state)
        yield self._of_claims(reading)
        yield from _of_waiting(reading)
        paused = Counter[_Labels]((label(one.scope),) for one in reading.pauses)
        text = "Pauses of a scope, or of keys in it."
        yield _family("paused", text, ("scope",), paused)
        leases = [key for key in reading.keys if key.state == "running"]
        text = "Age of the task's oldest lease."
        yield _family("oldest_lease_seconds", text, ("task",), _oldest(leases, reading.age))
        awaited = [key for key in reading.keys if key.waiting]
        text = "Age of the task's oldest lease for which clients wait."
        ages = _oldest(awaited, reading.age)
        yield _family("oldest_awaited_lease_seconds", text, ("task",), ages)
        leads = reading.leader(self._beat_name) is not None
        text = "Whether a Beat process leads (1) or none (0)."
        yield _family("beat_leader", text, ("name",), {(label(self._beat_name),): leads})

    def _of_claims(self, reading: Reading) -> GaugeMetricFamily:
        unique_for = unique_for_by_task(self._readings.app)
        late: dict[_Labels, float] = dict.fromkeys([(label(key.task),) for key in reading.keys], 0)
        for key in reading.keys:
            if overdue(key, unique_for.get(key.task), reading.at):
                late[label(key.task),] += 1
        text = "Claims whose message should have begun, and may be lost."
        return _family("overdue_claims", text, ("task",), late)


def _of_waiting(reading: Reading) -> Iterator[GaugeMetricFamily]:
    keys = reading.keys
    if all(key.waiting is not None for key in keys if not key.is_free):
        waiting = _sum_by_task((key, key.waiting or 0) for key in keys)
        text = "Clients in the wait queues of the task's keys."
        yield _family("waiting_clients", text, ("task",), waiting)
    counted = [key for key in keys if key.calls is not None]
    calls = _sum_by_task((key, key.calls or 0) for key in counted)
    text = "Calls that wait in the queues of the task's keys."
    yield _family("waiting_calls", text, ("task",), calls)
    text = "Age of the oldest call that waits in a queue of the task's keys."
    oldest = _oldest(counted, reading.wait)
    yield _family("oldest_waiting_call_seconds", text, ("task",), oldest)


def _sum_by_task(counts: Iterable[tuple[HeldKey, int]]) -> Counter[_Labels]:
    total = Counter[_Labels]()
    for key, count in counts:
        total[label(key.task),] += count
    return total


def _oldest(keys: Iterable[HeldKey], age: Callable[[HeldKey], float]) -> dict[_Labels, float]:
    ages: dict[_Labels, float] = {}
    for key in keys:
        task = (label(key.task),)
        ages[task] = max(ages.get(task, 0.0), age(key))
    return ages


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, text, value=value)


def _family(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[_Labels, float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(_PREFIX + name, text, labels=labels)
    for of_labels, value in values.items():
        family.add_metric(of_labels, value)
    return family
