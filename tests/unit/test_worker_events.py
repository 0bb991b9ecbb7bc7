"""The pipe of worker events, and the threads that empty it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import Celery, signals

from celery_singleton_lock.core.events import Event, EventName
from celery_singleton_lock.core.fork_locks import FORK_LOCKS
from celery_singleton_lock.core.lease import Holder
from celery_singleton_lock.instrumentation import EventPipe, send_worker_event
from celery_singleton_lock.instrumentation.worker_events import DROPPED_EVENTS, END
from celery_singleton_lock.worker.event_sender import EventSender
from tests.chaos.proxy import Kind, Mode, Proxy
from tests.harness.deliveries import wait_until
from tests.harness.listener import Listener, type_of
from tests.unit.pool_child import Child

# Of Linux.
F_GETPIPE_SZ = 1032
LOSS = type_of(EventName.LEASE_LOST)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[EventPipe]:
    monkeypatch.setattr(EventPipe, "running", None)
    monkeypatch.setattr(EventPipe, "switch", b"\0")
    pipe = EventPipe.open()
    EventPipe.turn(on=True)
    yield pipe
    wait_until(lambda: not is_read_by_thread(), "the thread of a sender has ended")
    os.close(pipe.reader)
    os.close(pipe._writer)


def is_read_by_thread() -> bool:
    return any(thread.name == "singleton-events-reader" for thread in threading.enumerate())


def read(pipe: EventPipe) -> list[tuple[Any, ...]]:
    """What the pipe contains."""
    data = b""
    while select.select([pipe.reader], [], [], 0)[0]:
        data += os.read(pipe.reader, 1 << 20)
    return [tuple(json.loads(line)) for line in data.splitlines()]


def event(name: EventName = EventName.LEASE_LOST, **data: Any) -> Event:
    holder = Holder(task="work", task_id="id", worker="w@host", pid=7)
    return Event(
        name=name, key="k", task="work", task_id="id", lease="grant", holder=holder, data=data
    )


def test_an_event_has_what_monitors_need_and_its_data_as_fields(pipe: EventPipe) -> None:
    send_worker_event(event(reason="gone", store=None))
    [(kind, fields)] = read(pipe)
    assert kind == LOSS
    assert fields.pop("timestamp") > 0
    assert fields == {
        "uuid": "id",
        "name": "work",
        "key": "k",
        "lease": "grant",
        "holder": "work[id] on w@host (pid 7)",
        "reason": "gone",
    }


def test_of_the_events_of_each_task_only_what_is_counted_is_written(pipe: EventPipe) -> None:
    send_worker_event(event(EventName.ACQUIRED, waited=0.5, fence=1))
    send_worker_event(event(EventName.RELEASED, held=1.5))
    assert read(pipe) == [(EventName.ACQUIRED, "work", 0.5), (EventName.RELEASED, "work", 1.5)]


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (event(EventName.CONFLICT, outcome="skip"), "task-skipped"),
        (event(EventName.CONFLICT, outcome="revoke"), "task-revoked"),
        (event(EventName.CANCELLED), "task-revoked"),
    ],
)
def test_monitors_that_know_celery_alone_see_skips_and_revocations(
    pipe: EventPipe, event: Event, kind: str
) -> None:
    send_worker_event(event)
    assert [kind for kind, _ in read(pipe)] == [f"singleton-{event.name}", kind]


def test_no_event_is_written_where_the_worker_sends_none(pipe: EventPipe) -> None:
    EventPipe.turn(on=False)
    send_worker_event(event())
    assert read(pipe) == []


def test_a_full_pipe_blocks_no_process_and_what_it_drops_is_counted(pipe: EventPipe) -> None:
    written = 0
    while not pipe.dropped:
        send_worker_event(event())
        written += 1
    assert written > 10
    for _ in range(9):
        send_worker_event(event())
    # The report of a dropped event is short, and may still fit.
    found = read(pipe)
    send_worker_event(event())
    found += read(pipe)
    kinds = Counter(kind for kind, _ in found)
    assert kinds[LOSS] == written - 1 + 1
    assert sum(fields["count"] for kind, fields in found if kind == DROPPED_EVENTS) == 10
    assert [kind for kind, _ in found[-2:]] == [DROPPED_EVENTS, LOSS]
    assert pipe.dropped == 0


def test_a_long_text_is_cut_and_an_event_that_is_too_long_is_dropped(pipe: EventPipe) -> None:
    send_worker_event(event(error="x" * 10_000))
    [(_, fields)] = read(pipe)
    assert 0 < len(fields["error"]) < select.PIPE_BUF
    pipe.put(LOSS, {"key": "k" * 10_000})
    assert (read(pipe), pipe.dropped) == ([], 1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_events_of_killed_processes_arrive_whole(pipe: EventPipe) -> None:
    def life() -> None:
        for number in range(30):  # they fit in the pipe
            send_worker_event(event(number=number, by=os.getpid()))

    children = [Child(None, life) for _ in range(3)]
    for child in children:
        child.kill()
    by = Counter(fields["by"] for _, fields in read(pipe))
    assert by == {child.pid: 30 for child in children}


def test_a_worker_leaves_its_users_pipes_their_quota(pipe: EventPipe) -> None:
    own, others = os.pipe()
    try:
        assert fcntl.fcntl(pipe.reader, F_GETPIPE_SZ) == fcntl.fcntl(own, F_GETPIPE_SZ)
    finally:
        os.close(own)
        os.close(others)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that neither gathers events for a second nor pauses for one between two tries."""
    for name in ("_INTERVAL", "_PAUSE"):
        monkeypatch.setattr(f"celery_singleton_lock.worker.event_sender.{name}", 0.05)


