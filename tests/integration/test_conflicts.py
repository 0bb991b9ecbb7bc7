"""What a call does when its key is held, and what a message keeps that is requeued."""

from __future__ import annotations

import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from celery import chord, group
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import LockConflict, OnConflict, hold
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.lease import Holder, Token
from celery_singleton_lock.message.header import HEADER, Delivery, mint_nonce
from celery_singleton_lock.runtime import Runtime
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=4, queues=["celery", "side"])


# Outcomes.


def test_raise_ends_in_lock_conflict_that_names_the_holder(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    blocker = stage.occupy(name)
    result = stage.app.refusing.delay(name)
    with pytest.raises(LockConflict) as raised:
        result.get(timeout=20)
    assert type(raised.value) is LockConflict
    assert raised.value.key == stage.key(name)
    assert raised.value.holder["task_id"] == blocker.id
    assert raised.value.holder["worker"] == worker.hostname
    assert blocker.id in str(raised.value)
    assert result.state == "FAILURE"
    stage.open(name)
    assert [start.task_id for start in stage.starts(name)] == [blocker.id]


def test_revoke_ends_in_revoked(stage: Stage, worker: CeleryWorker, name: str) -> None:
    blocker = stage.occupy(name)
    result = stage.app.revoking.delay(name)
    with pytest.raises(TaskRevokedError, match="is held by"):
        result.get(timeout=20)
    assert result.state == "REVOKED"
    stage.open(name)
    assert [start.task_id for start in stage.starts(name)] == [blocker.id]


def test_wait_runs_in_its_turn_when_the_holder_ends_in_time(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    stage.occupy(name)
    result = stage.app.work.apply_async(
        (name,), singleton={"on_conflict": OnConflict.wait(timeout=30)}
    )
    worker.wait_for_log(rf"Task \S+\[{result.id}\] received")
    stage.open(name)
    assert result.get(timeout=20) == name
    assert len(stage.starts(name)) == 2
    assert stage.journal.overlaps() == []


def test_wait_ends_in_lock_conflict_after_its_timeout(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    blocker = stage.occupy(name)
    began = datetime.now(UTC)
    result = stage.app.waiting.delay(name)
    with pytest.raises(LockConflict, match="1 s"):
        result.get(timeout=20)
    assert datetime.now(UTC) - began >= timedelta(seconds=1)
    assert result.state == "FAILURE"
    stage.open(name)
    assert [start.task_id for start in stage.starts(name)] == [blocker.id]


def test_retry_ends_in_lock_conflict_after_max_wait(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    blocker = stage.occupy(name)
    began = datetime.now(UTC)
    result = stage.app.impatient.delay(name)
    with pytest.raises(LockConflict) as raised:
        result.get(timeout=20)
    assert datetime.now(UTC) - began >= timedelta(seconds=1)
    assert raised.value.holder["task_id"] == blocker.id
    assert result.state == "FAILURE"
    worker.wait_for_event(
        EventName.REQUEUED, task_id=result.id, sequence=2
    )  # it did wait in the broker
    stage.open(name)
    assert [start.task_id for start in stage.starts(name)] == [blocker.id]


def test_a_call_that_has_waited_for_a_week_is_requeued_once_more(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    """No bound is set, and the call must not be lost."""
    stage.occupy(name)
    task_id, a_week = str(uuid4()), 7 * 86400.0
    token = Token(task_id, 0, 0, mint_nonce(), "c1")
    delivery = Delivery(token=token, tries=9, since=time.time() - a_week)
    stage.app.app.send_task(
        stage.app.patient.name, (name,), task_id=task_id, headers={HEADER: delivery.header()}
    )
    result = stage.app.app.AsyncResult(task_id)
    worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=1)
    stage.open(name)
    assert result.get(timeout=20) == 0
    assert stage.journal.overlaps() == []


def test_retry_runs_when_the_holder_has_ended(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    blocker = stage.occupy(name)
    results = [stage.app.patient.delay(name) for _ in range(3)]
    for result in results:
        worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=2)
        assert result.state == "PENDING"
        conflicts = [e for e in worker.events(EventName.CONFLICT) if e.task_id == result.id]
        # A monitor counts the first as the call's conflict, and the others as its tries.
        assert ["again" in event.fields for event in conflicts[:2]] == [False, True]
    stage.open(name)
    assert [result.get(timeout=20) for result in results] == [0, 0, 0]
    ran = [start.task_id for start in stage.starts(name)]
    assert ran[0] == blocker.id
    assert sorted(ran[1:]) == sorted(result.id for result in results)
    assert stage.journal.overlaps() == []


def taken_by_a_newer_call(stage: Stage, name: str) -> None:
    """The holder of ``name`` has ended, and a call that came just now has the key."""
    token = Token(str(uuid4()), 0, 0, mint_nonce())
    holder = Holder(task="newer", task_id=token.task_id, worker="w", pid=1, since=time.time())
    stage.redis.set(stage.key(name), f"l {token} 0 {holder.to_json()}", px=60_000)


def test_the_delays_of_a_call_do_not_grow_while_newer_calls_overtake_it(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    # Its copies are requeued into a queue that no worker consumes, and come from there one by one.
    aside = f"aside-{name}"
    rule = OnConflict.retry(delay=0.3, max_delay=60)
    result = stage.app.work.apply_async((name,), queue=aside, singleton={"on_conflict": rule})
    delays = []
    for sequence in range(1, 7):
        taken_by_a_newer_call(stage, name)
        assert stage.redis.blmove(aside, "celery", 20, "RIGHT", "LEFT")
        event = worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=sequence)
        delays.append(float(event.fields["delay"]))
    assert max(delays) <= 0.3, "the second delay would be 0.3 s at least, the sixth 4.8 s"
    stage.redis.delete(stage.key(name))
    assert stage.redis.blmove(aside, "celery", 20, "RIGHT", "LEFT")
    assert result.get(timeout=20) == name


def test_a_holder_that_was_requeued_says_when_it_came(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    """By this an older call knows that a newer one has not overtaken it."""
    stage.occupy(name)
    result = stage.app.patient.delay(name, gate=f"{name}-2")
    worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=2)
    stage.open(name)
    stage.journal.wait_for(
        lambda records: [r for r in records if r.task_id == result.id], what="the second runs"
    )
    record = Runtime.of(stage.app.app).store.leases.inspect(stage.key(name))
    stage.open(f"{name}-2")
    assert record is not None
    assert 0 < record.holder.first_try < record.holder.since
    assert result.get(timeout=20) == 0


def test_a_call_whose_expiry_passes_while_it_waits_is_revoked(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    stage.occupy(name)
    result = stage.app.patient.apply_async((name,), expires=2)
    worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=1)
    with pytest.raises(TaskRevokedError):
        result.get(timeout=20)
    stage.open(name)
    assert len(stage.starts(name)) == 1


def test_a_waiting_call_can_be_revoked_by_its_id(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    stage.occupy(name)
    result = stage.app.patient.delay(name)
    worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=1)
    result.revoke()
    with pytest.raises(TaskRevokedError):
        result.get(timeout=20)
    stage.open(name)
    assert len(stage.starts(name)) == 1


# A worker full of waiting calls.


@pytest.mark.slow
def test_five_hundred_waiting_calls_do_not_stall_an_unrelated_task(stage: Stage, name: str) -> None:
    crowd_worker = stage.worker(concurrency=2, queues=["crowd"])
    with hold(name, scope=stage.app.NAMES, app=stage.app.app):
        results = [stage.app.sleepy.apply_async((name,), queue="crowd") for _ in range(500)]
        for result in results:
            crowd_worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=1)
        for n in range(5):
            unrelated = stage.app.work.apply_async((f"{name}-{n}",), queue="crowd")
            assert unrelated.get(timeout=10) == f"{name}-{n}"
    assert stage.starts(name) == []
    assert not any(result.ready() for result in results[::50])
    crowd_worker.kill_group()


# What a requeued message keeps.


def request_of(stage: Stage, result: Any) -> dict[str, Any]:
    """Celery's request, as the body of that task saw it."""
    [start] = [r for r in stage.journal.records() if r.event == "start" and r.task_id == result.id]
    request = dict(start.data["request"])
    request["requeued"] = start.data["copies"] > 0
    # As the broker's client sees it; what matters of it stands beside it. And a requeued message
    # has a time to wait for.
    for name in ("eta", "properties"):
        request.pop(name, None)
    return request


def same_but_for_requeue(
    one: dict[str, Any], other: dict[str, Any], ids: dict[str, str]
) -> dict[str, tuple[Any, Any]]:
    """Fields in which two requests differ, when each id of the first is replaced as given."""

    def renamed(value: Any) -> Any:
        if isinstance(value, str):
            for old, new in ids.items():
                value = value.replace(old, new)
            return value
        if isinstance(value, dict):
            return {key: renamed(item) for key, item in value.items()}
        return [renamed(item) for item in value] if isinstance(value, list) else value

    return {
        field: (one.get(field), other.get(field))
        for field in {*one, *other}
        if renamed(one.get(field)) != other.get(field)
    }


OPTIONS: dict[str, Any] = {
    "queue": "side",
    "priority": 7,
    "expires": datetime(2099, 1, 1, tzinfo=UTC),
    "time_limit": 100,
    "soft_time_limit": 90,
    "headers": {"trace": "abc", "nested": {"a": [1, None]}},
    "shadow": "alias",
    "ignore_result": False,
    "reply_to": "somewhere",
    "argsrepr": "<hidden>",
    "kwargsrepr": "<hidden too>",
}


def differences(stage: Stage, calls: tuple[Any, Any], name: str) -> dict[str, tuple[Any, Any]]:
    """Between the request of an undisturbed call and of one that was requeued twice."""
    free, busy = calls
    one, other = request_of(stage, free), request_of(stage, busy)
    assert (one.pop("requeued"), other.pop("requeued")) == (False, True)
    return same_but_for_requeue(one, other, {free.id: busy.id, f"{name}-free": f"{name}-busy"})


def test_a_requeued_call_keeps_everything(stage: Stage, worker: CeleryWorker, name: str) -> None:
    blocker = stage.occupy(f"{name}-busy")
    calls = tuple(
        stage.app.patient.apply_async(
            (f"{name}-{which}",),
            **OPTIONS,
            link=stage.app.collect.s(f"{name}-{which}-link"),
            link_error=stage.app.collect.s(f"{name}-{which}-error"),
        )
        for which in ("free", "busy")
    )
    worker.wait_for_event(EventName.REQUEUED, task_id=calls[1].id, sequence=2)
    stage.open(f"{name}-busy")
    blocker.get(timeout=20)
    assert [call.get(timeout=20) for call in calls] == [0, 0]
    assert differences(stage, calls, name) == {}
    request = request_of(stage, calls[1])
    assert request["parent_id"] is None
    assert request["root_id"] == calls[1].id
    assert request["retries"] == 0
    assert request["priority"] == 7
    assert request["routing_key"] == "side"
    assert request["expires"] == "2099-01-01T00:00:00+00:00"
    assert request["headers"]["trace"] == "abc"
    stage.journal.wait_for_starts(1, key=f"{name}-busy-link")


def test_a_requeued_call_keeps_its_stamps(stage: Stage, worker: CeleryWorker, name: str) -> None:
    stage.occupy(f"{name}-busy")
    calls = []
    for which in ("free", "busy"):
        signature = stage.app.patient.si(f"{name}-{which}")
        signature.stamp(order="42", user=["a", "b"])
        calls.append(signature.apply_async())
    worker.wait_for_event(EventName.REQUEUED, task_id=calls[1].id, sequence=2)
    stage.open(f"{name}-busy")
    assert [call.get(timeout=20) for call in calls] == [0, 0]
    assert differences(stage, (calls[0], calls[1]), name) == {}
    assert request_of(stage, calls[1])["stamps"] == {"order": "42", "user": ["a", "b"]}


def test_a_requeued_call_keeps_its_parent_and_root(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    stage.occupy(f"{name}-busy")
    parents = [stage.app.spawn.delay(f"{name}-{which}", {}) for which in ("free", "busy")]
    calls = [stage.app.app.AsyncResult(parent.get(timeout=20)) for parent in parents]
    worker.wait_for_event(EventName.REQUEUED, task_id=calls[1].id, sequence=2)
    stage.open(f"{name}-busy")
    assert [call.get(timeout=20) for call in calls] == [0, 0]
    for parent, call in zip(parents, calls, strict=True):
        request = request_of(stage, call)
        assert (request["parent_id"], request["root_id"]) == (parent.id, parent.id)
        # Requeue from inside a task, and yet no child of that.
        assert call.children in (None, [])


@pytest.mark.parametrize("shape", [group, chord])
def test_a_requeued_member_keeps_its_group(
    stage: Stage, worker: CeleryWorker, name: str, shape: Any
) -> None:
    stage.occupy(f"{name}-busy")
    members = [stage.app.patient.si(f"{name}-{which}") for which in ("free", "busy")]
    if shape is chord:
        result = chord(members)(stage.app.collect.s(f"{name}-body"))
        calls = tuple(result.parent.results)
    else:
        result = group(members).apply_async()
        calls = tuple(result.results)
    worker.wait_for_event(EventName.REQUEUED, task_id=calls[1].id, sequence=2)
    stage.open(f"{name}-busy")
    assert result.get(timeout=20) == [0, 0]
    left = differences(stage, calls, name)
    # Each member knows its place, and Celery numbers them; else they are alike.
    assert left.pop("group_index") == (0, 1)
    assert left == {}
    assert request_of(stage, calls[0])["group"] == request_of(stage, calls[1])["group"]
    assert (request_of(stage, calls[1])["chord"] is not None) == (shape is chord)


def test_a_requeued_call_without_a_result_leaves_none(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    stage.occupy(name)
    result = stage.app.patient.apply_async((name,), ignore_result=True)
    worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=2)
    stage.open(name)
    start = stage.journal.wait_for_starts(2, key=name)[1]
    assert start.data["request"]["ignore_result"] is True
    worker.wait_for_log(rf"Task \S+\[{result.id}\] succeeded")
    assert stage.redis.exists(f"celery-task-meta-{result.id}") == 0


def test_a_requeued_call_keeps_its_serializer(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    stage.occupy(name)
    # The app's own serializer, JSON, can't write a set: the call could never go back.
    result = stage.app.patient.apply_async((name,), {"more": {"a", "b"}}, serializer=stage.app.SETS)
    worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=2)
    stage.open(name)
    assert result.get(timeout=20) == 0
    assert stage.starts(name)[-1].data["more"] in ("{'a', 'b'}", "{'b', 'a'}")


# Options of one call.


def test_a_calls_own_options_survive_being_requeued(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    stage.occupy(name)
    # The task's own policy is skip.
    result = stage.app.work.apply_async(
        (name,), singleton={"on_conflict": OnConflict.retry(0.1, 0.3, 1), "ttl": 17}
    )
    worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=2)
    with pytest.raises(LockConflict):
        result.get(timeout=20)
    other = stage.app.work.apply_async(
        (name,), singleton={"on_conflict": OnConflict.retry(0.1, 0.3), "ttl": 17}
    )
    worker.wait_for_event(EventName.REQUEUED, task_id=other.id, sequence=2)
    stage.open(name)
    assert other.get(timeout=20) == name
    assert stage.starts(name)[-1].data["ttl"] == 17


def test_many_calls_that_meet_different_holders_each_go_their_own_way(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    with ExitStack() as holders:
        for n in range(10):
            holders.enter_context(hold(f"{name}-{n}", scope=stage.app.NAMES, app=stage.app.app))
        results = [stage.app.patient.delay(f"{name}-{n}") for n in range(10)]
        for result in results:
            worker.wait_for_event(EventName.REQUEUED, task_id=result.id, sequence=1)
        assert not any(result.ready() for result in results)
    assert [result.get(timeout=20) for result in results] == [0] * 10
