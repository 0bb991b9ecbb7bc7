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
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
from celery import _state
from kombu import pools

from celery_singleton_lock.core import observers

# Private, and not in the stubs.
_TLS: Any = vars(_state)["_tls"]
_FINALIZERS: set[object] = vars(_state)["_on_app_finalizers"]
#: Seconds. Only a test that leaves something waits that long.
PATIENCE = 10.0
_LOOK = 0.02
# A thread of this library that ends with no app: it closes idle connections once a minute, and ends
# when it next looks for its store.
_ENDLESS = "singleton-idle"


@dataclass
class Open:
    """What is open in this process."""

    threads: set[threading.Thread] = field(default_factory=set)
    children: set[int] = field(default_factory=set)
    #: By number and target. Sockets and pipes have an inode of their own in their target.
    descriptors: set[tuple[int, str]] = field(default_factory=set)

    @classmethod
    def now(cls) -> Open:
        """What is open now."""
        return cls(_threads(), _children(), _descriptors())

    def allow(self, before: Open, after: Open) -> None:
        """Add what was opened between ``before`` and ``after``."""
        self.threads |= after.threads - before.threads
        self.children |= after.children - before.children
        self.descriptors |= after.descriptors - before.descriptors

    def left(self) -> list[str]:
        """What is open now and was not then, in words."""
        now = Open.now()
        left = [f"thread {thread.name!r}" for thread in now.threads - self.threads]
        # One that has ended may have been started again: a server of a fixture that others share.
        if len(now.children) > len(self.children):
            left += [f"child process {_command(pid)}" for pid in now.children - self.children]
        # In the same way, a client may have connected again.
        if len(now.descriptors) > len(self.descriptors):
            left += [
                f"descriptor {number}: {_described(number, target)}"
                for number, target in sorted(now.descriptors - self.descriptors)
            ]
        return left

    def wait_until_nothing_is_left(self) -> list[str]:
        """Wait for threads that end, and collect garbage; what is left then."""
        if not self.left():
            return []
        pools.reset()  # kombu keeps the connections of each broker for the life of the process
        until = time.monotonic() + PATIENCE
        while True:
            gc.collect()
            if not (left := self.left()) or time.monotonic() > until:
                return left
            time.sleep(_LOOK)


def _threads() -> set[threading.Thread]:
    # The thread of an observer is there for the life of a process, and the one that watches it ends
    # some seconds after its last event.
    of_observers = {observer.thread for observer in observers._observers}
    watching = {f"{observer._name}-watch" for observer in observers._observers}
    return {
        thread
        for thread in threading.enumerate()
        # Native threads get a stand-in, which outlives them, when they first log something.
        if not isinstance(thread, threading._DummyThread)
        and not thread.name.startswith(_ENDLESS)
        and thread.ident not in of_observers
        and thread.name not in watching
    }


def _children() -> set[int]:
    found: set[int] = set()
    for child in psutil.Process().children():
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found.add(child.pid)
        except psutil.NoSuchProcess:
            pass
    return found


def _descriptors() -> set[tuple[int, str]]:
    found: set[tuple[int, str]] = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:
            pass  # closed meanwhile, as the descriptor that has listed them
    return found


def _command(pid: int) -> str:
    try:
        return f"{pid}: {' '.join(psutil.Process(pid).cmdline())[:200]}"
    except psutil.Error:
        return str(pid)


def _described(number: int, target: str) -> str:
    """The addresses of a socket, else the target."""
    if not target.startswith("socket:"):
        return target
    try:
        with socket.socket(fileno=os.dup(number)) as copy:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return f"socket, listens at {copy.getsockname()}"
            return f"socket {copy.getsockname()} to {copy.getpeername()}"
    except OSError as exc:
        return f"{target}, {exc.strerror}"


class _Check:
    """Compares what is open after a test with what was open before it."""

    def __init__(self) -> None:
        self._before = Open()
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
            self._before, self._names = Open.now(), set()
            self._current_app, self._finalizers = _TLS.current_app, set(_FINALIZERS)
            self._failures = item.session.testsfailed
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before = Open.now()
        try:
            return (yield)
        finally:
            if fixturedef.scope in ("module", "class"):
                self._names.add(fixturedef.argname)
                self._shared[fixturedef] = fixturedef.argname
                fixturedef.addfinalizer(lambda: self._shared.pop(fixturedef, None))
            else:
                self._before.allow(before, Open.now())

    # First, so that the fixtures have ended and pytest has forgotten the records of the log, whose
    # tracebacks refer to the variables of the test.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        result = yield
        # The traceback of a failure refers to the variables of its test, too.
        if self._shared or self._failures != item.session.testsfailed:
            return result
        vars(item).get("funcargs", {}).clear()
        # Celery keeps the app that was made last, and the functions of shared tasks.
        _TLS.current_app = self._current_app
        if self._before.left():
            _FINALIZERS.intersection_update(self._finalizers)
        if left := self._before.wait_until_nothing_is_left():
            names = ", ".join(sorted(self._names))
            tests = f"this test, or one before it with {names}," if names else "this test"
            pytest.fail(f"{tests} has left {', '.join(left)}", pytrace=False)
        return result


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of the command line."""
    text = "fail a test that leaves a thread, a child process or a descriptor behind"
    parser.addoption("--leftovers", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the check, if it is asked for."""
    if config.getoption("leftovers"):
        config.pluginmanager.register(_Check(), "leftovers")