@pytest.mark.usefixtures("hurried")
def test_an_event_is_sent_when_the_broker_answers_again(
    pipe: EventPipe, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "celery_singleton_lock")
    url = urlsplit(redis_url)
    port = url.port or 6379
    with (
        Proxy(port) as proxy,
        Listener(Celery(broker=redis_url, set_as_current=False)) as listener,
    ):
        app = Celery(broker=f"redis://127.0.0.1:{proxy.port}{url.path}", set_as_current=False)
        sender = EventSender(app, pipe, "w@host")
        sender.start()

        def is_received() -> bool:
            send_worker_event(event(number=1))
            return bool(listener.of(EventName.LEASE_LOST, number=1))

        wait_until(is_received, "the receiver has subscribed")
        proxy.set(Mode(kind=Kind.REFUSE))
        proxy.lead_to(port)  # cuts the connections
        send_worker_event(event(number=2))
        wait_until(lambda: "wait in the worker" in caplog.text, "the sender has noticed")
        send_worker_event(event(number=3))
        assert not listener.of(EventName.LEASE_LOST, number=2)
        proxy.set(Mode())
        listener.wait_for(EventName.LEASE_LOST, number=3)
        assert listener.of(EventName.LEASE_LOST, number=2)
        assert {one["hostname"] for one in listener.events} == {"w@host"}
        sender.end()
        assert caplog.messages.count("singleton: worker events are sent again") == 1


def test_the_end_of_a_worker_waits_for_what_was_emitted(
    pipe: EventPipe, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_singleton_lock.worker.event_sender._LAST_EVENTS", 60)
    for _ in range(100):  # they fit in the pipe
        send_worker_event(event())
    sender = EventSender(Celery(broker=redis_url, set_as_current=False), pipe, "w@host")
    sender.start()
    signals.worker_shutdown.send(sender=None)
    assert not sender._running.locked(), "its thread has sent all of them"
    assert read(pipe) == []


def test_the_end_of_a_worker_waits_only_a_moment_for_an_unresponsive_broker(
    pipe: EventPipe, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_singleton_lock.worker.event_sender._LAST_EVENTS", 0.1)
    with Proxy(urlsplit(redis_url).port or 6379) as proxy:
        proxy.set(Mode(kind=Kind.STALL))
        app = Celery(broker=f"redis://127.0.0.1:{proxy.port}/0", set_as_current=False)
        sender = EventSender(app, pipe, "w@host")
        sender.start()
        send_worker_event(event())
        sender.end()  # returns
        assert sender._running.locked()
    wait_until(lambda: not sender._running.locked(), "the thread has ended with its connection")


@pytest.mark.usefixtures("hurried")
def test_an_unresponsive_broker_keeps_no_event_in_the_pipe(pipe: EventPipe, redis_url: str) -> None:
    url = urlsplit(redis_url)
    port = url.port or 6379
    with (
        Proxy(port) as proxy,
        Listener(Celery(broker=redis_url, set_as_current=False)) as listener,
    ):
        app = Celery(broker=f"redis://127.0.0.1:{proxy.port}{url.path}", set_as_current=False)
        sender = EventSender(app, pipe, "w@host")
        sender.start()

        def is_received() -> bool:
            send_worker_event(event(number=-1))
            return bool(listener.of(EventName.LEASE_LOST, number=-1))

        wait_until(is_received, "the receiver has subscribed")
        proxy.set(Mode(kind=Kind.STALL))
        # More than ten pipes take. Each line is written when there is room for it.
        for number in range(10_000):
            wait_until(lambda: select.select([], [pipe._writer], [], 0)[1], "the pipe is read")
            send_worker_event(event(EventName.ACQUIRED, waited=0.001))
            if number % 100 == 0:
                send_worker_event(event(number=number))
        assert pipe.dropped == 0
        proxy.set(Mode())

        def counted() -> int:
            rows = [row for one in listener.of("singleton-counts") for row in one["counts"]]
            return sum(times for name, task, _, times in rows)

        wait_until(lambda: counted() == 10_000, "the counts arrive")
        wait_until(lambda: listener.of(EventName.LEASE_LOST, number=9900), "the events too")
        numbers = [one["number"] for one in listener.of(EventName.LEASE_LOST)]
        assert [number for number in numbers if number >= 0] == list(range(0, 10_000, 100))
        sender.end()


@pytest.mark.usefixtures("hurried")
def test_a_broker_that_stalls_is_named_in_the_log_and_leaves_time_for_forks(
    pipe: EventPipe, redis_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    """A broker that is stopped takes connections and requests, and answers nothing."""
    monkeypatch.setattr("celery_singleton_lock.worker.event_sender._TIMEOUT", 0.1)
    url = urlsplit(redis_url)
    with (
        Proxy(url.port or 6379) as proxy,
        Listener(Celery(broker=redis_url, set_as_current=False)) as listener,
    ):
        app = Celery(broker=f"redis://127.0.0.1:{proxy.port}{url.path}", set_as_current=False)
        sender = EventSender(app, pipe, "w@host")
        sender.start()

        def is_received() -> bool:
            send_worker_event(event(number=1))
            return bool(listener.of(EventName.LEASE_LOST, number=1))

        wait_until(is_received, "the receiver has subscribed")
        proxy.set(Mode(kind=Kind.STALL))
        send_worker_event(event(number=2))
        wait_until(lambda: "wait in the worker until the broker" in caplog.text, "it is logged")
        for _ in range(3):
            with FORK_LOCKS["events"]:  # what a fork waits for
                pass
        proxy.set(Mode())
        listener.wait_for(EventName.LEASE_LOST, number=2)
        wait_until(lambda: "are sent again" in caplog.text, "that is logged too")
        sender.end()


def test_the_end_is_no_event(pipe: EventPipe) -> None:
    pipe.end()
    assert os.read(pipe.reader, 10) == END
