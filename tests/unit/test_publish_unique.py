"""A call with a claim: published once, or answered with the call that has the claim.

The broker, the result backend and the store are in memory; the store's clock stands still, at the
time of this day, for results say when they were done.
"""

from __future__ import annotations

import copy
import logging
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task, group, states
from celery.backends.rpc import RPCBackend
from celery.canvas import Signature
from celery.contrib.abortable import AbortableAsyncResult, AbortableTask
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import GroupResult, allow_join_result, denied_join_result
from kombu.utils.json import dumps, loads

from celery_singleton_lock import (
    CallOptions,
    DuplicateTask,
    LockKeyError,
    OnConflict,
    SingletonLockError,
    SingletonTask,
    StoreError,
    StoreUnavailable,
    claim_and_send,
    is_skipped,
    singleton_task,
)
from celery_singleton_lock.core import native_threads
from celery_singleton_lock.core.lease import Phase, Record, Token
from celery_singleton_lock.core.store_requests import ClaimChange, ClaimRequest, Replaced
from celery_singleton_lock.message.header import HEADER
from celery_singleton_lock.publish.replace import Replacement
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.testing import ManualClock, hold_claim
from tests.harness.flat_store import FlatStore
from tests.harness.keys import EVERY_NAME

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def account_only(account: Any) -> None:
    """Runs nowhere."""


