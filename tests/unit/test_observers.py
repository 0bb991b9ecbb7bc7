"""Observers of threads that must not wait for them run on threads of their own."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import pytest

from celery_singleton_lock.core import native_threads, observers
from celery_singleton_lock.core.events import Event, EventName, Events
from celery_singleton_lock.core.observers import MOST_WAITING, Observer, elsewhere
from celery_singleton_lock.instrumentation import (
    SINKS,
    add_sink,
    has_observers,
    is_observed,
    lease_lost,
    sinks,
)
from celery_singleton_lock.instrumentation.signals import RECEIVERS
from tests.harness.deliveries import wait_until
from tests.unit.stall import Stall, assert_a_fork_waits_for

LOGGER = "celery_singleton_lock"
LOSS = Event(name=EventName.LEASE_LOST, key="k", task="proj.work", task_id="1")


@pytest.fixture(autouse=True)
def idle() -> Iterator[None]:
    """No event of a test waits in the next one."""
    observers.flush(30)
    yield
    observers.flush(30)


class Calls:
    """An observer of functions, which it calls."""

    def __init__(self) -> None:
        self.observer = Observer(lambda function: function(), "singleton-test")
        self.seen: list[Any] = []

    def note(self, what: Any) -> None:
        """Pass a function to the observer that notes ``what``."""
        self.observer(lambda: self.seen.append(what))

    def flush(self) -> None:
        self.observer.flush(30)


@pytest.fixture
def own() -> Calls:
    return Calls()


@contextmanager
def blocking(observer: Callable[[Any], object]) -> Iterator[Callable[[], None]]:
    """The observer of functions blocks; call what this yields, and it goes on."""
    entered, gate = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        gate.wait()

    with elsewhere():
        observer(block)
    assert entered.wait(30)
    yield gate.set
    gate.set()


@pytest.fixture
def blocked(own: Calls) -> Iterator[Callable[[], None]]:
    with blocking(own.observer) as go_on:
        yield go_on


def thread() -> str:
    return threading.current_thread().name


def test_an_observer_runs_on_the_thread_of_its_event(own: Calls) -> None:
    own.observer(lambda: own.seen.append(thread()))
    assert own.seen == [thread()]


def test_a_thread_that_serves_others_never_waits_for_an_observer(
    own: Calls, blocked: Callable[[], None]
) -> None:
    with elsewhere(), elsewhere():
        own.observer(lambda: own.seen.append(thread()))
    assert not own.seen
    blocked()
    own.flush()
    assert own.seen == ["singleton-test"]


def test_no_observer_waits_for_another_one(own: Calls, blocked: Callable[[], None]) -> None:
    other = Calls()
    with elsewhere():
        other.note("by the heartbeat")
        other.flush()
    other.note("by a body")
    assert other.seen == ["by the heartbeat", "by a body"]


def test_an_observer_gets_events_in_the_order_in_which_they_were_emitted(
    own: Calls, blocked: Callable[[], None]
) -> None:
    for number in range(4):
        if number % 2:
            own.note(number)  # on the thread of a body
        else:
            with elsewhere():
                own.note(number)
    blocked()
    own.flush()
    assert own.seen == [0, 1, 2, 3]
    own.note(4)  # no longer busy
    assert own.seen[-1] == 4


def test_what_does_not_fit_overtakes_nothing_and_is_counted_and_reported_once(
    own: Calls, blocked: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Also the event of a body, which would be handed over directly if none waited."""
    with elsewhere():
        for number in range(MOST_WAITING + 6):
            own.note(number)
    own.note("by a body")
    assert own.seen == []
    blocked()
    wait_until(lambda: "were dropped" in caplog.text, "it is logged")
    assert own.seen == [*range(len(own.seen))]
    assert caplog.text.count("were dropped") == 1
    assert f" {MOST_WAITING + 7 - len(own.seen)} events were dropped" in caplog.text


def test_an_observer_that_raises_anything_does_not_end_the_thread(own: Calls) -> None:
    def leave() -> None:
        raise SystemExit

    with elsewhere():
        own.observer(leave)
        own.note(1)
    own.flush()
    assert own.seen == [1]


