"""What people see of the queues of ``on_conflict="queue"``, and what they can do about a call."""

from __future__ import annotations

import json
import logging
import time
from functools import partial
from typing import Any

import pytest
from celery import chain, chord
from celery.exceptions import TaskRevokedError
from kombu.exceptions import OperationalError

from celery_singleton_lock import inspection
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.keyspace import CallQueueNames
from celery_singleton_lock.inspection import Explanation, Fate
from celery_singleton_lock.serve.readings import Readings
from example_project.private_server import PrivateServer
from tests.harness.bodies import power_cut
from tests.harness.cli import run_apart
from tests.harness.deliveries import wait_until
from tests.harness.log import LoggedEvent, events_in
from tests.harness.worker import CeleryWorker
from tests.integration.conftest import Consume
from tests.integration.key_queue import APP as APP
from tests.integration.key_queue import (
    also_consume,
    begun,
    call_queue,
    cli,
    ended,
    running,
    sweep,
    unconsumed,
    unreachable_broker,
)
from tests.integration.stage import Stage


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=2)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Any:
    """The events of this process, which publishes."""
    caplog.set_level(logging.DEBUG, "celery_singleton_lock")

    def of(*names: EventName, **fields: Any) -> list[LoggedEvent]:
        return [*events_in(caplog.messages, *names, **fields)]

    return of


# Events.


def test_a_call_that_waits_is_reported_with_its_position(
    stage: Stage, worker: CeleryWorker, name: str, logged: Any
) -> None:
    first = running(stage, name)
    assert not logged(EventName.JOINED), "it had to wait for none"
    calls = [stage.app.early.delay(name, number) for number in (1, 2)]
    joined = logged(EventName.JOINED)
    assert [one.task_id for one in joined] == [call.id for call in calls]
    assert [one.fields["position"] for one in joined] == ["2", "3"]
    assert {one.fields["key"] for one in joined} == {stage.app.early.lock_key(name, 0)}
    sent = stage.app.app.send_task(stage.app.early.name, (name, 3))
    worker.wait_for_event(EventName.JOINED, task_id=sent.id, position=4)
    stage.open(name)
    assert ended([first, *calls, sent]) == [0, 1, 2, 3]


def test_a_call_that_never_begins_is_reported_with_what_to_do(
    stage: Stage, worker: CeleryWorker, name: str, logged: Any
) -> None:
    call = stage.app.early.apply_async((name, 0), queue=name)
    worker.stop()
    try:
        sweep(stage, name)
        assert [one.fields["copies"] for one in logged(EventName.PUBLISHED)] == ["2"]
        assert not logged(EventName.STALLED)
        sweep(stage, name)
    finally:
        worker.cont()
    (stalled,) = logged(EventName.STALLED, copies=3, routing_key=name)
    assert (stalled.task, stalled.task_id) == (stage.app.early.name, call.id)
    assert "consume" in stalled.fields["advice"]


