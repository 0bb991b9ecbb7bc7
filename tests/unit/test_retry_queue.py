"""The requests that no caller waits for, and those of a worker's main thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from celery_singleton_lock.core import native_threads, observers
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.fork_locks import FORK_LOCKS
from celery_singleton_lock.core.retry_queue import RetryQueue
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.testing import ManualClock
from celery_singleton_lock.worker.main_thread import ask as ask_store
from celery_singleton_lock.worker.main_thread import ask_later
from tests.harness.deliveries import wait_until
from tests.unit.flaky_store import FlakyStore
from tests.unit.stall import Stall, assert_a_fork_waits_for

# The children touch nothing.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Bench:
    """A queue whose thread does not run, over a clock that stands still."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = FlakyStore(self.clock)
        self.queue = RetryQueue(self.store, self.clock)
        self.asked: list[Any] = []
        self.given_up: list[Any] = []
        #: What `ask` knows of a runtime.
        self.runtime: Any = SimpleNamespace(locker=SimpleNamespace(retry_queue=self.queue))

    def put(self, name: Any, ttl: float = 60.0) -> str:
        return self.queue.put(lambda store: self.asked.append(name), ttl, self.given_up.append)

    def put_away(self, ttl: float = 60.0) -> str:
        return self.queue.put(away, ttl, self.given_up.append)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(native_threads, "start_new_thread", lambda function, name: None)
    return Bench()


@pytest.fixture
def running() -> Iterator[RetryQueue]:
    """A queue whose thread runs when it is needed."""
    clock = SystemClock()
    queue = RetryQueue(FlakyStore(clock), clock)
    yield queue
    queue.close()
    wait_until(lambda: not queue._start.locked(), "the thread ends with the worker")


def away(store: Any) -> None:
    raise StoreUnavailable("this part of the store is silent")


def test_what_an_unresponsive_store_has_not_acknowledged_is_requested_again_until_its_ttl(
    bench: Bench,
) -> None:
    asked: list[str] = []

    def ask(name: str) -> Callable[[Any], None]:
        def to_ask(store: Any) -> None:
            asked.append(name)
            if store.away:
                raise StoreUnavailable("connection refused")

        return to_ask

    bench.store.away = True
    bench.queue.put(ask("short"), 5.0, bench.given_up.append)
    bench.queue.put(ask("long"), 60.0, bench.given_up.append)
    bench.queue.catch_up()
    bench.queue.catch_up()
    assert asked == ["short"], "one silence is enough, and not asked again at once"
    bench.clock.advance(6.0)
    bench.queue.catch_up()
    assert asked == ["short", "long"], "the store has freed the first one by itself"
    assert [str(why) for why in bench.given_up] == ["connection refused"]
    assert bench.queue.is_silent
    bench.store.away = False
    bench.clock.advance(1.0)
    bench.queue.catch_up()
    assert asked == ["short", "long", "long"]
    assert bench.queue.is_empty
    assert not bench.queue.is_silent
    assert len(bench.given_up) == 1


def test_a_request_that_the_store_refuses_is_sent_again_for_ten_minutes(bench: Bench) -> None:
    asked: list[str] = []

    def refused(store: Any) -> None:
        asked.append("refused")
        raise StoreError("the store refuses: no permissions")

    assert isinstance(bench.queue.ask(refused, 7200.0, bench.given_up.append), StoreError)
    assert not bench.queue.is_silent, "the store answers"
    bench.queue.put(lambda store: asked.append("other"), 60.0, bench.given_up.append)
    bench.clock.advance(1.0)
    bench.queue.catch_up()
    assert asked == ["refused", "other", "refused"]
    bench.clock.advance(598.0)
    bench.queue.catch_up()
    assert (asked[3:], bench.given_up) == (["refused"], [])
    bench.clock.advance(1.0)
    bench.queue.catch_up()
    assert [str(why) for why in bench.given_up] == ["the store refuses: no permissions"]
    assert (len(asked), bench.queue.is_empty) == (4, True)


def test_requests_that_the_store_refuses_delay_no_other_one(bench: Bench) -> None:
    asked: list[str] = []

    def ask(name: str, refusals: int, error: StoreError) -> None:
        errors = [error] * refusals

        def send(store: Any) -> None:
            asked.append(name)
            if errors:
                raise errors.pop()

        bench.queue.ask(send, 60.0, bench.given_up.append)

    for number in range(3):
        ask(f"refused {number}", 100, StoreError("the store refuses: no permissions"))
    ask("without a reply", 1, StoreUnavailable("away"))
    asked.clear()
    bench.clock.advance(1.0)
    bench.queue.catch_up()
    assert asked == ["refused 0", "refused 1", "refused 2", "without a reply"]
    bench.queue.catch_up()
    assert len(asked) == 4, "the refused ones wait for a second"


def test_a_store_that_refuses_a_request_after_an_outage_is_not_silent(bench: Bench) -> None:
    errors: list[StoreError] = [StoreUnavailable("away"), StoreError("the store refuses")]

    def send(store: Any) -> None:
        raise errors.pop(0)

    bench.queue.ask(send, 7200.0, bench.given_up.append)
    assert bench.queue.is_silent
    bench.clock.advance(1.0)
    bench.queue.catch_up()
    assert (bench.queue.is_silent, bench.queue.is_empty) == (False, False)


def test_the_main_thread_waits_for_an_unresponsive_store_once(
    bench: Bench,
) -> None:
    asked: list[int] = []

    def ask(number: int) -> Callable[[Any], None]:
        def to_ask(store: Any) -> None:
            asked.append(number)
            away(store)

        return to_ask

    for number in range(3):
        ask_store(bench.runtime, f"pid {number} died", 60.0, ask(number))
    assert asked == [0]


