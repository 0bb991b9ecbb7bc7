"""At most one call per period, on real servers and workers, whatever becomes of the call.

The store's own time of expiry says whether a step has touched the claim: it is read when the call
is published, and once more when its message has ended.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, group
from celery.result import AsyncResult

from celery_singleton_lock import OnConflict, claim_and_send, hold, is_skipped
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.lease import Token
from celery_singleton_lock.runtime import Runtime
from tests.harness.deliveries import RedisBroker
from tests.harness.processes import ROOT, Process, kill_process
from tests.harness.servers import server_version
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, open_stage, wait_until
from tests.integration.test_claim_ends import LEAVES, STAYS, consume, revoke, wait_for_starts

APP = "tests.apps.claims"

# Seconds; nothing waits that long when all is well.
SOON = 20.0
#: A period that no test outlasts.
LONG = {"unique": "until_expired", "unique_for": 600}


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=4)


def expiry(client: Any, key: str) -> object:
    """When a key expires, in milliseconds since the epoch."""
    if server_version() >= (7, 0):
        return client.pexpiretime(key)
    # Redis 6.2 has no command for it. It reads its clock twice here.
    with client.pipeline() as pipeline:
        (seconds, microseconds), left = pipeline.time().pttl(key).execute()
    return Within2(1000 * seconds + microseconds // 1000 + left)


class Within2(int):
    """A number that equals those at most 2 away from it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and abs(int(self) - int(other)) <= 2

    __hash__ = int.__hash__


class Period:
    """The period of one task's calls of one name.

    Args:
        stage: Where it is.
        task: The name of the task.
        name: First argument of its calls.
        singleton: Their options, beside those of a long period.
    """

    def __init__(self, stage: Stage, task: str, name: str, **singleton: Any) -> None:
        self.task: Any = getattr(stage.app, task)
        self.name, self.singleton = name, LONG | singleton
        runtime = Runtime.of(stage.app.app)
        self.key = runtime.keyspace.period(self.task.name, self.task.lock_key(name))
        self._stage, self._store = stage, runtime.store

    def call(self, way: str = "succeed", gate: str | None = None, **options: Any) -> AsyncResult:
        return self.task.apply_async((self.name, way, gate), singleton=self.singleton, **options)

    def signature(self, **options: Any) -> Any:
        return self.task.si(self.name).set(singleton=self.singleton, **options)

    def stands(self) -> tuple[str, object]:
        """The value and the time of expiry of its claim."""
        return self._stage.redis.get(self.key), expiry(self._stage.redis, self.key)

    @property
    def owner(self) -> str | None:
        """The id of the message that has it."""
        record = self._store.inspect(self.key)
        return record and Token.task_id_of(record.token)


def bodies_of(stage: Stage, call: AsyncResult) -> int:
    records = stage.journal.records()
    return len([r for r in records if r.event == "start" and r.task_id == call.id])


def acknowledged(stage: Stage, call: AsyncResult) -> None:
    broker = RedisBroker(stage.redis)
    wait_until(lambda: not broker.messages()[call.id], f"{call.id} is acknowledged")


# Whatever became of the run.


ENDS = [*STAYS, *LEAVES, ("early", "retry", 2), ("early", "replace", 2)]


