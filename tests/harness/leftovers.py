"""What a test leaves behind in its own process: threads, child processes, descriptors.

What is open after a test and its fixtures is compared with what was open before. Tests that share
a fixture of their module or class are compared together when that fixture has ended, because what
it opens at its first use stays until then. What the setup of a fixture of a wider scope opens may
stay.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
import sysconfig
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import pytest
from celery import _state
from celery.backends import redis as _redis
from kombu import pools

from celery_singleton_lock.core import observers
from tests.harness.app_module import shared_task_finalizers
from tests.harness.processes import reader_of

# Private, and not in the stubs.
_TLS: Any = vars(_state)["_tls"]
_CONSUMER: Any = vars(_redis)["ResultConsumer"]
#: Seconds. Only a test that leaves something waits that long.
PATIENCE = 30.0
_LOOK, _ENOUGH = 0.02, 0.1
# A thread of this library that ends with no app: it closes idle connections once a minute, and ends
# when it next looks for its store.
_ENDLESS = "singleton-idle"
# A library may keep a file of its own open: matplotlib does, each font that it has used.
_PACKAGES = sysconfig.get_path("purelib")
# What reading of a thread that has ended may raise.
_ENDED = FileNotFoundError, ProcessLookupError
# All systems list the descriptors of a process in /dev/fd. Linux alone lists its children, so that
# no other process has to be looked at.
_LISTS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


@dataclass
class Open:
    """What is open in this process.

    Each test looks at it once, which costs 0.1 ms: only what is left behind is looked at closely.
    """

    #: By their numbers: a Thread would keep what it has run with.
    threads: set[int | None] = field(default_factory=set)
    children: set[int] = field(default_factory=set)
    descriptors: set[int] = field(default_factory=set)

    @classmethod
    def now(cls) -> Open:
        """What is open now."""
        threads = {thread.native_id for thread in threading.enumerate()}
        return cls(threads, _children(), _descriptors())

    def allow(self, before: Open, after: Open) -> None:
        """Add what was opened between ``before`` and ``after``."""
        self.threads |= after.threads - before.threads
        self.children |= after.children - before.children
        self.descriptors |= after.descriptors - before.descriptors

    def left(self, now: Open | None = None) -> list[str]:
        """What is open ``now`` and was not then, in words."""
        now = now or Open.now()
        left: list[str] = []
        if new := now.threads - self.threads:
            # They end with their processes, which are looked at below.
            readers = {reader_of(pid) for pid in now.children}
            left += [
                f"thread {thread.name!r}"
                for thread in threading.enumerate()
                if thread.native_id in new and thread.name not in readers and not _may_stay(thread)
            ]
        # One that has ended may have been started again: a server of a fixture that others share.
        if len(now.children) > len(self.children):
            left += [f"child process {_command(pid)}" for pid in now.children - self.children]
        # In the same way, a client may have connected again.
        if len(now.descriptors) > len(self.descriptors):
            opened = {number: _described(number) for number in now.descriptors - self.descriptors}
            left += [
                f"descriptor {number}: {target}"
                for number, target in sorted(opened.items())
                if not target.startswith(_PACKAGES)
            ]
        return left

    def wait_until_nothing_is_left(self, forget: Callable[[], None] = lambda: None) -> list[str]:
        """Wait for threads that end, and collect garbage; what is left then.

        ``forget`` is called after each collection: destructors may have failed.

        Collecting all garbage takes 30 ms, and that of the last test, which is young, nothing. So
        all is collected only if that is not enough, and threads have had the time to end.
        """
        pools.reset()  # kombu keeps the connections of each broker for the life of the process
        waited = 0.0  # the pauses alone: a destructor may take long
        pause, generation = _LOOK, 1
        while True:
            with _results_stay_subscribed():
                gc.collect(generation)
                forget()
            if not (left := self.left()) or waited > PATIENCE:
                return left
            generation = 1 if left[0].startswith("thread") and pause < _ENOUGH else 2
            time.sleep(pause)
            waited += pause
            pause = min(2 * pause, 1.0)


@contextmanager
def _results_stay_subscribed() -> Iterator[None]:
    """Let no result that is deleted meanwhile unsubscribe.

    If the server has ended, Celery tries that for 20 s: once for a call, and before Celery 5.7 for
    each result of it, also those of duplicates.
    """
    unsubscribe = _CONSUMER.cancel_for
    _CONSUMER.cancel_for = lambda consumer, task_id: None
    try:
        yield
    finally:
        _CONSUMER.cancel_for = unsubscribe


def _may_stay(thread: threading.Thread) -> bool:
    # Native threads get a stand-in, which outlives them, when they first log something.
    if isinstance(thread, threading._DummyThread) or thread.name.startswith(_ENDLESS):
        return True
    # The thread of an observer is there for the life of a process, and the one that watches it ends
    # some seconds after its last event.
    return any(
        thread.ident == observer.thread or thread.name == f"{observer._name}-watch"
        for observer in observers._observers
    )


def _children() -> set[int]:
    """The process ids of the children, also of those that have ended and are not waited for."""
    if not _LISTS_CHILDREN:
        return {child.pid for child in psutil.Process().children()}
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        path = f"/proc/self/task/{thread}/children"
        # Unbuffered, which costs half as much.
        with suppress(*_ENDED), open(path, "rb", buffering=0) as children:
            found.update(map(int, children.read().split()))
    return found


def _descriptors() -> set[int]:
    os.close(own := os.open(os.devnull, os.O_RDONLY))  # the number that the list itself will have
    return {int(number) for number in os.listdir("/dev/fd")} - {own}


def _targets() -> dict[int, str]:
    """What each descriptor refers to; sockets and pipes have an inode of their own in it."""
    found: dict[int, str] = {}
    for number in _descriptors():
        with suppress(OSError):  # closed meanwhile
            found[number] = os.readlink(f"/dev/fd/{number}")
    return found


def _command(pid: int) -> str:
    try:
        return f"{pid}: {' '.join(psutil.Process(pid).cmdline())[:200]}"
    except psutil.Error:
        return str(pid)


def _described(number: int) -> str:
    """The addresses of a socket, else what the descriptor refers to."""
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return os.readlink(f"/dev/fd/{number}")
        with socket.socket(fileno=os.dup(number)) as copy:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return f"socket, listens at {copy.getsockname()}"
            return f"socket {copy.getsockname()} to {copy.getpeername()}"
    except OSError as exc:
        return str(exc.strerror)


class _Check:
    """Compares what is open after a test with what was open before it."""

    def __init__(self) -> None:
        self._before = Open()
        # What is open after a test that has left nothing at once: the next one need not look.
        self._after: Open | None = None
        self._failures = 0
        self._current_app: Any = None
        self._finalizers: set[object] = set()
        # The fixtures of modules and classes that are in use, each with its name.
        self._shared: dict[Any, str] = {}
        # The names of those that were in use since the beginning.
        self._names: set[str] = set()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        if not self._shared:
            self._before, self._names = self._after or Open.now(), set()
            self._after = None
            self._current_app, self._finalizers = _TLS.current_app, set(shared_task_finalizers())
            self._failures = item.session.testsfailed
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before, targets = Open.now(), _targets()
        try:
            return (yield)
        finally:
            if fixturedef.scope in ("module", "class"):
                self._names.add(fixturedef.argname)
                self._shared[fixturedef] = fixturedef.argname
                fixturedef.addfinalizer(lambda: self._shared.pop(fixturedef, None))
            else:
                self._before.allow(before, Open.now())
                # Of a descriptor that was closed meanwhile, another one may have the number.
                self._before.descriptors |= {
                    number for number, target in _targets().items() if targets.get(number) != target
                }

    # First, so that the fixtures have ended.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        result = yield
        # The events of this test belong to its own log, not to that of the next one.
        observers.flush(PATIENCE)
        if self._shared:
            return result
        vars(item).get("funcargs", {}).clear()
        # Celery keeps the app that was made last, and the functions of shared tasks, which it would
        # give to the apps of later tests: another task of the same name would not be registered.
        _TLS.current_app = self._current_app
        shared_task_finalizers().intersection_update(self._finalizers)
        # The traceback of a failure refers to the variables of its test, too.
        if self._failures != item.session.testsfailed:
            return result
        now = Open.now()
        if not self._before.left(now):
            self._after = now
            return result
        if left := self._before.wait_until_nothing_is_left(partial(_forget_errors, item.config)):
            names = ", ".join(sorted(self._names))
            tests = f"this test, or one before it with {names}," if names else "this test"
            pytest.fail(f"{tests} has left {', '.join(left)}", pytrace=False)
        return result


def _forget_errors(config: pytest.Config) -> None:
    """Forget the errors since the test: in the log of its fixtures' ends, and those of destructors.

    pytest does at the next test. Their tracebacks refer to the variables of the test.
    """
    logging: Any = config.pluginmanager.get_plugin("logging-plugin")
    if logging is not None:
        logging.caplog_handler.reset()
        logging.report_handler.reset()
    destructors: Any = config.pluginmanager.get_plugin("unraisableexception")
    if hasattr(destructors, "collect_unraisable"):  # since pytest 8.4
        destructors.collect_unraisable(config)


def pytest_configure(config: pytest.Config) -> None:
    """Register the check."""
    config.pluginmanager.register(_Check(), "leftovers")