def test_the_main_thread_sends_no_request_that_nothing_waits_for(bench: Bench) -> None:
    """Not even the first one to a store that does not answer."""
    asked: list[str] = []
    ask_later(bench.runtime, "a message was discarded", 60.0, lambda store: asked.append("a"))
    assert not asked
    bench.queue.catch_up()
    assert asked == ["a"]


def test_the_thread_ends_with_the_last_request_and_another_one_begins(running: RetryQueue) -> None:
    asked: list[str] = []
    for name in ("a", "b"):
        running.put(lambda store, name=name: asked.append(name), 60.0, print)
        wait_until(lambda: running.is_empty, "the store has answered")
        wait_until(
            lambda: all("store-queue" not in one.name for one in threading.enumerate()),
            "the thread has ended",
        )
    assert asked == ["a", "b"]


def test_a_request_waits_for_a_thread_until_one_can_be_started(
    running: RetryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(function: Callable[[], None], name: str) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(native_threads, "start_new_thread", refuse)
        assert not running.put(lambda store: asked.append("a"), 60.0, print)
    running.put(lambda store: asked.append("b"), 60.0, print)
    wait_until(lambda: running.is_empty, "the store has answered")
    assert asked == ["a", "b"]


def test_the_end_of_the_worker_waits_for_what_is_being_sent(running: RetryQueue) -> None:
    stall = Stall()
    running.put(lambda store: stall(), 60.0, print)
    assert stall.entered.wait(30)
    threading.Timer(0.1, stall.leave.set).start()
    running.flush()
    assert stall.left.is_set()


def test_a_child_is_forked_when_no_request_is_in_the_stores_client(
    running: RetryQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_singleton_lock.core.fork_locks._FORK_PATIENCE", 30.0)
    running.guard = FORK_LOCKS["retry"]  # as the worker does
    stall = Stall()
    running.put(lambda store: stall(), 60.0, print)
    assert_a_fork_waits_for(stall)


def test_a_request_to_a_live_part_of_the_store_is_sent_behind_those_to_an_unresponsive_one(
    bench: Bench,
) -> None:
    for _ in range(10):
        bench.put_away(3600.0)
    bench.put("left with them")
    for _ in range(11):
        bench.queue.catch_up()
        bench.clock.advance(1.0)
    assert bench.asked == ["left with them"]
    bench.put("left later")
    bench.queue.catch_up()
    assert bench.asked == ["left with them", "left later"], "what was not sent yet comes first"
    assert bench.queue.is_silent


def test_a_request_that_fails_by_a_defect_does_not_keep_the_others_from_being_sent(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(store: Any) -> None:
        raise ValueError("a defect")

    bench.queue.put(fail, 60.0, bench.given_up.append)
    bench.put("next")
    bench.queue.catch_up()
    assert bench.asked == ["next"]
    assert "a defect" in caplog.text


def test_what_is_put_while_another_request_is_sent_is_sent_too(bench: Bench) -> None:
    def ask_while_others_come(store: Any) -> None:
        for number in range(999):
            bench.put(number)

    bench.queue.put(ask_while_others_come, 60.0, bench.given_up.append)
    bench.queue.catch_up()
    assert bench.asked == list(range(999))


def test_a_request_that_comes_on_top_of_a_thousand_is_reported_and_replaces_none(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.put_away()
    bench.queue.catch_up()
    for number in range(1000):
        ask_store(
            bench.runtime,
            f"pid {number} died",
            60.0,
            lambda store, number=number: bench.asked.append(number),
        )
    observers.flush(30)
    assert [record.getMessage() for record in caplog.records] == [
        "singleton: pid 999 died; it could not be freed (too many others wait for the store), and "
        "its ttl of 60 s frees it. To free it at once: celery -A ... singleton release"
    ]
    bench.clock.advance(1.0)
    bench.queue.catch_up()
    assert bench.asked == list(range(999))


def test_the_next_dead_child_does_not_wait_for_a_store_whose_queue_is_full(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1000):
        bench.put(number)
    tries: list[int] = []

    def ask(store: Any) -> None:
        tries.append(1)
        away(store)

    given_up: list[object] = []
    for number in range(2):
        ask_store(bench.runtime, f"pid {number} died", 60.0, ask, given_up.append)
    assert len(tries) == 1
    assert given_up == ["too many others wait for the store"] * 2
    observers.flush(30)
    messages = [record.getMessage() for record in caplog.records]
    assert all("could not be freed" in message for message in messages), messages
    assert len(messages) == 2


def test_what_is_left_at_the_end_of_the_process_is_given_up(running: RetryQueue) -> None:
    given_up: list[object] = []
    running.put(away, 3600.0, given_up.append)
    running.end()
    assert running.is_empty
    assert [str(why) for why in given_up] == ["this part of the store is silent"]


def test_a_request_after_the_close_is_sent_once_and_given_up_if_there_is_no_reply(
    running: RetryQueue,
) -> None:
    asked: list[str] = []
    given_up: list[object] = []
    running.close()
    running.ask(lambda store: asked.append("a"), 60.0, given_up.append)
    assert (asked, given_up) == (["a"], [])
    assert running.ask(away, 60.0, given_up.append) is None
    assert given_up == ["the app was closed"]
    assert running.is_empty


@pytest.mark.parametrize("error", [StoreUnavailable, StoreError])
def test_requests_that_keep_failing_do_not_postpone_the_next_try(
    bench: Bench, error: type[StoreError]
) -> None:
    def fails(store: Any) -> None:
        raise error("no reply, or no rights")

    for _ in range(10):
        bench.queue.ask(fails, 60.0, bench.given_up.append)
        bench.clock.advance(0.5)
    bench.put("next")
    bench.queue.catch_up()
    assert bench.asked == ["next"]
