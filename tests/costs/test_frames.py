"""The way of a task through the project's code, in function calls: it stays short and shallow."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

import celery_singleton_lock
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.task.run import TaskRun
from celery_singleton_lock.worker.shared_memory import SharedMemory
from tests.costs.site import Site, open_site

MOST_FRAMES: Final = 90
MOST_DEEP: Final = 10
MOST_MODULES: Final = 23
_TIMES: Final = 5

_PACKAGE: Final = str(Path(celery_singleton_lock.__file__).parent) + "/"
_AT_THE_SOCKET: Final = {"send", "sendall", "sendmsg", "recv", "recv_into"}


@dataclass(slots=True)
class Calls:
    """What was called of the project, counted by a profile function."""

    #: Depth among the project's frames, and function, in the order of the calls.
    entered: list[tuple[int, str]] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    depth: int = 0
    deepest_at_socket: int = 0

    def __call__(self, frame: FrameType, event: str, what: Any) -> None:
        if event == "c_call":
            if what.__name__ in _AT_THE_SOCKET and isinstance(what.__self__, socket.socket):
                self.deepest_at_socket = max(self.deepest_at_socket, self.depth)
            return
        code = frame.f_code
        if event.startswith("c_") or not code.co_filename.startswith(_PACKAGE):
            return
        if event == "return":
            self.depth -= 1
            return
        module = code.co_filename.removeprefix(_PACKAGE)
        self.entered.append((self.depth, f"{module} {code.co_qualname}"))
        self.modules.add(module)
        self.depth += 1

    def tree(self) -> str:
        return "\n".join("  " * depth + name for depth, name in self.entered)


def calls_of(site: Site) -> Calls:
    """The calls of one task that does nothing, in a process that has run others."""
    # The least of several: the reply to the release of the task before comes with that to the
    # acquire, or alone, by chance.
    return min((_calls_of(site) for _ in range(_TIMES)), key=lambda found: len(found.entered))


def _calls_of(site: Site) -> Calls:
    found = Calls()
    sys.setprofile(found)
    try:
        site.run(site.ours)
    finally:
        sys.setprofile(None)
    assert found.depth == 0
    return found


def check(found: Calls) -> None:
    numbers = f"{len(found.entered)} frames, {found.deepest_at_socket} deep at the socket, "
    numbers += f"{len(found.modules)} modules"
    print(numbers)
    assert found.deepest_at_socket > 0, "it asked no store"
    assert len(found.entered) <= MOST_FRAMES, f"{numbers}:\n{found.tree()}"
    assert found.deepest_at_socket <= MOST_DEEP, f"{numbers}:\n{found.tree()}"
    assert len(found.modules) <= MOST_MODULES, f"{numbers}: {sorted(found.modules)}"


@pytest.fixture
def child(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A site in a process that notes its leases for a parent, as a prefork child does."""
    memory = SharedMemory()
    monkeypatch.setattr(Runtime, "lease_notes", memory)
    with open_site(redis_url) as site:
        yield site


def test_a_task_takes_few_frames_and_few_modules(child: Site) -> None:
    check(calls_of(child))


def test_a_task_that_is_passed_through_many_hands_does_not_pass(
    child: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of the project that calls itself, as pass-through methods would."""
    of = TaskRun.__init__

    def begin(self: TaskRun, task: Any, request: Any) -> None:
        for _ in range(MOST_FRAMES):
            task.singleton_policy()
        of(self, task, request)

    monkeypatch.setattr(TaskRun, "__init__", begin)
    with pytest.raises(AssertionError, match="frames"):
        check(calls_of(child))
