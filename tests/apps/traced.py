"""Singleton tasks under the official instrumentation of Celery, with exporters in memory.

Its environment: BROKER_URL, RESULT_URL; KEYS=1, to have lock keys in the spans. The pool has one
process, so that `exported` sees what the tasks before it have left there.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery
from celery.signals import worker_init, worker_process_init
from opentelemetry import metrics, trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from celery_singleton_lock import OnConflict, current_lease, singleton_task
from celery_singleton_lock.instrumentation.opentelemetry import instrument

app = Celery(
    "traced",
    broker=os.environ["BROKER_URL"],
    backend=os.environ["RESULT_URL"],
    broker_connection_retry_on_startup=True,
)
spans, numbers = InMemorySpanExporter(), InMemoryMetricReader()


# Where users call it as the app is created. Here the test's process imports the app too, and sinks
# can't be removed.
@worker_init.connect(weak=False)
def add_sinks(**_: Any) -> None:
    instrument(keys=os.environ.get("KEYS") == "1")


@worker_process_init.connect(weak=False)
def set_up(**_: Any) -> None:
    """As opentelemetry-instrumentation-celery wants it for prefork: in each child."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([numbers]))
    CeleryInstrumentor().instrument()


@singleton_task(app=app, key="account:{name}", ttl=1)
def work(name: str, *, until_lost: bool = False) -> int | None:
    while until_lost:
        time.sleep(0.05)
    return current_lease().fence


@singleton_task(app=app, key="account:{name}", scope=work.name, ttl=1, acks_late=True)
def late(name: str) -> None: ...


@singleton_task(
    app=app, key="account:{name}", scope=work.name, on_conflict=OnConflict.retry(delay=0.2)
)
def patient(name: str) -> None: ...


@app.task
def exported() -> str:
    """The finished spans, and the points of all metrics, as JSON."""
    data: Any = numbers.get_metrics_data()
    return json.dumps(
        {
            "spans": [json.loads(span.to_json()) for span in spans.get_finished_spans()],
            "metrics": data and json.loads(data.to_json()),
        }
    )
