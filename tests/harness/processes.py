"""A child process of a test: its log as something to wait for, its signals, its end.

Every process gets a process group of its own and is tied to the test's process, so that nothing
outlives a test run. Only what was started here is ever signalled, by its id.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from celery_singleton_lock.core.events import EventName
from example_project.private_server import tied_to_parent
from tests.harness.log import LoggedEvent, events_in, read_event

_Found = TypeVar("_Found")

#: The root of the repository; processes start here, so that `tests.apps` can be imported.
ROOT = Path(__file__).resolve().parents[2]

#: Seconds. Workers start in 1.5; the rest is for a loaded machine with two cores.
TIMEOUT = 60.0

#: Seconds between two looks at a condition that nothing announces (the state of a process).
POLL = 0.01


class Process:
    """One child process, not yet started.

    Args:
        command: Program and arguments.
        env: Added to the environment of the test; None as a value takes the name out.
        name: For error messages; the program's name when it is not given.
        cwd: The directory it starts in.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str | None] | None = None,
        name: str | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self.command = list(command)
        self.name = name or Path(command[0]).name
        self._env = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        self._cwd = cwd
        self._popen: subprocess.Popen[str] | None = None
        self._lines: list[str] = []
        self._log_closed = False
        self._is_gone = False
        # Guards the two above: written by the reader thread, waited on by the test.
        self._news = threading.Condition()

    def start(self) -> Self:
        """Start it and return at once; `wait_for_log` waits until it has come somewhere."""
        self._popen = self._launch(tied_to_parent(self.command))
        name = reader_of(self.pid)
        threading.Thread(target=self._read, args=(self._popen,), name=name, daemon=True).start()
        return self

    @property
    def pid(self) -> int:
        """The process id; also the id of its process group."""
        return self._started().pid

    @property
    def alive(self) -> bool:
        """Whether it runs (or is stopped by SIGSTOP)."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def exit_status(self) -> int | None:
        """None while it runs; the negative signal number if a signal ended it."""
        return self._started().poll()

    @property
    def lines(self) -> list[str]:
        """The lines of its standard output and error so far."""
        with self._news:
            return list(self._lines)

    @property
    def log(self) -> str:
        """`lines` as one text."""
        return "\n".join(self.lines)

    def wait_for_log(
        self, pattern: str | re.Pattern[str], *, timeout: float = TIMEOUT, since: int = 0
    ) -> re.Match[str]:
        """Wait for a line that matches, past or future.

        Args:
            pattern: A regular expression, searched in each line.
            timeout: Seconds.
            since: Skip this many lines, as ``since=len(process.lines)`` before the cause.

        Raises:
            AssertionError: The process ended or the time is over without such a line.
        """
        expression = re.compile(pattern)
        return self._wait_for(
            expression.search, f"no line like {expression.pattern!r}", timeout, since
        )

    def wait_for_event(
        self,
        *names: EventName,
        task_id: str | None = None,
        timeout: float = TIMEOUT,
        since: int = 0,
        **fields: Any,
    ) -> LoggedEvent:
        """Wait for the log line of an event of these names, past or future.

        Args:
            names: The events, any of which will do.
            task_id: Of this task only.
            timeout: Seconds.
            since: As for `wait_for_log`.
            **fields: What the event's fields are (`LoggedEvent.has`).

        Raises:
            AssertionError: As for `wait_for_log`.
        """

        def find(line: str) -> LoggedEvent | None:
            event = read_event(line)
            if event is None or event.name not in names or not event.has(**fields):
                return None
            return event if task_id in (None, event.task_id) else None

        what = f"no event {', '.join(names)} of {task_id or 'any task'} with {fields}"
        return self._wait_for(find, what, timeout, since)

    def events(self, *names: EventName, **fields: Any) -> list[LoggedEvent]:
        """The events in its log so far: of these names, and with these fields."""
        return [*events_in(self.lines, *names, **fields)]

    def _wait_for(
        self, find: Callable[[str], _Found | None], what: str, timeout: float, since: int
    ) -> _Found:
        deadline = time.monotonic() + timeout
        seen = since
        with self._news:
            while True:
                for line in self._lines[seen:]:
                    if found := find(line):
                        return found
                seen = max(since, len(self._lines))
                left = deadline - time.monotonic()
                if self._log_closed or left <= 0:
                    why = "its log ended" if self._log_closed else f"{timeout:g} s are over"
                    break
                self._news.wait(left)
        raise AssertionError(f"{self.name}: {what}, {why}:\n{self.tail()}")

    def wait(self, timeout: float = TIMEOUT) -> int:
        """Wait until it ended and its log is read; returns the exit status as `exit_status` does.

        What its children, if it leaves any, go on to say comes later.
        """
        try:
            status = self._started().wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} (pid {self.pid}) still runs after {timeout:g} s:\n{self.tail()}"
            ) from None
        self._wait_for_the_end_of_its_log()
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself, not to its children."""
        self._started().send_signal(number)

    def terminate(self) -> None:
        """SIGTERM; a Celery worker then finishes what it runs (warm shutdown)."""
        self.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """SIGSTOP: the process stands still until `cont`."""
        self.send_signal(signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT: undo `stop`."""
        self.send_signal(signal.SIGCONT)

    def kill(self) -> float:
        """SIGKILL the process alone and wait until it is dead; its children go on for a while.

        Returns:
            CLOCK_MONOTONIC just before the signal, in seconds, as `overlaps` takes it.
        """
        at = time.monotonic()
        self._started().kill()
        self.wait()
        return at

    def kill_group(self) -> float:
        """SIGKILL the process and all its children at once: a power cut. Returns as `kill`."""
        at = time.monotonic()
        if self._is_gone:
            return at  # its id may be another process's by now
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        _wait_until(lambda: not self.group(), f"the group of {self.name} is gone")
        self._is_gone = True
        return at

    def end(self, timeout: float = 10.0) -> None:
        """Whatever state it is in: ask it to end, then kill what is left. For teardowns."""
        if self._popen is None:
            return
        if self.alive:
            self.cont()
            self.terminate()
            with suppress(AssertionError):
                self.wait(timeout)
        self.kill_group()

    def children(self) -> list[int]:
        """The process ids of its living children, sorted; of a prefork worker: the pool."""
        with suppress(psutil.NoSuchProcess):
            return sorted(
                child.pid
                for child in psutil.Process(self.pid).children()
                if child.status() != psutil.STATUS_ZOMBIE
            )
        return []

    def group(self) -> list[int]:
        """All living processes of its group, orphans of a killed parent too."""
        if self._is_gone:
            return []
        return [pid for pid in psutil.pids() if _group_of(pid) == self.pid and is_running(pid)]

    def number_of(self, pid: int) -> int:
        """What a process of its group is called where names are unique over several hosts."""
        return pid

    def assert_none_left(self, timeout: float = 5.0) -> None:
        """Fail unless the process and everything it started is gone within ``timeout`` seconds."""
        _wait_until(lambda: not self.group(), f"no process of {self.name} is left", timeout)

    def tail(self, count: int = 60) -> str:
        """The last lines of the log, for error messages."""
        return "\n".join(self.lines[-count:])

    def _launch(self, command: Sequence[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            env={name: value for name, value in self._env.items() if value is not None},
            cwd=self._cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def _started(self) -> subprocess.Popen[str]:
        if self._popen is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._popen

    def _wait_for_the_end_of_its_log(self) -> None:
        # The reader thread may be lines behind a process that is dead: without this, a test that
        # looks for its last line would race against that thread.
        deadline = time.monotonic() + TIMEOUT
        with self._news:
            while not (self._log_closed or self.group() or time.monotonic() > deadline):
                self._news.wait(10 * POLL)

    def _read(self, popen: subprocess.Popen[str]) -> None:
        # The reader thread. It ends when the last process that has the pipe open is gone.
        assert popen.stdout is not None
        with popen.stdout as stream:
            for line in stream:
                with self._news:
                    self._lines.append(line.rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._log_closed = True
            self._news.notify_all()


def reader_of(pid: int) -> str:
    """The name of the thread that reads what a `Process` prints."""
    return f"output-of-{pid}"


def is_running(pid: int) -> bool:
    """Whether a process exists and executes; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill_process(pid: int) -> float:
    """SIGKILL one process, as a pool child, and wait until it is dead.

    Returns:
        CLOCK_MONOTONIC just before the signal, in seconds, as `overlaps` takes it.
    """
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    _wait_until(lambda: not is_running(pid), f"process {pid} is dead")
    return at


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _wait_until(condition: Callable[[], bool], what: str, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:g} s without success until {what}")
        time.sleep(POLL)
