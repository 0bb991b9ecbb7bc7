"""What a thread sleeps on: each alarm of the heartbeat, and the clock of its timer."""

from __future__ import annotations

import os
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_singleton_lock.core import alarm as alarms
from celery_singleton_lock.core import native_threads
from celery_singleton_lock.core.alarm import Alarm, make_alarm
from tests.harness.deliveries import wait_until

needs_epoll = pytest.mark.skipif(not hasattr(select, "epoll"), reason="this system has no epoll")

#: Seconds that no test waits for: what a test is about ends the sleep.
LONG = 60.0


@pytest.fixture(params=[pytest.param("epoll", marks=needs_epoll), "lock"])
def alarm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Alarm:
    if request.param == "lock":
        monkeypatch.delattr(select, "epoll", raising=False)
    made = make_alarm()
    assert type(made).__name__ == f"{request.param.title()}Alarm"
    return made


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection: our end, and the server's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        yield ours, theirs


def is_reported(alarm: Alarm) -> bool:
    """Whether the end of a connection has been reported since the last look."""
    return alarm.sleep(0.0)


# --- every alarm ---------------------------------------------------------------------------------


def test_a_sleep_ends_when_its_time_is_over(alarm: Alarm) -> None:
    for seconds in (0.0, 1e-12, 0.02):
        began = time.monotonic()
        assert not alarm.sleep(seconds)
        assert time.monotonic() - began >= seconds


def test_another_thread_ends_a_sleep(alarm: Alarm) -> None:
    threading.Timer(0.05, alarm.ring).start()
    assert not alarm.sleep(None)
    threading.Timer(0.05, alarm.ring).start()
    assert not alarm.sleep(LONG)


def test_a_ring_between_two_sleeps_ends_the_next_one_alone(alarm: Alarm) -> None:
    alarm.sleep(0.0)
    alarm.ring()
    alarm.ring()
    began = time.monotonic()
    alarm.sleep(LONG)
    assert time.monotonic() - began < LONG / 2
    began = time.monotonic()
    alarm.sleep(0.05)
    assert time.monotonic() - began >= 0.05


def test_an_end_that_a_request_found_is_reported_once(alarm: Alarm) -> None:
    alarm.ended()
    assert alarm.sleep(LONG)
    assert not is_reported(alarm)


# --- epoll ---------------------------------------------------------------------------------------


@needs_epoll
def test_the_end_of_a_connection_ends_the_sleep_and_is_reported_once(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    alarm, (ours, theirs) = make_alarm(), ends
    alarm.opened(ours)
    assert not is_reported(alarm)
    theirs.close()
    assert alarm.sleep(LONG)
    assert not is_reported(alarm)
    alarm.closing(ours)
    ours.close()
    assert not is_reported(alarm)


@needs_epoll
def test_data_on_a_connection_do_not_end_the_sleep(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    alarm, (ours, theirs) = make_alarm(), ends
    alarm.opened(ours)
    alarm.sleep(0.0)
    threading.Timer(0.02, theirs.sendall, [b"reply"]).start()
    began = time.monotonic()
    assert not alarm.sleep(0.1)
    assert time.monotonic() - began >= 0.1


@needs_epoll
def test_a_connection_that_this_process_closes_is_not_reported(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    alarm, (ours, _) = make_alarm(), ends
    alarm.opened(ours)
    alarm.closing(ours)
    ours.shutdown(socket.SHUT_RDWR)
    assert not is_reported(alarm)
    ours.close()
    assert not is_reported(alarm)
    alarm.opened(ours)  # closed meanwhile
    alarm.closing(ours)
    assert not is_reported(alarm)


@needs_epoll
def test_an_end_that_a_request_finds_before_the_thread_wakes_is_reported(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    alarm, (ours, theirs) = make_alarm(), ends
    alarm.opened(ours)
    theirs.close()
    assert native_threads.has_ended(ours)
    alarm.closing(ours)  # the kernel forgets what it has not reported
    ours.close()
    assert is_reported(alarm)


@needs_epoll
def test_a_connection_that_never_got_a_reply_is_not_reported(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    alarm, (ours, theirs) = make_alarm(), ends
    theirs.close()
    alarm.closing(ours)
    assert not is_reported(alarm)


@needs_epoll
def test_a_descriptor_that_is_used_again_is_watched_again() -> None:
    alarm = make_alarm()
    for _ in range(3):
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        alarm.opened(ours)
        theirs.close()
        assert alarm.sleep(LONG)
        ours.close()  # without a word, as when it is collected


@needs_epoll
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_changes_nothing_for_its_parent(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    alarm, (ours, theirs) = make_alarm(), ends
    alarm.opened(ours)
    child = os.fork()
    if not child:
        alarm.closing(ours)
        os._exit(0)
    os.waitpid(child, 0)
    theirs.close()
    assert alarm.sleep(LONG)


@needs_epoll
def test_its_descriptors_are_closed_with_it() -> None:
    alarm = make_alarm()
    alarm.sleep(0.0)
    # Not a count of all: what other tests have left may be closed at the same time.
    opened = alarm._epoll.fileno(), alarm._bell
    for descriptor in opened:
        os.fstat(descriptor)
    del alarm
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@needs_epoll
def test_a_process_without_a_free_descriptor_has_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "eventfd", fail)
    assert type(make_alarm()).__name__ == "LockAlarm"


# --- time ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/fdinfo").exists(), reason="Linux says what a timer counts")
def test_a_sleep_counts_the_time_in_which_the_machine_is_suspended() -> None:
    """A test can't suspend the machine. The kernel says which clock the timer counts."""
    alarm = make_alarm()
    threading.Thread(target=alarm.sleep, args=(20.0,), daemon=True).start()
    try:
        # Heartbeats that other tests of this process left asleep have timers too.
        wait_until(
            lambda: any(10 <= seconds <= 20 for seconds in _seconds_left()),
            "a timer that counts suspended time has been set",
        )
    finally:
        alarm.ring()


def _seconds_left() -> Iterator[int]:
    """The seconds of each timer of this process on the clock that counts suspended time."""
    for path in Path("/proc/self/fdinfo").iterdir():
        try:
            text = path.read_text()
        except OSError:
            continue  # closed meanwhile
        left = re.search(r"it_value: \((\d+),", text)
        if left is not None and f"clockid: {time.CLOCK_BOOTTIME}\n" in text:
            yield int(left[1])


@needs_epoll
def test_a_system_without_timers_sleeps_by_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarms.Timer, "open", classmethod(lambda cls: None))
    alarm = make_alarm()
    began = time.monotonic()
    assert not alarm.sleep(0.05)
    assert time.monotonic() - began >= 0.05
    threading.Timer(0.05, alarm.ring).start()
    assert not alarm.sleep(None)
