"""What waits in a worker's parent to be sent: counts, and single events in order."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery.events import Event
from prometheus_client import CollectorRegistry

from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.instrumentation.counts import Counts
from celery_singleton_lock.instrumentation.prometheus import PrometheusMetrics
from celery_singleton_lock.serve.listener import Listener, event_of
from celery_singleton_lock.testing import ManualClock
from celery_singleton_lock.worker import outbox as outboxes
from celery_singleton_lock.worker.outbox import Outbox
from tests.harness.listener import type_of

LOSS = type_of(EventName.LEASE_LOST)


def line(*values: Any) -> bytes:
    return json.dumps(values).encode()


def stamp(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    return Event(kind, fields, hostname="w@host", clock=1)


def messages(outbox: Outbox) -> dict[str, list[dict[str, Any]]]:
    return {key: json.loads(body) for key, body in outbox.messages(stamp)}


def filled(*lines: bytes) -> Outbox:
    outbox = Outbox()
    outbox.add(lines)
    return outbox


def measured(registry: CollectorRegistry) -> dict[Any, float]:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_equal_events_become_one_row_and_buckets_keep_their_number_and_sum() -> None:
    counts = Counts()
    for seconds in (0.001, 0.003, 0.1, 0.1, 0.1, 0.2, 100_000.0):
        counts.add(EventName.RELEASED, "t", seconds)
    counts.add(EventName.RELEASED, "u", 0.001, times=7)
    rows = list(counts.rows())
    assert [(task, times) for _, task, _, times in rows] == [
        *(("t", 2), ("t", 3), ("t", 1), ("t", 1)),
        ("u", 7),
    ]
    assert rows[0][2] == pytest.approx(0.002)
    assert rows[1][2] == 0.1, "a mean never leaves its bucket"


def test_a_list_begins_with_the_counts_and_has_single_events_in_order() -> None:
    single = [line(LOSS, {"number": number, "uuid": ""}) for number in range(3)]
    acquired = [line(EventName.ACQUIRED, "t", 0.001)] * 5
    events = messages(filled(*acquired, *single))["singleton.multi"]
    assert events[0]["type"] == "singleton-counts"
    assert events[0]["counts"] == [[EventName.ACQUIRED, "t", 0.001, 5]]
    assert [one["number"] for one in events[1:4]] == [0, 1, 2]
    assert {one["hostname"] for one in events} == {"w@host"}


def test_events_of_celery_s_own_types_go_where_celery_sends_them() -> None:
    sent = messages(filled(line("task-skipped", {"uuid": "a"}), line(LOSS, {"uuid": "b"})))
    assert sorted(sent) == ["singleton.multi", "task.multi"]
    assert [one["type"] for one in sent["task.multi"]] == ["task-skipped"]


def test_single_events_are_bounded_and_counts_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outboxes, "_MOST_BYTES", 1000)
    single = [line(LOSS, {"number": number}) for number in range(100)]
    outbox = filled(*single, *[line(EventName.ACQUIRED, "t", 0.001)] * 100_000)
    events = messages(outbox)["singleton.multi"]
    assert events[0]["counts"] == [[EventName.ACQUIRED, "t", 0.001, 100_000]]
    kept = sum(one["type"] == LOSS for one in events)
    [dropped] = [one for one in events if one["type"] == "singleton-events-dropped"]
    assert 0 < kept < 100
    assert kept + dropped["count"] == 100


def test_a_line_that_is_none_of_ours_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    outbox = filled(
        b"\xff", line(7), line(EventName.ACQUIRED, "t", "soon"), line(LOSS, {"uuid": ""})
    )
    assert [one["type"] for one in messages(outbox)["singleton.multi"]][1:] == [LOSS]
    assert caplog.text.count("can't read the worker event") == 3


def test_an_empty_outbox_is_false() -> None:
    assert not Outbox()
    assert filled(line(EventName.ACQUIRED, "t", 0.1))
    assert filled(line(LOSS, {}))


def test_a_monitor_counts_what_the_worker_counted() -> None:
    held = [0.0, 0.001, 0.001, 0.02, 0.02, 0.02, 3.0, 7.5, 90_000.0]
    lines = [line(EventName.ACQUIRED, "t", 0.001) for _ in held]
    lines += [line(EventName.RELEASED, "t", seconds) for seconds in held]
    lines += [line(LOSS, {"name": "t", "key": "k", "reason": "gone", "uuid": "a"})]
    [body] = messages(filled(*lines)).values()
    exact, new = CollectorRegistry(), CollectorRegistry()
    listener = Listener(None, ManualClock(), PrometheusMetrics(new))  # type: ignore[arg-type]
    listener.receive(body)
    metrics = PrometheusMetrics(exact)
    for text in lines:
        values = json.loads(text)
        fields: dict[str, Any] = values[1] if len(values) == 2 else {"name": values[1]}
        if len(values) == 3:
            fields["waited" if values[0] == EventName.ACQUIRED else "held"] = values[2]
        event = event_of(
            {"type": values[0] if len(values) == 2 else type_of(EventName(values[0]))} | fields
        )
        assert event is not None
        metrics(event)
    assert measured(new) == pytest.approx(measured(exact))
    assert listener.received == len(lines)
