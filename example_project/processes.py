"""The processes of one run: two workers and two beats.

Each has a process group of its own, so that it can be killed with all its children at once,
and so that nothing outlives the demo.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from example_project.beats import BEATS
from example_project.journal import Journal, What
from example_project.private_server import tied_to_parent

WORKERS = ("worker-1", "worker-2")

#: Processes of one worker. Enough for the unlocked run, which runs everything that the lock would
#: skip.
CONCURRENCY = 8

#: Seconds a worker gets to end by itself; by then the demo has seen all its jobs end.
STOP_SECONDS = 5


class Processes:
    def __init__(self, *, redis_url: str, prefix: str, directory: Path, locked: bool) -> None:
        self._directory = directory
        self._locked = locked
        self._journal = Journal(directory / "journal.jsonl")
        self._environment = os.environ | {
            "EXAMPLE_LOCK": "on" if locked else "off",
            "EXAMPLE_REDIS_URL": redis_url,
            "EXAMPLE_PREFIX": prefix,
            "EXAMPLE_DIR": str(directory),
        }
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._names: dict[int, str] = {}

    def start(self, name: str) -> None:
        """Start a worker or a beat, for the first time or again."""
        if name in BEATS:
            self._start_beat(name)
        else:
            self._start_worker(name)

    def _start_worker(self, name: str) -> None:
        options = [
            "--hostname",
            f"{name}@demo",
            "--concurrency",
            str(CONCURRENCY),
            "--loglevel",
            "INFO",
        ]
        # Gossip and mingle are for clusters; without them a worker starts a second earlier.
        self._spawn(name, "worker", *options, "--without-gossip", "--without-mingle")

    def _start_beat(self, name: str) -> None:
        # Two beats can't share one schedule file. A run is due every second: the default loop
        # would sleep too long when a run comes late.
        file = str(self._directory / f"{name}-schedule")
        options = ["--schedule", file, "--max-interval", "1", "--loglevel", "INFO"]
        if self._locked:
            options += ["--scheduler", "singleton"]
        self._spawn(name, "beat", *options)

    def alive(self, name: str) -> bool:
        process = self._running.get(name)
        return process is not None and process.poll() is None

    def name_of(self, pid: int) -> str:
        """The name of the process that runs as `pid` or did so; empty for a stranger."""
        return self._names.get(pid, "")

    def freeze(self, name: str) -> None:
        """Stop a process and its children, until they are killed or thawed."""
        pid = self._running[name].pid
        os.killpg(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self, name: str) -> None:
        os.killpg(self._running[name].pid, signal.SIGCONT)

    def kill(self, name: str) -> None:
        """SIGKILL a process and its children: power cut, out of memory, a node that went away."""
        process = self._running.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # Written only now that it is dead: nothing of it runs after this line's time.
        self._journal.write(What.KILL, worker=name)

    def stop(self, *names: str) -> None:
        """Ask all to end, then wait; what stays is killed."""
        stopping = [
            self._running.pop(name)
            for name in names or tuple(self._running)
            if name in self._running
        ]
        for process in stopping:
            process.terminate()
        for process in stopping:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            _kill_group(process)

    def _spawn(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "celery", "--app", "example_project.app", *arguments]
        with (self._directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                tied_to_parent(command),
                env=self._environment | {"EXAMPLE_NAME": name},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running[name] = process
        self._names[process.pid] = name


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # the usual case: all of the group ended by themselves
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def started(processes: Processes) -> Iterator[Processes]:
    """Workers and beats are gone when this ends, however it ends."""
    try:
        for name in WORKERS:
            processes.start(name)
        yield processes
    finally:
        processes.stop()
