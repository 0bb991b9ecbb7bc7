"""What a real worker adds to the spans of Celery's own instrumentation, and its metrics."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest

from celery_singleton_lock import LeaseLost, hold, is_skipped
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.instrumentation.opentelemetry import digest_of
from tests.integration.stage import Stage, wait_until

APP = "tests.apps.traced"
SCOPE = f"{APP}.work"

pytestmark = pytest.mark.slow


class Exported:
    """What the one process of a worker has exported."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def _read(self) -> Any:
        return json.loads(self._stage.app.exported.delay().get(timeout=30))

    def span(self, task_id: str) -> Any:
        """The span of the task's first run; the publication of a message has one too."""
        wanted = {"messaging.message.id": task_id, "celery.action": "run"}
        return next(
            span for span in self._read()["spans"] if wanted.items() <= span["attributes"].items()
        )

    def points(self, name: str, **attributes: str) -> list[Any]:
        return [
            point
            for of_resource in (self._read()["metrics"] or {}).get("resource_metrics", ())
            for of_scope in of_resource["scope_metrics"]
            for metric in of_scope["metrics"]
            if metric["name"] == f"celery.singleton.{name}"
            for point in metric["data"]["data_points"]
            if attributes.items() <= point["attributes"].items()
        ]


def ours(attributes: dict[str, Any]) -> dict[str, Any]:
    prefix = "celery.singleton."
    return {
        name.removeprefix(prefix): value
        for name, value in attributes.items()
        if name.startswith(prefix)
    }


def events(span: Any) -> list[dict[str, Any]]:
    """Our events in the span; Celery's instrumentation adds exceptions."""
    return [event for event in span["events"] if event["name"].startswith("celery.singleton.")]


def event_of(span: Any, name: EventName) -> dict[str, Any]:
    """What the one event of this name in the span says."""
    wanted = f"celery.singleton.{name}".replace("-", "_")
    [event] = [event for event in events(span) if event["name"] == wanted]
    return ours(event["attributes"])


@pytest.fixture(scope="module")
def exported(stage: Stage) -> Exported:
    stage.worker(concurrency=1)
    return Exported(stage)


@pytest.fixture
def name() -> str:
    return f"ann-{uuid4().hex[:8]}"


def test_the_span_of_a_run_has_digest_outcome_fence_waited_and_held(
    stage: Stage, exported: Exported, name: str
) -> None:
    result = stage.app.work.delay(name)
    fence = result.get(timeout=30)
    span = exported.span(result.id)
    found = ours(span["attributes"])
    assert found.pop("waited") >= 0
    assert 0 <= found.pop("held") < 30
    assert found == {
        "key_digest": digest_of(stage.app.work.lock_key(name)),
        "outcome": EventName.ACQUIRED,
        "fence": fence,
    }
    assert event_of(span, EventName.ACQUIRED)["fence"] == fence
    assert event_of(span, EventName.RELEASED)["held"] == ours(span["attributes"])["held"]
    assert name not in json.dumps(events(span)), "a key has arguments"


def test_a_skip_names_the_holder(stage: Stage, exported: Exported, name: str) -> None:
    with hold(f"account:{name}", scope=SCOPE, ttl=30, app=stage.app.app) as lease:
        result = stage.app.work.delay(name)
        assert is_skipped(result.get(timeout=30))
    span = exported.span(result.id)
    assert ours(span["attributes"]) == {"key_digest": digest_of(lease.key), "outcome": "skip"}
    conflict = event_of(span, EventName.CONFLICT)
    assert conflict["outcome"] == "skip"
    assert lease.holder.task_id in conflict["holder"]
    assert name not in json.dumps(events(span))


def test_a_requeued_is_the_outcome_of_its_run(stage: Stage, exported: Exported, name: str) -> None:
    with hold(f"account:{name}", scope=SCOPE, ttl=30, app=stage.app.app):
        result = stage.app.patient.delay(name)
        wait_until(lambda: exported.points("requeues", task=f"{APP}.patient"), "it is requeued")
    result.get(timeout=30)
    span = exported.span(result.id)
    assert ours(span["attributes"])["outcome"] == EventName.REQUEUED
    assert event_of(span, EventName.REQUEUED)["delay"] > 0


def test_a_loss_that_the_heartbeat_detects_is_in_the_span_of_its_task(
    stage: Stage, exported: Exported, name: str
) -> None:
    result = stage.app.work.delay(name, until_lost=True)
    wait_until(lambda: stage.redis.delete(stage.app.work.lock_key(name)), "its lease is deleted")
    with pytest.raises(LeaseLost):
        result.get(timeout=30)
    span = exported.span(result.id)
    assert ours(span["attributes"])["outcome"] == EventName.LEASE_LOST
    assert event_of(span, EventName.LEASE_LOST)["action"] == "interrupted,failed"
    assert name not in json.dumps(events(span))


def test_metrics_count_what_was_done(stage: Stage, exported: Exported) -> None:
    """By name and labels they are those of Prometheus; the late task is this test's alone."""
    task = stage.app.late
    before = sum(point["value"] for point in exported.points("acquisitions", task=task.name))
    for number in range(3):
        task.delay(str(number)).get(timeout=30)
    for counter in ("acquisitions", "releases"):
        [point] = exported.points(counter, task=task.name)
        assert point["value"] == before + 3
    [held] = exported.points("hold", task=task.name)
    assert (held["count"], held["explicit_bounds"][0]) == (before + 3, 0.01)


def test_the_key_is_in_the_span_if_asked_for(stage: Stage, name: str) -> None:
    """Also shows that the tests above, which don't find it, could."""
    queue = f"keys-{name}"
    stage.worker(concurrency=1, queues=[queue], env={"KEYS": "1"})
    result = stage.app.work.apply_async((name,), queue=queue)
    result.get(timeout=30)
    spans = json.loads(stage.app.exported.apply_async(queue=queue).get(timeout=30))["spans"]
    [span] = [s for s in spans if s["attributes"].get("messaging.message.id") == result.id]
    assert ours(span["attributes"])["key"] == stage.app.work.lock_key(name)
