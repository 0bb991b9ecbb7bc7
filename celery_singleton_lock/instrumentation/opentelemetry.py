"""Traces and metrics through the OpenTelemetry API, which needs the package ``opentelemetry-api``.

Overview
    `instrument` adds a sink of events. The events of a task become events and attributes of the
    span that is current when the task asks for its lease. With the package
    opentelemetry-instrumentation-celery, that is the span of the task's run. Metrics count all
    events.

Guarantees
    Spans have a digest of the key instead of the key, unless `instrument` is told otherwise. A loss
    that the heartbeat's thread detects is in the span of the task that lost its lease.

Non-guarantees
    What happens after a span has ended is not in it: a release that the heartbeat resends, or that
    the worker parent sends for a dead child.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry import metrics, trace
from opentelemetry.metrics import Meter, MeterProvider
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from ..core.events import Event, EventName
from .metrics import BUCKETS, COUNTERS, HISTOGRAMS, KNOWN, is_counted
from .sinks import add_sink

_SCOPE: Final = "celery_singleton_lock"
_PREFIX: Final = "celery.singleton."
_DIGEST_BYTES: Final = 8
_ENDS_OF_A_LEASE: Final = frozenset(
    {EventName.RELEASED, EventName.LEASE_LOST, EventName.RELEASE_FAILED}
)
# The events that decide what becomes of a task's run; the last one is its outcome.
_OUTCOMES: Final = frozenset(
    {
        EventName.ACQUIRED,
        EventName.CONFLICT,
        EventName.REQUEUED,
        EventName.DROPPED,
        EventName.CANCELLED,
        EventName.LEASE_LOST,
    }
)
# The data of events that are also attributes of the span.
_MEASURES: Final = ("fence", "waited", "held")


def instrument(*, keys: bool = False, meter_provider: MeterProvider | None = None) -> None:
    """Add events and attributes to the spans of tasks, and count all events.

    Call it once, where the app is created. The SDK may be set up earlier or later, and by each
    child of a prefork worker.

    Args:
        keys: Whether spans also have the lock keys. A key contains the arguments that its template
            names.
        meter_provider: The provider of the metrics; None: the global one.
    """
    add_sink(_Traces(keys=keys))
    add_sink(_Metrics(metrics.get_meter(_SCOPE, meter_provider=meter_provider)))


def digest_of(key: str) -> str:
    """The attribute ``celery.singleton.key_digest`` for a key in full, as `ls` prints it."""
    return hashlib.blake2b(key.encode(), digest_size=_DIGEST_BYTES).hexdigest()


class _Traces:
    """A sink that adds events and attributes to spans."""

    def __init__(self, *, keys: bool) -> None:
        self._keys = keys
        # The span of each task or hold() with a lease, by its id: the heartbeat's thread has none.
        self._spans: dict[str, Span] = {}

    def __call__(self, event: Event) -> None:
        known = self._spans.get(event.task_id)
        span = known or trace.get_current_span()
        if event.name in _ENDS_OF_A_LEASE:
            self._spans.pop(event.task_id, None)
        if not span.is_recording():
            return
        if event.name is EventName.ACQUIRED:
            self._spans[event.task_id] = span
        fields = self._fields(event)
        span.add_event(_PREFIX + event.name.replace("-", "_"), fields)
        if event.task and (known or event.name in _OUTCOMES):
            span.set_attributes(_attributes(event, fields))

    def _fields(self, event: Event) -> dict[str, AttributeValue]:
        digest = digest_of(event.key)
        fields: dict[str, Any] = {"key_digest": digest, **event.data}
        if event.holder.worker:
            fields["holder"] = event.holder
        if self._keys:
            fields["key"] = event.key
        shown = event.key if self._keys else digest
        return {
            _PREFIX + name: _value(value, event.key, shown)
            for name, value in fields.items()
            if value is not None
        }


def _value(value: Any, key: str, shown: str) -> AttributeValue:
    """``value`` as an attribute; a text, such as an error, may contain the key."""
    return value if isinstance(value, (bool, int, float)) else str(value).replace(key, shown)


def _attributes(event: Event, fields: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
    """The attributes that ``event`` adds to the span of its task's run."""
    names = [f"{_PREFIX}{name}" for name in ("key", "key_digest", *_MEASURES)]
    found = {name: fields[name] for name in names if name in fields}
    if event.name in _OUTCOMES:
        found[f"{_PREFIX}outcome"] = str(event.data.get("outcome") or event.name)
    return found


class _Metrics:
    """A sink that counts events, as `PrometheusMetrics` does and under the same names."""

    def __init__(self, meter: Meter) -> None:
        self._counters = {
            event: (meter.create_counter(_PREFIX + name, "{event}", text), labels)
            for event, (name, text, labels) in COUNTERS.items()
        }
        self._histograms = {
            event: (
                meter.create_histogram(
                    _PREFIX + name, "s", text, explicit_bucket_boundaries_advisory=BUCKETS
                ),
                field,
            )
            for event, (name, text, field) in HISTOGRAMS.items()
        }
        self._tasks: set[str] = set()

    def _begin(self, task: Mapping[str, str]) -> None:
        for event, values in KNOWN.items():
            counter, labels = self._counters[event]
            for value in values or ("",):
                counter.add(0, {**task, **{name: str(value) for name in labels}})

    def __call__(self, event: Event) -> None:
        task = {"task": event.task} if event.task else {}
        if event.task not in self._tasks:
            self._tasks.add(event.task)
            self._begin(task)
        if event.name in self._counters and is_counted(event):
            counter, labels = self._counters[event.name]
            counter.add(1, task | {name: str(event.data.get(name, "")) for name in labels})
        if event.name in self._histograms:
            histogram, field = self._histograms[event.name]
            if field in event.data:
                histogram.record(event.data[field], task)