def test_a_call_that_is_revoked_or_expires_is_reported_with_the_reason(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    first = running(stage, name)
    expiring = stage.app.early.apply_async((name, 1), expires=0.5)
    expires_at = time.monotonic() + 0.5
    revoked, last = stage.app.early.delay(name, 2), stage.app.early.delay(name, 3)
    revoked.revoke()
    worker.wait_for_log(rf"{revoked.id}.*flagged as revoked|Tasks flagged as revoked")
    wait_until(lambda: time.monotonic() > expires_at, "the first of them expires")
    stage.open(name)
    assert ended([first, last]) == [0, 3]
    worker.wait_for_event(EventName.REMOVED, task_id=expiring.id, reason="expired")
    worker.wait_for_event(EventName.REMOVED, task_id=revoked.id, reason="revoked")


def test_a_call_that_the_broker_refuses_is_reported_as_withdrawn(
    stage: Stage, name: str, logged: Any
) -> None:
    with unreachable_broker() as connection, pytest.raises(OperationalError):
        stage.app.early.apply_async((name, 0), connection=connection)
    (removed,) = logged(EventName.REMOVED, reason="withdrawn")
    assert removed.fields["key"] == stage.app.early.lock_key(name, 0)


# What is seen of waiting calls.


def waiting(stage: Stage, name: str, count: int) -> list[Any]:
    """A call that runs, and others that wait behind it."""
    return [running(stage, name), *(stage.app.early.delay(name, n) for n in range(1, count))]


def explained(stage: Stage, call: Any) -> Explanation:
    return inspection.explain(stage.app.app, call.id, timeout=1.0)


def test_a_held_key_is_listed_with_the_calls_that_wait_for_it(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    calls, key = waiting(stage, name, 3), stage.app.early.lock_key(name, 0)
    _, text = cli(stage, "ls", name)
    head, row = text.splitlines()
    assert (head.split()[-1], row.split()[-1]) == ("CALLS", "2")
    _, text = cli(stage, "show", key)
    assert "calls: 2" in text
    _, text = cli(stage, "ls", name, "--waiting", "--json")
    (found,) = json.loads(text)
    assert (found["key"], found["task_id"], found["calls"]) == (key, calls[0].id, 2)
    stage.open(name)
    assert ended(calls) == [0, 1, 2]


def test_a_login_that_may_not_read_queues_lists_the_locks(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    calls = waiting(stage, name, 2)
    stage.redis.acl_setuser(
        name, enabled=True, passwords=["+p"], keys=["*"], commands=["+@all", "-zrange"], reset=True
    )
    url = stage.environment["RESULT_URL"].replace("//", f"//{name}:p@")
    try:
        status, text = cli(stage, "ls", name, LOCK_URL=url)
        assert (status, calls[0].id in text, "CALLS" in text) == (0, True, False)
        assert cli(stage, "show", stage.app.early.lock_key(name, 0), LOCK_URL=url)[0] == 0
        assert cli(stage, "show", f"{name}-free", LOCK_URL=url)[0] == 1
    finally:
        stage.redis.acl_deluser(name)
    stage.open(name)
    assert ended(calls) == [0, 1]


@pytest.mark.parametrize(
    "command", [("queue", "KEY"), ("cancel", "an-id"), ("cancel", "--key", "KEY", "--yes")]
)
def test_a_store_that_refuses_is_not_taken_for_an_empty_queue(
    stage: Stage, name: str, command: tuple[str, ...]
) -> None:
    url = stage.environment["RESULT_URL"]
    stage.redis.acl_setuser(
        name, enabled=True, passwords=["+p"], keys=["*"], commands=["+@all", "-zrange"], reset=True
    )
    try:
        for password in ("p", "wrong"):
            login = url.replace("//", f"//{name}:{password}@")
            status, text = cli(stage, *command, LOCK_URL=login)
            assert status == 1
            assert "the store refuses" in text
    finally:
        stage.redis.acl_deluser(name)


def test_a_free_key_with_calls_is_listed_with_the_one_that_runs_next(
    stage: Stage, name: str
) -> None:
    calls = unconsumed(stage, name, 2)
    ((found),) = inspection.held_keys(
        stage.app.app, inspection.Filter(pattern=name), counts_calls=True
    )
    assert (found.state, found.task, found.task_id) == ("free", stage.app.early.name, calls[0].id)
    assert found.calls == 2
    assert found.oldest_call is not None
    assert not [*inspection.held_keys(stage.app.app, inspection.Filter(pattern=name))]
    status, text = cli(stage, "show", f"queue:{name}")
    assert status == 0
    assert f"next call: {stage.app.early.name}[{calls[0].id}]" in text


def test_the_calls_of_a_queue_are_listed_in_order(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    calls = waiting(stage, name, 3)
    _, text = cli(stage, "queue", f"queue:{name}", "--json")
    found = json.loads(text)
    assert [one["task_id"] for one in found] == [call.id for call in calls]
    assert [one["position"] for one in found] == [1, 2, 3]
    assert [one["state"] for one in found] == ["running", "waiting", "waiting"]
    status, text = cli(stage, "show", calls[2].id)
    assert (status, calls[2].id in text) == (0, True)
    stage.open(name)
    assert calls[2].get(timeout=60) == 2
    # The result is stored before the release takes the call out.
    wait_until(lambda: cli(stage, "queue", f"queue:{name}")[0] == 1, "the queue is empty")


def test_a_waiting_call_is_explained_with_its_position_and_who_is_before_it(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    first, second, third = waiting(stage, name, 3)
    found = explained(stage, third)
    assert found.fate is Fate.WAITING
    assert "as third" in found.sentences[0]
    assert first.id in found.sentences[1], "it runs"
    assert second.id in found.sentences[2], "it is next"
    assert found.holder is not None
    assert found.holder["task_id"] == first.id
    stage.open(name)
    assert third.get(timeout=60) == 2


def test_a_published_call_is_explained_with_the_queue_that_nothing_consumes(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    first, second = unconsumed(stage, name, 2)
    found = explained(stage, first)
    assert found.fate is Fate.QUEUED
    assert "once" in found.sentences[1]
    assert repr(name) in found.sentences[1]
    found = explained(stage, second)
    assert found.fate is Fate.WAITING
    assert any(first.id in sentence for sentence in found.sentences)


def test_a_retry_is_explained_with_its_place(stage: Stage, worker: CeleryWorker, name: str) -> None:
    call = stage.app.retrying.delay(name, 0, countdown=60)
    wait_until(lambda: call.state == "RETRY", "it retries, and its body is about to end")
    wait_until(
        lambda: any(
            "stays in the queue" in sentence and "as first" in sentence
            for sentence in explained(stage, call).sentences
        ),
        "its place is explained",
    )
    (place,) = inspection.calls_in_queue(stage.app.app, stage.app.early.lock_key(name, 0))
    # So that the retry is not waited for.
    wait_until(lambda: inspection.cancel(stage.app.app, place), "its body has ended")


def test_gauges_count_waiting_calls_and_say_how_long_the_oldest_has_waited(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    from celery_singleton_lock.serve.gauges import Gauges

    calls = waiting(stage, name, 3)
    listener: Any = type("Listener", (), {"error": "", "dropped": 0})()
    families = {
        one.name: {sample.labels.get("task"): sample.value for sample in one.samples}
        for one in Gauges(Readings(stage.app.app), listener, "celery").collect()
    }
    task = stage.app.early.name
    assert families["celery_singleton_waiting_calls"][task] >= 2
    assert families["celery_singleton_oldest_waiting_call_seconds"][task] > 0
    stage.open(name)
    assert ended(calls) == [0, 1, 2]


# What can be done about waiting calls.


def test_a_waiting_call_is_cancelled_with_a_result_and_never_runs(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    first, second, third = waiting(stage, name, 3)
    assert cli(stage, "cancel", second.id, answer="n\n")[0] == 1
    status, text = cli(stage, "cancel", second.id, "--reason", "wrong amount", answer="y\n")
    assert "Cancel this call? [y/N]" in text
    assert (status, f"cancelled {second.id}" in text) == (0, True)
    with pytest.raises(TaskRevokedError, match="wrong amount"):
        second.get(timeout=30)
    stage.open(name)
    assert ended([first, third]) == [0, 2]
    assert [start.data["number"] for start in stage.starts(name)] == [0, 2]
    status, text = cli(stage, "cancel", second.id, "--yes")
    assert (status, "no such call waits" in text) == (1, True)


def test_the_first_call_is_skipped_so_that_the_next_one_runs(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    first, second = unconsumed(stage, name, 2)
    key = f"queue:{name}"
    assert first.id in cli(stage, "cancel", "--key", key, "--first", "--dry-run")[1]
    assert cli(stage, "cancel", "--key", key, "--first", "--yes")[0] == 0
    also_consume(stage, worker, name)
    assert second.get(timeout=60) == 1
    assert first.state == "REVOKED"
    assert [start.data["number"] for start in stage.starts(name)] == [1]


def test_all_waiting_calls_of_a_key_are_cancelled(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    first, *others = waiting(stage, name, 4)
    status, text = cli(stage, "cancel", "--key", f"queue:{name}", "--json", "--yes")
    assert status == 0
    assert [row["cancelled"] for row in json.loads(text)] == [True] * 3
    stage.open(name)
    assert first.get(timeout=60) == 0
    assert [call.state for call in others] == ["REVOKED"] * 3
    assert cli(stage, "cancel", "--key", f"queue:{name}", "--yes")[0] == 1


def test_each_call_that_is_listed_may_be_cancelled_before_the_next_one_is_read(
    stage: Stage, name: str
) -> None:
    calls, key = unconsumed(stage, name, 120), stage.app.early.lock_key(name, 0)
    listed = []
    for call in inspection.calls_in_queue(stage.app.app, key):
        assert inspection.cancel(stage.app.app, call)
        listed.append(call.task_id)
    assert listed == [call.id for call in calls]
    assert not [*inspection.calls_in_queue(stage.app.app, key)]


def test_a_chord_of_chains_counts_a_cancelled_call(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    """A chord waits for the last task of each chain; the later ones of a cancelled call end too."""
    first = running(stage, name)
    task = stage.app.early
    chains = [chain(task.si(name, n), task.si(f"{name}-link", n)) for n in (1, 2)]
    whole: Any = chord(chains, task.si(f"{name}-body", 3)).delay()
    last = whole.parent.results[0]
    call = inspection.find_call(stage.app.app, last.parent.id)
    assert call is not None
    assert inspection.cancel(stage.app.app, call)
    assert last.state == "REVOKED"
    stage.open(name)
    assert first.get(timeout=60) == 0
    wait_until(lambda: whole.state == "FAILURE", "the chord has ended")
    assert "taken out" in str(whole.result)


@pytest.mark.slow
def test_a_chord_counts_a_call_that_is_lost_with_its_worker(
    stage: Stage, worker: CeleryWorker, name: str, consume: Consume
) -> None:
    other = consume(name)
    lost = stage.app.early.si(name, 0, name).set(queue=name)
    header = [lost, stage.app.early.si(f"{name}-other", 1)]
    whole = chord(header, stage.app.early.si(f"{name}-body", 2)).delay()
    begun(stage, name, 0)
    power_cut(other, stage.journal)
    wait_until(lambda: whole.state == "FAILURE", "the chord has ended")
    assert "acknowledged" in str(whole.result)


def test_the_claim_of_a_cancelled_call_is_freed(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    first = running(stage, name)
    cancelled = stage.app.unique.delay(name, 1)
    call = inspection.find_call(stage.app.app, cancelled.id)
    assert call is not None
    assert inspection.cancel(stage.app.app, call, user="ann")
    again = stage.app.unique.delay(name, 1)
    assert again.id != cancelled.id
    stage.open(name)
    assert ended([first, again]) == [0, 1]


def test_the_result_of_a_cancelled_call_names_the_operator(
    stage: Stage, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "ann")
    first, second = unconsumed(stage, name, 2)
    assert cli(stage, "cancel", first.id, "--yes")[0] == 0
    with pytest.raises(TaskRevokedError, match="by ann"):
        first.get(timeout=30)
    assert cli(stage, "cancel", second.id, "--yes", "--reason", "no")[0] == 0
    with pytest.raises(TaskRevokedError, match="by ann: no"):
        second.get(timeout=30)
    found = inspection.explain(stage.app.app, second.id, timeout=0.1)
    assert (found.fate, found.sentences[0]) == (
        Fate.REVOKED,
        "It never began: it was taken out of the queue of its key by ann: no.",
    )


@pytest.mark.parametrize(
    "is_silent", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["down", "silent"]
)
def test_a_call_is_cancelled_again_if_the_result_backend_was_down(
    stage: Stage, name: str, private_redis: PrivateServer, is_silent: bool
) -> None:
    (call,) = unconsumed(stage, name, 1)
    results = private_redis.url() if is_silent else "redis://127.0.0.1:1/0"
    private_redis.pause()  # Celery's client waits for two minutes
    broken = {"RESULT_URL": results, "LOCK_URL": stage.environment["RESULT_URL"]}
    # In a process of its own, for the client's threads wait on when the command has ended.
    answer = run_apart(APP, "cancel", call.id, "--yes", env={**stage.environment, **broken})
    private_redis.resume()
    assert answer.status == 1
    assert "its result is not stored yet" in answer.all
    assert call.id in answer.all
    assert cli(stage, "cancel", call.id, "--yes")[0] == 0
    assert call.state == "REVOKED"
    assert inspection.find_queue(stage.app.app, f"queue:{name}") is None


def test_a_sweep_ends_what_the_process_of_an_operator_has_begun(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    first = running(stage, name)
    cancelled, last = stage.app.unique.delay(name, 1), stage.app.early.delay(name, 2)
    place = inspection.find_call(stage.app.app, cancelled.id)
    assert place is not None
    queue = call_queue(stage)
    queue.leave(place.key, place.call_id, timeout=5.0)  # and its process dies
    stage.open(name)
    assert first.get(timeout=60) == 0
    calls = partial(inspection.calls_in_queue, stage.app.app, place.key)
    wait_until(lambda: next(calls()).task_id == cancelled.id, "it is the first")
    queue.defer(place.key, seconds=0.0, timeout=5.0)
    assert last.get(timeout=60) == 2
    with pytest.raises(TaskRevokedError, match="taken out"):
        cancelled.get(timeout=30)
    worker.wait_for_event(EventName.REMOVED, task_id=cancelled.id, reason="cancelled")
    again = stage.app.unique.delay(name, 1)
    assert again.id != cancelled.id, "its claim is free"
    assert again.get(timeout=60) == 1


def test_a_call_whose_message_can_not_be_read_is_cancelled_with_a_result(
    stage: Stage, name: str
) -> None:
    """A newer version has stored it."""
    call, last = unconsumed(stage, name, 2)
    key = stage.app.early.lock_key(name, 0)
    place = inspection.find_call(stage.app.app, call.id)
    assert place is not None
    field = f"+{place.call_id}"
    assert stage.redis.hset(CallQueueNames.of(key).calls, field, "{}") == 0, "it was there"
    place = inspection.find_call(stage.app.app, call.id)
    assert place is not None
    assert place.task == ""
    assert inspection.cancel(stage.app.app, place)
    with pytest.raises(TaskRevokedError, match="taken out"):
        call.get(timeout=30)
    (following,) = inspection.calls_in_queue(stage.app.app, key)
    assert (following.task_id, following.state) == (last.id, "published")


def test_a_call_of_a_task_that_the_operator_s_app_does_not_know_is_cancelled(
    stage: Stage, name: str
) -> None:
    call = stage.app.gone.apply_async((name, 0), queue=name)
    assert cli(stage, "cancel", call.id, "--yes", WITHOUT="1")[0] == 0
    assert call.state == "REVOKED"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give TASK_ID, or --key KEY"),
        (["an-id", "--key", "a"], "give TASK_ID, or --key KEY"),
        (["an-id", "--first"], "give TASK_ID, or --key KEY"),
    ],
)
def test_what_to_cancel_has_to_be_clear(stage: Stage, arguments: list[str], problem: str) -> None:
    status, text = cli(stage, "cancel", *arguments)
    assert (status, problem in text) == (2, True)
