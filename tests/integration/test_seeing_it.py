"""What the outside sees of a lease: log lines, Celery signals, the worker event `task-skipped`."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import (
    LeaseLost,
    LockConflict,
    OnConflict,
    current_lease,
    hold,
    is_skipped,
    singleton_task,
)
from celery_singleton_lock.core.events import Event, EventName
from celery_singleton_lock.core.lease import Holder
from celery_singleton_lock.instrumentation import (
    lease_acquired,
    lease_conflict,
    lease_lost,
    lease_released,
    log_event,
)
from celery_singleton_lock.on_conflict.rule import Outcome
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.testing import SingletonStore, hold_lock, lose_lease
from example_project.private_server import PrivateServer
from tests.harness.journal import Journal, Record
from tests.harness.listener import listening
from tests.harness.log import read_event
from tests.harness.worker import CeleryWorker

POOLS = "tests.apps.pools"
LOGGER = "celery_singleton_lock"

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]


@pytest.fixture
def celery_app() -> Celery:
    app = Celery(set_as_current=False)
    app.conf.task_always_eager = True
    return app


@pytest.fixture
def work(celery_app: Celery, singleton_store: SingletonStore) -> Any:
    """``work(name, lose=False)``: a task whose key is a digest of its arguments."""

    @singleton_task(app=celery_app, name="work", shared=False, on_lost="continue")
    def work(name: str, lose: bool = False) -> str:
        if lose:
            lose_lease(app=celery_app)
        return current_lease().holder.task_id

    return work


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[logging.LogRecord]]:
    """Our own lines so far."""
    caplog.set_level(logging.DEBUG, LOGGER)
    return lambda: [record for record in caplog.records if record.name == LOGGER]


Log = Callable[[], list[logging.LogRecord]]


# Log lines.


def test_each_event_is_one_structured_line(work: Any, log: Log) -> None:
    task_id = work.delay("ann").get()
    acquired, released = log()
    for record, event in ((acquired, EventName.ACQUIRED), (released, EventName.RELEASED)):
        assert record.levelno == logging.DEBUG
        fields = vars(record)
        assert fields["singleton_event"] == event
        assert fields["singleton_key"] == work.lock_key("ann")
        assert (fields["singleton_task"], fields["singleton_task_id"]) == ("work", task_id)
        assert fields["singleton_holder"].startswith(f"work[{task_id}] on ")
        assert "\n" not in record.getMessage()
    assert vars(acquired)["singleton_data"]["fence"] > 0
    assert vars(acquired)["singleton_data"]["ttl"] == 60
    assert vars(released)["singleton_data"]["held"] >= 0


def test_a_skip_names_the_holder_at_info(work: Any, log: Log) -> None:
    with hold_lock(work, "ann") as lease:
        before = len(log())
        result = work.delay("ann")
        [line] = log()[before:]
    assert line.levelno == logging.INFO
    assert vars(line)["singleton_event"] == EventName.CONFLICT
    assert vars(line)["singleton_task_id"] == result.id
    assert vars(line)["singleton_holder"] == str(lease.holder)
    assert vars(line)["singleton_data"]["outcome"] == "skip"
    read = read_event(line.getMessage())
    assert read is not None
    assert (read.name, read.task, read.task_id) == (EventName.CONFLICT, "work", result.id)
    assert read.has(key=lease.key, outcome="skip", holder=lease.holder)


@pytest.mark.parametrize("outcome", Outcome)
def test_a_line_is_read_by_parsers_of_fields(outcome: Outcome, log: Log) -> None:
    holder = Holder(task="work", task_id='a "b"', worker="w@host", pid=7)
    data = {"outcome": str(outcome), "reason": "started work is not skipped", "delay": 0.5}
    data["error"] = 'said "no"\nand left'
    event = Event(name=EventName.CONFLICT, key="k", task_id="id", holder=holder, data=data)
    log_event(event)
    [line] = log()
    assert "\n" not in line.getMessage()
    head, *fields = line.getMessage().partition("id ")[2].split(" outcome=")
    assert head == "key=k"
    assert fields[0].split(" ")[0] == str(outcome), "a word of its own, without quotes"
    found = dict(word.split("=", 1) for word in shlex.split(line.getMessage()) if "=" in word)
    assert found.pop("error").replace("\\n", "\n") == data.pop("error")
    assert found == {"key": "k", "holder": str(holder)} | {k: str(v) for k, v in data.items()}


def test_a_waiting_call_is_logged_once_with_the_holder(work: Any, log: Log) -> None:
    with hold_lock(work, "ann") as lease:
        before = len(log())
        waiting = {"on_conflict": OnConflict.wait(timeout=5)}
        result = work.apply_async(("ann",), singleton=waiting)
        assert isinstance(result.result, LockConflict)
        waits, gives_up = log()[before:]
    assert vars(waits)["singleton_holder"] == str(lease.holder)
    read = read_event(waits.getMessage())
    assert read is not None
    assert (read.name, read.task, read.task_id) == (EventName.CONFLICT, "work", result.id)
    assert read.has(key=lease.key)
    assert [vars(line)["singleton_data"]["outcome"] for line in (waits, gives_up)] == [
        "wait",
        "raise",
    ]


def test_a_loss_is_a_warning_with_its_reason(work: Any, log: Log) -> None:
    work.delay("ann", lose=True).get()
    [line] = [record for record in log() if record.levelno >= logging.WARNING]
    assert vars(line)["singleton_event"] == EventName.LEASE_LOST
    assert vars(line)["singleton_data"]["reason"] == "gone"


def test_a_loss_that_the_body_s_own_check_sees_first_is_reported_and_is_its_error(
    celery_app: Celery, singleton_store: SingletonStore, log: Log
) -> None:
    @singleton_task(app=celery_app, name="checking", shared=False, on_lost="fail")
    def checking() -> None:
        singleton_store.clock.advance(60)  # the heartbeat's thread sleeps on: it is not woken
        current_lease().check()

    result = checking.delay()
    error = result.result
    assert isinstance(error, LeaseLost)
    assert error.reason == "expired"
    assert "was lost" in str(error)
    [line] = [record for record in log() if record.levelno >= logging.WARNING]
    assert vars(line)["singleton_event"] == EventName.LEASE_LOST
    assert vars(line)["singleton_task_id"] == result.id


def test_a_release_without_a_reply_is_a_warning_and_no_error(
    private_redis: PrivateServer, log: Log
) -> None:
    app = Celery(set_as_current=False, broker="memory://")
    app.conf.singleton_lock_url = private_redis.url()
    with hold("ann", scope="work", ttl=3, app=app):
        private_redis.kill()
    [line] = [r for r in log() if vars(r).get("singleton_event") == EventName.STORE_UNREACHABLE]
    assert line.levelno == logging.WARNING
    assert "the store doesn't answer" in vars(line)["singleton_data"]["error"]
    assert vars(line)["singleton_data"]["action"] == "released-later"
    # As at the end of the process.
    Runtime.of(app).end()
    [line] = [r for r in log() if vars(r).get("singleton_event") == EventName.RELEASE_FAILED]
    assert line.levelno == logging.WARNING
    assert 0 < vars(line)["singleton_data"]["frees_in"] < 3


def test_arguments_of_a_task_are_in_no_line(work: Any, log: Log) -> None:
    with hold_lock(work, "s3cret"):
        assert is_skipped(work.delay("s3cret"))
    work.delay("s3cret", lose=True).get()
    assert len(log()) >= 4
    for record in log():
        assert "s3cret" not in record.getMessage()
        assert "s3cret" not in repr(vars(record))


def test_a_worker_logs_a_skip_and_a_requeue(
    worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    pools = load_app(POOLS)
    process = worker(POOLS, pool="threads", concurrency=3)
    first = pools.brief.delay("k", until_open=True)
    [start] = journal.wait_for_starts(1, key="k")
    skipped = pools.brief.delay("k")
    holder = f"{POOLS}.brief[{first.id}] on {process.hostname} (pid {start.pid})"
    key = pools.brief.lock_key("k")
    skip = process.wait_for_event(
        EventName.CONFLICT, task_id=skipped.id, key=key, outcome="skip", holder=holder
    )
    waiting = pools.brief.apply_async(("k",), singleton={"on_conflict": "retry"})
    requeue = process.wait_for_event(EventName.REQUEUED, task_id=waiting.id, key=key)
    assert float(requeue.fields["delay"]) > 0
    for event in (skip, requeue):
        assert event.task == f"{POOLS}.brief"
        assert ": INFO/" in event.line
    pools.gate("k").touch()
    assert not is_skipped(waiting.get(timeout=20))


# Celery's signals.


@contextmanager
def receiving(*signals: Any) -> Iterator[list[tuple[Any, Any]]]:
    seen: list[tuple[Any, Any]] = []

    def receiver(sender: Any = None, event: Any = None, **_: Any) -> None:
        seen.append((sender, event))

    for signal in signals:
        signal.connect(receiver)
    try:
        yield seen
    finally:
        for signal in signals:
            signal.disconnect(receiver)


EVERY = (lease_acquired, lease_conflict, lease_lost, lease_released)


def test_signals_are_sent_in_the_order_of_a_run(work: Any) -> None:
    with receiving(*EVERY) as seen:
        task_id = work.delay("ann").get()
        assert [(sender, str(event.name)) for sender, event in seen] == [
            ("work", EventName.ACQUIRED),
            ("work", EventName.RELEASED),
        ]
        assert {event.task_id for _, event in seen} == {task_id}
        seen.clear()
        work.delay("ann", lose=True).get()
        assert [str(event.name) for _, event in seen] == [EventName.ACQUIRED, EventName.LEASE_LOST]


def test_a_conflict_s_signal_names_the_other_holder(work: Any) -> None:
    with receiving(lease_conflict) as seen, hold_lock(work, "ann") as lease:
        result = work.delay("ann")
    [(sender, event)] = seen
    assert (sender, event.task_id) == ("work", result.id)
    assert event.holder == lease.holder


def test_a_receiver_that_raises_breaks_no_lock(
    work: Any, singleton_store: SingletonStore, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(**_: Any) -> None:
        raise RuntimeError("a bug of the receiver")

    for signal in EVERY:
        signal.connect(broken)
    try:
        assert not is_skipped(work.delay("ann").get())
        with hold_lock(work, "ann"):
            assert is_skipped(work.delay("ann").get())
        work.delay("bob", lose=True).get()
    finally:
        for signal in EVERY:
            signal.disconnect(broken)
    assert singleton_store.held() == []
    assert "a bug of the receiver" in caplog.text


def test_the_signals_of_a_worker_are_sent_where_things_happen(
    worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    pools = load_app(POOLS)
    process = worker(POOLS, concurrency=2)
    first = pools.work.delay("k")
    journal.wait_for_starts(1, key="k")
    second = pools.work.delay("k")
    assert is_skipped(second.get(timeout=20))
    pools.gate("k").touch()
    first.get(timeout=20)

    def named(records: list[Record], text: str) -> list[Record]:
        return [record for record in records if record.data.get("text") == text]

    journal.wait_for(lambda records: named(records, EventName.RELEASED))
    [acquired], [conflict], [released] = (
        named(journal.records(), text)
        for text in (EventName.ACQUIRED, EventName.CONFLICT, EventName.RELEASED)
    )
    [run] = journal.runs("k")
    assert (acquired.pid, acquired.task_id) == (run.pid, first.id)
    assert acquired.fence == run.fence
    assert (released.pid, released.task_id) == (run.pid, first.id)
    assert conflict.task_id == second.id
    assert conflict.pid in process.children()
    assert conflict.data["holder"] == (
        f"{POOLS}.work[{first.id}] on {process.hostname} (pid {run.pid})"
    )


# The worker event.


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_a_skip_and_a_revocation_are_worker_events_where_events_are_on(
    pool: str, environment: dict[str, str], worker: StartWorker, load_app: LoadApp
) -> None:
    environment["EARLY"] = "1"
    pools = load_app(POOLS)
    with listening(pools.app, worker, POOLS, pool=pool, queues=["loud"]) as (listener, loud):
        quiet = worker(POOLS, pool=pool, queues=["quiet"])
        with hold("k", scope=f"{POOLS}.brief", app=pools.app) as lease:
            unheard = pools.brief.apply_async(("k",), queue="quiet")
            assert is_skipped(unheard.get(timeout=20))
            observed = pools.brief.apply_async(("k",), queue="loud")
            assert is_skipped(observed.get(timeout=20))
            call = {"queue": "loud", "singleton": {"on_conflict": "revoke"}}
            revoked = pools.brief.apply_async(("k",), **call)
            with pytest.raises(TaskRevokedError):
                revoked.get(timeout=20)
        event = listener.wait_for("task-skipped", uuid=observed.id)
        assert event["name"] == f"{POOLS}.brief"
        assert event["key"] == lease.key
        assert event["holder"] == str(lease.holder)
        assert event["hostname"] == loud.hostname
        assert event["timestamp"] > 0
        # The task ends as always, for monitors that don't know of skips.
        listener.wait_for("task-succeeded", uuid=observed.id)
        assert listener.of("task-skipped", uuid=unheard.id) == []
        event = listener.wait_for("task-revoked", uuid=revoked.id)
        assert event["hostname"] == loud.hostname
        # As those that Celery's own worker sends.
        assert (event["terminated"], event["signum"], event["expired"]) == (False, None, False)
        assert listener.of("task-succeeded", uuid=revoked.id) == []
        assert quiet.alive
