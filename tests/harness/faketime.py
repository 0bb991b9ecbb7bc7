"""A Redis-compatible server whose clock is off, by libfaketime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from example_project.private_server import PrivateServer, ServerNotFound, find_valkey
from tests.conftest import missing


def find_libfaketime() -> Path | None:
    """The library that is preloaded; None where it isn't installed."""
    for directory in ("/usr/lib", "/usr/lib64"):
        for found in sorted(Path(directory).glob("**/faketime/libfaketime.so.1")):
            return found
    return None


@contextmanager
def server_with_clock(offset: str, arguments: Sequence[str] = ()) -> Iterator[PrivateServer]:
    """A server that is ``offset`` (as ``+30s``) off; durations are as they are.

    A Valkey: Debian's redis-server aborts under that library, for its allocator asks for the time.
    """
    library = find_libfaketime()
    if library is None:
        missing("libfaketime is not installed. Debian: apt-get install libfaketime")
    try:
        binary = find_valkey()
    except ServerNotFound as error:
        missing(str(error))
    server = PrivateServer(binary=binary, arguments=arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("FAKETIME", offset)
        patch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        server.start()
    with server:
        yield server
