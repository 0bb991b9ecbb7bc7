"""At most one call per period, on real servers and workers, whatever becomes of the call.

The store's own time of expiry says whether a step has touched the claim: it is read when the call
is published, and once more when its message has ended.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from celery import Celery, group
from celery.result import AsyncResult

from celery_singleton_lock import OnConflict, claim_and_send, is_skipped
from celery_singleton_lock.core.lease import Token
from celery_singleton_lock.runtime import Runtime
from tests.harness.deliveries import RedisBroker
from tests.harness.processes import ROOT
from tests.harness.servers import server_version
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, wait_until
from tests.integration.test_claim_ends import ENDS, wait_for_starts

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
        record = self._store.leases.inspect(self.key)
        return record and Token.task_id_of(record.token)


def bodies_of(stage: Stage, call: AsyncResult) -> int:
    records = stage.journal.records()
    return len([r for r in records if r.event == "start" and r.task_id == call.id])


def acknowledged(stage: Stage, call: AsyncResult) -> None:
    broker = RedisBroker(stage.redis)
    wait_until(lambda: not broker.messages()[call.id], f"{call.id} is acknowledged")


# Whatever became of the run.


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


# Other publishers.


def test_a_call_by_name_shares_the_period_of_the_task(stage: Stage, name: str) -> None:
    publisher = Celery("elsewhere", broker=stage.app.app.conf.broker_url, set_as_current=False)
    publisher.conf.result_backend = stage.app.app.conf.result_backend
    first = Period(stage, "early", name).call(queue="idle")
    task, options = stage.app.early.name, {"queue": "idle", "scope": stage.app.NAMES}
    again = claim_and_send(publisher, task, [name], singleton=LONG, key=name, **options)
    assert again.id == first.id
    publisher.close()


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
    record = runtime.store.leases.inspect(runtime.keyspace.period(task.name, task.lock_key(*args)))
    assert record is not None
    assert Token.task_id_of(record.token) == first.id
    assert 600 - 2 * SOON < record.ttl <= 600