def test_an_observer_sees_the_context_of_its_event(own: Calls) -> None:
    span: ContextVar[str] = ContextVar("span")
    span.set("body")
    with elsewhere():
        own.observer(lambda: own.seen.append(span.get()))
    own.flush()
    assert own.seen == ["body"]


def test_a_thread_that_can_not_be_started_now_is_started_by_the_next_event(
    own: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(function: Callable[[], None], name: str) -> None:
        raise RuntimeError("can't start new thread")

    with elsewhere():
        with monkeypatch.context() as patch:
            patch.setattr(native_threads, "start_beside_bodies", refuse)
            own.note(1)
        own.note(2)
    own.flush()
    assert own.seen == [1, 2]


def test_an_observer_that_can_not_be_watched_runs(
    own: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(function: Callable[[], None], name: str) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(native_threads, "start_new_thread", refuse)
    with elsewhere():
        own.note(1)
    own.flush()
    assert own.seen == [1]


# --- one that blocks is named --------------------------------------------------------------------


class Webhook:
    """A receiver that blocks."""

    def __init__(self) -> None:
        self.entered, self.gate = threading.Event(), threading.Event()

    def post(self, event: Event, **_: Any) -> None:
        self.entered.set()
        self.gate.wait()


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    webhook = Webhook()
    lease_lost.connect(webhook.post, weak=False)
    yield webhook
    lease_lost.disconnect(webhook.post)
    webhook.gate.set()
    RECEIVERS.flush(30)


def test_a_receiver_that_blocks_is_named_once_and_no_line_of_the_log_waits_for_it(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observers, "SLOW", 0.05)
    # The watching thread of an earlier test sleeps for longer.
    monkeypatch.setattr(RECEIVERS, "_watch", native_threads.allocate_lock())
    events, named = Events(SINKS), f"{__name__}.Webhook.post has run for 0.05 s"
    with elsewhere():
        events.emit(LOSS)
        assert webhook.entered.wait(30)
        for _ in range(3):
            events.emit(LOSS)
        observers.log.flush(30)
    events.emit(LOSS)  # by a body
    assert caplog.text.count("singleton lease-lost") == 5
    wait_until(lambda: named in caplog.text, "it is named")
    threading.Event().wait(0.3)  # looks that must find nothing new
    observers.log.flush(30)
    assert caplog.text.count("has run for") == 1
    assert "events wait for receivers of signals" in caplog.text


def test_a_receiver_that_raises_keeps_no_other_from_an_event_that_has_waited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[Event] = []

    def fail(event: Event, **_: Any) -> None:
        raise ZeroDivisionError

    def keep(event: Event, sender: str, **_: Any) -> None:
        assert sender == LOSS.task
        seen.append(event)

    lease_lost.connect(fail)
    lease_lost.connect(keep)
    try:
        with elsewhere():
            RECEIVERS(LOSS)
        observers.flush(30)
    finally:
        lease_lost.disconnect(fail)
        lease_lost.disconnect(keep)
    assert seen == [LOSS]
    assert "ZeroDivisionError" in caplog.text


# --- sinks that are added ------------------------------------------------------------------------


@pytest.fixture
def added() -> Iterator[None]:
    """What a test adds is removed."""
    before, observed = [*SINKS], dict(sinks._OBSERVERS)
    yield
    SINKS[:] = before
    sinks._OBSERVERS.update(observed)


def test_a_sink_that_was_added_loses_nothing_that_receivers_lose(
    webhook: Webhook, added: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Metrics in the process, such as those of Prometheus."""
    caplog.set_level(logging.ERROR, LOGGER)
    seen: list[Event] = []
    add_sink(seen.append)
    events = Events(SINKS)
    with elsewhere():
        events.emit(LOSS)
        assert webhook.entered.wait(30)
    for number in range(MOST_WAITING + 100):
        if number % 2:
            events.emit(LOSS)
        else:
            with elsewhere():
                events.emit(LOSS)
                SINKS[1].flush(30)  # type: ignore[attr-defined]  # a heartbeat is slower
    assert len(seen) == 1 + MOST_WAITING + 100


def test_a_sink_that_was_added_uses_each_event(
    added: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, LOGGER)
    assert not any(map(has_observers, EventName))
    add_sink(print)
    assert all(map(has_observers, EventName))
    assert all(map(is_observed, EventName))


# --- forks ---------------------------------------------------------------------------------------


def test_a_forked_child_has_an_empty_queue(own: Calls, blocked: Callable[[], None]) -> None:
    """A hook of the interpreter resets the observers."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        own.note("")  # on this thread
        os.write(writer, b"." if own.seen == [""] else b"!")
        os._exit(0)
    blocked()
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"."
    os.close(reader)
    os.close(writer)


def test_a_fork_waits_for_the_observers_that_run(
    own: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observers, "_FORK_PATIENCE", 30.0)
    stall = Stall()
    with elsewhere():
        own.observer(stall)
    assert_a_fork_waits_for(stall)
    with elsewhere():
        own.note("after the fork")
    own.flush()
    assert own.seen == ["after the fork"]


def test_a_fork_waits_only_a_moment_for_all_observers_that_block_together() -> None:
    with ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(blocking(Calls().observer))
        began = observers._clock.now()
        observers._before_fork()
        took = observers._clock.now() - began
        observers._after_fork()
    assert took < 5 * observers._FORK_PATIENCE


def test_an_observer_may_fork(own: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "_FORK_PATIENCE", 600.0)

    def fork() -> None:
        if not (child := os.fork()):
            os._exit(7)
        own.seen.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with elsewhere():
        own.observer(fork)
    own.flush()
    assert own.seen == [7]


# --- log records ---------------------------------------------------------------------------------


@contextmanager
def handled(name: str) -> Iterator[list[tuple[str, str, str]]]:
    """The records of a logger: the thread of the handler, the record's thread, the text."""
    seen: list[tuple[str, str, str]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((thread(), str(record.threadName), record.getMessage()))

    logger, handler = logging.getLogger(name), Handler()
    logger.addHandler(handler)
    try:
        yield seen
        observers.flush(30)
    finally:
        logger.removeHandler(handler)


def test_a_client_of_zookeeper_waits_for_no_log_handler() -> None:
    pytest.importorskip("kazoo")
    from celery_singleton_lock.stores.zookeeper import sessions

    with handled("kazoo") as seen:
        sessions._logger.warning("Connection dropped: %s", "by the server")
    assert seen == [("singleton-log", thread(), "Connection dropped: by the server")]


@pytest.mark.parametrize("name", ["connection", "connectionpool", "response", "util.retry"])
def test_a_serving_thread_waits_for_no_log_handler_of_the_client_of_etcd(name: str) -> None:
    pytest.importorskip("requests")
    import celery_singleton_lock.stores.etcd.gateway  # noqa: F401

    logger = logging.getLogger(f"urllib3.{name}")
    with handled("urllib3") as seen:
        logger.warning("by the %s", "user")
        with elsewhere():
            logger.warning("by the %s", "heartbeat")
    assert seen == [
        (thread(), thread(), "by the user"),
        ("singleton-log", thread(), "by the heartbeat"),
    ]


def test_the_handlers_of_a_serving_threads_log_records_run_on_the_other_thread() -> None:
    logger = logging.getLogger(LOGGER)
    with handled(LOGGER) as seen:
        logger.warning("by a %s", "body")
        with elsewhere():
            logger.warning("by a %s", "heartbeat")
    assert seen == [
        (thread(), thread(), "by a body"),
        ("singleton-log", thread(), "by a heartbeat"),
    ]


def test_the_line_of_a_body_follows_those_that_wait_for_a_handler() -> None:
    logger, entered, gate = logging.getLogger(LOGGER), threading.Event(), threading.Event()

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == "first":
                entered.set()
                gate.wait(30)

    slow = Slow()
    logger.addHandler(slow)
    try:
        with handled(LOGGER) as seen:
            with elsewhere():
                logger.warning("first")
                assert entered.wait(30)
                logger.warning("by a heartbeat")
            logger.warning("by a body")
            assert [text for *_, text in seen] == []
            gate.set()
        assert [text for *_, text in seen] == ["first", "by a heartbeat", "by a body"]
    finally:
        logger.removeHandler(slow)
