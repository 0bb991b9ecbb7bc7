"""A pause: none of its calls begins, none is lost, and running ones go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain

from celery_singleton_lock import (
    LockConflict,
    LockKeyError,
    current_lease,
    hold,
    inspection,
    pause,
    resume,
)
from celery_singleton_lock.core.keyspace import CallQueueNames, Keyspace
from celery_singleton_lock.core.pauses import Pause
from celery_singleton_lock.doctor import Severity
from celery_singleton_lock.instrumentation import calls_paused, calls_resumed
from celery_singleton_lock.runtime import Runtime
from tests.harness.cli import run_here
from tests.harness.cluster import Cluster
from tests.harness.keys import EVERY_NAME, LOCKING
from tests.harness.worker import CeleryWorker
from tests.integration.doctor_apps import found as findings_of
from tests.integration.stage import Stage, wait_until
from tests.integration.test_pools import every_pool

APP = "tests.apps.pauses"
#: Seconds, the default.
UNIQUE_FOR = 3600.0
RULES = ("skip", "revoke", "raise", "wait", "retry", "cancel_running", "queue")


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=3)


@pytest.fixture(autouse=True)
def nothing_stays_paused(stage: Stage) -> Iterator[None]:
    yield
    for one in inspection.pauses(stage.app.app):
        resume(one.key, scope=None if one.key else one.scope, app=stage.app.app)


def in_queue(stage: Stage, task: Any, name: str) -> int:
    return int(stage.redis.zcard(CallQueueNames.of(task.lock_key(name)).queue))


def parked(stage: Stage, task: Any, name: str, count: int) -> None:
    """Wait until the calls of ``name`` are in the store, and in no worker."""
    wait_until(lambda: in_queue(stage, task, name) == count, f"{count} calls wait in the store")
    wait_until(lambda: not stage.redis.hlen("unacked"), "no worker has a message")


def paused(stage: Stage, task: Any, name: str, **options: Any) -> inspection.Paused:
    return pause(task.lock_key(name), app=stage.app.app, **options)


def resumed(stage: Stage, task: Any, name: str) -> inspection.Paused | None:
    return resume(task.lock_key(name), app=stage.app.app)


@pytest.mark.parametrize("rule", RULES)
def test_calls_of_a_paused_key_wait_in_the_store_and_then_all_run(
    stage: Stage, worker: CeleryWorker, name: str, rule: str
) -> None:
    task = stage.app.rules[rule]
    paused(stage, task, name, reason="maintenance")
    results = [task.delay(name, number) for number in range(3)]
    parked(stage, task, name, 3)
    assert stage.starts(name) == []
    resumed(stage, task, name)
    if rule == "cancel_running":  # the newest takes the place of the others
        assert results[-1].get(timeout=30) == 2
        wait_until(lambda: in_queue(stage, task, name) == 0, "the others have ended")
        assert {result.state for result in results[:-1]} <= {"REVOKED", "SUCCESS"}
        return
    assert [result.get(timeout=30) for result in results] == [0, 1, 2]
    assert sorted(start.data["number"] for start in stage.starts(name)) == [0, 1, 2]
    wait_until(lambda: in_queue(stage, task, name) == 0, "the queue is empty")


@every_pool
def test_no_pool_keeps_the_message_of_a_paused_call(stage: Stage, name: str, pool: str) -> None:
    task = stage.app.rules["skip"]
    stage.worker(pool=pool, queues=[name], concurrency=1)
    paused(stage, task, name)
    results = [task.apply_async((name, number), queue=name) for number in range(2)]
    parked(stage, task, name, 2)
    assert stage.starts(name) == []
    resumed(stage, task, name)
    assert [result.get(timeout=30) for result in results] == [0, 1]
    assert [start.data["number"] for start in stage.starts(name)] == [0, 1]


def test_a_paused_scope_holds_all_its_keys_and_their_running_calls_go_on(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task, names = stage.app.late, [f"{name}-{number}" for number in range(3)]
    running = task.delay(name, 7, gate=name)
    wait_until(lambda: stage.starts(name), "a body runs")
    pause(scope=task.name, app=stage.app.app)
    results = [task.delay(one) for one in names]
    for one in names[:2]:  # the third process runs the first call
        wait_until(lambda one=one: in_queue(stage, task, one), "it waits in the store")
    stage.open(name)
    assert running.get(timeout=30) == 7
    assert not [one for one in names if stage.starts(one)]
    found = resume(scope=task.name, app=stage.app.app)
    assert found is not None
    assert (found.scope, found.key, found.left) == (task.name, None, None)
    assert [result.get(timeout=30) for result in results] == [0, 0, 0]


@pytest.mark.parametrize("rule", ["skip", "raise", "revoke", "wait", "cancel_running"])
def test_a_call_waits_though_the_paused_key_is_held_and_the_running_one_goes_on(
    stage: Stage, worker: CeleryWorker, name: str, rule: str
) -> None:
    task = stage.app.rules[rule]
    running = task.delay(name, 0, gate=name)
    wait_until(lambda: stage.starts(name), "a body runs")
    paused(stage, task, name)
    second = task.delay(name, 1)
    wait_until(lambda: in_queue(stage, task, name) == 1, "the second call waits in the store")
    stage.open(name)
    assert running.get(timeout=30) == 0
    assert len(stage.starts(name)) == 1
    resumed(stage, task, name)
    assert second.get(timeout=30) == 1


def test_a_paused_call_does_not_cancel_the_running_one(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task = stage.app.newest
    running = task.delay(name, 0, gate=name)
    newest = Keyspace.newest_call(task.lock_key(name))
    wait_until(lambda: stage.redis.exists(newest), "a body runs, as the newest call")
    before = stage.redis.get(newest)
    paused(stage, task, name)
    second = task.delay(name, 1)
    wait_until(lambda: in_queue(stage, task, name) == 1, "the second call waits in the store")
    assert stage.redis.get(newest) == before, "a newer one would cancel it"
    stage.open(name)
    assert running.get(timeout=30) == 0
    resumed(stage, task, name)
    assert second.get(timeout=30) == 1


def test_a_call_that_waits_for_its_key_in_a_worker_waits_in_the_store_when_that_is_paused(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task = stage.app.rules["wait"]
    running = task.delay(name, 0, gate=name)
    wait_until(lambda: stage.starts(name), "a body runs")
    waiting = task.delay(name, 1)
    queue = Keyspace.wait_queue(task.lock_key(name))
    wait_until(lambda: stage.redis.exists(queue), "the second call waits for the key")
    paused(stage, task, name)
    stage.open(name)
    assert running.get(timeout=30) == 0
    parked(stage, task, name, 1)
    assert len(stage.starts(name)) == 1
    resumed(stage, task, name)
    assert waiting.get(timeout=30) == 1


def test_an_eager_call_of_a_paused_key_fails_and_says_what_to_do(stage: Stage, name: str) -> None:
    task = stage.app.rules["skip"]
    paused(stage, task, name)
    with pytest.raises(LockConflict, match="send it again when the key is resumed"):
        task.apply((name,)).get()


@pytest.mark.parametrize("rule", ["skip", "retry", "cancel_running", "queue"])
def test_a_message_without_a_header_runs_once(
    stage: Stage, worker: CeleryWorker, name: str, rule: str
) -> None:
    task = stage.app.rules[rule]
    paused(stage, task, name)
    result = stage.app.app.send_task(task.name, (name, 1))
    parked(stage, task, name, 1)
    resumed(stage, task, name)
    assert result.get(timeout=30) == 1
    wait_until(lambda: in_queue(stage, task, name) == 0, "the queue is empty")
    assert len(stage.starts(name)) == 1


@pytest.mark.parametrize("rule", ["skip", "raise", "late"])
def test_the_links_of_a_call_that_has_waited_meet_no_conflict_with_it(
    stage: Stage, name: str, rule: str
) -> None:
    stage.worker(concurrency=2, queues=[name], env={"SLOW_SUCCESS": "0.1"})
    task = stage.app.late if rule == "late" else stage.app.rules[rule]
    paused(stage, task, name)
    last = chain(*(task.si(name, number).set(queue=name) for number in (1, 2))).delay()
    wait_until(lambda: in_queue(stage, task, name) == 1, "the first call waits in the store")
    resumed(stage, task, name)
    assert last.get(timeout=30) == 2


@pytest.mark.parametrize("rule", ["run", "raise", "retry"])
def test_a_call_is_requeued_if_the_login_may_not_keep_it_in_the_store(
    stage: Stage, name: str, rule: str
) -> None:
    """Whatever ``on_store_error`` says: the store has answered, and the key is paused."""
    keys = (f"~{EVERY_NAME}", "resetchannels", "-@all", "+select", *LOCKING)
    stage.redis.execute_command("ACL", "SETUSER", "few", "reset", "on", ">pw", *keys)
    url = stage.environment["RESULT_URL"].replace("redis://", "redis://few:pw@")
    worker = stage.worker(queues=[name], env={"LOCK_URL": url})
    task = stage.app.unsafe[rule]
    paused(stage, task, name)
    result = task.apply_async((name,), queue=name)
    wait_until(lambda: "singleton requeued" in worker.log, "it was requeued")
    assert stage.starts(name) == []
    resumed(stage, task, name)
    assert result.get(timeout=60) == 0
    assert "reason=paused" in worker.log


def test_a_pause_with_a_duration_needs_nobody_for_its_end(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task = stage.app.rules["retry"]
    begin = time.monotonic()
    paused(stage, task, name, duration=2.0)
    assert task.delay(name).get(timeout=30) == 0
    [start] = stage.starts(name)
    assert start.at >= begin + 2.0


def test_the_calls_run_soon_where_no_task_has_a_queue(stage: Stage, name: str) -> None:
    stage.worker(queues=[name], env={"WITHOUT_QUEUE": "1"})
    task = stage.app.rules["skip"]
    paused(stage, task, name, duration=1.0)
    result = task.apply_async((name,), queue=name)
    assert result.get(timeout=20) == 0, "a sweep a minute would come too late"


def test_a_pause_outlives_the_workers_and_loses_no_call(stage: Stage, name: str) -> None:
    task = stage.app.late
    first = stage.worker(queues=[name])
    paused(stage, task, name)
    results = [task.apply_async((name, number), queue=name) for number in range(3)]
    parked(stage, task, name, 3)
    first.kill_group()
    stage.worker(queues=[name])
    results.append(task.apply_async((name, 3), queue=name))
    parked(stage, task, name, 4)
    resumed(stage, task, name)
    assert sorted(result.get(timeout=30) for result in results) == [0, 1, 2, 3]
    assert len(stage.starts(name)) == 4


def test_calls_of_a_limit_wait_too(stage: Stage, worker: CeleryWorker, name: str) -> None:
    task = stage.app.limited
    paused(stage, task, name)
    results = [task.delay(name, number) for number in range(3)]
    parked(stage, task, name, 3)
    resumed(stage, task, name)
    assert [result.get(timeout=30) for result in results] == [0, 1, 2]


def test_the_claim_of_a_unique_call_lasts_as_long_as_its_pause(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task = stage.app.unique
    paused(stage, task, name)
    first = task.delay(name)
    parked(stage, task, name, 1)
    key = task.lock_key(name)
    seconds = stage.redis.pttl(Keyspace.claim(task.name, key)) / 1000
    assert seconds > 2 * UNIQUE_FOR, "the claim outlives its unique_for"
    assert task.delay(name).id == first.id
    resumed(stage, task, name)
    assert first.get(timeout=30) == 0
    assert len(stage.starts(name)) == 1


def test_a_debounced_call_is_requeued_because_later_calls_replace_its_arguments(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task = stage.app.debounced
    paused(stage, task, name)
    task.delay(name, 1)
    wait_until(lambda: "reason=paused" in worker.log, "it was requeued")
    last = task.delay(name, 2)
    resumed(stage, task, name)
    assert last.get(timeout=80) == 2
    assert [start.data["number"] for start in stage.starts(name)] == [2]


def test_the_retry_of_a_call_that_waited_keeps_its_place(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task = stage.app.retried
    paused(stage, task, name)
    results = [task.delay(name, number) for number in range(2)]
    parked(stage, task, name, 2)
    resumed(stage, task, name)
    assert [result.get(timeout=30) for result in results] == [0, 1]
    starts = [(start.data["number"], start.data["retries"]) for start in stage.starts(name)]
    first, second = starts[0][0], starts[2][0]
    assert starts == [(first, 0), (first, 1), (second, 0), (second, 1)]


def test_the_message_of_a_retry_of_such_a_call_is_in_the_store_before_its_attempt_ends(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    """Else a sweep would take the call for lost, if its retry comes late."""
    task = stage.app.retried
    paused(stage, task, name)
    result = task.delay(name, 0, 3.0)
    parked(stage, task, name, 1)
    resumed(stage, task, name)
    wait_until(lambda: result.state == "RETRY", "the first attempt has ended")
    call = inspection.find_call(stage.app.app, result.id)
    assert call is not None
    assert not call.has_begun
    assert result.get(timeout=30) == 0


def test_a_body_that_is_answered_with_429_pauses_the_calls_of_its_key(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    task = stage.app.limited_by_partner
    first = task.delay(name, 2.0)
    wait_until(lambda: stage.starts(name), "the partner has answered with 429")
    second = task.delay(name, 0.1)
    assert first.get(timeout=30) == 1
    assert second.get(timeout=30) == 1
    one, two, *_ = stage.starts(name)
    assert two.at - one.at >= 1.9


def test_hold_raises_with_the_seconds_that_are_left(stage: Stage, name: str) -> None:
    task = stage.app.rules["skip"]
    paused(stage, task, name, duration=60, reason="maintenance")
    text = r"is paused for 60 s more, .*: maintenance"
    with pytest.raises(LockConflict, match=text) as caught, task.hold(name):
        pass
    assert caught.value.retry_after == pytest.approx(60, abs=5)
    assert caught.value.holder == {}
    resumed(stage, task, name)
    with task.hold(name):
        assert current_lease().key == task.lock_key(name)


def test_hold_waits_for_the_end_of_a_pause(stage: Stage, name: str) -> None:
    task = stage.app.rules["skip"]
    paused(stage, task, name, duration=0.5)
    with task.hold(name).set(wait=10):
        pass


def test_a_pause_is_listed_with_who_and_why(stage: Stage, name: str) -> None:
    app, task = stage.app.app, stage.app.rules["skip"]
    key = task.lock_key(name)
    given = pause(name, scope=task.name, duration=60, reason="r", user="anna", app=app)
    assert (given.key, given.scope, given.user, given.reason) == (key, task.name, "anna", "r")
    [found] = [one for one in inspection.pauses(app) if one.key == key]
    assert found.since == given.since
    assert found.includes(f"{key}#1")
    assert str(found).startswith(f"key {key} is paused since ")
    assert resume(key, app=app) == found or resume(key, app=app) is None
    assert [one for one in inspection.pauses(app) if one.key == key] == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"key": "x"}, "give the scope of the key"),
        ({}, "give the scope of the key"),
        ({"key": "x", "scope": "celery.beat"}, "Beat elects its leader"),
        ({"scope": "celery.beat"}, "Beat elects its leader"),
        ({"key": "csl:{celery:0}:pauses.skip:x", "scope": "pauses.skip"}, "whole name of a key"),
    ],
)
def test_what_can_not_be_paused_is_refused(
    stage: Stage, arguments: dict[str, Any], text: str
) -> None:
    for call in (pause, resume):
        with pytest.raises(LockKeyError, match=text):
            call(**arguments, app=stage.app.app)


@pytest.mark.parametrize("duration", [0, -1, float("nan"), "1h"])
def test_a_wrong_duration_is_refused(stage: Stage, duration: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="duration"):
        pause(scope="pauses.skip", duration=duration, app=stage.app.app)


def test_a_scope_that_no_task_has_is_warned_of(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    app = stage.app.app
    pause(scope="pauses.skipp", duration=1, app=app)
    assert "is that of no task that this process knows (did you mean 'pauses.skip'?)" in caplog.text
    resume(scope="pauses.skipp", app=app)


def test_other_scopes_and_keys_are_not_paused(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    paused(stage, stage.app.rules["skip"], name)
    pause(scope="pauses", app=stage.app.app)
    assert stage.app.rules["skip"].delay(f"{name}x").get(timeout=30) == 0
    assert stage.app.rules["retry"].delay(name).get(timeout=30) == 0
    resume(scope="pauses", app=stage.app.app)
    with hold(name, scope="pauses.retry", wait=10, app=stage.app.app):
        pass


def test_a_paused_scope_of_a_cluster_holds_its_keys_on_all_nodes(
    cluster: Cluster, name: str
) -> None:
    app = Celery("paused", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = cluster.url
    keys = [str(number) for number in range(20)]
    keyspace = Runtime.of(app).keyspace
    assert len({Keyspace.shard(keyspace.lock(name, key)) for key in keys}) > 10
    pause(scope=name, reason="maintenance", app=app)
    for key in keys:
        with pytest.raises(LockConflict, match="maintenance"), hold(key, scope=name, app=app):
            pass
    assert [one.scope for one in inspection.pauses(app) if one.scope == name] == [name]
    resume(scope=name, app=app)
    for key in keys:
        with hold(key, scope=name, app=app):
            pass


# What operators see and do.


def cli(stage: Stage, *arguments: str) -> Any:
    return run_here(stage.app.app, *arguments)


def test_the_commands_pause_list_and_resume(stage: Stage, name: str) -> None:
    key = stage.app.rules["skip"].lock_key(name)
    assert cli(stage, "paused").out == "nothing is paused\n"
    answer = cli(stage, "pause", f"pauses.skip:{name}", "--for", "1h", "--reason", "maintenance")
    assert answer.status == 0
    assert f"key {key} is paused since " in answer.out
    assert "for 3600 s more" in answer.out
    assert answer.out.endswith(": maintenance\n")
    scope = cli(stage, "pause", "--scope", "pauses.late", "--json").json()
    assert (scope["scope"], scope["key"], scope["left"]) == ("pauses.late", None, None)
    rows = cli(stage, "paused", "--json").json()
    assert [row["key"] for row in rows] == [None, key]
    lines = cli(stage, "paused").out.splitlines()
    assert lines[0].split() == ["PAUSED", "SINCE", "ENDS", "BY", "REASON"]
    assert lines[2].startswith(key)
    assert cli(stage, "resume", "--scope", "pauses.late").out == "resumed pauses.late\n"
    assert cli(stage, "resume", key, "--json").json()["reason"] == "maintenance"
    again = cli(stage, "resume", key)
    assert (again.status, again.err) == (1, f"not paused: {key}\n")


def test_a_resume_of_a_key_says_that_its_scope_is_paused(stage: Stage, name: str) -> None:
    pause(scope="pauses.skip", app=stage.app.app)
    answer = cli(stage, "resume", f"pauses.skip:{name}")
    assert answer.status == 1
    assert "\n  scope pauses.skip is paused since " in answer.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "give KEY, or --scope"),
        (("x", "--scope", "y"), "give KEY, or --scope"),
        (("nowhere:x",), "The keys of this app:"),
        (("pauses.skip:",), "The keys of this app:"),
        (("--scope", "pauses.skip", "--for", "1 h"), "is no duration"),
    ],
)
def test_a_wrong_pause_is_refused(stage: Stage, arguments: tuple[str, ...], text: str) -> None:
    answer = cli(stage, "pause", *arguments)
    assert answer.status != 0
    assert text in answer.err
    assert inspection.pauses(stage.app.app) == []


def test_operators_see_what_is_paused_and_why(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    app, task = stage.app.app, stage.app.rules["skip"]
    key = task.lock_key(name)
    paused(stage, task, name, reason="maintenance")
    result = task.delay(name)
    parked(stage, task, name, 1)
    [held] = [one for one in inspection.held_keys(app, counts_calls=True) if one.key == key]
    assert (held.state, held.calls, held.task_id, held.is_free) == ("paused", 1, result.id, True)
    sentence = f"key {key} is paused since "
    for answer in (cli(stage, "ls"), cli(stage, "show", key), cli(stage, "show", name)):
        assert answer.status == 0
        assert sentence in answer.out
        assert "maintenance" in answer.out
    found = inspection.explain(app, result.id)
    assert found.fate is inspection.Fate.WAITING
    text = "\n".join(found.sentences)
    assert f"It waits in the queue of {key}, as first" in text
    assert sentence.capitalize()[:4] + sentence[4:] in text
    assert text.endswith(f"`celery -A ... singleton resume '{key}'`.")
    pause(scope="pauses.skip", duration=600, app=app)
    text = "\n".join(inspection.explain(app, result.id).sentences)
    assert "Scope pauses.skip is paused since " in text, "both have to be resumed"
    assert text.endswith(
        f"`celery -A ... singleton resume '{key}'` and "
        "`celery -A ... singleton resume --scope pauses.skip`."
    )
    resumed(stage, task, name)
    text = "\n".join(inspection.explain(app, result.id).sentences)
    assert "To do: nothing, it runs when the pause ends. To end it now: `" in text
    resume(scope="pauses.skip", app=app)
    assert result.get(timeout=30) == 0


def test_an_old_pause_without_an_end_is_a_finding(stage: Stage, name: str) -> None:
    app, task = stage.app.app, stage.app.rules["skip"]
    paused(stage, task, name)
    pause(scope="pauses.late", duration=60, app=app)
    assert findings_of(app, "pauses") == []
    runtime = Runtime.of(app)
    assert runtime.store.pauses is not None
    old = Pause(name=task.lock_key(name), user="anna", host="web1", since=1e9)
    runtime.store.pauses.resume(old.name, timeout=5)
    runtime.store.pauses.pause(old, timeout=5)
    [finding] = findings_of(app, "pauses")
    assert finding.severity is Severity.WARNING
    assert "by anna on web1" in finding.text
    assert finding.remedy == f"celery -A ... singleton resume '{old.name}'"


def test_each_process_that_pauses_or_resumes_emits_an_event(stage: Stage, name: str) -> None:
    events: list[Any] = []

    def receive(event: Any, **_: Any) -> None:
        events.append((str(event.name), event.key, event.data.get("seconds")))

    for signal in (calls_paused, calls_resumed):
        signal.connect(receive, weak=False)
    key = stage.app.rules["skip"].lock_key(name)
    pause(key, duration=60, app=stage.app.app)
    resume(key, app=stage.app.app)
    resume(key, app=stage.app.app)
    for signal in (calls_paused, calls_resumed):
        signal.disconnect(receive)
    assert events == [("paused", key, 60.0), ("resumed", key, None)]
