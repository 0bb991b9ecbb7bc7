"""Threads on which others depend run no log handler and no receiver of a signal.

A handler that blocks there would delay renewals, releases, ticks or the sweeps queues.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NoReturn, cast

import pytest
from celery import Celery

from celery_singleton_lock.beat.election import Election
from celery_singleton_lock.core import native_threads, observers
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.events import Event, EventName, Events
from celery_singleton_lock.core.heartbeat import Heartbeat
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Holder, Lease
from celery_singleton_lock.core.locker import Locker
from celery_singleton_lock.core.observers import Observer
from celery_singleton_lock.core.store_requests import Acquire, Release, ReleaseReply
from celery_singleton_lock.instrumentation import EventPipe
from celery_singleton_lock.key_queue.sweep import QueueSweep
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.task.hold import hold
from celery_singleton_lock.testing import ManualClock
from celery_singleton_lock.testing.contract import new_token
from celery_singleton_lock.worker.event_sender import EventSender
from celery_singleton_lock.worker.parent_heartbeat import ParentHeartbeat
from tests.harness.deliveries import wait_until

IsOver = Callable[[], bool]


class Threads(logging.Handler):
    """Notes the threads that handle log records."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.names.append(threading.current_thread().name)


@pytest.fixture
def handling(caplog: pytest.LogCaptureFixture) -> Iterator[Threads]:
    logger, threads = logging.getLogger("celery_singleton_lock"), Threads()
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(threads)
    yield threads
    logger.removeHandler(threads)


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("serving", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_beat_ttl = 0.3
    Runtime.install(app, Runtime(app, store=MemoryStore(SystemClock())))
    with closing(app):
        yield app


def fail(*_: Any) -> NoReturn:
    raise RuntimeError("a defect, which is logged")


class _Broken:
    of_living = fail


def parent_heartbeat(app: Celery, is_over: IsOver) -> None:
    runtime = Runtime.of(app)
    memory = cast(Any, _Broken())
    ParentHeartbeat(memory, runtime.store, runtime.clock).start(is_over)


def retry_queue(app: Celery, is_over: IsOver) -> None:
    Runtime.of(app).locker.retry_queue.put(fail, 60.0, print)


def queue_sweep(app: Celery, is_over: IsOver) -> None:
    QueueSweep(app, fail, is_over).start()


class _BrokenOutbox:
    messages = fail


def event_sender(app: Celery, is_over: IsOver) -> None:
    """Where threads are patched, a log handler can't run on its native thread."""
    pipe = EventPipe()
    sender = EventSender(app, pipe, "w@host")
    sender._outbox, sender._is_read, sender._ending = cast(Any, _BrokenOutbox()), True, True
    sender._running.acquire()
    sender._news.release()
    native_threads.start_new_thread(sender._run, "singleton-events")
    os.close(pipe.reader)
    os.close(pipe._writer)


def event_reader(app: Celery, is_over: IsOver) -> None:
    """It empties the pipe of all processes of its worker."""
    pipe = EventPipe()
    sender = EventSender(app, pipe, "w@host")
    os.write(pipe._writer, b"no event\n")
    pipe.end()
    reader = threading.Thread(target=sender._collect, name="singleton-events-reader")
    reader.start()
    reader.join(30)
    os.close(pipe.reader)
    os.close(pipe._writer)


def zookeepers_janitor(app: Celery, is_over: IsOver) -> None:
    """It ends the leases of its process that are not renewed."""
    pytest.importorskip("kazoo")
    from celery_singleton_lock.stores.zookeeper.store import ZooKeeperStore

    store = ZooKeeperStore("zk://127.0.0.1")

    def clean() -> None:
        store._closed = True
        fail()

    store._clean = clean  # type: ignore[method-assign]
    store._wake_janitor()


def abandoned_block(app: Celery, is_over: IsOver) -> None:
    """The garbage collector releases its lease on a native thread."""

    locker = Runtime.of(app).locker

    def release(lease: Lease, *_: Any) -> None:
        locker.heartbeat.stop(lease)
        logging.getLogger("celery_singleton_lock").warning("released")

    block = hold("k", scope="s", app=app)
    block.__enter__()
    locker.release = release  # type: ignore[assignment, method-assign]


def election_that_stalls(app: Celery, is_over: IsOver) -> None:
    assert Election(Runtime.of(app)).campaign()
    observers.flush()


@pytest.mark.parametrize(
    "start",
    [
        parent_heartbeat,
        retry_queue,
        queue_sweep,
        event_sender,
        event_reader,
        zookeepers_janitor,
        abandoned_block,
        election_that_stalls,
    ],
)
def test_a_log_handler_of_a_serving_thread_runs_on_the_thread_of_the_log(
    start: Callable[[Celery, IsOver], None], app: Celery, handling: Threads
) -> None:
    own = threading.current_thread().name

    def others() -> set[str]:
        return {*handling.names} - {own}

    start(app, lambda: bool(others()))
    wait_until(others, "a line is logged")
    assert others() == {"singleton-log"}


@pytest.mark.parametrize("outcome", [ReleaseReply.NOT_OURS, ReleaseReply.OURS])
def test_a_body_that_reads_the_reply_to_another_bodys_release_runs_no_observer_of_it(
    outcome: ReleaseReply,
) -> None:
    """It may be waiting for its own grant, whose ttl runs."""
    clock, seen = ManualClock(), list[tuple[EventName, str]]()

    def observe(event: Event) -> None:
        seen.append((event.name, threading.current_thread().name))

    events, store = Events([Observer(observe, "singleton-test")]), MemoryStore(clock)
    locker = Locker(store, clock, Heartbeat(store, clock, events), events)
    key, token = Keyspace("unit").lock("s", "k"), new_token()
    lease = locker.acquire(Acquire(slots=(key,), token=token, holder=Holder(), ttl=60.0))
    assert isinstance(lease, Lease)
    seen.clear()
    locker.heartbeat.let_go(lease)
    locker._on_reply(lease, Release(keys=(key,), token=token), outcome, False)
    observers.flush(30)
    [(name, thread)] = seen
    expected = EventName.RELEASED if outcome is ReleaseReply.OURS else EventName.LEASE_LOST
    assert (name, thread) == (expected, "singleton-test")
    locker.heartbeat.close()