class CuedStore(FlatStore):
    """The memory store; a cue says whether it takes a claim, and what it raises then."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.cues: list[tuple[bool, BaseException]] = []
        self.timeouts: list[float] = []
        self.slow = 0.0
        self.clock = clock

    def take_claim(self, request: ClaimRequest, *, timeout: float = 0) -> Record | None:
        self.timeouts.append(timeout)
        if not self.cues:
            return super().take_claim(request)
        carried_out, error = self.cues.pop(0)
        if carried_out:
            super().take_claim(request)
        self.clock.advance(self.slow)
        raise error


class Bench:
    """An app of its own, its queue and its claims."""

    def __init__(self, **settings: Any) -> None:
        self.queue = f"q-{uuid4().hex}"
        self.app = Celery(
            "bench", broker="memory://", backend="cache+memory://", set_as_current=False
        )
        self.app.conf.update(
            task_default_queue=self.queue, singleton_lock_url="redis://127.0.0.1:1/0", **settings
        )
        self.clock = ManualClock(wall=time.time())
        self.store = CuedStore(self.clock)
        Runtime.install(self.app, Runtime(self.app, store=self.store, clock=self.clock))

    def answer_with(
        self, monkeypatch: pytest.MonkeyPatch, read: Callable[[str], Any], timeout: float = 60
    ) -> None:
        """Let the result backends answer with ``read(task_id)``, each within ``timeout`` s."""
        monkeypatch.setattr("celery_singleton_lock.publish.duplicate._TIMEOUT", timeout)
        backend = type(self.app.backend)
        monkeypatch.setattr(backend, "_get_task_meta_for", staticmethod(read))

    def task(self, function: Callable[..., Any] | None = None, **options: Any) -> Any:
        def sync(account: Any = 1, other: Any = None) -> None:
            """Runs nowhere."""

        options.setdefault("name", f"bench.{uuid4().hex[:8]}")
        options.setdefault("shared", False)  # else every app that is made later has it
        return singleton_task(app=self.app, **options)(function or sync)

    def messages(self) -> list[Any]:
        """What was published since the last look."""
        found = []
        with self.app.connection_for_read() as connection:
            queue = connection.SimpleQueue(self.queue)
            while True:
                try:
                    message = queue.get_nowait()
                except queue.Empty:
                    return found
                message.ack()
                found.append(message)

    def ids(self) -> list[str]:
        return [message.headers["id"] for message in self.messages()]

    def claims(self) -> list[Record]:
        return [
            record for record in self.store.operators.scan(EVERY_NAME) if "}:claim|" in record.key
        ]

    def claim(self) -> Record:
        [record] = self.claims()
        return record

    def settle(self, phase: Phase | None, ttl: float = 60.0) -> None:
        """What its worker does to the claim that stands."""
        record = self.claim()
        token = Token(Token.task_id_of(record.token), 0, 0, "-", record.token.partition("+")[2])
        self.store.claims.change(token, ClaimChange(key=record.key, phase=phase, ttl=ttl))

    def finish(self, result: Any, state: str = states.SUCCESS) -> None:
        """Store a result, and leave the claim."""
        self.app.backend.store_result(result.id, None, state)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.app.close()


def test_a_task_that_is_off_publishes_without_the_header(bench: Bench) -> None:
    """Also its retry, whose signature has the header of the message from before."""
    task = bench.task(unique="until_done", enabled=False)
    for _ in range(2):
        task.apply_async((1,), headers={HEADER: {"call": "c", "claim": {}}, "theirs": "kept"})
    first, second = [dict(message.headers) for message in bench.messages()]
    assert (HEADER in first, HEADER in second) == (False, False)
    assert (first["theirs"], second["theirs"]) == ("kept", "kept")
    assert bench.store.timeouts == []


# One message of equal calls.


@pytest.mark.parametrize("unique", ["until_start", "until_done"])
def test_of_equal_calls_one_is_published_and_all_are_answered_with_it(
    bench: Bench, unique: str
) -> None:
    sync = bench.task(key="{account}", unique=unique)
    results = [sync.delay(7), sync.delay(account=7), sync.apply_async((7,), {"other": 3})]
    assert {result.id for result in results} == {results[0].id}
    assert bench.ids() == [results[0].id]
    record = bench.claim()
    assert (record.phase, record.holder.task_id) == (Phase.QUEUED, results[0].id)


def test_other_arguments_and_other_tasks_are_no_duplicates(bench: Bench) -> None:
    one = bench.task(key="{account}", scope="accounts", unique="until_done")
    other = bench.task(key="{account}", scope="accounts", unique="until_done")
    results = [one.delay(1), one.delay(2), other.delay(1)]
    assert bench.ids() == [result.id for result in results]
    assert len(bench.claims()) == 3


def test_a_claim_ends_after_unique_for(bench: Bench) -> None:
    sync = bench.task(unique="until_done", unique_for=timedelta(minutes=1))
    first = sync.delay()
    bench.clock.advance(59.9)
    assert sync.delay().id == first.id
    bench.clock.advance(0.2)
    assert sync.delay().id != first.id


def test_a_call_that_wants_a_run_after_it_is_not_answered_with_one_that_runs(bench: Bench) -> None:
    # One call was made with other terms than its task has; a deploy may have changed them too.
    sync = bench.task(unique="until_start")
    running = sync.apply_async(singleton={"unique": "until_done"})
    bench.settle(Phase.RUNNING)
    late = sync.delay()
    assert bench.ids() == [running.id, late.id]


def test_a_call_is_answered_with_the_retry_that_will_run_after_it(bench: Bench) -> None:
    sync = bench.task(unique="until_start")
    first = sync.delay()
    bench.settle(Phase.RETRYING)
    assert sync.delay().id == first.id
    assert bench.ids() == [first.id]


# What a duplicate is answered with.


def test_raise_names_the_task_and_the_seconds_that_are_left(bench: Bench) -> None:
    sync = bench.task(unique="until_done", on_duplicate="raise", unique_for=100)
    first = sync.delay()
    bench.clock.advance(30)
    with pytest.raises(DuplicateTask, match=rf"{first.id} is queued .* for 30\.0 s now") as raised:
        sync.delay()
    assert raised.value.task_id == first.id
    assert raised.value.remaining == pytest.approx(70)
    assert isinstance(raised.value, SingletonLockError)
    again = pickle.loads(pickle.dumps(raised.value))
    assert (again.task_id, again.remaining) == (first.id, raised.value.remaining)
    assert bench.ids() == [first.id]


def test_skip_is_a_result_that_is_ready_and_falsy(bench: Bench) -> None:
    sync = bench.task(unique="until_done", on_duplicate="skip")
    first = sync.delay()
    skipped = sync.apply_async(task_id="mine")
    assert bench.ids() == [first.id]
    assert not skipped
    assert skipped.id == "mine"
    assert skipped.ready()
    assert skipped.successful()
    assert is_skipped(skipped)
    value = skipped.get(timeout=0)
    assert is_skipped(value)
    assert (value["task"], value["key"]) == (sync.name, sync.lock_key())
    assert value["holder"]["task_id"] == first.id
    assert dict(loads(dumps(value))) == value


def test_a_skipped_result_can_be_copied_and_pickled(bench: Bench) -> None:
    sync = bench.task(unique="until_done", on_duplicate="skip")
    sync.delay()
    skipped = sync.delay()
    for again in (copy.copy(skipped), pickle.loads(pickle.dumps(skipped))):
        assert (again.id, again.get()) == (skipped.id, skipped.get())
        assert not again


# Stale claims.


@pytest.mark.parametrize("state", [states.SUCCESS, states.FAILURE, states.REVOKED])
@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.RUNNING, Phase.RETRYING])
def test_the_claim_of_a_task_that_has_ended_is_taken_over(
    bench: Bench, state: str, phase: Phase
) -> None:
    sync = bench.task(unique="until_done")
    first = sync.delay()
    bench.settle(phase)
    bench.finish(first, state)
    second = sync.delay()
    assert second.id != first.id
    assert bench.ids() == [first.id, second.id]
    record = bench.claim()
    assert (Token.task_id_of(record.token), record.phase) == (second.id, Phase.QUEUED)
    assert sync.delay().id == second.id


@pytest.mark.parametrize("state", [states.PENDING, states.STARTED, states.RETRY, "PROGRESS"])
def test_the_claim_of_a_task_that_has_not_ended_counts(bench: Bench, state: str) -> None:
    sync = bench.task(unique="until_done")
    first = sync.delay()
    bench.finish(first, state)
    assert sync.delay().id == first.id


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.RETRYING])
def test_a_message_that_expires_before_its_next_delivery_answers_no_call_after_that(
    bench: Bench, phase: Phase
) -> None:
    """Its requeued copy, or its retry, keeps ``expires``: a worker will discard it."""
    sync = bench.task(unique="until_done", expires=60)
    first = sync.delay()
    bench.settle(phase, ttl=3600)
    bench.clock.advance(59)
    assert sync.delay().id == first.id
    bench.clock.advance(2)
    second = sync.delay()
    assert second.id != first.id
    assert sync.delay().id == second.id
    assert bench.ids() == [first.id, second.id]


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.RETRYING])
def test_a_call_that_does_not_expire_is_not_answered_with_one_that_does(
    bench: Bench, phase: Phase
) -> None:
    sync = bench.task(unique="until_done")
    short = sync.apply_async(expires=600)
    bench.settle(phase, ttl=3600)
    assert sync.apply_async(expires=1200).id == short.id
    lasting = sync.delay()
    assert sync.delay().id == sync.apply_async(expires=5).id == lasting.id
    assert bench.ids() == [short.id, lasting.id]


def test_a_body_that_runs_beyond_its_expires_answers_equal_calls(bench: Bench) -> None:
    sync = bench.task(unique="until_done", expires=60)
    first = sync.delay()
    bench.settle(Phase.RUNNING, ttl=3600)
    bench.clock.advance(61)
    assert sync.delay().id == sync.apply_async(expires=None).id == first.id


def test_of_two_that_find_a_stale_claim_one_takes_it_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = bench.task(unique="until_done")
    bench.finish(sync.delay())
    read = bench.app.backend.get_task_meta
    others: list[Any] = []

    def get_task_meta(task_id: str) -> Any:
        if not others:
            others.append(None)
            others.append(sync.delay())  # it was faster
        return read(task_id)

    bench.answer_with(monkeypatch, get_task_meta)
    assert sync.delay().id == others[1].id


@pytest.mark.parametrize(
    ("ended", "counts"),
    [
        (timedelta(days=-1), True),
        (timedelta(seconds=-1), True),
        (timedelta(seconds=1), False),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "form",
    [
        datetime.isoformat,
        lambda done: done,
        lambda done: done.replace(tzinfo=None),
        lambda done: done.replace(tzinfo=None).isoformat(),
        lambda done: done.astimezone(timezone(timedelta(hours=9))).isoformat(),
    ],
    ids=["text", "aware", "naive", "naive text", "another zone"],
)
def test_the_result_of_an_earlier_call_with_the_same_id_is_not_that_of_the_claim(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, ended: timedelta, counts: bool, form: Any
) -> None:
    sync = bench.task(unique="until_done")
    first = sync.apply_async(task_id="nightly")
    done = datetime.fromtimestamp(bench.clock.wall(), UTC) + ended
    meta = {"status": states.SUCCESS, "date_done": form(done)}
    bench.answer_with(monkeypatch, lambda task_id: meta)
    assert (sync.delay().id == first.id) is counts


def test_the_claim_of_a_users_test_yields_what_a_duplicate_gets(bench: Bench) -> None:
    task = bench.task(base=AbortableTask, unique="until_done")
    with hold_claim(task, 1) as queued:
        duplicate = task.delay(1)
    assert (type(queued), queued.id) == (type(duplicate), duplicate.id)
    assert isinstance(queued, AbortableAsyncResult)


@pytest.mark.parametrize("result_persistent", [None, True])
def test_with_the_rpc_backend_the_claim_counts_and_no_result_is_taken_away(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, result_persistent: bool | None
) -> None:
    asked: list[str] = []
    for name in ("get_task_meta", "_get_task_meta_for"):
        ask = lambda self, task_id: asked.append(task_id)  # noqa: E731
        monkeypatch.setattr(RPCBackend, name, ask, raising=False)
    bench.app.conf.update(result_backend="rpc://", result_persistent=result_persistent)
    sync = bench.task(unique="until_done")
    first = sync.delay()
    assert isinstance(bench.app.backend, RPCBackend)
    assert sync.delay().id == first.id
    assert asked == []


@pytest.mark.parametrize(
    "options", [{}, {"ignore_result": True}, {"on_duplicate": "skip"}], ids=str
)
def test_with_the_rpc_backend_a_duplicates_caller_is_warned_once_of_its_result(
    bench: Bench, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    bench.app.conf.update(result_backend="rpc://")
    sync = bench.task(unique="until_done", **options)
    first = sync.delay()
    assert "rpc://" not in caplog.text
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            sync.delay()
    warnings = [r.getMessage() for r in caplog.records if "rpc://" in r.getMessage()]
    assert len(warnings) == (not options)
    for warning in warnings:
        assert first.id in warning
        assert sync.name in warning
        assert 'on_duplicate="skip"' in warning, "it names the way out"


@pytest.mark.parametrize("backend", ["disabled://", None])
def test_without_a_result_backend_the_claim_counts(backend: str | None) -> None:
    bench = Bench(result_backend=backend)
    sync = bench.task(unique="until_done")
    assert sync.delay().id == sync.delay().id
    assert len(bench.ids()) == 1
    bench.app.close()


def test_a_result_backend_that_fails_leaves_the_claim_standing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(task_id: str) -> Any:
        raise ConnectionError(task_id)

    sync = bench.task(unique="until_done")
    first = sync.delay()
    bench.answer_with(monkeypatch, fail)
    assert sync.delay().id == first.id


def test_a_result_backend_that_does_not_answer_holds_up_no_call_and_one_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    answered = threading.Event()

    def hang(task_id: str) -> Any:
        asked.append(task_id)
        assert answered.wait(60), "it is asked on the thread of the caller"
        return {"status": states.SUCCESS, "date_done": None}

    sync, other = bench.task(unique="until_done"), bench.task(unique="until_done")
    first, second = sync.delay(), other.delay()
    bench.answer_with(monkeypatch, hang, timeout=0.1)
    assert sync.delay().id == first.id
    assert other.delay().id == second.id
    assert (asked, answered.is_set()) == ([first.id], False), "the second is not asked about"
    answered.set()
    thread = Runtime.of(bench.app).unanswered
    assert thread is not None
    assert thread.daemon, "the interpreter does not wait for it"
    thread.join(60)
    bench.answer_with(monkeypatch, hang)
    assert other.delay().id != second.id


def test_a_soft_time_limit_ends_a_call_that_waits_for_the_result_backend(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body that makes the call has to see it: the hard limit kills it otherwise."""
    struck, ended = threading.Event(), threading.Event()

    def strike(*_: Any) -> None:
        struck.set()
        raise SoftTimeLimitExceeded

    def hang(task_id: str) -> Any:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert struck.wait(60)
        assert ended.wait(60)
        return {"status": states.PENDING}

    sync = bench.task(unique="until_done")
    first = sync.delay()
    bench.answer_with(monkeypatch, hang)
    before = signal.signal(signal.SIGUSR1, strike)
    try:
        with pytest.raises(SoftTimeLimitExceeded):
            sync.delay()
    finally:
        ended.set()
        signal.signal(signal.SIGUSR1, before)
    assert bench.claim().holder.task_id == first.id


