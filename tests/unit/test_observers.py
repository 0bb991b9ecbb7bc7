"""Observers of threads that must not wait for them run on a thread of their own."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import pytest

from celery_singleton_lock.core import observers as module
from celery_singleton_lock.core.observers import ObserverThread
from tests.harness.deliveries import wait_until
from tests.unit.stall import Stall, assert_a_fork_waits_for

LOGGER = "celery_singleton_lock"


@pytest.fixture
def own() -> ObserverThread:
    return ObserverThread()


@pytest.fixture
def blocked(own: ObserverThread) -> Iterator[Callable[[], None]]:
    """An observer that blocks; call what this returns, and it goes on."""
    entered, gate = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        gate.wait()

    with own.elsewhere():
        own.run(block)
    assert entered.wait(30)
    yield gate.set
    gate.set()


def thread() -> str:
    return threading.current_thread().name


def test_an_observer_runs_on_the_thread_of_its_event(own: ObserverThread) -> None:
    seen: list[str] = []
    own.run(lambda: seen.append(thread()))
    assert seen == [thread()]


def test_a_thread_that_serves_others_never_waits_for_an_observer(
    own: ObserverThread, blocked: Callable[[], None]
) -> None:
    seen: list[str] = []
    with own.elsewhere(), own.elsewhere():
        own.run(lambda: seen.append(thread()))
    assert not seen
    blocked()
    own.flush(30)
    assert seen == ["singleton-observers"]


def test_observers_get_events_in_the_order_in_which_they_were_emitted(
    own: ObserverThread, blocked: Callable[[], None]
) -> None:
    seen: list[int] = []
    for number in range(4):
        if number % 2:
            own.run(seen.append, number)  # on the thread of a body
        else:
            with own.elsewhere():
                own.run(seen.append, number)
    blocked()
    own.flush(30)
    assert seen == [0, 1, 2, 3]
    own.run(seen.append, 4)  # no longer busy
    assert seen[-1] == 4


def test_what_does_not_fit_is_counted_and_reported_once(
    own: ObserverThread, blocked: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    with own.elsewhere():
        for number in range(module.MOST_WAITING + 6):
            own.run(seen.append, number)
    own.run(seen.append, -1)  # a body's own event is never dropped
    assert seen == [-1]
    blocked()
    wait_until(lambda: "were dropped" in caplog.text, "it is logged")
    assert seen[1:] == list(range(len(seen) - 1))
    assert caplog.text.count("were dropped") == 1
    assert f" {module.MOST_WAITING + 6 - (len(seen) - 1)} log lines" in caplog.text


def test_an_observer_that_raises_anything_does_not_end_the_thread(own: ObserverThread) -> None:
    seen: list[int] = []

    def leave() -> None:
        raise SystemExit

    with own.elsewhere():
        own.run(leave)
        own.run(seen.append, 1)
    own.flush(30)
    assert seen == [1]


def test_an_observer_sees_the_context_of_its_event(own: ObserverThread) -> None:
    span: ContextVar[str] = ContextVar("span")
    seen: list[str] = []
    span.set("body")
    with own.elsewhere():
        own.run(lambda: seen.append(span.get()))
    own.flush(30)
    assert seen == ["body"]


def test_a_thread_that_can_not_be_started_now_is_started_by_the_next_event(
    own: ObserverThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def refuse(function: Callable[[], None], name: str) -> None:
        raise RuntimeError("can't start new thread")

    with own.elsewhere():
        with monkeypatch.context() as patch:
            patch.setattr(module.native, "start_new_thread", refuse)
            own.run(seen.append, 1)
        own.run(seen.append, 2)
    own.flush(30)
    assert seen == [1, 2]


def test_a_forked_child_has_an_empty_queue() -> None:
    """The process's own observers are reset by a hook of the interpreter."""
    gate = threading.Event()
    reader, writer = os.pipe()
    with module.observers.elsewhere():
        module.observers.run(gate.wait)
        if not (child := os.fork()):
            seen: list[str] = []
            module.observers.run(lambda: seen.append(thread()))  # on this thread
            os.write(writer, b"." if seen == ["MainThread"] else b"!")
            os._exit(0)
    gate.set()
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"."
    os.close(reader)
    os.close(writer)


def test_a_fork_waits_for_the_observer_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FORK_PATIENCE", 30.0)
    stall = Stall()
    with module.observers.elsewhere():
        module.observers.run(stall)
    assert_a_fork_waits_for(stall)
    seen: list[str] = []
    with module.observers.elsewhere():
        module.observers.run(lambda: seen.append(thread()))
    module.observers.flush(30)
    assert seen == ["singleton-observers"], "it goes on after the fork"


def test_an_observer_may_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FORK_PATIENCE", 600.0)
    statuses: list[int] = []

    def fork() -> None:
        if not (child := os.fork()):
            os._exit(7)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with module.observers.elsewhere():
        module.observers.run(fork)
    module.observers.flush(30)
    assert statuses == [7]


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
        module.observers.flush(30)
    finally:
        logger.removeHandler(handler)


def test_a_client_of_zookeeper_waits_for_no_log_handler() -> None:
    pytest.importorskip("kazoo")
    from celery_singleton_lock.stores.zookeeper import sessions

    with handled("kazoo") as seen:
        sessions._logger.warning("Connection dropped: %s", "by the server")
    assert seen == [("singleton-observers", thread(), "Connection dropped: by the server")]


@pytest.mark.parametrize("name", ["connection", "connectionpool", "response", "util.retry"])
def test_a_serving_thread_waits_for_no_log_handler_of_the_client_of_etcd(name: str) -> None:
    pytest.importorskip("requests")
    import celery_singleton_lock.stores.etcd.gateway  # noqa: F401

    logger = logging.getLogger(f"urllib3.{name}")
    with handled("urllib3") as seen:
        logger.warning("by the %s", "user")
        with module.observers.elsewhere():
            logger.warning("by the %s", "heartbeat")
    assert seen == [
        (thread(), thread(), "by the user"),
        ("singleton-observers", thread(), "by the heartbeat"),
    ]


def test_the_handlers_of_a_serving_threads_log_records_run_on_the_other_thread() -> None:
    logger = logging.getLogger(LOGGER)
    with handled(LOGGER) as seen:
        logger.warning("by a %s", "body")
        with module.observers.elsewhere():
            logger.warning("by a %s", "heartbeat")
    assert seen == [
        (thread(), thread(), "by a body"),
        ("singleton-observers", thread(), "by a heartbeat"),
    ]
