"""A server that answers BUSY: it runs a script that does not end by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import redis

from tests.harness.deliveries import wait_until

# Milliseconds after which a server that runs a script answers other requests, with BUSY.
_THRESHOLD_MS = 10


@contextmanager
def busy(connect: Callable[[], redis.Redis]) -> Iterator[None]:
    """Let the server to which ``connect()`` leads answer BUSY to all but a few commands."""
    with connect() as client, connect() as running:
        raw: Any = client
        raw.config_set("lua-time-limit", _THRESHOLD_MS)

        def run() -> None:
            with suppress(redis.exceptions.RedisError):  # SCRIPT KILL, or a timeout
                running.eval("while true do end", 0)

        def answers_busy() -> bool:
            try:
                raw.ping()
            except redis.exceptions.ResponseError as exc:
                return str(exc).startswith("BUSY")
            return False

        thread = threading.Thread(target=run)
        thread.start()
        try:
            wait_until(answers_busy, "the server is busy")
            yield
        finally:
            raw.script_kill()
            thread.join()
