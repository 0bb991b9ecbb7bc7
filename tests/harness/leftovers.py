"""What a test leaves behind in its own process: threads, child processes, descriptors.

A test is compared with its beginning; what a fixture of a wider scope has opened in its setup may
stay. While a fixture of a module or class is in use, which opens connections when they are first
needed, all tests of the module are compared together, after that fixture has ended. What ends by
itself is waited for, and what the garbage collector or kombu's pools keep is given up first.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
from kombu import pools

#: Seconds. Only a test that leaves something waits that long.
PATIENCE = 10.0
_LOOK = 0.02
# The threads of observers: for the life of a process, whatever apps it has.
_OF_THE_PROCESS = ("singleton-log", "singleton-receivers", "singleton-sink")


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
        threads = {
            thread
            for thread in threading.enumerate()
            # Native threads get a stand-in, which outlives them, when they first log something.
            if not isinstance(thread, threading._DummyThread)
            and not thread.name.startswith(_OF_THE_PROCESS)
        }
        return cls(threads, _children(), _descriptors())

    def allow(self, before: Open, after: Open) -> None:
        """Add what was opened between ``before`` and ``after``."""
        self.threads |= after.threads - before.threads
        self.children |= after.children - before.children
        self.descriptors |= after.descriptors - before.descriptors

    def left(self) -> list[str]:
        """What is open now and was not then, in words."""
        now = Open.now()
        left = [f"thread {thread.name!r}" for thread in now.threads - self.threads]
        left += [f"child process {_command(pid)}" for pid in now.children - self.children]
        # One that is closed may have been opened again: a client that has connected again.
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


# The beginning of the test, and that of the module's tests.
_test, _module = Open(), Open()
# The fixtures of modules and classes that are in use.
_shared: set[Any] = set()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Any:
    """Allow what a fixture of a wider scope than a test opens."""
    if fixturedef.scope == "function" or fixturedef.argname.startswith("_leaves_nothing"):
        return (yield)
    before = Open.now()
    try:
        return (yield)
    finally:
        after = Open.now()
        _test.allow(before, after)
        if fixturedef.scope in ("module", "class"):
            _shared.add(fixturedef)
            fixturedef.addfinalizer(lambda: _shared.discard(fixturedef))
        else:
            _module.allow(before, after)


@pytest.fixture(scope="module", autouse=True)
def _leaves_nothing_of_the_module(request: pytest.FixtureRequest) -> Iterator[None]:
    global _module
    _module, failures = Open.now(), request.session.testsfailed
    yield
    # The traceback of a failure keeps what its test has opened.
    if failures == request.session.testsfailed and (left := _module.wait_until_nothing_is_left()):
        pytest.fail("the tests of this module have left " + ", ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def _leaves_nothing_of_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    global _test
    _test, failures = Open.now(), request.session.testsfailed
    yield
    if _shared or failures != request.session.testsfailed:
        return
    if left := _test.wait_until_nothing_is_left():
        pytest.fail("this test has left " + ", ".join(left), pytrace=False)