def test_a_period_stands_however_its_message_ends(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    begun = []
    for task, way, bodies in ENDS:
        period = Period(stage, task, f"{name}-{task}-{way}")
        stage.open(f"{period.name}-2")  # of the second body of a task that replaces itself
        call = period.call(way)
        begun.append((period, call, bodies, period.stands()))
    for period, call, bodies, before in begun:
        # Its own message always runs: retries, requeued messages, replacements.
        wait_for_starts(stage, call, bodies)
        acknowledged(stage, call)
        assert period.stands() == before, period.name
        assert period.call().id == call.id
        assert bodies_of(stage, call) == bodies, period.name


@pytest.mark.slow
def test_a_period_stands_when_its_body_is_killed_or_its_time_is_over(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    bodies = {"early": 1, "requeued": 2, "limited": 1}
    begun = []
    for task in bodies:
        period = Period(stage, task, f"{name}-{task}")
        call = period.call("sleep")
        begun.append((period, call, bodies[task], period.stands()))
    for period, call, _, _ in begun:
        wait_for_starts(stage, call, 1)
        if period.task is not stage.app.limited:
            records = stage.journal.records()
            kill_process(next(r.pid for r in records if r.task_id == call.id))
    for period, call, count, before in begun:
        wait_for_starts(stage, call, count)
        wait_until(call.ready, "it has ended")
        assert period.stands() == before, period.name
        assert period.call().id == call.id


def test_a_period_stands_when_its_call_is_revoked_expires_or_is_purged(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    revoked, expired, purged = (Period(stage, "late", f"{name}-{n}") for n in range(3))
    calls = [revoked.call(queue=name), expired.call(queue=name, expires=0.001)]
    before = [revoked.stands(), expired.stands()]
    revoke(stage, worker, calls[0])
    consume(stage, worker, name)
    for call in calls:
        acknowledged(stage, call)
        wait_until(call.ready, "it was discarded")
    assert [revoked.stands(), expired.stands()] == before
    assert [revoked.call().id, expired.call().id] == [call.id for call in calls]
    call = purged.call(queue=f"{name}-purged")
    stage.redis.delete(f"{name}-purged")
    assert purged.call().id == call.id
    assert all(bodies_of(stage, each) == 0 for each in (*calls, call))


def test_a_retry_with_another_key_leaves_both_periods_alone(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    period, other = Period(stage, "early", name), Period(stage, "early", f"{name}-2")
    call = period.call("move")
    before = period.stands()
    wait_until(lambda: call.state == "RETRY", "it will be tried again in a minute")
    assert period.stands() == before
    assert other.owner is None


def test_a_call_that_is_requeued_runs_in_its_own_period(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    period = Period(stage, "late", name)
    with hold(name, scope=stage.app.NAMES, app=stage.app.app):
        call = period.call()
        before = period.stands()
        worker.wait_for_event(EventName.REQUEUED, task_id=call.id, sequence=2)
    assert call.get(timeout=SOON) == name
    assert period.stands() == before


@pytest.mark.slow
def test_a_message_redelivered_after_a_power_cut_runs_in_its_own_period(
    redis_url: str, tmp_path: Path, name: str
) -> None:
    environment = {"VISIBILITY_TIMEOUT": "2"}
    with open_stage(redis_url, tmp_path, APP) as stage:
        doomed = stage.worker(concurrency=1, env=environment)
        period = Period(stage, "late", name, ttl=1)
        call = period.call("succeed", name)
        before = period.stands()
        wait_for_starts(stage, call, 1)
        doomed.kill_group()
        stage.worker(concurrency=2, env=environment)
        wait_for_starts(stage, call, 2)
        stage.open(name)
        assert call.get(timeout=SOON) == name
        assert period.stands() == before


def test_the_period_ends_by_itself_and_the_next_call_begins_another(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    period = Period(stage, "early", name, unique_for=1)
    first = period.call()
    assert first.get(timeout=SOON) == name
    again = period.call()
    assert (again.id, again.get(timeout=SOON)) == (first.id, name), "its result is there already"
    wait_until(lambda: period.owner is None, "the period is over")
    second = period.call()
    assert second.id != first.id
    assert second.get(timeout=SOON) == name


def assert_one_per_period(task: Any, *args: Any) -> None:
    """The calls of a period of any store: the first runs, and the others give way to it."""
    first = task.apply_async(args, singleton=LONG)
    value = first.get(timeout=SOON)
    assert not is_skipped(value)
    again = task.apply_async(args, singleton=LONG)
    assert (again.id, again.get(timeout=SOON)) == (first.id, value)
    member = task.apply_async(args, singleton={**LONG, "on_conflict": "skip"}, group_id="g")
    assert member.id != first.id
    assert is_skipped(member.get(timeout=SOON))
    runtime = Runtime.of(task.app)
    record = runtime.store.inspect(runtime.keyspace.period(task.name, task.lock_key(*args)))
    assert record is not None
    assert Token.task_id_of(record.token) == first.id
    assert 600 - 2 * SOON < record.ttl <= 600


# Many publishers.


CALLS = """
import sys, time
from tests.apps.claims import app, early
from celery_singleton_lock.runtime import Runtime
name, begin = sys.argv[1], time.time()
singleton = {"unique": "until_expired", "unique_for": 1}
ids = set()
while time.time() < begin + 3:
    ids.add(early.apply_async((name,), queue=name, singleton=singleton).id)
print(begin, time.time(), *ids)
"""


@pytest.mark.slow
def test_of_all_calls_from_4_processes_one_is_published_per_period(stage: Stage, name: str) -> None:
    command = [sys.executable, "-c", CALLS, name]
    processes = [Process(command, env=stage.environment).start() for _ in range(4)]
    for process in processes:
        assert process.wait(60) == 0, process.log
    lines = [process.lines[-1].split() for process in processes]
    published = {task_id for _, _, *ids in lines for task_id in ids}
    assert len(published) == stage.redis.llen(name), "all were answered with one that is queued"
    took = max(float(end) for _, end, *_ in lines) - min(float(begin) for begin, *_ in lines)
    # Periods of a second, one after the other.
    assert 3 <= len(published) <= took + 1


# Other publishers.


def test_a_call_by_name_shares_the_period_of_the_task(stage: Stage, name: str) -> None:
    publisher = Celery("elsewhere", broker=stage.app.app.conf.broker_url, set_as_current=False)
    publisher.conf.result_backend = stage.app.app.conf.result_backend
    first = Period(stage, "early", name).call(queue="idle")
    task, options = stage.app.early.name, {"queue": "idle", "scope": stage.app.NAMES}
    again = claim_and_send(publisher, task, [name], singleton=LONG, key=name, **options)
    assert again.id == first.id
    publisher.close()


def test_a_schedule_entry_has_a_period(stage: Stage, name: str) -> None:
    sent = stage.send_by_beat(stage.app.early, name, times=3, queue=name, singleton=LONG)
    assert (len({result.id for result in sent}), stage.redis.llen(name)) == (1, 1)


# Canvas: a duplicate is published, and its worker asks for the period.


def test_the_duplicates_of_a_group_give_way_to_the_one_in_the_period(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    period = Period(stage, "early", name, on_conflict="skip")
    first = period.call()
    assert first.get(timeout=SOON) == name
    before = period.stands()
    result = group([period.signature(), period.signature()]).apply_async()
    assert all(map(is_skipped, result.get(timeout=SOON)))
    linked = period.task.apply_async((name,), singleton=period.singleton, link=period.task.si(name))
    assert is_skipped(linked.get(timeout=SOON))
    assert period.stands() == before


def test_the_links_of_a_chain_in_one_period_run_once(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    period = Period(stage, "early", name, on_conflict="skip")
    result = chain(period.signature(), period.signature(), period.signature()).apply_async()
    assert is_skipped(result.get(timeout=SOON))
    calls = [result, result.parent, result.parent.parent]
    assert [bodies_of(stage, call) for call in calls] == [0, 0, 1]


def test_a_duplicate_that_waits_for_the_end_of_the_period_begins_the_next(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    soon = OnConflict.retry(0.1, 0.3)
    period = Period(stage, "early", name, on_conflict=soon, unique_for=2)
    result = group([period.signature() for _ in range(2)]).apply_async()
    assert result.get(timeout=SOON) == [name, name]
    first, second = stage.starts(name)
    assert second.at - first.at > 1.5, "one per period"
    assert period.owner == second.task_id


@pytest.mark.parametrize("rule", ["raise", OnConflict.wait(0.3)], ids=["raise", "wait"])
def test_a_duplicate_is_treated_by_its_on_conflict(
    stage: Stage, worker: CeleryWorker, name: str, rule: Any
) -> None:
    period = Period(stage, "early", name, on_conflict=rule)
    first = period.call()
    member = group([period.signature()]).apply_async().results[0]
    with pytest.raises(Exception, match=f"held by .*{first.id}"):
        member.get(timeout=SOON)
    assert bodies_of(stage, member) == 0


# What a duplicate's caller and an operator see.


def test_an_operator_sees_and_ends_a_period(stage: Stage, name: str) -> None:
    def singleton(*words: str) -> str:
        command = [sys.executable, "-m", "celery", "-A", APP, "singleton", *words]
        done = subprocess.run(
            command, env=stage.environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout

    period = Period(stage, "early", name)
    first = period.call(queue="idle")
    key = period.key.partition("}:")[2]
    shown = singleton("show", key)
    assert "claim, published" in shown
    assert first.id in shown
    singleton("release", "--yes", key)
    assert period.call(queue="idle").id != first.id