@pytest.mark.parametrize(("seconds", "times"), [(0.01, 5), (0.06, 2), (0.4, 1)])
def test_a_publisher_waits_for_a_slow_result_backend_for_half_a_second_at_most(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, seconds: float, times: int
) -> None:
    """It asks again for each message that starts before it gets the caller's arguments."""
    asked: list[str] = []

    def read(task_id: str) -> Any:
        asked.append(task_id)
        bench.clock.advance(seconds)
        return {"status": states.PENDING}

    monkeypatch.setattr(bench.store, "arguments", object())
    sync = bench.task(key="{account}", unique="until_start", on_duplicate="replace")
    sync.delay()
    bench.answer_with(monkeypatch, read)
    monkeypatch.setattr(Replacement, "replace", lambda *_: Replaced.NOT_QUEUED)
    sync.delay()
    assert len(asked) == times
    assert seconds * len(asked) <= 0.5


def test_duplicates_make_one_result_backend_for_a_process(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has connections of its own, and Celery makes one for each thread that asks."""
    made: list[str] = []
    backend = type(bench.app.backend)
    create: Any = backend.__init__

    def count(self: Any, *args: Any, **kwargs: Any) -> None:
        made.append(threading.current_thread().name)
        create(self, *args, **kwargs)

    sync = bench.task(unique="until_done")
    first = sync.delay()
    monkeypatch.setattr(backend, "__init__", count)
    duplicates = {sync.delay().id for _ in range(20)}
    assert duplicates == {first.id}
    assert made == ["singleton-result"]


# One message per period.


PERIOD: dict[str, Any] = {"unique": "until_expired", "unique_for": 100}


@pytest.mark.parametrize("state", [None, states.SUCCESS, states.FAILURE, states.REVOKED])
def test_one_call_is_published_in_a_period_whatever_became_of_it(
    bench: Bench, state: str | None
) -> None:
    sync = bench.task(key="{account}", **PERIOD)
    first = sync.delay(7)
    if state is not None:
        bench.finish(first, state)
    bench.clock.advance(99.9)
    assert sync.delay(7).id == first.id
    assert is_skipped(sync.apply_async((7,), singleton={"on_duplicate": "skip"}))
    other = sync.delay(8)
    bench.clock.advance(0.2)
    second = sync.delay(7)
    assert bench.ids() == [first.id, other.id, second.id]


@pytest.mark.parametrize(
    "options", [{"countdown": 50}, {"expires": 10}, {"countdown": 500, "expires": 600}], ids=str
)
def test_a_period_begins_with_its_call_however_long_that_waits(
    bench: Bench, options: dict[str, Any]
) -> None:
    sync = bench.task(**PERIOD)
    sync.apply_async(**options)
    assert bench.claim().ttl == pytest.approx(100)
    bench.clock.advance(40)
    sync.delay()
    assert bench.claim().ttl == pytest.approx(60)
    assert len(bench.ids()) == 1


def test_the_message_of_a_period_names_no_claim_that_a_worker_might_change(bench: Bench) -> None:
    sync = bench.task(**PERIOD)
    sync.delay()
    [message] = bench.messages()
    assert message.headers[HEADER].keys() == {"version", "id", "call"}
    # Workers and publishers with other options look for another name.
    assert bench.claim().key != Runtime.of(bench.app).keyspace.claim(sync.name, sync.lock_key())
    beside = sync.apply_async(singleton={"unique": "until_done"})
    assert bench.ids() == [beside.id]


def test_a_message_published_again_keeps_the_period_of_its_first_publication(bench: Bench) -> None:
    sync = bench.task(**PERIOD)
    header = {"id": "mine", "call": "abc"}
    for _ in range(2):  # as the worker parent does after the loss of a child
        sync.apply_async(task_id="mine", headers={HEADER: header}, retries=1)
        bench.clock.advance(60)
    assert bench.ids() == ["mine", "mine"]
    assert bench.claims() == [] or bench.claim().ttl < 1
    bench.clock.advance(1)
    assert sync.delay().id != "mine"


def test_raise_says_when_the_next_call_of_the_period_may_be_made(bench: Bench) -> None:
    sync = bench.task(on_duplicate="raise", **PERIOD)
    first = sync.delay()
    bench.clock.advance(30)
    expected = rf"{first.id} is published .* for 30\.0 s now.* ends in 70 s, whatever becomes"
    with pytest.raises(DuplicateTask, match=expected) as raised:
        sync.delay()
    assert raised.value.remaining == pytest.approx(70)


@pytest.mark.parametrize("given", [{}, {"ttl": 33}], ids=str)
def test_a_duplicate_in_a_canvas_names_the_period_to_its_worker(bench: Bench, given: Any) -> None:
    sync = bench.task(**PERIOD)
    first = sync.delay()
    key = bench.claim().key
    second = sync.apply_async(link=sync.si(2), singleton=given)
    _, message = bench.messages()
    header = message.headers[HEADER]
    assert (header["id"], header["period"]) == (second.id, key)
    assert header.get("options", {}) == given
    assert "claim" not in header
    assert Token.task_id_of(bench.claim().token) == first.id


@pytest.mark.parametrize("options", [PERIOD, {"unique": "until_start"}], ids=str)
def test_a_lost_childs_retry_is_published_beside_a_claim_of_another_call(
    bench: Bench, options: Any
) -> None:
    sync = bench.task(**options)
    first = sync.delay()
    header = {"id": "lost", "call": "aa"}
    retry = sync.apply_async(task_id="lost", retries=1, headers={HEADER: header})
    assert bench.ids() == [first.id, retry.id]


# The store fails.


@pytest.mark.parametrize("carried_out", [True, False])
def test_an_unresponsive_store_is_not_asked_twice_and_the_message_goes_out(
    bench: Bench, caplog: pytest.LogCaptureFixture, carried_out: bool
) -> None:
    sync = bench.task(unique="until_done")
    bench.store.cues = [(carried_out, StoreUnavailable("silent"))]
    bench.store.slow = 0.4
    with caplog.at_level(logging.WARNING):
        result = sync.delay()
    assert bench.ids() == [result.id]
    assert len(bench.store.timeouts) == 1
    assert max(bench.store.timeouts) <= 0.5
    [warning] = [r for r in caplog.records if "without-claim" in r.getMessage()]
    assert warning.levelno == logging.WARNING
    assert result.id in warning.getMessage()


def test_a_broken_connection_shows_at_once_and_is_tried_again(bench: Bench) -> None:
    sync = bench.task(unique="until_done")
    bench.store.cues = [(False, StoreUnavailable("broken pipe"))]
    first = sync.delay()
    assert sync.delay().id == first.id
    assert bench.ids() == [first.id]


def test_a_store_that_refuses_leaves_the_message_without_a_claim(bench: Bench) -> None:
    sync = bench.task(unique="until_done")
    bench.store.cues = [(False, StoreError("out of memory"))] * 2
    assert sync.delay().id != sync.delay().id
    assert len(bench.ids()) == 2


def test_with_raise_a_store_that_fails_is_an_error_and_nothing_is_published(bench: Bench) -> None:
    sync = bench.task(unique="until_done", on_duplicate="raise")
    bench.store.cues = [(False, StoreUnavailable("away"))] * 2
    with pytest.raises(StoreUnavailable):
        sync.delay()
    assert bench.ids() == []
    assert bench.claims() == []


# The publish fails.


@pytest.mark.parametrize("options", [{"unique": "until_done"}, PERIOD], ids=str)
@pytest.mark.parametrize("error", [OSError("broker"), SoftTimeLimitExceeded(), KeyboardInterrupt()])
def test_a_publish_that_fails_frees_its_claim(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: BaseException, options: Any
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    sync = bench.task(**options)
    monkeypatch.setattr(bench.app, "send_task", fail)
    with pytest.raises(type(error)):
        sync.delay()
    assert bench.claims() == []


@pytest.mark.parametrize("publishes", [True, False])
def test_a_message_that_a_base_class_does_not_publish_answers_calls_for_a_minute(
    bench: Bench, publishes: bool
) -> None:
    """It may publish it when a transaction is committed, which may be rolled back instead."""
    waiting: list[Callable[[], Any]] = []

    class AtCommit(Task):  # before Celery 5.7 it takes no parameters when it runs
        abstract = True

        def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
            waiting.append(lambda: super(AtCommit, self).apply_async(args, kwargs, **options))
            return waiting.pop()() if publishes else None

    class Base(SingletonTask[..., Any], AtCommit):
        abstract = True

    @bench.app.task(base=Base, shared=False, singleton={"unique": "until_done"})
    def sync() -> None:
        """Runs nowhere."""

    sync.delay()
    bench.clock.advance(61)
    assert len(bench.claims()) == (1 if publishes else 0)
    sync.delay()
    assert len(waiting) == (0 if publishes else 2)
    for publish in waiting:
        publish()
    found = [message.headers[HEADER]["claim"]["duplicate"] for message in bench.messages()]
    assert found == ([False] if publishes else [False, False])


def test_a_duplicate_whose_publish_fails_leaves_the_others_claim(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError("broker")

    sync = bench.task(unique="until_done")
    first = sync.delay()
    monkeypatch.setattr(bench.app, "send_task", fail)
    with pytest.raises(OSError, match="broker"):
        sync.apply_async(link=sync.si())
    assert sync.delay().id == first.id


@pytest.mark.parametrize("error", [SoftTimeLimitExceeded(), KeyboardInterrupt(), RuntimeError()])
def test_a_call_interrupted_while_it_asks_leaves_no_claim(
    bench: Bench, error: BaseException
) -> None:
    # A soft time limit, gevent's Timeout or Ctrl-C between send and read: the claim may stand, for
    # a message that is never published.
    sync = bench.task(unique="until_done")
    bench.store.cues = [(True, error)]
    with pytest.raises(type(error)):
        sync.delay()
    assert bench.claims() == []
    assert bench.ids() == []


# Canvas: another part of it waits for the message.


@pytest.mark.parametrize("unique", ["until_start", "until_done"])
@pytest.mark.parametrize(
    "options",
    [
        *({"link": True}, {"link_error": True}),
        *({"chain": [1]}, {"chord": {"a": 1}}, {"group_id": "g"}),
        *({"root_id": "r"}, {"parent_id": "p"}),
    ],
    ids=str,
)
def test_a_duplicate_that_its_canvas_waits_for_is_published_as_one(
    bench: Bench, unique: str, options: dict[str, Any]
) -> None:
    sync = bench.task(unique=unique)
    options = {key: sync.si(9) if value is True else value for key, value in options.items()}
    first, second = sync.delay(), sync.apply_async(**options)
    assert first.id != second.id
    claims = [message.headers[HEADER]["claim"] for message in bench.messages()]
    assert [claim["duplicate"] for claim in claims] == [False, True]
    assert Token.task_id_of(bench.claim().token) == first.id


@pytest.mark.parametrize("on_duplicate", ["return_existing", "skip", "raise"])
def test_whatever_the_task_says_a_member_is_published(bench: Bench, on_duplicate: str) -> None:
    sync = bench.task(unique="until_done", on_duplicate=on_duplicate)
    sync.delay()
    result = group(sync.si(), sync.si()).apply_async()
    assert len(bench.ids()) == 3
    assert len({one.id for one in result.results}) == 2


def test_a_member_that_says_so_itself_is_not_published(bench: Bench) -> None:
    sync = bench.task(unique="until_done")
    first = sync.delay()
    own = {"on_duplicate": "skip"}
    group([sync.si().set(singleton=own), sync.si(2).set(singleton=own)]).apply_async()
    assert is_skipped(sync.apply_async(link=sync.si(2), singleton=own))
    assert sync.apply_async(link=sync.si(2), singleton={"on_duplicate": "return_existing"}).id
    with pytest.raises(DuplicateTask):
        sync.apply_async(link=sync.si(2), singleton={"on_duplicate": "raise"})
    ids = bench.ids()
    assert ids[0] == first.id
    assert len(ids) == 2, "the member that is no duplicate"


def test_skipped_results_are_members_of_a_group_result(bench: Bench) -> None:
    sync = bench.task(unique="until_done", on_duplicate="skip")
    results = [sync.delay(1), sync.delay(1)]
    bench.app.backend.store_result(results[0].id, "run", states.SUCCESS)
    together = GroupResult("g", results)
    value, skipped = together.join(timeout=5)
    assert value == "run"
    assert is_skipped(skipped)
    assert together.successful()
    assert together.completed_count() == 2


def test_inside_a_task_a_skipped_result_is_got_as_any_other(bench: Bench) -> None:
    sync = bench.task(unique="until_done", on_duplicate="skip")
    sync.delay()
    skipped = sync.delay()
    with denied_join_result():
        with pytest.raises(RuntimeError, match=r"Never call result\.get"):
            skipped.get()
        assert is_skipped(skipped.get(disable_sync_subtasks=False))
        with allow_join_result():
            assert is_skipped(skipped.get())


# Precedence, and options that are wrong.


@pytest.mark.parametrize(
    ("app", "task", "call", "published"),
    [
        ({"unique": "until_done"}, {}, {}, 1),
        ({"unique": "until_done"}, {"unique": None}, {}, 2),
        ({"unique": "until_done"}, {"unique": None}, {"unique": "until_done"}, 1),
        ({}, {"unique": "until_start"}, {"unique": None}, 2),
        ({}, {"unique": "until_start"}, False, 2),
    ],
    ids=str,
)
def test_the_call_comes_before_the_task_and_the_task_before_the_app(
    app: Any, task: Any, call: Any, published: int
) -> None:
    bench = Bench(**{f"singleton_lock_{name}": value for name, value in app.items()})
    sync = bench.task(**task)
    for _ in range(2):
        sync.apply_async(singleton=call)
    assert len(bench.ids()) == published
    bench.app.close()


def test_singleton_false_leaves_out_the_claim_and_nothing_else(bench: Bench) -> None:
    sync = bench.task(unique="until_done")
    sync.delay()
    free = sync.apply_async(singleton=False)
    _, message = bench.messages()
    assert message.headers["id"] == free.id
    assert "claim" not in message.headers[HEADER]
    assert message.headers[HEADER]["options"] == {"unique": None}
    assert len(bench.claims()) == 1


@pytest.mark.parametrize(
    ("singleton", "error", "message"),
    [
        ({"uniqe": "until_done"}, TypeError, "did you mean 'unique'"),
        ({"key": "{account}"}, TypeError, "a call can't set 'key'"),
        ({1: 2}, TypeError, "a call can't set 1"),
        ({"unique": "until_strat"}, ValueError, "did you mean 'until_start'"),
        ({"unique": "until_expired"}, ValueError, "unique=.until_expired. without unique_for"),
        ({"unique": "until_start", "on_conflict": "skip"}, ValueError, "would be dropped"),
        (True, TypeError, "give a dict"),
        ([], TypeError, "give a dict"),
    ],
    ids=repr,
)
def test_a_wrong_option_fails_where_the_call_is_made(
    bench: Bench, singleton: Any, error: type[Exception], message: str
) -> None:
    sync = bench.task()
    with pytest.raises(error, match=message) as raised:
        sync.apply_async(singleton=singleton)
    assert sync.name in str(raised.value)
    with pytest.raises(error, match=message):
        sync.s().set(singleton=singleton).delay()
    assert bench.ids() == []


@pytest.mark.parametrize("round_trip", [False, True], ids=["as made", "through JSON"])
@pytest.mark.parametrize(
    "singleton",
    [
        {"on_duplicate": "skip", "unique": "until_done", "unique_for": 33, "ttl": 12.5},
        {"unique": "until_done", "on_conflict": OnConflict.retry(2, 3, None)},
        {"unique": "until_done", "unique_for": 44},
        False,
    ],
    ids=str,
)
def test_a_signature_carries_the_options_of_its_call(
    bench: Bench, singleton: Any, round_trip: bool
) -> None:
    sync = bench.task()
    signature = sync.s(5).set(singleton=singleton)
    if round_trip:
        signature = Signature.from_dict(loads(dumps(signature)), app=bench.app)
    signature.apply_async()
    [message] = bench.messages()
    assert ("claim" in message.headers[HEADER]) is bool(singleton)
    if singleton and "unique_for" in singleton:
        assert bench.claim().ttl == pytest.approx(44 if "ttl" not in singleton else 33)


# Keys.


def test_a_callable_key_that_is_not_stable_is_refused_and_named(bench: Bench) -> None:
    def changing_key(account: Any) -> str:
        return uuid4().hex

    sync = bench.task(account_only, key=changing_key, unique="until_done")
    with pytest.raises(LockKeyError, match="make changing_key depend on nothing else"):
        sync.delay(1)
    assert bench.ids() == []
    assert bench.claims() == []


@pytest.mark.parametrize(
    ("unique", "singleton"), [(None, None), (None, {"ttl": 9}), ("until_done", False)]
)
def test_without_a_claim_no_key_is_computed_at_publish(
    bench: Bench, unique: str | None, singleton: Any
) -> None:
    def refuse(account: Any) -> str:
        raise ArithmeticError("a key was computed")

    sync = bench.task(account_only, key=refuse, unique=unique)
    sync.apply_async((1,), singleton=singleton)
    assert len(bench.ids()) == 1
    with pytest.raises(LockKeyError, match="a key was computed"):
        sync.apply_async((1,), singleton={"unique": "until_done"})


def test_a_key_of_none_is_published_without_a_claim(bench: Bench) -> None:
    sync = bench.task(account_only, key=lambda account: None, unique="until_done")
    results = [sync.delay(1) for _ in range(2)]
    assert bench.ids() == [result.id for result in results]
    assert bench.claims() == []


def test_arguments_that_do_not_fit_are_a_type_error_and_leave_no_claim(bench: Bench) -> None:
    sync = bench.task(unique="until_done")
    with pytest.raises(TypeError):
        sync.delay(1, 2, 3)
    assert bench.ids() == []
    assert bench.claims() == []


# How long a claim stays.


@pytest.mark.parametrize(
    ("options", "ttl"),
    [
        ({}, 100),
        ({"countdown": 50}, 150),
        ({"countdown": 0.5}, 100.5),
        ({"countdown": 0}, 100),
        ({"eta": NOW + timedelta(seconds=50)}, 150),
        ({"eta": NOW - timedelta(seconds=50)}, 100),
        ({"countdown": 50, "eta": NOW + timedelta(seconds=7)}, 150),
        ({"expires": 30}, 30),
        ({"expires": 300}, 100),
        ({"expires": NOW + timedelta(seconds=30)}, 30),
        ({"expires": 120, "countdown": 50}, 120),
        ({"expires": NOW - timedelta(seconds=30)}, 0.001),
    ],
    ids=str,
)
def test_a_claim_stays_as_long_as_its_message_may(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], ttl: float
) -> None:
    monkeypatch.setattr(bench.app, "now", lambda: NOW)
    sync = bench.task(unique="until_done", unique_for=100)
    sync.apply_async(**options)
    found = bench.claims()
    assert (found[0].ttl if found else 0.0) == pytest.approx(ttl, abs=0.01)


def test_the_tasks_own_expires_counts_unless_the_call_says_otherwise(bench: Bench) -> None:
    sync = bench.task(unique="until_done", unique_for=100, expires=30)
    sync.delay(1)
    assert bench.claim().ttl == pytest.approx(30)
    sync.apply_async((2,), expires=60)
    sync.apply_async((3,), expires=None)
    assert sorted(record.ttl for record in bench.claims()) == pytest.approx([30, 60, 100], abs=1)


def test_the_claim_of_a_call_with_a_wrong_expires_ends_though_it_cannot_be_freed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(bench.store.claims, "change", away)
    sync = bench.task(unique="until_done")
    with pytest.raises(ValueError, match=r"soon|ISO"):
        sync.apply_async(expires="soon", countdown=5)
    bench.clock.advance(0.1)
    assert bench.claims() == []


def test_the_claim_of_a_call_that_was_not_published_is_freed_when_the_store_answers_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the calls of other processes, which know nothing of this one."""

    def away(*args: Any, **options: Any) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr(native_threads, "start_new_thread", lambda function, name: None)
    sync = bench.task(unique="until_done")
    with monkeypatch.context() as patch:
        patch.setattr(bench.store.claims, "change", away)
        with pytest.raises(TypeError, match="not supported"):
            sync.apply_async(countdown="soon")  # Celery refuses it
    assert len(bench.claims()) == 1
    bench.clock.advance(1.0)
    Runtime.of(bench.app).locker.retry_queue.catch_up()
    assert bench.claims() == []


# Whose message it is.


def test_headers_of_another_message_carry_nothing_of_ours(bench: Bench) -> None:
    sync, other = bench.task(unique="until_done"), bench.task(unique="until_done")
    sync.apply_async((1,), singleton={"ttl": 33})
    [first] = bench.messages()
    passed = {**first.headers, HEADER: {**first.headers[HEADER], "started": True}, "trace": "x"}
    child = other.apply_async((1,), headers=passed)
    [message] = bench.messages()
    header = message.headers[HEADER]
    assert message.headers["trace"] == "x"
    assert header["id"] == child.id
    assert header["call"] != first.headers[HEADER]["call"]
    assert header["claim"]["key"] != first.headers[HEADER]["claim"]["key"]
    assert "started" not in header
    assert "options" not in header


def test_the_callers_headers_are_left_as_they_were(bench: Bench) -> None:
    headers = {"trace": "x"}
    bench.task(unique="until_done").apply_async(headers=headers)
    assert headers == {"trace": "x"}


def test_two_calls_with_one_explicit_id_are_two_calls(bench: Bench) -> None:
    sync = bench.task(unique="until_done")
    sync.apply_async(task_id="nightly")
    sync.apply_async(task_id="nightly")
    assert bench.ids() == ["nightly"]
    bench.settle(None)
    sync.apply_async(task_id="nightly")
    assert bench.ids() == ["nightly"]


def test_a_call_by_name_finds_the_scope_of_a_task_that_is_registered(bench: Bench) -> None:
    once: CallOptions = {"unique": "until_done"}
    sync = bench.task(key="{account}", scope="accounts", unique="until_done")
    first = sync.delay(7)
    by_name = claim_and_send(bench.app, sync.name, [7], key="7", singleton=once)
    assert (by_name.id, bench.ids()) == (first.id, [first.id])
